"""Compares forward and gradients of all versions of an op with float64, on the same inputs.

The error of a result is the largest |y - truth| / scale over its elements. Truth is the reference in float64. Scale is the op's
`magnitude`; by default it is the reference and its gradients in float64 on the absolute values of the inputs, which is |a| @ |b| for a
product. The allowed error is twice that of torch's own op in the same dtype, plus the roundings that the op declares.
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
from cukern.bench.calls import Function, draw_douts, results, wanted_inputs
from cukern.runtime import backend, checks
from cukern.runtime.device import device_of
from cukern.runtime.registry import Op, Tensors

REFERENCE = "reference"  # what the public function runs without a GPU


@dataclass(frozen=True)
class Result:
    """One output or gradient of one version. `norm` is the 2-norm; `error` and `allowed` are relative to the scale."""

    version: str
    what: str
    norm: float
    error: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and math.isfinite(self.error)


@dataclass(frozen=True)
class Pair:
    """Two versions, compared in one output or gradient. `difference` and `allowed` are relative to the scale."""

    first: str
    second: str
    what: str
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed and math.isfinite(self.difference)


@dataclass(frozen=True)
class Verdict:
    """All results of one op, shape and dtype."""

    dims: tuple[int, ...]
    dtype: torch.dtype
    results: tuple[Result, ...]
    pairs: tuple[Pair, ...]

    @property
    def wrong(self) -> int:
        """The number of wrong results plus the number of pairs that differ."""
        return sum(not r.ok for r in self.results) + sum(not p.ok for p in self.pairs)


def candidates(op: Op, device: torch.device, version: str | None = None) -> tuple[dict[str, Function], dict[str, str]]:
    """The versions of `op` (or the given one) that this device runs, as functions of the inputs, and the reason for each of the others.

    On the CPU, outside the simulator: the public function, and versions without kernels. Raises ValueError for an unknown version.
    """
    if version is not None and version not in op.versions:
        checks.unknown_version(op.name, version, op.versions)
    names = [version] if version else list(op.versions)
    if device.type == "cuda" or backend.simulating():
        has = _capability(device)
        least = {n: op.versions[n].requires for n in names}
        refused = {n: f"needs compute capability {needs / 10}, this GPU has {has / 10}" for n, needs in least.items() if needs > has}
        public = {}
    else:
        refused = {n: "there is no GPU" for n in names if not op.versions[n].in_torch}
        public = {} if version and not refused else {REFERENCE: op.call}
    return {**{n: partial(op.call, version=n) for n in names if n not in refused}, **public}, refused


def _capability(device: torch.device) -> int:
    return device_of(device.index if device.type == "cuda" else backend.SIMULATED).capability


def verify(op: Op, dims: Sequence[int], dtype: torch.dtype, functions: dict[str, Function], device: torch.device) -> Verdict:
    """Run the functions, all of `op`'s inputs, forward and backward on the same fresh random inputs, and compare them."""
    inputs = op.make(dims, dtype, device)
    douts = draw_douts(op, inputs)
    names = _names(op, inputs, douts)
    truth, scale = _truth(op, inputs, douts)
    allowed = _allowed(op, inputs, douts, truth, scale)
    ours = {}
    for version, function in functions.items():
        with poisoned():
            ours[version] = results(op, function, inputs, douts)
    found = [
        Result(version, what, float(y.double().norm()), _error(y, t, s), a)
        for version, tensors in ours.items()
        for what, y, t, s, a in zip(names, tensors, truth, scale, allowed, strict=True)
    ]
    pairs = [
        Pair(first, second, what, _error(x, y, s), 2 * a)
        for first, second in itertools.combinations(ours, 2)
        for what, x, y, s, a in zip(names, ours[first], ours[second], scale, allowed, strict=True)
    ]
    return Verdict(tuple(dims), dtype, tuple(found), tuple(pairs))


