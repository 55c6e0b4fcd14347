"""How softmax shares rows out to threads: lanes of a warp for short rows, a block for longer ones, several blocks for the longest.

A row is counted in whole vectors of 16 bytes. The shapes are those that were fastest on one H200.
"""

from math import ceil
from typing import NamedTuple

VECTOR_BYTES = 16
WARP_BLOCK = 128  # threads of v6's blocks
LOOP_THREADS = 256  # of the blocks of v1 to v5, and of v7's that share a row in two launches
BLOCKS_PER_SM = 8  # that share rows in two launches
LEAST_PIECE = 2048  # vectors of a row that is cut into pieces, for each
LEAST_SHARED = 4096  # vectors of a row that several blocks hold though one could
LEAST_PART = 1024  # vectors of a row that several blocks hold, for each
MOST_BLOCKS = (1 << 31) - 1  # of a grid
MOST_VECTORS = 1 << 27  # of a row that is held on chip: its columns are counted in 31 bits
MOST_OF_A_THREAD = 16  # vectors of a tensor where the blocks of a cluster share a row; with more it was slower
SLOTS_A_TAIL = 32  # vectors of a warp in shared memory that have one more behind them
NEXT_TO_SLOTS = 1536  # bytes of shared memory that a block needs for other things, its driver's among them


class Team(NamedTuple):
    """`width` lanes share a row, each holding up to `vectors` of it in registers."""

    vectors: int
    width: int


class Shape(NamedTuple):
    """A thread holds `vectors` in registers, which suffice for `blocks` of `threads` on a multiprocessor; 0: as the compiler likes."""

    vectors: int
    threads: int
    blocks: int


class Hold(NamedTuple):
    """`size` blocks share a row. Each has `shared` bytes for what is not in its registers."""

    shape: Shape
    size: int
    shared: int


Shapes = dict[int, tuple[Shape, ...]]

# Forward's and backward's, by the size of an element. A few vectors a thread keep enough loads under way, and cost fewer instructions a
# column for what is done once a row: so short rows have few lanes, and a warp has several of them.
WARP_VECTORS = {2: (1, 2), 4: (1, 4), 8: (1, 4)}
SHAPES: tuple[Shapes, Shapes] = (
    {
        2: (Shape(2, 64, 20), Shape(2, 128, 12), Shape(2, 256, 6), Shape(4, 256, 4), Shape(4, 512, 2)),
        4: (Shape(4, 64, 20), Shape(4, 128, 10), Shape(4, 256, 4), Shape(6, 256, 4), Shape(8, 256, 3), Shape(8, 512, 2)),
        8: (Shape(2, 512, 2),),
    },
    {
        2: (Shape(1, 128, 12), Shape(1, 256, 8), Shape(1, 512, 4), Shape(2, 512, 2)),
        4: (Shape(1, 256, 8), Shape(1, 512, 4), Shape(1, 1024, 2), Shape(4, 512, 2), Shape(8, 512, 1)),
        8: (Shape(1, 1024, 1),),
    },
)
FEWEST_LANES = 4  # that have several vectors each, so that neighbours' are halves of a line of memory at least
# Most of a row of scores is written and not read.
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

