"""The versions of softmax: how each launches its kernels, and the table that the tools and the public
functions use.

LAUNCHES has for each version `forward(out, x, scale, log)` and `backward(dx, y, g, scale, log)`. x and g are
(rows, columns) with a column stride of 1 and any row stride; out, dx and y are contiguous. LOG_LAUNCHES is
the same for log_softmax, where `log` is True.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.softmax import plan
from cukern.ops.softmax import row_storage as rs
from cukern.runtime.device import device_of
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.registry import Version

_V1, _V2, _V3, _V4, _V5 = (
    [Template("softmax/ladder.cu", f"softmax_v{i}{bwd}") for bwd in ("", "_bwd")] for i in range(1, 6)
)
_TWO_PASS, _INNER, _SHARED = (
    [Template("softmax/softmax.cu", f"softmax_{kind}{bwd}") for bwd in ("", "_bwd")]
    for kind in ("two_pass", "inner", "shared_inner")
)
_BLOCK = (plan.LOOP_THREADS, 1, 1)
GROUP = 32  # rows per thread block of v2's backward

Launch = Callable[..., None]  # (out, x, scale, log) or (dx, y, g, scale, log)
Blocks = Callable[[int, int], int]  # the grid, from the rows and columns
Sizes = Callable[[int, int, int], tuple[int, ...]]


def _blocks(threads: int) -> int:
    return -(-threads // plan.LOOP_THREADS)


def inner(*arguments: Any) -> None:
    """Forward, or backward with (dx, y, g, scale, log), along the middle dimension of contiguous
    three-dimensional tensors."""
    *tensors, scale, log = arguments
    outer, columns, within = tensors[0].shape
    rows, device = outer * within, tensors[0].get_device()
    block = plan.inner_block(rows, columns, tensors[0].element_size(), device_of(device).sms)
    launch = (_INNER if block[1] == 1 else _SHARED)[len(tensors) - 2][tensors[0].dtype].on(device)
    launch(
        (-(-rows // block[0]), 1, 1),
        block,
        0,
        *(t.data_ptr() for t in tensors),
        rows,
        columns,
        within,
        scale,
        log,
    )


def _loop(
    template: Template, blocks: Blocks, sizes: Sizes = lambda *every: every, vectors: bool = False
) -> Launch:
    """v1 to v5, forward or backward. `sizes`, of the rows, the columns and the stride of the rows, are the
    kernel's arguments before the scale. `vectors`: its template has a number of elements per load."""

    def launch(*arguments: Any) -> None:
        *tensors, scale, _ = arguments
        (rows, columns), row, dtype, device = (
            tensors[0].shape,
            tensors[-1].stride(0),
            tensors[0].dtype,
            tensors[0].get_device(),
        )
        pointers = [t.data_ptr() for t in tensors]
        width = _width(dtype.itemsize, columns, row, pointers) if vectors else 0
        kernel = (template[dtype, width] if vectors else template[dtype]).on(device)
        kernel((blocks(rows, columns), 1, 1), _BLOCK, 0, *pointers, *sizes(rows, columns, row), scale)

    return launch


def _width(itemsize: int, columns: int, row: int, pointers: list[int]) -> int:
    """Elements per load: 16 bytes if all rows are aligned to that, else 1."""
    width = plan.VECTOR_BYTES // itemsize
    return 1 if columns % width or row % width or any(p % plan.VECTOR_BYTES for p in pointers) else width


def _block_per_row(template: Template, vectors: bool = False) -> Launch:
    return _loop(template, lambda rows, _: rows, lambda _, columns, row: (columns, row), vectors)


def _blocks_per_row(template: Template) -> Launch:
    return _loop(
        template, lambda rows, columns: _blocks(columns) * rows, lambda _, columns, row: (columns, row)
    )


def _two_pass(*arguments: Any) -> None:
    """Forward, or backward with (dx, y, g, scale, log), of rows that no other kernel takes."""
    *tensors, scale, log = arguments
    (rows, columns), device = tensors[0].shape, tensors[0].get_device()
    grid, pointers = (min(rows, plan.MOST_BLOCKS), 1, 1), (t.data_ptr() for t in tensors)
    _TWO_PASS[len(tensors) - 2][tensors[0].dtype].on(device)(
        grid, _BLOCK, 0, *pointers, rows, columns, tensors[-1].stride(0), scale, log
    )


def _instances(templates: Iterable[Template], on_chip: int = 0) -> Callable[[torch.dtype], Iterable[Kernel]]:
    """The kernels of a version: `templates`, those for another dimension, and the first `on_chip` entries of
    rs.INSTANCES."""
    every = (*templates, *_INNER, *_SHARED)
    return lambda dtype: [
        *(t[dtype] for t in every),
        *(k for new in rs.INSTANCES[:on_chip] for k in new(dtype)),
    ]


