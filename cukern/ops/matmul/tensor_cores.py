"""The launches of v6 (mma.sync) and v7 (wgmma and TMA), for 16-bit types, TF32 and 3xTF32, in all layouts and
with any epilogue.

Everything that does not depend on addresses is prepared once for the shapes, strides and dtypes of a call.
"""

import itertools
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.ops.matmul.plan import TILES, Problem, Tile, plan
from cukern.runtime.device import cached, device_of
from cukern.runtime.launch.driver import spread
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.launch.limits import Dim
from cukern.runtime.launch.tensor_map import encoder
from cukern.runtime.tensors import pointers

V6, V7, REDUCE, SPLIT, PAD, DIRECT = (
    Template("matmul/matmul.cu", f"matmul_{n}", pdl=True)
    for n in ("v6", "v7", "v6_reduce", "split", "pad", "direct")
)
BY_TMA, ADDED, BY_THREADS = range(3)  # enum Storing in wgmma.cuh
SIZES = struct.Struct("@6i4q")  # struct Sizes in epilogue.cuh
_TWO_LINES = struct.Struct("@4I2q4I2q")  # struct TwoLines in mma.cuh
ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # enum Activation in epilogue.cuh
Encoder = Callable[[int], bytes]  # from an address to a tensor map
_deterministic = torch.are_deterministic_algorithms_enabled
Sizes = tuple[int, ...]
Lines = tuple[int, ...]  # struct Lines in mma.cuh: how an operand is copied


class Epilogue(NamedTuple):
    """out = activation(product + bias) + residual. `activation` is an index of ACTIVATIONS. `pre` is where
    product + bias is stored. `residual` may be the output, which is added to."""

    bias: Tensor | None = None
    activation: int = 0
    pre: Tensor | None = None
    residual: Tensor | None = None


