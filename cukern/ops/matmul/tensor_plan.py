"""The plan of matmul v6 and v7: the tile of a thread block, how many blocks share the sum over K of a tile (split-K), and the grid.

The cost of a candidate is the time of the busiest SM, limited by tensor cores or by bandwidth from L2, plus that of the partial sums.
"""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from cukern.runtime.device import Device, cached, eligible

K_BYTES = 128  # of a k tile, as in mma.cuh and wgmma.cuh
L2_BYTES_CYCLE = 28  # bytes per cycle that an SM receives from L2 by cp.async
TMA_BYTES_CYCLE = {True: 40, False: 25}  # the same by TMA, if lines of operands are whole cache lines of 128 bytes, and if they are not
START_US = {False: 2.0, True: 3.0}  # of a launch of v6 or v7, to fill the ring buffer and to store the last tile
DIRECT_US = 1.5  # of a launch that reads operands in place
COPY_US = 1.5  # of a launch that copies operands
UNALIGNED_US = 1.5  # of v7, if it cannot store its results by TMA
REDUCE_US = 1.5  # of the kernel that adds partial sums
SPLIT_US = 5.0  # of the kernels that split both operands into TF32 numbers
SPLITS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32  # of v6
MIN_K_TILES = 4  # per block
MAX_SHORT = 16
BOX_BYTES = 16 * 16 * 128  # of v7's results on their way to global memory


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    stages: int
    efficiency: float  # of the rate of mma.sync or wgmma that the main loop reaches
    warps: int = 4
    per_sm: int = 1
    split: bool = False  # for 3xTF32
    wgmma: bool = False
    share: int = 1  # the blocks of a cluster that share the copies of B
    cluster_k: int = 1  # the blocks of a cluster that share the sum over K
    direct: str = ""  # no tensor cores: "k" if lanes share the sum over K, "n" if they have columns, "short" for a short K

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        ring = self.stages * (self.rows + self.columns) * K_BYTES
        if self.direct:
            return 0
        return ring * (2 if self.split else 1) + BOX_BYTES + 16 * self.stages if self.wgmma else ring

    @property
    def cluster(self) -> int:
        return self.share * self.cluster_k


# v7's efficiencies are limited by the bandwidth of shared memory (docs/notes/matmul.md).
TILES = (
    Tile("Mma128x128", 128, 128, 3, 0.9, per_sm=2),
    Tile("Mma64x64", 64, 64, 3, 0.75, per_sm=4),
    Tile("Mma16x128", 16, 128, 4, 0.9, per_sm=3),
    Tile("MmaSplit128x128", 128, 128, 3, 0.9, 8, split=True),
    Tile("MmaSplit64x64", 64, 64, 3, 0.75, per_sm=3, split=True),
    Tile("Wgmma128x256", 128, 256, 4, 0.92, 12, wgmma=True, share=2),
    Tile("Wgmma128x192", 128, 192, 4, 0.85, 12, wgmma=True, share=2),
    Tile("Wgmma128x128", 128, 128, 6, 0.76, 12, wgmma=True),
    Tile("WgmmaPair128x128", 128, 128, 6, 0.76, 12, wgmma=True, share=2),
    Tile("Wgmma128x192k4", 128, 192, 4, 0.85, 12, wgmma=True, cluster_k=4),
    Tile("Wgmma128x128k4", 128, 128, 6, 0.76, 12, wgmma=True, cluster_k=4),
    Tile("WgmmaSplit128x128", 128, 128, 3, 0.76, 12, split=True, wgmma=True, share=2),
    Tile("Direct1k", 1, 4, 0, 1.0, 8, direct="k"),
    Tile("Direct4k", 4, 4, 0, 1.0, 8, direct="k"),
    Tile("Direct1", 1, 32, 0, 1.0, 32, direct="n"),
    Tile("Direct4", 4, 32, 0, 1.0, 32, direct="n"),
    Tile("DirectShort", 8, 128, 0, 1.0, 1, direct="short"),
)


class Plan(NamedTuple):
    tile: Tile
    splits: int  # of v6, whose partial sums go to a workspace
    grid: int
    us: float


class Problem(NamedTuple):
    """`batch` products (M x K) . (K x N). `terms`: 3 for 3xTF32, else 1. `wgmma`: v7 may run, for what the layout allows. `a_k`, `b_k`:
    contiguous along K. `copied`: elements that are copied first. `whole_lines`: the lines of operands start at multiples of 128 bytes."""

    M: int
    N: int
    K: int
    batch: int
    itemsize: int
    terms: int
    wgmma: bool
    a_k: bool = True
    b_k: bool = True
    copied: int = 0
    whole_lines: bool = True


@cached(4096)
def plan(problem: Problem, device: Device, splitting: bool) -> Plan:
    """The cheapest plan. Without `splitting`, the choice of v6 or v7 and the order of additions do not depend on M and N."""
    k_tiles = max(1, ceil(problem.K * problem.itemsize / K_BYTES))
    found = [p for tile in _tiles(problem, k_tiles, device, splitting) for p in _plans(tile, problem, k_tiles, device, splitting)]
    return min(found, key=lambda p: p.us)


