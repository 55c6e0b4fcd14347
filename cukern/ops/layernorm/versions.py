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

_V1_THREADS, SUMS_THREADS = 256, 512
V1_BLOCKS = 1 << 20  # the most blocks of v1, which loop over rows
_ANY_BLOCKS = 1 << 62
LONG = 1024  # threads of a block that loops over a row
_FORWARD_BLOCK = 128  # threads of a block that short rows share; in the backward, those of the tile
_RESIDENT = {128: 384, 384: 768, 512: 512}  # threads per SM of the backward, for each limit of its blocks

_V1 = Template("layernorm.cu", "layernorm_v1")
_SUMS, _COLUMNS, _V2, _V2_BWD, ADD = (
    Template("layernorm.cu", f"layernorm_{name}", pdl=True) for name in ("sums", "columns", "v2", "v2_bwd", "add")
)


class Tile(NamedTuple):
    """A thread of v2 has `vectors` vectors of `width` elements of a row, a row at most `most_threads` threads, a block at most `block`."""

    width: int
    vectors: int
    most_threads: int
    block: int


_SIZES = {  # vectors, most_threads and block of each tile, from the shortest rows to the longest
    ("forward", "16 bits"): ((3, 32, 512), (4, 512, 512), (4, 1024, LONG)),
    ("forward", "wider"): ((1, 32, 512), (4, 512, 512), (8, 512, 512), (4, 1024, LONG)),
    ("forward", "unaligned"): ((8, 512, 512), (16, 512, 512), (8, 1024, LONG)),
    ("backward", "16 bits"): ((3, 32, 128), (2, 512, 512)),
    ("backward", "wider"): ((2, 384, 384), (4, 512, 512)),
    ("backward", "unaligned"): ((8, 512, 512),),
}


def tiles(itemsize: int, aligned: bool, backward: bool) -> tuple[Tile, ...]:
    """What v2 may use, from the shortest rows to the longest."""
    width, kind = VECTOR_BYTES // itemsize if aligned else 1, "unaligned" if not aligned else "16 bits" if itemsize == 2 else "wider"
    return tuple(Tile(width, *sizes) for sizes in _SIZES["backward" if backward else "forward", kind])


def threads_of(columns: int, tile: Tile) -> int:
    """Threads per row: 8, 16, or a multiple of 32."""
    needed = -(-columns // (tile.width * tile.vectors))
    return next((n for n in (8, 16) if needed <= n), -(-needed // 32) * 32)


class _Plan(NamedTuple):
    launch: backend.Launch
    block: tuple[int, int, int]  # (threads per row, rows, 1)
    rows: int  # the fewest rows that make another thread block worth its cost
    blocks: int  # the most thread blocks, one above the other
    across: int = 1  # thread blocks side by side
    sums: backend.Launch | None = None  # the backward's first kernel, if it has two


@cached(4096)
def _plan(
    newest: bool, backward: bool, dtype: torch.dtype, weight: torch.dtype, columns: int, aligned: bool, rms: bool, device: int
) -> _Plan:
    """The launch of v2 if `newest`, but v1's backward with whole vectors for rows that do not fit into registers."""
    sms = device_of(device).sms
    for tile in tiles(dtype.itemsize, aligned, backward) if newest else ():
        threads = min(threads_of(columns, tile), LONG)
        if threads <= tile.most_threads:
            rows = max(1, (tile.block if backward else _FORWARD_BLOCK) // threads)
            blocks = sms * (_RESIDENT[tile.block] // (threads * rows)) if backward else _ANY_BLOCKS
            return _Plan(_v2(backward, dtype, weight, tile, rms).on(device), (threads, rows, 1), rows, blocks)
    if not backward:
        return _Plan(_V1[dtype, weight, rms].on(device), (_V1_THREADS, 1, 1), 1, V1_BLOCKS)
    width = VECTOR_BYTES // dtype.itemsize if newest and aligned else 1
    across = -(-columns // (_V1_THREADS * width))
    bwd, sums = (v1[dtype, weight, width, rms].on(device) for v1 in (_COLUMNS, _SUMS))
    return _Plan(bwd, (_V1_THREADS, 1, 1), 8, max(1, 4 * sms // across), across, sums)


def _v2(backward: bool, dtype: torch.dtype, weight: torch.dtype, tile: Tile, rms: bool) -> Kernel:
    return (_V2_BWD if backward else _V2)[dtype, weight, tile.width, tile.vectors, tile.block, rms]


def _launch_of(newest: bool, backward: bool, x: Tensor, weight: Tensor | None, rms: bool, *others: Tensor | None) -> tuple[_Plan, int]:
    """x and the matrices among `others` are (rows, columns) with a column stride of 1 and at least one element."""
    dtype = x.dtype if weight is None else weight.dtype
    plan = _plan(newest, backward, x.dtype, dtype, x.shape[1], aligned(x, weight, *others), rms, x.get_device())
    return plan, min(-(-x.shape[0] // plan.rows), plan.blocks)


def _instances(newest: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    both, weights = (False, True), dict.fromkeys((dtype, wide(dtype)))
    kernels = [ADD[wide(dtype), weight] for weight in weights]
    for weight, rms in itertools.product(weights, both):
        widths = (1, VECTOR_BYTES // dtype.itemsize) if newest else (1,)
        kernels += [v1[dtype, weight, width, rms] for v1 in (_SUMS, _COLUMNS) for width in widths]
        kernels += [] if newest else [_V1[dtype, weight, rms]]
        choices = itertools.product(both, both) if newest else ()
        kernels += [_v2(b, dtype, weight, tile, rms) for whole, b in choices for tile in tiles(dtype.itemsize, whole, b)]
    return kernels


VERSIONS = {
    name: Version(idea, partial(_launch_of, newest, False), partial(_launch_of, newest, True), partial(_instances, newest))
    for name, idea, newest in (("v1", "one block per row, read three times", False), ("v2", "row in registers, read once", True))
}
