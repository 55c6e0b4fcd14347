"""The candidates by warpgroups: two factors of 16-bit types (chain_wgmma.cuh), large float factors, forward and backward (split_wgmma.cuh),
and the backward of two factors of 128 x 128 on few rows (few_rows.cuh)."""

from collections.abc import Iterator, Sequence
from math import ceil, gcd
from typing import NamedTuple

from cukern.ops.kron_linear.plan import LAUNCH_US, Backward, Problem, Step, text
from cukern.ops.kron_linear.plan import START_US as BLOCK_START_US

SIZES = 64, 128  # of factors
TILE = 64  # rows of a tile of a right factor alone, or columns of one of a left factor
BYTES = {False: 6, True: 4}  # of an element in shared memory, by whether it is TF32
MULTIPLY_ADDS_US = {False: 450_000.0, True: 750_000.0}  # per SM, by whether it is TF32
PAIR = 0.8  # time / usual time of a multiply-add, if two large factors share a launch
TILE_US = 0.3  # from a tile to the next
START_US = 5.0  # the launch, and the factors
SUM_US = 3.0  # the launch that adds the partial sums


class SplitWgmma(NamedTuple):
    """One launch of a factor, or of two with nothing to their right."""

    steps: tuple[Step, ...]
    teams: int  # warpgroups or pairs of them per block, each with its own tiles
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


def pair(run: Sequence[Step], rows: int, target: Problem) -> Iterator[SplitWgmma]:
    """One launch of two larger factors in TF32: see SplitPair4 in split_wgmma.cuh. For few rows, tile shares a row among blocks."""
    if not target.tensor or not _can(target) or len(run) != 2 or run[0].right > 1 or 2 * rows * run[1].left < target.sms:
        return
    right, left = run
    if left.q <= TILE or not all(n % 16 == 0 and TILE <= n <= 2 * TILE for s in run for n in (s.p, s.q)):
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
    """The predicted time of `tiles` tiles, each with `work` multiply-adds and `numbers` elements of memory traffic."""
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


# ---- two factors of 16-bit types, with what is between them in registers

IN_FLIGHT = 32 << 10  # bytes in flight per SM that keep device memory busy
MOST_COLUMNS, LEAST_ROWS = 160, 32  # columns at most; rows of y at least, of the 64 that wgmma multiplies
COPY_CYCLES, PACKED_CYCLES = 0.3, 0.065  # per SM: for a copy of less than 16 bytes, for an element of store_packed