def _tiles(p: Problem, k_tiles: int, device: Device, splitting: bool) -> list[Tile]:
    """The tiles that may be chosen."""
    wgmma = p.wgmma and device.wgmma
    fitting = [t for t in TILES if t.split == (p.terms == 3) and t.wgmma <= wgmma and t.shared <= device.shared_bytes and not t.direct]
    fitting += [t for t in TILES if t.direct and splitting and _is_direct(t, p)]
    fitting = eligible(fitting, lambda t: t.name)
    fitting = [t for t in fitting if t.cluster_k == 1 or (splitting and _shares_k(t, p, k_tiles, device))] or fitting
    return fitting if splitting else [t for t in fitting if t.wgmma] or fitting


def _is_direct(tile: Tile, p: Problem) -> bool:
    """True if the tile suits a problem of few rows, or of a short K."""
    if p.b_k:
        return tile.direct == "k" and p.a_k and p.M <= tile.rows
    return p.K <= MAX_SHORT if tile.direct == "short" else tile.direct == "n" and p.M <= tile.rows


def _plans(tile: Tile, p: Problem, k_tiles: int, device: Device, splitting: bool) -> Iterator[Plan]:
    if tile.direct:
        tiles = p.batch * ceil(p.M / tile.rows) * ceil(p.N / tile.columns)
        moved = p.batch * p.itemsize * (p.K * p.N * ceil(p.M / tile.rows) if tile.direct != "short" else p.M * p.N)
        cycles = tiles * tile.rows * tile.columns * p.K / (40 * device.sms)  # FMAs
        yield Plan(tile, 1, tiles, DIRECT_US + max(cycles / device.cycles_us, moved / (device.sms * device.sm_bytes_us)))
        return
    tiles = p.batch * tile.share * ceil(p.M / (tile.rows * tile.share)) * ceil(p.N / tile.columns)
    if tile.wgmma:
        blocks = tiles * tile.cluster_k
        resident = max(1, device.sms // tile.cluster) * tile.cluster
        yield Plan(tile, 1, blocks if tile.cluster_k > 1 else min(blocks, resident), _wgmma_us(tile, blocks, k_tiles, p, device))
        return
    few = splitting and tiles < 2 * tile.per_sm * device.sms
    for splits in SPLITS:
        if splits == 1 or (few and splits <= k_tiles // MIN_K_TILES):
            yield Plan(tile, splits, tiles * splits, _mma_us(tile, tiles * splits, k_tiles, splits, p, device))


def _shares_k(tile: Tile, p: Problem, k_tiles: int, device: Device) -> bool:
    """True if split-K in a cluster may pay: if all blocks run at the same time. A few SMs belong to no cluster, hence 15/16 of the SMs."""
    blocks = p.batch * tile.cluster_k * ceil(p.M / tile.rows) * ceil(p.N / tile.columns)
    return k_tiles >= MIN_K_TILES * tile.cluster_k and blocks <= device.sms * 15 // 16


def _mma_us(tile: Tile, blocks: int, k_tiles: int, splits: int, p: Problem, device: Device) -> float:
    rate = tile.efficiency * device.mma_fmas_cycle * (1 if p.itemsize == 2 else 0.5)
    tensor = tile.rows * tile.columns * (K_BYTES // p.itemsize) * p.terms / rate
    copy = (tile.rows + tile.columns) * K_BYTES / L2_BYTES_CYCLE
    per_sm = max(1, min(tile.per_sm, device.sm_shared_bytes // (tile.shared + 1024)))
    on_sm = ceil(blocks / device.sms)  # of the busiest SM
    alone = 1.3 if min(on_sm, per_sm) * tile.warps < 8 else 1.0  # few warps hide less latency
    ends = ceil(on_sm / per_sm) * 2500  # cycles to fill the ring buffer and to store the tile
    start = START_US[False] + _copy_us(p, device)
    cycles = on_sm * ceil(k_tiles / splits) * max(tensor, copy) * alone + ends
    if splits == 1:
        return start + cycles / device.cycles_us
    partials = 8 * p.batch * p.M * p.N * splits / (device.sms * device.sm_bytes_us)  # written and read once; most of them stay in L2
    return start + cycles / device.cycles_us + REDUCE_US + partials


def _copy_us(p: Problem, device: Device) -> float:
    return COPY_US + 2 * p.copied * p.itemsize / (device.sms * device.sm_bytes_us) if p.copied else 0.0


def _wgmma_us(tile: Tile, blocks: int, k_tiles: int, p: Problem, device: Device) -> float:
    rate = tile.efficiency * device.wgmma_fmas_cycle * 2 / p.itemsize
    tensor = tile.rows * tile.columns * (K_BYTES // p.itemsize) * p.terms / rate
    copy = (2 if tile.split else 1) * (tile.rows + tile.columns // tile.share) * K_BYTES / TMA_BYTES_CYCLE[p.whole_lines]
    tensor = max(tensor, copy)
    on_sm = ceil(blocks / device.sms)  # of the busiest SM
    us = (
        START_US[True]
        + _copy_us(p, device)
        + (UNALIGNED_US if p.N * p.itemsize % 16 else 0)
        + on_sm * (ceil(k_tiles / tile.cluster_k) * tensor + 500) / device.cycles_us
    )
    if tile.cluster_k > 1:
        us += 2.5 * on_sm  # to add the partial sums; the next block does not start before
    if p.terms == 3:  # both operands are read and written twice
        us += SPLIT_US + 3 * 4 * p.batch * (p.M + p.N) * p.K / (device.sms * device.sm_bytes_us)
    return us
