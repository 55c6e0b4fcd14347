"""Tiles, grids and shared memory of the fused kernels.

`pieces`: how many bfloat16 numbers an element is the sum of; 1 for 16-bit types, 2 (TF32) or 3 for float32.
The tiles of a thread block are those of FlashAttention-2: the rows that it owns stay, and tiles of the other
operands pass by. All tiles were the fastest of those that were tried on an H200 (v3) and an H100 (v4), see
docs/notes/attention.md.
"""

from typing import NamedTuple

import torch

from cukern.runtime.device import KNOWN, cached, device_of, eligible

DTYPES = torch.bfloat16, torch.float16, torch.float32
MOST_HEAD_DIM = 256  # of 16-bit types
# queries + keys, a 32-bit number in the kernels; without a window, v4's window has this size
MOST_ROWS = (1 << 31) - 512
# most bytes of K and V that a section of heads reads, to stay in L2 (A100: 40 MB, H100: 50 MB)
_SECTION_BYTES = 32 << 20


class Tile(NamedTuple):
    """A warp owns 16 * row_blocks rows, and a thread block loops over tiles of `columns` rows of the other
    operands. `per_sm`: the second argument of __launch_bounds__, thread blocks per SM. `stages`: 2 if the
    next tile is copied while one is multiplied; with 1 the two operands of a tile are copied in turn.
    `parts`: this many warps own the same rows, and each a part of the columns of the sums."""

    row_blocks: int
    columns: int
    warps: int
    per_sm: int
    stages: int = 2
    parts: int = 1

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps // self.parts

    def forward_bytes(self, head_dim: int, pieces: int = 1) -> int:
        """Shared memory in bytes: Q, and stages of K and V."""
        return (self.rows + 2 * self.stages * self.columns) * head_dim * pieces * 2

    def backward_bytes(self, head_dim: int, pieces: int = 1) -> int:
        """Shared memory in bytes: two fixed tiles, stages of two moving ones, and lse and delta."""
        return (
            4 * (self.rows + self.stages * self.columns) * head_dim * pieces
            + max(2 * self.rows, 4 * self.columns) * 4
        )


# of the backward: of the thread blocks that own keys, and of those that own queries
Tiles = tuple[Tile, Tile]


# By (pieces, head_dim): the tile, and the tile with a softcap or packed sequences, which need more registers.
FORWARD = {
    (1, 64): (Tile(2, 128, 4, 2), Tile(2, 64, 4, 2)),
    (1, 128): (Tile(2, 48, 4, 2), Tile(2, 32, 4, 2)),
    (1, 256): (Tile(1, 32, 4, 2),) * 2,
    (2, 64): (Tile(1, 64, 4, 3, 1),) * 2,
    (2, 128): (Tile(1, 64, 4, 2, 1),) * 2,
    (3, 64): (Tile(2, 32, 4, 2, 1),) * 2,
    (3, 128): (Tile(1, 32, 4, 2, 1),) * 2,
}
BACKWARD = {
    (1, 64): ((Tile(2, 32, 4, 2), Tile(2, 48, 4, 2)),) * 2,
    (1, 128): ((Tile(1, 64, 4, 2), Tile(2, 32, 4, 2)), (Tile(1, 32, 4, 2), Tile(1, 32, 4, 2))),
    (1, 256): ((Tile(1, 32, 4, 2, parts=2), Tile(1, 16, 4, 2)),) * 2,
    (2, 64): ((Tile(1, 64, 4, 2), Tile(1, 64, 4, 2)), (Tile(1, 48, 4, 2), Tile(1, 48, 4, 2))),
    (2, 128): ((Tile(1, 48, 4, 2, 1), Tile(1, 48, 4, 2, 1)), (Tile(1, 16, 4, 2, 1), Tile(1, 16, 4, 2, 1))),
    (3, 64): ((Tile(1, 64, 4, 2, 1), Tile(1, 64, 4, 2, 1)), (Tile(1, 48, 4, 2, 1), Tile(1, 48, 4, 2, 1))),
    (3, 128): ((Tile(1, 16, 8, 1, 1), Tile(1, 16, 8, 1, 1)),) * 2,
}


def forward_tile(pieces: int, head_dim: int, softcap: bool, packed: bool) -> Tile:
    """The tile of v3's forward. For strict float32 and packed sequences 32 rows per warp would spill."""
    return (
        Tile(1, 64, 4, 2, 1)
        if packed and (pieces, head_dim) == (3, 64)
        else FORWARD[pieces, head_dim][softcap or packed]
    )


