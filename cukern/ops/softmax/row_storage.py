"""v6 to v10 of softmax, which keep a row on chip and read it once: which kernel takes a problem, and how it
is launched."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from cukern.ops.softmax import plan
from cukern.runtime.device import cached, device_of
from cukern.runtime.launch import driver
from cukern.runtime.launch.kernel import Kernel, Template


class Problem(NamedTuple):
    """Everything that a launch depends on, except the tensors' addresses."""

    rows: int
    columns: int
    row_stride: int  # of x, or of g, in elements
    scale: float
    log: bool
    backward: bool
    dtype: torch.dtype
    device: torch.device
    device_index: int
    misalignment: int  # address of the output modulo 16 bytes
    differing_bits: int  # the address bits below 16 in which any input differs from the output

    @property
    def vectors(self) -> int:
        return plan.vectors_of(self.columns, self.dtype.itemsize)

    @property
    def same_alignment(self) -> bool:
        """True if each row has the same address modulo 16 bytes in all tensors."""
        steps = (self.columns - self.row_stride) * self.dtype.itemsize if self.rows > 1 else 0
        return not (self.differing_bits | steps) % plan.VECTOR_BYTES

    @property
    def exact(self) -> bool:
        """True if all rows are aligned to 16 bytes and are whole vectors. False for log_softmax, so that
        fewer kernels are compiled."""
        row_bytes = self.columns * self.dtype.itemsize
        return (
            self.same_alignment and not self.log and not (self.misalignment | row_bytes) % plan.VECTOR_BYTES
        )

    @property
    def has_tails(self) -> bool:
        """True if each warp has an extra slot behind its vectors in shared memory (row_storage.cuh)."""
        return not self.same_alignment and self.dtype.itemsize == 2

    @property
    def shared_bytes(self) -> int:
        """Shared memory of an SM that is available for vectors, in bytes."""
        shared = device_of(self.device_index).shared_bytes
        return shared // (plan.SLOTS_PER_TAIL + 1) * plan.SLOTS_PER_TAIL if self.has_tails else shared

    def with_tails(self, shared: int) -> int:
        return shared + shared // plan.SLOTS_PER_TAIL if self.has_tails else shared


Run = Callable[[tuple[int, ...]], None]  # launches with the addresses of the output and of the inputs
Method = Callable[[Problem], "Run | None"]  # None: the method cannot take the problem
Key = tuple[int, ...]  # the template arguments between the dtype and (EXACT, LOG)
Keys = Callable[[bool, bool], Iterable[Key]]  # of (backward, exact)
EXACT_LOG = (False, False), (True, False), (False, True)


def _pair(name: str) -> tuple[Template, Template]:
    return Template("softmax/softmax.cu", f"softmax_{name}", pdl=True), Template(
        "softmax/softmax.cu", f"softmax_{name}_bwd", pdl=True
    )


_V6, _V7, _SCAN, _WRITE, _V8, _V9, _V10 = (
    _pair(name) for name in ("v6", "v7", "v7_scan", "v7_write", "v8", "v9", "v10")
)


@cached(4096)
def first(methods: tuple[Method, ...], problem: Problem) -> Run | None:
    """The launch by the first method that can take the problem, or None."""
    return next(filter(None, (method(problem) for method in methods)), None)


