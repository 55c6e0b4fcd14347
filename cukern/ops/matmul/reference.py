"""What products need of torch: its matrix product with autocast off, also in its derivatives, activations, and switches of precision."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.runtime.autocast import enabled, off
from cukern.runtime.higher import tangents
from cukern.runtime.registry import Differentiable, apply_of, each, save, transformed, watched
from cukern.runtime.tensors import as_matrix

ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # as enum Activation in epilogue.cuh
_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)  # of torch 2.9 or newer


def tf32_allowed() -> bool:
    """True if torch's switches allow TF32 in matrix products."""
    precision = _fp32_precision("cuda", "matmul")  # 1.5 us less than torch.backends.cuda.matmul.fp32_precision
    return precision == "tf32" if precision else torch.backends.cuda.matmul.allow_tf32


def cast(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors as autocast wants the inputs of a product: all but float64 in its dtype."""
    first = tensors[0]
    if first is None or not enabled(first) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


# ---- the epilogue


class Epilogue(NamedTuple):
    """out = activation(product + bias) + residual. `activation` is an index of ACTIVATIONS. `pre` is where product + bias is stored.
    `residual` may be the output, which is added to."""

    bias: Tensor | None = None
    activation: int = 0
    pre: Tensor | None = None
    residual: Tensor | None = None


def activate(x: Tensor, activation: int, out: Tensor | None = None) -> Tensor:
    """The activation in torch's operations, written to `out` if that is given."""
    if not activation:
        return x
    name, _, kind = ACTIVATIONS[activation].partition("_")
    op, options = getattr(torch.ops.aten, name), {"approximate": kind or "none"} if name == "gelu" else {}
    with off(x):
        return op(x, **options) if out is None else op.out(x, **options, out=out)


def finish(out: Tensor, product: Tensor, e: Epilogue) -> None:
    """Write the results to `out` by torch's operations, from a product, which may be `out` or `e.pre`, to which the bias has been added."""
    if e.pre is not None and e.pre is not product:
        e.pre.copy_(product)
    if e.activation and product.dtype == out.dtype:
        activate(product, e.activation, out)
    elif product is not out:
        out.copy_(activate(product, e.activation) if e.residual is not out else activate(product, e.activation) + out)
    if e.residual is not None and e.residual is not out:
        out.add_(e.residual)


def in_torch(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
    """activation(a @ b + bias) + residual, and a @ b + bias, in torch's operations."""
    pre = torch_matmul(a, b, bias)
    out = activate(pre, activation)
    return out if residual is None else out + residual, pre


# ---- the product


def torch_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b: (..., M, K) @ (K, N), (M, K) @ (S, K, N) or (S, M, K) @ (S, K, N); for two matrices also a @ b + bias."""
    if watched(a, b, bias) and (enabled(a) or not transformed()):  # otherwise torch derives its own operations
        return _apply(a, b, bias)
    return _Matmul.forward(a, b, bias)


class _Matmul(Differentiable):
    @staticmethod
    def forward(a, b, bias):
        with off(a):
            return torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx, g):
        a, b, _ = ctx.saved_tensors
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = torch_matmul(g, b.mH)
            da = da.sum(0, dtype=da.dtype) if da.ndim > a.ndim else da  # with a dtype, autocast does not change a sum
        if ctx.needs_input_grad[1]:
            x, d = (as_matrix(a), as_matrix(g)) if b.ndim == 2 else (a, g)
            db = torch_matmul(d.mH, x).mH if b.stride(-2) == 1 else torch_matmul(x.mH, d)  # in b's layout
        if ctx.needs_input_grad[2]:  # torch's sum of 16-bit columns takes up to twice as long as a product
            narrow = g.is_cuda and g.dtype.itemsize == 2
            dbias = torch_matmul(g.new_ones(1, g.shape[0]), g)[0] if narrow else g.sum(0, dtype=g.dtype)
        return da, db, dbias

    @staticmethod
    def tangent(ctx, *dinputs):
        return tangents(torch_matmul, ctx.saved_tensors, dinputs)[0]

    @staticmethod
    def batch(info, in_dims, *args):
        return each(torch_matmul, info.batch_size, in_dims, args)


_apply: Any = apply_of(_Matmul)
