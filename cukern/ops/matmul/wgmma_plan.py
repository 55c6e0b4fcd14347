"""The plan of matmul v7: the tile of a thread block, split-K, and the grid. Its cost model is that of mma_plan.py, with wgmma's rates."""

from math import ceil
from typing import NamedTuple

from cukern.ops.matmul.mma_plan import K_BYTES, L2_BYTES_CYCLE, LAUNCH_US, MIN_K_TILES, SPLITS, reduce_us
from cukern.runtime.device import Device, cached, eligible

THREADS = 384
STAGING = 16 * 16 * 128  # bytes of results on their way to global memory: two boxes of each warp
WORK_CYCLES = 500  # per tile, for the part of the epilogue during which the tensor cores wait
START_US = 3.0  # of a launch, to fill the ring buffer


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    stages: int
    cluster_m: int
    cluster_n: int
    efficiency: float  # of wgmma's rate in the main loop
    split: bool = False  # for 3xTF32
    cluster_k: int = 1  # the blocks of a cluster that share the sum over K of a tile

    @property
    def shared(self) -> int:
        return self.stages * ((self.rows + self.columns) * K_BYTES * (2 if self.split else 1) + 16) + STAGING

    @property
    def cluster(self) -> int:
        return self.cluster_m * self.cluster_n * self.cluster_k


TILES = (
    Tile("Wgmma128x256", 128, 256, 4, 2, 1, 0.80),
    Tile("Wgmma128x192", 128, 192, 4, 2, 1, 0.78),
    Tile("Wgmma128x128", 128, 128, 6, 1, 1, 0.72),
    Tile("Wgmma128x128k4", 128, 128, 6, 1, 1, 0.72, False, 4),
    Tile("WgmmaSplit128x128", 128, 128, 3, 2, 1, 0.72, True),
)


class Plan(NamedTuple):
    tile: Tile
    splits: int
    grid: int
    us: float


@cached(4096)
def plan(M: int, N: int, K: int, batch: int, itemsize: int, terms: int, nt: bool, device: Device, splitting: bool) -> Plan | None:
    """The plan for `batch` products (M x K) . (K x N), or None. `nt`: both operands are contiguous along K. See mma_plan.plan."""
    k_tiles = max(1, ceil(K * itemsize / K_BYTES))
    found = []
    fitting = [t for t in TILES if t.split == (terms == 3)] if device.wgmma and (nt or itemsize == 2 or terms == 3) else []
    for tile in eligible(fitting, lambda t: t.name):
        tiles = batch * ceil(M / (tile.rows * tile.cluster_m)) * ceil(N / (tile.columns * tile.cluster_n))
        clusters = max(1, device.sms // tile.cluster)
        if tile.cluster_k > 1 and (not splitting or k_tiles < MIN_K_TILES * tile.cluster_k):
            continue
        most = k_tiles // MIN_K_TILES if splitting and tiles < 2 * clusters and tile.cluster_k == 1 else 1
        for splits in (s for s in SPLITS if s == 1 or s <= most):
            rate = tile.efficiency * device.wgmma_fmas_cycle * 2 / itemsize
            tensor = tile.rows * tile.columns * (K_BYTES // itemsize) * terms / rate
            copy = (tile.rows / tile.cluster_n + tile.columns / tile.cluster_m) * K_BYTES * (2 if terms == 3 else 1) / L2_BYTES_CYCLE
            cycles = ceil(tiles * splits / clusters) * (ceil(k_tiles / splits / tile.cluster_k) * max(tensor, copy) + WORK_CYCLES)
            us = START_US + cycles / device.cycles_us + reduce_us(batch * M * N, splits, device)
            if terms == 3:  # both operands are read and written twice
                us += 2 * LAUNCH_US + 3 * 4 * batch * (M + N) * K / (device.sms * device.sm_bytes_us)
            grid = tile.cluster * (tiles if tile.cluster_k > 1 else min(clusters, tiles * splits))
            found.append(Plan(tile, splits, grid, us))
    return min(found, key=lambda p: p.us, default=None)
