"""The versions of layernorm and rmsnorm: forward and backward give the plan of a launch, and its number of thread blocks."""

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
from cukern.runtime.tensors import VECTOR_BYTES, aligned, wide

_V1_THREADS = 256
_V1_BLOCKS = 1 << 20  # the most blocks of v1, which loop over rows
_ANY_BLOCKS = 1 << 62
_MOST_COLUMNS = 1 << 30  # of v2's forward, whose index of a column has 32 bits
LONG = 1024  # threads of a block that loops over a row
_FORWARD_BLOCK = 128  # threads of a block that short rows share; in the backward, those of the tile
_RESIDENT = {128: 384, 384: 768, 512: 512}  # threads per SM of the backward, for each limit of its blocks

_V1 = Template("layernorm.cu", "layernorm_v1")
_V2, _V2_BWD, ADD = (Template("layernorm.cu", f"layernorm_{name}", pdl=True) for name in ("v2", "v2_bwd", "add"))


class Tile(NamedTuple):
    """A thread of v2 has `vectors` vectors of `width` elements of a row, a row at most `most_threads` threads, a block at most `block`."""

    width: int
    vectors: int
    most_threads: int
    block: int


_SIZES = {  # vectors, most_threads and block of each tile, from the shortest rows to the longest. The last tile is for parts of a row
    ("forward", "16 bits"): ((3, 32, 512), (4, 512, 512), (4, 1024, LONG)),
    ("forward", "wider"): ((1, 32, 512), (4, 512, 512), (8, 512, 512), (4, 1024, LONG)),
    ("forward", "unaligned"): ((8, 512, 512), (16, 512, 512), (8, 1024, LONG)),
    ("backward", "16 bits"): ((3, 32, 128), (2, 512, 512), (1, 384, 384)),
    ("backward", "wider"): ((2, 384, 384), (4, 512, 512), (1, 384, 384)),
    ("backward", "unaligned"): ((8, 512, 512), (4, 384, 384)),
}


def tiles(itemsize: int, aligned: bool, backward: bool) -> tuple[Tile, ...]:
    """What v2 may use, from the shortest rows to the longest. The last is for rows that do not fit into registers."""
    width, kind = VECTOR_BYTES // itemsize if aligned else 1, "unaligned" if not aligned else "16 bits" if itemsize == 2 else "wider"
    return tuple(Tile(width, *sizes) for sizes in _SIZES["backward" if backward else "forward", kind])


def threads_of(columns: int, tile: Tile) -> int:
    """Threads per row: 8, 16, or a multiple of 32."""
    needed = -(-columns // (tile.width * tile.vectors))
    return next((n for n in (8, 16) if needed <= n), -(-needed // 32) * 32)


class _Plan(NamedTuple):
    launches: tuple[backend.Launch, ...]  # one after the other, with the same arguments
    block: tuple[int, int, int]  # (threads per row, rows, 1)
    blocks: int  # the most thread blocks with rows of their own
    parts: int = 1  # thread blocks that share a row


@cached(4096)
def _plan(
    newest: bool, backward: bool, dtype: torch.dtype, weight: torch.dtype, columns: int, aligned: bool, rms: bool, device: int
) -> _Plan:
    """The launches of v2 if `newest`, else those of v1, whose backward is that of v2 for long rows of single elements."""
    (*whole, tile), sms = tiles(dtype.itemsize, newest and aligned, backward), device_of(device).sms
    for own in whole if newest else ():
        threads = threads_of(columns, own)
        if threads <= own.most_threads:
            rows = max(1, (own.block if backward else _FORWARD_BLOCK) // threads)
            blocks = sms * (_RESIDENT[own.block] // (threads * rows)) if backward else _ANY_BLOCKS
            return _Plan((_v2(backward, dtype, weight, own, rms).on(device),), (threads, rows, 1), blocks)
    if not backward:
        is_v2 = newest and columns < _MOST_COLUMNS
        kernel = _v2(False, dtype, weight, tile, rms) if is_v2 else _V1[dtype, weight, rms]
        return _Plan((kernel.on(device),), (tile.block if is_v2 else _V1_THREADS, 1, 1), _ANY_BLOCKS if is_v2 else _V1_BLOCKS)
    of_thread = tile.width * tile.vectors
    parts = -(-columns // (of_thread * tile.most_threads))
    threads = max(32, threads_of(-(-columns // parts), tile))
    parts = -(-columns // (of_thread * threads))  # none is empty
    blocks = max(1, sms * (_RESIDENT[tile.block] // threads) // parts)
    return _Plan(tuple(_v2(True, dtype, weight, tile, rms, n).on(device) for n in (1, 2)), (threads, 1, 1), blocks, parts)


def _v2(backward: bool, dtype: torch.dtype, weight: torch.dtype, tile: Tile, rms: bool, number: int = 0) -> Kernel:
    if backward:
        return _V2_BWD[dtype, weight, tile.width, tile.vectors, tile.block, number, rms]
    return _V2[dtype, weight, tile.width, tile.vectors, tile.block, rms]


def _launch_of(newest: bool, backward: bool, x: Tensor, weight: Tensor | None, rms: bool, *others: Tensor | None) -> tuple[_Plan, int]:
    """x and the matrices among `others` are (rows, columns) with a column stride of 1 and at least one element."""
    dtype = x.dtype if weight is None else weight.dtype
    plan = _plan(newest, backward, x.dtype, dtype, x.shape[1], aligned(x, weight, *others), rms, x.get_device())
    return plan, min(-(-x.shape[0] // plan.block[1]), plan.blocks)


def _instances(newest: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    both, weights = (False, True), dict.fromkeys((dtype, wide(dtype)))
    kernels = [ADD[wide(dtype), weight] for weight in weights]
    for weight, rms in itertools.product(weights, both):
        kernels += [] if newest else [_V1[dtype, weight, rms]]
        for whole in both if newest else (False,):
            *own, last = tiles(dtype.itemsize, whole, True)
            kernels += [_v2(True, dtype, weight, last, rms, number) for number in (1, 2)]
            kernels += [_v2(True, dtype, weight, tile, rms) for tile in own if newest]
            kernels += [_v2(False, dtype, weight, tile, rms) for tile in tiles(dtype.itemsize, whole, False) if newest]
    return kernels


VERSIONS = {
    name: Version(idea, partial(_launch_of, newest, False), partial(_launch_of, newest, True), partial(_instances, newest))
    for name, idea, newest in (("v1", "one block per row, read three times", False), ("v2", "row in registers, read once", True))
}