def backward_tile(
    pieces: int, head_dim: int, softcap: bool, packed: bool, shared_bytes: int = KNOWN["h200"].shared_bytes
) -> Tiles:
    """The tiles of v3's backward for a GPU with this much shared memory per thread block. With less memory,
    blocks have fewer warps."""
    keys, queries = BACKWARD[pieces, head_dim][softcap or packed]
    while max(x.backward_bytes(head_dim, pieces) for x in (keys, queries)) > shared_bytes:
        keys, queries = (x._replace(warps=x.warps // 2) for x in (keys, queries))
    return keys, queries


class WgmmaTile(NamedTuple):
    """A tile of v4. Each of `warpgroups` consumer warpgroups owns 64 rows and loops over tiles of `columns`
    rows. The ring buffer has `stages` stages. The registers allow `per_sm` thread blocks per SM. `parts`: so
    many warpgroups share 64 rows (two roles in wgmma_backward.cuh). `persistent`: the forward has as many
    thread blocks as run at a time, instead of one for each block of queries."""

    columns: int
    warpgroups: int
    stages: int
    per_sm: int
    parts: int = 1
    persistent: bool = False

    @property
    def rows(self) -> int:
        return 64 * self.warpgroups // self.parts

    @property
    def threads(self) -> int:
        return 128 * (self.warpgroups + 1)

    def forward_bytes(self, head_dim: int) -> int:
        """Shared memory in bytes: the rings of Q, K and V, and mbarriers."""
        q_stages = 1 if head_dim > 128 else 2
        rows = q_stages * self.rows + 2 * self.stages * self.columns
        return rows * -(-head_dim // 64) * 128 + 16 * (q_stages + 2 * self.stages) + 44 * q_stages

    def forward_grid(self, blocks: int, packed: bool, causal: bool, keys: int, sms: int) -> int:
        """The number of thread blocks for `blocks` blocks of queries. Persistent thread blocks load the next
        queries early. With `causal`: for tiles that say so, from two waves on. Without, blocks of queries
        take equal times: from more than one wave on, with one thread block per SM, or if the waves are 85 %
        full."""
        slots = sms * self.per_sm
        even = self.per_sm == 1 or (keys <= FEW_KEYS and blocks >= 0.85 * slots * -(-blocks // slots))
        persistent = self.persistent and blocks >= 2 * slots if causal else even and blocks > slots
        # a grid of 2^31 blocks raises an error
        return slots if persistent and not packed and blocks < (1 << 31) - slots else blocks

    def backward_bytes(self, head_dim: int) -> int:
        """Shared memory in bytes: two fixed tiles, the ring of two moving ones, lse and delta, and
        mbarriers."""
        tiles = 2 * (self.rows + self.stages * self.columns) * -(-head_dim // 64) * 128
        weights = (self.parts - 1) * 2 * 64 * self.columns * 4
        return tiles + weights + self.stages * 2 * self.columns * 4 + 8 * (1 + 2 * self.stages)

    def ordered_bytes(self, head_dim: int) -> int:
        """Shared memory in bytes: K and V, and for each stage ds, a part of dq, Q, dO, lse and delta; and
        mbarriers."""
        row = -(-head_dim // 64) * 128
        stage = 128 * self.rows + self.columns * (head_dim * 4 + 2 * row + 8) + 32 + 4
        return 2 * self.rows * row + self.stages * stage + 8


# By head_dim: the tile for few keys under a causal mask, the tile for some keys, and for many. TMA loads rows
# of less than 128 bytes (head_dim < 64) slowly.
MANY_KEYS = 8192
MANY_KEYS_NARROW = 256  # the same for head_dim < 64
FEW_KEYS = 1024  # without a mask, K and V of one head take little of L2
WGMMA_FORWARD = {
    48: (*(WgmmaTile(96, 1, 2, 3),) * 2, WgmmaTile(128, 3, 2, 1, persistent=True)),
    64: (WgmmaTile(64, 1, 3, 3, persistent=True), WgmmaTile(96, 1, 2, 3), WgmmaTile(128, 3, 2, 1)),
    96: (*(WgmmaTile(128, 2, 2, 1, persistent=True),) * 2, WgmmaTile(128, 2, 2, 1)),
    128: (WgmmaTile(128, 2, 2, 1, persistent=True),) * 3,
    256: (WgmmaTile(80, 2, 2, 1),) * 3,
}
# By head_dim: the tiles of the thread blocks that own keys, and of those that own queries.
WGMMA_BACKWARD = {
    48: (WgmmaTile(96, 2, 3, 1), WgmmaTile(128, 2, 3, 1)),
    64: (WgmmaTile(96, 2, 3, 1), WgmmaTile(128, 2, 3, 1)),
    96: (WgmmaTile(64, 2, 3, 1), WgmmaTile(96, 2, 3, 1)),
    128: (WgmmaTile(48, 2, 3, 1), WgmmaTile(96, 2, 3, 1)),
    256: (WgmmaTile(64, 2, 2, 1, parts=2), WgmmaTile(48, 2, 2, 1)),
}

# of the backward in one launch, at head_dim 128: a thread block owns 128 keys
ORDERED = WgmmaTile(64, 2, 2, 1)
# most bytes of K and V that a section of heads reads there: sums of dq need the rest of L2
ORDERED_SECTION_BYTES = 16 << 20


def wgmma_forward(head_dim: int, keys: int, softcap: bool, causal: bool) -> WgmmaTile:
    """The tile of the forward. A softcap needs more registers than three consumers have."""
    few, some, many = WGMMA_FORWARD[wgmma_head_dim(head_dim)]
    if keys >= (MANY_KEYS if head_dim >= 64 else MANY_KEYS_NARROW) and not softcap:
        return many
    return few if causal and keys <= FEW_KEYS else some


def wgmma_head_dim(head_dim: int) -> int:
    """The head_dim of the v4 kernels that compute this head_dim, which is at most MOST_HEAD_DIM."""
    return min(d for d in WGMMA_FORWARD if d >= head_dim)


def most_head_dim(dtype: torch.dtype) -> int:
    return 128 if dtype == torch.float32 else MOST_HEAD_DIM


def padded_head_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else 128 if head_dim <= 128 else MOST_HEAD_DIM


def tiles(rows: int, size: int, sequences: int) -> int:
    """The number of tiles of `size` rows; for packed sequences an upper bound, see
    kernels_cu/attention/tile.cuh."""
    return -(-rows // size) if sequences < 0 else rows // size + sequences + 1


def section(
    keys: int, head_dim: int, group: int, heads: int, causal: bool, most_bytes: int = _SECTION_BYTES
) -> int:
    """The number of query heads in a section, a multiple of `group`, or all heads. The thread blocks of a
    section start one after the other, those with most keys first, and its K and V stay in L2. Without a mask
    and with few keys: one KV head at a time, which keeps device memory busy."""
    return (
        min(heads, group * max(1, most_bytes // max(1, 4 * keys * head_dim)))
        if causal or keys > FEW_KEYS
        else group
    )


# ---- decoding: few queries, see kernels_cu/attention/decode.cuh

CANDIDATES = "decode", "fused"
MOST_QUERIES = 16
_ROWS = 16  # of a tile of queries
_LEAST_TILES = 4  # with fewer tiles of keys, warps of the decoding kernel have no work
# fixed time of a wave of thread blocks, and of the launch that adds the splits, in tiles (0.24 us on an H200)
_LAUNCH_TILES = 12
# Fraction of idle SMs that costs nothing, because fewer SMs still saturate memory. Lower with split-K: the
# next call starts on them, unevenly.
_FREE_IDLE = 0.64
_FREE_IDLE_SPLIT = 0.16


class DecodeTile(NamedTuple):
    """A warp keeps `stages` tiles of K and V, of `tile_bytes` together, in shared memory. At least `per_sm`
    thread blocks fit into the registers of an SM."""

    warps: int = 8
    stages: int = 3
    per_sm: int = 1
    tile_bytes: int = 8192

    @property
    def bytes(self) -> int:
        """Shared memory in bytes."""
        return self.warps * self.stages * self.tile_bytes


DECODE = DecodeTile()


@cached(64)
def decode_tile(device: int, head_dim: int) -> DecodeTile:
    """The tile of the decoding kernel, with as many warps as fit into shared memory."""
    tile = DECODE._replace(tile_bytes=16384 if head_dim > 128 else 8192)
    fit = (device_of(device).shared_bytes - 1024) // (tile.stages * tile.tile_bytes)
    return tile._replace(warps=min(tile.warps, fit))


@cached(4096)
def decode(heads: int, rows: int, tiles: int, device: int, tile: DecodeTile = DECODE) -> tuple[int, int]:
    """The numbers of row tiles and splits for `heads` KV heads of all sequences, `rows` queries per KV head
    and `tiles` tiles of keys, of 8 KB. Time is counted in tiles of a thread block in a full wave. A split
    costs its partial sums."""
    row_tiles = -(-rows // _ROWS)
    blocks, most = heads * row_tiles, max(1, tiles // (tile.warps * tile.tile_bytes // 8192))
    gpu = device_of(device)
    # thread blocks that run at a time
    slots = gpu.sms * max(1, min(tile.per_sm, gpu.sm_shared_bytes // (tile.bytes + 2048)))
    choices = {1, *(max(1, min(most, waves * slots // blocks)) for waves in range(1, 5))}

    def cost(splits: int) -> float:
        full, waves = blocks * splits / slots, -(-blocks * splits // slots)
        busy = full if waves - full < (_FREE_IDLE if splits == 1 else _FREE_IDLE_SPLIT) else waves
        return (
            busy * -(-tiles // splits)
            + waves * _LAUNCH_TILES
            + (splits > 1) * (_LAUNCH_TILES + 0.05 * splits)
        )

    return row_tiles, min(sorted(choices), key=cost)


def key_tiles(keys: int, head_dim: int, itemsize: int = 2) -> int:
    """The number of tiles of 8 KB that the decoding kernel reads per KV head; with a head_dim above 128 two
    of them are one of its tiles."""
    return -(-keys * padded_head_dim(head_dim) * itemsize // 4096)


def decodes(queries: int, keys: int, head_dim: int) -> bool:
    """True if the decoding kernel computes the forward."""
    fits = queries <= MOST_QUERIES and head_dim <= MOST_HEAD_DIM and key_tiles(keys, head_dim) >= _LEAST_TILES
    return fits and eligible(CANDIDATES, str)[:1] == ["decode"]