# Of a block that has a row to itself, by preference; of those of a cluster, and of a crowd: the first that the rows fill the GPU with
# twice, or the last. Not of float64: nobody is in a hurry with it.
HOLDS: tuple[Shapes, Shapes] = (
    {2: (Shape(4, 512, 2),), 4: (Shape(4, 512, 2), Shape(6, 1024, 1)), 8: ()},
    {2: (Shape(2, 512, 2), Shape(4, 512, 1)), 4: (Shape(2, 512, 2), Shape(2, 1024, 1)), 8: ()},
)
CLUSTERS: tuple[Shapes, Shapes] = (
    {2: (Shape(2, 512, 3), Shape(4, 256, 4)), 4: (Shape(6, 256, 5), Shape(8, 512, 2)), 8: ()},
    {2: (Shape(2, 256, 4), Shape(2, 512, 2)), 4: (Shape(2, 512, 2),), 8: ()},
)
CROWDS: tuple[Shapes, Shapes] = (
    {2: (Shape(4, 512, 2),), 4: (Shape(6, 512, 2),), 8: ()},
    {2: (Shape(4, 512, 2), Shape(2, 512, 2)), 4: (Shape(4, 512, 2), Shape(2, 256, 4)), 8: ()},
)
CLUSTER_SIZES = 2, 4, 8
# Of those that go over the rows in step, backward: the first whose threads on all multiprocessors hold a row, if they are full by two
# thirds. With fewer rows, or less of each, a turn takes longer than memory does (grid_backward.cuh).
STEPS = Shape(4, 256, 2), Shape(4, 512, 1)
STEPS_STAGES = 3  # of shared memory
LEAST_STEPS = 32  # rows
# Vectors in registers, forward and backward, of two blocks of 512 threads that share rows of whole vectors: there is room for more. So
# less is in shared memory, and L1 is larger, through which those in registers come: 60 KB beside two blocks of 96 KB, 28 beside two of
# 112. On one H200, of a copy's speed, backward, and float's: 512 x 1M 0.922 to 0.938, 0.898 to 0.909; 512K 0.930 to 0.944, 0.938 to 0.953;
# 256K 0.985 to 0.999, 0.967 to 0.983; 163840 0.957 to 1.004, 0.977 to 0.980; of float 131072 0.986 to 0.996, 50304 1.017 to 1.015. Forward
# of float: 1M 0.891 to 0.905, 512K 0.910 to 0.921. Predicted for 1M were 0.013. Forward of 16-bit rows of 1M with 8, in 13 blocks: 0.926
# to 0.930. Slower: more of a row on a multiprocessor, 344 to 416 KB, in one or two blocks that have 8 to 20 in registers: 1M 0.84 to 0.91,
# backward 0.79 to 0.91.
EXACT_VECTORS = {2: 4, 4: 8}, {2: 5, 4: 5}


def vectors_of(columns: int, itemsize: int) -> int:
    """How many whole vectors a row has, at most."""
    return columns * itemsize // VECTOR_BYTES


def warp_team(vectors: int, itemsize: int, exact: bool, options: tuple[int, ...]) -> Team | None:
    """The fewest lanes of a warp that hold a row, each one of `options` vectors; or None for too long a row. Where rows are not whole
    vectors there are lanes for the edges, too."""
    least = 1 if exact else 2 * VECTOR_BYTES // itemsize
    for each in reversed(options):
        lanes = 1 << max(ceil(vectors / each) - 1, 0).bit_length()
        if lanes <= 32 and (each == 1 or lanes >= max(least, FEWEST_LANES)):
            return Team(each, max(least, lanes))
    return None


def block_shape(vectors: int, shapes: tuple[Shape, ...]) -> Shape | None:
    """The first whose block holds a row in registers, or None for too long a row."""
    return next((s for s in shapes if vectors <= s.vectors * s.threads), None)


def rows_a_block(shape: Shape) -> int:
    """Of v7's, forward."""
    return 2 if shape.threads == 64 else 1


