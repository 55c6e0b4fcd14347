"""How softmax distributes rows: lanes of a warp share a short row, a thread block takes a longer one, several
blocks share the longest.

Lengths are counted in vectors of 16 bytes. The shapes are those that were fastest on one H200.
"""

from functools import lru_cache
from math import ceil
from typing import NamedTuple

VECTOR_BYTES = 16
WARP_BLOCK = 128  # threads per block of v6
LOOP_THREADS = 256  # threads per block of v1 to v5, and of v7 where blocks share a row in two launches
SHARED_ROW_THREADS = 1024  # the most per block of softmax_shared_inner, as in softmax/softmax.cu
SECTOR_BYTES = 32  # the unit of device memory accesses
BLOCKS_PER_SM = 8  # target where blocks share rows in two launches
LEAST_PIECE = 2048  # vectors per block where blocks share a row in two launches
LEAST_SHARED = 4096  # vectors of a row that several blocks share although one block could keep it
LEAST_PART = 1024  # vectors per block where several blocks keep a row
MOST_BLOCKS = (1 << 31) - 1  # of a grid
MOST_VECTORS = 1 << 27  # of a row that is kept on chip: column indices have 31 bits
MOST_PER_THREAD = 16  # vectors of one tensor per thread of a cluster; more was slower
SLOTS_PER_TAIL = 32  # a warp has one extra slot in shared memory behind this many vectors
RESERVED_SHARED = 1536  # bytes of shared memory per block for other purposes, including the driver's


class WarpGroup(NamedTuple):
    """`width` lanes share a row. Each keeps up to `vectors` of it in registers."""

    vectors: int
    width: int


class Shape(NamedTuple):
    """`threads` per block, each with `vectors` in registers. Registers are limited so that `blocks` fit on an
    SM; 0: no limit."""

    vectors: int
    threads: int
    blocks: int


class Storage(NamedTuple):
    """`size` blocks share a row. Each has `shared` bytes of shared memory for what its registers do not
    hold."""

    shape: Shape
    size: int
    shared: int


Shapes = dict[int, tuple[Shape, ...]]

# All tables below are (forward, backward), or one for both, by the element size in bytes. A thread has a few
# vectors, which keeps enough loads in flight and divides the work per row by more columns. So few lanes share
# a short row, and a warp takes several rows.
WARP_VECTORS = {2: (1, 2), 4: (1, 4), 8: (1, 4)}
SHAPES: tuple[Shapes, Shapes] = (
    {
        2: (Shape(2, 64, 20), Shape(2, 128, 12), Shape(2, 256, 6), Shape(4, 256, 4), Shape(4, 512, 2)),
        4: (
            Shape(4, 64, 20),
            Shape(4, 128, 10),
            Shape(4, 256, 4),
            Shape(6, 256, 4),
            Shape(8, 256, 3),
            Shape(8, 512, 2),
        ),
        8: (Shape(2, 512, 2),),
    },
    {
        2: (Shape(1, 128, 12), Shape(1, 256, 8), Shape(1, 512, 4), Shape(2, 512, 2)),
        4: (Shape(1, 256, 8), Shape(1, 512, 4), Shape(1, 1024, 2), Shape(4, 512, 2), Shape(8, 512, 1)),
        8: (Shape(1, 1024, 1),),
    },
)
# with several vectors per lane, so that neighbouring lanes access at least half a cache line
FEWEST_LANES = 4
# causal_softmax: most of a row of scores is written and not read.
WARP_VECTORS_CAUSAL = {2: (1, 2, 4), 4: (1, 2, 4, 8), 8: (1,)}, {2: (1, 2, 4), 4: (1, 2, 4), 8: (1,)}
SHAPES_CAUSAL: tuple[Shapes, Shapes] = (
    {
        2: (Shape(4, 64, 20), Shape(4, 128, 10), Shape(4, 256, 5), Shape(8, 256, 4)),
        4: (Shape(8, 64, 14), Shape(8, 128, 7), Shape(8, 256, 4), Shape(8, 512, 2)),
        8: (Shape(2, 512, 1),),
    },
    {
        2: (Shape(4, 64, 0), Shape(4, 128, 0), Shape(4, 256, 0), Shape(8, 256, 0)),
        4: (Shape(4, 64, 0), Shape(4, 128, 0), Shape(4, 256, 0), Shape(4, 512, 0), Shape(8, 512, 0)),
        8: (Shape(2, 512, 0),),
    },
)

