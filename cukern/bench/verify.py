"""Compares outputs and gradients of all versions of an op with float64, on the same inputs.

The error of a result is the largest |y - truth| / scale over its elements. Truth is the reference in float64.
Scale is the case's `magnitude`. Its default is the reference and its gradients, in float64, of the absolute
values of the inputs: |a| @ |b| for a product. The allowed error is twice that of torch's own op in the same
dtype, plus the op's `roundings` times the dtype's epsilon. Outputs of integers and bools are exact: each
element equals the reference in float64 or in the op's own dtype, and for a user's own op also one of those
with random float32 roundings, which decide ties of a quantization.
"""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cukern.bench import environment
from cukern.bench.calls import Function, draw_douts, precision, results, wanted_inputs
from cukern.runtime import checks
from cukern.runtime.device import device_of
from cukern.runtime.dispatch.error_scale import cast, exact, rounded
from cukern.runtime.dispatch.own_launch import is_own
from cukern.runtime.launch import backend
from cukern.runtime.registry import Case, Tensors

REFERENCE = "reference"  # what the public function runs without a GPU


@dataclass(frozen=True)
class _Comparison:
    """One output or gradient, such as "out" or "dx". `error` and `allowed` are relative to the scale."""

    what: str
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and math.isfinite(self.error)


@dataclass(frozen=True)
class Result(_Comparison):
    """A version compared with float64. `norm` is the 2-norm of its result."""

    version: str
    norm: float


@dataclass(frozen=True)
class Pair(_Comparison):
    """Two versions compared with each other."""

    first: str
    second: str


@dataclass(frozen=True)
class Verdict:
    """All results of one case, shape and dtype."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]

    @property
    def wrong(self) -> int:
        """The number of wrong results plus the number of pairs that differ."""
        return sum(not r.ok for r in self.results) + sum(not p.ok for p in self.pairs)


def candidates(
    case: Case, device: torch.device, version: str | None = None
) -> tuple[dict[str, Function], dict[str, str]]:
    """Calls of `case` by each version (or the given one) that this device runs, and the reason for each of
    the others.

    On the CPU, outside the simulator: the public function, and versions without kernels. Raises ValueError
    for an unknown version.
    """
    if version is not None and version not in case.op.versions:
        checks.unknown_version(case.name, version, case.op.versions)
    names = [version] if version else list(case.op.versions)
    if device.type == "cuda" or backend.simulating():
        has = _capability(device)
        least = {n: case.op.versions[n].requires for n in names}
        refused = {
            n: f"needs compute capability {needs / 10}, this GPU has {has / 10}"
            for n, needs in least.items()
            if needs > has
        }
        public = {}
    else:
        refused = {n: "there is no GPU" for n in names if not case.op.versions[n].in_torch}
        public = {} if version and not refused else {REFERENCE: case.call}
    return {**{n: partial(case.call, version=n) for n in names if n not in refused}, **public}, refused


def _capability(device: torch.device) -> int:
    return device_of(device.index if device.type == "cuda" else backend.SIMULATED).capability


def verify(
    case: Case, dims: Sequence[int], dtype: torch.dtype, functions: dict[str, Function], device: torch.device
) -> Verdict:
    """Run the functions, all of `case`'s inputs, forward and backward on the same fresh random inputs, and
    compare them."""
    inputs = case.make(dims, dtype, device)
    douts = draw_douts(case, inputs)
    outs = ["out"] if len(douts) == 1 else [f"out{i}" for i in range(len(douts))]
    names = [*outs, *(f"d{case.names(inputs)[i]}" for i in wanted_inputs(case, "bwd", inputs))]
    truth, scale = _truth(case, inputs, douts)
    with environment.float32_products():
        torchs = results(case, case.reference, inputs, douts)
    allowed = _allowed(case, inputs, douts, torchs, truth, scale)
    ties = [torchs[: len(douts)]]
    if is_own(case.name) and not all(y.is_floating_point() for y in douts):
        ties += rounded(exact(case.reference, douts), cast(inputs, torch.float64))
    ours = {}
    for version, function in functions.items():
        with poisoned():
            found = results(case, function, inputs, douts)
        ours[version] = tuple(
            _settled(y, t, [one[i] for one in ties if i < len(one)])
            for i, (y, t) in enumerate(zip(found, truth, strict=True))
        )
    compared = [
        Result(
            what,
            _error(y, t, s),
            a + _of_sequence(case, version, dims, dtype),
            version,
            float(y.double().norm()),
        )
        for version, tensors in ours.items()
        for what, y, t, s, a in zip(names, tensors, truth, scale, allowed, strict=True)
    ]
    pairs = [
        Pair(what, _error(x, y, s), 2 * a, first, second)
        for first, second in itertools.combinations(ours, 2)
        for what, x, y, s, a in zip(names, ours[first], ours[second], scale, allowed, strict=True)
    ]
    return Verdict(tuple(dims), dtype, tuple(compared), tuple(pairs))


def errors(case: Case, inputs: Tensors, functions: dict[Any, Function], pass_: str) -> dict[Any, float]:
    """For each function, the largest |y - truth| / max |truth| of its results in a pass ("fwd", "bwd" or
    "bwd:x").

    A function that fails is left out. Returns nothing for float64, because the truth is float64 too.
    """
    wanted = [] if pass_ == "fwd" else wanted_inputs(case, pass_, inputs)
    douts = draw_douts(case, inputs)
    if precision(douts, inputs) == torch.float64:
        return {}

    def run(function: Function, inputs: Tensors, douts: Tensors) -> Tensors:
        return results(case, function, inputs, douts, wanted)[len(douts) if wanted else 0 :]

    doubles = cast(douts, torch.float64)
    truth = run(_exact(case, doubles), cast(inputs, torch.float64), doubles)
    found = {}
    for name, function in functions.items():
        with contextlib.suppress(Exception):  # the measurement reports it
            pairs = zip(run(function, inputs, douts), truth, strict=True)
            found[name] = max(_error(y, t, t.double().abs().max()) if t.numel() else 0.0 for y, t in pairs)
    return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside the block, torch.empty fills its tensors with NaN, so that an element that a kernel does not
    write is found."""
    memory: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = memory.fill_uninitialized_memory
    # warn_only: cuBLAS would raise an error unless CUBLAS_WORKSPACE_CONFIG was set before CUDA started
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _truth(case: Case, inputs: Tensors, douts: Tensors) -> tuple[Tensors, Tensors]:
    """The results in float64, and their scale. A scale that is not 0 is at least the smallest normal number
    of the dtype, because torch's own error is not a useful limit for subnormal numbers."""
    doubles, exact_douts = cast(inputs, torch.float64), cast(douts, torch.float64)
    reference = _exact(case, exact_douts)
    if case.magnitude:
        scale = case.magnitude(doubles, exact_douts)
    else:
        scale = results(case, reference, [x.abs() for x in doubles], tuple(d.abs() for d in exact_douts))
    least = torch.finfo(precision(douts, inputs)).smallest_normal
    truth = results(case, reference, doubles, exact_douts)
    scale = tuple(
        s if t.is_floating_point() else torch.ones_like(t, dtype=torch.float64)
        for s, t in zip(scale, truth, strict=True)
    )
    return truth, tuple(torch.where(s == 0, 0.0, s.abs().clamp(min=least)) for s in scale)


