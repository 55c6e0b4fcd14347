"""Launches of kron_linear v4 whose tiles fit into registers: which bits of a number's index are a thread's own in each pass.

A tile has 2^n numbers, and each factor of the run is square, with 2, 4, 8 or 16 rows. See kernels_cu/kron_linear/small_factors.cuh.
"""

from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import NamedTuple

from cukern.ops.kron_linear.plan import ADDED, Launch, Problem, Step, instance, log2, merged, up

SIZES = (2, 2), (4, 4), (8, 8), (16, 16)  # for larger factors, split products on tensor cores are exact enough, and faster
LEAST, ALL = 13, 15  # log2 of the elements of a block's tile: an SM holds 2^15; smaller tiles cost too many starts
HELD = 7  # index bits that differ among the elements of a thread
LANES = 5
SUMS = 32  # as in small_factors.cuh
WHOLE_BLOCK = 256  # threads of 255 registers: the register file of an SM
LEAST_SHARED = 200 << 10  # bytes; only GPUs with clusters have this much
LEAST_RUN = 128  # contiguous bytes in global memory, at least

BOOST = 1980 / 1750  # clock / clock under load: the clock is higher without tensor cores
START_US = 4.0  # the launch, and a block's start
EXPOSED = 0.05  # part of the shorter of compute and memory time that is not hidden
FMA_CYCLES = 1.5  # per cycle of the FMA units; includes loads, exchanges and barriers


class Pass(NamedTuple):
    """`held`: index bits that the registers of one thread cover; `threads`: those that the thread number gives. The rest as in Pass of
    small_factors.cuh."""

    factors: tuple[Step, ...]
    held: tuple[int, ...]
    threads: tuple[int, ...]
    right: int
    vector: int
    exchanging: int = 32

    def __str__(self) -> str:
        sizes = [s.p for s in self.factors]
        return instance("Pass", bits_of(self.held), bits_of(self.threads), self.vector, self.right, self.exchanging, *sizes)