# Blocks that use shared memory, in order of preference. BLOCKS: one block per row; the first shape that fits
# is used. CLUSTERS and MANY_BLOCKS: several blocks per row; the first shape with which the rows fill the GPU
# twice is used, else the last. float64 is not tuned.
BLOCKS: tuple[Shapes, Shapes] = (
    {2: (Shape(4, 512, 2),), 4: (Shape(4, 512, 2), Shape(6, 1024, 1)), 8: ()},
    {2: (Shape(2, 512, 2), Shape(4, 512, 1)), 4: (Shape(2, 512, 2), Shape(2, 1024, 1)), 8: ()},
)
CLUSTERS: tuple[Shapes, Shapes] = (
    {2: (Shape(2, 512, 3), Shape(4, 256, 4)), 4: (Shape(6, 256, 5), Shape(8, 512, 2)), 8: ()},
    {2: (Shape(2, 256, 4), Shape(2, 512, 2)), 4: (Shape(2, 512, 2),), 8: ()},
)
MANY_BLOCKS: tuple[Shapes, Shapes] = (
    {2: (Shape(4, 512, 2),), 4: (Shape(6, 512, 2),), 8: ()},
    {2: (Shape(4, 512, 2), Shape(2, 512, 2)), 4: (Shape(4, 512, 2), Shape(2, 256, 4)), 8: ()},
)
CLUSTER_SIZES = 2, 4, 8
# Vectors per thread in registers where two blocks of 512 threads per SM share rows of whole vectors.
# Registers have room for more than in the shapes above. Then less is in shared memory, which leaves more L1
# for the loads to registers: 60 KB next to two blocks of 96 KB, 28 KB next to two of 112 KB. One H200, speed
# relative to a copy, before and after; rows have 1M = 2^20 columns and so on:
#   bfloat16 backward  512x1M 0.922 to 0.938, 512K 0.930 to 0.944, 256K 0.985 to 0.999, 163840 0.957 to 1.004
#   float backward     512x1M 0.898 to 0.909, 512K 0.938 to 0.953, 256K 0.967 to 0.983, 163840 0.977 to 0.980,
#                      131072 0.986 to 0.996,
#                      50304 1.017 to 1.015
#   float forward      1M 0.891 to 0.905, 512K 0.910 to 0.921 (predicted gain for 1M: 0.013)
#   16-bit forward     1M 0.926 to 0.930, with 8 vectors in 13 blocks
# Slower: more of a row per SM, 344 to 416 KB, in one or two blocks with 8 to 20 vectors in registers: 1M 0.84
# to 0.91, backward 0.79 to 0.91.
EXACT_VECTORS = {2: 4, 4: 8}, {2: 5, 4: 5}


def vectors_of(columns: int, itemsize: int) -> int:
    """The most whole vectors that a row can contain."""
    return columns * itemsize // VECTOR_BYTES


@lru_cache(4096)
def warp_group(vectors: int, itemsize: int, exact: bool, options: tuple[int, ...]) -> WarpGroup | None:
    """The fewest lanes of a warp that hold a row with one of `options` vectors per lane, or None if the row
    is too long. If rows are not whole vectors, there are also lanes for the edges."""
    least = 1 if exact else 2 * VECTOR_BYTES // itemsize
    for per_lane in reversed(options):
        lanes = 1 << max(ceil(vectors / per_lane) - 1, 0).bit_length()
        if lanes <= 32 and (per_lane == 1 or lanes >= max(least, FEWEST_LANES)):
            return WarpGroup(per_lane, max(least, lanes))
    return None


def block_shape(vectors: int, shapes: tuple[Shape, ...]) -> Shape | None:
    """The first shape whose registers hold a row, or None."""
    return next((s for s in shapes if vectors <= s.vectors * s.threads), None)


