"""How kron_linear v4 groups the factors into launches, and cuts each launch's work into tiles.

A model of a launch's time chooses among all groupings, and tiles of powers of two. Its constants are an H200's data sheet, not yet
measurements; only which of two plans is the faster depends on them.
"""

import functools
from collections.abc import Iterator, Sequence
from math import ceil, prod
from typing import NamedTuple

from cukern.ops.kron_plan import Sizes, Step, steps

MOST = 8  # factors in a launch, as in kron_linear.cu
CONFIGS = (8, 8), (4, 16), (4, 8), (4, 4), (1, 8), (8, 2)  # a thread's fibers (of float) and columns, as there
MOST_WARPS = 16  # of a block; half as many for doubles
IN_CACHE = 32 << 20  # bytes of an array between two launches that shall stay in the L2 cache

CYCLES_US = 1700.0
SM_BYTES_US = 32_000.0  # of device memory, for each multiprocessor
LAUNCH_US = 2.5
BARRIER_CYCLES = 150


class Group(NamedTuple):
    """One launch: `steps` from the rightmost factor on; L, R, slices, columns, configs as in kron_linear_v4. No configs: v3's kernel."""

    steps: tuple[Step, ...]
    L: int
    R: int
    slices: int
    columns: int
    configs: tuple[int, ...]
    padded: tuple[int, ...]
    threads: int
    shared: int  # bytes
    blocks: int  # that a multiprocessor holds
    us: float


@functools.lru_cache(512)
def groups(sizes: Sizes, rows: int, itemsize: int, multiprocessors: int, shared: int) -> tuple[Group, ...]:
    """The launches of a layer of these factors on `rows` rows of numbers of `itemsize` bytes, with `shared` bytes for a block."""
    order = steps(sizes)
    best: list[tuple[float, tuple[Group, ...]]] = [(0.0, ())]  # for the last n steps
    for first in reversed(range(len(order))):
        options = []
        for end in range(first + 1, _end_of_run(order, first) + 1):
            group = _fastest(order[first:end], rows, itemsize, multiprocessors, shared)
            if group:
                us, rest = best[len(order) - end]
                options.append((us + group.us, (group, *rest)))
        best.append(min(options, key=lambda o: o[0]))
    return best[-1][1]


def one_factor(p: int, q: int, left: int, right: int, itemsize: int, multiprocessors: int, shared: int) -> Group:
    """The launch of one mode product, [left][p][right] to [left][q][right]."""
    group = _fastest((Step(0, 1, p, q, right),), left, itemsize, multiprocessors, shared)
    assert group
    return group


def rows_at_once(plan: Sequence[Group], rows: int, itemsize: int) -> int:
    """How many rows to take through all launches before the next ones, so that what one launch writes is in the cache for the next."""
    if len(plan) == 1:
        return rows
    widest = max(s.left * s.q * s.right for g in plan[:-1] for s in g.steps[-1:]) * itemsize
    return rows if rows * widest <= IN_CACHE else max(1, IN_CACHE // widest)


def _end_of_run(order: Sequence[Step], first: int) -> int:
    """The end of the steps from `first` on that go through neighbouring factors from right to left, MOST at most."""
    end = first + 1
    while end < min(len(order), first + MOST) and order[end].factor == order[end - 1].factor - 1:
        end += 1
    return end


def _fastest(run: Sequence[Step], rows: int, itemsize: int, multiprocessors: int, shared: int) -> Group | None:
    found = [g for g in _tilings(run, rows, itemsize, multiprocessors, shared)]
    if found:
        return min(found, key=lambda g: g.us)
    if len(run) > 1:
        return None
    work = rows * run[0].left * run[0].p * run[0].q * run[0].right
    return Group(tuple(run), 0, 0, 1, 0, (), (), 0, 0, 1, LAUNCH_US + work / (multiprocessors * 40 * CYCLES_US))


def _tilings(run: Sequence[Step], rows: int, itemsize: int, multiprocessors: int, shared: int) -> Iterator[Group]:
    C, P = run[0].right, prod(s.p for s in run)
    size = max(itemsize, 4)  # in shared memory
    for slices in (1, 2, 4, 8):
        columns = ceil(run[0].q / slices)
        if ceil(run[0].q / columns) != slices or (slices > 1 and columns < 8):
            continue
        for power in range(11):
            L, R = (1 << power, 1) if C == 1 else (1, 1 << power)
            if L * R * P * size > shared or (power and (R >= 2 * C or 2 * rows * run[-1].left <= L)):
                break
            group = _tiling(run, rows, size, itemsize, multiprocessors, shared, L, R, slices, columns)
            if group:
                yield group


def _tiling(
    run: Sequence[Step], rows: int, size: int, itemsize: int, multiprocessors: int, limit: int, L: int, R: int, slices: int, columns: int
) -> Group | None:
    total, right, stride, largest, cycles, warps = L * R * prod(s.p for s in run), R, R, 0, 0.0, 1
    configs, padded = [], []
    for n, s in enumerate(run):
        q = columns if n == 0 else s.q
        pitch = (-(-s.p * stride // right) | 1) * right if right < 32 else s.p * stride
        largest = max(largest, total // (s.p * right) * pitch)
        chosen = _config(total // s.p, q, size)
        if chosen is None:
            return None
        config, width, step_warps, step_cycles = chosen
        configs.append(config)
        padded.append(width)
        warps, cycles = max(warps, step_warps), cycles + s.p * step_cycles + BARRIER_CYCLES
        stride = right * (q | 1 if right < 32 else q)
        total, right = total // s.p * q, right * q
    factors = sum(-(-s.p * w // 4) * 4 for s, w in zip(run, padded, strict=True)) * size
    shared, threads = factors + largest * size, 32 * warps
    if shared > limit:
        return None
    blocks = min(limit // (shared + 1024), 65536 // (32 * size * threads), 16) or 1
    A, C = rows * run[-1].left, run[0].right
    tiles = ceil(A / L) * ceil(C / R) * slices
    compute = cycles / CYCLES_US * max(1.0, 8 / (warps * min(blocks, ceil(tiles / multiprocessors))))
    memory = (L * R * prod(s.p for s in run) + total) * itemsize / SM_BYTES_US * (1 if R >= 32 or C == 1 else 32 / R)
    each = ceil(tiles / multiprocessors)
    busy = each * (max(compute, memory) if blocks > 1 else compute + memory) + (min(compute, memory) if blocks > 1 else 0)
    us = LAUNCH_US + busy + factors / SM_BYTES_US * min(each, blocks)
    return Group(tuple(run), L, R, slices, columns, tuple(configs), tuple(padded), threads, shared, blocks, us)


@functools.lru_cache(4096)
def _config(fibers: int, q: int, size: int) -> tuple[int, int, int, float] | None:
    """The fastest of CONFIGS for a step: its number, q rounded up to its columns, its warps, and a block's cycles for each k."""
    best = None
    for number, (most, columns) in enumerate(CONFIGS):
        each = most if size == 4 else max(most // 2, 1)
        width = -(-q // columns) * columns
        warps = ceil(fibers / (32 * each)) * (width // columns)
        if warps > MOST_WARPS * 4 // size:
            continue
        fetched = (each + columns / 4) * size / 4
        cycles = max(ceil(warps / 4) * (each * columns * size / 4 + each + columns / 4 + 1), warps * fetched)
        if best is None or cycles < best[3]:
            best = number, width, warps, cycles
    return best
