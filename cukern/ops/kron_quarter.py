"""How kron_linear v4 takes the backward of two factors of 128 x 128 on few rows by warpgroups: see kernels_cu/common/kron_quarter.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING

from cukern.ops.kron_plan import Backward, Step

if TYPE_CHECKING:
    from cukern.ops.kron_groups import Target

SIDE = 128  # rows and columns of a factor
BLOCKS = 4  # of a row
MOST_ROWS = 64  # of more, the launches of kron_backward.py fill a GPU as well
SHARED = {4: 9 * 64 * 64 * 6, 2: 11 * 64 * 64 * 2}  # bytes of X, W2, W1 or what comes there, G, H
SUMS = 1.5  # of each factor's numbers, the partial ones of a row
START_US = 6.0  # the launches, and the partial sums
ROW_US = {4: 8.0, 2: 4.0}  # of a block


def backward(run: Sequence[Step], rows: int, target: "Target") -> Iterator[Backward]:
    """The launch of a run, if there is one. (In TF32 the other launches are as fast.)"""
    A = rows * run[-1].left
    exact = target.itemsize == 2 or (target.itemsize == 4 and not target.tensor)
    if not exact or not target.warpgroups or target.aligned < 16 or A > MOST_ROWS:
        return
    shared = SHARED[target.itemsize] + 16
    if shared > target.shared:
        return
    if len(run) == 2 and run[0].right == 1 and all(s.p == s.q == SIDE for s in run):
        us = START_US + ceil(BLOCKS * A / target.multiprocessors) * ROW_US[target.itemsize]
        yield Backward(tuple(run), us, str(SIDE), BLOCKS * A, 256, shared, ceil(SUMS * A), "quarter")
