"""The special registers, such as %tid.x, and the initial values of all registers."""

import numpy as np

from cukern.runtime.device import KNOWN
from cukern.sim.machine.batch import RESERVED_SHARED, Batch, block_index, clusters, xyz
from cukern.sim.machine.program import PARAMETER, SPECIAL_WIDTHS
from cukern.sim.numerics.integers import UNSIGNED
from cukern.sim.ptx.module import Symbol

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SMS = KNOWN["h200"].sms  # not SIMULATED_DEVICE.sms, which is 2 so that plans for small problems have several waves


def registers(m: Batch) -> list[np.ndarray]:
    """All registers at the start of a batch."""
    zeros = {width: np.zeros(1, dtype) for width, dtype in (*UNSIGNED.items(), (128, np.complex128))}  # b128: no step writes it
    found = [zeros[width] for width in m.program.widths]
    for i, constant in m.program.constants.items():
        found[i] = constant
    for name, i in m.program.specials.items():
        found[i] = _value(m, name)
    return found


def _value(m: Batch, name: str) -> np.ndarray:
    """A special register: one element per lane, or a single one if it is the same for all."""
    if name.startswith(PARAMETER):
        return np.array([m.launched.params.ctypes.data + int(name.removeprefix(PARAMETER))], np.uint64)
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
    bit = 1 << lane
    per_lane = {
        "%laneid": lane,
        "%warpid": m.thread_of // 32,
        "%smid": blocks % _SMS,
        "%cluster_ctarank": rank,
        "%lanemask_eq": bit,
        "%lanemask_lt": bit - 1,
        "%lanemask_le": 2 * bit - 1,
        "%lanemask_gt": -2 * bit,
        "%lanemask_ge": -bit,
    }
    if register in per_lane:
        return per_lane[register].astype(np.uint32)
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
        "%envreg1": launched.workspace >> 32,
        "%envreg2": launched.workspace & 0xFFFFFFFF,
        RESERVED_SHARED: launched.reserved_start,
        "WARP_SZ": 32,
    }
    if register not in uniform:
        pc = next(pc for pc, one in enumerate(m.program.kernel.code) if name in [x.name for x in one.operands if isinstance(x, Symbol)])
        raise m.not_simulated(f"the special register {name}", pc)
    return np.array([uniform[register]], UNSIGNED[SPECIAL_WIDTHS.get(name, 32)])
