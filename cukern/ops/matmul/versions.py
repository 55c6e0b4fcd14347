"""The versions of matmul: how each launches its kernel, and the table that the tools and the public functions
use.

PRODUCTS[version](out, a, b, e, precision) launches it: out (M x N) is contiguous, a (M x K) and b (K x N)
have any strides, or all are batches of such matrices; e is the Epilogue, whose tensors are contiguous.
`precision` is that of float32: "ieee", "tf32" or "3xtf32".
"""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from cukern.ops.matmul import plan, tensor_cores
from cukern.ops.matmul.tensor_cores import ACTIVATIONS, Epilogue
from cukern.runtime.dispatch.autocast import off
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.launch import limits
from cukern.runtime.launch.kernel import Kernel, Template, planning
from cukern.runtime.registry import Version
from cukern.runtime.tensors import pointers, wide

Product = Callable[[Tensor, Tensor, Tensor, Epilogue, str], None]
Multiply = Callable[[Tensor, Tensor, Tensor, Tensor | None], object]  # product = a . b + bias
_V1, _V2, _V3, _V4, _V5, _V5_FIXUP = (
    Template("matmul/ladder.cu", f"matmul_{n}") for n in ("v1", "v2", "v3", "v4", "v5", "v5_fixup")
)
ACTIVATION_BWD = Template("matmul/matmul.cu", "matmul_activation_bwd")
# its vectors, by the size of an element; two doubles are too many registers
ACTIVATION_WIDTH = {2: 8, 4: 4, 8: 1}
COPY_MODES = "ALONG_K", "ALONG_MN", "ALONG_MN_16B"  # CopyMode in stream_k.cuh


def activate(x: Tensor, activation: int, out: Tensor | None = None) -> Tensor:
    """The activation in torch's operations, written to `out` if that is given."""
    if not activation:
        return x
    name, _, kind = ACTIVATIONS[activation].partition("_")
    op, options = getattr(torch.ops.aten, name), {"approximate": kind or "none"} if name == "gelu" else {}
    with off(x):
        return op(x, **options) if out is None else op.out(x, **options, out=out)


def in_torch(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int
) -> tuple[Tensor, Tensor]:
    """activation(a @ b + bias) + residual, and a @ b + bias, in torch's operations."""
    pre = torch_matmul(a, b, bias)
    out = activate(pre, activation)
    return out if residual is None else out + residual, pre


def _unfused(
    multiply: Multiply, out: Tensor, a: Tensor, b: Tensor, e: Epilogue, _precision: str,
    dtype: torch.dtype | None = None,
) -> None:  # fmt: skip
    """`multiply` computes the product with its bias in this dtype, by default the one in which FMA units add,
    in the pre-activation or the output if they may hold it. torch computes the rest of the epilogue."""
    product, bias, dtype = out if e.pre is None else e.pre, e.bias, dtype or wide(a.dtype)
    if a.dtype != dtype:
        a, b, bias = a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype)
    if product.dtype != dtype or e.residual is out:
        product = torch.empty_like(out, dtype=dtype)
    multiply(product, a, b, bias)
    if e.pre is not None and e.pre is not product:
        e.pre.copy_(product)
    if e.residual is not None:
        torch.add(activate(product, e.activation), e.residual, out=out)
    elif e.activation and product.dtype == out.dtype:
        activate(product, e.activation, out)
    elif product is not out:
        out.copy_(activate(product, e.activation))


