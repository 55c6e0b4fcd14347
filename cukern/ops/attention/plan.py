"""Tiles, grids and shared memory of the fused kernels."""

from typing import NamedTuple

from cukern.runtime.device import cached, device_of

MOST_HEAD_DIM = 128
PADDING = 128  # rows of lse and delta of a head are padded to a multiple: at least the largest tile
_L2_BYTES = 32 << 20  # K and V of the heads of a section; the L2 cache of an A100 has 40 MB, that of an H100 50 MB


class Tile(NamedTuple):
    """A warp owns 16 * row_blocks rows, and a thread block loops over tiles of `columns` rows of the other operands. `per_sm`: the thread
    blocks per SM that its registers allow."""

    row_blocks: int
    columns: int
    warps: int
    per_sm: int

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps

    def forward_bytes(self, head_dim: int) -> int:
        """Shared memory in bytes: Q, and two stages of K and V."""
        return (self.rows + 4 * self.columns) * head_dim * 2


class BackwardTile(NamedTuple):
    """The same of the backward: `keys` of the thread blocks that own keys, `queries` of those that own queries."""

    keys: Tile
    queries: Tile

    def backward_bytes(self, head_dim: int) -> int:
        """Shared memory in bytes: two fixed tiles, two stages of two moving ones, and of lse and delta."""
        return max((2 * x.rows + 4 * x.columns) * head_dim * 2 + 4 * x.columns * 4 for x in self)


# By head_dim. The first tile of which `per_sm` thread blocks fit into an SM's shared memory is chosen, else the last.
FORWARD = {64: (Tile(2, 64, 4, 2),), 128: (Tile(2, 32, 4, 2),)}
BACKWARD = {
    64: (BackwardTile(Tile(2, 32, 4, 2), Tile(2, 32, 4, 2)),),
    128: (BackwardTile(Tile(1, 32, 4, 2), Tile(2, 32, 4, 2)),),
}


def padded_head_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else MOST_HEAD_DIM


@cached(256)
def tiles(head_dim: int, device: int) -> tuple[Tile, BackwardTile]:
    """The tiles of forward and backward for a padded head_dim."""
    room = device_of(device).shared_bytes
    forward = next((x for x in FORWARD[head_dim] if _fits(x.forward_bytes(head_dim), x.per_sm, room)), FORWARD[head_dim][-1])
    options = BACKWARD[head_dim]
    return forward, next((x for x in options if _fits(x.backward_bytes(head_dim), x.keys.per_sm, room)), options[-1])


def _fits(used: int, per_sm: int, room: int) -> bool:
    return per_sm * (used + 1024) <= room + 1024  # the driver takes 1 KB of each thread block


def section(keys: int, head_dim: int, group: int, heads: int) -> int:
    """The number of query heads whose K and V fit into the L2 cache together: a multiple of `group`, or all heads."""
    return min(heads, group * max(1, _L2_BYTES // max(1, 4 * keys * head_dim)))
