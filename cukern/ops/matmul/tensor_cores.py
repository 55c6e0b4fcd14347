"""The launches of v6 (mma.sync) and v7 (wgmma and TMA), for 16-bit types, TF32 and 3xTF32, in all layouts and with any epilogue.

Everything that does not depend on addresses is prepared once for the shapes, strides and dtypes of a call.
"""

import functools
import itertools
import math
import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.matmul import tensor_plan
from cukern.ops.matmul.epilogue import Epilogue
from cukern.runtime.backend import Dim
from cukern.runtime.device import cached, device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensor_map import encode
from cukern.runtime.tensors import pointers

V6 = Template("matmul/matmul.cu", "matmul_v6")
V7, REDUCE, SPLIT, PAD = (Template("matmul/matmul.cu", f"matmul_{name}", pdl=True) for name in ("v7", "v6_reduce", "split", "pad"))
BY_TMA, ADDED, BY_THREADS = range(3)  # enum Storing in wgmma.cuh
_SIZES = struct.Struct("@6i4q")  # struct Sizes in epilogue.cuh
_TWO_LINES = struct.Struct("@4I2q4I2q")  # struct TwoLines in mma.cuh
Encoder = Callable[[int], bytes]  # from an address to a tensor map
_encoded = functools.lru_cache(4096)(lambda encoder, address: encoder(address))
_deterministic = torch.are_deterministic_algorithms_enabled
Sizes = tuple[int, ...]
Lines = tuple[int, ...]  # struct Lines in mma.cuh: how an operand is copied


class _Operand(NamedTuple):
    """A matrix (rows x K), or a batch of them. `ld`: the stride that is not 1; `batch`: that of the batch."""

    along_k: bool
    ld: int
    batch: int


class _Launch(NamedTuple):
    """`copies`: struct Lines of a and b if operands are copied first; `split`: for 3xTF32 by v7, whether a and b are contiguous along K;
    `maps`: for v7, the encoders of a, b and, where TMA can store them, of the results."""

    kernel: Kernel
    grid: Dim
    block: Dim
    shared: int
    sizes: bytes
    splits: int
    copies: tuple[Lines, ...]
    split: tuple[bool, ...]
    maps: tuple[Encoder | None, ...]


def launch(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, terms: int, wgmma: bool) -> None:
    """out = epilogue(a . b) for matrices, or batches: out (S, M, N), a (S, M, K), b (S, K, N). `terms`: 3 for 3xTF32. `wgmma`: allow v7."""
    index, at_a, at_b = a.get_device(), a.data_ptr(), b.data_ptr()
    types = out.dtype, a.dtype, terms, wgmma, at_a & 15, at_b & 15, e.activation
    found = _prepared(a.shape, a.stride(), b.shape, b.stride(), *types, index, not _deterministic())
    if found is None:  # an operand without a stride of 1
        return launch(out, a.contiguous(), b.contiguous(), e, terms, wgmma)
    if found.split:
        memory = [_split(x, of, k) for x, of, k in zip((a, b), found.copies, found.split, strict=True)]
        at_a, at_b = pointers(*memory)
    elif found.copies:
        memory, at_a, at_b = _pad(a, b, *found.copies)  # `memory` lives until all kernels are launched
    if found.maps:
        return _launch_wgmma(found, index, out, at_a, at_b, e)
    partials = torch.empty(found.splits * out.numel(), dtype=torch.float32, device=out.device) if found.splits > 1 else None
    arguments = *pointers(out, e.pre, partials), at_a, at_b, *pointers(e.bias, e.residual), found.sizes
    found.kernel.on(index)(found.grid, found.block, found.shared, *arguments)
    if partials is not None:
        _reduce(out, partials, a.dtype, e, found.sizes)