def forward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run of steps, of tiles of each size."""
    for top, cluster, L, R, tiles in tilings(run, rows, target, 4):
        threads = 1 << top - HELD
        if tiles * cluster * threads > target.device.sms * WHOLE_BLOCK:  # otherwise there is no next tile to prefetch
            yield from _launch(run, target, threads, cluster, L, R, tiles)


def tilings(run: Sequence[Step], rows: int, target: Problem, itemsize: int) -> Iterator[tuple[int, int, int, int, int]]:
    """The tiles of the kernels of small_factors.cuh for elements of `itemsize` bytes, if they take these factors: log2 of the elements of a
    block; the blocks that share a tile; L and R; and how many tiles there are."""
    fits = target.itemsize == itemsize and target.aligned >= 16 and target.shared >= LEAST_SHARED
    if not fits or any((s.p, s.q) not in SIZES for s in run):
        return
    C, bits = run[0].right, sum(log2(s.p) for s in run)
    for top, cluster in (*((top, 1) for top in range(LEAST, ALL + 1)), (ALL, 2)):
        others = top + cluster - 1 - bits  # log2 of the elements of a tile besides the factors' own
        if others >= 0:
            R = min(1 << others, C & -C)
            L = (1 << others) // R
            if (R == C and (L == 1 or cluster == 1)) or (L == 1 and R * itemsize >= LEAST_RUN):
                yield top, cluster, L, R, ceil(rows * run[-1].left / L) * (C // R)


def _launch(run: Sequence[Step], target: Problem, threads: int, cluster: int, L: int, R: int, tiles: int) -> Iterator[Launch]:
    cut, top = merged(run, 1 << HELD), HELD + log2(threads)
    if len(cut) < 2:
        return
    cross = log2(R * prod(s.p for piece in cut[:-1] for s in piece)) - 1
    parts = _passes(cut, log2(R), top, cross if cluster > 1 else -1)
    weights, numbers, warps = 4 * up(sum(s.p**2 for s in run), 32), threads << HELD, threads // 32
    blocks, own = WHOLE_BLOCK // threads, target.itemsize * numbers // warps  # bytes of a warp
    room = (target.shared + 1024) // blocks - 1024 - weights - 4 * numbers
    together = warps  # of which the numbers lie one after another: those whose bits above are the same
    for bit, highest in zip(reversed(parts[0].threads[LANES:]), reversed(range(top)), strict=False):
        if bit != highest:
            break
        together //= 2
    ahead = min(warps, room // own // together * together)
    if ahead < 1 or (cluster > 1 and parts[-2].vector < 4):  # 16-byte stores to the other block
        return
    us = _us(run, len(cut), numbers, ceil(tiles * cluster / target.device.sms), target)
    shared = weights + 4 * numbers + ahead * own
    vectors = [part.threads[:3] for part in parts if part.vector == 4]
    tile, turned = (L, prod(s.p for s in run), R, run[0].right), instance("Turned", 2, *turns(vectors, 2, top))
    copied = bits_of(sorted((*parts[0].held, *parts[0].threads[:LANES])))
    plan = "RegisterPlan", cluster, 1 << HELD, threads, blocks, *tile, ahead, cross, ADDED, turned, copied, *parts
    yield Launch("small_factors", tuple(run), us, plan, threads, shared, L, R, blocks, cluster)


def _passes(cut: Sequence[tuple[Step, ...]], low: int, top: int, cross: int) -> list[Pass]:
    """The passes over an array of 2^top elements per thread block. `low`: the lowest index bit of the first factor. `cross` >= 0: before
    the last pass, the two blocks of a cluster exchange elements; its index gains the bit `top` and loses the bit `cross`."""
    parts: list[Pass] = []
    for n, piece in enumerate(cut):
        moved = cross >= 0 and n == len(cut) - 1
        bits = [b for b in range(top + moved) if b != cross or not moved]
        high = low + log2(prod(s.p for s in piece))
        held, threads = _held(bits, low, high)
        right, low = 1 << sum(b < low for b in held), high
        together = max(1, SUMS * piece[-1].p >> HELD)  # columns of the last factor that are stored at a time
        near = next((i for i, b in enumerate(held) if b != i), HELD)
        vector = min(4, 1 << near, right * prod(s.p for s in piece[:-1]) * together)
        held, threads = (tuple(cross if b == top else b for b in own) for own in (held, threads))  # the other block's bit
        parts.append(Pass(piece, held, threads, right, vector))
    return [a._replace(exchanging=_exchanging(a, b)) for a, b in zip(parts, [*parts[1:], parts[-1]], strict=True)]


def _exchanging(a: Pass, b: Pass) -> int:
    """How many threads exchange numbers between two passes."""
    other = next((i for i in reversed(range(len(a.threads))) if a.threads[i] != b.threads[i]), -1)
    return 1 << max(other + 1, LANES)


def _us(run: Sequence[Step], passes: int, numbers: int, each: int, target: Problem) -> float:
    """A model of a launch's time, for `each` tiles per SM."""
    stream = target.itemsize * numbers / target.device.sm_bytes_us
    compute = numbers / 128 * (sum(s.p for s in run) * FMA_CYCLES + passes) / (BOOST * target.device.cycles_us)
    return START_US + 2 * stream + each * (max(compute, 2 * stream) + EXPOSED * min(compute, 2 * stream))


def _held(bits: list[int], low: int, high: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which bits a thread holds: those of the pass's factors, from low to high, and those of neighbours, so that 16 bytes move at once.
    The lowest of the others are the lanes'; if there is room for more, it holds those above these."""
    held = [b for b in bits if low <= b < high]
    held += [b for b in bits[:2] if b not in held][: HELD - len(held)]
    others = [b for b in bits if b not in held]
    lanes, others = others[:LANES], others[LANES:]
    more = HELD - len(held)
    return tuple(sorted(held + others[:more])), tuple(lanes + others[more:])


def turns(accesses: Sequence[Sequence[int]], unit: int, top: int) -> tuple[int, ...]:
    """By what each bit of a place above its unit of 2^unit numbers, and eight units, turns the unit, so that the lanes of an access, which
    differ in some bits, meet different banks."""
    first = unit + 3
    found = dict.fromkeys(range(first, top), 0)
    for bits in accesses:
        met = {0}
        for bit in sorted(bits):
            if bit >= first and not found[bit]:
                found[bit] = next((t for t in (1, 2, 4, 3, 5, 6, 7) if t not in met), 0)
            turn = found[bit] if bit >= first else 1 << bit >> unit
            met |= {m ^ turn for m in met}
    return tuple(found.values())


def bits_of(bits: Sequence[int]) -> str:
    return instance("Bits", *bits)
