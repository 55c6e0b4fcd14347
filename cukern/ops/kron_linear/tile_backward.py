"""The candidate for the backward of any factors: one or two, or merged tiny ones, in a launch. And the
gradient of one factor alone.

See tile_backward.cuh.
"""

import functools
from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, gcd, prod
from typing import NamedTuple

from cukern.ops.kron_linear import cublas
from cukern.ops.kron_linear.plan import LAUNCH_US, Launch, Problem, Step, blocks_of, instance, up
from cukern.runtime.device import allowed

_LARGEST = 128 * 128  # accumulators of a factor's gradient, at most
_LARGE = 64 * 64  # above this, more threads share the accumulators
# accumulators per thread, at most: one factor; two factors without splitting
_SUMS = 80
_SUMS_OF_TWO = 120
_UNEVEN = 20  # blocks of 16 x 8 of them: MOST of Sums in tile_backward.cuh
_MERGED = {True: 16, False: 64}  # rows and columns of merged factors, at most, by whether numbers are split
_TOGETHER = 4  # factors of such a product, at most
_MULTIPLY_ADDS_US = {True: 320_000.0, False: 900_000.0}  # per SM, by whether numbers are split
_WAITING = 0.4  # part of the shorter of compute and memory time that is not hidden
_ALONE = 0.4  # slowdown if an SM has one block: its warps wait for each other
# slowdown of 16-bit types per part of shared memory in use above _FULL
_CROWDED = 2.0
_FULL = 0.7
_SHALLOW = 0.7  # time / usual time of tiles of at most 64 rows or columns, for one large 16-bit factor
# By how much sizes other than 8, 16, 32, .. take longer: of a right factor, a left one, both; by the bytes of
# a number, and if it is split.
_LONGER = {(2, False): (1.0, 1.1, 1.1), (4, False): (1.05, 1.25, 1.4), (4, True): (1.0, 1.2, 1.3)}
_COPIES_US = 5000.0  # copies of less than 16 bytes, per SM
_TILE_US = 0.3  # from a tile to the next, if an SM has one block

# The left factor and the right one, each of one or more: the rightmost first.
Pieces = tuple[tuple[Step, ...], tuple[Step, ...]]

# of Gradient4
_STAGE = 32 << 10  # bytes of a chunk
MOST_SUMS = 128  # rows and columns of a block's tile

_GRADIENT_US = {2: 757_000.0, 4: 333_000.0}  # multiply-adds per SM, by the bytes of an element
_WAITING_OF_ONE = 0.5  # part of the shorter of compute and memory time that is not hidden


def backward(run: Sequence[Step], rows: int, target: Problem) -> Iterator[Launch]:
    """The launches of a run."""
    if target.itemsize <= 4:
        for pieces in _pieces(tuple(run), target.strict):
            yield from _tilings(pieces, rows, target)


def _pieces(run: tuple[Step, ...], split: bool) -> Iterator[Pieces]:
    """The ways to cut a run into a right factor and a left one, or to take it as one of them."""
    alone: Pieces = ((), run) if run[0].right == 1 else (run, ())
    for pieces in (alone, *((run[n:], run[:n]) for n in range(1, len(run)))):
        if all(_fits(*_size(piece), len(piece), _MERGED[split]) for piece in pieces if piece):
            yield pieces


def _fits(p: int, q: int, factors: int, most: int) -> bool:
    return up(p, 8) * up(q, 8) <= _LARGEST if factors == 1 else max(p, q) <= most and factors <= _TOGETHER


def _size(piece: Sequence[Step]) -> tuple[int, int]:
    return prod(s.p for s in piece), prod(s.q for s in piece)


def _tiles(C: int, left: bool) -> list[tuple[int, int]]:
    """L and R of the tiles."""
    powers = [1 << n for n in range(8)]
    if C == 1:
        return [(L, 1) for L in powers if left or L >= 8]
    if C % 8:
        columns = sorted({up(ceil(C / n), 8) for n in range(ceil(C / 256), ceil(C / 8) + 1)})
    else:
        columns = [R for R in range(8, min(C, 257), 8) if C % R == 0]
    return [(1, R) for R in columns] + [(L, up(C, 8)) for L in powers[1:] if C <= 16]


