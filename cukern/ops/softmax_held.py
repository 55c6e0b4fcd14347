"""v6 to v9 of softmax, which hold a row on chip and read it once: which kernel takes a call, and its launch. Forward and backward alike."""

import functools
import operator
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops import softmax_plan as plan
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template


class Call(NamedTuple):
    """`pointers`: the output's, then the inputs'. `row`: from one row of x, or of g, to the next, in elements. `vectors`: of a row."""

    pointers: tuple[int, ...]
    rows: int
    columns: int
    row: int
    scale: float
    log: bool
    dtype: torch.dtype
    device: torch.device
    number: int
    vectors: int
    backward: bool
    exact: bool  # only whole vectors, and no logarithm


def call_of(x: Tensor, row: int, scale: float, log: bool, backward: bool, *tensors: Tensor) -> Call:
    """`x`: what is read as vectors: forward's x, backward's y."""
    rows, columns = x.shape
    aligned = not (x.data_ptr() | x.stride(0) * x.itemsize) % plan.VECTOR_BYTES
    vectors = plan.vectors_of(columns, x.itemsize, aligned)
    pointers = tuple(t.data_ptr() for t in tensors)
    low_bits = functools.reduce(operator.or_, pointers, columns * x.itemsize | row * x.itemsize)
    exact = not low_bits % plan.VECTOR_BYTES and not log and x.dtype != torch.float64
    return Call(pointers, rows, columns, row, scale, log, x.dtype, x.device, x.get_device(), vectors, backward, exact)


def _two(name: str) -> tuple[Template, Template]:
    return Template("softmax.cu", f"softmax_{name}"), Template("softmax.cu", f"softmax_{name}_bwd")


_V6, _V7, _SCAN, _WRITE, _V8, _V9 = (_two(name) for name in ("v6", "v7", "v7_scan", "v7_write", "v8", "v9"))


def in_a_warp(call: Call) -> bool:
    """v6. Like the other four: False, and nothing done, where a row is too long for it."""
    team = plan.warp_team(call.vectors, call.dtype.itemsize)
    if team is None:
        return False
    grid = (-(-call.rows // (plan.WARP_BLOCK // team.width)), 1, 1)
    numbers = call.rows, call.columns, call.row, team.width, call.scale, call.log
    exact = plan.exact_warp(team, call.dtype.itemsize, call.exact)
    _V6[call.backward][call.dtype, team.vectors, exact].on(call.number)(grid, (plan.WARP_BLOCK, 1, 1), 0, *call.pointers, *numbers)
    return True


def in_a_block(call: Call) -> bool:
    """v7, of rows in registers."""
    shapes = _shapes(call.dtype, call.backward, call.exact)
    found = plan.block_shape(call.vectors, shapes, call.exact)
    if found is None or call.rows > plan.MOST_BLOCKS:
        return False
    shape, width = found
    kernel = _V7[call.backward][call.dtype, shape.vectors, shape.threads, shape.blocks, call.exact].on(call.number)
    kernel((call.rows, 1, 1), (width, 1, 1), 0, *call.pointers, call.columns, call.row, call.scale, call.log)
    return True


def in_pieces(call: Call) -> bool:
    """v7, of a few long rows: in two launches. False where there are enough rows for all of the GPU."""
    pieces = plan.pieces(call.rows, call.vectors, backend.multiprocessors(call.number))
    width = plan.VECTOR_BYTES // call.dtype.itemsize
    length = width * -(-call.columns // (width * pieces))
    pieces = -(-call.columns // length)
    if pieces == 1 or call.rows * pieces > plan.MOST_BLOCKS:
        return False
    parts = torch.empty((call.rows, pieces, 1 if call.backward else 2), dtype=torch.float64, device=call.device)
    grid, block = (call.rows * pieces, 1, 1), (plan.LOOP_THREADS, 1, 1)
    numbers = call.columns, call.row, pieces, length, call.scale, call.log
    scan, write = (both[call.backward][call.dtype].on(call.number) for both in (_SCAN, _WRITE))
    scan(grid, block, 0, parts.data_ptr(), *call.pointers[1:], *numbers)
    write(grid, block, 0, *call.pointers, parts.data_ptr(), *numbers)
    return True


def in_shared_memory(call: Call) -> bool:
    """v8. Not of float64, which nobody is in a hurry with."""
    if call.dtype == torch.float64:
        return False
    return _hold(call, plan.block_hold(call.vectors, backend.shared_memory(call.number), call.backward))


def in_a_cluster(call: Call) -> bool:
    """v9; a cluster of one block is v8."""
    if call.dtype == torch.float64:
        return False
    sms, most = backend.multiprocessors(call.number), largest_cluster(backend.capability(call.number))
    return _hold(call, plan.cluster_hold(call.rows, call.vectors, backend.shared_memory(call.number), sms, most, call.backward))


def largest_cluster(capability: int) -> int:
    """Any GPU with clusters has them of 8 blocks; those of data centres, of 16, where asked for."""
    return 16 if capability < 120 else 8


def _hold(call: Call, held: plan.Hold | None) -> bool:
    if held is None or call.rows * held.size > plan.MOST_BLOCKS:
        return False
    vectors = plan.HELD_VECTORS_BWD if call.backward else plan.HELD_VECTORS
    key = (call.dtype, vectors, *([held.size] if held.size > 1 else []), call.exact)
    kernel = (_V8 if held.size == 1 else _V9)[call.backward][key].on(call.number)
    numbers = call.columns, call.row, held.part, held.most, call.scale, call.log
    kernel((call.rows * held.size, 1, 1), (held.threads, 1, 1), held.shared, *call.pointers, *numbers)
    return True


def _shapes(dtype: torch.dtype, backward: bool, exact: bool) -> tuple[plan.Shape, ...]:
    tables = (plan.EXACT_SHAPES_BWD if backward else plan.EXACT_SHAPES) if exact else (plan.SHAPES_BWD if backward else plan.SHAPES)
    return tables.get(dtype.itemsize, ())


# ---- the kernels that each may launch, beyond those of the version before

_EXACT = (False, True)


def v6_instances(dtype: torch.dtype) -> list[Kernel]:
    size = dtype.itemsize
    kinds = [*((v, False) for v in plan.WARP_VECTORS[size]), *((v, True) for v in plan.EXACT_WARP_VECTORS.get(size, ()))]
    return [template[dtype, v, exact] for template in _V6 for v, exact in kinds]


def v7_instances(dtype: torch.dtype) -> list[Kernel]:
    held = [
        _V7[backward][dtype, s.vectors, s.threads, s.blocks, exact]
        for backward in (False, True)
        for exact in _EXACT
        for s in _shapes(dtype, backward, exact)
    ]
    return [*held, *(template[dtype] for template in (*_SCAN, *_WRITE))]


def v8_instances(dtype: torch.dtype) -> list[Kernel]:
    if dtype == torch.float64:
        return []
    return [template[dtype, v, exact] for template, v in zip(_V8, _HELD_VECTORS, strict=True) for exact in _EXACT]


def v9_instances(dtype: torch.dtype) -> list[Kernel]:
    if dtype == torch.float64:
        return []
    pairs = list(zip(_V9, _HELD_VECTORS, strict=True))
    return [template[dtype, v, size, exact] for template, v in pairs for size in (2, 4, 8, 16) for exact in _EXACT]


_HELD_VECTORS = plan.HELD_VECTORS, plan.HELD_VECTORS_BWD