def _exact(case: Case, douts: Tensors) -> Function:
    """The reference for float64. Those of users' own ops may cast to float32."""
    return exact(case.reference, douts) if is_own(case.name) else case.reference


def _settled(y: torch.Tensor, truth: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """A result; one of integers with the elements of `truth` where it equals one of the other references."""
    for other in () if y.is_floating_point() else others:
        y = torch.where(y == other, truth, y)
    return y


def _allowed(
    case: Case, inputs: Tensors, douts: Tensors, torchs: Tensors, truth: Tensors, scale: Tensors
) -> list[float]:
    """Twice the error of torch's own op, plus the op's roundings. For float64, torch's error is estimated
    from that in float32. 0 for outputs of integers and bools."""
    kind = precision(douts, inputs)
    eps = torch.finfo(kind).eps
    if kind == torch.float64:
        inputs, douts = cast(inputs, torch.float32), cast(douts, torch.float32)
        truth, scale = _truth(case, inputs, douts)
        with environment.float32_products():
            torchs = results(case, case.reference, inputs, douts)
    finer = eps / torch.finfo(precision(douts, inputs)).eps
    errors = [
        2 * _error(y, t, s) * finer + case.roundings * eps
        for y, t, s in zip(torchs, truth, scale, strict=True)
    ]
    return [error if t.is_floating_point() else 0.0 for error, t in zip(errors, truth, strict=True)]


def _of_sequence(case: Case, version: str, dims: Sequence[int], dtype: torch.dtype) -> float:
    """What a sum of a row, one number after the other, adds to the allowed error of a version. Other dtypes
    are summed in float64."""
    known = case.op.versions.get(version)
    return (
        dims[-1] ** 0.5 * torch.finfo(dtype).eps
        if known and known.sequential and dtype == torch.float64
        else 0.0
    )


def _error(y: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest |y - truth| / scale. Infinite for a NaN, and for a difference where the scale is 0."""
    if not y.numel():
        return 0.0
    difference = (y.double() - truth.double()).abs()
    relative = torch.where(difference == 0, 0.0, difference / scale)
    return float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max())
