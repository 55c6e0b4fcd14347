"""softmax and log_softmax of scale * x along any dimension, and their gradients, by one ladder of kernels.

    softmax:      y = exp(scale x) / sum(exp(scale x))       dx = scale y (g - sum(y g))
    log_softmax:  y = scale x - log(sum(exp(scale x)))       dx = scale (g - exp(y) sum(g))

Sums run along the dimension. The kernels subtract the largest scale x first, so that no exponential overflows.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.softmax import versions as ladder
from cukern.ops.softmax.versions import LOG_VERSIONS, VERSIONS
from cukern.runtime import backend, checks, interop
from cukern.runtime.autocast import off
from cukern.runtime.registry import Cost, Differentiable, Op, apply_of, batched, choose, raw_op, register, row_counts, save, watched

Versions = str | tuple[str | None, str | None] | None
LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100  # in magnitude: the scales that the kernels take


def softmax(x: Any, dim: int = -1, *, scale: float = 1.0, version: Versions = None) -> Tensor:
    """exp(scale x) / sum(exp(scale x)), the sum along `dim`, differentiable any number of times.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape: a tensor, or an array that speaks DLPack. Rows whose columns lie side by
            side are read in place, however far apart they are; so is a contiguous x along another dimension than the last. Anything else
            is copied once. 16-bit types are computed in float32 and rounded once. A tensor that is not on a GPU goes to torch's
            operations, or to the simulator.
        dim: along which the results add up to 1.
        scale: an inverse temperature, or 1 / sqrt(head_dim): any finite number; unless x is float64, of at most 3.4e38, float32's largest.
            The products scale x are those of real numbers: they neither overflow nor underflow. A scale of 0 makes all finite elements
            equal, and infinite ones NaN. A scale of 0, below 2^-100 or above 2^100 takes a slower path, in float64.
        version: "v1" to "v11", or two of them, for forward and backward; by default the fastest. Along a dimension whose elements do not
            lie side by side there is one kernel, whatever the version. The time of backward's v1 to v4 grows with the square of a row.

    Returns a new tensor of x's shape and dtype; contiguous, if x is, or if it is copied; else with `dim`'s elements side by side.
    NaN, and rows that hold +inf, or -inf alone, give NaN, as in torch.
    Autocast does not change the dtype: the op computes as if it were off.

    Raises TypeError for another dtype, a dim that is no int, a scale that is no number, or a version that is no str; ValueError for a dim
    that x does not have, a scale that is not finite or too large, or an unknown version.
    """
    return _public("softmax", x, dim, scale, version)


def log_softmax(x: Any, dim: int = -1, *, scale: float = 1.0, version: Versions = None) -> Tensor:
    """log(softmax(x)), without the loss of small results; everything as in `softmax`, and of the versions "v5" to "v10"."""
    return _public("log_softmax", x, dim, scale, version)


def reference_softmax(x: Tensor, dim: int = -1, scale: float = 1.0) -> Tensor:
    return _reference(torch.softmax, x, dim, scale)


def reference_log_softmax(x: Tensor, dim: int = -1, scale: float = 1.0) -> Tensor:
    return _reference(torch.log_softmax, x, dim, scale)


def _reference(function: Callable[..., Tensor], x: Tensor, dim: int, scale: float) -> Tensor:
    with off(x):
        if scale == 1 or not x.numel():
            return function(x, dim)
        return function(scaled(x, scale, dim), dim).to(x.dtype)


def scaled(x: Tensor, scale: float, dim: int) -> Tensor:
    """scale x in float64, less the largest along `dim`, subtracted first, and by halves, so that nothing overflows."""
    half = x.double() * math.copysign(0.5, scale)
    return (half - half.detach().amax(dim, keepdim=True)) * abs(scale) * 2


def wide(x: Tensor) -> torch.dtype:
    """The dtype in which x is computed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _public(op: str, x: Any, dim: int, scale: float, version: Versions) -> Tensor:
    if type(x) is not Tensor:
        x = interop.to_torch("x", x)
    checks.dtype("x", x, checks.FLOATS)
    forward, backward = two_versions(_TABLES[op], op, x, version)
    if type(dim) is not int:
        dim = checks.integer("dim", dim)
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ValueError(f"dim must be one of x's {x.ndim} dimensions, got {dim}")
    scale = scale_of(x, scale)
    log = op == "log_softmax"
    if not x.is_cuda and not backend.simulates(x):
        return (reference_log_softmax if log else reference_softmax)(x, dim, scale)
    if x.ndim == 2 and (dim == 1 or dim == -1):
        return _run(x, scale, log, forward, backward)
    if x.ndim == 0:
        return _run(x.view(1, 1), scale, log, forward, backward).view(())
    last = x.movedim(dim, -1)
    if x.is_contiguous() and last.stride(-1) != 1:
        inner = math.prod(x.shape[dim % x.ndim + 1 :])
        return _run(x.view(-1 if x.numel() else 0, x.shape[dim], inner), scale, log, forward, backward).view(x.shape)
    rows = last.reshape(-1 if x.numel() else 0, x.shape[dim])
    return _run(rows, scale, log, forward, backward).view(last.shape).movedim(-1, dim)