def _torch_product(product: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    torch.matmul(a, b, out=product) if bias is None else torch.addmm(bias, a, b, out=product)


def _cublas(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str) -> None:
    """Follows torch's switches of precision. The sum with a float32 output is computed in float32."""
    if planning():  # a plan needs no product, and those of large shapes take minutes on a CPU
        return
    with off(a):
        if e.residual is out and e.bias is e.pre is None:  # no activation either
            out.addmm_(a.to(out.dtype), b.to(out.dtype))
        else:
            _unfused(_torch_product, out, a, b, e, precision, out.dtype)


def _matrices(*batches: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*batches, strict=True) if batches[0].ndim == 3 else [batches]


def _tensor_cores(wgmma: bool, out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str) -> None:
    """v6 and v7."""
    dtype = a.dtype
    if dtype == torch.float64 or (dtype == torch.float32 and precision == "ieee"):
        PRODUCTS["v5"](out, a, b, e, precision)
    else:
        tensor_cores.launch(out, a, b, e, 3 if dtype == torch.float32 and precision == "3xtf32" else 1, wgmma)


def _strided(template: Template, block: limits.Dim, blocks: Callable[[int, int], int]) -> Product:
    """v1 to v3, whose kernels accept any strides of A and B."""

    def launch(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        (M, N), K = out.shape[-2:], a.shape[-1]
        for c, x, y in _matrices(out, a, b):
            arguments = (*pointers(c, x, y, bias), M, N, K, *x.stride(), *y.stride())
            template[a.dtype].on(a.get_device())((blocks(M, N), 1, 1), block, 0, *arguments)

    return partial(_unfused, launch)


def _tiled(newest: bool) -> Product:
    """v4 and v5."""

    def launch(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        (*lead, M, N), K, device, itemsize, dtype = (
            out.shape,
            a.shape[-1],
            a.get_device(),
            a.itemsize,
            a.dtype,
        )
        a, mode_a, lda, of_a = _readable(a, -2, -1)
        b, mode_b, ldb, of_b = _readable(b, -1, -2)
        # in v5, offsets inside a tile have 32 bits
        if not newest or 128 * itemsize * max(lda, ldb) >= 1 << 32:
            kernel = _V4[dtype, mode_a == "ALONG_K", mode_b != "ALONG_K"].on(device)
            for c, x, y in _matrices(out, a, b):
                kernel(
                    (-(-M // 128) * -(-N // 128), 1, 1),
                    (256, 1, 1),
                    0,
                    *pointers(c, x, y, bias),
                    M,
                    N,
                    K,
                    lda,
                    ldb,
                )
            return
        batch, along_k = math.prod(lead), (mode_a == "ALONG_K", mode_b == "ALONG_K")
        tile, blocks, shared_blocks, shared_tiles, chain, room = plan.fma_plan(
            M, N, K, batch, itemsize, *along_k, device
        )
        sizes = tensor_cores.SIZES.pack(M, N, K, batch, 1, 0, lda, ldb, of_a, of_b)
        if not tile.us:
            kernel = tensor_cores.DIRECT[dtype, dtype, tile.name].on(device)
            kernel(
                (blocks, 1, 1),
                (32 * tile.warps, 1, 1),
                0,
                *pointers(out, None, a, b, bias, None),
                sizes,
                chain,
            )
            return
        workspace = (
            torch.empty(room * tile.rows * tile.columns, dtype=dtype, device=out.device) if room else None
        )
        kernel = _V5[dtype, mode_a, mode_b, tile.name].on(device)
        kernel(
            (blocks, 1, 1),
            (128, 1, 1),
            0,
            *pointers(out, workspace, a, b, bias),
            sizes,
            shared_blocks,
            shared_tiles,
            chain,
        )
        if shared_blocks:
            # squares of a tile per thread, of 128 threads
            squares = tile.rows * tile.columns // 128 // (16 // itemsize) ** 2
            grid, kernel = (shared_tiles * squares, 1, 1), _V5_FIXUP[dtype, tile.name].on(device)
            kernel(grid, (128, 1, 1), 0, *pointers(out, workspace, bias), sizes, shared_blocks, shared_tiles)

    return partial(_unfused, launch)


def _readable(x: Tensor, row: int, k: int) -> tuple[Tensor, str, int, int]:
    """x, copied if no stride is 1; how v5 copies its tiles, an enumerator of CopyMode in stream_k.cuh, which
    says what each requires; and the stride that is not 1, and that of a batch. `row`, `k`: the dimensions
    along the rows of the operand and along K."""
    shape, strides = x.shape, x.stride()
    of_batch = strides[0] if x.ndim == 3 else 0
    if strides[k] == 1 or (shape[k] <= 1 and strides[row] != 1):
        return x, "ALONG_K", strides[row], of_batch
    if strides[row] == 1 or shape[row] <= 1:
        unaligned = (x.data_ptr() | (strides[k] | shape[row] | of_batch) * x.itemsize) % 16
        return x, "ALONG_MN" if unaligned else "ALONG_MN_16B", strides[k], of_batch
    return _readable(x.contiguous() if k == -1 else x.mT.contiguous().mT, row, k)


def _v4_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    yield from (_V4[wide(dtype), a_k, b_n] for a_k, b_n in itertools.product((True, False), repeat=2))
    yield from (ACTIVATION_BWD[dtype, w] for w in {1, ACTIVATION_WIDTH[dtype.itemsize]})  # of all versions


def _v5_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    yield from (
        tensor_cores.DIRECT[dtype, dtype, t.name]
        for t in plan.TILES
        if not t.stages and dtype == torch.float32
    )
    for tile in plan.FMA_TILES[wide(dtype).itemsize]:
        yield _V5_FIXUP[wide(dtype), tile.name]
        yield from (_V5[wide(dtype), a, b, tile.name] for a, b in itertools.product(COPY_MODES, COPY_MODES))


def _only(template: Template) -> Callable[[torch.dtype], Iterable[Kernel]]:
    return lambda dtype: [template[wide(dtype)]]


PRODUCTS: dict[str, Product] = {
    "cublas": _cublas,
    "v1": _strided(_V1, (256, 1, 1), lambda M, N: -(-M * N // 256)),
    "v2": _strided(_V2, (16, 16, 1), lambda M, N: -(-M // 16) * -(-N // 16)),
    "v3": _strided(_V3, (32, 32, 1), lambda M, N: -(-M // 32) * -(-N // 32)),
    "v4": _tiled(False),
    "v5": _tiled(True),
    "v6": partial(_tensor_cores, False),
    "v7": partial(_tensor_cores, True),
}
VERSIONS = {
    "cublas": Version("torch's product, which is cuBLAS's"),
    "v1": Version("one thread per output", _only(_V1)),
    "v2": Version("16x16 blocks, coalesced", _only(_V2)),
    "v3": Version("shared-memory tiles", _only(_V3)),
    "v4": Version("register tiles", _v4_instances),
    "v5": Version("asynchronous copies, even split of the last wave", _v5_instances, 80),
    "v6": Version("tensor cores by mma.sync", partial(tensor_cores.instances, wgmma=False), 80),
    "v7": Version(
        "tensor cores by wgmma, TMA, persistent, clusters", partial(tensor_cores.instances, wgmma=True), 90
    ),
}
