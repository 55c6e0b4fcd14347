"""The candidates for large float factors by warpgroups, forward and backward. See split_wgmma.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from cukern.ops.kron_linear.plan import Backward, Problem, Step

SIZES = 64, 128  # of factors
TILE = 64  # rows of a right factor alone, or columns of a left one
BYTES = {False: 6, True: 4}  # of a number in shared memory; in TF32
MULTIPLY_ADDS_US = {False: 450_000.0, True: 750_000.0}  # of a multiprocessor
PAIR = 0.8  # of the time for as many, where two large factors are in one launch
TILE_US = 0.3  # from a tile to the next
START_US = 5.0  # the launch, and the factors
SUM_US = 3.0  # and of the partial sums


class SplitWgmma(NamedTuple):
    """One launch of a factor, or of two with nothing to their right."""

    steps: tuple[Step, ...]
    teams: int  # of a block, each with tiles of its own
    threads: int
    shared: int  # bytes
    us: float
    L: int = 1
    R: int = 1
    blocks: int = 1
    slices: int = 1
    products: int = 3
    kernel: str = "split_wgmma"
    handicap: float = 1.0

    def template(self, added: bool = False) -> str:
        """The plan as the kernel's template argument; a bias and a residual are seen at run time."""
        if self.kernel == "split_wgmma_pair":
            return f"SplitPair4<{', '.join(f'Factor<{s.p}, {s.q}>' for s in reversed(self.steps))}>"
        return _template(self.steps, self.teams, self.products < 3)


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[SplitWgmma]:
    """The launch of a run, if there is one."""
    if target.tensor and _can(target) and len(run) == 2 and run[0].right == 1 and run[1].q > TILE:
        yield from _pair(run, rows, target)
    if not _fits(run, target):
        return
    (p1, q1), (p2, q2), right, left = _sizes(run)
    A, threads = rows * run[-1].left, 2 * q1 if left else 128  # of a team
    tiles = A * (1 if right else run[0].right // TILE) if left else ceil(A / TILE)
    teams = 2 if threads == 128 else 1
    shared = BYTES[target.tensor] * ((p2 * q2 if right else 0) + (4 * p1 * p2 if left else 0))  # a left factor is in registers
    work = (p1 * q1 * p2 if left else 0) + (q1 * p2 * q2 if right else 0)
    us = START_US + _us(tiles, work, p1 * p2 + q1 * q2, target)
    L, R = (1, 1 if right else TILE) if left else (TILE, 1)
    if shared <= target.shared:
        yield SplitWgmma(tuple(run), teams, teams * threads, shared, us, L, R, products=2 if target.tensor else 3)


def _pair(run: Sequence[Step], rows: int, target: Problem) -> Iterator[SplitWgmma]:
    """One launch of two larger factors in TF32: see SplitPair4 in split_wgmma.cuh. For few rows, tile shares a row among blocks."""
    right, left = run
    if 2 * rows * left.left < target.sms or not all(n % 16 == 0 and TILE <= n <= 2 * TILE for s in run for n in (s.p, s.q)):
        return
    numbers = left.p * right.p
    shared = 4 * right.p * right.q + max(4 * numbers, 4 * left.p * (left.q + 4)) + ceil(numbers / 1024) * 4096
    work = int(2 * TILE * right.p * (left.p + right.q) * PAIR)
    us = START_US + _us(rows * left.left, work, numbers + left.q * right.q, target)
    if shared <= target.shared:
        yield SplitWgmma(tuple(run), 1, 256, shared, us, products=2, kernel="split_wgmma_pair")


def backward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Backward]:
    """The launch of its backward."""
    if not _fits(run, target):
        return
    launch = _backward_of_two(run, rows, target) if len(run) == 2 else _backward_of_one(run[0], rows, target)
    if launch and launch.shared <= target.shared:
        yield launch