def two_versions(versions: Collection[str], op: str, x: Tensor, version: Versions) -> tuple[str, str]:
    """The versions of forward and backward, "" for the default. Raises TypeError for one that is no str; ValueError for one that there is
    not, or on a CPU tensor."""
    if version is None:
        return "", ""
    both = version if isinstance(version, tuple) else (version, version)
    if len(both) != 2:
        raise ValueError(f"version must be one, or two for forward and backward, got {checks.brief(version)}")
    for one in both:
        checks.version(op, one, versions)
        if one is not None and not x.is_cuda and not backend.simulates(x):
            checks.needs_gpu(op, one, x.device)
    return both[0] or "", both[1] or ""


_TABLES = {"softmax": VERSIONS, "log_softmax": LOG_VERSIONS}


def scale_of(x: Tensor, scale: float) -> float:
    if type(scale) is float and abs(scale) <= checks.FLOAT32_MAX:
        return scale
    return checks.number("scale", scale, math.inf if x.dtype == torch.float64 else checks.FLOAT32_MAX)


# ---- autograd: x is (rows, columns), or (outer, columns, inner) and contiguous: the sums are along dimension 1


def _run(x: Tensor, scale: float, log: bool, forward: str, backward: str) -> Tensor:
    x = _side_by_side(x)
    if watched(x):
        return _apply(x, scale, log, forward, backward)
    return _softmax(x, scale, log, forward)


