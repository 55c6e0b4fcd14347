"""The versions of matmul: how each launches its kernel, and the table that the tools and the public functions use.

Each is `forward(out, a, b, e, precision)`: out (M x N) is contiguous, a (M x K) and b (K x N) have any strides, or all are batches of
such matrices; e is the Epilogue, whose tensors are contiguous. `precision` is that of float32: "ieee", "tf32" or "3xtf32".
"""

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cukern.ops.matmul import plan, tensor_cores
from cukern.ops.matmul.reference import Epilogue, finish
from cukern.runtime import backend
from cukern.runtime.autocast import off
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template, planning
from cukern.runtime.registry import Version
from cukern.runtime.tensors import pointers, wide

Forward = Callable[[Tensor, Tensor, Tensor, Epilogue, str], None]
Plain = Callable[[Tensor, Tensor, Tensor, Tensor | None], None]  # without an epilogue, for two matrices of float32 or float64
_V1, _V2, _V3, _V4, _V5 = (Template("matmul/matmul.cu", f"matmul_v{i}") for i in range(1, 6))
_V5_FIXUP = Template("matmul/matmul.cu", "matmul_v5_fixup")
ACTIVATION_BWD = Template("matmul/matmul.cu", "matmul_activation_bwd")  # used by all versions
ACTIVATION_WIDTH = {2: 8, 4: 4, 8: 1}  # its vectors, by the size of an element; two doubles are too many registers
COPY_MODES = "ALONG_K", "ALONG_MN", "ALONG_MN_16B"  # CopyMode in matmul.cu


def _fma_units(plain: Plain) -> Forward:
    """v1 to v5: each matrix of a batch is a launch; 16-bit operands are converted to float32; torch computes the rest of the epilogue."""

    def forward(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str) -> None:
        dtype, bias = wide(a.dtype), e.bias
        if a.dtype != dtype:
            a, b, bias = a.to(dtype), b.to(dtype), None if bias is None else bias.to(dtype)
        product = _product_of(out, e, dtype)
        matrices = zip(product, a, b, strict=True) if out.ndim == 3 else [(product, a, b)]
        for c, x, y in matrices:
            plain(c, x, y, bias)
        finish(out, product, e)

    return forward


def _product_of(out: Tensor, e: Epilogue, dtype: torch.dtype) -> Tensor:
    """Where the product with its bias goes, before the rest of the epilogue: the pre-activation or the output, if they may hold it."""
    kept = out if e.pre is None else e.pre
    return kept if kept.dtype == dtype and e.residual is not out else torch.empty_like(out, dtype=dtype)


def _cublas(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str) -> None:
    """Follows torch's switches of precision. The sum with a float32 output is computed in float32."""
    if planning():  # a plan needs no product, and those of large shapes take minutes on a CPU
        return
    a, b = a.to(out.dtype), b.to(out.dtype)
    with off(a):
        if e.residual is out and e.bias is e.pre is None:  # no activation either
            out.addmm_(a, b)
            return
        product = _product_of(out, e, out.dtype)
        if e.bias is None:
            torch.matmul(a, b, out=product)
        else:
            torch.addmm(e.bias, a, b, out=product)
        finish(out, product, e)


def _tensor_cores(wgmma: bool) -> Forward:
    strict = _fma_units(_v5)

    def forward(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: str) -> None:
        dtype = a.dtype
        if dtype == torch.float64 or (dtype == torch.float32 and precision == "ieee"):
            strict(out, a, b, e, precision)
        else:
            tensor_cores.launch(out, a, b, e, 3 if dtype == torch.float32 and precision == "3xtf32" else 1, wgmma)

    return forward


