"""The versions of matmul: how each launches its kernel, and the table that the tools and the public functions use.

Each is `forward(out, a, b, bias)`: out (M x N) is contiguous, a (M x K) and b (K x N) have any strides, bias (N) is contiguous or None.
"""

import itertools
from collections.abc import Callable

import torch

from cukern.ops.matmul import plan
from cukern.runtime import backend
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version
from cukern.runtime.tensors import pointers

Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
_V1, _V2, _V3, _V4, _V5 = (Template("matmul/matmul.cu", f"matmul_v{i}") for i in range(1, 6))
_V5_FIXUP = Template("matmul/matmul.cu", "matmul_v5_fixup")
BIAS_GRAD = Template("matmul/matmul.cu", "matmul_bias_grad")  # used by all versions
COPY_MODES = "ALONG_K", "ALONG_MN", "ALONG_MN_16B"  # CopyMode in matmul.cu


def _strided(template: Template, block: backend.Dim, blocks: Callable[[int, int], int]) -> Forward:
    """v1 to v3, whose kernels accept any strides of A and B."""

    def forward(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
        (M, N), K = out.shape, a.shape[1]
        arguments = (*pointers(out, a, b, bias), M, N, K, *a.stride(), *b.stride())
        template[a.dtype].on(a.get_device())((blocks(M, N), 1, 1), block, 0, *arguments)

    return forward


def _v4(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    (M, N), K = out.shape, a.shape[1]
    a, a_k, lda = _with_unit_stride(a)
    b, b_k, ldb = _with_unit_stride(b.t())
    grid = (-(-M // 128) * -(-N // 128), 1, 1)
    _V4[a.dtype, a_k, not b_k].on(a.get_device())(grid, (256, 1, 1), 0, *pointers(out, a, b, bias), M, N, K, lda, ldb)


def _v5(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    (M, N), K, device, itemsize = out.shape, a.shape[1], a.get_device(), a.itemsize
    a, a_k, lda = _with_unit_stride(a)
    b, b_k, ldb = _with_unit_stride(b.t())
    if 128 * itemsize * max(lda, ldb) >= 1 << 32:  # offsets inside a tile have 32 bits
        return _v4(out, a, b.t(), bias)
    tile, grid, shared_blocks, shared_tiles, chain, room = plan.plan(M, N, K, device_of(device).sms, itemsize)
    workspace = torch.empty(room * tile.rows * tile.columns, dtype=out.dtype, device=out.device)
    kernel = _V5[a.dtype, _copy_mode(a, a_k, lda), _copy_mode(b, b_k, ldb), tile.name]
    numbers = M, N, K, lda, ldb, shared_blocks, shared_tiles, chain
    kernel.on(device)((grid, 1, 1), (128, 1, 1), 0, *pointers(out, workspace, a, b, bias), *numbers)
    if shared_blocks:
        squares = tile.rows * tile.columns // 128 // (16 // itemsize) ** 2  # squares of a tile per thread, of 128 threads
        fixup = _V5_FIXUP[a.dtype, tile.name].on(device)
        fixup((shared_tiles * squares, 1, 1), (128, 1, 1), 0, *pointers(out, workspace, bias), M, N, K, shared_blocks, shared_tiles)


def _copy_mode(x: torch.Tensor, along_k: bool, ld: int) -> str:
    """How v5 copies an operand (rows x K): an enumerator of CopyMode in matmul.cu, which says what each requires."""
    if along_k:
        return "ALONG_K"
    return "ALONG_MN" if (x.data_ptr() | ld * x.itemsize | x.shape[0] * x.itemsize) % 16 else "ALONG_MN_16B"


def _with_unit_stride(x: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """x (rows x K), copied if no stride is 1; True if the stride along K is 1; and the other stride."""
    rows, k = x.shape
    if x.stride(1) == 1 or (k <= 1 and x.stride(0) != 1):
        return x, True, x.stride(0)
    if x.stride(0) == 1 or rows <= 1:
        return x, False, x.stride(1)
    return x.contiguous(), True, k


def _instance(template: Template) -> Callable[[torch.dtype], list[Kernel]]:
    return lambda dtype: [template[dtype], BIAS_GRAD[dtype]]


def _v4_instances(dtype: torch.dtype) -> list[Kernel]:
    return [BIAS_GRAD[dtype], *(_V4[dtype, a_k, b_n] for a_k in (True, False) for b_n in (True, False))]


def _v5_instances(dtype: torch.dtype) -> list[Kernel]:
    tiles = [t.name for t in plan.TILES[dtype.itemsize]]
    modes = itertools.product(COPY_MODES, COPY_MODES, tiles)
    return [BIAS_GRAD[dtype], *(_V5_FIXUP[dtype, t] for t in tiles), *(_V5[dtype, a, b, t] for a, b, t in modes)]


VERSIONS = {
    "v1": Version("one thread per output", _strided(_V1, (256, 1, 1), lambda M, N: -(-M * N // 256)), instances=_instance(_V1)),
    "v2": Version("16x16 blocks, coalesced", _strided(_V2, (16, 16, 1), lambda M, N: -(-M // 16) * -(-N // 16)), instances=_instance(_V2)),
    "v3": Version("shared-memory tiles", _strided(_V3, (32, 32, 1), lambda M, N: -(-M // 32) * -(-N // 32)), instances=_instance(_V3)),
    "v4": Version("register tiles", _v4, instances=_v4_instances),
    "v5": Version("asynchronous copies, even split of the last wave", _v5, instances=_v5_instances, requires=80),
}
