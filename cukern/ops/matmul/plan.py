"""The plans of matmul: tiles, grids, and how thread blocks share sums over K. Cost models choose the cheapest
candidate.

`fma_plan`: v5, whose blocks share the last, partly filled wave of tiles (stream-K). Its constants were fitted
to 360 timings on one H200 (rms error 11 %). The chosen candidate was on average 0.6 % slower than the best,
at worst 6 %. It also plans matmul_direct, for few rows. `plan`: v6 and v7.
"""

from collections.abc import Iterator
from math import ceil
from typing import NamedTuple

from cukern.runtime.device import Device, cached, device_of, eligible


class Tile(NamedTuple):
    name: str
    rows: int
    columns: int
    stages: int = 0  # of the ring buffer; 0: matmul_direct, or v5
    efficiency: float = 1.0  # of the rate of mma.sync or wgmma that the main loop reaches
    warps: int = 4
    per_sm: int = 1  # blocks per SM
    split: bool = False  # for 3xTF32
    wgmma: bool = False
    share: int = 1  # the blocks of a cluster that share the copies of B
    cluster_k: int = 1  # the blocks of a cluster that share the sum over K
    least_k: int = 0  # of a tile for long sums of 16-bit types: no second block hides the ends of its blocks
    split_k: bool = True  # the sum over K may be split through memory
    us: float = 0.0  # of v5: per k tile and SM when its blocks keep it busy

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        ring = self.stages * (self.rows + self.columns) * K_BYTES
        return ring * (2 if self.split else 1) + BOX_BYTES + 16 * self.stages if self.wgmma else ring

    @property
    def cluster(self) -> int:
        return self.share * self.cluster_k


# ---- v5

BK = 8  # length of a k tile, as in matmul/stream_k.cuh
# In k tiles: a sum longer than MAX_CHAIN (768 additions) is split into chains of CHAIN (512) or slightly
# less. The largest error of 4096x768x3072 on one H200, relative to cuBLAS's, and the cost in time of 4096^3:
# chains of 512: 1.2 to 1.3, 3 %; 768: up to 1.9, 2 %; 1024: 2.2, 1.5 %; one chain: 4.4.
MAX_CHAIN, CHAIN = 96, 64
MIN_FMA_K_TILES = 8  # the fewest per block that shares tiles: with fewer, filling the ring buffer dominates

LATENCY = 1.12  # a block that is alone on its SM takes this many times its share of the SM's time
BLOCK_US = 1.47  # per block, to fill the ring buffer and to store the tile
FIXUP_US, PIECE_US = 2.7, 0.08  # of the fix-up kernel, and in it per piece of a tile
MEGABYTE_US = 0.29  # in the fix-up kernel, per megabyte of partial sums

