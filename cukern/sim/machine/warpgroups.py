"""wgmma in flight. PTX ISA, asynchronous warpgroup-level matrix instructions.

A product is computed at once. Until a wgmma.wait_group of its commit group, its results must not be used, and the shared memory of its
operands must not be written. Results in flight are marked like uninitialized registers (poison.py), so that moves of them are allowed.
The four warps of a warpgroup execute a wgmma together: if one of them has waited, the shared memory may be written.
"""

import numpy as np

from cukern.sim.machine.asynchronous import Copies
from cukern.sim.machine.batch import Batch, Group
from cukern.sim.memory.order import WARPGROUP

WARPS = 4


class Warpgroups(Copies):
    def __init__(self, m: Batch):
        super().__init__(m, "a wgmma.wait_group", WARPGROUP)

    def results(self, group: Group, registers: list[int]) -> None:
        """A wgmma of these lanes, not yet in a commit group, has written these registers."""
        self.m.poison.start(group, registers, self.committed[group.lanes])

    def wait(self, lanes: np.ndarray, newest: int | None) -> None:
        """These lanes wait until at most their `newest` last groups are in flight; None: they exit."""
        order = self.m.order
        limit = np.full(len(lanes), 1 << 62) if newest is None else self.committed[lanes] - newest
        self.m.poison.land(lanes, limit)
        if self.flights:
            groups = order.warpgroup_of(order.warp_of[lanes])
            of_group = np.full(order.lanes // 32 + 1, -1)
            np.maximum.at(of_group, groups, limit)
            self.land(of_group[order.warpgroup_of(order.warp_of)])
