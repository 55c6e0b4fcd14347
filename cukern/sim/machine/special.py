"""The special registers: a thread's place in its block and grid, and what else a kernel may ask."""

from typing import TYPE_CHECKING

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.instructions.decode import UNSIGNED
from cukern.sim.machine.geometry import block_index, clusters, xyz

if TYPE_CHECKING:
    from cukern.sim.machine.machine import Machine

WIDTHS = {"%clock64": 64, "%globaltimer": 64, "%gridid": 64, "%is_explicit_cluster": 1}
CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SMS = 132  # multiprocessors of the GPU that is simulated


def value(m: "Machine", name: str) -> np.ndarray:
    """A special register when a batch begins, one element a lane, or one where it is the same for all."""
    register, _, axis = name.partition(".")
    launched, axis_number = m.launched, "xyz".find(axis) if axis else 0
    cluster, blocks = launched.cluster, m.order.block_of + m.first_block
    of_cluster, rank = np.divmod(blocks, m.order.blocks_a_cluster)
    indices = {
        "%tid": lambda: xyz(m.thread_of, launched.block),
        "%ctaid": lambda: block_index(blocks, launched.grid, cluster),
        "%clusterid": lambda: xyz(of_cluster, clusters(launched.grid, cluster)),
        "%cluster_ctaid": lambda: xyz(rank, cluster),
    }
    if register in indices:
        values = indices[register]()[axis_number]
        return (values[:1] if (values == values[0]).all() else values).astype(np.uint32)
    lane = np.arange(m.lanes) % 32
    one = np.uint32(1)
    per_lane = {
        "%laneid": lambda: lane,
        "%warpid": lambda: m.thread_of // 32,
        "%smid": lambda: blocks % _SMS,
        "%cluster_ctarank": lambda: rank,
        "%lanemask_eq": lambda: one << lane.astype(np.uint32),
        "%lanemask_lt": lambda: (one << lane.astype(np.uint32)) - one,
        "%lanemask_le": lambda: (np.uint32(2) << lane.astype(np.uint32)) - one,
        "%lanemask_gt": lambda: ~((np.uint32(2) << lane.astype(np.uint32)) - one),
        "%lanemask_ge": lambda: ~((one << lane.astype(np.uint32)) - one),
    }
    if register in per_lane:
        return per_lane[register]().astype(np.uint32)
    uniform = {
        "%ntid": launched.block[axis_number],
        "%nctaid": launched.grid[axis_number],
        "%nclusterid": clusters(launched.grid, cluster)[axis_number],
        "%cluster_nctaid": cluster[axis_number],
        "%cluster_nctarank": m.order.blocks_a_cluster,
        "%is_explicit_cluster": m.program.kernel.explicit_cluster,
        "%nwarpid": 64,
        "%nsmid": _SMS,
        "%gridid": 1,
        "%dynamic_smem_size": max(0, launched.shared - m.program.dynamic_start),
        "%total_smem_size": launched.shared,
        "WARP_SZ": 32,
    }
    if register not in uniform:
        raise NotSimulated(f"the special register {name}")
    return np.array([uniform[register]], UNSIGNED[WIDTHS.get(name, 32)])
