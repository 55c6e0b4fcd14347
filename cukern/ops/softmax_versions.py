"""The ladder of softmax: for each version how its kernels are launched, and the table that the tools and the public functions use.

Each rung is `forward(out, x, scale, log)` and `backward(dx, y, g, scale, log)`: x and g are (rows, columns) with columns side by side and
rows any stride apart; out, dx and y are contiguous. `log`: the logarithm of the softmax, from v5 on.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from cukern.ops import softmax_plan as plan
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version

_V1, _V2, _V3, _V4, _V5, _V6, _V7, _V8 = (Template("softmax.cu", f"softmax_v{i}") for i in range(1, 9))
_V1_BWD, _V2_BWD, _V3_BWD, _V4_BWD, _V5_BWD, _V6_BWD, _V7_BWD, _V8_BWD = (Template("softmax.cu", f"softmax_v{i}_bwd") for i in range(1, 9))
_V8_SCAN, _V8_BWD_SCAN = Template("softmax.cu", "softmax_v8_scan"), Template("softmax.cu", "softmax_v8_bwd_scan")
_INNER, _INNER_BWD = Template("softmax.cu", "softmax_inner"), Template("softmax.cu", "softmax_inner_bwd")

_BLOCK = (plan.LOOP_THREADS, 1, 1)
GROUP = 32  # rows that a block of v2's backward takes


def _grid(threads: int) -> backend.Dim:
    return (-(-threads // plan.LOOP_THREADS), 1, 1)


def inner(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    """Forward along the middle of three dimensions, all contiguous."""
    outer, columns, within = x.shape
    rows, launch = outer * within, _INNER[x.dtype].on(x.get_device())
    launch(_grid(rows), _BLOCK, 0, out.data_ptr(), x.data_ptr(), rows, columns, within, scale, log)


def inner_backward(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    outer, columns, within = y.shape
    rows, launch = outer * within, _INNER_BWD[y.dtype].on(y.get_device())
    launch(_grid(rows), _BLOCK, 0, dx.data_ptr(), y.data_ptr(), g.data_ptr(), rows, columns, within, scale, log)


# ---- forward


def _v1(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    rows, columns = x.shape
    _V1[x.dtype].on(x.get_device())(_grid(rows), _BLOCK, 0, out.data_ptr(), x.data_ptr(), rows, columns, x.stride(0), scale)


def _block_a_row(template: Template) -> Callable[..., None]:
    """v2 to v5. v2 to v4 know no logarithm."""

    def forward(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
        rows, columns = x.shape
        numbers = (rows, columns, x.stride(0), scale, *((log,) if template is _V5 else ()))
        grid = (min(rows, plan.MOST_BLOCKS), 1, 1)
        template[x.dtype].on(x.get_device())(grid, _BLOCK, 0, out.data_ptr(), x.data_ptr(), *numbers)

    return forward


_v5 = _block_a_row(_V5)


def _v6(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    if not _in_a_warp(out, x, scale, log):
        _v5(out, x, scale, log)


def _v7(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    if not _in_a_warp(out, x, scale, log) and not _in_a_block(out, x, scale, log):
        _v5(out, x, scale, log)


def _v8(out: Tensor, x: Tensor, scale: float, log: bool) -> None:
    if _in_a_warp(out, x, scale, log) or _in_a_block(out, x, scale, log):
        return
    (rows, columns), device = x.shape, x.get_device()
    pieces, length = _pieces(x)
    if pieces == 1:
        return _v5(out, x, scale, log)
    parts = torch.empty((rows, pieces, 2), dtype=torch.float64, device=x.device)
    numbers, grid = (columns, x.stride(0), pieces, length, scale), (rows * pieces, 1, 1)
    _V8_SCAN[x.dtype].on(device)(grid, _BLOCK, 0, parts.data_ptr(), x.data_ptr(), *numbers)
    _V8[x.dtype].on(device)(grid, _BLOCK, 0, out.data_ptr(), x.data_ptr(), parts.data_ptr(), *numbers, log)


def _in_a_warp(out: Tensor, x: Tensor, scale: float, log: bool) -> bool:
    """Launch v6's kernel, if a row is short enough for it."""
    (rows, columns), row = x.shape, x.stride(0)
    team = plan.warp_team(_vectors(x))
    if team is None:
        return False
    grid = (-(-rows // (plan.WARP_BLOCK // team.width)), 1, 1)
    numbers = rows, columns, row, team.width, scale, log
    launch = _V6[x.dtype, team.vectors].on(x.get_device())
    launch(grid, (plan.WARP_BLOCK, 1, 1), 0, out.data_ptr(), x.data_ptr(), *numbers)
    return True


def _in_a_block(out: Tensor, x: Tensor, scale: float, log: bool) -> bool:
    """Launch v7's kernel, if a row is short enough for it."""
    (rows, columns), row = x.shape, x.stride(0)
    team = plan.block_team(_vectors(x), plan.BLOCK_VECTORS)
    if team is None or rows > plan.MOST_BLOCKS:
        return False
    launch = _V7[x.dtype, team.vectors].on(x.get_device())
    launch((rows, 1, 1), (team.width, 1, 1), 0, out.data_ptr(), x.data_ptr(), columns, row, scale, log)
    return True


def _vectors(x: Tensor) -> int:
    """Of 16 bytes, that a row of x touches."""
    aligned = not (x.data_ptr() | x.stride(0) * x.itemsize) % plan.VECTOR_BYTES
    return plan.vectors_of(x.shape[1], x.itemsize, aligned)


def _pieces(x: Tensor) -> tuple[int, int]:
    """Into how many pieces a row of x is cut for v8, and the columns of one."""
    rows, columns = x.shape
    width = plan.VECTOR_BYTES // x.itemsize
    pieces = plan.pieces(rows, -(-columns // width), backend.multiprocessors(x.get_device()))
    length = width * -(-columns // (width * pieces))
    return -(-columns // length), length


# ---- backward


def _v1_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    rows, columns = y.shape
    _V1_BWD[y.dtype].on(y.get_device())(_grid(columns), _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), scale)


def _v2_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    rows, columns = y.shape
    grid = (_grid(columns)[0] * -(-rows // GROUP), 1, 1)
    _V2_BWD[y.dtype].on(y.get_device())(grid, _BLOCK, 0, *_pointers(dx, y, g), rows, columns, g.stride(0), GROUP, scale)


def _every_row(template: Template) -> Callable[..., None]:
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


def _v6_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    if not _in_a_warp_bwd(dx, y, g, scale, log):
        _v5_bwd(dx, y, g, scale, log)


def _v7_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    if not _in_a_warp_bwd(dx, y, g, scale, log) and not _in_a_block_bwd(dx, y, g, scale, log):
        _v5_bwd(dx, y, g, scale, log)


def _v8_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> None:
    if _in_a_warp_bwd(dx, y, g, scale, log) or _in_a_block_bwd(dx, y, g, scale, log):
        return
    (rows, columns), device = y.shape, y.get_device()
    pieces, length = _pieces(y)
    if pieces == 1:
        return _v5_bwd(dx, y, g, scale, log)
    parts = torch.empty((rows, pieces), dtype=torch.float64, device=y.device)
    numbers, grid = (columns, g.stride(0), pieces, length, scale, log), (rows * pieces, 1, 1)
    _V8_BWD_SCAN[y.dtype].on(device)(grid, _BLOCK, 0, *_pointers(parts, y, g), *numbers)
    _V8_BWD[y.dtype].on(device)(grid, _BLOCK, 0, *_pointers(dx, y, g, parts), *numbers)


def _in_a_warp_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> bool:
    rows, columns = y.shape
    team = plan.warp_team(_vectors(y))
    if team is None:
        return False
    grid = (-(-rows // (plan.WARP_BLOCK // team.width)), 1, 1)
    numbers = rows, columns, g.stride(0), team.width, scale, log
    _V6_BWD[y.dtype, team.vectors].on(y.get_device())(grid, (plan.WARP_BLOCK, 1, 1), 0, *_pointers(dx, y, g), *numbers)
    return True


def _in_a_block_bwd(dx: Tensor, y: Tensor, g: Tensor, scale: float, log: bool) -> bool:
    rows, columns = y.shape
    team = plan.block_team(_vectors(y), plan.BLOCK_VECTORS_BWD[y.itemsize])
    if team is None or rows > plan.MOST_BLOCKS:
        return False
    launch = _V7_BWD[y.dtype, team.vectors].on(y.get_device())
    launch((rows, 1, 1), (team.width, 1, 1), 0, *_pointers(dx, y, g), columns, g.stride(0), scale, log)
    return True


def _pointers(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(t.data_ptr() for t in tensors)


# ---- the kernels that each may launch, and the table


def _plain(*templates: Template) -> Callable[[torch.dtype], Iterable[Kernel]]:
    return lambda dtype: [t[dtype] for t in (*templates, _INNER, _INNER_BWD)]


def _v6_instances(dtype: torch.dtype) -> list[Kernel]:
    return [*_plain(_V5, _V5_BWD)(dtype), *(t[dtype, v] for t in (_V6, _V6_BWD) for v in plan.WARP_VECTORS)]


def _v7_instances(dtype: torch.dtype) -> list[Kernel]:
    backward = (_V7_BWD[dtype, v] for v in plan.BLOCK_VECTORS_BWD[dtype.itemsize])
    return [*_v6_instances(dtype), *(_V7[dtype, v] for v in plan.BLOCK_VECTORS), *backward]


def _v8_instances(dtype: torch.dtype) -> list[Kernel]:
    return [*_v7_instances(dtype), *(t[dtype] for t in (_V8, _V8_SCAN, _V8_BWD, _V8_BWD_SCAN))]


VERSIONS = {
    "v1": Version("a thread a row; backward a thread a column", _v1, _v1_bwd, _plain(_V1, _V1_BWD)),
    "v2": Version("a block a row; backward groups of rows side by side", _block_a_row(_V2), _v2_bwd, _plain(_V2, _V2_BWD)),
    "v3": Version("trees in shared memory; backward every row side by side", _block_a_row(_V3), _every_row(_V3_BWD), _plain(_V3, _V3_BWD)),
    "v4": Version("shuffles; backward rows in shared memory", _block_a_row(_V4), _every_row(_V4_BWD), _plain(_V4, _V4_BWD)),
    "v5": Version("16-byte vectors, online; backward by a dot product", _v5, _v5_bwd, _plain(_V5, _V5_BWD)),
    "v6": Version("short rows in the registers of a few lanes", _v6, _v6_bwd, _v6_instances),
    "v7": Version("longer rows in the registers of a block", _v7, _v7_bwd, _v7_instances),
    "v8": Version("several blocks for a long row", _v8, _v8_bwd, _v8_instances),
}
LOG_VERSIONS = {name: VERSIONS[name] for name in ("v5", "v6", "v7", "v8")}
