"""matmul and linear in strict float32 (no TF32) and float64, and their gradients, by one set of kernels.

Every product is out (M x N) = A (M x K) . B (K x N). A and B are views of any strides, so a transposed matrix is not copied.
    y = x W^T + bias          A = x,    B = W^T
    dx = dy W                 A = dy,   B = W
    dW = dy^T x               A = dy^T, B = x
    dbias = column sums of dy
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from cukern.ops.matmul.plan import TILES
from cukern.ops.matmul.reference import torch_matmul
from cukern.ops.matmul.versions import BIAS_GRAD, VERSIONS
from cukern.runtime import backend, checks, interop
from cukern.runtime.registry import Cost, Differentiable, Op, apply_of, choose, each, raw_op, register, row_counts, save, watched

DTYPES = (torch.float32, torch.float64)


def matmul(a: Any, b: Any, *, version: str | None = None) -> torch.Tensor:
    """a @ b, computed in a's dtype throughout (float32 never uses TF32). Differentiable any number of times.

        a = torch.randn(8, 512, 256, device="cuda", requires_grad=True)
        y = cukern.matmul(a, torch.randn(256, 1024, device="cuda"))  # (8, 512, 1024)
        y.sum().backward()

    Args:
        a: (..., M, K), float32 or float64: a tensor, or an array that supports DLPack.
        b: (K, N), of a's dtype and device. Transposed views of a and b are not copied. A view without a stride of 1 is copied first, and so
            is a if its leading dimensions cannot be flattened to one.
        version: "v1" to "v5"; default: the fastest that the GPU can run. CPU tensors use torch.matmul, or the simulator.

    Returns (..., M, N), contiguous. Autocast does not change the dtype or the computation.

    Raises TypeError for another dtype or two different dtypes; ValueError for shapes that do not fit, two devices, or an unknown version.
    """
    a, b = _inputs("matmul", version, a=a, b=b)
    if a.ndim < 2 or b.ndim != 2:
        raise ValueError(f"a must be (..., M, K) and b (K, N), got {tuple(a.shape)} and {tuple(b.shape)}")
    if a.shape[-1] != b.shape[0]:
        raise ValueError(f"the last dimension of a, {a.shape[-1]}, must equal the first of b, {b.shape[0]}")
    return _by_rows(a, b, None, version)


def linear(x: Any, weight: Any, bias: Any = None, *, version: str | None = None) -> torch.Tensor:
    """x @ weight.T + bias, like torch.nn.functional.linear, computed in x's dtype throughout (float32 never uses TF32).

        x, weight, bias = (torch.randn(s, device="cuda", requires_grad=True) for s in ((32, 768), (3072, 768), (3072,)))
        cukern.linear(x, weight, bias).square().sum().backward()

    Args:
        x: (..., K), float32 or float64: a tensor, or an array that supports DLPack.
        weight: (N, K); bias: (N,) or None. Of x's dtype and device.
        version: see `matmul`.

    Returns (..., N), contiguous. Autocast, copies and errors as in `matmul`.
    """
    x, weight, bias = _inputs("linear", version, x=x, weight=weight, bias=bias)
    if x.ndim < 1 or weight.ndim != 2:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"the last dimension of x, {x.shape[-1]}, must equal the last of weight, {weight.shape[1]}")
    if bias is not None:
        checks.shape("bias", bias, (weight.shape[0],), "one value for each row of weight")
    return _by_rows(x, weight.t(), bias, version)


def _by_rows(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, version: str | None) -> torch.Tensor:
    rows = a if a.ndim == 2 else a.reshape(a.shape[:-1].numel(), a.shape[-1])
    kernels = a.is_cuda or backend.simulates(a)
    out = _product(rows, b, bias, version or "") if kernels else torch_matmul(rows, b, bias)
    return out if a.ndim == 2 else out.view(*a.shape[:-1], b.shape[1])


def _inputs(op: str, version: Any, **values: Any) -> list[Any]:
    tensors: dict[str, Any] = {n: v if v is None and n == "bias" else interop.to_torch(n, v) for n, v in values.items()}
    for name, t in tensors.items():
        if t is not None:
            checks.dtype(name, t, DTYPES)
    checks.same(**tensors)
    if version is not None:
        checks.version(op, version, VERSIONS)
        first = next(iter(tensors.values()))
        if not first.is_cuda and not backend.simulates(first):
            checks.needs_gpu(op, version, first.device)
    return list(tensors.values())


# ---- the raw ops


def _launch_matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, version: str) -> torch.Tensor:
    out = _fake_matmul(a, b)
    if out.numel():
        a, b, bias = a.resolve_neg(), b.resolve_neg(), None if bias is None else bias.resolve_neg().contiguous()
        choose("matmul", version, a.get_device()).forward(out, a, b, bias)
    return out


def _fake_matmul(a: torch.Tensor, b: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device=a.device)


# The gradient of the bias: column sums over PIECES groups of rows, then over these sums, always in the same order.
PIECES = 64


def _launch_column_sum(x: torch.Tensor, version: str) -> torch.Tensor:
    x, (rows, columns) = x.resolve_neg(), x.shape
    if not x.numel():
        return torch.zeros(columns, dtype=x.dtype, device=x.device)
    if rows > PIECES:
        x = _sum_pieces(x, -(-rows // PIECES))
    return _sum_pieces(x, x.shape[0])[0]


def _sum_pieces(x: torch.Tensor, height: int) -> torch.Tensor:
    """Column sums of each `height` rows."""
    rows, columns = x.shape
    pieces = -(-rows // height)
    out = torch.empty((pieces, columns), dtype=x.dtype, device=x.device)
    grid = (-(-columns // 32) * pieces, 1, 1)
    BIAS_GRAD[x.dtype].on(x.get_device())(grid, (32, 8, 1), 0, out.data_ptr(), x.data_ptr(), rows, columns, height, *x.stride())
    return out


_matmul = raw_op("_matmul(Tensor a, Tensor b, Tensor? bias, str version) -> Tensor", 3, _launch_matmul, _fake_matmul)
_column_sum = raw_op("_column_sum(Tensor x, str version) -> Tensor", 1, _launch_column_sum, lambda x, version: x.new_empty(x.shape[1]))

# ---- autograd: the gradients of a product are products, so _Product computes all higher derivatives


class _Product(Differentiable):
    @staticmethod
    def forward(a, b, bias, version):
        return _matmul(a, b, bias, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, _, ctx.version = inputs
        save(ctx, a, b)

    @staticmethod
    def backward(ctx, dout):
        a, b = ctx.saved_tensors
        da = _product(dout, b.t(), None, ctx.version) if ctx.needs_input_grad[0] else None
        db = _product(a.t(), dout, None, ctx.version) if ctx.needs_input_grad[1] else None
        dbias = _column_sums(dout, ctx.version) if ctx.needs_input_grad[2] else None
        return da, db, dbias, None

    @staticmethod
    def tangent(ctx, da, db, dbias, _):
        a, b = ctx.saved_tensors
        out = _product(da, b, None, ctx.version) + _product(a, db, None, ctx.version)
        return out if dbias is None else out + dbias

    @staticmethod
    def batch(info, in_dims, a, b, bias, version):
        size, (a_dim, b_dim, bias_dim, _) = info.batch_size, in_dims
        if b_dim is None and bias_dim is None:
            a = a.movedim(a_dim, 0)
            return _product(a.flatten(0, 1), b, bias, version).view(size, a.shape[1], b.shape[1]), 0
        if a_dim is None and bias is None:
            b = b.movedim(b_dim, 1)
            return _product(a, b.flatten(1), None, version).view(a.shape[0], size, b.shape[2]), 1
        return each(_product, size, in_dims, (a, b, bias, version))

    @staticmethod
    def recorded(ctx, a, b, bias, version):
        ctx.version = version
        ctx.save_for_backward(a, b)
        return _matmul(a, b, bias, version)


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
        return _column_sums(dx, ctx.version)

    @staticmethod
    def batch(info, in_dims, x, version):
        x = x.movedim(in_dims[0], 1)
        return _column_sums(x.flatten(1), version).view(x.shape[1:]), 0


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, version: str) -> torch.Tensor:
    return _apply(a, b, bias, version) if watched(a, b, bias) else _matmul(a, b, bias, version)


_apply, _column_sums = apply_of(_Product), apply_of(_ColumnSum)

# ---- for the tools


def _make_matmul(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    M, N, K = dims
    return torch.randn(M, K, dtype=dtype, device=device), torch.randn(K, N, dtype=dtype, device=device)


def _make_linear(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    M, N, K = dims
    x, weight, bias = (torch.randn(shape, dtype=dtype, device=device) for shape in ((M, K), (N, K), (N,)))
    return x, weight * K**-0.5, bias


def _cost(inputs: tuple[str, ...], dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    M, N, K = dims
    one = Cost((M * K + K * N + M * N) * itemsize, 2 * M * N * K)
    return {"fwd": one, "bwd": Cost(2 * one.bytes, 2 * one.flops), **{f"bwd:{name}": one for name in inputs[:2]}}


for _name, _function, _reference, _make, _inputs_of_op, _bench_dims in (
    ("matmul", matmul, torch.matmul, _make_matmul, ("a", "b"), ((4096, 4096, 4096), (8192, 8192, 8192))),
    ("linear", linear, torch.nn.functional.linear, _make_linear, ("x", "weight", "bias"), ((4096, 3072, 768),)),
):
    register(
        Op(
            name=_name,
            stem="matmul",
            variants=row_counts,
            candidates=tuple(tile.name for tile in TILES[4]),
            function=_function,
            reference=_reference,
            versions=VERSIONS,
            dtypes=DTYPES,
            dims="M N K",
            check_dims=((1, 1, 1), (64, 64, 64), (129, 67, 255), (5, 300, 1000)),
            sim_dims=((1, 1, 1), (3, 33, 800), (64, 64, 64), (70, 90, 50)),
            bench_dims=_bench_dims,
            make=_make,
            inputs=_inputs_of_op,
            cost=partial(_cost, _inputs_of_op),
            bound="compute",
            # One chain of additions, as in v1 to v4, has an error of up to 2.6 epsilons times the sum of |a b| on random data, whatever its
            # length. So does cuBLAS on an H200, except where it splits the chain. v5 splits it too, and stays within twice cuBLAS's error.
            roundings=3,
        )
    )
