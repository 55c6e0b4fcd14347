"""How kron_linear v4 cuts the backward of two large factors of few rows into tiles: see Pair4 in kron_pair.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil

from cukern.ops.kron_groups import LAUNCH_US, SM_BYTES_US, Target, text
from cukern.ops.kron_plan import Pair, Step

_CLUSTERS = 200 << 10  # bytes of a block's shared memory: a GPU that has more has clusters
_THREADS = 256
_LARGEST = 128 * 128  # numbers of a factor, whose sums the threads keep
_TALL = 128  # rows of a left factor that several blocks share
_MULTIPLY_ADDS_US = 230_000.0  # of a multiprocessor, of float
_TILE_US = 0.3  # from a tile to the next


def few(run: Sequence[Step], rows: int, target: Target) -> Pair | None:
    """The launch of the two steps of a layer of so few rows that each has a cluster of blocks to itself. (32 rows and 128 x 128 factors, of
    float: two arrays of x besides the inputs and the results, where the launches of one factor each take five.)"""
    if (
        len(run) != 2
        or run[-1].left > 1
        or run[0].right > 1
        or run[1].p < _TALL
        or target.itemsize > 4
        or (target.itemsize == 4 and target.tensor)
    ):
        return None
    cuts = ((slices, chunk) for slices in (2, 4) if rows * slices <= target.multiprocessors for chunk in (128, 64, 32))
    return next((p for slices, chunk in cuts for p in _tiling(run, rows, target, slices, chunk)), None)


def _tiling(run: Sequence[Step], rows: int, target: Target, slices: int, chunk: int) -> Iterator[Pair]:
    """One launch, if its parts are equal and fit."""
    (p2, q2), (p1, q1) = ((s.p, s.q) for s in run)
    high = p1 // slices
    if p1 % slices or q1 % chunk or max(p1 * q1, p2 * q2) > _LARGEST or target.aligned < 16:
        return
    numbers, vector = 3 if target.itemsize == 4 else 1, 16 // target.itemsize
    products = [(high, q2, False), (high, chunk, True), (p2, q2, True), (high, p2, False)]
    moved = [(high, p2), (chunk, q2), (high, q1), (p2, q2)]
    if any(m * n % (_THREADS * vector) or _THREADS * vector % n for m, n in moved) or not all(_equal(*p) for p in products):
        return
    factors = high * (q1 + 8) + p2 * (q2 + 8)
    arrays = high * (q2 + 8) + chunk * (q2 + 8) + high * (p2 + 8)
    shared = max((factors + arrays) * numbers * 2, (p1 * q1 // slices + p2 * q2) * 4)
    if shared > target.shared or target.shared < _CLUSTERS:
        return
    pieces = min(rows, target.multiprocessors // slices)
    work = high * q2 * (2 * q1 + 3 * p2)
    us = 2 * LAUNCH_US + ceil(rows / pieces) * (work / _MULTIPLY_ADDS_US + _TILE_US)
    us += (factors * target.itemsize + 8 * (p1 * q1 + p2 * q2)) / SM_BYTES_US
    names = [f"Merged<Factor<{f.p}, {f.q}>>" for f in reversed(run)]
    yield Pair(us, f"Pair4<{text(_THREADS, slices, chunk, *names)}>", pieces * slices, _THREADS, shared, pieces)


def _equal(m: int, n: int, kept: bool) -> bool:
    """Whether Share of kron_pair.cuh is one without remainder."""
    times = 2048 // (m * n) if kept and m * n < 2048 else 1
    tiles = m * n * times // 1024
    high = 2 if tiles >= 4 else 1
    wide = min(tiles // high, 4)
    if not wide or wide % 2 or m % (16 * high) or tiles % (high * wide):
        return False
    across, down = n // (wide * tiles // (high * wide) * 8), m // (16 * high)
    return across * down * times == _THREADS // 32
