"""Tiles, grids and shared memory of the fused kernels."""

from typing import NamedTuple

MOST_HEAD_DIM = 128
_L2_BYTES = 32 << 20  # K and V of the heads of a section; the L2 cache of an A100 has 40 MB, that of an H100 50 MB


class Tile(NamedTuple):
    """A warp owns 16 * row_blocks rows, and a thread block loops over tiles of `columns` rows of the other operands. `per_sm`: at least
    this many thread blocks fit into the registers of an SM."""

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
        """Shared memory in bytes: two fixed tiles, two stages of two moving ones, and lse and delta."""
        return max((2 * x.rows + 4 * x.columns) * head_dim * 2 + max(2 * x.rows, 4 * x.columns) * 4 for x in self)


# By head_dim, without and with a softcap, which needs more registers.
FORWARD = {64: (Tile(2, 128, 4, 2), Tile(2, 64, 4, 2)), 128: (Tile(2, 48, 4, 2), Tile(2, 32, 4, 2))}
BACKWARD = {
    64: (BackwardTile(Tile(2, 32, 4, 2), Tile(2, 48, 4, 2)),) * 2,
    128: (BackwardTile(Tile(1, 64, 4, 2), Tile(2, 32, 4, 2)), BackwardTile(Tile(1, 32, 4, 2), Tile(1, 32, 4, 2))),
}


def padded_head_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else MOST_HEAD_DIM


def section(keys: int, head_dim: int, group: int, heads: int) -> int:
    """The number of query heads whose K and V fit into the L2 cache together: a multiple of `group`, or all heads."""
    return min(heads, group * max(1, _L2_BYTES // max(1, 4 * keys * head_dim)))
