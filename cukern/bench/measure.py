"""Measures every version of an op and its peers in one pass at one shape."""

import dataclasses
import gc
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from cukern.bench import environment, timing
from cukern.bench.calls import Function, arguments, backward, draw_douts, leaves_of, wanted_inputs
from cukern.bench.peers import names as peer_names
from cukern.bench.peers import peers
from cukern.bench.verify import candidates, errors
from cukern.runtime.registry import Case, Cost, Tensors

MOST_SETS = 256  # of inputs and outputs; tiny shapes would need thousands to exceed the L2 cache
BOTH = "fwd+bwd"  # a forward that records, and the gradients of all inputs
# "grad": with inputs that require grad; "bwd": torch.autograd.grad alone
HOST_PASSES = "host fwd", "host fwd grad", "host bwd"

Key = tuple[str, str]  # provider, version
Dims = Sequence[int]
# the versions and peers to measure, "cukern" for all versions, "copy"; None: all
Only = Collection[str] | None
_COPY: Key = ("copy", "")


@dataclass(frozen=True)
class Row:
    """One line of a table and of the record. Bytes and flops are per call, 0 for host times. `of_limit`: for
    a memory-bound op the time of a copy divided by the time, else TFLOP/s divided by the peak. `error`: see
    verify.errors. `peak_mib`: the most memory of tensors."""

    op: str
    version: str
    pass_: str
    shape: tuple[int, ...]
    dtype: str
    provider: str
    median_us: float
    iqr_us: float
    bytes: int = 0
    flops: int = 0
    of_limit: float | None = None
    error: float | None = None
    peak_mib: float | None = None

    @property
    def key(self) -> tuple[str, str, str, tuple[int, ...], str, str]:
        """Identifies what was measured."""
        return self.op, self.version, self.pass_, self.shape, self.dtype, self.provider

    @property
    def name(self) -> str:
        return f"{self.provider} {self.version}".strip()

    @property
    def tbps(self) -> float | None:
        return self.bytes / self.median_us * 1e-6 if self.bytes else None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.median_us * 1e-6 if self.flops else None


@dataclass(frozen=True)
class Table:
    """The rows of one pass, shape and dtype. `missing`: by provider, the reason why it was not measured.
    `notes`: remarks by provider."""

    rows: list[Row]
    missing: dict[str, str]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def passes(case: Case, dims: Dims, dtype: torch.dtype, wanted: Collection[str] | None) -> list[str]:
    """The passes of `case` to time: those wanted, by default all but BOTH. Raises ValueError for an unknown
    pass."""
    default = list(case.cost(dims, dtype.itemsize))
    known = [*default, BOTH]
    for name in wanted or ():
        if name not in known:
            raise ValueError(f"{case.name} has no pass {name!r}; it has {', '.join(known)}")
    return [p for p in known if p in (wanted or default)]


def providers(case: Case, device: torch.device, only: Only) -> tuple[dict[Key, Function], dict[str, str]]:
    """Versions and peers that run on this device, and the reason for each of the others."""
    known = ["cukern", *case.op.versions, *peer_names(case), "copy"]
    for name in only or ():
        if name not in known:
            raise ValueError(f"there is no {name!r} to measure for {case.name}; there are {', '.join(known)}")
    versions, refused = candidates(case, device)
    others, missing = peers(case, device, only)
    ours = {("cukern", v): f for v, f in versions.items() if only is None or {"cukern", v} & set(only)}
    refused = {v: why for v, why in refused.items() if only is None or {"cukern", v} & set(only)}
    return {**ours, **{(name, ""): f for name, f in others.items()}}, {**refused, **missing}


def measure(
    case: Case, dims: Dims, dtype: torch.dtype, pass_: str, device: torch.device, only: Only = None,
    budget_s: float = 3.0, tf32: bool = False,
) -> Table:  # fmt: skip
    """Time one pass of every provider, in alternation, for about `budget_s` seconds. `tf32`: float32 products
    use TF32."""
    functions, missing = providers(case, device, only)
    cost = _cost(case, dims, dtype, pass_)
    sets = input_sets(cost.bytes, device)
    with environment.float32_products(tf32), timing.side_stream(device):
        wrong = _errors(case, dims, dtype, pass_, device, functions)
        calls = _calls(case, pass_, functions, [case.make(dims, dtype, device) for _ in range(sets)], missing)
        if case.bound == "memory" and device.type == "cuda":  # the reference for of_limit
            calls[_COPY] = copies(cost.bytes, sets, device)
        times, failed = timing.device_times(calls, device, budget_s)
        calls.clear()
    for (provider, _), error in failed.items():
        note_failure(provider, error, missing)
    kind = "tf32" if tf32 else name_of(dtype)
    peak = environment.peak_flops(device, dtype, tf32)
    copy_us = times[_COPY].median_us if _COPY in times else None
    rows = []
    for (provider, version), t in times.items():
        flops = 0 if provider == "copy" else cost.flops
        row = Row(
            case.name, version, pass_, tuple(dims), kind, provider, t.median_us, t.iqr_us, cost.bytes, flops
        )
        rows.append(
            dataclasses.replace(
                row,
                of_limit=_of_limit(row, case, copy_us, peak),
                error=(wrong or {}).get((provider, version)),
            )
        )
    notes = (
        {} if wrong is not None else {"errors": "the float64 reference does not fit in memory at these sizes"}
    )
    if sets == MOST_SETS:
        notes["all"] = f"{sets} input sets fit in the L2 cache: a call may find its data there"
    return Table(rows, missing, notes | {" ".join(key).strip(): t.note for key, t in times.items() if t.note})


