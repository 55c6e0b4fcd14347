"""The ladder of softmax: for each version how its kernels are launched, and the table that the tools and the public functions use.

Each rung is `forward(out, x, scale, log)` and `backward(dx, y, g, scale, log)`: x and g are (rows, columns) with columns side by side and
rows any stride apart; out, dx and y are contiguous. `log`: the logarithm of the softmax, from v5 on.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cukern.ops.softmax import plan, row_storage
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version

_V1, _V2, _V3, _V4, _V5 = (Template("softmax/softmax.cu", f"softmax_v{i}") for i in range(1, 6))
_V1_BWD, _V2_BWD, _V3_BWD, _V4_BWD, _V5_BWD = (Template("softmax/softmax.cu", f"softmax_v{i}_bwd") for i in range(1, 6))
_INNER, _INNER_BWD = Template("softmax/softmax.cu", "softmax_inner"), Template("softmax/softmax.cu", "softmax_inner_bwd")

_BLOCK = (plan.LOOP_THREADS, 1, 1)
GROUP = 32  # rows that a block of v2's backward takes

Forward = Callable[[Tensor, Tensor, float, bool], None]
Backward = Callable[[Tensor, Tensor, Tensor, float, bool], None]


def _grid(threads: int) -> backend.Dim:
    return (-(-threads // plan.LOOP_THREADS), 1, 1)


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


def inner(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    """Forward along the middle of three dimensions, all contiguous."""
    outer, columns, within = x.shape
    rows, launch = outer * within, _INNER[x.dtype].on(x.get_device())
    launch(_grid(rows), _BLOCK, 0, *_pointers(out, x), rows, columns, within, scale, log)


def inner_backward(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    outer, columns, within = y.shape
    rows, launch = outer * within, _INNER_BWD[y.dtype].on(y.get_device())
    launch(_grid(rows), _BLOCK, 0, *_pointers(dx, y, g), rows, columns, within, scale, log)


def _v1(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    rows, columns = x.shape
    _V1[x.dtype].on(x.get_device())(_grid(rows), _BLOCK, 0, *_pointers(out, x), rows, columns, x.stride(0), scale)


def _block_a_row(template: Template) -> Forward:
    """v2 to v4."""

    def forward(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
        rows, columns = x.shape
        grid = (min(rows, plan.MOST_BLOCKS), 1, 1)
        template[x.dtype].on(x.get_device())(grid, _BLOCK, 0, *_pointers(out, x), rows, columns, x.stride(0), scale)

    return forward


def _v5(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    rows, columns = x.shape
    grid = (min(rows, plan.MOST_BLOCKS), 1, 1)
    _V5[x.dtype].on(x.get_device())(grid, _BLOCK, 0, *_pointers(out, x), rows, columns, x.stride(0), scale, log)


def _v1_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    rows, columns = y.shape
    _V1_BWD[y.dtype].on(y.get_device())(_grid(columns), _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), scale)


def _v2_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    rows, columns = y.shape
    grid = (_grid(columns)[0] * -(-rows // GROUP), 1, 1)
    _V2_BWD[y.dtype].on(y.get_device())(grid, _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), GROUP, scale)


def _every_row(template: Template) -> Backward:
    """v3 and v4."""

    def backward(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
        rows, columns = y.shape
        grid = (_grid(columns)[0] * rows, 1, 1)
        template[y.dtype].on(y.get_device())(grid, _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), scale)

    return backward


def _v5_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    rows, columns = y.shape
    grid = (min(rows, plan.MOST_BLOCKS), 1, 1)
    _V5_BWD[y.dtype].on(y.get_device())(grid, _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), scale, log)


# ---- v6 to v11: the first way that holds a row on chip, else v5

_V7 = row_storage.in_a_warp, row_storage.in_a_block, row_storage.in_pieces
_V8 = row_storage.in_a_warp, row_storage.in_a_block, row_storage.in_shared_memory, row_storage.in_pieces
_V9 = row_storage.in_a_warp, row_storage.in_a_block, row_storage.beside_another, row_storage.in_a_cluster, row_storage.in_pieces
_V10 = (
    row_storage.in_a_warp,
    row_storage.in_a_block,
    row_storage.of_few_rows,
    row_storage.beside_another,
    row_storage.in_several_blocks,
    row_storage.in_pieces,
)
_V11 = (
    row_storage.in_a_warp,
    row_storage.in_a_block,
    row_storage.of_few_rows,
    row_storage.beside_another,
    row_storage.in_step,
    row_storage.in_several_blocks,
    row_storage.in_pieces,
)


def _first(*ways: row_storage.Way) -> tuple[Forward, Backward]:
    def forward(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
        at = to, from_ = out.data_ptr(), x.data_ptr()
        # to compare -x instead of x would cost the kernels that hold a row an instruction an element and a pass
        found = row_storage.first(ways, _problem(x, x.stride(0), scale, log, False, to, to ^ from_)) if scale >= 0 else None
        found(at) if found else _v5(out, x, scale, log)

    def backward(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
        at = to, *_ = dx.data_ptr(), y.data_ptr(), g.data_ptr()
        found = row_storage.first(ways, _problem(y, g.stride(0), scale, log, True, to, (to ^ at[1]) | (to ^ at[2])))
        found(at) if found else _v5_bwd(dx, y, g, scale, log)

    return forward, backward


def _problem(x: Tensor, row: int, scale: float, log: bool, backward: bool, to: int, apart: int) -> row_storage.Problem:
    rows, columns = x.shape
    low = plan.VECTOR_BYTES - 1
    return row_storage.Problem(rows, columns, row, scale, log, backward, x.dtype, x.device, x.get_device(), to & low, apart & low)


def _instances(
    *templates: Template, more: Iterable[Callable[[torch.dtype], list[Kernel]]] = ()
) -> Callable[[torch.dtype], Iterable[Kernel]]:
    return lambda dtype: [*(t[dtype] for t in (*templates, _INNER, _INNER_BWD)), *(k for some in more for k in some(dtype))]


_HELD = (
    row_storage.v6_instances,
    row_storage.v7_instances,
    row_storage.v8_instances,
    row_storage.v9_instances,
    row_storage.v10_instances,
    row_storage.v11_instances,
)
VERSIONS = {
    "v1": Version("a thread a row; backward a thread a column", _v1, _v1_bwd, _instances(_V1, _V1_BWD)),
    "v2": Version("a block a row; backward groups of rows side by side", _block_a_row(_V2), _v2_bwd, _instances(_V2, _V2_BWD)),
    "v3": Version(
        "trees in shared memory; backward every row side by side", _block_a_row(_V3), _every_row(_V3_BWD), _instances(_V3, _V3_BWD)
    ),
    "v4": Version("shuffles; backward rows in shared memory", _block_a_row(_V4), _every_row(_V4_BWD), _instances(_V4, _V4_BWD)),
    "v5": Version("16-byte vectors, online; backward by a dot product", _v5, _v5_bwd, _instances(_V5, _V5_BWD)),
    "v6": Version("short rows in the registers of a few lanes", *_first(row_storage.in_a_warp), _instances(_V5, _V5_BWD, more=_HELD[:1])),
    "v7": Version("longer rows in the registers of a block", *_first(*_V7), _instances(_V5, _V5_BWD, more=_HELD[:2])),
    "v8": Version("and in its shared memory", *_first(*_V8), _instances(_V5, _V5_BWD, more=_HELD[:3]), requires=80),
    "v9": Version("and in that of a cluster of blocks", *_first(*_V9), _instances(_V5, _V5_BWD, more=_HELD[:4]), requires=90),
    "v10": Version("and in that of as many blocks as a row needs", *_first(*_V10), _instances(_V5, _V5_BWD, more=_HELD[:5]), requires=90),
    "v11": Version("backward of the longest in step", *_first(*_V11), _instances(_V5, _V5_BWD, more=_HELD), requires=90),
}
LOG_VERSIONS = {name: version for name, version in VERSIONS.items() if 5 <= int(name[1:]) <= 10}
