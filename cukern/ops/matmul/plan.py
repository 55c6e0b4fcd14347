"""How matmul v5 cuts a product up: which tile of the output a block computes, and how the last, partly filled wave of tiles is shared out.

The cheapest candidate under a model of the kernel's time wins. Its constants were fitted to 360 timings on one H200 (rms error 11 %); what
it chose was on average 0.6 % slower than the best candidate, 6 % at worst.
"""

import functools
from math import ceil
from typing import NamedTuple

BK = 8  # k's in a tile of shared memory, as in matmul/matmul.cu
# k tiles: a sum longer than MAX_CHAIN, 768 additions, is cut into chains of CHAIN, 512, or a little less. On one H200 the largest error of
# 4096x768x3072 was 1.2 to 1.3 times cuBLAS's with chains of 512, which cost 3 % of the time of 4096^3; up to 1.9 times with 768, at 2 %;
# 2.2 times with 1024, at 1.5 %; 4.4 times with one chain.
MAX_CHAIN, CHAIN = 96, 64
MIN_K_TILES = 8  # that a sharing block gets at least: with fewer, filling the ring dominates

LATENCY = 1.12  # a block alone on its multiprocessor (SM) takes this many times its share of the SM
BLOCK_US = 1.47  # to fill the ring and to store the tile
PIECE_US = 0.15  # in the fix-up, for each piece of a tile
MEGABYTE_US = 0.29  # and for each megabyte of partial sums


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    per_sm: int  # blocks that an SM holds, float
    us: float  # that an SM spends on one k tile when its blocks keep it busy, float


class Plan(NamedTuple):
    """Blocks [0, shared_blocks) share the first `shared_tiles` tiles; the others are dealt out to the whole grid. `chain`: k tiles after
    which a sum starts again; `room`: tiles in the workspace."""

    tile: Tile
    grid: int
    shared_blocks: int
    shared_tiles: int
    chain: int
    room: int


TILES: dict[int, tuple[Tile, ...]] = {
    4: (
        Tile("Tile128x128", 128, 128, 2, 0.670),
        Tile("Tile64x64", 64, 64, 4, 0.200),
        Tile("Tile128x32", 128, 32, 4, 0.223),
        Tile("Tile32x128", 32, 128, 4, 0.239),
    ),
}
TILES[8] = tuple(t._replace(per_sm=t.per_sm // 2, us=2 * t.us) for t in TILES[4][1:])


@functools.lru_cache(maxsize=4096)
def plan(M: int, N: int, K: int, sms: int, itemsize: int) -> Plan:
    """The plan for (M x K) . (K x N) on a GPU with `sms` multiprocessors."""
    k_tiles = max(1, ceil(K / BK))
    chain = k_tiles if k_tiles <= MAX_CHAIN else ceil(k_tiles / ceil(k_tiles / CHAIN))
    candidates = []
    for tile in TILES[itemsize]:
        tiles = ceil(M / tile.rows) * ceil(N / tile.columns)
        slots = sms * tile.per_sm
        splits = [(0, 0)]
        waves, rest = divmod(tiles, slots)
        shared = rest + (slots if waves else 0)  # the last wave is not full: share it and the one before
        blocks = min(slots, shared * k_tiles // MIN_K_TILES)
        if rest and blocks > 1 and (waves or blocks > shared):
            splits.append((blocks, shared))
        for blocks, shared in splits:
            us = _model_us(tiles, k_tiles, sms, tile, itemsize, blocks, shared)
            grid = min(slots, blocks + tiles - shared)
            room = 2 * blocks + (grid if k_tiles > chain else 0)
            candidates.append((us, Plan(tile, grid, blocks, shared, chain, room)))
    return min(candidates, key=lambda c: c[0])[1]


def _model_us(tiles: int, k_tiles: int, sms: int, tile: Tile, itemsize: int, blocks: int, shared: int) -> float:
    def wave(side_by_side: int, n: float) -> float:
        return n * tile.us * max(side_by_side, LATENCY) + BLOCK_US

    full, part = divmod(ceil((tiles - shared) / sms), tile.per_sm)
    us = full * wave(tile.per_sm, k_tiles) + (wave(part, k_tiles) if part else 0.0)
    if blocks:
        us += wave(ceil(blocks / sms), shared * k_tiles / blocks) + BLOCK_US
        us += PIECE_US * (ceil(blocks / shared) + 1) + MEGABYTE_US * 2e-6 * blocks * tile.rows * tile.columns * itemsize
    return us