class _Softmax(Differentiable):
    @staticmethod
    def forward(x, scale, log, forward, backward):
        return _softmax(x, scale, log, forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, scale, log, _, backward = inputs
        ctx.rest = scale, log, backward
        save(ctx, output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return _gradient(y, g, *ctx.rest), None, None, None, None

    @staticmethod
    def tangent(ctx, dx, *_):
        """Softmax's Jacobian is symmetric: its product with a tangent is that with a gradient."""
        (y,), (scale, log, _) = ctx.saved_tensors, ctx.rest
        if not log:
            return _gradient(y, dx, *ctx.rest)
        d = dx.to(wide(y))
        return (scale * (d - (y.to(wide(y)).exp() * d).sum(1, keepdim=True))).to(y.dtype)

    @staticmethod
    def batch(info, in_dims, x, *rest):
        x = x.movedim(in_dims[0], 0)
        return _apply(x.flatten(0, 1), *rest).view(x.shape), 0

    @staticmethod
    def recorded(ctx, x, scale, log, forward, backward):
        y = _softmax(x, scale, log, forward)
        ctx.save_for_backward(y)
        ctx.rest = scale, log, backward
        return y


class _SoftmaxBackward(Differentiable):
    @staticmethod
    def forward(y, g, scale, log, version):
        return _softmax_backward(y, g, scale, log, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, g, ctx.scale, ctx.log, _ = inputs
        save(ctx, y, g)

    @staticmethod
    def backward(ctx, d):
        """By torch's operations, so that they can be differentiated again; and so is the tangent."""
        (y, g), scale = ctx.saved_tensors, ctx.scale
        wide_y, wide_g, wide_d = (t.to(wide(t)) for t in (y, g, d))
        if ctx.log:
            p = wide_y.exp()
            dot = (wide_d * p).sum(1, keepdim=True)
            dy, dg = -scale * wide_d * p * wide_g.sum(1, keepdim=True), scale * (wide_d - dot)
        else:
            dot = (wide_d * wide_y).sum(1, keepdim=True)
            dy = scale * (wide_d * (wide_g - (wide_y * wide_g).sum(1, keepdim=True)) - wide_g * dot)
            dg = scale * wide_y * (wide_d - dot)
        return dy.to(y.dtype), dg.to(g.dtype), None, None, None

    @staticmethod
    def tangent(ctx, dy, dg, *_):
        y, g, dy, dg = (t.to(wide(t)) for t in (*ctx.saved_tensors, dy, dg))
        if ctx.log:
            out = dg - y.exp() * (dy * g.sum(1, keepdim=True) + dg.sum(1, keepdim=True))
        else:
            out = dy * (g - (y * g).sum(1, keepdim=True)) + y * (dg - (dy * g + y * dg).sum(1, keepdim=True))
        return (ctx.scale * out).to(ctx.saved_tensors[0].dtype)

    @staticmethod
    def batch(info, in_dims, y, g, *rest):
        y, g = (batched(t, dim, info.batch_size) for t, dim in ((y, in_dims[0]), (g, in_dims[1])))
        return _apply_backward(y.flatten(0, 1), g.flatten(0, 1), *rest).view(y.shape), 0


def _gradient(y: Tensor, g: Tensor, *rest: Any) -> Tensor:
    return _apply_backward(y, g, *rest) if watched(y, g) else _softmax_backward(y, g, *rest)


_apply, _apply_backward = apply_of(_Softmax), apply_of(_SoftmaxBackward)


def _launch_softmax(x: Tensor, scale: float, log: bool, version: str) -> Tensor:
    out = _fake_softmax(x, scale, log, version)
    if not out.numel():
        return out
    if not LEAST_SCALE <= abs(scale) <= MOST_SCALE:
        return _launch_softmax(scaled(x, scale, 1), 1.0, log, version).to(x.dtype)
    x = _side_by_side(x)
    if x.ndim == 3:
        ladder.inner(out, x, scale, log)
    else:
        _choose(log, version, x).forward(out, x, scale, log)
    return out


def _launch_softmax_backward(y: Tensor, g: Tensor, scale: float, log: bool, version: str) -> Tensor:
    dx = _fake_softmax(y)
    if not dx.numel():
        return dx
    if not LEAST_SCALE <= abs(scale) <= MOST_SCALE and y.dtype != torch.float64:
        return _launch_softmax_backward(y.double(), g.double(), scale, log, version).to(y.dtype)
    y, g = y.contiguous(), _side_by_side(g.resolve_neg())
    if y.ndim == 3:
        ladder.inner_backward(dx, y, g, scale, log)
    else:
        _choose(log, version, y).backward(dx, y, g, scale, log)
    return dx


def _choose(log: bool, version: str, x: Tensor) -> Any:
    return choose("log_softmax" if log else "softmax", version, x.get_device())


def _side_by_side(x: Tensor) -> Tensor:
    """x as the kernels read it, copied if it must be."""
    return x if x.ndim == 2 and (x.stride(1) == 1 or x.shape[1] == 1) else x.contiguous()


def _fake_softmax(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)  # 4 us faster than torch.empty with the same


_softmax = raw_op("_softmax(Tensor x, float scale, bool log, str version) -> Tensor", 1, _launch_softmax, _fake_softmax)
_softmax_backward = raw_op(
    "_softmax_backward(Tensor y, Tensor g, float scale, bool log, str version) -> Tensor", 2, _launch_softmax_backward, _fake_softmax
)

# ---- what the tools know


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    rows, columns = dims
    return (torch.randn(rows, columns, dtype=dtype, device=device),)


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n = math.prod(dims)
    return {"fwd": Cost(2 * n * itemsize, 4 * n), "bwd": Cost(3 * n * itemsize, 4 * n)}


def _magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,), g = inputs, douts[0].abs()
    y = torch.softmax(x, -1)
    return y, y * (g + (y * g).sum(-1, keepdim=True))


def _log_magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    (x,), g = inputs, douts[0].abs()
    y = torch.log_softmax(x, -1)
    return y, g + y.exp() * g.sum(-1, keepdim=True)


def _register(name: str, function: Callable[..., Tensor], reference: Callable[..., Tensor]) -> None:
    register(
        Op(
            name=name,
            stem="softmax",
            variants=row_counts,
            function=function,
            reference=reference,
            versions=_TABLES[name],
            dtypes=checks.FLOATS,
            dims="ROWS COLUMNS",
            check_dims=((1, 1), (129, 65), (64, 1000), (33, 4097), (3, 40_000), (5, 50_257)),
            sim_dims=((1, 1), (5, 67), (2, 300)),
            bench_dims=((8192, 1024), (8192, 4096), (8192, 16384), (4096, 50304), (1024, 131072)),
            make=_make,
            inputs=("x",),
            cost=_cost,
            bound="memory",
            roundings=4,  # of the sums over a row, which v1 to v4 make in longer chains than torch does
            magnitude=_log_magnitude if name == "log_softmax" else _magnitude,
        )
    )


_register("softmax", softmax, reference_softmax)
_register("log_softmax", log_softmax, reference_log_softmax)