def in_a_warp(p: Problem) -> Run | None:
    """v6: lanes of a warp keep a row in registers."""
    group = plan.warp_group(p.vectors, p.dtype.itemsize, p.exact, plan.WARP_VECTORS[p.dtype.itemsize])
    if group is None:
        return None
    blocks = -(-p.rows // (plan.WARP_BLOCK // group.width))
    if blocks > plan.MOST_BLOCKS:
        return None
    numbers = p.rows, p.columns, p.row_stride, group.width, p.scale
    return _launch(_kernel(_V6, p, warp_key(group)), blocks, plan.WARP_BLOCK, 0, *numbers)


def in_a_block(p: Problem) -> Run | None:
    """v7: a thread block keeps a row in registers."""
    shape = plan.block_shape(p.vectors, plan.SHAPES[p.backward][p.dtype.itemsize])
    if shape is None or p.rows > plan.MOST_BLOCKS:
        return None
    kernel = _kernel(_V7, p, shape)
    if p.backward:
        return _launch(kernel, p.rows, shape.threads, 0, p.columns, p.row_stride, p.scale)
    rows = 2 if shape.threads == 64 else 1  # per block
    return _launch(
        kernel, -(-p.rows // rows), rows * shape.threads, 0, p.rows, p.columns, p.row_stride, p.scale
    )


def in_pieces(p: Problem) -> Run | None:
    """v7 for a few long rows: several blocks share each row, in two launches. None if there are enough rows
    to fill the GPU."""
    pieces = plan.pieces(p.rows, p.vectors, device_of(p.device_index).sms)
    width = plan.VECTOR_BYTES // p.dtype.itemsize
    length = width * -(-p.columns // (width * pieces))
    pieces = -(-p.columns // length)
    if pieces == 1 or p.rows * pieces > plan.MOST_BLOCKS:
        return None
    grid, block = (p.rows * pieces, 1, 1), (plan.LOOP_THREADS, 1, 1)
    numbers = p.columns, p.row_stride, pieces, length, p.scale, p.log
    scan, write = (templates[p.backward][p.dtype].on(p.device_index) for templates in (_SCAN, _WRITE))

    def run(pointers: tuple[int, ...]) -> None:
        parts = torch.empty((p.rows, pieces, 1 if p.backward else 2), dtype=torch.float64, device=p.device)
        scan(grid, block, 0, parts.data_ptr(), *pointers[1:], *numbers)
        write(grid, block, 0, *pointers, parts.data_ptr(), *numbers)

    return run


def in_shared_memory(p: Problem, blocks: int = 1) -> Run | None:
    """v8: a thread block keeps a row in registers and shared memory; an SM must have room for `blocks` of
    them."""
    storage = plan.block_storage(p.vectors, p.dtype.itemsize, p.shared_bytes, p.backward, blocks)
    return _launch_storage(_V8, p, storage, storage.shape) if storage else None


def two_per_sm(p: Problem) -> Run | None:
    """v8. With more rows than SMs, an SM must have room for two blocks: otherwise a cluster is faster."""
    return in_shared_memory(p, 2 if p.rows > device_of(p.device_index).sms else 1)


def in_a_cluster(p: Problem) -> Run | None:
    """v9: a cluster keeps a row."""
    storage = plan.cluster_storage(*numbers(p))
    return _launch_storage(_V9, p, storage, (*storage.shape, storage.size)) if storage else None


def few_rows(p: Problem) -> Run | None:
    """v9 or v10 for long rows that a block could keep, if there are few enough for the largest clusters."""
    few = p.rows * plan.CLUSTER_SIZES[-1] <= device_of(p.device_index).sms and p.vectors >= plan.LEAST_SHARED
    return in_several_blocks(p) if few else None


def in_several_blocks(p: Problem) -> Run | None:
    """v9 if a cluster can keep a row, because it is faster; else v10."""
    return in_a_cluster(p) or in_many_blocks(p)


def in_many_blocks(p: Problem) -> Run | None:
    """v10: as many blocks as needed keep a row. They exchange partial results through a mailbox: zeroed
    64-bit words in global memory."""
    storage = plan.many_blocks_storage(*numbers(p))
    if storage is None:
        return None
    blocks, device = p.rows * storage.size, p.device
    kernel, grid, block = _kernel(_V10, p, storage.shape), (blocks, 1, 1), (storage.shape.threads, 1, 1)
    shared, sizes = p.with_tails(storage.shared), (storage.size, p.columns, p.row_stride, p.scale)

    def run(pointers: tuple[int, ...]) -> None:
        mailbox = torch.zeros(blocks, dtype=torch.int64, device=device)
        kernel(grid, block, shared, *pointers, mailbox.data_ptr(), *sizes)

    return run


def numbers(p: Problem) -> tuple[int, int, int, int, int, bool, bool]:
    """The arguments of plan.cluster_storage and plan.many_blocks_storage."""
    return (
        p.rows,
        p.vectors,
        p.dtype.itemsize,
        p.shared_bytes,
        device_of(p.device_index).sms,
        p.backward,
        p.exact,
    )


def _launch_storage(
    templates: tuple[Template, Template], p: Problem, storage: plan.Storage, key: Key
) -> Run | None:
    blocks = p.rows * storage.size
    if blocks > plan.MOST_BLOCKS:
        return None
    shared = p.with_tails(storage.shared)
    return _launch(
        _kernel(templates, p, key), blocks, storage.shape.threads, shared, p.columns, p.row_stride, p.scale
    )


def _launch(kernel: driver.Launch, blocks: int, threads: int, shared: int, *numbers: float) -> Run:
    grid, block = (blocks, 1, 1), (threads, 1, 1)
    return lambda pointers: kernel(grid, block, shared, *pointers, *numbers)


def _kernel(templates: tuple[Template, Template], p: Problem, key: Key) -> driver.Launch:
    arguments = (p.dtype, *key, p.exact, p.log)
    return templates[p.backward][arguments].on(p.device_index)


def warp_key(group: plan.WarpGroup) -> Key:
    return group.vectors, 32 if group.width == 32 and group.vectors > 1 else 0


def warp_keys(options: Iterable[int]) -> list[Key]:
    """All values of warp_key."""
    return [(v, width) for v in options for width in (0, 32) if v > 1 or not width]


# ---- the kernels that each version may launch, without those of the version before it


def _instances(templates: tuple[Template, Template], dtype: torch.dtype, keys: Keys) -> list[Kernel]:
    found = [
        (backward, (dtype, *key, *flags))
        for backward in (False, True)
        for flags in EXACT_LOG
        for key in keys(backward, flags[0])
    ]
    return [templates[backward][arguments] for backward, arguments in dict.fromkeys(found)]


def _shared_keys(
    shapes: tuple[plan.Shapes, plan.Shapes], itemsize: int, sizes: Iterable[tuple[int, ...]] = ((),)
) -> Keys:
    """The keys of v9 and v10: shapes for blocks that share rows, and for v9 the sizes of clusters."""

    def keys(backward: bool, exact: bool) -> list[Key]:
        found = [plan.shape_for_shared_rows(s, itemsize, backward, exact) for s in shapes[backward][itemsize]]
        return [(*shape, *size) for shape in found for size in sizes]

    return keys


INSTANCES: tuple[Callable[[torch.dtype], list[Kernel]], ...] = (  # of v6 to v10
    lambda dtype: _instances(_V6, dtype, lambda *_: warp_keys(plan.WARP_VECTORS[dtype.itemsize])),
    lambda dtype: [
        *_instances(_V7, dtype, lambda backward, _: plan.SHAPES[backward][dtype.itemsize]),
        *(template[dtype] for template in (*_SCAN, *_WRITE)),
    ],
    lambda dtype: _instances(_V8, dtype, lambda backward, _: plan.BLOCKS[backward][dtype.itemsize]),
    lambda dtype: _instances(
        _V9, dtype, _shared_keys(plan.CLUSTERS, dtype.itemsize, [(size,) for size in plan.CLUSTER_SIZES])
    ),
    lambda dtype: _instances(_V10, dtype, _shared_keys(plan.MANY_BLOCKS, dtype.itemsize)),
)