_FLOAT = (
    Tile("Tile128x128", 128, 128, per_sm=2, us=0.670),
    Tile("Tile64x64", 64, 64, per_sm=4, us=0.200),
    Tile("Tile128x32", 128, 32, per_sm=4, us=0.223),
    Tile("Tile32x128", 32, 128, per_sm=4, us=0.239),
)
# by the size of an element
FMA_TILES = {4: _FLOAT, 8: tuple(t._replace(per_sm=t.per_sm // 2, us=2 * t.us) for t in _FLOAT[1:])}


_FmaPlan = tuple[Tile, int, int, int, int, int]


@cached(4096)
def fma_plan(M: int, N: int, K: int, batch: int, itemsize: int, a_k: bool, b_k: bool, index: int) -> _FmaPlan:
    """The plan of v5 on the GPU number `index`: tile, grid, shared_blocks, shared_tiles, chain, room. See
    Problem.

    Blocks [0, shared_blocks) share the first `shared_tiles` tiles. The whole grid takes the others in turn.
    `chain`: k tiles after which a new chain of additions begins, or the lanes of matmul_direct; `room`: the
    size of the workspace in tiles."""
    p = Problem(M, N, K, batch, itemsize, 1, False, a_k, b_k)
    device = device_of(index)
    found = list[tuple[float, _FmaPlan]]()
    direct = [t for t in TILES if not t.stages and itemsize == 4 and _fits(t, p, device, True)]
    for t in eligible((*FMA_TILES[itemsize], *direct), lambda t: t.name):
        found += (
            _fma_plans(t, p, device.sms)
            if t.us
            else ((d.us, (t, d.grid, 0, 0, d.lanes, 0)) for d in _plans(t, p, 1, 1, device))
        )
    return min(found, key=lambda one: one[0])[1]


def _fma_plans(tile: Tile, p: "Problem", sms: int) -> Iterator[tuple[float, _FmaPlan]]:
    k_tiles = max(1, ceil(p.K / BK))
    chain = k_tiles if k_tiles <= MAX_CHAIN else ceil(k_tiles / ceil(k_tiles / CHAIN))
    tiles, slots = p.batch * ceil(p.M / tile.rows) * ceil(p.N / tile.columns), sms * tile.per_sm
    waves, rest = divmod(tiles, slots)
    # the last wave is not full: share its tiles and those of the wave before
    shared = rest + (slots if waves else 0)
    blocks = min(slots, shared * k_tiles // MIN_FMA_K_TILES)
    few = [(blocks // n, shared) for n in (2, 4, 8, 16) if blocks // n >= 4 * shared]  # fewer pieces to add
    sharing = rest and blocks > 1 and (waves or blocks > shared)
    for b, s in ((0, 0), (blocks, shared), *few) if sharing else ((0, 0),):
        grid = min(slots, b + tiles - s)
        yield (
            _fma_us(tiles, k_tiles, sms, tile, p.itemsize, b, s),
            (tile, grid, b, s, chain, 2 * b + (grid if k_tiles > chain else 0)),
        )


def _fma_us(tiles: int, k_tiles: int, sms: int, tile: Tile, itemsize: int, blocks: int, shared: int) -> float:
    def wave(blocks_per_sm: int, n: float) -> float:
        return n * tile.us * max(blocks_per_sm, LATENCY) + BLOCK_US

    full, part = divmod(ceil((tiles - shared) / sms), tile.per_sm)
    us = full * wave(tile.per_sm, k_tiles) + (wave(part, k_tiles) if part else 0.0)
    if blocks:
        us += wave(ceil(blocks / sms), shared * k_tiles / blocks) + FIXUP_US
        us += (
            PIECE_US * (ceil(blocks / shared) + 1)
            + MEGABYTE_US * 2e-6 * blocks * tile.rows * tile.columns * itemsize
        )
    return us


# ---- v6 and v7: the time of the busiest SM, limited by tensor cores or by bandwidth from L2, and what a
# launch costs besides

K_BYTES = 128  # of a k tile, as in mma.cuh and wgmma.cuh
# Bytes per cycle that an SM receives from L2 while all do: by cp.async; by TMA, if operands' lines start at
# multiples of 128 bytes; if not
L2_BYTES_CYCLE, TMA_BYTES_CYCLE = 28, {True: 42, False: 28}
# In microseconds: launches of the three kinds of kernels, which fill the ring buffer and store the last tile;
# launches that copy operands, that split them into TF32 numbers, and that add partial sums of v6 and v7; v7's
# stores of 128 columns by threads; the sums of a cluster
DIRECT_US, MMA_US, WGMMA_US, COPY_US, SPLIT_US, REDUCE_US, UNALIGNED_US, CLUSTER_US = (
    1.0, 1.7, 2.5, 0.5, 5.0, 0.7, 1.9, 1.0,
)  # fmt: skip
SPLITS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32
MIN_K_TILES = 4  # per block
BOX_BYTES = 16 * 16 * 128  # of v7's results on their way to global memory

# v7's efficiencies and the times above are fitted (docs/notes/matmul.md). Shared memory limits v7. Tiles of
# 16 rows are for M <= 64.
TILES = (
    *(
        Tile(f"Direct{rows}{k}", rows, 16, warps=8, per_sm=3 if rows == 1 else 2)
        for rows in (1, 4)
        for k in ("k", "")
    ),
    Tile("Mma128x256", 128, 256, 4, 0.8, 8, least_k=2048, split_k=False),
    Tile("Mma128x128", 128, 128, 3, 0.9, per_sm=2),
    Tile("Mma64x64", 64, 64, 3, 0.75, per_sm=4),
    Tile("Mma16x128", 16, 128, 4, 0.9, per_sm=3),
    Tile("MmaSplit128x128", 128, 128, 3, 0.9, 8, split=True),
    Tile("MmaSplit64x64", 64, 64, 3, 0.75, per_sm=3, split=True),
    Tile("Wgmma128x256", 128, 256, 4, 0.76, 12, wgmma=True, share=2, split_k=False),
    Tile("Wgmma128x192", 128, 192, 4, 0.7, 12, wgmma=True, share=2),
    Tile("Wgmma128x128", 128, 128, 6, 0.7, 12, wgmma=True, split_k=False),
    Tile("Wgmma128x64", 128, 64, 8, 0.65, 12, wgmma=True, split_k=False),
    Tile("Wgmma128x64k2", 128, 64, 8, 0.65, 12, wgmma=True, cluster_k=2, split_k=False),
    Tile("WgmmaSplit128x128", 128, 128, 3, 0.76, 12, split=True, wgmma=True, share=2),
)


class Problem(NamedTuple):
    """`batch` products (M x K) . (K x N). `terms`: 3 for 3xTF32, else 1. `wgmma`: allow v7. `a_k`, `b_k`:
    contiguous along K. `copied`: bytes that are copied first. `whole_lines`: lines of both operands start at
    multiples of 128 bytes."""

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


class Plan(NamedTuple):
    tile: Tile
    splits: int  # of the sum over K, whose partial sums go to a workspace
    grid: int
    us: float
    lanes: int = 0  # of matmul_direct


@cached(4096)
def plan(p: Problem, device: Device, splitting: bool) -> Plan:
    """The cheapest plan. Without `splitting`, the choice of v6 or v7 and the order of additions do not depend
    on M and N."""
    k_tiles = max(1, ceil(p.K * p.itemsize / K_BYTES))
    parts = max(1, k_tiles // MIN_K_TILES) if splitting else 1  # the most blocks that may share a sum over K
    fitting = eligible([t for t in TILES if _fits(t, p, device, splitting)], lambda t: t.name)
    if not splitting:
        fitting = [t for t in fitting if t.wgmma and t.cluster_k == 1] or fitting
    return min((one for t in fitting for one in _plans(t, p, k_tiles, parts, device)), key=lambda one: one.us)


def _fits(t: Tile, p: Problem, device: Device, splitting: bool) -> bool:
    if not t.stages:  # matmul_direct, which counts k in 32 bits
        return (
            splitting
            and p.K <= 1 << 30
            and t.rows * (2 if p.itemsize == 4 else 1) >= p.M
            and p.a_k
            and p.b_k == t.name.endswith("k")
        )
    kinds = p.itemsize == 2 or p.terms == 3 or (p.a_k and p.b_k)  # of wgmma; TF32 only along K
    rules = (
        t.split == (p.terms == 3),
        t.wgmma <= (p.wgmma and device.wgmma and p.K > 0 and kinds),
        t.shared <= device.shared_bytes,
    )
    return all(rules) and t.least_k <= p.K * (p.itemsize == 2) and (t.rows > 16) >= (p.M > 64)


def _tiles(tile: Tile, p: Problem) -> int:
    """Whole clusters of tiles."""
    return p.batch * tile.share * ceil(p.M / (tile.rows * tile.share)) * ceil(p.N / tile.columns)


def _plans(t: Tile, p: Problem, k_tiles: int, parts: int, device: Device) -> Iterator[Plan]:
    tiles = _tiles(t, p)
    if not t.stages:
        for lanes in (8, 16, 32):
            tiles = p.batch * ceil(p.M / t.rows) * ceil(p.N * lanes / 128)
            yield Plan(t, 1, tiles, _direct_us(t, tiles, lanes, p, device), lanes)
        return
    for splits in SPLITS if t.split_k else (1,):
        if splits == 1 or (splits <= parts and tiles < 2 * t.per_sm * device.sms):
            blocks = tiles * splits * t.cluster_k
            one = ceil(k_tiles / splits)
            resident = max(1, device.sms // t.cluster) * t.cluster
            us = (_wgmma_us if t.wgmma else _mma_us)(t, blocks, one, splits, p, device)
            if splits > 1:  # partial sums are written and read once; most of them stay in L2
                us += REDUCE_US + _memory_us(11 * p.batch * p.M * p.N * splits, device)
            yield Plan(t, splits, min(blocks, resident) if t.wgmma and t.cluster_k == 1 else blocks, us)


def _memory_us(moved: float, device: Device) -> float:
    return moved / (device.sms * device.sm_bytes_us)


def _direct_us(tile: Tile, tiles: int, lanes: int, p: Problem, device: Device) -> float:
    """Fitted to 60 timings on one H100. A block takes a time, and each two steps of its warps, more if
    vectors are not aligned. Along n, sectors of 32 bytes are loaded in part if many lanes share columns."""
    memory = _memory_us(p.batch * p.N * p.K * p.itemsize, device) * (1 if p.b_k else (16 + lanes) / 24)
    along_k = 32 // lanes if p.itemsize == 4 else (1.5 + 1.6 * tile.rows) * max(1, 16 / lanes)
    slow = 1 if (p.K if p.b_k else p.N) % 4 == 0 else along_k if p.b_k else 14 / p.itemsize
    steps, waves = ceil(p.K / (64 * lanes)), ceil(tiles / (device.sms * tile.per_sm))
    return DIRECT_US + max(memory, waves * (1.4 + 0.5 * tile.rows + (0.5 if p.b_k else 1.0) * slow * steps))


def _mma_us(tile: Tile, blocks: int, k_tiles: int, splits: int, p: Problem, device: Device) -> float:
    # A k tile of TF32 has half as many elements, at half the rate.
    tensor = tile.rows * tile.columns * (K_BYTES // 2) * p.terms / (tile.efficiency * device.mma_fmas_cycle)
    copy = (tile.rows + tile.columns) * K_BYTES / L2_BYTES_CYCLE
    per_sm = max(1, min(tile.per_sm, device.sm_shared_bytes // (tile.shared + 1024)))
    on_sm = ceil(blocks / device.sms)  # of the busiest SM
    alone = 1.3 if min(on_sm, per_sm) * tile.warps < 8 else 1.0  # few warps hide less latency
    slow = splits == 1 and p.N * p.itemsize % 16 > 0  # results are stored one by one
    # cycles to fill the ring buffer and to store the tile
    ends = 350 + tile.rows * tile.columns * (0.4 + 9 / tile.warps * slow)
    return (
        MMA_US
        + _copy_us(p, device)
        + (on_sm * k_tiles * max(tensor, copy) * alone + ceil(on_sm / per_sm) * ends) / device.cycles_us
    )


def _wgmma_us(tile: Tile, blocks: int, k_tiles: int, splits: int, p: Problem, device: Device) -> float:
    rate = tile.efficiency * device.wgmma_fmas_cycle * 2 / p.itemsize
    tensor = tile.rows * tile.columns * (K_BYTES // p.itemsize) * p.terms / rate
    copy = (
        (2 if tile.split else 1)
        * (tile.rows + tile.columns // tile.share)
        * K_BYTES
        / TMA_BYTES_CYCLE[p.whole_lines]
    )
    copy *= min(1, blocks / device.sms)  # the limit is that of all SMs together
    on_sm = ceil(blocks / device.sms)  # of the busiest SM
    slow = UNALIGNED_US * tile.columns / 128 if p.N * (p.itemsize if splits == 1 else 4) % 16 else 0
    cluster = 0 if tile.cluster_k == 1 else CLUSTER_US if on_sm == 1 else 10  # the next cluster starts late
    # device memory is slower, too
    moved = 0 if p.whole_lines else 1.8 * p.batch * (p.M + p.N) * p.K * p.itemsize
    us = on_sm * (
        slow + cluster + (ceil(k_tiles / tile.cluster_k) * max(tensor, copy) + 1400) / device.cycles_us
    )
    us = WGMMA_US + max(us, _memory_us(moved, device))
    if p.terms == 3:  # both operands are read and written twice
        return us + SPLIT_US + _memory_us(3 * 4 * p.batch * (p.M + p.N) * p.K, device)
    return us + _copy_us(p, device)


def _copy_us(p: Problem, device: Device) -> float:
    return COPY_US + _memory_us(2 * p.copied, device) if p.copied else 0.0