class _Shape(NamedTuple):
    """The sizes of a tile's two factors, 1 if there is none, and the same in shared memory."""

    left: bool
    right: bool
    p1: int
    q1: int
    p2: int
    q2: int
    h1: int
    k1: int
    h2: int
    k2: int

    @property
    def large(self) -> bool:
        return max(self.p1 * self.q1, self.p2 * self.q2) > _LARGE

    @property
    def sums(self) -> int:
        return self.left * self.p1 * self.q1 + self.right * self.p2 * self.q2

    @property
    def matrices(self) -> int:
        return self.left * self.k1 * padded(self.h1) + self.right * self.h2 * padded(self.k2)

    def shared(self, L: int, R: int, stages: int, itemsize: int) -> int:
        """Bytes of shared memory."""
        s2 = 1 if R == 1 else padded(R)
        sx = padded(self.h2 * s2)
        sg = padded(self.k2 * s2)
        between = 2 * L * self.h1 * sg * (self.left and self.right)
        tiles = (stages * L * (self.h1 * sx + self.k1 * sg) + between) * itemsize
        return self.matrices * itemsize + max(tiles, self.sums * 4)

    def kept(self, warps: int) -> int:
        """Sums that a thread keeps."""
        left = self.left * _share(self.h1, self.k1, warps)
        return 4 * (left + self.right * _share(self.h2, self.k2, warps))

    def multiply_adds(self) -> int:
        """For one row and column of a tile."""
        of_left = 2 * self.k2 * up(self.h1, 16) * self.k1
        return self.left * of_left + self.right * (3 if self.left else 2) * self.h1 * self.h2 * self.k2


def _shape(pieces: Pieces) -> _Shape:
    (p1, q1), (p2, q2) = sizes = [_size(piece) for piece in pieces]
    high = [up(n, 8) if piece else 1 for piece, size in zip(pieces, sizes, strict=True) for n in size]
    return _Shape(bool(pieces[0]), bool(pieces[1]), p1, q1, p2, q2, *high)


