"""The launches of v6 (mma.sync) and v7 (wgmma and TMA), for 16-bit types, TF32 and 3xTF32, in all layouts and with any epilogue.

Everything that does not depend on addresses is prepared once for the shapes, strides and dtypes of a call.
"""

import itertools
import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.ops.matmul import mma_plan, wgmma_plan
from cukern.ops.matmul.epilogue import Epilogue
from cukern.runtime.backend import Dim
from cukern.runtime.device import cached, current, device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensor_map import encode
from cukern.runtime.tensors import pointers

V6, V7, REDUCE = (Template("matmul/matmul.cu", f"matmul_{name}") for name in ("v6", "v7", "v6_reduce"))
_SIZES = struct.Struct("@6i4q")  # struct Sizes in epilogue.cuh
_deterministic = torch.are_deterministic_algorithms_enabled
Sizes = tuple[int, ...]


class _Operand(NamedTuple):
    """A matrix (rows x K), or a batch of them. `ld`: the stride that is not 1; `batch`: that of the batch."""

    along_k: bool
    ld: int
    batch: int


class _Launch(NamedTuple):
    """`maps`: for v7, of each operand the arguments of `encode` after its address and dtype; `boxes`: those of the results, if v7 can write
    them by TMA, else ()."""

    kernel: Kernel
    grid: Dim
    block: Dim
    shared: int
    sizes: bytes
    splits: int
    maps: tuple[tuple[Any, ...], ...]
    boxes: tuple[Any, ...]


def launch(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, terms: int, wgmma: bool) -> None:
    """out = epilogue(a . b) for matrices, or batches: out (S, M, N), a (S, M, K), b (S, K, N). `terms`: 3 for 3xTF32. `wgmma`: allow v7."""
    index, at_a, at_b = a.get_device(), a.data_ptr(), b.data_ptr()
    types = out.dtype, a.dtype, terms, wgmma, _alignment(at_a | at_b), e.activation
    found = _prepared(a.shape, a.stride(), b.shape, b.stride(), *types, index, not _deterministic())
    if found is None:  # an operand without a stride of 1
        return launch(out, a.contiguous(), b.contiguous(), e, terms, wgmma)
    partials = torch.empty(found.splits * out.numel(), dtype=torch.float32, device=out.device) if found.splits > 1 else None
    operands, last = _maps(found, out, a, b, e) if found.maps else ((at_a, at_b), ())
    arguments = *pointers(out, e.pre, partials), *operands, *pointers(e.bias, e.residual), found.sizes, *last
    found.kernel.on(index)(found.grid, found.block, found.shared, *arguments)
    if partials is not None:
        _reduce(out, partials, a.dtype, e, found.sizes)


def _maps(found: _Launch, out: Tensor, a: Tensor, b: Tensor, e: Epilogue) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
    """For v7 the tensor maps of a, b, the results and the pre-activations, and whether it writes the last two by TMA."""
    index, (of_a, of_b) = a.get_device(), found.maps
    by_tma = bool(found.boxes) and e.residual is None and not any(p % 16 for p in pointers(out, e.pre, e.bias))
    first = encode(index, a.data_ptr(), a.dtype, *of_a)
    results = (encode(index, p, out.dtype, *found.boxes) if by_tma and p else first for p in pointers(out, e.pre))
    return (first, encode(index, b.data_ptr(), b.dtype, *of_b), *results), (int(by_tma),)


