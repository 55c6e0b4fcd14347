"""The launch of kron_linear v4 of four factors of 16 x 16 at the right end of a layer: see kernels_cu/kron_linear/sixteen.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from cukern.ops.kron_linear.plan import Problem, Step

SIDE, COUNT, CLUSTER, WARPS = 16, 4, 2, 16
AHEAD = 4 * SIDE * SIDE * 4 * WARPS  # bytes of the next row's pages that are fetched ahead
START_US = 6.0
ROW_US = {4: 12.1, 2: 6.3}  # of a cluster, by the bytes of a number


class Sixteen(NamedTuple):
    """One launch; the rest as in Group of kron_groups.py."""

    steps: tuple[Step, ...]
    us: float
    threads: int = 32 * WARPS
    blocks: int = 1
    L: int = 1
    R: int = 1
    slices: int = CLUSTER
    products: int = 6
    shared: int = COUNT * 3 * 512 + WARPS * 4 + 16 + SIDE * (SIDE * (256 // CLUSTER + 4) + 4) * 4 + AHEAD

    def template(self, added: bool = False) -> str:
        return f"Sixteen4<{str(added).lower()}>"


def launches(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Sixteen]:
    """The launch of a run of steps, if it is one of these and has rows enough for all multiprocessors."""
    rows, clusters = rows * run[-1].left, target.sms // CLUSTER
    if target.itemsize not in ROW_US or target.aligned < 16 or rows < clusters:
        return
    if len(run) == COUNT and run[0].right == 1 and all((s.p, s.q) == (SIDE, SIDE) for s in run):
        made = Sixteen(tuple(run), START_US + ROW_US[target.itemsize] * ceil(rows / clusters))
        if made.shared <= target.shared:
            yield made
