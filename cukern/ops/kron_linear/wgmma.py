"""The candidates by warpgroups: two factors of 16-bit types (chain_wgmma.cuh), large float factors, forward and backward (split_wgmma.cuh),
and the backward of two factors of 128 x 128 on few rows (few_rows.cuh)."""

from collections.abc import Iterator, Sequence
from math import ceil, gcd

from cukern.ops.kron_linear.plan import ADDED, LAUNCH_US, Launch, Problem, Step, instance, up
from cukern.ops.kron_linear.plan import START_US as BLOCK_START_US

SIZES = 64, 128  # of factors
TILE = 64  # rows of a tile of a right factor alone, or columns of one of a left factor
KINDS = {False: "float", True: "Tf32"}  # of Pieces in split_float.cuh, by whether it is TF32
BYTES = {False: 6, True: 4}  # of an element in shared memory, by whether it is TF32
MULTIPLY_ADDS_US = {False: 450_000.0, True: 750_000.0}  # per SM, by whether it is TF32
PAIR = 0.8  # time / usual time of a multiply-add, if two large factors share a launch
TILE_US = 0.3  # from a tile to the next
START_US = 5.0  # the launch, and the factors
SUM_US = 3.0  # the launch that adds the partial sums


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
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
        products = 2 if target.tensor else 3
        yield Launch("split_wgmma", tuple(run), us, _plan(run, teams, target), teams * threads, shared, L, R, products=products)


