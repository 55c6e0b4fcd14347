"""How softmax shares rows out to threads: lanes of a warp for short rows, a block for longer ones, several blocks for the longest.

A row is counted in vectors of 16 bytes. Where rows do not all begin at a multiple of 16 bytes they reach into one vector more.
"""

from math import ceil
from typing import NamedTuple

VECTOR_BYTES = 16
WARP_VECTORS = (1, 4)  # that a thread of v6 may hold
WARP_BLOCK = 128  # threads of v6's blocks
BLOCK_VECTORS = (4, 8)  # that a thread of v7 may hold
BLOCK_VECTORS_BWD = {2: (4,), 4: (4, 8), 8: (4, 8)}  # by itemsize: in 16 bits y and g of 8 vectors are 128 floats
MOST_THREADS = 512  # of v7's blocks
LOOP_THREADS = 256  # of the blocks of v2 to v5 and of v8
BLOCKS_PER_SM = 8  # of v8
MOST_BLOCKS = (1 << 31) - 1  # of a grid
LEAST_PIECE = 2048  # vectors of a piece of v8


class Team(NamedTuple):
    """`width` threads share a row, each holding `vectors` of it in registers."""

    vectors: int
    width: int


def vectors_of(columns: int, itemsize: int, aligned: bool) -> int:
    """How many vectors a row of `columns` touches, at most; `aligned`: every row begins at a multiple of 16 bytes."""
    width = VECTOR_BYTES // itemsize
    return ceil((columns + (0 if aligned else width - 1)) / width)


def warp_team(vectors: int) -> Team | None:
    """Lanes of one warp that hold a row, or None for too long a row."""
    for each in WARP_VECTORS:
        width = 1 << (ceil(vectors / each) - 1).bit_length()
        if width <= (32 if each == WARP_VECTORS[-1] else 8):
            return Team(each, width)
    return None


def block_team(vectors: int, choices: tuple[int, ...]) -> Team | None:
    """A block that holds a row, each thread one of `choices` vectors, or None for too long a row."""
    for each in choices:
        width = 32 * ceil(vectors / each / 32)
        if width <= MOST_THREADS:
            return Team(each, width)
    return None


def pieces(rows: int, vectors: int, sms: int) -> int:
    """How many blocks share a row, so that all of the GPU is at work."""
    return max(1, min(ceil(BLOCKS_PER_SM * sms / rows), vectors // LEAST_PIECE, LOOP_THREADS))
