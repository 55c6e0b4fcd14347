"""The special registers, such as %tid.x, and the initial values of all registers."""

import numpy as np

from cukern.runtime.device import KNOWN
from cukern.sim.machine.batch import RESERVED_SHARED, Batch, block_index, clusters, xyz
from cukern.sim.machine.program import PARAMETER, SPECIAL_WIDTHS
from cukern.sim.numerics.integers import UNSIGNED, Array
from cukern.sim.ptx.module import Symbol

CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
# not SIMULATED_DEVICE.sms, which is 2 so that plans for small problems have several waves
_SMS = KNOWN["h200"].sms


def registers(m: Batch) -> list[Array]:
    """All registers at the start of a batch."""
    # b128: no step writes it
    zeros = {width: np.zeros(1, dtype) for width, dtype in (*UNSIGNED.items(), (128, np.complex128))}
    found = [zeros[width] for width in m.program.widths]
    for i, constant in m.program.constants.items():
        found[i] = constant
    for name, i in m.program.specials.items():
        found[i] = _value(m, name)
    return found


def _value(m: Batch, name: str) -> Array:
    """A special register: one element per lane, or a single one if it is the same for all."""
    if name.startswith(PARAMETER):
        return np.array([m.launched.params.ctypes.data + int(name.removeprefix(PARAMETER))], np.uint64)
    register, _, axis = name.partition(".")
    launched, axis_number = m.launched, "xyz".find(axis) if axis else 0
    cluster, blocks = launched.cluster, np.arange(m.first_block, m.first_block + m.blocks)
    of_cluster, rank = np.divmod(blocks, m.order.blocks_a_cluster)
    by_block = {
        "%ctaid": lambda: block_index(blocks, launched.grid, cluster)[axis_number],
        "%clusterid": lambda: xyz(of_cluster, clusters(launched.grid, cluster))[axis_number],
        "%cluster_ctaid": lambda: xyz(rank, cluster)[axis_number],
        "%cluster_ctarank": lambda: rank,
        "%smid": lambda: blocks % _SMS,
    }
    thread = np.arange(m.lanes_a_block)
    lane, bit = thread % 32, 1 << thread % 32
    by_thread = {
        "%tid": lambda: xyz(thread, launched.block)[axis_number],
        "%laneid": lambda: lane,
        "%warpid": lambda: thread // 32,
        "%lanemask_eq": lambda: bit,
        "%lanemask_lt": lambda: bit - 1,
        "%lanemask_le": lambda: 2 * bit - 1,
        "%lanemask_gt": lambda: -2 * bit,
        "%lanemask_ge": lambda: -bit,
    }
    if register in by_block or register in by_thread:
        values = (by_block[register] if register in by_block else by_thread[register])().astype(np.uint32)
        if (values == values[0]).all():
            return values[:1]
        return np.repeat(values, m.lanes_a_block) if register in by_block else np.tile(values, m.blocks)
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
        pc = next(
            pc
            for pc, one in enumerate(m.program.kernel.code)
            if name in [x.name for x in one.operands if isinstance(x, Symbol)]
        )
        raise m.not_simulated(f"the special register {name}", pc)
    return np.array([uniform[register]], UNSIGNED[SPECIAL_WIDTHS.get(name, 32)])