def _strided(template: Template, block: backend.Dim, blocks: Callable[[int, int], int]) -> Forward:
    """v1 to v3, whose kernels accept any strides of A and B."""

    def forward(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
        (M, N), K = out.shape, a.shape[1]
        arguments = (*pointers(out, a, b, bias), M, N, K, *a.stride(), *b.stride())
        template[a.dtype].on(a.get_device())((blocks(M, N), 1, 1), block, 0, *arguments)

    return _fma_units(forward)


def _v4(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    (M, N), K = out.shape, a.shape[1]
    a, a_k, lda = _with_unit_stride(a, 0, 1)
    b, b_k, ldb = _with_unit_stride(b, 1, 0)
    grid = (-(-M // 128) * -(-N // 128), 1, 1)
    _V4[a.dtype, a_k, not b_k].on(a.get_device())(grid, (256, 1, 1), 0, *pointers(out, a, b, bias), M, N, K, lda, ldb)


def _v5(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> None:
    (M, N), K, device, itemsize, dtype = out.shape, a.shape[1], a.get_device(), a.itemsize, a.dtype
    x, a_k, lda = _with_unit_stride(a, 0, 1)
    y, b_k, ldb = _with_unit_stride(b, 1, 0)
    if 128 * itemsize * max(lda, ldb) >= 1 << 32:  # offsets inside a tile have 32 bits
        return _v4(out, a, b, bias)
    tile, grid, shared_blocks, shared_tiles, chain, room = plan.fma_plan(M, N, K, device_of(device).sms, itemsize)
    workspace = torch.empty(room * tile.rows * tile.columns, dtype=dtype, device=out.device) if room else None
    kernel = _V5[dtype, _copy_mode(x, M, a_k, lda), _copy_mode(y, N, b_k, ldb), tile.name]
    numbers = M, N, K, lda, ldb, shared_blocks, shared_tiles, chain
    kernel.on(device)((grid, 1, 1), (128, 1, 1), 0, *pointers(out, workspace, x, y, bias), *numbers)
    if shared_blocks:
        squares = tile.rows * tile.columns // 128 // (16 // itemsize) ** 2  # squares of a tile per thread, of 128 threads
        fixup = _V5_FIXUP[dtype, tile.name].on(device)
        fixup((shared_tiles * squares, 1, 1), (128, 1, 1), 0, *pointers(out, workspace, bias), M, N, K, shared_blocks, shared_tiles)


def _copy_mode(x: Tensor, rows: int, along_k: bool, ld: int) -> str:
    """How v5 copies an operand (rows x K): an enumerator of CopyMode in matmul.cu, which says what each requires."""
    if along_k:
        return "ALONG_K"
    return "ALONG_MN" if (x.data_ptr() | ld * x.itemsize | rows * x.itemsize) % 16 else "ALONG_MN_16B"


def _with_unit_stride(x: Tensor, row: int, k: int) -> tuple[Tensor, bool, int]:
    """x, copied if no stride is 1; True if the stride along K is 1; and the other stride. `row`, `k`: the dimensions along the rows of the
    operand and along K."""
    shape, strides = x.shape, x.stride()
    if strides[k] == 1 or (shape[k] <= 1 and strides[row] != 1):
        return x, True, strides[row]
    if strides[row] == 1 or shape[row] <= 1:
        return x, False, strides[k]
    return (x if k else x.t()).contiguous(), True, shape[k]


def _v4_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    return (_V4[dtype, a_k, b_n] for a_k, b_n in itertools.product((True, False), repeat=2))


def _v5_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    for tile in plan.FMA_TILES[dtype.itemsize]:
        yield _V5_FIXUP[dtype, tile.name]
        yield from (_V5[dtype, a, b, tile.name] for a, b in itertools.product(COPY_MODES, COPY_MODES))


def _version(idea: str, forward: Forward, instances: Callable[[torch.dtype], Iterable[Kernel]], requires: int = 75) -> Version:
    def every(dtype: torch.dtype) -> Iterable[Kernel]:
        yield from (ACTIVATION_BWD[dtype, w] for w in {1, ACTIVATION_WIDTH[dtype.itemsize]})
        yield from instances(dtype)

    return Version(idea, forward, instances=every, requires=requires)


VERSIONS = {
    "cublas": Version("torch's product, which is cuBLAS's", _cublas),
    "v1": _version("one thread per output", _strided(_V1, (256, 1, 1), lambda M, N: -(-M * N // 256)), lambda d: [_V1[wide(d)]]),
    "v2": _version("16x16 blocks, coalesced", _strided(_V2, (16, 16, 1), lambda M, N: -(-M // 16) * -(-N // 16)), lambda d: [_V2[wide(d)]]),
    "v3": _version("shared-memory tiles", _strided(_V3, (32, 32, 1), lambda M, N: -(-M // 32) * -(-N // 32)), lambda d: [_V3[wide(d)]]),
    "v4": _version("register tiles", _fma_units(_v4), lambda d: _v4_instances(wide(d))),
    "v5": _version("asynchronous copies, even split of the last wave", _fma_units(_v5), lambda d: _v5_instances(wide(d)), 80),
    "v6": _version("tensor cores by mma.sync", _tensor_cores(False), lambda d: tensor_cores.instances(d, False), 80),
    "v7": _version("tensor cores by wgmma, TMA, persistent, clusters", _tensor_cores(True), lambda d: tensor_cores.instances(d, True), 90),
}
