"""How blocks are numbered: cluster by cluster, and within a cluster by rank, so that the blocks of a cluster have consecutive numbers.
A kernel without clusters has clusters of one block; its blocks are numbered in the order of blockIdx."""

from typing import Any

from cukern.runtime.limits import Dim


def xyz(i: Any, dims: Dim) -> tuple[Any, Any, Any]:
    """The x, y and z of linear index i, x varying fastest. i is a number or an array."""
    return i % dims[0], i // dims[0] % dims[1], i // (dims[0] * dims[1])


def block_index(number: Any, grid: Dim, cluster: Dim) -> tuple[Any, Any, Any]:
    """blockIdx of the block with that number."""
    outer, inner = divmod(number, cluster[0] * cluster[1] * cluster[2])
    of_cluster, in_cluster = xyz(outer, clusters(grid, cluster)), xyz(inner, cluster)
    x, y, z = (c * n + i for c, n, i in zip(of_cluster, cluster, in_cluster, strict=True))
    return x, y, z


def clusters(grid: Dim, cluster: Dim) -> Dim:
    """How many clusters the grid has along each axis."""
    return grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2]
