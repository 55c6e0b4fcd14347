"""softmax and log_softmax of scale * x along any dimension, and their gradients, by one set of kernels.

    softmax:      y = exp(scale x) / sum(exp(scale x))       dx = scale y (g - sum(y g))
    log_softmax:  y = scale x - log(sum(exp(scale x)))       dx = scale (g - exp(y) sum(g))

Sums run along the dimension. The kernels subtract the largest scale x first, so that no exponential
overflows.
"""

import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.softmax.versions import LAUNCHES, LOG_LAUNCHES, LOG_VERSIONS, VERSIONS, inner
from cukern.runtime import checks
from cukern.runtime.dispatch.autocast import off
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, batched, save, watched
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, register, row_counts
from cukern.runtime.tensors import as_matrix, empty_like, unit_column_stride, wide

Versions = str | tuple[str | None, str | None] | None
LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**100  # the magnitudes that the kernels accept
LONG, FEW = 64, 128  # columns, and rows: see _few_rows
_autocast = torch.is_autocast_enabled  # of a GPU
_TABLES = {"softmax": VERSIONS, "log_softmax": LOG_VERSIONS}
_NAMES, _LAUNCHES = tuple(_TABLES), (LAUNCHES, LOG_LAUNCHES)  # by `log`


@planned("x")
def softmax(x: Any, dim: int = -1, *, scale: float = 1.0, version: Versions = None) -> Tensor:
    """exp(scale x) / sum(exp(scale x)), with the sum along `dim`. Differentiable any number of times.

        x = torch.randn(8, 1000, device="cuda", requires_grad=True)
        y = cukern.softmax(x, dim=-1, scale=0.5)
        y[:, 0].sum().backward()

    Args:
        x: float16, bfloat16, float32 or float64, of any shape: a tensor, or an array that supports DLPack. It
            is copied once unless it is contiguous, or `dim` has stride 1 and the other dimensions flatten to
            one. 16-bit types are computed in float32 and rounded once. CPU tensors use torch's operations, or
            the simulator.
        dim: the dimension along which the results add up to 1.
        scale: a finite number, such as 1 / sqrt(head_dim) or an inverse temperature. Unless x is float64, at
            most 3.4e38 in magnitude, float32's largest. The products scale * x neither overflow nor
            underflow. With scale 0, all finite elements count equally and infinite ones become NaN.
        version: "v1" to "v10", or a pair of versions for forward and backward; default: the fastest.

    Returns a new tensor of x's shape and dtype. It is contiguous if x is contiguous or was copied; else `dim`
    has stride 1. Rows with NaN, with +inf, or with nothing but -inf give NaN, as in torch. Under autocast on
    a GPU, 16-bit x is converted to float32, as in torch.

    Raises TypeError for another dtype, or if dim is not an int, scale not a number or version not a str;
    ValueError if x does not have dimension dim, if scale is not finite or too large, or if the version is
    unknown.

    Online softmax: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    return _public("softmax", x, dim, scale, version)


@planned("x")
def log_softmax(x: Any, dim: int = -1, *, scale: float = 1.0, version: Versions = None) -> Tensor:
    """log(softmax(x)), accurate also for small results.

        logits = torch.randn(8, 1000, device="cuda", requires_grad=True)
        loss = -cukern.log_softmax(logits)[:, 7].mean()
        loss.backward()

    Shapes, dtypes and errors are those of `softmax`. The versions are "v5" to "v10".
    """
    return _public("log_softmax", x, dim, scale, version)


def _reference(op: str, x: Tensor, dim: int = -1, scale: float = 1.0) -> Tensor:
    function, plain = getattr(torch, op), scale == 1 or not x.numel()
    with off(x):  # torch's log_softmax of 16-bit types rounds in between
        return function(x.to(wide(x.dtype)) if plain else _scaled(x, scale, dim), dim).to(x.dtype)


def _scaled(x: Tensor, scale: float, dim: int) -> Tensor:
    """scale * x in float64, minus its maximum along `dim`. Half of x is used before the subtraction, so that
    nothing overflows."""
    half = x.double() * math.copysign(0.5, scale)
    return (half - half.detach().amax(dim, keepdim=True)) * abs(scale) * 2


def _public(op: str, x: Any, dim: int, scale: float, version: Versions) -> Tensor:
    if type(x) is not Tensor:
        x = interop.to_torch("x", x)
    checks.dtype("x", x, checks.FLOATS)
    if x.is_cuda and _autocast() and x.dtype.itemsize == 2:
        x = x.float()
    forward, backward = two_versions(_TABLES[op], op, x, version)
    if type(dim) is not int:
        dim = checks.integer("dim", dim)
    if not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        raise ValueError(f"dim must be one of x's {x.ndim} dimensions, got {dim}")
    scale = checked_scale(x, scale)
    if not x.is_cuda and not backend.simulates(x):
        return _reference(op, x, dim, scale)
    options = scale, op == "log_softmax", forward, backward
    if x.ndim == 0:
        return _run(x.view(1), 0, *options).view(())
    return _run(x, dim % x.ndim, *options)


def two_versions(versions: Collection[str], op: str, x: Tensor, version: Versions) -> tuple[str, str]:
    """The versions of forward and backward, by default those of `in_force`. Raises TypeError if one is not a
    str; ValueError if one is unknown, or given for a CPU tensor outside the simulator."""
    if version is None:
        return (named := in_force.now), named
    both = version if isinstance(version, tuple) else (version, version)
    if len(both) != 2:
        raise ValueError(
            f"version must be a str, or a pair of them for forward and backward, got {checks.brief(version)}"
        )
    for one in both:
        checks.version(op, one, versions)
        if one is not None and not x.is_cuda and not backend.simulates(x):
            checks.needs_gpu(op, one, x.device)
    return both[0] or in_force.now, both[1] or in_force.now


def checked_scale(x: Tensor, scale: float) -> float:
    if type(scale) is float and abs(scale) <= checks.FLOAT32_MAX:
        return scale
    return checks.number("scale", scale, math.inf if x.dtype == torch.float64 else checks.FLOAT32_MAX)


# ---- the raw ops: x has any shape but (), and dim is not negative


def _launch(x: Tensor, dim: int, scale: float, log: bool, version: str) -> Tensor:
    out = _fake(x, dim)
    if not out.numel():
        return out
    if not LEAST_SCALE <= abs(scale) <= MOST_SCALE:
        return out.copy_(_launch(_scaled(x, scale, dim), dim, 1.0, log, version))
    if not _is_inner(x, dim):
        launch = _LAUNCHES[log][choose(_NAMES[log], version, x.get_device()).forward][0]
        matrices = _rows(dim, out, x)
    elif _few_rows(x, dim):
        return _moved(_launch(_contiguous(x, dim), x.ndim - 1, scale, log, version), dim)
    else:
        launch, matrices = inner, _cubes(dim, out, x)
    launch(*matrices, scale, log)
    return out


def _launch_backward(y: Tensor, g: Tensor, dim: int, scale: float, log: bool, version: str) -> Tensor:
    dx = _fake(y, dim)
    if not dx.numel():
        return dx
    if not LEAST_SCALE <= abs(scale) <= MOST_SCALE and y.dtype != torch.float64:
        return dx.copy_(_launch_backward(y.double(), g.double(), dim, scale, log, version))
    g = g.resolve_neg()
    if not _is_inner(y, dim):
        launch = _LAUNCHES[log][choose(_NAMES[log], version, y.get_device()).backward][1]
        matrices = _rows(dim, dx, y, g)
        matrices[1] = matrices[1].contiguous()
    elif _few_rows(y, dim):
        return _moved(
            _launch_backward(_contiguous(y, dim), _contiguous(g, dim), y.ndim - 1, scale, log, version), dim
        )
    else:
        launch, matrices = inner, _cubes(dim, dx, y, g)
    launch(*matrices, scale, log)
    return dx


def _is_inner(x: Tensor, dim: int) -> bool:
    """True for contiguous tensors of which `dim` is not the innermost dimension. Kernels of their own read
    them in place."""
    return x.is_contiguous() and math.prod(x.shape[dim + 1 :]) > 1


def _few_rows(x: Tensor, dim: int) -> bool:
    """True for few long rows along an inner dimension. The kernels for those would give them to few blocks.
    Many blocks share a long row of a matrix."""
    return x.shape[dim] >= LONG and x.numel() // x.shape[dim] <= FEW


def _rows(dim: int, *tensors: Tensor) -> list[Tensor]:
    """As (rows, columns) with column stride 1, copied if necessary: what is written is not."""
    return [unit_column_stride(as_matrix(t.movedim(dim, -1))) for t in tensors]


def _cubes(dim: int, *tensors: Tensor) -> list[Tensor]:
    """As (outer, columns, inner), contiguous."""
    return [
        t.contiguous().view(math.prod(t.shape[:dim]), t.shape[dim], math.prod(t.shape[dim + 1 :]))
        for t in tensors
    ]


def _contiguous(x: Tensor, dim: int) -> Tensor:
    return x.movedim(dim, -1).contiguous()


def _moved(out: Tensor, dim: int) -> Tensor:
    return out.movedim(-1, dim).contiguous()


def _fake(x: Tensor, dim: int, *_: Any) -> Tensor:
    """Contiguous if x is or if `dim` is the last dimension; else `dim` has stride 1."""
    if dim == x.ndim - 1 or x.is_contiguous():
        return empty_like(x)
    return empty_like(x.movedim(dim, -1)).movedim(-1, dim)


def _fake_backward(y: Tensor, g: Tensor, dim: int, *_: Any) -> Tensor:
    return _fake(y, dim)


def _sharding(x: Tensor, *rest: Any) -> str:
    """Along all dimensions but `dim`."""
    tensors = [x, *(t for t in rest if isinstance(t, Tensor))]
    letters = "".join("." if d == rest[len(tensors) - 1] else str(d) for d in range(x.ndim))
    return f"{', '.join([letters] * len(tensors))} -> {letters}"


_OPTIONS = "int dim, float scale, bool log, str version"
_softmax = raw_op(f"_softmax(Tensor x, {_OPTIONS}) -> Tensor", 1, _launch, _fake, sharding=_sharding)
_softmax_backward = raw_op(
    f"_softmax_backward(Tensor y, Tensor g, {_OPTIONS}) -> Tensor",
    2,
    _launch_backward,
    _fake_backward,
    sharding=_sharding,
)

# ---- autograd


def _run(x: Tensor, dim: int, scale: float, log: bool, forward: str, backward: str) -> Tensor:
    return (
        _apply(x, dim, scale, log, forward, backward) if watched(x) else _softmax(x, dim, scale, log, forward)
    )


class _Softmax(Differentiable):
    @staticmethod
    def forward(x, dim, scale, log, forward, backward):
        return _softmax(x, dim, scale, log, forward)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, dim, scale, log, _, backward = inputs
        ctx.options = dim, scale, log, backward
        save(ctx, output)

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return _gradient(y, g, *ctx.options), None, None, None, None, None

    @staticmethod
    def tangent(ctx, dx, *_):
        """Softmax's Jacobian is symmetric, so its product with a tangent equals its product with a
        gradient."""
        (y,), (dim, scale, log, _) = ctx.saved_tensors, ctx.options
        if not log:
            return _gradient(y, dx, *ctx.options)
        d = dx.to(wide(y.dtype))
        return (scale * (d - (y.to(wide(y.dtype)).exp() * d).sum(dim, keepdim=True))).to(y.dtype)

    @staticmethod
    def batch(info, in_dims, x, dim, *rest):
        return _apply(batched(x, in_dims[0], info.batch_size), dim + 1, *rest), 0


class _SoftmaxBackward(Differentiable):
    @staticmethod
    def forward(y, g, dim, scale, log, version):
        return _softmax_backward(y, g, dim, scale, log, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        y, g, ctx.dim, ctx.scale, ctx.log, _ = inputs
        save(ctx, y, g)

    @staticmethod
    def backward(ctx, d):
        """In torch's operations, so that the result can be differentiated again. So is `tangent`."""
        (y, g), dim, scale = ctx.saved_tensors, ctx.dim, ctx.scale
        wide_y, wide_g, wide_d = (t.to(wide(t.dtype)) for t in (y, g, d))
        if ctx.log:
            p = wide_y.exp()
            dot = (wide_d * p).sum(dim, keepdim=True)
            dy, dg = -scale * wide_d * p * wide_g.sum(dim, keepdim=True), scale * (wide_d - dot)
        else:
            dot = (wide_d * wide_y).sum(dim, keepdim=True)
            dy = scale * (wide_d * (wide_g - (wide_y * wide_g).sum(dim, keepdim=True)) - wide_g * dot)
            dg = scale * wide_y * (wide_d - dot)
        return dy.to(y.dtype), dg.to(g.dtype), None, None, None, None

    @staticmethod
    def tangent(ctx, dy, dg, *_):
        y, g, dy, dg = (t.to(wide(t.dtype)) for t in (*ctx.saved_tensors, dy, dg))
        if ctx.log:
            out = dg - y.exp() * (dy * g.sum(ctx.dim, keepdim=True) + dg.sum(ctx.dim, keepdim=True))
        else:
            out = dy * (g - (y * g).sum(ctx.dim, keepdim=True)) + y * (
                dg - (dy * g + y * dg).sum(ctx.dim, keepdim=True)
            )
        return (ctx.scale * out).to(ctx.saved_tensors[0].dtype)

    @staticmethod
    def batch(info, in_dims, y, g, dim, *rest):
        return _apply_backward(
            *(batched(t, d, info.batch_size) for t, d in zip((y, g), in_dims, strict=False)), dim + 1, *rest
        ), 0