def _tilings(pieces: Pieces, rows: int, target: Problem) -> Iterator[Launch]:
    run = (*pieces[1], *pieces[0])
    shape = _shape(pieces)
    split = target.strict
    size = target.itemsize
    sms = target.device.sms
    A = rows * run[-1].left
    C = run[0].right
    p = shape.p1 * shape.p2
    q = shape.q1 * shape.q2
    options = (256, 512) if shape.large else (256, 128)
    for (L, R), threads, stages in product(_tiles(C, shape.left), options, (1, 2)):
        shared = shape.shared(L, R, stages, size)
        kept = shape.kept(threads // 32)
        registers = kept + (96 if split else 64)
        resident = min(target.shared // (shared + 1024), 65536 // (threads * registers), 2048 // threads)
        if not resident or kept > (_SUMS_OF_TWO if shape.left and shape.right and not split else _SUMS):
            continue
        tiles = ceil(A / L) * ceil(C / R)
        bytes_ = gcd(16, target.aligned, (gcd(p, q, shape.p2, shape.q2) if R == 1 else gcd(C, R)) * size)
        blocks = blocks_of(tiles, sms * resident, A * p * C * size, shape.sums, sms)
        resident = ceil(blocks / sms)
        merged = [instance("Merged", *piece) for piece in pieces]
        plan = "Backward4", threads, resident, split, bytes_, stages, L, R, C, *merged
        each = _us_of_tile(shape, C, (L, R, stages), resident, shared, bytes_, target)
        loaded = (shape.matrices * size + shape.sums * 8) * resident / target.device.sm_bytes_us
        us = 2 * LAUNCH_US + ceil(tiles / blocks) * resident * each + loaded
        yield Launch("tile", run, us, plan, threads, shared, L, R, resident)


def _us_of_tile(
    shape: _Shape, C: int, tile: tuple[int, int, int], resident: int, shared: int, bytes_: int,
    target: Problem,
) -> float:  # fmt: skip
    """A model of the time of a tile (L, R, stages) on an SM with `resident` blocks."""
    L, R, stages = tile
    split = target.strict
    size = target.itemsize
    coarse = 1 if R == 1 or R >= C else max(1, 64 / (R * size))
    numbers = L * R * (2 * shape.p1 * shape.p2 + shape.q1 * shape.q2)
    moved = numbers * size * coarse / target.device.sm_bytes_us
    copies = numbers * (size / bytes_ - size / 16) / _COPIES_US
    multiplied = L * R * shape.multiply_adds() / _MULTIPLY_ADDS_US[split] + copies
    alone = _WAITING if stages == 2 else _WAITING + (1 - _WAITING) / resident
    each = max(multiplied, moved) + alone * min(multiplied, moved) + _TILE_US / resident
    crowded = 0.0 if split else _CROWDED * max(0.0, resident * shared / target.shared - _FULL)
    each *= (1 + _ALONE / resident) * (1 + crowded)
    return each * _slower(shape, C, L * R, target)


def _slower(shape: _Shape, C: int, numbers: int, target: Problem) -> float:
    """How much longer a tile takes than that of a layer of powers of two."""
    size = target.itemsize
    pair = shape.left and shape.right
    uneven = any(n & n - 1 or 1 < n < 8 for n in (*shape[2:6], C))
    longer = _LONGER[size, target.strict][2 if pair else 1 if shape.left else 0] if uneven else 1.0
    shallow = size == 2 and numbers <= 64 and shape.large and not (shape.left and (pair or uneven))
    return longer * (_SHALLOW if shallow else 1.0)


def padded(n: int) -> int:
    """As in tile_backward.cuh."""
    return (n + 7) // 16 * 16 + 8


def _share(m: int, n: int, warps: int) -> int:
    """How many 16 x 8 sums of a gradient a warp keeps: Sums of tile_backward.cuh."""
    rows = ceil(m / 16)
    columns = ceil(n / 8)
    used = 1
    while rows * columns > 4 and 2 * used <= warps:
        if rows % 2 and columns % 2 and rows * columns <= _UNEVEN:
            break
        if 2 * rows >= columns if rows % 2 == columns % 2 else rows % 2 == 0:
            rows = ceil(rows / 2)
        else:
            columns = ceil(columns / 2)
        used *= 2
    return rows * columns


@functools.lru_cache(512)
def gradient(A: int, p: int, q: int, C: int, target: Problem) -> Launch | None:
    """The launch for z [A][p][C] and h [A][q][C], on tensor cores. `slices` blocks share a chunk."""
    if not target.tensor or min(p, q) < 8:
        return None
    itemsize = target.itemsize
    threads = 256
    K, J = (ceil(n / ceil(n / MOST_SUMS)) for n in (p, q))  # for the fewest tiles
    K, J = (up(n, 8) if n <= 64 else up(n, 16) for n in (K, J))  # so that warps share large tiles evenly
    fibers = max(_STAGE // ((K + J) * itemsize), 16)
    R = 1 if C == 1 else up(ceil(C / ceil(C / fibers)), 8)
    L = fibers // 16 * 16 if C == 1 else max(1, fibers // R)
    bytes_ = gcd(16, target.aligned, (gcd(p, q, K, J) if C == 1 else gcd(C, R)) * itemsize)
    chunks = ceil(A / L) * ceil(C / R)
    tiles = ceil(p / K) * ceil(q / J)
    stages = 2 * sum(L * padded(n) if C == 1 else n * padded(L * R) for n in (K, J)) * itemsize
    shared = max(stages, K * J * 4)
    resident = max(1, min(target.shared // (shared + 1024), 512 // threads))
    busy = min(target.device.sms, min(chunks, max(1, target.device.sms * resident // tiles)) * tiles)  # SMs
    copies = A * C * (p + q) * (itemsize / bytes_ - itemsize / 16) / _COPIES_US
    moved = A * C * (p + q) * itemsize / target.device.sm_bytes_us
    multiplied = chunks * L * R * K * J * tiles / _GRADIENT_US[itemsize]
    us = 4 * LAUNCH_US + (max(moved, multiplied) + _WAITING_OF_ONE * min(moved, multiplied) + copies) / busy
    template = instance("Gradient4", threads, L, R, bytes_, p, q, K, J)
    return Launch("gradient", (Step(0, 1, p, q, C),), us, (template,), threads, shared, L, R, resident, tiles)


def gradient_of(A: int, p: int, q: int, C: int, target: Problem) -> Launch:
    """The launch that makes a factor's gradient. Our kernel reads z and h again for each of its tiles."""
    ours = gradient(A, p, q, C, target)
    theirs = cublas.us_of_gradient(A, p, q, C, target)
    several = allowed("cublas") and max(p, q) > MOST_SUMS
    if not ours or (several and (C == 1 or cublas.MARGIN * theirs < ours.us)):
        return Launch("cublas", (Step(0, 1, p, q, C),), theirs)
    return ours
