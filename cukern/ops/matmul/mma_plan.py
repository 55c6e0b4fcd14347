"""The plan of matmul v6: the block tile, and how many thread blocks share the sum over K of a tile (split-K).

The cost of a candidate is the time of the busiest SM, limited by tensor cores or by bandwidth from L2, plus that of the partial sums.
"""

from math import ceil
from typing import NamedTuple

from cukern.runtime.device import Device, cached, eligible

K_BYTES = 128  # of a k tile, as in mma.cuh
L2_BYTES_CYCLE = 28  # bytes per cycle that an SM receives from L2; 5.5 to 7 TB/s on an H100
BLOCK_CYCLES = 2500  # per block, to fill the ring buffer and to store the tile
LAUNCH_US = 2.5  # of the kernel that adds partial sums
SPLITS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32
MIN_K_TILES = 4  # per block


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    warps: int
    stages: int
    per_sm: int
    split: bool = False  # for 3xTF32
    efficiency: float = 0.9  # of the rate of mma.sync that the main loop reaches

    @property
    def shared(self) -> int:
        """Bytes of the ring buffer."""
        return self.stages * (self.rows + self.columns) * K_BYTES


TILES = (
    Tile("Mma128x128", 128, 128, 4, 3, 2),
    Tile("Mma64x64", 64, 64, 4, 3, 4, efficiency=0.75),
    Tile("Mma16x128", 16, 128, 4, 4, 3),
    Tile("MmaSplit128x128", 128, 128, 8, 3, 1, True),
    Tile("MmaSplit64x64", 64, 64, 4, 3, 3, True, 0.75),
)


class Plan(NamedTuple):
    tile: Tile
    splits: int
    us: float


@cached(4096)
def plan(M: int, N: int, K: int, batch: int, itemsize: int, terms: int, device: Device, splitting: bool) -> Plan:
    """The plan for `batch` products (M x K) . (K x N). `terms`: 3 for 3xTF32, else 1.
    Without `splitting`, the order of additions does not depend on M and N."""
    k_tiles = max(1, ceil(K * itemsize / K_BYTES))
    found = []
    fitting = [t for t in TILES if t.split == (terms == 3) and t.shared <= device.shared_bytes]
    for tile in eligible(fitting, lambda t: t.name):
        per_sm = max(1, min(tile.per_sm, device.sm_shared_bytes // (tile.shared + 1024)))
        tiles = batch * ceil(M / tile.rows) * ceil(N / tile.columns)
        most = k_tiles // MIN_K_TILES if splitting and tiles < 2 * per_sm * device.sms else 1
        for splits in (s for s in SPLITS if s == 1 or s <= most):
            us = _model_us(tile, per_sm, tiles, k_tiles, splits, itemsize, terms, device)
            us += reduce_us(batch * M * N, splits, device)
            found.append(Plan(tile, splits, us))
    return min(found, key=lambda p: p.us)


def _model_us(tile: Tile, per_sm: int, tiles: int, k_tiles: int, splits: int, itemsize: int, terms: int, device: Device) -> float:
    fmas = tile.rows * tile.columns * (K_BYTES // itemsize) * terms
    rate = device.mma_fmas_cycle * (1 if itemsize == 2 else 0.5)
    tensor, copy = fmas / (tile.efficiency * rate), (tile.rows + tile.columns) * K_BYTES / L2_BYTES_CYCLE
    blocks = ceil(tiles * splits / device.sms)  # on the busiest SM
    waves = ceil(blocks / per_sm)
    alone = 1.3 if min(blocks, per_sm) * tile.warps < 8 else 1.0  # few warps hide less latency
    cycles = blocks * ceil(k_tiles / splits) * max(tensor, copy) * alone + waves * BLOCK_CYCLES
    return cycles / device.cycles_us


def reduce_us(results: int, splits: int, device: Device) -> float:
    """The partial sums are written and read once; most of them stay in L2."""
    return 0.0 if splits == 1 else LAUNCH_US + 8 * results * splits / (device.sms * device.sm_bytes_us)
