"""How kron_linear v4 groups the factors into launches, merges tiny ones, and cuts each launch's work into tiles.

A model of a launch's time chooses among all groupings, and tilings of powers of two. Its constants only decide which of two plans is the
faster.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

from cukern.ops.kron_linear import cublas, sixteen
from cukern.ops.kron_linear import lanes as kron_lanes
from cukern.ops.kron_linear import quarter as kron_quarter
from cukern.ops.kron_linear import registers as kron_registers
from cukern.ops.kron_linear import split as kron_split
from cukern.ops.kron_linear.lanes import Lanes
from cukern.ops.kron_linear.plan import L2_BYTES, Problem, Sizes, Step, least_us, steps
from cukern.ops.kron_linear.quarter import Slice
from cukern.ops.kron_linear.registers import Registers
from cukern.ops.kron_linear.sixteen import Sixteen
from cukern.ops.kron_linear.split import Split
from cukern.runtime.device import allowed, cached, eligible

MOST = 8  # factors in a launch, as in tile.cuh
BETWEEN = 128 << 20  # bytes of an array between two launches, at most, if the rows go in parts
MERGED = (1, 4, 16, 64)  # rows and columns of a product of merged factors, at most

L2_READ = 0.42  # the time to read from the L2 cache, if that of device memory is 1
L2_HELD = 0.7, 0.42  # the time to read and to write what stays there
PARTLY = 3.0  # the time to write what does not begin and end with sectors of 32 bytes: 2 to 3.5 were measured
LAUNCH_US = 2.5
ALONE_US = 0.8  # nobody works while the one block of a multiprocessor starts and ends
BETWEEN_US, BETWEEN_PART = 8.0, 0.32  # two launches are slower than the model says of each, by so much at most, and by such a part
START_US = 1.5  # from a block's start to its first numbers
BARRIER_CYCLES = 400  # for the warps to come together, and to get going again
TILE_CYCLES = 1500  # from the end of a tile to the next
MMA_CYCLES = 6  # of 16 x 8 x 8 in TF32, or 16 x 8 x 16, on a quarter of a multiprocessor, which issues nothing else in them

Kind = tuple[int, bool]  # PRODUCTS and SPLIT of Plan4 in step.cuh
FMA: Kind = (0, False)
TENSOR: Kind = (1, False)
SPLIT: tuple[Kind, ...] = ((3, False), (3, True))
LEAST_SPLIT = 32  # numbers in a sum of split products: of 16 SGEMM rounds so seldom that their error is 1.3 times its own, of 32 1.1 times


class Part(NamedTuple):
    """One step of a launch: neighbouring factors, the rightmost first, multiplied as one matrix. The rest as in Step4 of step.cuh."""

    factors: tuple[Step, ...]
    fibers: int
    columns: int
    lanes: int
    padded: int
    layout: tuple[int, ...] = ()

    @property
    def wide(self) -> int:
        """Columns of a warp."""
        return self.columns * (1 if self.lanes == 1 else 32 // self.lanes)

    @property
    def template(self) -> str:
        factors = [f"Factor<{s.p}, {s.q}>" for s in self.factors]
        return f"Step4<{text(self.fibers, self.columns, self.lanes, self.padded, f'Layout<{text(*self.layout)}>', *factors)}>"


class Group(NamedTuple):
    """One launch, as in Plan4 of step.cuh. No parts: torch's matmul."""

    steps: tuple[Step, ...]
    parts: tuple[Part, ...] = ()
    threads: int = 0
    blocks: int = 1  # that a multiprocessor holds
    L: int = 0
    R: int = 0
    bytes: int = 0
    ahead: int = 0
    slices: int = 1
    products: int = 0
    split: bool = False
    shared: int = 0  # bytes
    us: float = 0.0

    def template(self, added: bool = False) -> str:
        """The plan as the kernel's template argument; `added`: with a bias or a residual."""
        tile = self.L, self.R, self.steps[0].right, self.bytes, self.ahead, self.slices
        return f"Plan4<{text(self.threads, self.blocks, *tile, self.products, self.split, added, *[p.template for p in self.parts])}>"


Launch = Group | Lanes | Registers | Sixteen | Slice | Split


