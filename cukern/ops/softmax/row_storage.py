"""v6 to v11 of softmax, which hold a row on chip and read it once: which kernel takes a problem, and its launch."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from cukern.ops.softmax import plan
from cukern.runtime import backend
from cukern.runtime.device import cached, device_of
from cukern.runtime.kernel import Kernel, Template


class Problem(NamedTuple):
    """All that a launch depends on, but for where its tensors are."""

    rows: int
    columns: int
    row: int  # from one row of x, or of g, to the next, in elements
    scale: float
    log: bool
    backward: bool
    dtype: torch.dtype
    device: torch.device
    number: int  # of the device
    begin: int  # bytes that the output begins past a multiple of 16
    apart: int  # the bits in which inputs begin at other such distances

    @property
    def vectors(self) -> int:
        return plan.vectors_of(self.columns, self.dtype.itemsize)

    @property
    def alike(self) -> bool:
        """Whether a row begins as far past a multiple of 16 bytes in all tensors."""
        steps = (self.columns - self.row) * self.dtype.itemsize if self.rows > 1 else 0
        return not (self.apart | steps) % plan.VECTOR_BYTES

    @property
    def exact(self) -> bool:
        """Whether all rows begin at such multiples, and are whole vectors; nor is a logarithm wanted: so few kernels are compiled."""
        return self.alike and not self.log and not (self.begin | self.columns * self.dtype.itemsize) % plan.VECTOR_BYTES

    @property
    def has_tails(self) -> bool:
        """Whether there is something behind a warp's vectors in shared memory (row_storage.cuh)."""
        return not self.alike and self.dtype.itemsize == 2

    @property
    def memory(self) -> int:
        """Bytes of a multiprocessor's shared memory that are left for vectors."""
        shared = device_of(self.number).shared_bytes
        return shared // (plan.SLOTS_A_TAIL + 1) * plan.SLOTS_A_TAIL if self.has_tails else shared

    def with_tails(self, shared: int) -> int:
        return shared + shared // plan.SLOTS_A_TAIL if self.has_tails else shared


Run = Callable[[tuple[int, ...]], None]  # launches on the pointers of the output and of the inputs
Way = Callable[[Problem], "Run | None"]
Key = tuple[int, ...]  # template arguments, between the dtype and those of KINDS
KINDS = (False, False), (True, False), (False, True)  # EXACT, LOG


def _two(name: str) -> tuple[Template, Template]:
    return Template("softmax/softmax.cu", f"softmax_{name}", pdl=True), Template("softmax/softmax.cu", f"softmax_{name}_bwd", pdl=True)


_V6, _V7, _SCAN, _WRITE, _V8, _V9, _V10 = (_two(name) for name in ("v6", "v7", "v7_scan", "v7_write", "v8", "v9", "v10"))
_V11_BWD = Template("softmax/softmax.cu", "softmax_v11_bwd", together=True)


@cached(4096)
def first(ways: tuple[Way, ...], problem: Problem) -> Run | None:
    """The first way that holds a row on chip, if there is one."""
    return next(filter(None, (way(problem) for way in ways)), None)