def pieces(rows: int, vectors: int, sms: int) -> int:
    """How many blocks share a row in two launches, so that all of the GPU is at work."""
    return max(1, min(ceil(BLOCKS_PER_SM * sms / rows), vectors // LEAST_PIECE, LOOP_THREADS))


def _room(shape: Shape, shared: int, backward: bool, most: int = 1 << 10) -> int:
    """Vectors of each tensor, `most` a thread, that fit where shape.blocks blocks have `shared` bytes of a multiprocessor."""
    tensors = 2 if backward else 1
    slots = max((shared + 1024) // shape.blocks - NEXT_TO_SLOTS, 0) // (VECTOR_BYTES * tensors)
    return shape.threads * min(shape.vectors + slots // shape.threads, most)


def of_rows(shape: Shape, itemsize: int, backward: bool, exact: bool) -> Shape:
    """`shape` of blocks that share rows, which are whole vectors or not."""
    return shape._replace(vectors=EXACT_VECTORS[backward][itemsize]) if exact and (shape.threads, shape.blocks) == (512, 2) else shape


def _hold(shape: Shape, size: int, vectors: int, backward: bool) -> Hold:
    slots = max(ceil(vectors / (size * shape.threads)) - shape.vectors, 0)
    return Hold(shape, size, slots * shape.threads * VECTOR_BYTES * (2 if backward else 1))


def block_hold(vectors: int, itemsize: int, shared: int, backward: bool, blocks: int = 1) -> Hold | None:
    """A row in one block, with its registers and `shared` bytes of a multiprocessor, which holds `blocks` of them at least; or None for too
    long a row."""
    fitting = (s for s in HOLDS[backward][itemsize] if s.blocks >= blocks and vectors <= _room(s, shared, backward))
    found = next(fitting, None)
    return found and _hold(found, 1, vectors, backward)


def cluster_hold(rows: int, vectors: int, itemsize: int, shared: int, sms: int, backward: bool, exact: bool) -> Hold | None:
    """The smallest cluster that holds a row, a larger one where rows are few; or None for too long a row, or too few for all of the GPU."""
    found = []
    for shape in CLUSTERS[backward][itemsize]:
        sizes = [
            s
            for s in CLUSTER_SIZES
            if vectors <= s * _room(shape, shared, backward, MOST_OF_A_THREAD) and (rows * s >= 2 * sms or s == CLUSTER_SIZES[-1])
        ]
        if sizes and rows * sizes[0] >= sms // 2:
            found.append(_hold(of_rows(shape, itemsize, backward, exact), sizes[0], vectors, backward))
    return _first_that_fills(found, rows, sms)


def crowd_hold(rows: int, vectors: int, itemsize: int, shared: int, sms: int, backward: bool, exact: bool) -> Hold | None:
    """As many blocks as hold a row, or as fill the GPU where rows are few; or None for a row of which not half the GPU's blocks hold it."""
    found = []
    for shape in CROWDS[backward][itemsize]:
        blocks = sms * shape.blocks // 2
        least = ceil(vectors / _room(shape, shared, backward))
        even = min(least + least % 2, max(blocks, least))  # odd numbers were 1 to 4 % slower
        size = max(even, min(blocks // rows, vectors // LEAST_PART), 1)
        if vectors <= MOST_VECTORS and size <= blocks:
            found.append(_hold(of_rows(shape, itemsize, backward, exact), size, vectors, backward))
    return _first_that_fills(found, rows, sms)


def steps_shared(shape: Shape) -> int:
    """Bytes that a block needs for its stages, of two tensors."""
    return 2 * STEPS_STAGES * shape.vectors * shape.threads * VECTOR_BYTES


def steps_shape(rows: int, vectors: int, shared: int, sms: int) -> Shape | None:
    """The shape of blocks that go over the rows in step; or None for too few rows, or of a length that is not for them. All blocks must fit
    the multiprocessors, of which each has `shared` bytes."""
    held = ((s, sms * s.threads * s.vectors) for s in STEPS)
    found = next((s for s, most in held if 2 * most <= 3 * vectors <= 3 * most and rows >= LEAST_STEPS), None)
    fits = found and found.blocks * (steps_shared(found) + NEXT_TO_SLOTS) <= shared + 1024
    return found if fits else None


def _first_that_fills(holds: list[Hold], rows: int, sms: int) -> Hold | None:
    """The first that fills the GPU twice, else the last: of a second time that is not full, most of the GPU waits for the end."""
    return next((hold for hold in holds if rows * hold.size >= 2 * sms * hold.shape.blocks), holds[-1] if holds else None)