def _reduce(out: Tensor, partials: Tensor, dtype: torch.dtype, e: Epilogue, sizes: bytes) -> None:
    """out = epilogue(the sum of the partial sums). `dtype`: of the operands."""
    width = 16 // out.itemsize
    if out.shape[-1] % width or any(p % 16 for p in pointers(out, e.pre, e.residual, e.bias)):
        width = 1
    kernel, blocks = REDUCE[dtype, out.dtype, width].on(out.get_device()), -(-out.numel() // (256 * width))
    kernel((blocks, 1, 1), (256, 1, 1), 0, *pointers(out, e.pre, partials, e.bias, e.residual), sizes)


@cached(4096)
def _prepared(
    a_shape: Sizes, a_strides: Sizes, b_shape: Sizes, b_strides: Sizes, out_dtype: torch.dtype, dtype: torch.dtype, terms: int,
    wgmma: bool, copy: int, activation: int, index: int, splitting: bool,
) -> _Launch | None:  # fmt: skip
    *lead, M, K = a_shape
    N, batch = b_shape[-1], math.prod(lead)
    a = _operand(a_shape[-2:], a_strides[-2:], a_strides[0] if batch > 1 else 0)
    b = _operand(b_shape[:-3:-1], b_strides[:-3:-1], b_strides[0] if batch > 1 else 0)
    if a is None or b is None:
        return None
    copy = min(copy, _alignment(math.gcd(*(x * dtype.itemsize for x in (a.ld, b.ld, a.batch, b.batch)))))
    problem, rest = (M, N, K, batch, dtype.itemsize), (device_of(index), splitting)
    planned = mma_plan.plan(*problem, terms, *rest)
    maps: tuple[tuple[Any, ...], ...] = ()
    boxes: tuple[Any, ...] = ()
    wide = wgmma_plan.plan(*problem, a.along_k and b.along_k, *rest) if wgmma and copy == 16 and K and terms == 1 else None
    if wide is None or not _preferred(wide, planned, splitting):
        tile = planned.tile
        kernel = V6[dtype, out_dtype, terms, a.along_k, b.along_k, copy, tile.name]
        grid, block = batch * planned.splits * -(-M // tile.rows) * -(-N // tile.columns), 32 * tile.warps
        splits, shared = planned.splits, tile.shared
    else:
        kernel = V7[dtype, out_dtype, a.along_k, b.along_k, wide.tile.name]
        grid, block, splits, shared = wide.grid, wgmma_plan.THREADS, wide.splits, wide.tile.shared
        parts = (a, M, wide.tile.rows), (b, N, wide.tile.columns // wide.tile.cluster)
        maps = tuple(_map(x, rows, K, batch, box, dtype) for x, rows, box in parts)
        boxes = _boxes(M, N, batch, splits, out_dtype)
    sizes = _SIZES.pack(M, N, K, batch, splits, activation, a.ld, b.ld, a.batch, b.batch)
    return _Launch(kernel, (grid, 1, 1), (block, 1, 1), shared, sizes, splits, maps, boxes)


def _preferred(wide: wgmma_plan.Plan, other: mma_plan.Plan, splitting: bool) -> bool:
    """True for v7 instead of v6: if it is faster, or its tile is forced. Without `splitting`, the number of rows must not decide."""
    forced = current().forced
    return other.tile.name != forced and (not splitting or wide.us <= other.us or wide.tile.name == forced)


def _alignment(n: int) -> int:
    """The most bytes of a copy whose places are multiples of n."""
    return 2 if n & 3 else 4 if n & 15 else 16


def _operand(shape: Sizes, strides: Sizes, batch: int) -> _Operand | None:
    """The layout of a matrix (rows x K), or None if no stride is 1."""
    (rows, k), (of_rows, of_k) = shape, strides
    if of_k == 1 or (k <= 1 and of_rows != 1):
        return _Operand(True, of_rows, batch)
    return _Operand(False, of_k, batch) if of_rows == 1 or rows <= 1 else None


def _map(x: _Operand, rows: int, K: int, batch: int, box: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `encode` for boxes of `box` rows of 128 bytes along K, or of 64 k by 128 bytes along the rows."""
    (outer, inner), box = ((rows, K), box) if x.along_k else ((K, rows), 64)
    shape, strides = (batch if x.batch else 1, outer, inner), (x.batch, x.ld, 1)
    return shape, strides, (1, box, 128 // dtype.itemsize), 128, 256, "zeros", dtype == torch.float32


def _boxes(M: int, N: int, batch: int, splits: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments of `encode` for 64 x 64 results, or () if v7 does not write them by TMA."""
    return ((batch, M, N), (M * N, N, 1), (1, 64, 64), 128) if splits == 1 and dtype.itemsize == 2 and N % 8 == 0 else ()


def instances(dtype: torch.dtype, wgmma: bool) -> Iterable[Kernel]:
    """The kernels of a dtype whose output has it, too. Those that add to a float32 output are compiled when they are needed."""
    if dtype == torch.float64:
        return
    layouts = list(itertools.product((True, False), repeat=2))
    for width in (1, 16 // dtype.itemsize):
        yield REDUCE[dtype, dtype, width]
    for tile, copy in itertools.product(mma_plan.TILES, (16, 4) if dtype.itemsize == 4 else (16, 4, 2)):
        if dtype.itemsize == 4 or not tile.split:
            for a_k, b_k in layouts:
                yield V6[dtype, dtype, 3 if tile.split else 1, a_k, b_k, copy, tile.name]
    for wide_tile, (a_k, b_k) in itertools.product(wgmma_plan.TILES if wgmma else (), layouts):
        if dtype.itemsize == 2 or (a_k and b_k):
            yield V7[dtype, dtype, a_k, b_k, wide_tile.name]
