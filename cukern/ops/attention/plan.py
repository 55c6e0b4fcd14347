"""Tiles, grids and shared memory of the fused kernels."""

from typing import NamedTuple

from cukern.runtime.device import Device, cached, device_of

MOST_HEAD_DIM = 128
PADDING = 128  # rows of lse and delta of a head are padded to a multiple: at least the largest tile
_L2_BYTES = 32 << 20  # K and V of the heads of a section; the L2 cache of an A100 has 40 MB, that of an H100 50 MB


class Tile(NamedTuple):
    """A thread block owns 16 * row_blocks * warps rows, and loops over tiles of `columns` rows of the other operands. `per_sm`: the thread
    blocks per SM that its registers allow."""

    row_blocks: int
    columns: int
    warps: int
    per_sm: int

    @property
    def rows(self) -> int:
        return 16 * self.row_blocks * self.warps


# By head_dim. The first tile of which `per_sm` thread blocks fit into an SM's shared memory is chosen, else the last.
FORWARD = {64: (Tile(2, 64, 4, 2),), 128: (Tile(2, 64, 4, 2),)}
BACKWARD = {64: (Tile(1, 64, 4, 2),), 128: (Tile(1, 64, 4, 2), Tile(1, 32, 4, 2))}


def padded_head_dim(head_dim: int) -> int:
    return 64 if head_dim <= 64 else MOST_HEAD_DIM


def forward_bytes(tile: Tile, head_dim: int) -> int:
    """Shared memory of the forward, in bytes: Q, and two stages of K and V."""
    return (tile.rows + 4 * tile.columns) * head_dim * 2


def backward_bytes(tile: Tile, head_dim: int) -> int:
    """Shared memory of the backward, in bytes: two fixed tiles, two stages of two moving ones, and of lse and delta."""
    return (2 * tile.rows + 4 * tile.columns) * head_dim * 2 + 4 * tile.columns * 4


@cached(256)
def tiles(head_dim: int, device: int) -> tuple[Tile, Tile]:
    """The tiles of forward and backward for a padded head_dim."""
    facts = device_of(device)
    return _fitting(FORWARD[head_dim], facts, head_dim, False), _fitting(BACKWARD[head_dim], facts, head_dim, True)


def _fitting(options: tuple[Tile, ...], device: Device, head_dim: int, backward: bool) -> Tile:
    for tile in options:
        used = (backward_bytes if backward else forward_bytes)(tile, head_dim)
        if tile.per_sm * (used + 1024) <= device.shared_bytes + 1024:  # the driver takes 1 KB of each thread block
            return tile
    return options[-1]


def section(keys: int, head_dim: int, group: int, heads: int) -> int:
    """The number of query heads whose K and V fit into the L2 cache together: a multiple of `group`, or all heads."""
    return min(heads, group * max(1, _L2_BYTES // max(1, 4 * keys * head_dim)))