def _launch_wgmma(found: _Launch, index: int, out: Tensor, at_a: int, at_b: int, e: Epilogue) -> None:
    of_a, of_b, of_out = found.maps
    first, last, bias, storing = _encoded(of_a, at_a), _encoded(of_b, at_b), e.bias, BY_THREADS
    if bias is not None and bias.data_ptr() % (2 * bias.itemsize):
        bias = bias.clone()  # the kernel loads pairs
    at_out, at_pre, at_bias, at_residual = pointers(out, e.pre, bias, e.residual)
    results = first, first
    if of_out and not (at_out | at_pre | at_residual) % 16:
        results, storing = (_encoded(of_out, at_out), _encoded(of_out, at_pre) if at_pre else first), BY_TMA
        if e.residual is out and out.dtype == torch.float32:
            storing, at_residual = ADDED, 0
    arguments = at_out, at_pre, first, last, *results, at_bias, at_residual, found.sizes, storing
    found.kernel.on(index)(found.grid, found.block, found.shared, *arguments)


def _pad(a: Tensor, b: Tensor, of_a: Lines, of_b: Lines) -> tuple[list[Tensor], int, int]:
    """Copy what is not aligned. The memory, and the addresses of both operands."""
    vectors = of_a[0] + of_b[0]
    memory = torch.empty(vectors * 16 // a.itemsize, dtype=a.dtype, device=a.device)
    to, at_a, at_b = pointers(memory, a, b)
    PAD[a.dtype].on(a.get_device())((-(-vectors // 256), 1, 1), (256, 1, 1), 0, to, at_a, at_b, _TWO_LINES.pack(*of_a, *of_b))
    return [memory], to if of_a[0] else at_a, to + 16 * of_a[0] if of_b[0] else at_b


def _split(x: Tensor, of: Lines, along_k: bool) -> Tensor:
    """The float32 operand x (rows x K), or a batch, as two TF32 numbers: (2, batch, rows, K), with rows of whole 16 bytes."""
    vectors, across, rows, K, ld, of_batch = of
    out, batch = torch.empty(8 * vectors, dtype=x.dtype, device=x.device), vectors // (rows * across)
    grid = batch * -(-rows // 32) * -(-K // 32), 1, 1
    SPLIT[along_k,].on(x.get_device())(grid, (32, 8, 1), 0, *pointers(out, x), batch, rows, K, 4 * across, ld, of_batch)
    return out


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
    wgmma: bool, at_a: int, at_b: int, activation: int, index: int, splitting: bool,
) -> _Launch | None:  # fmt: skip
    *lead, M, K = a_shape
    N, batch = b_shape[-1], math.prod(lead)
    a = _operand(a_shape[-2:], a_strides[-2:], a_strides[0] if batch > 1 else 0)
    b = _operand(b_shape[:-3:-1], b_strides[:-3:-1], b_strides[0] if batch > 1 else 0)
    if a is None or b is None:
        return None
    itemsize, wgmma = dtype.itemsize, wgmma and K > 0 and (dtype.itemsize == 2 or terms == 3 or (a.along_k and b.along_k))
    copies = tuple(_alignment(math.gcd(at, x.ld * itemsize, x.batch * itemsize)) for at, x in ((at_a, a), (at_b, b)))
    copied = [_lines(x, rows, K, batch, itemsize) if copy < 16 else _ALIGNED for copy, x, rows in zip(copies, (a, b), (M, N), strict=True)]
    problem = tensor_plan.Problem(M, N, K, batch, itemsize, terms, wgmma, min(copies), 16 * sum(of[0] for of in copied))
    planned = tensor_plan.plan(problem, device_of(index), splitting)
    split = (a.along_k, b.along_k) if terms == 3 and planned.tile.wgmma else ()
    if split:
        a, b = a._replace(along_k=True), b._replace(along_k=True)
        copied = [_lines(x, rows, K, batch, itemsize) for x, rows in ((a, M), (b, N))]
    if split or planned.padded:
        a, b = (_after_copy(x, of, itemsize) for x, of in zip((a, b), copied, strict=True))
    else:
        copied = []
    tile, splits = planned.tile, planned.splits
    launch = (planned.grid, 1, 1), (32 * tile.warps, 1, 1), tile.shared
    sizes = _SIZES.pack(M, N, K, batch, splits, activation, a.ld, b.ld, a.batch, b.batch)
    if not tile.wgmma:
        kernel = V6[dtype, out_dtype, terms, a.along_k, b.along_k, 16 if copied else min(copies), tile.name]
        return _Launch(kernel, *launch, sizes, splits, tuple(copied), split, ())
    parts = (a, M, tile.rows), (b, N, tile.columns // tile.share)
    results = None if tile.cluster_k > 1 else _map_of_results(index, M, N, batch, out_dtype)
    maps = *(_map(index, x, rows, K, batch, box, dtype, terms) for x, rows, box in parts), results
    kernel = V7[dtype, out_dtype, a.along_k, b.along_k, 0 if tile.cluster_k > 1 else activation, tile.name]
    return _Launch(kernel, *launch, sizes, splits, tuple(copied), split, maps)


_ALIGNED = 0, 1, 1, 0, 0, 0  # Lines of an operand that is not copied


def _lines(x: _Operand, rows: int, K: int, batch: int, itemsize: int) -> Lines:
    (lines, length), width = (rows, K) if x.along_k else (K, rows), 16 // itemsize
    across = -(-length // width)
    return lines * across * (batch if x.batch else 1), across, lines, length, x.ld, x.batch


def _after_copy(x: _Operand, of: Lines, itemsize: int) -> _Operand:
    """The layout of its copy."""
    vectors, across, lines, *_ = of
    ld = across * 16 // itemsize
    return _Operand(x.along_k, ld, lines * ld if x.batch else 0) if vectors else x


def _alignment(n: int) -> int:
    """The largest copy, in bytes, that is aligned at all multiples of n."""
    return 2 if n & 3 else 4 if n & 15 else 16


def _operand(shape: Sizes, strides: Sizes, batch: int) -> _Operand | None:
    """The layout of a matrix (rows x K), or None if no stride is 1."""
    (rows, k), (of_rows, of_k) = shape, strides
    if of_k == 1 or (k <= 1 and of_rows != 1):
        return _Operand(True, of_rows if rows > 1 else 0, batch)
    return _Operand(False, of_k if k > 1 else 0, batch) if of_rows == 1 or rows <= 1 else None


def _map(index: int, x: _Operand, rows: int, K: int, batch: int, box: int, dtype: torch.dtype, terms: int) -> Encoder:
    """Boxes of `box` rows of 128 bytes along K, or of 64 k by 128 bytes along the rows."""
    outer, inner, box = (rows, K, box) if x.along_k else (K, rows, 64)
    count, stride = (batch if x.batch else 1) * (2 if terms == 3 else 1), x.batch or rows * x.ld
    strides = stride if count > 1 else 0, x.ld, 1
    arguments = (count, outer, inner), strides, (1, box, 128 // dtype.itemsize), 128, 256, "zeros", dtype == torch.float32
    return lambda address: encode(index, address, dtype, *arguments)


def _map_of_results(index: int, M: int, N: int, batch: int, dtype: torch.dtype) -> Encoder | None:
    """16 rows of 128 bytes of the results, or None if rows are not whole 16 bytes."""
    arguments = (batch, M, N), (M * N, N, 1), (1, 16, 128 // dtype.itemsize), 128
    return None if N * dtype.itemsize % 16 else lambda address: encode(index, address, dtype, *arguments)


def instances(dtype: torch.dtype, wgmma: bool) -> Iterable[Kernel]:
    """The kernels whose operands and output have this dtype. Those that add to a float32 output are compiled when they are needed."""
    if dtype == torch.float64:
        return
    layouts = list(itertools.product((True, False), repeat=2))
    yield PAD[dtype]
    for width in (1, 16 // dtype.itemsize):
        yield REDUCE[dtype, dtype, width]
    for tile, (a_k, b_k) in itertools.product(tensor_plan.TILES, layouts):
        if dtype.itemsize == 2 and tile.split:
            continue
        if not tile.wgmma:
            for copy in (16, 4) if dtype.itemsize == 4 else (16, 4, 2):
                yield V6[dtype, dtype, 3 if tile.split else 1, a_k, b_k, copy, tile.name]
        elif wgmma and (dtype.itemsize == 2 or (a_k and b_k)):
            yield V7[dtype, dtype, a_k, b_k, 0, tile.name]
