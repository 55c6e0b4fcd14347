"""The plan of matmul v7: the tile of a thread block, split-K, and the grid. Its cost model is that of mma_plan.py, with wgmma's rates."""

from math import ceil
from typing import NamedTuple

from cukern.ops.matmul.mma_plan import K_BYTES, L2_BYTES_CYCLE, MIN_K_TILES, SPLITS, reduce_us
from cukern.runtime.device import Device, cached, eligible

THREADS = 384
STAGING = 4 * 64 * 128  # bytes of results on their way to global memory: two boxes of each consumer
WORK_CYCLES = 1500  # per tile, for the epilogue, during which the tensor cores wait
START_US = 3.0  # of a launch, to fill the ring buffer


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    stages: int
    cluster: int
    efficiency: float  # of wgmma's rate in the main loop

    @property
    def shared(self) -> int:
        return self.stages * ((self.rows + self.columns) * K_BYTES + 16) + STAGING


TILES = (
    Tile("Wgmma128x256", 128, 256, 4, 2, 0.80),
    Tile("Wgmma128x192", 128, 192, 4, 2, 0.78),
    Tile("Wgmma128x128", 128, 128, 6, 1, 0.72),
)


class Plan(NamedTuple):
    tile: Tile
    splits: int
    grid: int
    us: float


@cached(4096)
def plan(M: int, N: int, K: int, batch: int, itemsize: int, nt: bool, device: Device, splitting: bool) -> Plan | None:
    """The plan for `batch` products (M x K) . (K x N), or None. `nt`: both operands are contiguous along K. See mma_plan.plan."""
    k_tiles = max(1, ceil(K * itemsize / K_BYTES))
    found = []
    for tile in eligible(TILES, lambda t: t.name) if device.wgmma and (nt or itemsize == 2) else ():
        if tile not in TILES:
            continue
        tiles = batch * ceil(M / (tile.rows * tile.cluster)) * ceil(N / tile.columns)
        clusters = device.sms // tile.cluster
        most = k_tiles // MIN_K_TILES if splitting and tiles < 2 * clusters else 1
        for splits in (s for s in SPLITS if s == 1 or s <= most):
            rate = tile.efficiency * device.wgmma_fmas_cycle * 2 / itemsize
            tensor = tile.rows * tile.columns * (K_BYTES // itemsize) / rate
            copy = (tile.rows + tile.columns / tile.cluster) * K_BYTES / L2_BYTES_CYCLE
            cycles = ceil(tiles * splits / clusters) * (ceil(k_tiles / splits) * max(tensor, copy) + WORK_CYCLES)
            us = START_US + cycles / device.cycles_us + reduce_us(batch * M * N, splits, device)
            found.append(Plan(tile, splits, tile.cluster * min(clusters, tiles * splits), us))
    return min(found, key=lambda p: p.us, default=None)
