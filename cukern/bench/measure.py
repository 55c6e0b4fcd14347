"""Tables of measurements: every version of an op and its peers, in one pass, at one shape."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from cukern.bench import environment, timing
from cukern.bench.calls import Function, arguments, backward, draw_douts, leaves_of, wanted_inputs
from cukern.bench.peers import names as peer_names
from cukern.bench.peers import peers
from cukern.bench.verify import candidates, errors
from cukern.runtime.registry import Cost, Op

MOST_SETS = 256  # of inputs; a tiny shape would need thousands to outgrow the L2 cache
HOST_PASSES = {"host fwd": False, "host fwd grad": True}  # whether the inputs require grad

Key = tuple[str, str]  # provider, version


@dataclass(frozen=True)
class Row:
    """One line of a table and of the record. Times in microseconds; bytes and flops of one call, 0 where only host time was measured;
    `error` as in verify.errors."""

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

    @property
    def tbps(self) -> float | None:
        return self.bytes / self.median_us * 1e-6 if self.bytes else None

    @property
    def tflops(self) -> float | None:
        return self.flops / self.median_us * 1e-6 if self.flops else None


@dataclass(frozen=True)
class Table:
    """The rows of one pass, shape and dtype, which were measured in turns; what is missing, and notes on how some were measured."""

    rows: list[Row]
    missing: dict[str, str]
    notes: dict[str, str] = dataclasses.field(default_factory=dict)


def passes(op: Op, dims: Sequence[int], dtype: torch.dtype, wanted: Collection[str] | None) -> list[str]:
    """The passes of `op` to time: all that it has, or those wanted. Raises ValueError for one that it does not have."""
    known = list(op.cost(dims, dtype.itemsize))
    for name in wanted or ():
        if name not in known:
            raise ValueError(f"{op.name} has no pass {name!r}; it has {', '.join(known)}")
    return [p for p in known if not wanted or p in wanted]


def providers(op: Op, device: torch.device, only: Collection[str] | None) -> tuple[dict[Key, Function], dict[str, str]]:
    """Versions and peers that run on this device, and why each of the others does not. `only` names versions, peers, "cukern" or "copy"."""
    known = ["cukern", *op.versions, *peer_names(op), "copy"]
    for name in only or ():
        if name not in known:
            raise ValueError(f"there is no {name!r} to measure for {op.name}; there are {', '.join(known)}")
    versions, refused = candidates(op, device)
    others, missing = peers(op, device, only)
    ours = {("cukern", v): f for v, f in versions.items() if only is None or {"cukern", v} & set(only)}
    refused = {v: why for v, why in refused.items() if only is None or {"cukern", v} & set(only)}
    return {**ours, **{(name, ""): f for name, f in others.items()}}, {**refused, **missing}


def measure(
    op: Op,
    dims: Sequence[int],
    dtype: torch.dtype,
    pass_: str,
    device: torch.device,
    only: Collection[str] | None = None,
    budget_s: float = 3.0,
    tf32: bool = False,
) -> Table:
    """Time one pass of every provider, in turns, for about `budget_s` seconds. `tf32`: float32 products in TF32, and rows that say so."""
    functions, missing = providers(op, device, only)
    cost = op.cost(dims, dtype.itemsize)[pass_]
    sets, notes = _sets(cost, device), {}
    if sets == MOST_SETS:
        notes["all"] = f"{sets} sets of inputs fit in the L2 cache: a call may find its data there"
    with environment.float32_products(tf32), timing.side_stream(device):
        wrong = errors(op, op.make(dims, dtype, device), functions, pass_)
        calls = _calls(op, dims, dtype, pass_, device, functions, sets, missing)
        if op.bound == "memory" and device.type == "cuda":  # the yardstick, whatever else is wanted
            calls["copy", ""] = copies(cost.bytes, sets, device)
        times, failed = timing.device_times({str(k): c for k, c in calls.items()}, device, budget_s)
        calls.clear()
    for key in list(functions):
        error = failed.get(str(key))
        if error is not None:
            if key[0] == "cukern":
                raise error  # ours must not fail
            missing[key[0]] = _reason(error)
    done = {key: times[str(key)] for key in (*functions, ("copy", "")) if str(key) in times}
    rows = []
    for (provider, version), t in done.items():
        work = cost.bytes, cost.flops if provider != "copy" else 0
        timed = Row(op.name, version, pass_, tuple(dims), "tf32" if tf32 else name_of(dtype), provider, t.median_us, t.iqr_us, *work)
        rows.append(dataclasses.replace(timed, error=wrong.get((provider, version))))
    notes |= {" ".join(key).strip(): t.note for key, t in done.items() if t.note}
    peak = None if tf32 else environment.peak_flops(device, dtype)
    return Table(_with_limit(rows, op, peak), missing, notes)


def measure_host(op: Op, dims: Sequence[int], dtype: torch.dtype, device: torch.device, only: Collection[str] | None = None) -> list[Table]:
    """Host time of a call, without and with inputs that require grad."""
    tables = []
    for pass_, grad in HOST_PASSES.items():
        functions, missing = providers(op, device, only)
        default = next((key for key in reversed(functions) if key[0] == "cukern"), None)
        if default:
            functions[default] = op.call  # as users call it; to name the version costs a keyword
        drawn = op.make(dims, dtype, device)
        inputs = arguments(op, leaves_of(drawn, wanted_inputs(op, "bwd", drawn) if grad else ()))
        for (provider, version), function in list(functions.items()):
            try:
                function(*inputs)
            except Exception as error:  # see timing.device_times
                if provider == "cukern":
                    raise
                missing[provider] = _reason(error)
                del functions[provider, version]
        times = timing.host_times({str(key): _bound(f, inputs) for key, f in functions.items()}, device)
        found = {key: times[str(key)] for key in functions}
        rows = [Row(op.name, v, pass_, tuple(dims), name_of(dtype), p, t.median_us, t.iqr_us) for (p, v), t in found.items()]
        tables.append(Table(rows, missing))
    return tables


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sets(cost: Cost, device: torch.device) -> int:
    """How many sets of inputs and outputs are together larger than twice the L2 cache."""
    return min(max(math.ceil(2 * environment.l2_bytes(device) / max(cost.bytes, 1)), 1), MOST_SETS)


def _bound(function: Function, inputs: Sequence[torch.Tensor]) -> timing.Call:
    return lambda: function(*inputs)


def _calls(
    op: Op,
    dims: Sequence[int],
    dtype: torch.dtype,
    pass_: str,
    device: torch.device,
    functions: dict[Key, Function],
    sets: int,
    missing: dict[str, str],
) -> dict[Key, list[timing.Call]]:
    """For each provider, its calls on each of the input sets. A provider that has no backward goes to `missing`."""
    inputs = [op.make(dims, dtype, device) for _ in range(sets)]
    if pass_ == "fwd":
        return {key: _holding([_bound(f, x) for x in inputs]) for key, f in functions.items()}
    wanted = wanted_inputs(op, pass_, inputs[0])
    leaves = [leaves_of(one, wanted) for one in inputs]
    douts = [draw_douts(op, one) for one in inputs]
    calls = {}
    for (provider, version), function in functions.items():
        try:
            graphs = [backward(function(*arguments(op, one)), [one[i] for i in wanted], d) for one, d in zip(leaves, douts, strict=True)]
            calls[provider, version] = _holding(graphs)
        except Exception as error:  # see timing.device_times
            if provider == "cukern":
                raise
            missing[provider] = _reason(error)
    return calls


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _holding(calls: Sequence[timing.Call]) -> list[timing.Call]:
    """Keep each call's result until its next turn, so that results rotate through memory as the inputs do."""
    held: dict[int, object] = {}

    def hold(i: int, call: timing.Call) -> timing.Call:
        return lambda: held.__setitem__(i, call())

    return [hold(i, call) for i, call in enumerate(calls)]


def copies(total: int, sets: int, device: torch.device) -> list[Callable[[], object]]:
    """Copies that move `total` bytes, read and written together, as many as a call of the op moves at least: rounded down to 10 binary
    digits, because in a CUDA graph the driver takes 1.5 times as long for a large copy that is no multiple of 8 KiB."""
    unit = 1 << max((total // 8).bit_length() - 10, 5)  # whole cache lines at least, so that both halves are aligned
    floats = max(total // 8 // unit * unit, unit)
    pairs = [torch.randn(2, floats, device=device) for _ in range(sets)]
    return [lambda dst=pair[0], src=pair[1]: dst.copy_(src) for pair in pairs]  # type: ignore[misc]


def _with_limit(rows: list[Row], op: Op, peak: float | None) -> list[Row]:
    """Fill of_limit: the time of the copy over one's own for a memory-bound op, TFLOP/s over the GPU's peak for a compute-bound one."""
    copy_us = next((r.median_us for r in rows if r.provider == "copy"), None)
    if op.bound == "memory":
        return [dataclasses.replace(r, of_limit=copy_us / r.median_us if copy_us else None) for r in rows]
    return [dataclasses.replace(r, of_limit=r.tflops * 1e12 / peak if peak and r.tflops else None) for r in rows]
