"""linear with an epilogue, activation(x W^T + bias) + residual, and its gradients."""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.matmul.epilogue import Epilogue, activate
from cukern.ops.matmul.product import PIECES, add_product, column_sums, fake_matmul, product, resolved, run, sum_pieces
from cukern.ops.matmul.reference import torch_matmul
from cukern.ops.matmul.versions import ACTIVATION_BWD, ACTIVATION_WIDTH
from cukern.runtime.higher import gradients, tangents
from cukern.runtime.registry import Differentiable, apply_of, each, raw_op, save, watched
from cukern.runtime.tensors import pointers, wide

# ---- the raw ops: x, residual and dout are matrices


def _launch(
    x: Tensor, weight: Tensor, bias: Any, residual: Any, activation: int, keep: bool, precision: str, version: str
) -> tuple[Tensor, ...]:
    out, pre = _fake(x, weight, bias, residual, activation, keep)
    if out.numel():
        bias, residual = (None if t is None else resolved(t).contiguous() for t in (bias, residual))
        e = Epilogue(bias, activation, pre if keep else None, residual)
        run(out, resolved(x), resolved(weight).t(), e, precision, version)
    return out, pre


def _fake(x: Tensor, weight: Tensor, bias: Any, residual: Any, activation: int, keep: bool, *_: Any) -> tuple[Tensor, ...]:
    """The result and the pre-activation; without `keep` the latter is empty."""
    out = fake_matmul(x, weight.t())
    return out, torch.empty_like(out) if keep else out.new_empty(0)


def _launch_backward(dout: Tensor, pre: Tensor, activation: int, version: str) -> tuple[Tensor, Tensor]:
    (rows, columns), dout = dout.shape, resolved(dout).contiguous()
    dpre, dbias = _fake_backward(dout, pre)
    if not dpre.numel():
        return dpre, dbias.zero_()
    height = -(-rows // PIECES)
    chunks = -(-rows // height)
    sums = torch.empty((chunks, columns), dtype=wide(dout.dtype), device=dout.device)
    width = ACTIVATION_WIDTH[dout.itemsize]
    if columns % width or any(p % 16 for p in pointers(dout, pre)):
        width = 1
    kernel, grid = ACTIVATION_BWD[dout.dtype, width].on(dout.get_device()), (chunks * -(-columns // (32 * width)), 1, 1)
    kernel(grid, (32, 8, 1), 0, *pointers(dpre, sums, dout, pre), rows, columns, height, activation)
    return dpre, sum_pieces(sums, chunks)[0].to(dout.dtype)


def _fake_backward(dout: Tensor, pre: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The gradient of the pre-activation, and its column sums."""
    return torch.empty_like(pre), pre.new_empty(pre.shape[1])


_SCHEMA = "_linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int activation, bool keep, str precision, str version)"
_linear = raw_op(f"{_SCHEMA} -> (Tensor, Tensor)", 4, _launch, _fake)
_SCHEMA = "_linear_activation_backward(Tensor dout, Tensor pre, int activation, str version)"
_activation_backward = raw_op(f"{_SCHEMA} -> (Tensor, Tensor)", 2, _launch_backward, _fake_backward)

# ---- autograd


class _Linear(Differentiable):
    """(x, weight, bias, residual, into, activation, keep, precision, version) -> (out, pre). `into`: what dW is added to, or None."""

    @staticmethod
    def forward(x, weight, bias, residual, into, activation, keep, precision, version):
        return _linear(x, weight, bias, residual, activation, keep or activation > 0, precision, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias, residual, ctx.into, ctx.activation, *ctx.options = inputs
        ctx.set_materialize_grads(False)
        save(ctx, x, weight, bias, residual, output[1] if ctx.activation else None)

    @staticmethod
    def backward(ctx, dout, dpre_out):
        x, weight, bias, residual, pre = ctx.saved_tensors
        if dout is None and dpre_out is None:
            return (None,) * 9
        if watched(x, weight, bias, residual, dout, dpre_out) and not torch.compiler.is_dynamo_compiling():
            if ctx.into is not None:
                raise NotImplementedError("a call of cukern.linear with accumulate_into has no higher derivatives")
            return *gradients(in_torch, (x, weight, bias, residual, ctx.activation), (dout, dpre_out))[:4], *(None,) * 5
        d, dbias = _of_pre(dout, dpre_out, pre, ctx.activation, ctx.options[2])
        options, dweight = ctx.options[1:], None
        dx = product(d, weight, None, *options) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1] and ctx.into is None:
            dweight = product(d.mT, x, None, *options)
        elif ctx.needs_input_grad[1]:
            add_product(ctx.into, d.mT, x, *options)
        if ctx.needs_input_grad[2] and dbias is None:
            dbias = column_sums(d, options[1])
        return dx, dweight, dbias if ctx.needs_input_grad[2] else None, dout if ctx.needs_input_grad[3] else None, *(None,) * 5

    @staticmethod
    def tangent(ctx, *dinputs):
        x, weight, bias, residual, _ = ctx.saved_tensors
        out, pre = tangents(in_torch, (x, weight, bias, residual, ctx.activation), dinputs[:4], 2)
        return out, pre if ctx.options[0] or ctx.activation else pre.new_empty(0)

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


def _of_pre(dout: Tensor | None, dpre: Tensor | None, pre: Tensor, activation: int, version: str) -> tuple[Tensor, Tensor | None]:
    """The gradient of the pre-activation from those of the two outputs, and its column sums if a kernel has computed them."""
    if dout is None:
        return dpre, None  # type: ignore[return-value]
    d, sums = _activation_backward(dout, pre, activation, version) if activation else (dout, None)
    return (d, sums) if dpre is None else (d + dpre, None)


_apply = apply_of(_Linear)


def in_torch(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
    """The result and the pre-activation in torch's operations."""
    pre = torch_matmul(x, weight.t(), bias)
    out = activate(pre, activation)
    return out if residual is None else out + residual, pre


def fused(
    x: Tensor, weight: Tensor, bias: Any, residual: Any, into: Tensor | None, activation: int, keep: bool, precision: str, version: str
) -> tuple[Tensor, Tensor]:
    """The result and, with `keep`, the pre-activation, by kernels. x is a matrix."""
    if watched(x, weight, bias, residual):
        return _apply(x, weight, bias, residual, into, activation, keep, precision, version)
    return _linear(x, weight, bias, residual, activation, keep, precision, version)