def input_sets(bytes_: int, device: torch.device) -> int:
    """How many sets of inputs exceed the L2 cache together. `bytes_`: what one call moves."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return min(max(math.ceil(2 * l2_bytes / max(bytes_, 1)), 1), MOST_SETS)


def _errors(
    case: Case,
    dims: Dims,
    dtype: torch.dtype,
    pass_: str,
    device: torch.device,
    functions: dict[Key, Function],
) -> dict[Key, float] | None:
    """verify.errors, or None if memory does not suffice for the reference."""
    try:
        return errors(case, case.make(dims, dtype, device), functions, pass_)
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # the error's traceback, and the tensors that it holds
    torch.cuda.empty_cache()
    return None


def _cost(case: Case, dims: Dims, dtype: torch.dtype, pass_: str) -> Cost:
    costs = case.cost(dims, dtype.itemsize)
    if pass_ != BOTH:
        return costs[pass_]
    return Cost(costs["fwd"].bytes + costs["bwd"].bytes, costs["fwd"].flops + costs["bwd"].flops)


def _of_limit(row: Row, case: Case, copy_us: float | None, peak: float | None) -> float | None:
    if case.bound == "memory":
        return copy_us / row.median_us if copy_us else None
    return row.tflops * 1e12 / peak if peak and row.tflops else None


def note_failure(provider: str, error: Exception, missing: dict[str, str]) -> None:
    """Raise an error of cukern; list the reason why another provider is missing."""
    if provider == "cukern":
        raise error
    missing[provider] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def measure_host(
    case: Case, dims: Dims, dtype: torch.dtype, device: torch.device, only: Only = None
) -> list[Table]:
    """Host times of a call, without and with inputs that require grad, and of its backward."""
    tables = []
    drawn = case.make(dims, dtype, device)
    wanted = wanted_inputs(case, "bwd", drawn)
    for pass_ in HOST_PASSES if wanted else HOST_PASSES[:1]:
        functions, missing = providers(case, device, only)
        default = next((key for key in reversed(functions) if key[0] == "cukern"), None)
        if default:
            functions[default] = case.call  # as users call it; the keyword `version` costs host time
        calls = _host_calls(
            functions, arguments(case, leaves_of(drawn, () if pass_ == "host fwd" else wanted)), missing
        )
        if pass_ == "host bwd":
            calls = {
                key: call
                for key, (call,) in _calls(
                    case, "bwd", {key: functions[key] for key in calls}, [drawn], missing
                ).items()
            }
        times = timing.host_times(calls, device)
        rows = [
            Row(case.name, v, pass_, tuple(dims), name_of(dtype), p, t.median_us, t.iqr_us)
            for (p, v), t in times.items()
        ]
        tables.append(Table(rows, missing))
    return tables


def _host_calls(
    functions: dict[Key, Function], inputs: Sequence[torch.Tensor], missing: dict[str, str]
) -> dict[Key, timing.Call]:
    """The calls of the providers that can compute this op."""
    calls: dict[Key, timing.Call] = {}
    for (provider, version), function in functions.items():
        try:
            function(*inputs)
        except Exception as error:  # see timing.device_times
            note_failure(provider, error, missing)
            continue
        calls[provider, version] = partial(function, *inputs)
    return calls


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _calls(
    case: Case, pass_: str, functions: dict[Key, Function], inputs: list[Tensors], missing: dict[str, str]
) -> dict[Key, list[timing.Call]]:
    """The calls of each provider on each input set. A provider without a backward is added to `missing`."""
    if pass_ == "fwd":
        return {key: holding([partial(f, *x) for x in inputs]) for key, f in functions.items()}
    wanted = wanted_inputs(case, pass_, inputs[0])
    leaves = [leaves_of(one, wanted) for one in inputs]
    douts = [draw_douts(case, one) for one in inputs]
    calls = {}

    def prepared(function: Function, one: list[torch.Tensor], dout: Tensors) -> timing.Call:
        def forward() -> timing.Call:
            return backward(
                function(*arguments(case, one)), [one[i] for i in wanted], dout, again=pass_ != BOTH
            )

        return (lambda: forward()()) if pass_ == BOTH else forward()

    for (provider, version), function in functions.items():
        try:
            calls[provider, version] = holding(
                [prepared(function, one, dout) for one, dout in zip(leaves, douts, strict=True)]
            )
        except Exception as error:  # see timing.device_times
            note_failure(provider, error, missing)
    return calls


def holding(calls: Sequence[timing.Call], results: deque[object] | None = None) -> list[timing.Call]:
    """Keep the result of each call until its next turn, in `results`, so that outputs rotate through memory
    like inputs."""
    results = deque(maxlen=len(calls)) if results is None else results
    return [lambda call=call: results.append(call()) for call in calls]  # type: ignore[misc]


def copies(total: int, sets: int, device: torch.device) -> list[Callable[[], object]]:
    """Copies that read and write `total` bytes together, which is the minimum for the op. The size is rounded
    down to 10 significant bits, because in a CUDA graph a large copy whose size is not a multiple of 8 KiB
    takes 1.5 times as long."""
    # at least whole cache lines, so that both halves are aligned
    unit = 1 << max((total // 8).bit_length() - 10, 5)
    floats = max(total // 8 // unit * unit, unit)
    pairs = [torch.randn(2, floats, dtype=torch.float32, device=device) for _ in range(sets)]
    return [lambda dst=pair[0], src=pair[1]: dst.copy_(src) for pair in pairs]  # type: ignore[misc]
