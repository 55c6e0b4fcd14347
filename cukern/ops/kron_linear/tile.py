"""The candidate for any factors: a tile of the array stays on chip from the first factor of a run to the
last. See tile.cuh.

A model of a launch's time chooses among tilings of powers of two. Its constants only decide which of two
plans is the faster.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

from cukern.ops.kron_linear.plan import ADDED, L2_BYTES, LAUNCH_US, Launch, Problem, Step, instance, up

MERGED = (1, 4, 16, 64)  # the limits tried for the rows and columns of merged factors

START_US = 1.5  # from a block's start to its first numbers
L2_READ = 0.42  # time of a read from the L2 cache / time of a read from device memory
L2_HELD = 0.7, 0.42  # the same for reads and writes of arrays that stay in the L2 cache
PARTLY = 3.0  # slowdown of writes of partial 32-byte sectors: 2 to 3.5 were measured
ALONE_US = 0.8  # the SM is idle while its only block starts and ends
BARRIER_CYCLES = 400  # cost of a barrier
TILE_CYCLES = 1500  # from the end of a tile to the next
MMA_CYCLES = 6  # issue cycles of an mma 16 x 8 x 8 (TF32) or 16 x 8 x 16, per SM quadrant

Kind = tuple[int, bool]  # PRODUCTS and ONCE of Plan4 in tile_step.cuh
Tile = tuple[int, bool, int, Kind]  # R, whether it is all of C, slices, kind
Pieces = Sequence[tuple[Step, ...]]  # steps whose factors are merged
FMA: Kind = (0, False)
TENSOR: tuple[Kind, ...] = ((1, True), (1, False))  # the second rounds factors of float at each use
SPLIT: tuple[Kind, ...] = ((3, False), (3, True))
LEAST_SPLIT = 32  # terms in a sum of split products. Error / SGEMM's error: 1.3 for 16 terms, 1.1 for 32


class Part(NamedTuple):
    """One step of a launch: neighbouring factors, the rightmost first. See Step4 of tile_step.cuh."""

    factors: tuple[Step, ...]
    fibers: int
    columns: int  # of a lane on the FMA units, of a warp on tensor cores
    lanes: int
    padded: int
    layout: tuple[int, ...] = ()

    @property
    def wide(self) -> int:
        return _wide(self.columns, self.lanes)

    def __str__(self) -> str:
        numbers = self.fibers, self.columns, self.lanes, self.padded
        return instance("Step4", *numbers, instance("Layout", *self.layout), *self.factors)


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run. Sums of fewer than LEAST_SPLIT split products are not exact enough."""
    kinds = SPLIT if target.strict else ()
    if target.tensor:
        kinds = TENSOR if target.itemsize == 4 else TENSOR[:1]
    for kind in (FMA, *kinds):
        for made in tilings(run, rows, target, kind):
            least = min(prod(s.p for s in part.factors) for part in made.parts)
            if made.products < 3 or least >= LEAST_SPLIT:
                yield made


def tilings(run: Sequence[Step], rows: int, target: Problem, kind: Kind) -> Iterator[Launch]:
    P = prod(s.p for s in run)
    at_once = 16 if kind[0] else 4
    matrices = dict.fromkeys([_merged(run, most) for most in MERGED])
    tiles = [(L, R) for L, R in _tiles(run[0].right, P, rows * run[-1].left) if L * R * P <= 1 << 17]
    for parts, slices, (L, R), warps in product(matrices, (1, 2, 4, 8), tiles, (4, 8, 16)):
        if slices == 1 or prod(s.q for s in parts[0]) % (at_once * slices) == 0:
            yield from _tiling(parts, rows, target, kind, L, R, slices, warps)


def _merged(run: Sequence[Step], most: int) -> tuple[tuple[Step, ...], ...]:
    """The run cut into pieces. The matrix of several merged factors has at most `most` rows and columns."""
    pieces: list[tuple[Step, ...]] = []
    for s in run:
        longer = (*(pieces[-1] if pieces else ()), s)
        if pieces and max(prod(t.p for t in longer), prod(t.q for t in longer)) <= most:
            pieces[-1] = longer
        else:
            pieces.append((s,))
    return tuple(pieces)