def _backward_of_two(run: Sequence[Step], rows: int, target: Problem) -> Backward:
    (p1, q1), (p2, q2), _, _ = _sizes(run)
    tiles, teams = rows * run[-1].left, 2
    shared = BYTES[target.tensor] * (p1 * q1 + p2 * q2 + (teams + 1) * p1 * p2 + teams * (q1 * q2 + p1 * q2)) + 128  # mbarriers
    us = START_US + SUM_US + _us(tiles, 2 * p1 * q1 * q2 + 3 * p1 * p2 * q2, 2 * p1 * p2 + q1 * q2, target)
    return Backward(tuple(run), us, _template(run, teams, target.tensor), target.sms, (teams + 1) * 128, shared, (1, 1), "split_wgmma")


def _backward_of_one(s: Step, rows: int, target: Problem) -> Backward | None:
    """See SplitOne4 in split_wgmma.cuh."""
    lines, lines_of_tile, teams = rows * s.left * s.right, TILE // 2, (3 if s.q == TILE else 2) if s.p == TILE else 1
    if not target.whole and s.left * s.right % lines_of_tile:
        return None
    tiles = lines // lines_of_tile
    places = 2 if s.p == TILE else 4
    tiles_of_g, staged = BYTES[target.tensor] * lines_of_tile * places * s.q, 4 * s.p * (s.q + 4) // teams
    third = 2 * s.p * s.q if s.q > TILE and not target.tensor else 0  # piece of the factor
    shared = teams * (max(tiles_of_g, staged) + 4 * lines_of_tile * (s.p + s.q)) + third
    us = START_US + SUM_US + _us(tiles, 2 * s.p * s.q * lines_of_tile, (2 * s.p + s.q) * lines_of_tile, target)
    template = f"SplitOne4<{teams}, {_kind(target.tensor)}, {s.right}, Factor<{s.p}, {s.q}>>"
    tile = (lines_of_tile, 1) if s.right == 1 else (1, lines_of_tile)
    return Backward((s,), us, template, target.sms, teams * 2 * s.p, shared, tile, "split_wgmma_one")


def _fits(run: Sequence[Step], target: Problem) -> bool:
    if not _can(target):
        return False
    if len(run) > 1:
        return len(run) == 2 and run[0].right == 1 and all(s.p == s.q == TILE for s in run)
    return run[0].p in SIZES and run[0].q in SIZES and (run[0].right == 1 or run[0].right % TILE == 0)


def _can(target: Problem) -> bool:
    return target.device.wgmma and target.itemsize == 4 and target.aligned >= 16


def _sizes(run: Sequence[Step]) -> tuple[tuple[int, int], tuple[int, int], bool, bool]:
    """A tile's sizes before and after the left factor, and the right one, and whether there is a right factor, and a left one. One alone
    is the right one if nothing is to its right."""
    right, left = run[0].right == 1, run[0].right > 1 or len(run) == 2
    return (run[-1].p, run[-1].q) if left else (TILE, TILE), (run[0].p, run[0].q) if right else (TILE, TILE), right, left


def _us(tiles: int, work: int, numbers: int, target: Problem) -> float:
    """Of tiles with so many multiplications, and numbers to be moved."""
    multiplied = ceil(tiles / target.sms) * (work / MULTIPLY_ADDS_US[target.tensor] + TILE_US)
    moved = tiles * numbers * target.itemsize / (target.sms * target.sm_bytes_us)
    return max(multiplied, moved) + min(multiplied, moved) / 4


def _template(run: Sequence[Step], teams: int, tf32: bool) -> str:
    _, _, right, left = _sizes(run)
    names = [f"Merged<Factor<{s.p}, {s.q}>>" if s else "Merged<>" for s in (run[-1] if left else None, run[0] if right else None)]
    return f"Split4<{teams}, {_kind(tf32)}, {run[0].right}, {', '.join(names)}>"


def _kind(tf32: bool) -> str:
    """Of Pieces in split_float.cuh."""
    return "Tf32" if tf32 else "float"
