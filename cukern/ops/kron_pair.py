"""How kron_linear v4 cuts the backward of one or two large factors into tiles: see Pair4 in kron_pair.cuh."""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import NamedTuple

from cukern.ops.kron_groups import LAUNCH_US, SM_BYTES_US, Target, text
from cukern.ops.kron_plan import Step

_CLUSTERS = 200 << 10  # bytes of a block's shared memory: a GPU that has more has clusters
_THREADS = 256  # of a team
_LARGEST = 128 * 128  # numbers of a factor, whose sums the threads keep
_MULTIPLY_ADDS_US = 230_000.0  # of a multiprocessor, of float
_TILE_US = 0.3  # from a tile to the next


class Pair(NamedTuple):
    """One launch; `sums`: how many partial sums of the gradients there are."""

    us: float
    template: str
    blocks: int
    threads: int
    shared: int  # bytes
    sums: int


def large(run: Sequence[Step], rows: int, target: Target) -> Pair | None:
    """The launch of one step of float, or of two with nothing to their right: two teams a block, else one, whichever fits first. (Of
    16-bit numbers, which are not split, those of kron_backward.py are faster.)"""
    if len(run) > 2 or (len(run) == 2 and run[0].right > 1) or target.itemsize != 4 or target.tensor:
        return None
    found = (p for teams in (2, 1) for p in _tiling(run, rows, target, teams, 1, run[-1].q, 32 * teams))
    return next(found, None)


def _tiling(run: Sequence[Step], rows: int, target: Target, teams: int, slices: int, chunk: int, tile: int) -> Iterator[Pair]:
    """One launch, if its parts are equal and fit. A step alone is the right factor, if nothing is to its right, else the left one; `tile`:
    the rows, or what is to its right, that a tile has."""
    C, A = run[0].right, rows * run[-1].left
    right, left = run[0] if C == 1 else None, run[-1] if C > 1 or len(run) == 2 else None
    (p1, q1), (p2, q2) = ((f.p, f.q) if f else (tile, tile) for f in (left, right))
    high, chunk = p1 // slices, chunk if left else 1
    if p1 % slices or q1 % chunk or (A if left is None else C if right is None else tile) % tile or max(p1 * q1, p2 * q2) > _LARGEST:
        return
    numbers, vector, every = 3 if target.itemsize == 4 else 1, 16 // target.itemsize, teams * _THREADS
    products = [(high, q2, False), (high, chunk, True)] * bool(left) + [(p2, q2, True), (high, p2, False)] * bool(right)
    moved = [
        (_THREADS, high, p2),
        (_THREADS, chunk if left else high, q2),
        *[(every, high, q1)] * bool(left),
        *[(every, p2, q2)] * bool(right),
    ]
    if any(rows * columns % (t * vector) or t * vector % columns for t, rows, columns in moved):
        return
    if not all(_equal(*p) for p in products) or target.aligned < 16:
        return
    sums1, sums2 = p1 * q1 * bool(left), p2 * q2 * bool(right)
    factors = (high * (q1 + 8) if left else 0) + (p2 * (q2 + 8) if right else 0)
    arrays = high * (q2 + 8) + (chunk * (q2 + 8) if left else 0) + (high * (p2 + 8) if right else 0)
    shared = max((factors + teams * arrays) * numbers * 2, (sums1 // slices + sums2) * 4)
    if shared > target.shared or target.shared < _CLUSTERS:
        return
    tiles = A * (C // tile if right is None else 1) // (tile if left is None else 1)
    pieces = min(ceil(tiles / teams), target.multiprocessors // slices)
    work = high * q2 * (2 * q1 * bool(left) + 2 * p2 * bool(right) + p2 * bool(left and right))
    us = 2 * LAUNCH_US + ceil(tiles / pieces / teams) * teams * (work / _MULTIPLY_ADDS_US + _TILE_US)
    us += (factors * target.itemsize + 8 * (sums1 + sums2)) / SM_BYTES_US
    names = [f"Merged<Factor<{f.p}, {f.q}>>" if f else "Merged<>" for f in (left, right)]
    yield Pair(us, f"Pair4<{text(teams, _THREADS, slices, chunk, tile, tile, C, *names)}>", pieces * slices, every, shared, pieces)


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
