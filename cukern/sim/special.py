"""The special registers: a thread's place in its block and grid, and what else a kernel may ask."""

from typing import TYPE_CHECKING

import numpy as np

from cukern.sim.faults import NotSimulated

if TYPE_CHECKING:
    from cukern.sim.machine import Machine

WIDTHS = {"%clock64": 64, "%globaltimer": 64, "%gridid": 64}
CLOCKS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SMS = 132  # multiprocessors of the GPU that is simulated


def value(m: "Machine", name: str) -> np.ndarray:
    """A special register when a batch begins, one element a lane, or one where it is the same for all."""
    register, _, axis = name.partition(".")
    launched, axis_number = m.launched, "xyz".find(axis) if axis else 0
    if register in ("%tid", "%ctaid"):
        dims = launched.block if register == "%tid" else launched.grid
        i = m.thread_of if register == "%tid" else m.order.block_of + m.first_block
        for n in dims[:axis_number]:
            i = i // n
        values = i % dims[axis_number] if register == "%tid" or axis_number < 2 else i
        return (values[:1] if (values == values[0]).all() else values).astype(np.uint32)
    lane = np.arange(m.lanes) % 32
    one = np.uint32(1)
    per_lane = {
        "%laneid": lambda: lane,
        "%warpid": lambda: m.thread_of // 32,
        "%smid": lambda: (m.order.block_of + m.first_block) % _SMS,
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
        "%nwarpid": 64,
        "%nsmid": _SMS,
        "%gridid": 1,
        "%dynamic_smem_size": max(0, launched.shared - m.program.dynamic_start),
        "%total_smem_size": launched.shared,
        "WARP_SZ": 32,
    }
    if register not in uniform:
        raise NotSimulated(f"the special register {name}")
    return np.array([uniform[register]], np.uint64 if WIDTHS.get(name) == 64 else np.uint32)
