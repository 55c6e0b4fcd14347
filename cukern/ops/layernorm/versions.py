"""The versions of layernorm and rmsnorm, and the plan of each launch.

forward(y, s, stats, x, residual, weight, bias, eps, rms), backward(dx, dweight, dbias, s, dy, ds, stats, weight, rms). Matrices are (rows,
columns) with a column stride of 1 and at least one element. s, residual, weight, bias, ds, dweight and dbias may be None.
"""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.runtime import backend
from cukern.runtime.device import cached, device_of
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version
from cukern.runtime.tensors import VECTOR_BYTES, aligned, pointers, row_strides, wide

V1_THREADS = 256
_V1_BLOCKS = 1 << 20  # the most blocks of v1, which loop over rows
_ANY_BLOCKS = 1 << 62
_FORWARD_BLOCK = 128  # threads of a block that short rows share; in the backward, those of the tile
_RESIDENT = {128: 384, 384: 768, 512: 512}  # threads per SM of the backward, for each limit of its blocks

_V1, _V1_BWD, _PARTIALS = (Template("layernorm.cu", f"layernorm_v1{name}") for name in ("", "_bwd", "_partials"))
_V2, _V2_BWD, _ADD = (Template("layernorm.cu", f"layernorm_{name}", pdl=True) for name in ("v2", "v2_bwd", "add"))


class Tile(NamedTuple):
    """A thread of v2 has `vectors` vectors of `width` elements of a row, a row at most `most_threads` threads, a block at most `block`."""

    width: int
    vectors: int
    most_threads: int
    block: int


def tiles(itemsize: int, aligned: bool, backward: bool) -> tuple[Tile, ...]:
    """What v2 may use, from the shortest rows to the longest."""
    width = VECTOR_BYTES // itemsize if aligned else 1
    sizes: tuple[tuple[int, int, int], ...]
    if backward and aligned and itemsize == 2:
        sizes = (24, 32, 128), (16, 512, 512)
    elif backward and aligned:
        elements = 32 // itemsize
        sizes = (elements, 384, 384), (2 * elements, 512, 512)
    elif backward:
        sizes = ((8, 512, 512),)
    elif aligned and itemsize == 2:
        sizes = (24, 32, 512), (32, 512, 512)
    elif aligned:
        sizes = (width, 32, 512), (4 * width, 512, 512), (8 * width, 512, 512)
    else:
        sizes = (8, 512, 512), (16, 512, 512)
    return tuple(Tile(width, elements // width, threads, block) for elements, threads, block in sizes)


def threads_of(columns: int, tile: Tile) -> int:
    """Threads per row: 8, 16, or a multiple of 32."""
    needed = -(-columns // (tile.width * tile.vectors))
    return next((n for n in (8, 16) if needed <= n), -(-needed // 32) * 32)


class _Plan(NamedTuple):
    launch: backend.Launch
    block: tuple[int, int, int]  # (threads per row, rows, 1)
    blocks: int  # the most thread blocks
    adds: bool  # True if the kernel of the backward also writes partial sums for weight and bias


@cached(4096)
def _plan(
    newest: bool, backward: bool, dtype: torch.dtype, weight: torch.dtype, columns: int, aligned: bool, rms: bool, device: int
) -> _Plan:
    """The launch of v2 if `newest` and if a row fits into registers, else that of v1."""
    for tile in tiles(dtype.itemsize, aligned, backward) if newest else ():
        threads = threads_of(columns, tile)
        if threads <= tile.most_threads:
            rows = max(1, (tile.block if backward else _FORWARD_BLOCK) // threads)
            blocks = device_of(device).sms * (_RESIDENT[tile.block] // (threads * rows)) if backward else _ANY_BLOCKS
            return _Plan(_v2(backward, dtype, weight, tile, rms).on(device), (threads, rows, 1), blocks, True)
    return _Plan((_V1_BWD if backward else _V1)[dtype, weight, rms].on(device), (V1_THREADS, 1, 1), _V1_BLOCKS, False)


def _v2(backward: bool, dtype: torch.dtype, weight: torch.dtype, tile: Tile, rms: bool) -> Kernel:
    if backward:
        return _V2_BWD[dtype, weight, tile.width, tile.vectors, tile.block, rms]
    return _V2[dtype, weight, tile.width, tile.vectors, rms]


def _plan_for(newest: bool, backward: bool, x: Tensor, weight: Tensor | None, rms: bool, *others: Tensor | None) -> tuple[_Plan, int]:
    """The plan and the number of blocks."""
    dtype = x.dtype if weight is None else weight.dtype
    plan = _plan(newest, backward, x.dtype, dtype, x.shape[1], aligned(x, weight, *others), rms, x.get_device())
    return plan, min(-(-x.shape[0] // plan.block[1]), plan.blocks)


def _forward(
    newest: bool, y: Tensor, s: Tensor | None, stats: Tensor, x: Tensor, residual: Tensor | None, weight: Tensor | None,
    bias: Tensor | None, eps: float, rms: bool,
) -> None:  # fmt: skip
    plan, blocks = _plan_for(newest, False, x, weight, rms, bias, y, s, residual)
    addresses = pointers(y, s, stats, x, residual, weight, bias)
    plan.launch((blocks, 1, 1), plan.block, 0, *addresses, *x.shape, *row_strides(x, residual), eps)


def _backward(
    newest: bool, dx: Tensor, dweight: Tensor | None, dbias: Tensor | None, s: Tensor, dy: Tensor, ds: Tensor | None, stats: Tensor,
    weight: Tensor | None, rms: bool,
) -> None:  # fmt: skip
    """dbias needs dweight: both are added by one launch."""
    (rows, columns), device = s.shape, s.get_device()
    plan, blocks = _plan_for(newest, True, s, weight, rms, dx, dy, ds)
    groups = blocks if plan.adds else min(rows, 2 * device_of(device).sms)
    partials = None if dweight is None else stats.new_empty(2, groups, columns)
    shared = 2 * columns * stats.itemsize if dweight is not None and plan.block[1] > 1 else 0
    addresses = pointers(dx, *([partials] if plan.adds else []), s, dy, ds, stats, weight)
    plan.launch((blocks, 1, 1), plan.block, shared, *addresses, rows, columns, *row_strides(s, dy, ds))
    if dweight is None or partials is None:
        return
    if not plan.adds:
        launch, grid = _PARTIALS[s.dtype].on(device), (-(-columns // V1_THREADS), groups, 1)
        launch(grid, (V1_THREADS, 1, 1), 0, *pointers(partials, s, dy, stats), rows, columns, *row_strides(s, dy))
    add, grid = _ADD[stats.dtype, dweight.dtype].on(device), (-(-columns // 16), 1 if dbias is None else 2, 1)
    add(grid, (16, 32, 1), 0, *pointers(dweight, dbias, partials), groups, columns)


def _instances(newest: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    both, weights = (False, True), dict.fromkeys((dtype, wide(dtype)))
    kernels = [_PARTIALS[dtype], *(_ADD[wide(dtype), weight] for weight in weights)]
    for weight, rms in itertools.product(weights, both):
        kernels += [_V1[dtype, weight, rms], _V1_BWD[dtype, weight, rms]]
        for backward, whole in itertools.product(both, both) if newest else ():
            kernels += [_v2(backward, dtype, weight, tile, rms) for tile in tiles(dtype.itemsize, whole, backward)]
    return kernels


VERSIONS = {
    name: Version(idea, partial(_forward, newest), partial(_backward, newest), partial(_instances, newest))
    for name, idea, newest in (("v1", "one block per row, read three times", False), ("v2", "row in registers, read once", True))
}
