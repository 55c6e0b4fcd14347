"""The candidate for the backward of two factors of 128 x 128 on few rows, by warpgroups. See few_rows.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil

from cukern.ops.kron_linear.plan import Backward, Problem, Step

SIDE = 128  # rows and columns of a factor
BLOCKS = 4  # of a row
MOST_ROWS = 64  # of more, the launches of tile_backward.py fill a GPU as well
SHARED = {4: 9 * 64 * 64 * 6, 2: 11 * 64 * 64 * 2}  # bytes of X, W2, W1 or what comes there, G, H
SUMS = 1.5  # of each factor's numbers, the partial ones of a row
ALONE = 8  # rows of float, or fewer, are one launch; else two are side by side, the second of which adds to the first one's partial sums
START_US = 6.0  # the launches, and the partial sums
ROW_US = {4: 8.0, 2: 4.0}  # of a block


def backward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Backward]:
    """The launches of a run, if there are any; strict in TF32 too."""
    A = rows * run[-1].left
    if not _fits(run, A, target):
        return
    shared = SHARED[target.itemsize] + 16
    if shared <= target.shared:
        us = START_US + ceil(BLOCKS * A / target.sms) * ROW_US[target.itemsize]
        yield Backward(tuple(run), us, str(SIDE), 0, 256, shared, (1, 1), "few_rows")


def first_rows(A: int, itemsize: int) -> int:
    """How many of A rows the backward's first launch has, which is those of partial sums."""
    return A if A <= ALONE or itemsize < 4 else ceil(A / 2)


def partial_sums(A: int, itemsize: int) -> int:
    return ceil(SUMS * first_rows(A, itemsize))


def _fits(run: Sequence[Step], A: int, target: Problem) -> bool:
    if target.itemsize > 4 or not target.device.wgmma or target.aligned < 16 or A > MOST_ROWS:
        return False
    return len(run) == 2 and run[0].right == 1 and all(s.p == s.q == SIDE for s in run)
