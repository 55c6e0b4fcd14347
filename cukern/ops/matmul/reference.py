"""torch's matrix product with autocast off, also in its derivatives: backward may run where autocast is on."""

from typing import Any

import torch
from torch import Tensor

from cukern.runtime.autocast import enabled, off
from cukern.runtime.registry import Differentiable, apply_of, batched, save, transformed, watched

_tracing = torch.compiler.is_dynamo_compiling


def torch_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b: (..., M, K) @ (K, N), (M, K) @ (S, K, N) or (S, M, K) @ (S, K, N); for two matrices also a @ b + bias."""
    if watched(a, b, bias) and (enabled(a) or not (_tracing() and transformed())):  # torch.compile derives torch's own operations
        return _apply(a, b, bias)
    return _Matmul.forward(a, b, bias)


class _Matmul(Differentiable):
    @staticmethod
    def forward(a, b, bias):
        with off(a):
            return torch.matmul(a, b) if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, _ = inputs
        save(ctx, a, b)

    @staticmethod
    def backward(ctx, g):
        a, b = ctx.saved_tensors
        da = db = dbias = None
        if ctx.needs_input_grad[0]:
            da = torch_matmul(g, b.mH)
            da = da.sum(0, dtype=da.dtype) if da.ndim > a.ndim else da  # with a dtype, autocast does not change a sum
        if ctx.needs_input_grad[1]:
            x, d = (_rows(a), _rows(g)) if b.ndim == 2 else (a, g)
            db = torch_matmul(d.mH, x).mH if b.stride(-2) == 1 else torch_matmul(x.mH, d)  # in b's layout
        if ctx.needs_input_grad[2]:
            if g.is_cuda and g.dtype.itemsize == 2:  # torch's sum of 16-bit columns takes up to twice as long
                dbias = torch_matmul(g.new_ones(1, g.shape[0]), g)[0]
            else:
                dbias = g.sum(0, dtype=g.dtype)
        return da, db, dbias

    @staticmethod
    def tangent(ctx, da, db, dbias):
        a, b = ctx.saved_tensors
        dy = torch_matmul(da, b) + torch_matmul(a, db)
        return dy if dbias is None else dy + dbias

    @staticmethod
    def batch(info, in_dims, a, b, bias):
        size, (a_dim, b_dim, bias_dim) = info.batch_size, in_dims
        a = batched(a, a_dim, size)
        if b_dim is None and b.ndim == 2:
            y = torch_matmul(a, b)
        else:
            b = batched(b, b_dim, size)
            if b.ndim == 4:
                a = (a if a.ndim == 4 else a[:, None].expand(-1, b.shape[1], -1, -1)).flatten(0, 1)
                y = torch_matmul(a, b.flatten(0, 1)).unflatten(0, b.shape[:2])
            else:
                y = torch_matmul(a.flatten(1, -2), b).view(*a.shape[:-1], b.shape[-1])
        return (y if bias is None else y + batched(bias, bias_dim, size)[:, None]), 0


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


_apply: Any = apply_of(_Matmul)