def pieces(rows: int, vectors: int, sms: int) -> int:
    """How many blocks share a row in two launches, so that the GPU is full."""
    return max(1, min(ceil(BLOCKS_PER_SM * sms / rows), vectors // LEAST_PIECE, LOOP_THREADS))


@lru_cache(4096)
def inner_block(rows: int, columns: int, itemsize: int, sms: int) -> tuple[int, int, int]:
    """The thread block along a dimension that is not the last: neighbouring rows, and threads that share a
    row. They share it where there are few rows; each then has at least 32 columns. The rows of a block cover
    at least a sector, 32 bytes."""
    sharing, most = 1, SHARED_ROW_THREADS * itemsize // SECTOR_BYTES
    while sharing < most and rows * sharing < SHARED_ROW_THREADS * sms and 64 * sharing <= columns:
        sharing *= 2
    return max(LOOP_THREADS // sharing, SECTOR_BYTES // itemsize), sharing, 1


def _capacity(shape: Shape, shared: int, backward: bool, most: int = 1 << 10) -> int:
    """Vectors of a row that fit in a block, at most `most` per thread, if shape.blocks blocks share the
    `shared` bytes of an SM."""
    tensors = 2 if backward else 1
    slots = max((shared + 1024) // shape.blocks - RESERVED_SHARED, 0) // (VECTOR_BYTES * tensors)
    return shape.threads * min(shape.vectors + slots // shape.threads, most)


def shape_for_shared_rows(shape: Shape, itemsize: int, backward: bool, exact: bool) -> Shape:
    """The shape for blocks that share rows: EXACT_VECTORS per thread where they apply."""
    return (
        shape._replace(vectors=EXACT_VECTORS[backward][itemsize])
        if exact and (shape.threads, shape.blocks) == (512, 2)
        else shape
    )


def _storage(shape: Shape, size: int, vectors: int, backward: bool) -> Storage:
    slots = max(ceil(vectors / (size * shape.threads)) - shape.vectors, 0)
    return Storage(shape, size, slots * shape.threads * VECTOR_BYTES * (2 if backward else 1))


def block_storage(
    vectors: int, itemsize: int, shared: int, backward: bool, blocks: int = 1
) -> Storage | None:
    """A row in one block's registers and shared memory, where an SM has `shared` bytes and room for at least
    `blocks` blocks. None if the row is too long."""
    fitting = (
        s
        for s in BLOCKS[backward][itemsize]
        if s.blocks >= blocks and vectors <= _capacity(s, shared, backward)
    )
    shape = next(fitting, None)
    return shape and _storage(shape, 1, vectors, backward)


def cluster_storage(
    rows: int, vectors: int, itemsize: int, shared: int, sms: int, backward: bool, exact: bool
) -> Storage | None:
    """The smallest cluster that holds a row, or a larger one for few rows. None if the row is too long, or if
    there are too few rows to fill half of the GPU."""
    found = []
    for shape in CLUSTERS[backward][itemsize]:
        capacity = _capacity(shape, shared, backward, MOST_PER_THREAD)
        sizes = [
            s
            for s in CLUSTER_SIZES
            if vectors <= s * capacity and (rows * s >= 2 * sms or s == CLUSTER_SIZES[-1])
        ]
        if sizes and rows * sizes[0] >= sms // 2:
            found.append(
                _storage(shape_for_shared_rows(shape, itemsize, backward, exact), sizes[0], vectors, backward)
            )
    return _first_that_fills(found, rows, sms)


def many_blocks_storage(
    rows: int, vectors: int, itemsize: int, shared: int, sms: int, backward: bool, exact: bool
) -> Storage | None:
    """As many blocks as a row needs, or for few rows as many as fill the GPU. None if a row needs more than
    half of the GPU's blocks."""
    found = []
    for shape in MANY_BLOCKS[backward][itemsize]:
        blocks = sms * shape.blocks // 2
        least = ceil(vectors / _capacity(shape, shared, backward))
        even = min(least + least % 2, max(blocks, least))  # odd numbers were 1 to 4 % slower
        size = max(even, min(blocks // rows, vectors // LEAST_PART), 1)
        if vectors <= MOST_VECTORS and size <= blocks:
            found.append(
                _storage(shape_for_shared_rows(shape, itemsize, backward, exact), size, vectors, backward)
            )
    return _first_that_fills(found, rows, sms)


def _first_that_fills(candidates: list[Storage], rows: int, sms: int) -> Storage | None:
    """The first candidate with which the rows fill the GPU twice, else the last: a partly filled second wave
    leaves most SMs idle."""
    return next(
        (c for c in candidates if rows * c.size >= 2 * sms * c.shape.blocks),
        candidates[-1] if candidates else None,
    )
