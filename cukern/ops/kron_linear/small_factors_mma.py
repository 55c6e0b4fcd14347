"""Launches of kron_linear v4 of 16-bit numbers and small factors, on tensor cores: which bits of a number's index are where, step by step.

A tile has 2^n numbers, and each factor of the run is square, with 2, 4, 8 or 16 rows. See kernels_cu/kron_linear/small_factors.cuh.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise, permutations, product
from math import ceil, prod
from typing import NamedTuple

from cukern.ops.kron_linear.plan import ADDED, Launch, Problem, Step, instance, log2
from cukern.ops.kron_linear.small_factors import ALL, bits_of, tilings, turns

EACH = 6  # log2 of the elements of a tile per thread
LANES, PIECE = 5, 10  # bits of a lane's number; log2 of the elements that a warp holds at once
AT_ONCE = 3  # log2 of the elements in 16 bytes
SIDE = 4  # bits that a step multiplies along
PASSES, STEPS = 3, 3  # at most: passes of a launch, steps of a pass

Own = tuple[int, ...]  # numbers of bits
Bits = tuple[Own, tuple[int, ...]]  # the bits of a step's factors, and their sizes

START_US = 4.0  # the launch, and a block's start
STEP_CYCLES, MERGED_CYCLES, EXCHANGE_CYCLES, PLAIN_CYCLES = 6.0, 1.5, 5.0, 5.0  # per SM quadrant and 32 elements
ALONE = 1.12  # slowdown if an SM has one block, whose warps wait for each other


class Multiplied(NamedTuple):
    """One step: its factors, the bits of a register's number that it takes and leaves, and what the matrix's rows and columns are."""

    factors: tuple[int, ...]  # their sizes
    at: tuple[int, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def __str__(self) -> str:
        return instance("MmaStep", *self.at, bits_of(self.rows), bits_of(self.columns), *self.factors)


class Pass(NamedTuple):
    """Which bits of a number's index are those of a register's number and of a lane's, before and after; the others are the pieces'."""

    registers: tuple[int, ...]
    lanes: tuple[int, ...]
    registers_after: tuple[int, ...]
    lanes_after: tuple[int, ...]
    steps: tuple[Multiplied, ...]
    others: tuple[int, ...]

    def __str__(self) -> str:
        after = sorted(self.registers_after)
        order = [self.registers_after.index(b) for b in after]
        bits = [bits_of(b) for b in (self.registers, self.lanes, after, order, self.lanes_after, self.others)]
        return instance("MmaPass", self.before, self.after, *bits, *self.steps)

    @property
    def before(self) -> int:
        """Neighbours that a lane fetches at once."""
        return 1 << _near(self.registers)

    @property
    def after(self) -> int:
        return 1 << _near(self.registers_after)

    @property
    def run(self) -> int:
        """How many bits are those of lanes, of neighbours' neighbours: 1 for a sector of 32 bytes."""
        first = _near(self.registers_after)
        return next(i for i in range(PIECE) if first + i not in self.lanes_after) + (first - AT_ONCE)


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run of steps, of tiles of each size."""
    for top, cluster, L, R, tiles in tilings(run, rows, target, 2) if target.tensor else ():
        if not 1 < R < 1 << AT_ONCE:
            yield from _launch(run, target, top, cluster, L, R, tiles)


def _launch(run: Sequence[Step], target: Problem, top: int, cluster: int, L: int, R: int, tiles: int) -> Iterator[Launch]:
    parts, numbers = passes(tuple(s.p for s in run), log2(R), top, cluster), 1 << top
    shared = numbers * (6 if len(parts) > 1 else 2) + sum(len(p.steps) for p in parts) * 1024 + 16
    blocks = min(1 << ALL - top, (target.shared + 1024) // (shared + 1024))
    if not parts or not blocks:
        return
    stage = turns([[b for b in parts[0].lanes[: AT_ONCE + (parts[0].before < 8)] if b >= AT_ONCE]], 3, top)
    exchanges = turns([lanes[:3] for a, b in pairwise(parts) for lanes in (a.lanes_after, b.lanes)], 2, top)
    cross = log2(R * prod(s for step in parts[0].steps for s in step.factors)) - 1 if cluster > 1 else 0  # of _passes
    tile, threads = (L, prod(s.p for s in run), R, run[0].right), numbers >> EACH
    swizzles = instance("Turned", 3, *stage), instance("Turned", 2, *exchanges), bits_of(sorted(parts[0].registers + parts[0].lanes))
    us = _us(numbers, parts, blocks, tiles * cluster, target)
    plan = "MmaPlan", cluster, threads, blocks, *tile, cross, ADDED, *swizzles, *parts
    yield Launch("small_factors_mma", tuple(run), us, plan, threads, shared, L, R, blocks, cluster)


def _us(numbers: int, parts: Sequence[Pass], blocks: int, tiles: int, target: Problem) -> float:
    """A model of a launch's time."""
    cycles = PLAIN_CYCLES + (len(parts) - 1) * EXCHANGE_CYCLES
    cycles += sum(STEP_CYCLES + (MERGED_CYCLES if len(step.factors) > 1 else 0) for part in parts for step in part.steps)
    each, stream = ceil(tiles / target.device.sms), 2 * numbers / target.device.sm_bytes_us
    idle = max(1.0, 8 / (min(blocks, each) * (numbers >> EACH + LANES)))  # too few warps to keep an SM busy
    compute = numbers / 128 * cycles / target.device.cycles_us * idle * (ALONE if blocks == 1 else 1)
    return START_US + stream + compute + (each - 1) * max(compute, 2 * stream)


