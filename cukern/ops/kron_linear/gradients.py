"""How kron_linear v4 cuts the gradient of a factor into tiles and chunks: see Gradient4 in gradient.cuh."""

import functools
from math import ceil, gcd
from typing import NamedTuple

from cukern.ops.kron_linear.groups import LAUNCH_US, spread, text
from cukern.ops.kron_linear.plan import Problem

_STAGE = 32 << 10  # bytes of a chunk
_MOST = 128  # rows and columns of a block's tile
_SUMS = 2048  # of a warp, on tensor cores
_CHUNK = 8  # fibers that could be multiplied in the time from a chunk to the next; a guess

_MULTIPLY_ADDS_US = {2: 757_000.0, 4: 333_000.0}  # of a multiprocessor's tensor cores, by the bytes of a number
_FMA_US = 110_000.0  # of its FMA units
_COPIES_US = 5800.0  # of few bytes each
_WAITING = 0.5  # of the shorter of multiplying and moving


class Gradient(NamedTuple):
    """One launch: the kernel's template argument, how many chunks' sums are kept apart, and the geometry."""

    template: str
    chunk: tuple[int, int]  # fibers and columns
    tiles: int
    most: int  # pieces
    threads: int
    shared: int  # bytes
    us: float  # about how long it and the sum of its chunks' take

    def pieces(self, A: int, C: int) -> int:
        """How many partial sums the chunks are divided into."""
        return min(ceil(A / self.chunk[0]) * ceil(C / self.chunk[1]), self.most)


@functools.lru_cache(512)
def gradient(A: int, p: int, q: int, C: int, target: Problem) -> Gradient:
    """For z [A][p][C] and h [A][q][C]."""
    fours = C == 1 or C % 4 == 0  # what tensor cores' lanes fetch at once; else of a row alone, with zeros beyond
    tensor = target.tensor and min(p, q) >= 8 and (fours or C > 16)
    size, itemsize = max(target.itemsize, 4), target.itemsize
    if tensor:
        K, J = _side(p), _side(q)
        KW, JW = _share(K, J)
        team, least = 32 * (K // KW) * (J // JW), 8 if C == 1 and itemsize == 4 else 16
    else:
        K, J, most = _part(p), _part(q), 8 if size == 4 else 4
        while K * J * size > target.shared:
            K, J = (ceil(K / 2), J) if K > J else (K, ceil(J / 2))
        KW, JW = min(K, most), min(J, most)
        team, least = ceil(K / KW) * ceil(J / JW), gcd(C, 16 // size)
    threads = max(team, 256 // team * team) if tensor else ceil(max(team, 256) / 32) * 32
    fibers = max(_STAGE // ((K + J) * itemsize), 1)
    if C == 1 or ((fours or not tensor) and (C * least <= fibers or (C % least == 0 and fibers >= C))):
        L, R = 1 << (fibers // C).bit_length() - 1, C
    else:  # the last chunk of a row may be a part of one: as little as can be, but few chunks, of more than one fiber
        each = max(least, 2)
        L, R = 1, min(range(each, max(fibers, each) + 1, each), key=lambda r: (-(-C // r) * (r + _CHUNK), -r))
    while tensor and L * R % least:
        L *= 2
    whole = R == C
    bytes_ = gcd(16, target.aligned, (gcd(p, q, K, J) if C == 1 else gcd(C, R)) * itemsize)
    layouts = [_layout(n, R, L, itemsize, tensor) for n in (K, J)]
    chunks, tiles = ceil(A / L) * ceil(C / R), ceil(p / K) * ceil(q / J)
    stages = 2 * sum(-(-L * R * n // 64) * 64 for n in (K, J)) * itemsize
    shared = max(stages, K * J * size)
    resident = max(1, min(target.shared // (shared + 1024), 512 // threads))
    most = max(1, target.sms * resident // tiles)
    pieces = min(chunks, most)
    names = [f"Layout<{text(*one)}>" for one in layouts]
    template = f"Gradient4<{text(threads, L, R, whole, bytes_, tensor, p, q, K, J, KW, JW, *names)}>"
    copies = A * C * (p + q) * (itemsize / bytes_ - itemsize / 16) / _COPIES_US
    moved = A * C * (p + q) * itemsize / target.sm_bytes_us
    multiplied = ceil(A / L) * ceil(C / R) * L * R * K * J * tiles / (_MULTIPLY_ADDS_US[itemsize] if tensor else _FMA_US)
    busy = (max(moved, multiplied) + _WAITING * min(moved, multiplied) + copies) / min(target.sms, pieces * tiles)
    return Gradient(template, (L, R), tiles, most, threads, shared, 4 * LAUNCH_US + busy)


def _share(K: int, J: int) -> tuple[int, int]:
    """The rows and columns of a warp: as many as it can have sums of, or, where that takes more than 8 warps, such that up to 16 share."""
    shares = [(k, j) for k in _divisors(K) for j in _divisors(J) if k * j <= _SUMS]
    warps = min(K * J // (k * j) for k, j in shares)
    if warps > 8:
        warps = max(w for w in (K * J // (k * j) for k, j in shares) if w <= max(warps, 16))
    return min(((k, j) for k, j in shares if K * J // (k * j) == warps), key=lambda s: abs(s[0] - s[1]))


def _side(n: int) -> int:
    """The rows of a tile: a multiple of 8, for as few tiles as can be; of 16, where several warps share them."""
    rows = ceil(n / ceil(n / _MOST))
    return ceil(rows / 8) * 8 if rows <= 64 else ceil(rows / 16) * 16


def _part(n: int) -> int:
    """The same for 256 threads of 8 x 8 sums: even parts, if so fewer multiply zeros or have nothing to do."""
    if n <= _MOST:
        return n
    even = ceil(n / ceil(n / _MOST) / 8) * 8
    return min((_MOST, even), key=lambda s: (ceil(n / s) * s) ** 2 / (256 // (s // 8) ** 2 * (s // 8) ** 2))


def _divisors(n: int) -> list[int]:
    return [d for d in range(8, n + 1, 8) if n % d == 0]


def _layout(n: int, R: int, L: int, itemsize: int, tensor: bool) -> tuple[int, ...]:
    v = 16 // itemsize
    if R & (R - 1) or (n & (n - 1) and (L > 1 or R == 1)) or L * R * n % (8 * v):  # places of l, of k and of r are joined
        return 3, 0, 3, 0, v
    if tensor and R > 1:
        return (*(spread(2, R // v, 1) if itemsize == 4 else spread(1, R // v, 2)), 3, 0, v)
    if tensor and itemsize == 4:
        return (*spread(1, n // v, 2), 3, 0, v)
    if R == 1:
        return (*spread(0, n // v, 3), 3, 0, v)
    return (*spread(0, R // v, 3), *spread((R // v).bit_length() - 1 if v <= R else 0, n * R // v, 3), v)
