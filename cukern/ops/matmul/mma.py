"""The launch of matmul v6: tensor cores by mma.sync, for 16-bit types, TF32 and 3xTF32, in all layouts and with any epilogue."""

import itertools
import struct
from collections.abc import Iterable

import torch
from torch import Tensor

from cukern.ops.matmul import mma_plan
from cukern.ops.matmul.epilogue import Epilogue
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensors import pointers

V6, REDUCE = (Template("matmul/matmul.cu", name) for name in ("matmul_v6", "matmul_v6_reduce"))
SIZES = struct.Struct("@6i4q")  # struct Sizes in epilogue.cuh


def launch(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, terms: int) -> None:
    """out = epilogue(a . b) for matrices, or batches: out (S, M, N), a (S, M, K), b (S, K, N). `terms`: 3 for 3xTF32."""
    M, N, K, batch = out.shape[-2], out.shape[-1], a.shape[-1], out.shape[0] if out.ndim == 3 else 1
    a, a_k, lda = operand(a)
    b, b_k, ldb = operand(b.mT)
    index = a.get_device()
    device, a_batch, b_batch = device_of(index), a.stride(0) * (a.ndim == 3), b.stride(0) * (b.ndim == 3)
    copy = copy_bytes(a.itemsize, a.data_ptr(), b.data_ptr(), lda, ldb, a_batch, b_batch)
    splitting = not torch.are_deterministic_algorithms_enabled()
    tile, splits, _ = mma_plan.plan(M, N, K, batch, a.itemsize, terms, copy == 16, device, splitting)
    grid = batch * splits * -(-M // tile.rows) * -(-N // tile.columns)
    sizes = SIZES.pack(M, N, K, batch, splits, e.activation, lda, ldb, a_batch, b_batch)
    partials = torch.empty(splits * out.numel(), dtype=torch.float32, device=out.device) if splits > 1 else None
    kernel = V6[a.dtype, out.dtype, terms, a_k, b_k, copy, tile.name].on(index)
    kernel((grid, 1, 1), (32 * tile.warps, 1, 1), tile.shared, *pointers(out, e.pre, partials, a, b, e.bias, e.residual), sizes)
    if partials is not None:
        reduce(out, partials, a.dtype, e, sizes)


def reduce(out: Tensor, partials: Tensor, dtype: torch.dtype, e: Epilogue, sizes: bytes) -> None:
    """out = epilogue(the sum of the partial sums). `dtype`: of the operands."""
    width = 16 // out.itemsize
    if out.shape[-1] % width or any(p % 16 for p in pointers(out, e.pre, e.residual, e.bias)):
        width = 1
    kernel, blocks = REDUCE[dtype, out.dtype, width].on(out.get_device()), -(-out.numel() // (256 * width))
    kernel((blocks, 1, 1), (256, 1, 1), 0, *pointers(out, e.pre, partials, e.bias, e.residual), sizes)


def operand(x: Tensor) -> tuple[Tensor, bool, int]:
    """x (rows x K), copied if no stride is 1; True if the stride along K is 1; and the other stride."""
    rows, k = x.shape[-2:]
    if x.stride(-1) == 1 or (k <= 1 and x.stride(-2) != 1):
        return x, True, x.stride(-2)
    if x.stride(-2) == 1 or rows <= 1:
        return x, False, x.stride(-1)
    return x.contiguous(), True, k


def copy_bytes(itemsize: int, *numbers: int) -> int:
    """The most bytes that one copy may have. `numbers`: the two addresses, then strides in elements."""
    a, b, *strides = numbers
    together = a | b
    for stride in strides:
        together |= stride * itemsize
    return 2 if together % 4 else 4 if together % 16 else 16


def instances(dtype: torch.dtype) -> Iterable[Kernel]:
    """The kernels of a dtype whose output has it, too. Those that add to a float32 output are compiled when they are needed."""
    if dtype == torch.float64:
        return
    for width in (1, 16 // dtype.itemsize):
        yield REDUCE[dtype, dtype, width]
    for tile, copy in itertools.product(mma_plan.TILES, (16, 4) if dtype.itemsize == 4 else (16, 4, 2)):
        if (dtype.itemsize == 4 or not tile.split) and (copy == 16 or tile.columns < 256):
            for a_k, b_k in itertools.product((True, False), repeat=2):
                yield V6[dtype, dtype, 3 if tile.split else 1, a_k, b_k, copy, tile.name]