def errors(op: Op, inputs: Tensors, functions: dict[Any, Function], pass_: str) -> dict[Any, float]:
    """For each function, the error of its results in a pass ("fwd", "bwd", "bwd:x"): the largest |y - truth| over the largest |truth|,
    where truth is the reference in float64. A function that cannot do the pass is left out; so are all where the inputs are float64."""
    wanted = [] if pass_ == "fwd" else wanted_inputs(op, pass_, inputs)
    douts = draw_douts(op, inputs)
    if douts[0].dtype == torch.float64:
        return {}

    def run(function: Function, inputs: Tensors, douts: Tensors) -> Tensors:
        return results(op, function, inputs, douts, wanted)[len(douts) if wanted else 0 :]

    truth = run(op.reference, _cast(inputs, torch.float64), _cast(douts, torch.float64))
    found = {}
    for name, function in functions.items():
        with contextlib.suppress(Exception):  # who times it will say what it raised
            found[name] = max(_relative(y, t) for y, t in zip(run(function, inputs, douts), truth, strict=True))
    return found


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """torch.empty gives NaN, so that an element which a kernel does not write is seen."""
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = memory.fill_uninitialized_memory
    # warn_only: cuBLAS, should an op use it, would refuse to work without an environment variable set before CUDA starts
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = filled


def _names(op: Op, inputs: Tensors, douts: Tensors) -> list[str]:
    """The one output is "out", several are "out0", "out1" and so on; then "dx" for each input x that has a gradient."""
    outs = ["out"] if len(douts) == 1 else [f"out{i}" for i in range(len(douts))]
    return [*outs, *(f"d{op.names(inputs)[i]}" for i in wanted_inputs(op, "bwd", inputs))]


def _truth(op: Op, inputs: Tensors, douts: Tensors) -> tuple[Tensors, Tensors]:
    """The results in float64, and their scale: at least the least normal number of the dtype, except where it is 0. Below that number
    torch's own result may be wholly wrong, and would excuse any error."""
    exact, exact_douts = _cast(inputs, torch.float64), _cast(douts, torch.float64)
    if op.magnitude:
        scale = op.magnitude(exact, exact_douts)
    else:
        scale = results(op, op.reference, [x.abs() for x in exact], tuple(d.abs() for d in exact_douts))
    least = torch.finfo(douts[0].dtype).smallest_normal
    truth = results(op, op.reference, exact, exact_douts)
    return truth, tuple(torch.where(s == 0, 0.0, s.abs().clamp(min=least)) for s in scale)


def _allowed(op: Op, inputs: Tensors, douts: Tensors, truth: Tensors, scale: Tensors) -> list[float]:
    """Twice the error of torch's own op, and the op's roundings. In float64 torch's op is the truth itself, so float32 tells its error."""
    eps = torch.finfo(douts[0].dtype).eps
    if douts[0].dtype == torch.float64:
        inputs, douts = _cast(inputs, torch.float32), _cast(douts, torch.float32)
        truth, scale = _truth(op, inputs, douts)
    with environment.float32_products():
        torchs = results(op, op.reference, inputs, douts)
    finer = eps / torch.finfo(douts[0].dtype).eps
    return [2 * _error(y, t, s) * finer + op.roundings * eps for y, t, s in zip(torchs, truth, scale, strict=True)]


def _relative(y: torch.Tensor, truth: torch.Tensor) -> float:
    if not y.numel():
        return 0.0
    return float((y.double() - truth).abs().max() / truth.abs().max())


def _cast(inputs: Tensors, dtype: torch.dtype) -> Tensors:
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)


def _error(y: torch.Tensor, truth: torch.Tensor, scale: torch.Tensor) -> float:
    """Largest |y - truth| / scale; where the scale is 0, y must be exact; a NaN is infinitely wrong."""
    if not y.numel():
        return 0.0
    difference = (y.double() - truth.double()).abs()
    relative = torch.where(difference == 0, 0.0, difference / scale)
    return float(relative.nan_to_num(nan=math.inf, posinf=math.inf).max())
