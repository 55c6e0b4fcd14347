"""The plan of matmul v5: the tile of the output per thread block, and how blocks share the last, partly filled wave of tiles (stream-K).

A cost model chooses the cheapest candidate. Its constants were fitted to 360 timings on one H200 (rms error 11 %). The chosen candidate was
on average 0.6 % slower than the best, at worst 6 %.
"""

from math import ceil
from typing import NamedTuple

from cukern.runtime.device import cached, eligible

BK = 8  # length of a k tile, as in matmul/matmul.cu
# In k tiles: a sum longer than MAX_CHAIN (768 additions) is split into chains of CHAIN (512) or slightly less. The largest error of
# 4096x768x3072 on one H200, relative to cuBLAS's, and the cost in time of 4096^3: chains of 512: 1.2 to 1.3, 3 %; 768: up to 1.9, 2 %;
# 1024: 2.2, 1.5 %; one chain: 4.4.
MAX_CHAIN, CHAIN = 96, 64
MIN_K_TILES = 8  # the fewest per block that shares tiles: with fewer, filling the ring buffer dominates

LATENCY = 1.12  # a block that is alone on its SM takes this many times its share of the SM's time
BLOCK_US = 1.47  # per block, to fill the ring buffer and to store the tile
PIECE_US = 0.15  # in the fix-up kernel, per piece of a tile
MEGABYTE_US = 0.29  # in the fix-up kernel, per megabyte of partial sums


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    per_sm: int  # blocks per SM, for float32
    us: float  # per k tile and SM when its blocks keep it busy, for float32


class Plan(NamedTuple):
    """Blocks [0, shared_blocks) share the first `shared_tiles` tiles. The whole grid takes the others in turn. `chain`: k tiles after
    which a new chain of additions begins; `room`: the size of the workspace in tiles."""

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


@cached(4096)
def plan(M: int, N: int, K: int, sms: int, itemsize: int) -> Plan:
    """The plan for (M x K) . (K x N) on a GPU with `sms` SMs."""
    k_tiles = max(1, ceil(K / BK))
    chain = k_tiles if k_tiles <= MAX_CHAIN else ceil(k_tiles / ceil(k_tiles / CHAIN))
    candidates = []
    for tile in eligible(TILES[itemsize], lambda tile: tile.name):
        tiles = ceil(M / tile.rows) * ceil(N / tile.columns)
        slots = sms * tile.per_sm
        splits = [(0, 0)]
        waves, rest = divmod(tiles, slots)
        shared = rest + (slots if waves else 0)  # the last wave is not full: share its tiles and those of the wave before
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
    def wave(blocks_per_sm: int, n: float) -> float:
        return n * tile.us * max(blocks_per_sm, LATENCY) + BLOCK_US

    full, part = divmod(ceil((tiles - shared) / sms), tile.per_sm)
    us = full * wave(tile.per_sm, k_tiles) + (wave(part, k_tiles) if part else 0.0)
    if blocks:
        us += wave(ceil(blocks / sms), shared * k_tiles / blocks) + BLOCK_US
        us += PIECE_US * (ceil(blocks / shared) + 1) + MEGABYTE_US * 2e-6 * blocks * tile.rows * tile.columns * itemsize
    return us
