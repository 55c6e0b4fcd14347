"""Products, sums of columns, and their derivatives of any order: the raw ops and autograd.

Every product is out (M x N) = A (M x K) . B (K x N), or a batch of them. A and B are views of any strides, so a transposed matrix is not
copied.
    y = x W^T + bias          A = x,    B = W^T
    dx = dy W                 A = dy,   B = W
    dW = dy^T x               A = dy^T, B = x
    dbias = column sums of dy
"""

import os
from typing import Any

import torch
from torch import Tensor

from cukern.ops.matmul.epilogue import NO_EPILOGUE, Epilogue
from cukern.ops.matmul.precision import tf32_allowed
from cukern.ops.matmul.versions import BIAS_GRAD, DEFAULTS, VERSIONS
from cukern.runtime.device import cached, current, device_of
from cukern.runtime.registry import DEFAULT, Differentiable, Version, apply_of, batched, choose, each, raw_op, save, watched
from cukern.runtime.tensors import wide

# ---- the version and the precision of a call


def run(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str, version: str) -> None:
    """Launch out = epilogue(a . b). `precision`: "" for torch's switches; `version`: "" for that of `cukern.use`."""
    switched = a.dtype == torch.float32 and precision != "ieee" and tf32_allowed()
    chosen, precision = _chosen(a.dtype, out.dtype, precision or ("tf32" if switched else ""), switched, version, a.get_device())
    chosen.forward(out, a, b, e, precision)


@cached(4096)
def _chosen(dtype: torch.dtype, out: torch.dtype, precision: str, switched: bool, version: str, device: int) -> tuple[Version, str]:
    """The version, and the precision of float32. If the caller names a tensor-core version, it computes 3xTF32 unless TF32 is allowed.
    `switched`: torch's switches allow TF32, and cuBLAS follows them."""
    named = version or current().versions.get("matmul", (os.environ.get("CUKERN_MATMUL", ""),))[0]
    if named not in ("", DEFAULT):
        return choose("matmul", version, device), precision or "3xtf32"
    kind = "torch"
    if dtype == torch.float64 or (dtype == torch.float32 and precision in ("", "ieee")):
        kind = "float"
    elif out != dtype or (dtype == torch.float32 and (precision == "3xtf32" or not switched)):
        kind = "tensor cores"
    name = next(n for n in DEFAULTS[kind] if VERSIONS[n].requires <= device_of(device).capability)
    return VERSIONS[name], precision if kind != "float" and name != "v4" else "ieee"


def default_is_cublas(dtype: torch.dtype, device: int) -> bool:
    """True if a product without options is cuBLAS's, whatever torch's precision switches say."""
    return dtype.itemsize == 2 and _chosen(dtype, dtype, "", False, "", device)[0] is VERSIONS["cublas"]


# ---- the raw ops


def _launch_matmul(a: Tensor, b: Tensor, bias: Tensor | None, precision: str, version: str) -> Tensor:
    out = fake_matmul(a, b)
    if out.numel():
        if a.is_neg() or b.is_neg():
            a, b = a.resolve_neg(), b.resolve_neg()
        e = NO_EPILOGUE if bias is None else Epilogue(resolved(bias).contiguous())
        run(out, a, b, e, precision, version)
    return out


def resolved(x: Tensor) -> Tensor:
    """x without a lazy negation."""
    return x.resolve_neg() if x.is_neg() else x


