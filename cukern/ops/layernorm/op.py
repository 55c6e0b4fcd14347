"""layernorm and rmsnorm along the last dimension of s, which is x or x + residual. Math and derivatives:
kernels_cu/layernorm.cu."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.layernorm.versions import ADD, VERSIONS, plan_of
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, normal, register, row_counts
from cukern.runtime.tensors import (
    as_matrix,
    empty_like,
    mergeable,
    pointers,
    readable,
    row_strides,
    unit_column_stride,
    wide,
)


@planned("x", "weight", "bias", "residual")
def layernorm(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    residual: Any = None,
    version: str | None = None,
) -> Any:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last dimension. Differentiable any number
    of times.

        x, branch = torch.randn(2, 4, 1024, 768, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight, bias = torch.ones(768, device="cuda"), torch.zeros(768, device="cuda")
        y = cukern.layernorm(x, weight, bias)
        # x + branch, and its layernorm, in one kernel
        y, x = cukern.layernorm(branch, weight, bias, residual=x)

    Args:
        x: (..., columns), float16, bfloat16, float32 or float64. Strides, arrays, CPU tensors, autocast: see
            `help(cukern)`.
        weight: (columns,), of any of these dtypes; None: 1, and then bias must be None too. bias: (columns,),
            of any of them; None: 0.
        eps: a finite number, at least 0, added to the variance. The variance divides by the number of
            columns.
        residual: of x's shape and dtype (under autocast, of any). The op then normalises s = x + residual,
            rounded to x's dtype.
        version: "v1" or "v2"; default: the fastest.

    Returns y, a new contiguous tensor of x's shape and dtype; with `residual` the tuple (y, s). Gradients
    flow through both. Runs on one GPU give equal bits. The backward needs s and two float32 numbers per row.
    Squares are added in float32, unless x is float64: as in torch's, rows whose sum of squares exceeds 3.4e38
    become 0, or NaN.

    Raises TypeError for another dtype or type of an argument; ValueError for a shape, device, eps or version
    that does not fit. Source: Ba, Kiros and Hinton, arXiv 1607.06450.
    """
    return _public("layernorm", x, weight, bias, eps, residual, version)


