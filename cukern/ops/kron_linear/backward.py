"""How kron_linear v4 groups the factors for the backward, and cuts each launch's work into tiles: see Backward4 in backward.cuh."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import ceil, gcd, prod

from cukern.ops.kron_linear import cublas, quarter
from cukern.ops.kron_linear import groups as kron_groups
from cukern.ops.kron_linear import split as kron_split
from cukern.ops.kron_linear.gradients import gradient
from cukern.ops.kron_linear.groups import LAUNCH_US, text
from cukern.ops.kron_linear.plan import Backward, Problem, Sizes, Step, least_us, steps
from cukern.runtime.device import cached, eligible

_LARGEST = 128 * 128  # sums of a factor's gradient
_LARGE = 64 * 64  # of which more threads share out the sums
_SUMS, _SUMS_OF_TWO = 80, 120  # that a thread keeps, at most; of two factors in one sweep, if numbers are not split, which takes registers
_UNEVEN = 20  # blocks of 16 x 8 of them: MOST of Sums in backward.cuh
_MERGED = {True: 16, False: 64}  # rows and columns of a product of merged factors, at most: of float, on FMA units, or not
_TOGETHER = 4  # factors of such a product, at most
_MULTIPLY_ADDS_US = {True: 320_000.0, False: 900_000.0}  # of a multiprocessor, of split numbers or not
_WAITING = 0.4  # of the shorter of multiplying and moving, for the rest of which the other goes on
_ALONE = 0.4  # how much longer a multiprocessor's one block takes: while its warps wait for each other nobody else works
_CROWDED, _FULL = 2.0, 0.7  # 16-bit numbers are slower the more of shared memory, beyond a part of it, is in use
_SHALLOW = 0.7  # of the time, that tiles of at most 64 rows or columns take of one large factor of 16 bits
# By how much sizes other than 8, 16, 32, .. take longer: of a right factor, a left one, both; by the bytes of a number, and if it is split.
_LONGER = {(2, False): (1.0, 1.1, 1.1), (4, False): (1.05, 1.25, 1.4), (4, True): (1.0, 1.2, 1.3)}
_COPIES_US = 5000.0  # of a multiprocessor, of a few bytes each instead of 16
_TILE_US = 0.3  # from a tile to the next, for the one block of a multiprocessor

Pieces = tuple[tuple[Step, ...], tuple[Step, ...]]  # the left factor and the right one, each of one or more: the rightmost first


@cached(512)
def backwards(sizes: Sizes, rows: int, target: Problem) -> tuple[Backward, ...]:
    """The launches of a layer's backward, those of the first steps first; each but the first needs what went into it multiplied anew."""
    order = steps(sizes)
    best: list[tuple[float, tuple[Backward, ...]]] = [(0.0, ())]  # for the last n steps
    for first in reversed(range(len(order))):
        anew = sum(g.us for g in kron_groups.groups(sizes, rows, target, first)) if first else 0.0
        options = []
        for end in range(first + 1, kron_groups.end_of_run(order, first) + 1):
            us, rest = best[len(order) - end]
            launch = _fastest(order[first:end], rows, target)
            if launch:
                options.append((us + anew + launch.us, (launch, *rest)))
        best.append(min(options, key=lambda o: o[0]))
    return best[-1][1]


def better_swapped(plan: Sequence[Backward]) -> bool:
    """Whether two factors, of which the second alone has a fused launch, are better taken in the other order: the first, a square one, is
    the larger one by far."""
    if len(plan) != 2 or plan[0].template or not plan[1].template or len(plan[1].steps) > 1:
        return False
    (first,), (second,) = plan[0].steps, plan[1].steps
    return first.p == first.q >= 4 * max(second.p, second.q)


def _fastest(run: tuple[Step, ...], rows: int, target: Problem) -> Backward | None:
    found = []
    if target.itemsize <= 4:
        found = [b for pieces in _pieces(run, _split(target)) for b in _tilings(pieces, rows, target)]
        found += kron_split.backward(run, rows, target)
        found += quarter.backward(run, rows, target)
    found = eligible(found, lambda b: b.kernel)
    if len(run) == 1:
        found.append(_alone(run[0], rows * run[0].left, target))
    least = 1.5 * least_us(run, rows, target)
    return min((b._replace(us=max(b.us, least)) for b in found), key=lambda b: b.us, default=None)


def _alone(s: Step, A: int, target: Problem) -> Backward:
    """One step by a launch for each thing."""
    back = kron_groups.fastest((Step(0, 1, s.q, s.p, s.right),), A, target)
    assert back
    ours = gradient(A, s.p, s.q, s.right, target).us
    return Backward((s,), back.us + (cublas.better_gradient(A, s.p, s.q, s.right, target, ours) or ours))


def _pieces(run: tuple[Step, ...], split: bool) -> Iterator[Pieces]:
    """The ways to cut a run into a right factor and a left one, or to take it as one of them."""
    most = _MERGED[split]
    alone: Pieces = ((), run) if run[0].right == 1 else (run, ())
    for left, right in (alone, *((run[n:], run[:n]) for n in range(1, len(run)))):
        if all(_fits(piece, most) for piece in (left, right) if piece):
            yield left, right


def _fits(piece: Sequence[Step], most: int) -> bool:
    p, q = prod(s.p for s in piece), prod(s.q for s in piece)
    if len(piece) == 1:
        return eights(p) * eights(q) <= _LARGEST
    return max(p, q) <= most and len(piece) <= _TOGETHER


