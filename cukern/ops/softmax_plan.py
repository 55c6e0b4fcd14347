"""How softmax shares rows out to threads: lanes of a warp for short rows, a block for longer ones, clusters of blocks for the longest.

A row is counted in vectors of 16 bytes. Where rows do not all begin at a multiple of 16 bytes they reach into one vector more.
The shapes are those that were fastest on one H200.
"""

from math import ceil
from typing import NamedTuple

VECTOR_BYTES = 16
WARP_BLOCK = 128  # threads of v6's blocks
LOOP_THREADS = 256  # of the blocks of v1 to v5, and of v7's that share a row in two launches
HELD_THREADS = 512  # of the blocks of v8 and v9
BLOCKS_PER_SM = 8  # that share rows in two launches
LEAST_PIECE = 2048  # vectors of a row that is cut into pieces, for each
MOST_BLOCKS = (1 << 31) - 1  # of a grid
MOST_VECTORS = 1 << 27  # of a row that is held on chip: its columns are counted in 31 bits
NEXT_TO_SLOTS = 2048  # bytes of shared memory that a block needs for other things, its driver's among them


class Shape(NamedTuple):
    """An instance of v7: a thread holds `vectors` in registers, of which there are enough for `blocks` of `threads` on a multiprocessor."""

    vectors: int
    threads: int
    blocks: int


class Team(NamedTuple):
    """`width` threads share a row, each holding `vectors` of it in registers."""

    vectors: int
    width: int


class Hold(NamedTuple):
    """`size` blocks share a row, each `part` vectors of it, of which a thread holds `vectors` in registers, `shared` bytes are elsewhere."""

    size: int
    vectors: int
    part: int
    shared: int


# By the size of an element, as a 16-bit vector becomes 8 floats.
WARP_VECTORS = {2: (1, 4), 4: (1, 4, 8), 8: (1, 4, 8)}
SHAPES = {2: (Shape(2, 1024, 2),), 4: (Shape(2, 512, 2), Shape(8, 512, 1)), 8: (Shape(2, 512, 2), Shape(8, 512, 1))}
SHAPES_BWD = {2: (Shape(1, 512, 2), Shape(4, 512, 2)), 4: (Shape(1, 1024, 2), Shape(8, 512, 1)), 8: (Shape(1, 1024, 2), Shape(8, 512, 1))}


def vectors_of(columns: int, itemsize: int, aligned: bool) -> int:
    """How many vectors a row of `columns` touches, at most; `aligned`: every row begins at a multiple of 16 bytes."""
    width = VECTOR_BYTES // itemsize
    return ceil((columns + (0 if aligned else width - 1)) / width)


def warp_team(vectors: int, itemsize: int) -> Team | None:
    """Lanes of one warp that hold a row, or None for too long a row."""
    for each in WARP_VECTORS[itemsize]:
        width = 1 << (ceil(vectors / each) - 1).bit_length()
        if width <= (8 if each == 1 else 32):
            return Team(each, width)
    return None


def block_shape(vectors: int, shapes: tuple[Shape, ...]) -> tuple[Shape, int] | None:
    """The instance whose block holds a row, and the threads of that block, or None for too long a row."""
    for shape in shapes:
        width = 32 * ceil(vectors / shape.vectors / 32)
        if width <= shape.threads:
            return shape, width
    return None


def pieces(rows: int, vectors: int, sms: int) -> int:
    """How many blocks share a row in two launches, so that all of the GPU is at work."""
    return max(1, min(ceil(BLOCKS_PER_SM * sms / rows), vectors // LEAST_PIECE, LOOP_THREADS))


def held_vectors(size: int, backward: bool) -> int:
    """In registers, of a thread of v8 (size 1) or v9."""
    return (1 if backward else 2) * (2 if size == 16 else 1)


def hold(vectors: int, size: int, backward: bool) -> Hold:
    """A row in registers and shared memory of `size` blocks."""
    part, registers = ceil(vectors / size), held_vectors(size, backward)
    return Hold(size, registers, part, max(0, part - registers * HELD_THREADS) * VECTOR_BYTES * (2 if backward else 1))


def block_hold(vectors: int, shared: int, backward: bool) -> Hold | None:
    """The same of one block, or None for too long a row. `shared`: bytes of shared memory that a block may have."""
    held = hold(vectors, 1, backward)
    return held if vectors <= MOST_VECTORS and held.shared <= shared - NEXT_TO_SLOTS else None


def cluster_hold(rows: int, vectors: int, shared: int, sms: int, most: int, backward: bool) -> Hold | None:
    """The smallest cluster, up to `most` blocks, of which two blocks fit a multiprocessor; a larger one where rows are few."""
    if vectors > MOST_VECTORS:
        return None
    half = (shared + 1024) // 2 - NEXT_TO_SLOTS
    size = 1
    while size < most and hold(vectors, size, backward).shared > half:
        size *= 2
    while size < min(most, 8) and rows * size < 2 * sms:
        size *= 2
    if size == 8 < most and rows * 64 <= sms:
        size = 16
    held = hold(vectors, size, backward)
    return held if held.shared <= shared - NEXT_TO_SLOTS else None