@functools.lru_cache(1024)
def passes(sizes: tuple[int, ...], low: int, top: int, cluster: int = 1) -> tuple[Pass, ...]:
    """The passes over a tile of 2^top elements, or twice as many in a cluster of two blocks. The rightmost factor has the bits from `low`
    on. The fewest passes are chosen, and among these the longest contiguous runs of results."""
    merged: list[Bits] = []
    for s in sizes:
        own, low = tuple(range(low, low + log2(s))), low + log2(s)
        before = merged.pop() if merged and len(merged[-1][0]) + len(own) <= SIDE else ((), ())
        merged.append((before[0] + own, (*before[1], s)))
    for count in range(1, PASSES + 1):
        cuts = [(0, *cut, len(merged)) for cut in combinations(range(1, len(merged)), count - 1)]
        found = [_passes([merged[a:b] for a, b in pairwise(cut)], top, cluster) for cut in cuts]
        if any(found):
            return max(filter(None, found), key=lambda parts: parts[-1].run)
    return ()


def _passes(pieces: Sequence[Sequence[Bits]], top: int, cluster: int) -> tuple[Pass, ...]:
    """The passes whose steps are given, if there are any. In a cluster the two blocks exchange the bit `cross` after the first pass, the
    highest bit of that pass's factors, and a register's number must have it. Before the exchange a block's rank is the bit `top`. After it
    the rank is the bit `cross`, and the bit `top` has its place in the block."""
    cross, within = pieces[0][-1][0][-1], pieces[-1][-1][0][-1] + 1  # `within`: the number of bits of a row; zeros may fill it up
    if max(map(len, pieces)) > STEPS or (cluster > 1 and (len(pieces) == 1 or cross >= top)):
        return ()
    made: list[Pass] = []
    for piece in pieces:
        steps, last = [(tuple(b if b < top else cross for b in own), sizes) for own, sizes in piece], piece is pieces[-1]
        found = (last and _pass(steps, within, top, AT_ONCE, last)) or _pass(steps, within, top, 2, last)
        if found is None:
            return ()
        made.append(found)
    return tuple(made) if cluster == 1 or cross in made[0].registers_after else ()