@planned("x", "weight", "residual")
def rmsnorm(
    x: Any, weight: Any, *, eps: float = 1e-6, residual: Any = None, version: str | None = None
) -> Any:
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension. Differentiable any number of times.

        x = torch.randn(4, 1024, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = cukern.rmsnorm(x, torch.ones(4096, dtype=torch.bfloat16, device="cuda"))

    Arguments, result and errors are those of `layernorm`. Source: Zhang and Sennrich, arXiv 1910.07467.
    """
    return _public("rmsnorm", x, weight, None, eps, residual, version)


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    *_: Any,
) -> Any:
    """The op in torch's operations. Not torch.nn.functional.layer_norm, whose second derivative by x and
    weight is wrong in torch 2.13."""
    with autocast.off(x):
        s = x if residual is None else x + residual
        y, _ = _normalized(s.to(wide(s.dtype)), eps, rms)
        if weight is not None:
            y = y * weight if bias is None else y * weight + bias
        return y.to(x.dtype) if residual is None else (y.to(x.dtype), s)


def _on_cpu(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Any:
    """In float64: in float32, squares and derivatives of large and small numbers leave its range. Those of
    float64 may leave it, too: then `reference` scales them."""
    arguments = x, residual, weight, bias, eps, rms
    with autocast.off(x):
        if x.dtype == torch.float64 or torch.compiler.is_compiling() or transformed():
            run: Callable[..., Any] = _in_float64
        else:
            run = _apply_on_cpu if watched(*arguments[:4]) else _compute
        outs = run(*arguments)
    return outs[0] if residual is None else outs[:2]


def _in_float64(
    x: Tensor, residual: Tensor | None, weight: Any, bias: Any, *rest: Any
) -> tuple[Tensor, Tensor]:
    """y and s by `reference` in float64."""
    s = x.double()
    if residual is not None:  # rounded to x's dtype; gradients are not
        exact = s + residual.double()
        s = exact + ((x + residual).double() - exact).detach()
    w, b = (None if t is None else t.double() for t in (weight, bias))
    return reference(s, None, w, b, *rest).to(x.dtype), s.to(x.dtype)


def _normalized(s: Tensor, eps: float, rms: bool) -> tuple[Any, Any]:
    """n and r."""
    s = s if rms else s - s.mean(-1, keepdim=True)
    # n does not depend on it; derivatives have the cube of r, which may leave the range
    size = s.detach().abs().mean(-1, keepdim=True)
    size = torch.where(size < math.inf, size.clamp(min=max(eps**0.5, torch.finfo(s.dtype).tiny)), 1.0).to(
        s.dtype
    )
    n = s / size
    root = (n.square().mean(-1, keepdim=True) + (eps**0.5 / size).square()).sqrt()
    return n / root, 1 / (root * size)


def _public(op: str, x: Any, weight: Any, bias: Any, eps: Any, residual: Any, version: str | None) -> Any:
    x = interop.floats("x", x)
    if autocast.enabled(x):
        residual = None if residual is None else interop.floats("residual", residual)
        x, residual = autocast.widest(x, residual, float32=True)
    checks.version(op, version, VERSIONS)
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension, got a tensor of shape ()")
    eps = checks.number("eps", eps, math.inf if x.dtype == torch.float64 else checks.FLOAT32_MAX, least=0)
    weight, bias = _affine(x, weight, bias)
    residual = None if residual is None else interop.like("residual", residual, "x", x)
    if backend.uses_torch(op, version, x):
        return _on_cpu(x, residual, weight, bias, eps, op == "rmsnorm")
    run = _apply if watched(x, residual, weight, bias) else _layernorm
    rows = (
        None if t is None else mergeable(unit_column_stride(t if t.ndim > 1 else t[None]))
        for t in (x, residual)
    )
    y, *rest = run(*rows, weight, bias, eps, op == "rmsnorm", version or in_force.now)
    outs = (y, *rest[:-1]) if x.ndim > 1 else tuple(t[0] for t in (y, *rest[:-1]))
    return outs[0] if residual is None else outs


def _affine(x: Tensor, weight: Any, bias: Any) -> tuple[Tensor | None, Tensor | None]:
    """weight and bias, checked, in dtypes that the kernels take."""
    weight = interop.of_columns("weight", weight, x, checks.FLOATS)
    if bias is not None and weight is None:
        raise ValueError("bias must be None if weight is None")
    bias = interop.of_columns("bias", bias, x, checks.FLOATS)
    if weight is not None and (
        weight.dtype not in (x.dtype, wide(x.dtype)) or (bias is not None and bias.dtype != weight.dtype)
    ):
        # the kernels take no other
        weight, bias = weight.to(wide(x.dtype)), None if bias is None else bias.to(wide(x.dtype))
    return weight, bias


# ---- the raw ops: x, residual, s and gradients have two dimensions or more. The forward returns y, with a
# residual s, and stats.


def _launch(
    x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, rms: bool, version: str
) -> list[Tensor]:
    outs = y, *rest, stats = _fake(x, residual)
    if x.numel():
        x, residual = (
            unit_column_stride(as_matrix(x)),
            None if residual is None else unit_column_stride(as_matrix(residual)),
        )
        w, b = (None if t is None else t.contiguous() for t in (weight, bias))
        plan, blocks = plan_of(
            choose("layernorm", version, x.get_device()).forward, False, x, w, rms, b, y, *rest, residual
        )
        arguments = (
            *pointers(y, *(rest or (None,)), stats, x, residual, w, b),
            *x.shape,
            *row_strides(x, residual),
            eps,
        )
        plan.launches[0]((blocks, 1, 1), plan.block, 0, *arguments)
    return outs


def _fake(x: Tensor, residual: Any, *_: Any) -> list[Tensor]:
    return [
        empty_like(x),
        *([] if residual is None else [empty_like(x)]),
        x.new_empty((*x.shape[:-1], 2), dtype=wide(x.dtype)),
    ]


def _launch_backward(
    s: Tensor, dy: Any, ds: Any, stats: Tensor, weight: Any, rms: bool, affine: int, version: str
) -> tuple[Tensor, ...]:
    outs = dx, dweight, dbias = _fake_backward(s, dy, ds, stats, weight, rms, affine)
    if not s.numel():
        return dx, dweight.zero_(), dbias.zero_()
    s, g, w = (
        unit_column_stride(as_matrix(s)),
        readable(as_matrix(dy)),
        None if weight is None else weight.contiguous(),
    )
    ds = None if ds is None else readable(as_matrix(ds))
    (rows, columns), device, stats = s.shape, s.get_device(), stats.contiguous()
    plan, blocks = plan_of(choose("layernorm", version, device).backward, True, s, w, rms, dx, g, ds)
    partials = stats.new_empty(2, blocks, columns) if affine and blocks > 1 else None
    row_sums = stats.new_empty(rows, plan.parts, 2) if plan.launches[1:] else None
    shared = plan.block[1] * columns * stats.itemsize if affine and plan.block[1] > 1 else 0
    sums = pointers(dweight if affine else None, dbias if affine > 1 else None, partials)
    arguments = (
        dx.data_ptr(),
        *sums,
        *pointers(row_sums, s, g, ds, stats, w),
        rows,
        columns,
        *row_strides(s, g, ds),
    )
    for launch in plan.launches:
        launch((plan.parts, blocks, 1), plan.block, shared, *arguments)
    if partials is not None:
        ADD[stats.dtype, dweight.dtype].on(device)(
            (-(-columns // 16), affine, 1), (16, 32, 1), 0, *sums, blocks, columns
        )
    return outs


def _fake_backward(
    s: Tensor, dy: Any, ds: Any, stats: Any, weight: Any, rms: bool, affine: int, *_: Any
) -> tuple[Tensor, ...]:
    """`affine`: 0: only dx; 1: and dweight; 2: and dbias. What is not wanted has no elements."""
    like, columns = s if weight is None else weight, s.shape[-1]
    return (
        empty_like(s),
        like.new_empty(columns if affine > 0 else 0),
        like.new_empty(columns if affine > 1 else 0),
    )


_layernorm = raw_op(
    "_layernorm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool rms, str version) "
    "-> Tensor[]",
    4,
    _launch,
    _fake,
    sharding="*., *., ., . -> *.",
)
_layernorm_backward = raw_op(
    "_layernorm_backward(Tensor s, Tensor dy, Tensor? ds, Tensor stats, Tensor? weight, bool rms, int "
    "affine, str version)"
    " -> (Tensor, Tensor, Tensor)",
    5, _launch_backward, _fake_backward, sharding="*., *., *., *., . -> *., ., .",
)  # fmt: skip

# ---- the same in torch's operations, for CPU tensors. stats are two tensors, the mean, without elements for
# rmsnorm, and r


def _compute(x: Tensor, residual: Any, weight: Any, bias: Any, eps: float, rms: bool) -> tuple[Tensor, ...]:
    s = x if residual is None else x + residual
    d, (w, b) = s.double(), (None if t is None else t.double() for t in (weight, bias))
    if rms:
        r = (d.square().mean(-1, keepdim=True) + eps).rsqrt()
        y, mean = d * r if w is None else d * r * w, r[:0]
    else:
        y, mean, r = torch.native_layer_norm(d, d.shape[-1:], w, b, eps)
    return y.to(x.dtype), *(() if residual is None else (s,)), mean, r


def _compute_backward(
    s: Tensor, dy: Tensor, ds: Any, mean: Tensor, r: Tensor, weight: Any, rms: bool, affine: int
) -> tuple[Any, ...]:
    d, g, w = s.double(), dy.double(), None if weight is None else weight.double()
    if rms:
        n, h = d * r, g if w is None else g * w
        dx = (h - n * (h * n).mean(-1, keepdim=True)) * r
        sums = [(g * n)[None].flatten(0, -2).sum(0) if affine else None, None]
    else:
        wanted = [True, affine > 0, affine > 1]
        dx, *sums = torch.ops.aten.native_layer_norm_backward(g, d, d.shape[-1:], mean, r, w, w, wanted)
    dweight, dbias = (None if t is None else t.to(weight.dtype) for t in sums)
    return (dx if ds is None else dx + ds.double()).to(s.dtype), dweight, dbias


# ---- autograd


def _gradient_by(backward: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradient(
        needed: Any, inputs: Sequence[Any], stats: Sequence[Tensor], dy: Any, ds: Any = None
    ) -> tuple[Tensor | None, ...]:
        s, residual, weight, bias, _, rms, *version = inputs
        affine = 2 if bias is not None and needed[3] else int(needed[2])
        dx, dweight, dbias = backward(
            s, torch.zeros_like(s) if dy is None else dy, ds, *stats, weight, rms, affine, *version
        )
        return (
            dx,
            None if residual is None else dx,
            dweight if affine else None,
            dbias if affine > 1 else None,
        )

    return gradient


def _of_kept(math: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`math` of what `kept` gives with a residual: s for x, and for the residual s without its history, whose
    change is added to s."""

    def of_kept(s: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        s = s if residual is None else s + (residual - residual.detach())
        return math(s, None, *rest), s

    return of_kept


_apply, _apply_on_cpu = (
    differentiable(
        "_LayerNorm", forward, _of_kept(math), 4, -stats, rows=2, gradient=_gradient_by(backward),
        kept=lambda inputs, outs: inputs if inputs[1] is None else (outs[1], outs[1].detach(), *inputs[2:]),
    )
    for forward, math, backward, stats in (
        (lambda *args: tuple(_layernorm(*args)), reference, _layernorm_backward, 1),
        (_compute, lambda *args: _in_float64(*args)[0], _compute_backward, 2),
    )
)  # fmt: skip

# ---- for the tools: `arguments` gives the arguments of `reference` for an op's inputs. x with a residual is
# an op of its own


def _with_residual(x: Tensor, residual: Tensor, *affine: Tensor, version: str | None = None) -> Any:
    return layernorm(x, *affine, residual=residual, version=version)


def _cost(matrices: int, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    """`matrices`: the tensors of x's shape that the forward reads and writes. The backward reads one more, or
    with a residual none."""
    n = math.prod(dims)
    return {"fwd": Cost(matrices * n * itemsize, 8 * n), "bwd": Cost(max(matrices, 3) * n * itemsize, 16 * n)}


def _magnitude(
    arguments: Callable[..., Any], inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """The sums of the absolute values of the terms."""
    x, residual, weight, bias, eps, rms = arguments(*inputs)
    s, g = x if residual is None else x + residual, douts[0].abs()
    _, r = _normalized(s, eps, rms)
    n, h = (s.abs() + (0 if rms else s.abs().mean(-1, keepdim=True))) * r, g * weight.abs()
    y, dweight = n * weight.abs() + (0.0 if bias is None else bias.abs()), (g * n).sum(0)
    dx = r * (h + h.mean(-1, keepdim=True) + n * (n * h).mean(-1, keepdim=True)) + (
        0.0 if residual is None else douts[1].abs()
    )
    return (
        *((y, dx) if residual is None else (y, s.abs(), dx, dx)),
        dweight,
        *(() if bias is None else (g.sum(0),)),
    )


_OP = Op("layernorm", "layernorm", VERSIONS)
for _name, _function, _inputs, _arguments in (
    (
        "layernorm",
        layernorm,
        ("x", "weight", "bias"),
        lambda x, weight, bias: (x, None, weight, bias, 1e-5, False),
    ),
    ("rmsnorm", rmsnorm, ("x", "weight"), lambda x, weight: (x, None, weight, None, 1e-6, True)),
    (
        "layernorm_residual",
        _with_residual,
        ("x", "residual", "weight", "bias"),
        lambda *inputs: (*inputs, 1e-5, False),
    ),
):
    _matrices = 1 + ("residual" in _inputs)
    register(Case(
        name=_name, op=_OP, variants=row_counts, call=_function, dims="ROWS COLUMNS", inputs=_inputs,
        reference=lambda *inputs, arguments=_arguments: reference(*arguments(*inputs)),
        magnitude=partial(_magnitude, _arguments),
        make=normal(_matrices, len(_inputs) - _matrices), cost=partial(_cost, 2 * _matrices),
        check_dims=((1, 1), (129, 65), (64, 1000), (1000, 768), (33, 4096), (33, 8200), (5, 40_000)),
        sim_dims=((1, 3), (5, 67), (3, 264)),
        bench_dims=((32768, 768), (8192, 4096), (4096, 16384)),
        roundings=4,  # sums over rows and columns, in other orders than torch's
    ))  # fmt: skip