def fake_matmul(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    shape, columns = a.shape, b.shape[-1]
    return a.new_empty((shape[0], columns) if len(shape) == 2 else (*shape[:-1], columns))


def _launch_add(out: Tensor, a: Tensor, b: Tensor, precision: str, version: str) -> None:
    if out.numel() and a.shape[-1]:
        run(out, resolved(a), resolved(b), Epilogue(residual=out), precision, version)


# The gradient of the bias: column sums over PIECES groups of rows, then over these sums, always in the same order.
PIECES = 64


def _launch_column_sum(x: Tensor, version: str) -> Tensor:
    if not x.numel():
        return torch.zeros(x.shape[1], dtype=x.dtype, device=x.device)
    sums = resolved(x)
    if x.shape[0] > PIECES:
        sums = sum_pieces(sums, -(-x.shape[0] // PIECES))
    return sum_pieces(sums, sums.shape[0])[0].to(x.dtype)


def sum_pieces(x: Tensor, height: int) -> Tensor:
    """Column sums of each `height` rows, in the dtype of computation."""
    rows, columns = x.shape
    pieces = -(-rows // height)
    out = torch.empty((pieces, columns), dtype=wide(x.dtype), device=x.device)
    grid = (-(-columns // 32) * pieces, 1, 1)
    BIAS_GRAD[x.dtype].on(x.get_device())(grid, (32, 8, 1), 0, out.data_ptr(), x.data_ptr(), rows, columns, height, *x.stride())
    return out


_matmul = raw_op("_matmul(Tensor a, Tensor b, Tensor? bias, str precision, str version) -> Tensor", 3, _launch_matmul, fake_matmul)
add_product = raw_op("_add_product(Tensor(a!) out, Tensor a, Tensor b, str precision, str version) -> ()", 3, _launch_add, lambda *_: None)
_column_sum = raw_op("_column_sum(Tensor x, str version) -> Tensor", 1, _launch_column_sum, lambda x, version: x.new_empty(x.shape[1]))

# ---- autograd: the gradients of a product are products, so _Product computes all higher derivatives


class _Product(Differentiable):
    @staticmethod
    def forward(a, b, bias, precision, version):
        return _matmul(a, b, bias, precision, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, _, *ctx.options = inputs
        save(ctx, a, b)

    @staticmethod
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        da = product(dout, b.mT, None, *ctx.options) if ctx.needs_input_grad[0] else None
        db = product(a.mT, dout, None, *ctx.options) if ctx.needs_input_grad[1] else None
        dbias = column_sums(dout, ctx.options[1]) if ctx.needs_input_grad[2] else None
        return da, db, dbias, None, None

    @staticmethod
    def tangent(ctx, da, db, dbias, *_):
        a, b = ctx.saved_tensors
        out = product(da, b, None, *ctx.options) + product(a, db, None, *ctx.options)
        return out if dbias is None else out + dbias

    @staticmethod
    def batch(info, in_dims, a, b, bias, *options):
        size, (a_dim, b_dim, bias_dim, *_) = info.batch_size, in_dims
        if a.ndim - (a_dim is not None) == 3:
            return each(product, size, in_dims, (a, b, bias, *options))
        if b_dim is None and bias_dim is None:
            a = a.movedim(a_dim, 0)
            return product(a.flatten(0, 1), b, bias, *options).view(size, a.shape[1], b.shape[1]), 0
        if bias is None:
            return product(batched(a, a_dim, size), batched(b, b_dim, size), None, *options), 0
        return each(product, size, in_dims, (a, b, bias, *options))

    @staticmethod
    def recorded(ctx, a, b, bias, *options):
        ctx.options = options
        ctx.save_for_backward(a, b)
        return _matmul(a, b, bias, *options)


class _ColumnSum(Differentiable):
    @staticmethod
    def forward(x, version):
        return _column_sum(x, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.rows, ctx.version = inputs[0].shape[0], inputs[1]

    @staticmethod
    def backward(ctx, dout):
        return dout.expand(ctx.rows, -1), None

    @staticmethod
    def tangent(ctx, dx, _):
        return column_sums(dx, ctx.version)

    @staticmethod
    def batch(info, in_dims, x, version):
        x = x.movedim(in_dims[0], 1)
        return column_sums(x.flatten(1), version).view(x.shape[1:]), 0


def product(a: Tensor, b: Tensor, bias: Tensor | None, precision: str, version: str) -> Tensor:
    """a . b + bias, differentiable: two matrices, or two batches of matrices without a bias."""
    return _apply(a, b, bias, precision, version) if watched(a, b, bias) else _matmul(a, b, bias, precision, version)


_apply, column_sums = apply_of(_Product), apply_of(_ColumnSum)