def _gradient(y: Tensor, g: Tensor, *options: Any) -> Tensor:
    return _apply_backward(y, g, *options) if watched(y, g) else _softmax_backward(y, g, *options)


_apply, _apply_backward = apply_of(_Softmax), apply_of(_SoftmaxBackward)

# ---- for the tools


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n = math.prod(dims)
    return {"fwd": Cost(2 * n * itemsize, 4 * n), "bwd": Cost(3 * n * itemsize, 4 * n)}


def _magnitude(op: str, inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    y, g = getattr(torch, op)(*inputs, -1), douts[0].abs()
    return (
        (y, g + y.exp() * g.sum(-1, keepdim=True))
        if op == "log_softmax"
        else (y, y * (g + (y * g).sum(-1, keepdim=True)))
    )


for _name, _function in (("softmax", softmax), ("log_softmax", log_softmax)):
    register(
        Case(
            name=_name, op=Op(_name, "softmax", _TABLES[_name]), variants=row_counts, call=_function,
            reference=partial(_reference, _name), dims="ROWS COLUMNS", inputs=("x",), cost=_cost,
            magnitude=partial(_magnitude, _name),
            check_dims=((1, 1), (129, 65), (64, 1000), (33, 4097), (3, 40_000), (5, 50_257)),
            sim_dims=((1, 1), (5, 67), (2, 300)),
            bench_dims=((8192, 1024), (8192, 4096), (8192, 16384), (4096, 50304), (1024, 131072)),
            roundings=4,  # sums over a row: v1 to v4 add in longer chains than torch
        )
    )  # fmt: skip