def in_a_warp(p: Problem) -> Run | None:
    """v6. None where a row is too long for it, as of the others."""
    team = plan.warp_team(p.vectors, p.dtype.itemsize, p.exact, plan.WARP_VECTORS[p.dtype.itemsize])
    if team is None:
        return None
    blocks = -(-p.rows // (plan.WARP_BLOCK // team.width))
    if blocks > plan.MOST_BLOCKS:
        return None
    return _launch(_kernel(_V6, p, warp_key(team)), (blocks, 1, 1), plan.WARP_BLOCK, 0, p.rows, p.columns, p.row, team.width, p.scale)


def in_a_block(p: Problem) -> Run | None:
    """v7, of rows in registers."""
    shape = plan.block_shape(p.vectors, plan.SHAPES[p.backward][p.dtype.itemsize])
    if shape is None or p.rows > plan.MOST_BLOCKS:
        return None
    kernel = _kernel(_V7, p, _shape_key(shape))
    if p.backward:
        return _launch(kernel, (p.rows, 1, 1), shape.threads, 0, p.columns, p.row, p.scale)
    beside = plan.rows_a_block(shape)
    return _launch(kernel, (-(-p.rows // beside), 1, 1), beside * shape.threads, 0, p.rows, p.columns, p.row, p.scale)


def in_pieces(p: Problem) -> Run | None:
    """v7, of a few long rows: in two launches. None where there are enough rows for all of the GPU."""
    pieces = plan.pieces(p.rows, p.vectors, device_of(p.number).sms)
    width = plan.VECTOR_BYTES // p.dtype.itemsize
    length = width * -(-p.columns // (width * pieces))
    pieces = -(-p.columns // length)
    if pieces == 1 or p.rows * pieces > plan.MOST_BLOCKS:
        return None
    grid, block = (p.rows * pieces, 1, 1), (plan.LOOP_THREADS, 1, 1)
    numbers = p.columns, p.row, pieces, length, p.scale, p.log
    scan, write = (both[p.backward][p.dtype].on(p.number) for both in (_SCAN, _WRITE))

    def run(pointers: tuple[int, ...]) -> None:
        parts = torch.empty((p.rows, pieces, 1 if p.backward else 2), dtype=torch.float64, device=p.device)
        scan(grid, block, 0, parts.data_ptr(), *pointers[1:], *numbers)
        write(grid, block, 0, *pointers, parts.data_ptr(), *numbers)

    return run


def in_shared_memory(p: Problem, blocks: int = 1) -> Run | None:
    """v8."""
    found = plan.block_hold(p.vectors, p.dtype.itemsize, p.memory, p.backward, blocks)
    return _launch_held(_V8, p, found, _shape_key(found.shape)) if found else None


def beside_another(p: Problem) -> Run | None:
    """v8; but of more rows than multiprocessors only where one holds two of their blocks: else a cluster is faster."""
    return in_shared_memory(p, 2 if p.rows > device_of(p.number).sms else 1)


def in_a_cluster(p: Problem) -> Run | None:
    """v9."""
    found = plan.cluster_hold(*numbers(p))
    return _launch_held(_V9, p, found, _shape_key(found.shape, found.size)) if found else None


def of_few_rows(p: Problem) -> Run | None:
    """The same of long rows that a block could hold, but that are few enough for the largest clusters."""
    few = p.rows * plan.CLUSTER_SIZES[-1] <= device_of(p.number).sms and p.vectors >= plan.LEAST_SHARED
    return in_several_blocks(p) if few else None


def in_several_blocks(p: Problem) -> Run | None:
    """v10; or v9, which is faster, where a cluster holds a row."""
    return in_a_cluster(p) or in_a_crowd(p)


def in_a_crowd(p: Problem) -> Run | None:
    found = plan.crowd_hold(*numbers(p))
    if found is None:
        return None
    grid, block = (p.rows * found.size, 1, 1), (found.shape.threads, 1, 1)
    rest, shared = (found.size, p.columns, p.row, p.scale), p.with_tails(found.shared)
    kernel = _kernel(_V10, p, _shape_key(found.shape))

    def run(pointers: tuple[int, ...]) -> None:
        board = torch.zeros(p.rows * found.size, dtype=torch.int64, device=p.device)
        kernel(grid, block, shared, *pointers, board.data_ptr(), *rest)

    return run


def in_step(p: Problem) -> Run | None:
    """v11, backward of many long rows that are whole vectors."""
    sms = device_of(p.number).sms
    shape = plan.steps_shape(p.rows, p.vectors, p.memory, sms)
    if not p.backward or not p.exact or shape is None or p.dtype.itemsize > 4:
        return None
    grid, block, shared = (sms * shape.blocks, 1, 1), (shape.threads, 1, 1), plan.steps_shared(shape)
    kernel, rest = _V11_BWD[p.dtype, shape.threads, shape.blocks].on(p.number), (p.rows, p.columns, p.row, p.scale)

    def run(pointers: tuple[int, ...]) -> None:
        board = torch.zeros(p.rows * sms, dtype=torch.int64, device=p.device)
        kernel(grid, block, shared, *pointers, board.data_ptr(), *rest)

    return run


def numbers(p: Problem) -> tuple[int, int, int, int, int, bool, bool]:
    return p.rows, p.vectors, p.dtype.itemsize, p.memory, device_of(p.number).sms, p.backward, p.exact


def _launch_held(templates: tuple[Template, Template], p: Problem, held: plan.Hold, key: Key) -> Run | None:
    if p.rows * held.size > plan.MOST_BLOCKS:
        return None
    grid, numbers = (p.rows * held.size, 1, 1), (p.columns, p.row, p.scale)
    return _launch(_kernel(templates, p, key), grid, held.shape.threads, p.with_tails(held.shared), *numbers)


def _launch(kernel: backend.Launch, grid: backend.Dim, threads: int, shared: int, *numbers: float) -> Run:
    block = (threads, 1, 1)

    def run(pointers: tuple[int, ...]) -> None:
        kernel(grid, block, shared, *pointers, *numbers)

    return run


def _kernel(templates: tuple[Template, Template], p: Problem, key: Key) -> backend.Launch:
    whole = (p.dtype, *key, p.exact, p.log)
    return templates[p.backward][whole].on(p.number)


def warp_key(team: plan.Team) -> Key:
    return team.vectors, 32 if team.width == 32 and team.vectors > 1 else 0


def warp_keys(options: Iterable[int]) -> list[Key]:
    """All that warp_key may be."""
    return [(v, width) for v in options for width in (0, 32) if v > 1 or not width]


def _shape_key(shape: plan.Shape, size: int = 1) -> Key:
    """Of a shape, and of a cluster of `size`."""
    return shape if size == 1 else (*shape, size)


# ---- the kernels that each may launch, beyond those of the version before


def _instances(templates: tuple[Template, Template], dtype: torch.dtype, keys: Callable[[bool, bool], Iterable[Key]]) -> list[Kernel]:
    """`keys` of a backward or not, of exact rows or not."""
    whole = [(backward, (dtype, *key, *kind)) for backward in (False, True) for kind in KINDS for key in keys(backward, kind[0])]
    return [templates[backward][key] for backward, key in dict.fromkeys(whole)]


def v6_instances(dtype: torch.dtype) -> list[Kernel]:
    return _instances(_V6, dtype, lambda *_: warp_keys(plan.WARP_VECTORS[dtype.itemsize]))


def v7_instances(dtype: torch.dtype) -> list[Kernel]:
    held = _instances(_V7, dtype, lambda backward, _: [_shape_key(s) for s in plan.SHAPES[backward][dtype.itemsize]])
    return [*held, *(template[dtype] for template in (*_SCAN, *_WRITE))]


def v8_instances(dtype: torch.dtype) -> list[Kernel]:
    return _instances(_V8, dtype, lambda backward, _: [_shape_key(s) for s in plan.HOLDS[backward][dtype.itemsize]])


def v9_instances(dtype: torch.dtype) -> list[Kernel]:
    def keys(backward: bool, exact: bool) -> list[Key]:
        shapes = [plan.of_rows(s, dtype.itemsize, backward, exact) for s in plan.CLUSTERS[backward][dtype.itemsize]]
        return [_shape_key(s, size) for s in shapes for size in plan.CLUSTER_SIZES]

    return _instances(_V9, dtype, keys)


def v10_instances(dtype: torch.dtype) -> list[Kernel]:
    def keys(backward: bool, exact: bool) -> list[Key]:
        return [_shape_key(plan.of_rows(s, dtype.itemsize, backward, exact)) for s in plan.CROWDS[backward][dtype.itemsize]]

    return _instances(_V10, dtype, keys)


def v11_instances(dtype: torch.dtype) -> list[Kernel]:
    return [_V11_BWD[dtype, s.threads, s.blocks] for s in plan.STEPS] if dtype.itemsize <= 4 else []
