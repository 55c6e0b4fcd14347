"""torch's matrix product and column sums with autocast off, also in their derivatives of any order, and
torch's switch of precision."""

from typing import Any

import torch
from torch import Tensor

from cukern.runtime import recording
from cukern.runtime.dispatch.autocast import enabled, off
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, save, transformed, watched
from cukern.runtime.dispatch.higher import tangents
from cukern.runtime.tensors import as_matrix

_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", lambda *_: None)  # of torch 2.9 or newer


def _tf32_allowed() -> bool:
    # 1.5 us less than torch.backends.cuda.matmul.fp32_precision
    precision = _fp32_precision("cuda", "matmul")
    return precision == "tf32" if precision else torch.backends.cuda.matmul.allow_tf32


def tf32_allowed() -> bool:
    """True if torch's switches allow TF32 in matrix products."""
    allowed = _tf32_allowed()
    if (recorder := recording.local.recorder) is not None:
        recorder.asked(_tf32_allowed, allowed)
    return allowed


def torch_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b: (..., M, K) @ (K, N), (M, K) @ (S, K, N) or (S, M, K) @ (S, K, N); for two matrices also a @ b +
    bias."""
    # otherwise torch derives its own operations
    if watched(a, b, bias) and (enabled(a) or not transformed()):
        return _apply(a, b, bias)
    return _Matmul.forward(a, b, bias)


def column_sums(x: Tensor) -> Tensor:
    """The sums of the columns of a matrix. torch's sum of 16-bit columns takes up to twice as long as a
    product."""
    if x.is_cuda and x.dtype.itemsize == 2:
        return torch_matmul(x.new_ones(1, x.shape[0]), x)[0]
    return x.sum(0, dtype=x.dtype)


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
        da = db = None
        if ctx.needs_input_grad[0]:
            da = torch_matmul(g, b.mH)
            # with a dtype, autocast does not change a sum
            da = da.sum(0, dtype=da.dtype) if da.ndim > a.ndim else da
        if ctx.needs_input_grad[1]:
            x, d = (as_matrix(a), as_matrix(g)) if b.ndim == 2 else (a, g)
            columns = b.stride(-2) == 1 != b.shape[-1]  # the gradient has b's layout
            db = torch_matmul(d.mH, x).mH if columns else torch_matmul(x.mH, d)
        return da, db, column_sums(g) if ctx.needs_input_grad[2] else None

    @staticmethod
    def tangent(ctx, *dinputs):
        return tangents(torch_matmul, ctx.saved_tensors, dinputs)[0]

    @staticmethod
    def batch(info, in_dims, *args):
        return each(torch_matmul, info.batch_size, in_dims, args)


_apply: Any = apply_of(_Matmul)