def _tiles(C: int, P: int, A: int) -> list[tuple[int, int]]:
    """L and R of the tiles of an array [A][P][C]."""
    whole = [(L, C) for L in (1 << n for n in range(12)) if (C == 1 or C * P <= 1 << 15) and 2 * A > L]
    return whole + [(1, R) for R in range(2, min(C, 2048)) if C % R == 0]


class _Work(NamedTuple):
    """What the steps of a tile need: cycles of arithmetic, shared memory and barriers; bytes; registers."""

    parts: tuple[Part, ...]
    busy: int  # warps
    multiplied: float
    fetched: float
    waiting: float
    matrices: int
    registers: int
    largest: int  # elements between two steps
    total: int  # elements of the result


def _work(
    pieces: Pieces, numbers: int, R: int, slices: int, warps: int, kind: Kind, itemsize: int
) -> _Work | None:
    size = max(itemsize, 4)
    products = kind[0]
    total = numbers
    right = R
    before = 1
    made = _Work((), 0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    for n, piece in enumerate(pieces):
        p = prod(s.p for s in piece)
        q = prod(s.q for s in piece) // (1 if n else slices)
        pairs = n == 0 and _in_pairs(piece, products, itemsize, p)
        read = size if n else itemsize  # bytes of an element
        chosen = _config(total // p, p, q, right, size, read, warps, kind, pairs)
        if chosen is None:
            return None
        part, issued, waves = chosen
        layout = _layout(p, right, made.parts[-1] if n else None, before, total, read, products > 0, pairs)
        local = p == q == part.padded == part.wide and part.fibers * part.lanes % right == 0
        made = _Work(
            (*made.parts, part._replace(factors=piece, layout=layout)),
            max(made.busy, ceil(total // p / (part.fibers * part.lanes)) * (part.padded // part.wide)),
            made.multiplied + issued,
            made.fetched + waves,
            made.waiting + (0 if local else BARRIER_CYCLES),
            made.matrices + _matrix_bytes(part, len(piece), p, kind, pairs, itemsize),
            max(made.registers, _registers(part, itemsize, products, p)),
            max(made.largest, total if n else 0),
            total // p * q,
        )
        total = made.total
        before = right
        right = right * q
    return made


def _in_pairs(piece: Sequence[Step], products: int, itemsize: int, p: int) -> bool:
    """in_pairs in tile_step.cuh."""
    return products == 1 and itemsize == 2 and len(piece) == 1 and p % 4 == 0 and p > 8


def _matrix_bytes(part: Part, factors: int, p: int, kind: Kind, pairs: bool, itemsize: int) -> int:
    """matrix_bytes in tile.cuh."""
    products, split = kind
    stored = itemsize if factors == 1 and (pairs or not products) else max(itemsize, 4)
    return up(_high(p, products, pairs) * part.padded * stored, 16) * (2 if products == 3 and split else 1)


def _tiling(
    pieces: Pieces, rows: int, target: Problem, kind: Kind, L: int, R: int, slices: int, warps: int
) -> Iterator[Launch]:
    """The launches for a tile and a number of warps: with the largest prefetch of the next tile or none."""
    itemsize = target.itemsize
    size = max(target.itemsize, 4)
    run = [s for piece in pieces for s in piece]
    C = run[0].right
    P = prod(s.p for s in run)
    numbers = L * R * P
    work = _work(pieces, numbers, R, slices, warps, kind, itemsize)
    if work is None or (2 * work.busy <= warps and warps > 4):
        return
    threads = 32 * warps
    tiles = ceil(rows * run[-1].left / L) * (C // R) * slices
    bytes_ = gcd(16, target.aligned, (P * R if R == C else gcd(C, R)) * itemsize)
    for ahead in _ahead(work, numbers, prod(s.p for s in pieces[0]), target, len(pieces)):
        tile = max(work.largest * size, numbers * itemsize if ahead < numbers else 0)
        shared = work.matrices + up(ahead * itemsize, 16) + up(tile, 16)
        if shared > target.shared:
            continue
        by_registers = 65536 // (threads * min(work.registers, 255))
        blocks = max(1, min(target.shared // (shared + 1024), by_registers, 2048 // threads, 8))
        us = _us(work, tiles, numbers, ahead, blocks, (R, R == C, slices, kind), target)
        plan = "Plan4", threads, blocks, L, R, C, bytes_, ahead, slices, *kind, ADDED, *work.parts
        # Prefer factors that are rounded or split once to an equal plan that does it at each use: fewer
        # kernels serve all numbers of rows.
        handicap = 1.01 if kind == SPLIT[0] else 1.05 if kind == TENSOR[1] else 1.0
        yield Launch("tile", tuple(run), us, plan, threads, shared, L, R, blocks, slices, kind[0], handicap)


def _ahead(work: _Work, numbers: int, p: int, target: Problem, pieces: int) -> set[int]:
    """The options for the number of elements of the next tile to prefetch: all, as many as fit, or none."""
    itemsize = target.itemsize
    size = max(target.itemsize, 4)
    part = work.parts[0]
    # elements that a warp reads
    step = part.fibers * part.lanes * p
    left = target.shared - work.matrices
    found = {numbers, 0 if pieces > 1 else numbers}
    if numbers * itemsize > left - work.largest * size:
        found.add(max(0, left - max(work.largest * size, numbers * itemsize)) // itemsize // step * step)
        found.discard(numbers)
    if itemsize < size:  # a warp's inputs occupy the place of its outputs
        found &= {numbers}
    return {n for n in found if not 0 < n < numbers or not (numbers % step or n * itemsize % 128)}


def _us(work: _Work, tiles: int, numbers: int, ahead: int, blocks: int, tile: Tile, target: Problem) -> float:
    """A model of a launch's time. `blocks`: the most that fit an SM."""
    (R, whole, slices, kind) = tile
    itemsize = target.itemsize
    each = ceil(tiles / target.device.sms)
    resident = min(blocks, each)
    products = kind[0]
    # Too few warps to hide the latency of the arithmetic.
    idle = max(1.0, (4.4 if products else 4) / (work.busy * resident))
    shorter = (0.6 / resident if work.waiting else 0.1) * min(work.multiplied, work.fetched)
    overlap = max(work.multiplied * idle, work.fetched) + shorter
    # Measured on tensor cores: the tail of a wave is idle time, and of two times that are nearly equal
    # neither hides the other.
    turns = (each + ceil(each / resident) * resident) / 2 if products else each
    compute = turns * (overlap + (work.waiting + TILE_CYCLES) / resident) / target.device.cycles_us
    coarse = 1 if whole or R * itemsize >= 128 else 128 / (R * itemsize)
    # The other blocks of a tile read it from the L2 cache.
    shared_read = (1 + L2_READ * (slices - 1)) / slices
    sectors = 1.0 if R == 1 or R * itemsize % 32 == 0 else PARTLY
    in_l2 = tiles * (numbers / slices + work.total) * itemsize <= L2_BYTES
    to_read, to_write = L2_HELD if in_l2 else (1.0, 1.0)
    moved = numbers * shared_read * to_read, work.total * to_write * sectors
    read, written = (n * itemsize * coarse / target.device.sm_bytes_us for n in moved)
    hidden = each * (read * (1 - (1 - ahead / numbers) / resident) + written)
    longer = (compute**6 + hidden**6) ** (1 / 6) if products else max(compute, hidden)
    streams = resident * read + longer + (each * (read + written) - hidden) + resident * written
    alone = ALONE_US if resident == 1 else 0.0
    # Factors of float that are not converted are copied asynchronously, with the first tile.
    matrices = 0.0 if kind == TENSOR[1] else resident * work.matrices / (2 * target.device.sm_bytes_us)
    return LAUNCH_US + START_US + alone + streams * (1.02 - 0.02 * ahead / numbers) + matrices


@functools.lru_cache(1 << 14)
def _config(
    fibers: int, p: int, q: int, right: int, size: int, stored: int, warps: int, kind: Kind, pairs: bool
) -> tuple[Part, float, float] | None:
    """The fastest way for `warps` warps to compute the sums of a step, with elements of `stored` bytes in
    shared memory. Also a block's cycles of arithmetic, and of shared memory."""
    best = None
    high = _high(p, kind[0], pairs)
    for f, c, lanes in _mma_parts(p, q, right) if kind[0] else _fma_parts(size):
        groups = ceil(q / _wide(c, lanes))
        items = ceil(fibers / (f * lanes)) * groups
        part = Part((), f, c, lanes, groups * _wide(c, lanes))
        if items > warps or part.padded >= 2 * max(q, 9):
            continue
        if kind[0]:
            issue, waves = _mma_cycles(part, p, right, stored, kind, pairs)
        else:
            issue, waves = _fma_cycles(part, p, right, size)
        multiplied = high * ceil(items / 4) * issue
        fetched = high * items * waves + fibers * q * size / 128
        barrier = 0 if groups == 1 else BARRIER_CYCLES
        cycles = max(multiplied, fetched) + 0.1 * (multiplied + fetched) + barrier
        rank = 2 * items <= warps, cycles  # prefer the plan with half as many warps if half have no work
        if best is None or rank < best[0]:
            best = rank, (part, multiplied, fetched)
    return best[1] if best else None


def _wide(columns: int, lanes: int) -> int:
    """Columns of a warp: Part.wide."""
    return columns if lanes == 1 else columns * 32 // lanes


def _mma_parts(p: int, q: int, right: int) -> Iterator[tuple[int, int, int]]:
    """Fibers, columns and lanes of a Part. A lane stores several accumulators at once."""
    if min(p, q) < 8 or (p % 2 if right == 1 else right % 4):
        return
    for f, c in product((8, 16, 32, 64, 128), (16, 32, 48, 64, 80)):
        together = right > 1 or not q % gcd(c // 8, 4)
        if f >= (8 if right == 1 else 32) and f * c <= 2048 and together and (not c & (c - 1) or q & (q - 1)):
            yield f, c, 1


def _fma_parts(size: int) -> list[tuple[int, int, int]]:
    every = product((8, 4, 2, 1), (8, 4, 2, 1), (32, 16, 8))
    return [(f, c, lanes) for f, c, lanes in every if size == 4 or f * c <= 32]


def _mma_cycles(part: Part, p: int, right: int, stored: int, kind: Kind, pairs: bool) -> tuple[float, float]:
    """A warp's cycles for a row of the matrix, of arithmetic and of shared memory."""
    (products, split) = kind
    f = part.fibers
    c = part.columns
    others = f / 8 + c / (8 if split and products == 3 else 16) + 6  # fetch
    if products == 3:  # adding and splitting
        others += f * c / 32 / _depth(f, p) + f + (0 if split else c)
    elif not split:
        others += c / 4
    issue = (f * c / 128 * products * MMA_CYCLES + others) / (16 if pairs else 8)
    factors = 2 if split and products == 3 else 1
    return issue, (f * _conflicts(p, right, stored, pairs) + factors * c) / (64 if pairs else 32)


def _fma_cycles(part: Part, p: int, right: int, size: int) -> tuple[float, float]:
    f = part.fibers
    c = part.columns
    loads = f / gcd(f, right if right > 1 else p, 16 // size) + c / gcd(c, 16 // size)
    return f * c * size / 4 + loads + 1, (max(f * part.lanes, f * 8) + max(part.wide, 4 * c)) * size / 128


@functools.lru_cache(4096)
def _conflicts(p: int, right: int, size: int, pairs: bool) -> float:
    """Bank conflicts of an access of tensor cores' lanes where no Layout avoids them: see Lanes4."""
    if not (p & (p - 1) or right & (right - 1)):
        return 1.0
    neighbours = (4 if pairs else 2) if right == 1 else 4  # elements that a lane loads
    places = [_place_of_lane(lane, p, right, pairs) * size // 4 for lane in range(32)]
    together = 128 // (size * neighbours)
    most = []
    for first in range(0, 32, together):
        each = range(max(1, size * neighbours // 4))
        words = {n + i for n in places[first : first + together] for i in each}
        banks = [w % 32 for w in words]
        most.append(max(banks.count(b) for b in banks))
    return sum(most) / len(most)


def _place_of_lane(lane: int, p: int, right: int, pairs: bool) -> int:
    g, t = divmod(lane, 4)
    if right == 1:
        return g * p + t * (4 if pairs else 2)
    pair = 16 if right >= 32 else 8 if right >= 16 else 4
    h = g // 2
    fiber = g % 2 * pair + (4 * h if pair == 16 else h % 2 * 4 + h // 2 * 16 if pair == 8 else 8 * h)
    return fiber // right * p * right + fiber % right + t * (2 if pairs else 1) * right


def _high(p: int, products: int, pairs: bool) -> int:
    """Rows of a matrix in shared memory, with zeros beyond the last: high() in tile_step.cuh."""
    return up(p, 16 if pairs else 8 if products else 1)


def _depth(fibers: int, p: int) -> int:
    """How many products of 8 along k are added before they join the sums: DEPTH in tile_step.cuh."""
    return 2 if p >= 64 and p % 16 == 0 and fibers <= 32 else 1


def _registers(part: Part, itemsize: int, products: int, p: int) -> int:
    """About how many a thread needs: sums, split numbers, and on the FMA units converted 16-bit numbers."""
    sums = part.fibers * part.columns
    if products:
        return sums // 32 + 64 + (part.fibers // 2 * (_depth(part.fibers, p) + 1) if products == 3 else 0)
    return sums * max(itemsize, 4) // 4 + (96 if itemsize == 2 else 64)


def _layout(
    p: int, right: int, writer: Part | None, before: int, total: int, size: int, tensor: bool, pairs: bool
) -> tuple[int, ...]:
    """Layout's arguments for `total` numbers, read by a step of `p` and `right` and written by `writer` with
    `before` to its right."""
    v = 16 // size
    q = right // before
    if any(n & (n - 1) for n in (p, right, q)) or total % (8 * v):
        return 3, 0, 3, 0, v
    if tensor:
        return (*_spread_mma(p, right, writer, before, size, pairs), v)
    read = spread(log2(right // v), p * right // v, 3) if right == 1 or right >= v else (3, 0)
    moves = writer and (before == 1 or before >= v)
    written = spread(log2(before // v), q * before // v, 3) if moves else (3, 0)
    return (*read, *written, v)


def _spread_mma(
    p: int, right: int, writer: Part | None, before: int, size: int, pairs: bool
) -> tuple[int, ...]:
    v = 16 // size
    halves = size == 2
    rows = (2 if pairs else 1) * right // v  # between the numbers of a fiber that neighbouring lanes read
    if halves and right >= 32:
        return log2(rows), 1, log2(rows) - 1, 4
    if right == 1:
        read = spread(0, p // v, 3) if halves and not pairs else spread(1, p // v, 2)
    elif halves or right < 16:
        read = spread(1, rows, 2)
    else:
        read = spread(0, rows, 3 if writer and before == 1 and right >= 32 else 2)
    return *read, *_spread_written(right, writer, before, v)


def _spread_written(right: int, writer: Part | None, before: int, v: int) -> tuple[int, int]:
    if not writer or (before == 1 and right >= 32):
        return 3, 0
    if before == 1:
        return spread(1, 2 * right // v, 2)
    return spread(2 if before >= 16 else 0, gcd(writer.columns // 8, 4) * before // v, 1)


def spread(low: int, distance: int, bits: int) -> tuple[int, int]:
    """The shift and the mask that bring the lowest bits of an index, whose numbers lie `distance` units
    apart, to a unit's bits from `low` on, of the lowest three; those below `low` tell other lanes apart."""
    at = log2(distance)
    bits = min(bits, 3 - low)
    if at <= low:
        return 3, 0
    moved = bits - max(0, 3 - at)  # the others need no swizzle
    return max(at, 3) - low, ((1 << max(moved, 0)) - 1) << low


def log2(n: int) -> int:
    return max(n, 1).bit_length() - 1