def _fifth(dtype: torch.dtype) -> Iterable[Kernel]:
    return [
        *_instances(())(dtype),
        *(t[dtype, n] for t in _V5 for n in (1, plan.VECTOR_BYTES // dtype.itemsize)),
    ]


# ---- v6 to v10: the first method that can keep a row on chip, else two passes

_METHODS: dict[str, tuple[rs.Method, ...]] = {
    "v6": (rs.in_a_warp,),
    "v7": (rs.in_a_warp, rs.in_a_block, rs.in_pieces),
    "v8": (rs.in_a_warp, rs.in_a_block, rs.in_shared_memory, rs.in_pieces),
    "v9": (rs.in_a_warp, rs.in_a_block, rs.two_per_sm, rs.in_a_cluster, rs.in_pieces),
    "v10": (rs.in_a_warp, rs.in_a_block, rs.few_rows, rs.two_per_sm, rs.in_several_blocks, rs.in_pieces),
}


def _forward_on_chip(methods: tuple[rs.Method, ...], out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    pointers = to, from_ = out.data_ptr(), x.data_ptr()
    # A negative scale takes two passes: comparing -x would cost these kernels one instruction per element and
    # pass.
    run = (
        rs.first(methods, _problem(x, x.stride(0), scale, log, False, to, to ^ from_)) if scale >= 0 else None
    )
    run(pointers) if run else _two_pass(out, x, scale, log)


def _backward_on_chip(
    methods: tuple[rs.Method, ...], dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool
) -> None:
    pointers = to, from_y, from_g = dx.data_ptr(), y.data_ptr(), g.data_ptr()
    run = rs.first(methods, _problem(y, g.stride(0), scale, log, True, to, (to ^ from_y) | (to ^ from_g)))
    run(pointers) if run else _two_pass(dx, y, g, scale, log)


def _problem(
    x: Tensor, row_stride: int, scale: float, log: bool, backward: bool, to: int, differing_bits: int
) -> rs.Problem:
    rows, columns = x.shape
    low = plan.VECTOR_BYTES - 1
    return rs.Problem(
        rows,
        columns,
        row_stride,
        scale,
        log,
        backward,
        x.dtype,
        x.device,
        x.get_device(),
        to & low,
        differing_bits & low,
    )


# ---- the tables

VERSIONS = {
    "v1": Version("one thread per row; backward one thread per column", _instances(_V1), sequential=True),
    "v2": Version("one block per row; backward groups of rows in parallel", _instances(_V2), sequential=True),
    "v3": Version(
        "tree reductions in shared memory; backward all rows in parallel", _instances(_V3), sequential=True
    ),
    "v4": Version("warp shuffles; backward rows in shared memory", _instances(_V4), sequential=True),
    "v5": Version("16-byte vectors, online softmax; backward by a dot product", _fifth),
    "v6": Version("short rows in the registers of a few lanes", _instances(_TWO_PASS, 1)),
    "v7": Version("longer rows in the registers of a block", _instances(_TWO_PASS, 2)),
    "v8": Version("and in its shared memory", _instances(_TWO_PASS, 3), 80),
    "v9": Version("and in the shared memory of a cluster", _instances(_TWO_PASS, 4), 90),
    "v10": Version("and in the shared memory of as many blocks as a row needs", _instances(_TWO_PASS, 5), 90),
}
LAUNCHES: dict[str, tuple[Launch, Launch]] = {  # of the forward and of the backward
    "v1": (_loop(_V1[0], lambda rows, _: _blocks(rows)), _loop(_V1[1], lambda _, columns: _blocks(columns))),
    "v2": (
        _block_per_row(_V2[0]),
        _loop(
            _V2[1], lambda rows, columns: _blocks(columns) * -(-rows // GROUP), lambda *every: (*every, GROUP)
        ),
    ),
    "v3": (_block_per_row(_V3[0]), _blocks_per_row(_V3[1])),
    "v4": (_block_per_row(_V4[0]), _blocks_per_row(_V4[1])),
    "v5": (_block_per_row(_V5[0], True), _block_per_row(_V5[1], True)),
    **{
        name: (partial(_forward_on_chip, methods), partial(_backward_on_chip, methods))
        for name, methods in _METHODS.items()
    },
}
_FIFTH = Version("16-byte vectors, online softmax", _instances(_TWO_PASS))
LOG_VERSIONS = {"v5": _FIFTH, **{name: VERSIONS[name] for name in _METHODS}}
LOG_LAUNCHES = LAUNCHES | {"v5": (_two_pass, _two_pass)}
