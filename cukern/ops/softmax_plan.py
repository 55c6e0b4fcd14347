"""How softmax shares rows out to threads: lanes of a warp for short rows, a block for longer ones, clusters of blocks for the longest.

A row is counted in vectors of 16 bytes. Where rows do not all begin at a multiple of 16 bytes they reach into one vector more.
The shapes are those that were fastest on one H200.
"""

import functools
from math import ceil
from typing import NamedTuple

VECTOR_BYTES = 16
WARP_BLOCK = 128  # threads of v6's blocks
LOOP_THREADS = 256  # of the blocks of v1 to v5, and of v7's that share a row in two launches
HELD_THREADS = (512, 1024)  # of the blocks of v8 and v9: where two fit a multiprocessor, and where one does
HELD_VECTORS, HELD_VECTORS_BWD = 2, 1  # that a thread of them holds in registers
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
    """`size` blocks of `threads` share a row. Each has a `part` of its vectors and holds `most`, `shared` bytes not in registers."""

    size: int
    threads: int
    part: int
    most: int
    shared: int


Shapes = dict[int, tuple[Shape, ...]]

# By the size of an element, as a 16-bit vector becomes 8 floats.
WARP_VECTORS = {2: (1, 4), 4: (1, 4, 8), 8: (1, 4)}
SHAPES: Shapes = {2: (Shape(2, 1024, 2),), 4: (Shape(2, 512, 2), Shape(8, 512, 1)), 8: (Shape(2, 512, 2),)}
SHAPES_BWD: Shapes = {2: (Shape(1, 512, 2), Shape(4, 512, 2)), 4: (Shape(1, 1024, 2), Shape(4, 512, 2)), 8: (Shape(1, 1024, 2),)}
SHAPES_CAUSAL: Shapes = {2: (Shape(2, 1024, 1),), 4: (Shape(2, 1024, 1),), 8: (Shape(2, 512, 1),)}

# Rows of whole vectors at multiples of 16 bytes, whose kernels need fewer registers and instructions: whole warps, and blocks of just so
# many threads. Not of float64, which nobody is in a hurry with.
EXACT_WARP_VECTORS = {2: (4,), 4: (4, 8)}
EXACT_SHAPES: Shapes = {
    2: (Shape(2, 256, 8), Shape(2, 512, 4), Shape(2, 1024, 2)),
    4: (Shape(2, 512, 4), Shape(4, 512, 3), Shape(8, 512, 2)),
}
EXACT_SHAPES_BWD: Shapes = {
    2: (Shape(1, 512, 4), Shape(2, 512, 2), Shape(4, 512, 2)),
    4: (Shape(1, 1024, 2), Shape(4, 512, 2), Shape(8, 512, 1)),
}
EXACT_SHAPES_CAUSAL: Shapes = {2: (Shape(2, 256, 1), Shape(2, 1024, 1)), 4: (Shape(2, 512, 1), Shape(2, 1024, 1))}


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


def exact_warp(team: Team, itemsize: int, whole: bool) -> bool:
    """Whether a row, of `whole` vectors or not, goes to the kernels that know no others."""
    return whole and team.width == 32 and team.vectors in EXACT_WARP_VECTORS.get(itemsize, ())


def block_shape(vectors: int, shapes: tuple[Shape, ...], exact: bool = False) -> tuple[Shape, int] | None:
    """The instance whose block holds a row, and the threads of that block, or None for too long a row."""
    for shape in shapes:
        width = 32 * ceil(vectors / shape.vectors / 32)
        if width <= shape.threads:
            return shape, shape.threads if exact else width
    return None


def pieces(rows: int, vectors: int, sms: int) -> int:
    """How many blocks share a row in two launches, so that all of the GPU is at work."""
    return max(1, min(ceil(BLOCKS_PER_SM * sms / rows), vectors // LEAST_PIECE, LOOP_THREADS))


def hold(vectors: int, size: int, shared: int, backward: bool) -> Hold:
    """A row in `size` blocks, of which two fit a multiprocessor if that can be. `shared`: bytes that one block may have."""
    part, registers = ceil(vectors / size), HELD_VECTORS_BWD if backward else HELD_VECTORS
    slot = VECTOR_BYTES * (2 if backward else 1)
    for threads, room in zip(HELD_THREADS, ((shared + 1024) // 2 - NEXT_TO_SLOTS, shared - NEXT_TO_SLOTS), strict=True):
        held = min(part, threads * registers + room // slot)
        if held == part:
            break
    return Hold(size, threads, part, held, max(0, held - threads * registers) * slot)


def block_hold(vectors: int, shared: int, backward: bool) -> Hold | None:
    """A row in one block, or None for too long a row."""
    found = hold(vectors, 1, shared, backward)
    return found if vectors <= MOST_VECTORS and found.most == found.part else None


@functools.lru_cache(maxsize=4096)
def cluster_hold(rows: int, vectors: int, shared: int, sms: int, most: int, backward: bool) -> Hold | None:
    """The smallest cluster, up to `most` blocks, of which two blocks fit a multiprocessor; a larger one where rows are few. Of a row that
    is too long even for the largest a part is not held; None if then rows are too few for all multiprocessors."""
    if vectors > MOST_VECTORS:
        return None
    size = 1
    while size < most and hold(vectors, size, shared, backward).threads > HELD_THREADS[0]:
        size *= 2
    while size < min(most, 8) and rows * size < 2 * sms:
        size *= 2
    if size == 8 < most and rows * 64 <= sms:
        size = 16
    found = hold(vectors, size, shared, backward)
    return found if found.most == found.part or rows * size >= sms else None
