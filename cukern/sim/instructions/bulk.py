"""cp.async.bulk of one dimension: copies between global and shared memory that one thread starts. PTX ISA, cp.async.bulk.

A copy to shared memory reports its bytes to an mbarrier, and is in flight until the phase has ended. A copy to global memory is executed at
once: a source that is overwritten before cp.async.bulk.wait_group, or a result that is read before, is not reported.
"""

import numpy as np

from cukern.sim.faults import Fault
from cukern.sim.instructions.access import address_of
from cukern.sim.instructions.decode import Context
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step
from cukern.sim.memory.order import IN_FLIGHT
from cukern.sim.memory.spaces import each

_CHUNK = 16  # a copy's bytes and addresses are multiples of it
_HINTS = {"cp", "async", "bulk", "shared::cluster", "shared::cta", "global", "mbarrier::complete_tx::bytes", "bulk_group", "L2::cache_hint"}


def copy(c: Context) -> Step:
    if c.parts[3] in ("commit_group", "wait_group"):
        return lambda m, group: m.go(m.pc + 1, group)
    loads = c.parts[3] in ("shared::cluster", "shared::cta") and c.parts[4] == "global"
    stores = c.parts[3:5] == ["global", "shared::cta"]
    if not (loads or stores) or set(c.parts) - _HINTS:
        raise c.unknown()
    (to, to_offset), (from_, from_offset) = c.address(c.operands[0]), c.address(c.operands[1])
    count = c.source(c.operands[2], "u32")
    barrier, barrier_offset = c.address(c.operands[3]) if loads else (c.program.constant(0, 64), 0)

    def run(m: Machine, group: Group) -> None:
        m.pc = c.pc
        m.poison.check(group, (count,), "the size of a copy")
        targets, sources = (each(address_of(m, group, *place), group.lanes) for place in ((to, to_offset), (from_, from_offset)))
        sizes = m.spread(group, count).astype(np.int64)
        _check(m, group, targets, sources, sizes)
        times = sizes // _CHUNK
        rows = np.repeat(np.arange(len(sizes)), times)
        steps = (np.arange(len(rows)) - np.repeat(np.cumsum(times) - times, times)).astype(np.uint64) * np.uint64(_CHUNK)
        lanes, places = group.lanes[rows], targets[rows].astype(np.uint64) + steps
        m.order.clock.tick(m.pc)
        values = m.spaces["global" if loads else "shared"].load(m, lanes, sources[rows].astype(np.uint64) + steps, _CHUNK)
        m.order.clock.tick(m.pc)
        if loads:
            at = m.spaces["cluster"].store(m, lanes, places, _CHUNK, values, IN_FLIGHT)
            positions = m.mbarriers.find(group, "cluster", address_of(m, group, barrier, barrier_offset))
            m.mbarriers.bring(lanes, positions[rows], at, _CHUNK)
        else:
            m.launched.memory.store(m, lanes, places, _CHUNK, values)
        m.go(m.pc + 1, group)

    return run


def _check(m: Machine, group: Group, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
    for what, values in (("the size", sizes), ("the destination", targets), ("the source", sources)):
        bad = values.astype(np.int64) % _CHUNK != 0
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise m.fault(Fault, group.lanes[row], f"{what} of a cp.async.bulk is {int(values[row])}, which is not a multiple of {_CHUNK}")