@cached(512)
def groups(sizes: Sizes, rows: int, target: Problem, count: int | None = None) -> tuple[Launch, ...]:
    """The launches of a layer of these factors on `rows` rows, or of its first `count` steps."""
    order = steps(sizes)[:count]
    best: list[tuple[float, tuple[Launch, ...]]] = [(0.0, ())]  # for the last n steps
    for first in reversed(range(len(order))):
        options = []
        for end in range(first + 1, end_of_run(order, first) + 1):
            us, rest = best[len(order) - end]
            group = fastest(order[first:end], rows, target if first == 0 else target._replace(aligned=16))
            if group:
                both = us + group.us
                options.append((both + (between(both) if rest else 0.0), (group, *rest)))
        best.append(min(options, key=lambda o: o[0]))
    return best[-1][1]


def between(us: float) -> float:
    """How much longer two launches of so many us take than each alone."""
    return min(BETWEEN_US, BETWEEN_PART * us)


def rows_at_once(plan: Sequence[Sequence[Step]], rows: int, itemsize: int) -> int:
    """How many rows to take through all launches, of which `plan` has the steps, before the next ones, so that what lies between two
    launches takes little memory."""
    widest = max((s.left * s.q * s.right for steps in plan[:-1] for s in steps[-1:]), default=0) * itemsize
    return rows if rows * widest <= BETWEEN else max(1, BETWEEN // widest)


def end_of_run(order: Sequence[Step], first: int) -> int:
    """The end of the steps from `first` on that go through neighbouring factors from right to left, MOST at most."""
    end = first + 1
    while end < min(len(order), first + MOST) and order[end].factor == order[end - 1].factor - 1:
        end += 1
    return end


@cached(4096)
def fastest(run: Sequence[Step], rows: int, target: Problem) -> Launch | None:
    """The fastest launch of a run of steps, if there is one; for a single step there is always torch's."""
    kinds = FMA, *((TENSOR,) if target.tensor else SPLIT if target.itemsize == 4 else ())
    made = [g for kind in kinds for g in tilings(run, rows, target, kind)]
    # Prefer factors that are split once to an equal plan that splits them at each use, so that fewer kernels serve all numbers of rows.
    made = [g._replace(us=1.01 * g.us) if g.products == 3 and not g.split else g for g in made]
    exact: list[Launch] = [g for g in made if g.products < 3 or all(prod(s.p for s in part.factors) >= LEAST_SPLIT for part in g.parts)]
    exact += kron_registers.launches(run, rows, target)
    exact += kron_lanes.launches(run, rows, target)
    exact += sixteen.launches(run, rows, target)
    exact += kron_split.forward(run, rows, target)
    exact += kron_quarter.forward(run, rows, target)
    least = least_us(run, rows, target)
    exact = [g if g.us >= least else g._replace(us=least) for g in exact]
    found = min(eligible(exact, kernel_of), key=lambda g: (g.us, g.products), default=None)
    if len(run) > 1 or (found and not (allowed("cublas") and cublas.faster(run[0], rows, target, found.us))):
        return found
    return Group(tuple(run), us=cublas.us(run[0], rows, target))


def kernel_of(launch: NamedTuple) -> str:
    """The name of a candidate for --kernel and --without."""
    return type(launch).__name__.lower()


def tilings(run: Sequence[Step], rows: int, target: Problem, kind: Kind) -> Iterator[Group]:
    C, P = run[0].right, prod(s.p for s in run)
    backward = [tuple(piece[::-1] for piece in _merged(run[::-1], most)[::-1]) for most in MERGED]
    matrices = dict.fromkeys([*[_merged(run, most) for most in MERGED], *backward])
    powers = [1 << n for n in range(12)]
    tiles = [(L, C) for L in powers if (C == 1 or C * P <= 1 << 15) and 2 * rows * run[-1].left > L]
    tiles += [(1, R) for R in range(2, min(C, 2048)) if C % R == 0]
    for parts, slices, (L, R), warps in product(matrices, (1, 2, 4, 8), tiles, (4, 8, 16)):
        q = prod(s.q for s in parts[0])
        if L * R * P <= 1 << 17 and (slices == 1 or q % ((16 if kind[0] else 4) * slices) == 0):
            yield from _tiling(parts, rows, target, kind, L, R, slices, warps)


def _merged(run: Sequence[Step], most: int) -> tuple[tuple[Step, ...], ...]:
    """The run cut into pieces whose matrices, merged, have at most so many rows and columns."""
    pieces: list[tuple[Step, ...]] = []
    for s in run:
        longer = (*(pieces[-1] if pieces else ()), s)
        if pieces and max(prod(t.p for t in longer), prod(t.q for t in longer)) <= most:
            pieces[-1] = longer
        else:
            pieces.append((s,))
    return tuple(pieces)


def _tiling(
    pieces: Sequence[tuple[Step, ...]], rows: int, target: Problem, kind: Kind, L: int, R: int, slices: int, warps: int
) -> Iterator[Group]:
    """The launches of a tile and a number of warps: with as much of the next tile fetched ahead as there is room for, and with none."""
    size, itemsize, (products, split) = max(target.itemsize, 4), target.itemsize, kind
    run = [s for piece in pieces for s in piece]
    A, C, P = rows * run[-1].left, run[0].right, prod(s.p for s in run)
    numbers = total = L * R * P
    right, largest, matrices, registers, parts = R, 0, 0, 0, []
    busy = 0  # warps
    multiplied = fetched = waiting = 0.0  # cycles: of the arithmetic units, of shared memory, at barriers
    writer, before = None, 1  # the step before, and its right
    for n, piece in enumerate(pieces):
        p, q = prod(s.p for s in piece), prod(s.q for s in piece) // (1 if n else slices)
        pairs = products == 1 and n == 0 and itemsize == 2 and len(piece) == 1 and p % 4 == 0 and p > 8  # in_pairs in tensor.cuh
        chosen = _config(total // p, p, q, right, size, size if n else itemsize, warps, kind, pairs)
        if chosen is None:
            return
        part, issued, waves = chosen
        busy = max(busy, ceil(total // p / (part.fibers * part.lanes)) * (part.padded // part.wide))
        layout = _layout(p, right, writer, before, total, itemsize if n == 0 else size, products > 0, pairs)
        writer = part._replace(factors=piece, layout=layout)
        parts.append(writer)
        local = p == q == part.padded == part.wide and part.fibers * part.lanes % right == 0
        multiplied, fetched, waiting = multiplied + issued, fetched + waves, waiting + (0 if local else BARRIER_CYCLES)
        stored = itemsize if len(piece) == 1 and (pairs or not products) else size  # bytes of a number: matrix_t
        high = _high(p, products, pairs)
        matrices += -(-high * part.padded * stored // 16) * 16 * (2 if split else 1)
        registers = max(registers, _registers(part, itemsize, products, p))
        total, before, right = total // p * q, right, right * q
        if n < len(pieces) - 1:
            largest = max(largest, total)
    if 2 * busy <= warps and warps > 4:
        return
    threads, tiles = 32 * warps, ceil(A / L) * (C // R) * slices
    bytes_ = gcd(16, target.aligned, (P * R if R == C else gcd(C, R)) * itemsize)
    step = parts[0].fibers * parts[0].lanes * prod(s.p for s in pieces[0])  # numbers that a warp reads of the tile
    room = target.shared - matrices - largest * size
    partly = max(0, target.shared - matrices - max(largest * size, numbers * itemsize)) // itemsize // step * step
    for ahead in {numbers if numbers * itemsize <= room else partly, 0 if len(pieces) > 1 else numbers}:
        tile = max(largest * size, numbers * itemsize if ahead < numbers else 0)
        shared = matrices + -(-ahead * itemsize // 16) * 16 + -(-tile // 16) * 16
        if shared > target.shared or (ahead < numbers and itemsize < size):  # in the tile a warp's own inputs lie where its outputs will
            continue
        if 0 < ahead < numbers and (numbers % step or ahead * itemsize % 128):
            continue
        blocks = max(1, min(target.shared // (shared + 1024), 65536 // (threads * min(registers, 255)), 2048 // threads, 8))
        each = ceil(tiles / target.sms)
        resident = min(blocks, each)
        idle = max(1.0, (4.4 if products else 4) / (busy * resident))  # the arithmetic's latency shows
        overlap = max(multiplied * idle, fetched) + (0.6 / resident if waiting else 0.1) * min(multiplied, fetched)
        # As measured on tensor cores: a multiprocessor whose last blocks are fewer is idle, and of two times near each other both show.
        turns = (each + ceil(each / resident) * resident) / 2 if products else each
        compute = turns * (overlap + (waiting + TILE_CYCLES) / resident) / target.cycles_us
        coarse = 1 if R == C or R * itemsize >= 128 else 128 / (R * itemsize)
        shared_read = (1 + L2_READ * (slices - 1)) / slices  # the other blocks of a tile find it in the L2 cache
        sectors = 1.0 if R == 1 or R * itemsize % 32 == 0 else PARTLY
        to_read, to_write = L2_HELD if tiles * (numbers / slices + total) * itemsize <= L2_BYTES else (1.0, 1.0)
        read, written = (n * itemsize * coarse / target.sm_bytes_us for n in (numbers * shared_read * to_read, total * to_write * sectors))
        hidden = each * (read * (1 - (1 - ahead / numbers) / resident) + written)
        longer = (compute**6 + hidden**6) ** (1 / 6) if products else max(compute, hidden)
        streams = resident * read + longer + (each * (read + written) - hidden) + resident * written
        alone = ALONE_US if resident == 1 else 0.0
        us = LAUNCH_US + START_US + alone + streams * (1.02 - 0.02 * ahead / numbers) + resident * matrices / (2 * target.sm_bytes_us)
        yield Group(tuple(run), tuple(parts), threads, blocks, L, R, bytes_, ahead, slices, products, split, shared, us)


@functools.lru_cache(1 << 14)
def _config(
    fibers: int, p: int, q: int, right: int, size: int, stored: int, warps: int, kind: Kind, pairs: bool
) -> tuple[Part, float, float] | None:
    """The fastest way for so many warps to make a step's sums, of numbers `stored` in so many bytes; a block's cycles of arithmetic, and
    of shared memory."""
    best, (products, split) = None, kind
    if products:
        if min(p, q) < 8 or (p % 2 if right == 1 else right % 4):
            return None
        least = 8 if right == 1 else 32
        kinds = [(f, c, 1) for f in (8, 16, 32, 64, 128) for c in (16, 32, 48, 64, 80) if f >= least and f * c <= 2048]
    else:
        kinds = [(f, c, n) for f in (8, 4, 2, 1) for c in (8, 4, 2, 1) for n in (32, 16, 8) if size == 4 or f * c <= 32]
    for f, c, lanes in kinds:
        part = Part((), f, c, lanes, 0)
        part = part._replace(padded=-(-q // part.wide) * part.wide)
        groups = part.padded // part.wide
        items = ceil(fibers / (f * lanes)) * groups
        if products and right == 1 and q % gcd(c // 8, 4):  # what a lane stores at once
            continue
        if items > warps or part.padded >= 2 * max(q, 9) or (c & (c - 1) and not q & (q - 1)):  # a Layout of powers of two cannot add 48
            continue
        if products:
            others = f / 8 + c / (8 if split else 16) + 6  # fetch
            if products == 3:  # add, split
                others += f * c / 32 / _depth(f, p) + f + (0 if split else c)
            issue = (f * c / 128 * products * MMA_CYCLES + others) / (16 if pairs else 8)
            waves = (f * _conflicts(p, right, stored, pairs) + (2 if split else 1) * c) / (64 if pairs else 32)
        else:
            loads = f / gcd(f, right if right > 1 else p, 16 // size) + c / gcd(c, 16 // size)
            issue, waves = f * c * size / 4 + loads + 1, (max(f * lanes, f * 8) + max(part.wide, 4 * c)) * size / 128
        high = _high(p, products, pairs)
        multiplied, fetched = high * ceil(items / 4) * issue, high * items * waves + fibers * q * size / 128
        cycles = max(multiplied, fetched) + 0.1 * (multiplied + fetched) + (0 if groups == 1 else BARRIER_CYCLES)
        rank = 2 * items <= warps, cycles  # where half of the warps are enough, another plan has half as many
        if best is None or rank < best[0]:
            best = rank, (part, multiplied, fetched)
    return best[1] if best else None


@functools.cache
def _conflicts(p: int, right: int, size: int, pairs: bool) -> float:
    """How often tensor cores' lanes that one access serves meet in a bank, where no Layout keeps them apart: Lanes4 in tensor.cuh."""
    if not (p & (p - 1) or right & (right - 1)):
        return 1.0
    one, pair = right == 1, 16 if right >= 32 else 8 if right >= 16 else 4
    width = size * ((4 if pairs else 2) if one else 4)  # bytes of a lane
    places = []
    for lane in range(32):
        g, t = divmod(lane, 4)
        if one:
            fiber, k = g, t * (4 if pairs else 2)
        else:
            h = g // 2
            fiber, k = g % 2 * pair + (4 * h if pair == 16 else h % 2 * 4 + h // 2 * 16 if pair == 8 else 8 * h), t * (2 if pairs else 1)
        places.append((fiber // right * p * right + fiber % right + k * right) * size // 4)
    together, most = 128 // width, []
    for first in range(0, 32, together):
        words = {n + i for n in places[first : first + together] for i in range(max(1, width // 4))}
        banks = [w % 32 for w in words]
        most.append(max(banks.count(b) for b in banks))
    return sum(most) / len(most)


def _high(p: int, products: int, pairs: bool) -> int:
    """Rows of a matrix in shared memory, with zeros beyond the last: high() in tensor.cuh."""
    at_once = 16 if pairs else 8 if products else 1
    return ceil(p / at_once) * at_once


def _depth(fibers: int, p: int) -> int:
    """Of how many times 8 numbers along k products are added to the sums at once: DEPTH in multiply4_tensor."""
    return 2 if p >= 64 and p % 16 == 0 and fibers <= 32 else 1


def _registers(part: Part, itemsize: int, products: int, p: int) -> int:
    """About how many a thread needs, beyond its sums: split numbers; on the FMA units numbers of 16 bits and what they are converted to."""
    sums = part.fibers * part.columns
    if products:
        return sums // 32 + 64 + (part.fibers // 2 * (_depth(part.fibers, p) + 1) if products == 3 else 0)
    return sums * max(itemsize, 4) // 4 + (96 if itemsize == 2 else 64)


def _layout(p: int, right: int, writer: Part | None, before: int, total: int, size: int, tensor: bool, pairs: bool) -> tuple[int, ...]:
    """Layout's arguments for an array of `total` numbers that a step of `p` and `right` reads, and `writer`, of right `before`, wrote."""
    v, q = 16 // size, right // before
    if any(n & (n - 1) for n in (p, right, q)) or total % (8 * v):
        return 3, 0, 3, 0, v
    read, written = (3, 0), (3, 0)
    if tensor:
        rows = (2 if pairs else 1) * right // v  # between the numbers of a fiber that neighbouring lanes read
        if right == 1:
            read = spread(0, p // v, 3) if size == 2 and not pairs else spread(1, p // v, 2)
        elif size == 2 and right >= 32:
            read, written = (_bits(rows), 1), (_bits(rows) - 1, 4)
        elif size == 2 or right < 16:
            read = spread(1, rows, 2)
        else:
            read = spread(0, rows, 3 if writer and before == 1 and right >= 32 else 2)
        if writer and before == 1 and right < 32:
            written = spread(1, 2 * q // v, 2)
        elif writer and before > 1:
            written = spread(2 if before >= 16 else 0, gcd(writer.columns // 8, 4) * before // v, 1)
    else:
        if right == 1 or right >= v:
            read = spread(_bits(right // v), p * right // v, 3)
        if writer and (before == 1 or before >= v):
            written = spread(_bits(before // v), q * before // v, 3)
    return (*read, *written, v)


def _bits(n: int) -> int:
    return max(n, 1).bit_length() - 1


def spread(low: int, distance: int, bits: int) -> tuple[int, int]:
    """The shift and the mask that bring the lowest bits of an index, whose numbers lie `distance` units apart, to a unit's bits from `low`
    on, of the lowest three; those below `low` tell other lanes apart."""
    at, bits = _bits(distance), min(bits, 3 - low)
    if at <= low:
        return 3, 0
    moved = bits - max(0, 3 - at)  # the others lie right as they are
    return max(at, 3) - low, ((1 << max(moved, 0)) - 1) << low


def text(*values: object) -> str:
    return ", ".join(str(v).lower() if isinstance(v, bool) else str(v) for v in values)