class ChainWgmma(NamedTuple):
    """One launch: each warpgroup has rows of x of its own. See Chain4 in chain_wgmma.cuh. The right factor's step comes first."""

    steps: tuple[Step, ...]
    teams: int  # warpgroups of a block
    stages: int
    split: bool
    us: float = 0.0
    R: int = 1
    blocks: int = 1
    slices: int = 1
    products: int = 1
    kernel: str = "chain_wgmma"
    handicap: float = 1.0

    @property
    def L(self) -> int:
        """Pages that a warpgroup takes at a time: PAGES in chain_wgmma.cuh."""
        return _pages(*self.steps)

    @property
    def threads(self) -> int:
        return 128 * self.teams

    @property
    def shared(self) -> int:
        right, left = self.steps
        high, deep, across = _sixteens(left.p), _sixteens(right.p), _sixteens(right.q)
        factor = _panels(deep, across) if self.split else deep * across * 4
        matrix, room = high * (_sixteens(left.q) + 8) * 2, 128 * self.teams * right.q if right.q % 16 else 0
        return factor + self.teams * self.stages * _panels(high, self.L * deep) + (max(matrix, room) if self.held else matrix + room)

    @property
    def held(self) -> bool:
        """Whether the left factor stays in registers: HELD in chain_wgmma.cuh."""
        right, left = self.steps
        return left.q <= 128 and (_sixteens(right.p) + _sixteens(right.q)) // 2 + _of_left(left) <= 192

    @property
    def registers(self) -> int:
        """Registers per thread, as seen in compiled kernels."""
        right, left = self.steps
        rest = 48 + (32 if right.q % 2 or left.p % 2 else 0)
        if not self.held:
            rest += 24 if self.split or right.q % 16 == 0 else 48
        sums = (self.L * _sixteens(right.p) + _sixteens(right.q)) // 2
        return sums + (_of_left(left) if self.held else _sixteens(left.p) // 4) + rest

    def template(self, added: bool = False) -> str:
        return f"Chain4<{text(self.teams, self.stages, added, *[f'Factor<{s.p}, {s.q}>' for s in reversed(self.steps)])}>"


def chain(run: Sequence[Step], rows: int, target: Problem) -> Iterator[ChainWgmma]:
    """The launches of a run of two factors with nothing to their right, with as many warpgroups as registers and shared memory allow."""
    if len(run) != 2 or run[0].right > 1 or target.itemsize != 2 or target.aligned < 16 or not target.device.wgmma:
        return
    right, left = run
    if left.q < LEAST_ROWS or not 16 <= right.p <= MOST_COLUMNS or right.p % 2 or right.q > MOST_COLUMNS:
        return
    for teams in (4, 3, 2, 1):
        for stages in (max(2, 1 + ceil(IN_FLIGHT / (teams * _pages(right, left) * left.p * right.p * 2))), 1):
            plan = ChainWgmma(tuple(run), teams, stages, target.bfloat)
            if plan.registers <= min(240, 512 // teams) and plan.shared <= target.shared:
                yield plan._replace(us=_us_of_chain(plan, rows * left.left, target))


def _us_of_chain(plan: ChainWgmma, pages: int, target: Problem) -> float:
    """A model of a launch's time: compute and memory traffic overlap."""
    right, left = plan.steps
    cycles = ceil(left.q / 64) * _sixteens(right.p) * (_sixteens(left.p) + 2 / plan.L * _sixteens(right.q)) / 32
    copies = left.p * right.p * (2 / gcd(16, 2 * right.p) - 1 / 8)  # more copies than with 16 bytes each
    cycles += copies * COPY_CYCLES + (left.q * right.q * PACKED_CYCLES if right.q % 16 else 0)
    cycles *= (1.15 if plan.stages == 1 else 1.0) * (1.0 if plan.held else 1.2)
    multiplied = max(1.0, pages / target.sms) * cycles / target.cycles_us
    moved = pages * (left.p * right.p + left.q * right.q) * 2 / target.sms / target.sm_bytes_us
    return LAUNCH_US + BLOCK_START_US + (left.p * left.q + right.p * right.q) / target.sm_bytes_us + (multiplied**4 + moved**4) ** 0.25


def _pages(right: Step, left: Step) -> int:
    """Two if the rows of both are 128 bytes, and the results have 64 rows, which a warpgroup multiplies at once."""
    return 2 if left.q <= 32 and right.p <= 32 else 1


def _sixteens(n: int) -> int:
    """Rows or columns in shared memory, with those that stay 0: HIGH, DEEP and ACROSS in chain_wgmma.cuh."""
    return ceil(n / 16) * 16


def _of_left(left: Step) -> int:
    """Registers for all of a left factor."""
    return ceil(left.q / 64) * _sixteens(left.p) // 4


def _panels(rows: int, columns: int) -> int:
    """Bytes of a matrix of 16-bit numbers in panels of 64 columns: Panels in chain_wgmma.cuh."""
    return rows * ceil(columns / 64) * 128


# ---- few rows

SIDE = 128  # rows and columns of a factor
FEW_BLOCKS = 4  # of a row
FEW_MOST = 64  # rows, at most; for more, the launches of tile_backward.py fill the GPU, too
FEW_SHARED = {4: 9 * 64 * 64 * 6, 2: 11 * 64 * 64 * 2}  # bytes of X, W2, W1 (later other arrays), G and H
FEW_SUMS = 1.5  # partial sums per row / elements of a factor
FEW_ALONE = 8  # float: up to 8 rows are one launch; otherwise two overlap, and the second adds to the partial sums of the first
FEW_START_US = 6.0  # the launches, and the partial sums
FEW_ROW_US = {4: 8.0, 2: 4.0}  # per row of a block, by the bytes of an element


def few_rows(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Backward]:
    """The launches of a run, if there are any; strict in TF32 too."""
    A = rows * run[-1].left
    if not _few_fit(run, A, target):
        return
    shared = FEW_SHARED[target.itemsize] + 16
    if shared <= target.shared:
        us = FEW_START_US + ceil(FEW_BLOCKS * A / target.sms) * FEW_ROW_US[target.itemsize]
        yield Backward(tuple(run), us, str(SIDE), 0, 256, shared, (1, 1), "few_rows")


def few_first_rows(A: int, itemsize: int) -> int:
    """The number of rows of the backward's first launch, of A rows. It is the number of rows that have partial sums."""
    return A if A <= FEW_ALONE or itemsize < 4 else ceil(A / 2)


def few_partial_sums(A: int, itemsize: int) -> int:
    return ceil(FEW_SUMS * few_first_rows(A, itemsize))


def _few_fit(run: Sequence[Step], A: int, target: Problem) -> bool:
    if target.itemsize > 4 or not target.device.wgmma or target.aligned < 16 or A > FEW_MOST:
        return False
    return len(run) == 2 and run[0].right == 1 and all(s.p == s.q == SIDE for s in run)