def _tilings(pieces: Pieces, rows: int, target: Problem) -> Iterator[Backward]:
    left, right = pieces
    run = (*right, *left)
    A, C = rows * run[-1].left, run[0].right
    powers = [1 << n for n in range(8)]
    if C == 1:
        tiles = [(L, 1) for L in powers if left or L >= 8]
    else:
        if C % 8:
            tiles = [(1, R) for R in sorted({eights(ceil(C / n)) for n in range(ceil(C / 256), ceil(C / 8) + 1)})]
        else:
            tiles = [(1, R) for R in range(8, min(C, 257), 8) if C % R == 0]
        tiles += [(L, eights(C)) for L in powers[1:] if C <= 16]
    large = any(prod(s.p for s in piece) * prod(s.q for s in piece) > _LARGE for piece in pieces)
    for (L, R), threads, stages in product(tiles, (256, 512) if large else (256, 128), (1, 2)):
        yield from _tiling(pieces, A, C, L, R, threads, stages, target)


def _tiling(pieces: Pieces, A: int, C: int, L: int, R: int, threads: int, stages: int, target: Problem) -> Iterator[Backward]:
    left, right = pieces
    split = _split(target)
    (p1, q1), (p2, q2) = ((prod(s.p for s in piece), prod(s.q for s in piece)) for piece in pieces)
    (h1, k1), (h2, k2) = ((eights(p), eights(q)) if piece else (1, 1) for p, q, piece in ((p1, q1, left), (p2, q2, right)))
    s2 = 1 if R == 1 else padded(R)
    sx, sg = padded(h2 * s2), padded(k2 * s2)
    matrices = (k1 * padded(h1) if left else 0) + (h2 * padded(k2) if right else 0)
    sums = (p1 * q1 if left else 0) + (p2 * q2 if right else 0)
    between = 2 * L * h1 * sg if left and right else 0
    shared = matrices * target.itemsize + max((stages * L * (h1 * sx + k1 * sg) + between) * target.itemsize, sums * 4)
    kept = sum(4 * _share(p, q, threads // 32) for p, q, piece in ((h1, k1, left), (h2, k2, right)) if piece)
    resident = min(target.shared // (shared + 1024), 65536 // (threads * (kept + (96 if split else 64))), 2048 // threads)
    if not resident or kept > (_SUMS_OF_TWO if left and right and not split else _SUMS):
        return
    tiles = ceil(A / L) * ceil(C / R)
    bytes_ = gcd(16, target.aligned, (gcd(p1 * p2, q1 * q2, p2, q2) if R == 1 else gcd(C, R)) * target.itemsize)
    most = max(target.sms, A * p1 * p2 * C * target.itemsize // (4 * sums))  # with no more partial sums than numbers of x
    blocks = min(tiles, target.sms * resident, most)
    resident = ceil(blocks / target.sms)
    high = ceil(h1 / 16) * 16
    work = L * R * ((2 * k2 * high * k1 if left else 0) + ((3 if left else 2) * h1 * h2 * k2 if right else 0))
    multiplied = work / _MULTIPLY_ADDS_US[split]
    coarse = 1 if R == 1 or R >= C else max(1, 64 / (R * target.itemsize))
    numbers = L * R * (2 * p1 * p2 + q1 * q2)
    moved = numbers * target.itemsize * coarse / target.sm_bytes_us
    multiplied += numbers * (target.itemsize / bytes_ - target.itemsize / 16) / _COPIES_US
    alone = _WAITING if stages == 2 else _WAITING + (1 - _WAITING) / resident
    each = max(multiplied, moved) + alone * min(multiplied, moved) + _TILE_US / resident
    crowded = 0.0 if split else _CROWDED * max(0.0, resident * shared / target.shared - _FULL)
    each *= (1 + _ALONE / resident) * (1 + crowded)
    uneven = any(n & n - 1 or 1 < n < 8 for n in (p1, q1, p2, q2, C))
    if uneven:
        each *= _LONGER[target.itemsize, split][2 if left and right else 1 if left else 0]
    if target.itemsize == 2 and L * R <= 64 and max(p1 * q1, p2 * q2) > _LARGE and not (left and (right or uneven)):
        each *= _SHALLOW
    us = 2 * LAUNCH_US + ceil(tiles / blocks) * resident * each + (matrices * target.itemsize + sums * 8) * resident / target.sm_bytes_us
    names = [f"Merged<{text(*[f'Factor<{s.p}, {s.q}>' for s in piece])}>" for piece in pieces]
    template = f"Backward4<{text(threads, resident, split, bytes_, stages, L, R, C, *names)}>"
    yield Backward((*right, *left), us, template, target.sms * resident, threads, shared, (L, R))


def eights(n: int) -> int:
    """As in backward.cuh."""
    return ceil(n / 8) * 8


def padded(n: int) -> int:
    """As in backward.cuh."""
    return (n + 7) // 16 * 16 + 8


def _split(target: Problem) -> bool:
    return target.itemsize == 4 and not target.tensor


def _share(m: int, n: int, warps: int) -> int:
    """How many 16 x 8 sums of a gradient a warp keeps: Sums of backward.cuh."""
    rows, columns, used = ceil(m / 16), ceil(n / 8), 1
    while rows * columns > 4 and 2 * used <= warps and (rows % 2 == 0 or columns % 2 == 0 or rows * columns > _UNEVEN):
        if 2 * rows >= columns if rows % 2 == columns % 2 else rows % 2 == 0:
            rows = ceil(rows / 2)
        else:
            columns = ceil(columns / 2)
        used *= 2
    return rows * columns
