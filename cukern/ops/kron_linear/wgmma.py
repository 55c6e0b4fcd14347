"""The candidates by warpgroups: large float factors, forward and backward (split_wgmma.cuh), and the backward
of two factors of 128 x 128 on few rows (few_rows.cuh)."""

from collections.abc import Iterator, Sequence
from math import ceil

from cukern.ops.kron_linear.plan import Launch, Problem, Step, instance

SIZES = 64, 128  # of factors
TILE = 64  # rows of a tile of a right factor alone, or columns of one of a left factor
KINDS = {False: "float", True: "Tf32"}  # of Pieces in split_float.cuh, by whether it is TF32
BYTES = {False: 6, True: 4}  # of an element in shared memory, by whether it is TF32
MULTIPLY_ADDS_US = {False: 450_000.0, True: 750_000.0}  # per SM, by whether it is TF32
TILE_US = 0.3  # from a tile to the next
START_US = 5.0  # the launch, and the factors
SUM_US = 3.0  # the launch that adds the partial sums


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launch of a run, if there is one."""
    if not _fits(run, target):
        return
    left, right = _parts(run)
    (p1, q1), (p2, q2) = ((s.p, s.q) if s else (TILE, TILE) for s in (left, right))
    A = rows * run[-1].left
    threads = 2 * q1 if left else 128  # of a team
    teams = 2 if threads == 128 else 1
    L, R = (1, 1 if right else TILE) if left else (TILE, 1)
    tiles = ceil(A / L) * run[0].right // R
    # A left factor is in registers.
    shared = BYTES[target.tensor] * ((p2 * q2 if right else 0) + (4 * p1 * p2 if left else 0))
    work = (p1 * q1 * p2 if left else 0) + (q1 * p2 * q2 if right else 0)
    us = START_US + _us(tiles, work, p1 * p2 + q1 * q2, target)
    if shared <= target.shared:
        products = 2 if target.tensor else 3
        plan = _plan(run, teams, target)
        yield Launch("split_wgmma", tuple(run), us, plan, teams * threads, shared, L, R, products=products)


def backward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launch of its backward. One factor: SplitOne4 of split_wgmma.cuh, if tiles of 32 lines fit."""
    if not _fits(run, target):
        return
    s = run[0]
    split = BYTES[target.tensor]
    if len(run) == 2:
        name = "split_wgmma"
        teams = 2
        tile = (1, 1)
        # the factors, X of all warpgroups, G and H of each team; mbarriers
        shared = split * (3 + 3 * teams) * TILE**2 + 128
        us = _us(rows * run[-1].left, 5 * TILE**3, 3 * TILE**2, target)
        plan = _plan(run, teams, target)
        threads = (teams + 1) * 128
    else:
        lines = rows * s.left * s.right
        each = TILE // 2
        if not target.whole and s.left * s.right % each:
            return
        name = "split_wgmma_one"
        teams = (3 if s.q == TILE else 2) if s.p == TILE else 1
        tile = (each, 1) if s.right == 1 else (1, each)
        of_g = split * each * (2 if s.p == TILE else 4) * s.q
        staged = 4 * s.p * (s.q + 4) // teams
        third = 2 * s.p * s.q if s.q > TILE and not target.tensor else 0  # piece of the factor
        shared = teams * (max(of_g, staged) + 4 * each * (s.p + s.q)) + third
        us = _us(lines // each, 2 * s.p * s.q * each, (2 * s.p + s.q) * each, target)
        plan = ("SplitOne4", teams, KINDS[target.tensor], s.right, s)
        threads = teams * 2 * s.p
    if shared <= target.shared:
        yield Launch(name, tuple(run), START_US + SUM_US + us, plan, threads, shared, *tile)


def _fits(run: Sequence[Step], target: Problem) -> bool:
    if not (target.device.wgmma and target.itemsize == 4 and target.aligned >= 16):
        return False
    if len(run) > 1:
        return len(run) == 2 and run[0].right == 1 and all(s.p == s.q == TILE for s in run)
    return run[0].p in SIZES and run[0].q in SIZES and (run[0].right == 1 or run[0].right % TILE == 0)


def _parts(run: Sequence[Step]) -> tuple[Step | None, Step | None]:
    """The left factor and the right one. One alone is the right one if nothing is to its right."""
    return run[-1] if run[-1].right > 1 else None, run[0] if run[0].right == 1 else None


def _us(tiles: int, work: int, numbers: int, target: Problem) -> float:
    """The predicted time of tiles, each with `work` multiply-adds and `numbers` elements to move."""
    multiplied = ceil(tiles / target.device.sms) * (work / MULTIPLY_ADDS_US[target.tensor] + TILE_US)
    moved = tiles * numbers * target.itemsize / (target.device.sms * target.device.sm_bytes_us)
    return max(multiplied, moved) + min(multiplied, moved) / 4


def _plan(run: Sequence[Step], teams: int, target: Problem) -> tuple[object, ...]:
    merged = [instance("Merged", *([] if s is None else [s])) for s in _parts(run)]
    return "Split4", teams, KINDS[target.tensor], run[0].right, *merged


# ---- few rows

SIDE = 128  # rows and columns of a factor
FEW_BLOCKS = 4  # of a row
FEW_MOST = 64  # rows, at most; for more, the launches of tile_backward.py fill the GPU, too
FEW_SHARED = {4: 9 * 64 * 64 * 6, 2: 11 * 64 * 64 * 2}  # bytes of X, W2, W1 (later other arrays), G and H
FEW_SUMS = 1.5  # partial sums per row / elements of a factor
# Up to 8 rows of float take one launch. More rows take two launches, which overlap. The second launch adds to
# the partial sums of the first.
FEW_ALONE = 8
FEW_START_US = 6.0  # the launches, and the partial sums
FEW_ROW_US = {4: 8.0, 2: 4.0}  # per row of a block, by the bytes of an element


def few_rows(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run, if there are any; strict in TF32 too."""
    A = rows * run[-1].left
    itemsize = target.itemsize
    device = target.device
    fits = itemsize <= 4 and device.wgmma and target.aligned >= 16
    if not fits or A > FEW_MOST or len(run) != 2 or run[0].right > 1:
        return
    shared = FEW_SHARED[itemsize] + 16
    if all(s.p == s.q == SIDE for s in run) and shared <= target.shared:
        us = FEW_START_US + ceil(FEW_BLOCKS * A / device.sms) * FEW_ROW_US[itemsize]
        yield Launch("few_rows", tuple(run), us, (SIDE,), 256, shared)


def few_first_rows(A: int, itemsize: int) -> int:
    """The number of rows of the backward's first launch, of A rows: those that have partial sums."""
    return A if A <= FEW_ALONE or itemsize < 4 else ceil(A / 2)
