"""The launch of matmul v9: tensor cores by wgmma, with operands copied by TMA (sm_90a). What it cannot do, v6 does."""

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from cukern.ops.matmul import mma, mma_plan, wgmma_plan
from cukern.ops.matmul.epilogue import Epilogue
from cukern.runtime.device import device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensor_map import encode
from cukern.runtime.tensors import pointers

V9 = Template("matmul/matmul.cu", "matmul_v9")
THREADS = 384


def launch(out: Tensor, a: Tensor, b: Tensor, e: Epilogue) -> bool:
    """out = epilogue(a . b), as in `mma.launch`. False if TMA cannot copy the operands, or v6 is faster."""
    M, N, K, batch = out.shape[-2], out.shape[-1], a.shape[-1], out.shape[0] if out.ndim == 3 else 1
    a, a_k, lda = mma.operand(a)
    b, b_k, ldb = mma.operand(b.mT)
    a_batch, b_batch = (x.stride(0) if batch > 1 else 0 for x in (a, b))
    itemsize, index = a.itemsize, a.get_device()
    device, splitting = device_of(index), not torch.are_deterministic_algorithms_enabled()
    if mma.copy_bytes(itemsize, a.data_ptr(), b.data_ptr(), lda, ldb, a_batch, b_batch) < 16 or not K:
        return False
    found = wgmma_plan.plan(M, N, K, batch, itemsize, a_k and b_k, device, splitting)
    if found is None or found.us > mma_plan.plan(M, N, K, batch, itemsize, 1, True, device, splitting).us:
        return False
    tile, splits, grid, _ = found
    maps = [_map(x, along_k, rows) for x, along_k, rows in ((a, a_k, tile.rows), (b, b_k, tile.columns // tile.cluster))]
    sizes = mma.SIZES.pack(M, N, K, batch, splits, e.activation, lda, ldb, a_batch, b_batch)
    partials = torch.empty(splits * out.numel(), dtype=torch.float32, device=out.device) if splits > 1 else None
    kernel = V9[a.dtype, out.dtype, a_k, b_k, tile.name].on(index)
    kernel((grid, 1, 1), (THREADS, 1, 1), tile.shared, *pointers(out, e.pre, partials), *maps, *pointers(e.bias, e.residual), sizes)
    if partials is not None:
        mma.reduce(out, partials, a.dtype, e, sizes)
    return True


def _map(x: Tensor, along_k: bool, rows: int) -> bytes:
    """The tensor map of an operand (rows x K), or of a batch of them, for boxes of 128 bytes of its contiguous dimension."""
    if not along_k:
        x, rows = x.mT, 64
    if x.ndim == 2 or x.stride(0) == 0:
        x = (x if x.ndim == 2 else x[0])[None]
    box, tf32 = (1, rows, 128 // x.itemsize), x.dtype == torch.float32
    return encode(x.get_device(), x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), box, 128, 256, "zeros", tf32)


def instances(dtype: torch.dtype) -> Iterable[Kernel]:
    """The kernels of a dtype whose output has it, too."""
    if dtype != torch.float64:
        for tile, a_k, b_k in itertools.product(wgmma_plan.TILES, (True, False), (True, False)):
            if dtype.itemsize == 2 or (a_k and b_k):
                yield V9[dtype, dtype, a_k, b_k, tile.name]
