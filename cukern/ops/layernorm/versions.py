"""The versions of layernorm and rmsnorm: forward and backward give the plan of a launch, and its number of
thread blocks."""

import itertools
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.runtime.device import cached, device_of
from cukern.runtime.launch import driver
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.registry import Version
from cukern.runtime.tensors import VECTOR_BYTES, aligned, wide

_ANY_BLOCKS = (1 << 31) - 1
_RESIDENT = {128: 384, 384: 768, 512: 512}  # threads per SM of the backward, for each limit of its blocks

_V1, _V2, _V2_BWD, ADD = (
    Template("layernorm.cu", f"layernorm_{name}", pdl=True) for name in ("v1", "v2", "v2_bwd", "add")
)


class Tile(NamedTuple):
    """A thread of v2 has `vectors` vectors of `width` elements of a row, a row at most `most_threads`
    threads, a block at most `block`."""

    width: int
    vectors: int
    most_threads: int
    block: int


# vectors, most_threads and block of each tile, from the shortest rows to the longest; the last is for parts
# of a row
_SIZES = {
    ("forward", "16 bits"): ((3, 32, 512), (4, 512, 512), (4, 1024, 1024)),
    ("forward", "wider"): ((1, 32, 512), (4, 512, 512), (8, 512, 512), (4, 1024, 1024)),
    ("forward", "unaligned"): ((8, 512, 512), (16, 512, 512), (6, 512, 1024)),
    ("backward", "16 bits"): ((3, 32, 128), (2, 512, 512), (1, 384, 384)),
    ("backward", "wider"): ((2, 384, 384), (4, 512, 512), (1, 384, 384)),
    ("backward", "unaligned"): ((8, 512, 512), (4, 384, 384)),
}


def tiles(itemsize: int, aligned: bool, backward: bool) -> tuple[Tile, ...]:
    """What v2 may use, from the shortest rows to the longest. The last is for rows that do not fit into
    registers."""
    width = VECTOR_BYTES // itemsize if aligned else 1
    kind = "unaligned" if not aligned else "16 bits" if itemsize == 2 else "wider"
    return tuple(Tile(width, *sizes) for sizes in _SIZES["backward" if backward else "forward", kind])


def threads_of(columns: int, tile: Tile) -> int:
    """Threads per row: 8, 16, or a multiple of 32."""
    needed = -(-columns // (tile.width * tile.vectors))
    return next((n for n in (8, 16) if needed <= n), -(-needed // 32) * 32)


class _Plan(NamedTuple):
    launches: tuple[driver.Launch, ...]  # one after the other, with the same arguments
    block: tuple[int, int, int]  # (threads per row, rows, 1)
    blocks: int  # the most thread blocks with rows of their own
    parts: int = 1  # thread blocks that share a row


@cached(4096)
def _plan(
    newest: bool, backward: bool, dtype: torch.dtype, weight: torch.dtype, columns: int, aligned: bool,
    rms: bool, device: int,
) -> _Plan:  # fmt: skip
    """The launches of v2 if `newest`, else those of v1, whose backward is that of v2 for long rows of single
    elements."""
    (*whole, last), sms = tiles(dtype.itemsize, newest and aligned, backward), device_of(device).sms
    for tile in whole if newest else ():
        threads = threads_of(columns, tile)
        if threads <= tile.most_threads:
            rows = max(1, (tile.block if backward else 128) // threads)  # that share a block
            blocks = sms * (_RESIDENT[tile.block] // (threads * rows)) if backward else _ANY_BLOCKS
            kernel = (
                _v2(_V2_BWD, dtype, weight, tile, 0, rms) if backward else _v2(_V2, dtype, weight, tile, rms)
            )
            return _Plan((kernel.on(device),), (threads, rows, 1), blocks)
    parts = -(-columns // (last.width * last.vectors * last.most_threads))
    if backward:
        passes = tuple(_v2(_V2_BWD, dtype, weight, last, number, rms).on(device) for number in (1, 2))
        return _Plan(
            passes, (last.block, 1, 1), max(1, sms * _RESIDENT[last.block] // last.block // parts), parts
        )
    # v2 has 32-bit columns
    kernel = _v2(_V2, dtype, weight, last, rms) if newest and columns < 1 << 30 else _V1[dtype, weight, rms]
    threads = threads_of(-(-columns // parts), last) if newest else 256
    return _Plan((kernel.on(device),), (threads, 1, 1), _ANY_BLOCKS)


def _v2(template: Template, dtype: torch.dtype, weight: torch.dtype, tile: Tile, *others: int) -> Kernel:
    key = dtype, weight, tile.width, tile.vectors, tile.block, *others
    return template[key]


def plan_of(
    version: str, backward: bool, x: Tensor, weight: Tensor | None, rms: bool, *others: Tensor | None
) -> tuple[_Plan, int]:
    """x and the matrices among `others` are (rows, columns) with a column stride of 1 and at least one
    element."""
    dtype = x.dtype if weight is None else weight.dtype
    plan = _plan(
        version != "v1",
        backward,
        x.dtype,
        dtype,
        x.shape[1],
        aligned(x, weight, *others),
        rms,
        x.get_device(),
    )
    return plan, min(-(-x.shape[0] // plan.block[1]), plan.blocks)


def _instances(newest: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    both, weights = (False, True), dict.fromkeys((dtype, wide(dtype)))
    kernels = [ADD[wide(dtype), weight] for weight in weights]
    for weight, rms, whole in itertools.product(weights, both, both if newest else (False,)):
        forward, (*backward, last) = (tiles(dtype.itemsize, whole, b) for b in both)
        kernels += [_v2(_V2_BWD, dtype, weight, last, number, rms) for number in (1, 2)]
        kernels += (
            [_v2(_V2, dtype, weight, tile, rms) for tile in forward] if newest else [_V1[dtype, weight, rms]]
        )
        kernels += [_v2(_V2_BWD, dtype, weight, tile, 0, rms) for tile in backward if newest]
    return kernels


VERSIONS = {
    name: Version(idea, partial(_instances, newest))
    for name, idea, newest in (
        ("v1", "one block per row, read three times", False),
        ("v2", "row in registers, read once", True),
    )
}