def _pass(steps: Sequence[Bits], within: int, top: int, near: int, last: bool) -> Pass | None:
    """A pass that leaves 2^near neighbours in a lane, if there is one. Each step takes four bits, two of them lane bits t; leaves three in
    lane bits g and one in a register's number; and n, that was in g, in a register's number and in t. Of the last pass neighbours in
    memory are in lanes."""
    best = None
    for along, lanes, bits in _starts([bits for bits, _ in steps], within, top, near):
        registers = tuple(sorted(bits - set(lanes)))
        if done := _walk(registers, lanes, along, steps, near):
            made = Pass(registers, lanes, *done, tuple([b for b in range(top) if b not in bits]))
            if not last or made.run > 1:
                return made
            best = made if made.run and (not best or best.run < made.run) else best
    return best


def _starts(steps: Sequence[Own], within: int, top: int, near: int) -> Iterator[tuple[tuple[Own, ...], Own, set[int]]]:
    """The bits along which each step may multiply, those of lanes before the first step, and all that a warp has at once."""
    for along in _along(steps, [b for b in range(near, min(within, 8))]):
        t = tuple(b for b in along[0] if b > 1 or 0 not in along[0])[:2]
        for g in _columns(along, top):
            bits = {0, 1, 2, *t, *g}.union(*along)
            bits |= set([b for b in range(top) if b not in bits][: max(0, PIECE - len(bits))])
            if len({*t, *g}) == LANES and len(bits) <= PIECE:
                yield along, (*t, *g), bits


def _columns(along: Sequence[Own], top: int) -> Iterator[tuple[int, int, int]]:
    """The bits that lane bits g may have before the first step."""
    after = [b for b in (along[1] if len(along) > 1 else range(3, top)) if b not in along[0]]
    for g12 in combinations(after[:4], 2):
        for g0 in [b for b in dict.fromkeys([*after, *range(3, top)]) if b not in along[0] and b not in g12][:3]:
            yield g0, *g12


def _along(bits: Sequence[Own], beside: Sequence[int]) -> Iterator[tuple[Own, ...]]:
    """The bits that each step multiplies along: its factors', and others of the row."""
    used = [b for own in bits for b in own]
    options = []
    for own in bits:
        need, free = SIDE - len(own), [b for b in beside if b not in used]
        options.append([(*own, *more) for more in combinations([*free[:3], *[b for b in used if b not in own]], need)])
    for along in product(*options):
        of_t = all(len({*a} & {*b}) >= 2 for a, b in zip(along, along[2:], strict=False))  # of these come that step's t
        if of_t and len({0, 1, 2}.union(*along)) <= PIECE and (1 in along[0] or 0 not in along[0]):
            yield along


def _walk(
    registers: Own, lanes: Own, bits: Sequence[Own], steps: Sequence[Bits], near: int
) -> tuple[Own, Own, tuple[Multiplied, ...]] | None:
    """Where all bits are after the steps, and the steps, if it can be done."""
    if not steps:
        return (registers, lanes, ()) if _near(registers) >= near else None
    own, (t, g) = bits[0], (lanes[:2], lanes[2:])
    inner = sorted(set(own) - set(t))
    if not set(t) <= set(own) or not set(inner) <= set(registers):
        return None
    a, b = (registers.index(i) for i in inner)
    for kept, next_ in permutations(sorted(own, key=lambda i: (i > 2, i if i < 3 else -i)), 2):  # in a register: 0, 1, 2, else the highest
        rest = sorted(set(own) - {kept, next_})
        for new in ((next_, *rest), (next_, *rest[::-1])):
            moved = list(registers)
            moved[a], moved[b] = g[0], kept
            if done := _walk(tuple(moved), (*g[1:], *new), bits[1:], steps[1:], near):
                row, column = ([own.index(i) for i in side] for side in ((registers[a], *t, registers[b]), (*new, kept)))
                return done[0], done[1], (Multiplied(steps[0][1], (a, b), tuple(row), tuple(column)), *done[2])
    return None


def _near(registers: Sequence[int]) -> int:
    """The lowest bits that are those of a register's number, 3 at most."""
    return next((i for i in range(AT_ONCE) if i not in registers), AT_ONCE)