class _Operand(NamedTuple):
    """`matrices` matrices (rows x K), `batch` elements apart: 0 and one matrix if it is that of all. `ld`:
    the stride that is not 1."""

    along_k: bool
    rows: int
    K: int
    ld: int
    matrices: int
    batch: int

    def copy(self, at: int, itemsize: int, split: bool = False) -> "tuple[Lines, _Operand]":
        """How the operand at this address is copied, and the copy. No vectors and itself if it is aligned,
        and TMA accepts its strides. `split`: copied as the two parts of 3xTF32, contiguous along K."""
        if split:
            self = self._replace(along_k=True)
        (lines, length), width = (self.rows, self.K) if self.along_k else (self.K, self.rows), 16 // itemsize
        if not (
            split or at % 16 or math.gcd(length, self.ld, self.batch) % width or self.ld == 0 < lines - 1
        ):
            return (0, 1, 1, 0, 0, 0), self
        # of long lines, whole cache lines
        across = -(-length // width) if length < 512 else -(-length // (8 * width)) * 8
        ld, vectors = across * width, self.matrices * lines * across
        new = self._replace(
            ld=ld, batch=lines * ld if self.batch else 0, matrices=self.matrices * (2 if split else 1)
        )
        return (vectors, across, lines, length, self.ld, self.batch), new

    def map(self, index: int, box: int, dtype: torch.dtype, tf32: bool = False) -> Encoder:
        """Boxes of `box` rows of 128 bytes along K, or of 64 k by 128 bytes along the rows."""
        outer, inner, box = (self.rows, self.K, box) if self.along_k else (self.K, self.rows, 64)
        strides = self.batch or outer * self.ld, self.ld, 1
        arguments = (
            (self.matrices, outer, inner),
            strides,
            (1, box, 128 // dtype.itemsize),
            128,
            128,
            "zeros",
            tf32,
        )
        return encoder(index, dtype, *arguments)


class _Launch(NamedTuple):
    """`copies`: struct Lines of a and b if operands are copied first; `split`: for 3xTF32 by v7, whether a
    and b are contiguous along K; `maps`: for v7, the encoders of a, b and, where TMA can store them, of the
    results; `lanes`: for matmul_direct."""

    kernel: Kernel
    grid: Dim
    block: Dim
    shared: int
    sizes: bytes
    splits: int = 1
    copies: tuple[Lines, ...] = ()
    split: tuple[bool, ...] = ()
    maps: Sequence[Encoder] = ()
    lanes: tuple[int, ...] = ()


def launch(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, terms: int, wgmma: bool) -> None:
    """out = epilogue(a . b) for matrices, or batches: out (S, M, N), a (S, M, K), b (S, K, N). `terms`: 3 for
    3xTF32. `wgmma`: allow v7."""
    index, at_a, at_b, bias = a.get_device(), a.data_ptr(), b.data_ptr(), e.bias
    types = out.dtype, a.dtype, terms, wgmma, at_a & 15, at_b & 15, e.activation
    found = _prepared(a.shape, a.stride(), b.shape, b.stride(), *types, index, not _deterministic())
    if found is None:  # an operand without a stride of 1
        return launch(out, a.contiguous(), b.contiguous(), e, terms, wgmma)
    if found.copies:
        _memory, at_a, at_b = _copied(a, b, found)  # it lives until all kernels are launched
    if found.maps and bias is not None and bias.data_ptr() % (2 * bias.itemsize):
        bias = bias.clone()  # the kernel loads pairs
    partials = (
        torch.empty(found.splits * out.numel(), dtype=torch.float32, device=out.device)
        if found.splits > 1
        else None
    )
    if partials is None:
        _start(
            found,
            index,
            e.residual is out and out.dtype == torch.float32,
            at_a,
            at_b,
            *pointers(out, e.pre, bias, e.residual),
        )
    else:
        _start(found, index, False, at_a, at_b, *pointers(partials, None, None, None))
        _reduce(out, partials, a.dtype, e, found.sizes)


def _start(
    found: _Launch, index: int, adds: bool, at_a: int, at_b: int, at_out: int, at_pre: int, at_bias: int,
    at_residual: int,
) -> None:  # fmt: skip
    """Launch the kernel of the product. `at_out`: the results, or the partial sums. `adds`: it may add to
    float32 results by TMA."""
    operands: tuple[int | bytes, ...] = (at_a, at_b)
    last: tuple[int, ...] = found.lanes
    if found.maps:
        of_a, of_b, *of_out = found.maps
        first, last = of_a(at_a), (BY_THREADS,)
        results = first, first
        if of_out and not (at_out | at_pre | at_residual) % 16:
            results, last = (of_out[0](at_out), of_out[0](at_pre) if at_pre else first), (BY_TMA,)
            if adds:
                last, at_residual = (ADDED,), 0
        operands = first, of_b(at_b), *results
    elif not last:
        operands = at_out, at_a, at_b  # v6 stores either results or partial sums
    found.kernel.on(index)(
        found.grid,
        found.block,
        found.shared,
        at_out,
        at_pre,
        *operands,
        at_bias,
        at_residual,
        found.sizes,
        *last,
    )


def _copied(a: Tensor, b: Tensor, found: _Launch) -> tuple[list[Tensor], int, int]:
    """Copy what is not aligned, or split both operands. The memory, and the addresses of both operands."""
    if found.split:  # each as two TF32 numbers: (2, batch, rows, K), with rows of whole 16 bytes
        memory = []
        for x, (vectors, across, rows, K, ld, of_batch), along_k in zip(
            (a, b), found.copies, found.split, strict=True
        ):
            memory.append(torch.empty(8 * vectors, dtype=x.dtype, device=x.device))
            batch, kernel = vectors // (rows * across), SPLIT[along_k,].on(x.get_device())
            grid = (batch * -(-rows // 32) * -(-K // 32), 1, 1)
            numbers = (batch, rows, K, 4 * across, ld, of_batch)
            kernel(grid, (32, 8, 1), 0, *pointers(memory[-1], x), *numbers)
        return memory, memory[0].data_ptr(), memory[1].data_ptr()
    of_a, of_b = found.copies
    vectors = of_a[0] + of_b[0]
    padded = torch.empty(vectors * 16 // a.itemsize, dtype=a.dtype, device=a.device)
    to, at_a, at_b = pointers(padded, a, b)
    PAD[a.dtype].on(a.get_device())(
        (-(-vectors // 256), 1, 1), (256, 1, 1), 0, to, at_a, at_b, _TWO_LINES.pack(*of_a, *of_b)
    )
    return [padded], to if of_a[0] else at_a, to + 16 * of_a[0] if of_b[0] else at_b


def _reduce(out: Tensor, partials: Tensor, dtype: torch.dtype, e: Epilogue, sizes: bytes) -> None:
    """out = epilogue(the sum of the partial sums). `dtype`: of the operands."""
    width = 16 // out.itemsize
    if out.shape[-1] % width or any(p % 16 for p in pointers(out, e.pre, e.residual, e.bias)):
        width = 1
    kernel, blocks = REDUCE[dtype, out.dtype, width].on(out.get_device()), -(-out.numel() // (256 * width))
    kernel((blocks, 1, 1), (256, 1, 1), 0, *pointers(out, e.pre, partials, e.bias, e.residual), sizes)


@cached(4096)
def _prepared(
    a_shape: Sizes, a_strides: Sizes, b_shape: Sizes, b_strides: Sizes, out_dtype: torch.dtype,
    dtype: torch.dtype, terms: int, wgmma: bool, at_a: int, at_b: int, activation: int, index: int,
    splitting: bool,
) -> _Launch | None:  # fmt: skip
    *lead, M, K = a_shape
    N, batch, itemsize = b_shape[-1], math.prod(lead), dtype.itemsize
    a = _operand(a_shape[-2:], a_strides[-2:], batch, a_strides[0])
    b = _operand(b_shape[:-3:-1], b_strides[:-3:-1], batch, b_strides[0])
    if a is None or b is None:
        return None
    (of_a, to_a), (of_b, to_b) = a.copy(at_a, itemsize), b.copy(at_b, itemsize)
    whole, moved = (to_a.ld | to_b.ld) * itemsize % 128 == 0, 16 * (of_a[0] + of_b[0])
    problem = Problem(M, N, K, batch, itemsize, terms, wgmma, a.along_k, b.along_k, moved, whole)
    tile, splits, blocks, _, lanes = plan(problem, device_of(index), splitting)
    shared, rest = tile.shared, dict[str, Any]()  # the last fields of _Launch
    stored = torch.float32 if splits > 1 else out_dtype  # by v7
    if not tile.stages:
        kernel, rest["lanes"] = DIRECT[dtype, out_dtype, tile.name], (lanes,)
    else:
        if terms == 3 and tile.wgmma:
            rest["split"] = a.along_k, b.along_k
            (of_a, to_a), (of_b, to_b) = a.copy(0, itemsize, True), b.copy(0, itemsize, True)
        a, b, rest["copies"] = to_a, to_b, (of_a, of_b) if moved or "split" in rest else ()
        if tile.wgmma:
            boxes = (a, tile.rows), (b, tile.columns // tile.share)
            maps = [operand.map(index, rows, dtype, dtype == torch.float32) for operand, rows in boxes]
            if tile.cluster_k == 1 and N * stored.itemsize % 16 == 0:
                maps.append(_Operand(True, M, N, N, batch * splits, M * N).map(index, 16, stored))
            rest["maps"] = maps
            kernel = V7[
                dtype,
                stored,
                a.along_k,
                b.along_k,
                0 if tile.cluster_k > 1 or splits > 1 else activation,
                tile.name,
            ]
        else:
            kernel, shared = (
                V6[dtype, out_dtype, terms, a.along_k, b.along_k, tile.name],
                spread(shared, blocks, index),
            )
    sizes = SIZES.pack(M, N, K, batch, splits, activation, a.ld, b.ld, a.batch, b.batch)
    return _Launch(kernel, (blocks, 1, 1), (32 * tile.warps, 1, 1), shared, sizes, splits, **rest)


def _operand(shape: Sizes, strides: Sizes, batch: int, of_batch: int) -> _Operand | None:
    """The layout of an operand, or None if no stride is 1."""
    (rows, k), (of_rows, of_k) = shape, strides
    count, of_batch = (batch, of_batch) if batch > 1 and of_batch else (1, 0)
    if of_k == 1 or (k <= 1 and of_rows != 1):
        return _Operand(True, rows, k, of_rows if rows > 1 else 0, count, of_batch)
    return (
        _Operand(False, rows, k, of_k if k > 1 else 0, count, of_batch) if of_rows == 1 or rows <= 1 else None
    )


def instances(dtype: torch.dtype, wgmma: bool) -> Iterable[Kernel]:
    """The kernels whose operands and output have this dtype. Those that add to a float32 output are compiled
    when they are needed."""
    if dtype == torch.float64:
        return
    yield PAD[dtype]
    yield from (REDUCE[dtype, dtype, width] for width in (1, 16 // dtype.itemsize))
    yield from (DIRECT[dtype, dtype, tile.name] for tile in TILES if not tile.stages)
    for tile, a_k, b_k in itertools.product(TILES, (True, False), (True, False)):
        if (
            tile.stages
            and tile.wgmma <= wgmma
            and tile.split <= (dtype == torch.float32)
            and not (tile.least_k and dtype.itemsize == 4)
        ):
            yield from _of_tile(tile, dtype, a_k, b_k)


def _of_tile(tile: Tile, dtype: torch.dtype, a_k: bool, b_k: bool) -> Iterable[Kernel]:
    if not tile.wgmma:
        yield V6[dtype, dtype, 3 if tile.split else 1, a_k, b_k, tile.name]
    elif dtype.itemsize == 2 or (a_k and b_k):
        yield from (
            V7[dtype, out, a_k, b_k, 0, tile.name]
            for out in {dtype, torch.float32 if tile.split_k else dtype}
        )