def pair(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """One launch of two larger factors in TF32: see SplitPair4 in split_wgmma.cuh. For few rows, tile shares a row among blocks."""
    if not target.tensor or not _can(target) or len(run) != 2 or run[0].right > 1 or 2 * rows * run[1].left < target.device.sms:
        return
    right, left = run
    if left.q <= TILE or not all(n % 16 == 0 and TILE <= n <= 2 * TILE for s in run for n in (s.p, s.q)):
        return
    numbers = left.p * right.p
    shared = 4 * right.p * right.q + max(4 * numbers, 4 * left.p * (left.q + 4)) + 4 * up(numbers, 1024)
    work = int(2 * TILE * right.p * (left.p + right.q) * PAIR)
    us = START_US + _us(rows * left.left, work, numbers + left.q * right.q, target)
    if shared <= target.shared:
        yield Launch("split_wgmma_pair", tuple(run), us, ("SplitPair4", left, right), 256, shared, products=2)


def backward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launch of its backward. One factor takes SplitOne4 of split_wgmma.cuh, if tiles of 32 lines fill the array."""
    if not _fits(run, target):
        return
    s, split, (p1, q1), (p2, q2) = run[0], BYTES[target.tensor], *_sizes(run)[:2]
    if len(run) == 2:
        name, teams, tile = "split_wgmma", 2, (1, 1)
        shared = split * (p1 * q1 + p2 * q2 + (teams + 1) * p1 * p2 + teams * (q1 * q2 + p1 * q2)) + 128  # mbarriers
        us = _us(rows * run[-1].left, 2 * p1 * q1 * q2 + 3 * p1 * p2 * q2, 2 * p1 * p2 + q1 * q2, target)
        plan, threads = _plan(run, teams, target), (teams + 1) * 128
    else:
        lines, each = rows * s.left * s.right, TILE // 2
        if not target.whole and s.left * s.right % each:
            return
        name, teams, tile = "split_wgmma_one", (3 if s.q == TILE else 2) if s.p == TILE else 1, (each, 1) if s.right == 1 else (1, each)
        of_g, staged = split * each * (2 if s.p == TILE else 4) * s.q, 4 * s.p * (s.q + 4) // teams
        third = 2 * s.p * s.q if s.q > TILE and not target.tensor else 0  # piece of the factor
        shared = teams * (max(of_g, staged) + 4 * each * (s.p + s.q)) + third
        us = _us(lines // each, 2 * s.p * s.q * each, (2 * s.p + s.q) * each, target)
        plan, threads = ("SplitOne4", teams, KINDS[target.tensor], s.right, s), teams * 2 * s.p
    if shared <= target.shared:
        yield Launch(name, tuple(run), START_US + SUM_US + us, plan, threads, shared, *tile)


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
    multiplied = ceil(tiles / target.device.sms) * (work / MULTIPLY_ADDS_US[target.tensor] + TILE_US)
    moved = tiles * numbers * target.itemsize / (target.device.sms * target.device.sm_bytes_us)
    return max(multiplied, moved) + min(multiplied, moved) / 4


def _plan(run: Sequence[Step], teams: int, target: Problem) -> tuple[object, ...]:
    _, _, right, left = _sizes(run)
    merged = [instance("Merged", *one) for one in ([run[-1]] if left else [], [run[0]] if right else [])]
    return "Split4", teams, KINDS[target.tensor], run[0].right, *merged


# ---- two factors of 16-bit types, with what is between them in registers

IN_FLIGHT = 32 << 10  # bytes in flight per SM that keep device memory busy
MOST_COLUMNS, LEAST_ROWS = 160, 32  # columns at most; rows of y at least, of the 64 that wgmma multiplies
COPY_CYCLES, PACKED_CYCLES = 0.3, 0.065  # per SM: for a copy of less than 16 bytes, for an element of store_packed


def chain(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run of two factors with nothing to their right, with as many warpgroups as registers and shared memory allow."""
    if len(run) != 2 or run[0].right > 1 or target.itemsize != 2 or target.aligned < 16 or not target.device.wgmma:
        return
    right, left = run
    if left.q < LEAST_ROWS or not 16 <= right.p <= MOST_COLUMNS or right.p % 2 or right.q > MOST_COLUMNS:
        return
    for teams in (4, 3, 2, 1):
        for stages in (max(2, 1 + ceil(IN_FLIGHT / (teams * _pages(right, left) * left.p * right.p * 2))), 1):
            launch = chain_of(right, left, rows, teams, stages, target)
            if _registers(right, left, target.bfloat) <= min(240, 512 // teams) and launch.shared <= target.shared:
                yield launch


def chain_of(right: Step, left: Step, rows: int, teams: int, stages: int, target: Problem) -> Launch:
    """One launch: each warpgroup has rows of x of its own. See Chain4 in chain_wgmma.cuh."""
    pages, high, deep, across = _pages(right, left), up(left.p, 16), up(right.p, 16), up(right.q, 16)
    factor = _panels(deep, across) if target.bfloat else deep * across * 4
    matrix, room = high * (up(left.q, 16) + 8) * 2, 128 * teams * right.q if right.q % 16 else 0
    ends = max(matrix, room) if _held(right, left) else matrix + room
    shared = factor + teams * stages * _panels(high, pages * deep) + ends
    us, plan = _us_of_chain(right, left, stages, rows * left.left, target), ("Chain4", teams, stages, ADDED, left, right)
    return Launch("chain_wgmma", (right, left), us, plan, 128 * teams, shared, pages, products=1)


def _held(right: Step, left: Step) -> bool:
    """Whether the left factor stays in registers: HELD in chain_wgmma.cuh."""
    return left.q <= 128 and (up(right.p, 16) + up(right.q, 16)) // 2 + _of_left(left) <= 192


def _registers(right: Step, left: Step, bfloat: bool) -> int:
    """Registers per thread, as seen in compiled kernels."""
    rest = 48 + (32 if right.q % 2 or left.p % 2 else 0)
    if not _held(right, left):
        rest += 24 if bfloat or right.q % 16 == 0 else 48
    sums = (_pages(right, left) * up(right.p, 16) + up(right.q, 16)) // 2
    return sums + (_of_left(left) if _held(right, left) else up(left.p, 16) // 4) + rest


def _us_of_chain(right: Step, left: Step, stages: int, pages: int, target: Problem) -> float:
    """A model of a launch's time: compute and memory traffic overlap."""
    cycles = ceil(left.q / 64) * up(right.p, 16) * (up(left.p, 16) + 2 / _pages(right, left) * up(right.q, 16)) / 32
    copies = left.p * right.p * (2 / gcd(16, 2 * right.p) - 1 / 8)  # more copies than with 16 bytes each
    cycles += copies * COPY_CYCLES + (left.q * right.q * PACKED_CYCLES if right.q % 16 else 0)
    cycles *= (1.15 if stages == 1 else 1.0) * (1.0 if _held(right, left) else 1.2)
    multiplied = max(1.0, pages / target.device.sms) * cycles / target.device.cycles_us
    moved = pages * (left.p * right.p + left.q * right.q) * 2 / target.device.sms / target.device.sm_bytes_us
    factors = (left.p * left.q + right.p * right.q) / target.device.sm_bytes_us
    return LAUNCH_US + BLOCK_START_US + factors + (multiplied**4 + moved**4) ** 0.25


def _pages(right: Step, left: Step) -> int:
    """Two if the rows of both are 128 bytes, and the results have 64 rows, which a warpgroup multiplies at once."""
    return 2 if left.q <= 32 and right.p <= 32 else 1


def _of_left(left: Step) -> int:
    """Registers for all of a left factor."""
    return ceil(left.q / 64) * up(left.p, 16) // 4


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


def few_rows(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run, if there are any; strict in TF32 too."""
    A, itemsize, device = rows * run[-1].left, target.itemsize, target.device
    if itemsize > 4 or not device.wgmma or target.aligned < 16 or A > FEW_MOST or len(run) != 2 or run[0].right > 1:
        return
    shared = FEW_SHARED[itemsize] + 16
    if all(s.p == s.q == SIDE for s in run) and shared <= target.shared:
        us = FEW_START_US + ceil(FEW_BLOCKS * A / device.sms) * FEW_ROW_US[itemsize]
        yield Launch("few_rows", tuple(run), us, (SIDE,), 256, shared)


def few_first_rows(A: int, itemsize: int) -> int:
    """The number of rows of the backward's first launch, of A rows. It is the number of rows that have partial sums."""
    return A if A <= FEW_ALONE or itemsize < 4 else ceil(A / 2)
