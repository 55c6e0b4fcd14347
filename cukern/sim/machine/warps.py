"""Lanes of a warp that wait for each other at a warp-wide instruction.

Lanes park until all lanes that their mask names have come. Lanes that have exited are not waited for.
"""

import numpy as np

from cukern.sim.faults import BarrierFault, Fault
from cukern.sim.machine.batch import Batch, Group

SYNC = -1  # stands for all bar.warp.sync: lanes may meet at different ones


class Warps:
    """Lanes that wait for others of their warp."""

    def __init__(self, m: Batch):
        self.m = m
        self.parked: dict[int, np.ndarray] = {}  # by instruction, or SYNC
        self.at = np.zeros(m.lanes, np.int64)
        self.masks = np.zeros(m.lanes, np.uint32)

    def meet(self, group: Group, masks: np.ndarray, key: int) -> Group | None:
        """The lanes whose partners are all here; the others park."""
        m = self.m
        if key not in self.parked and len(masks) == 1 and masks[0] == 0xFFFFFFFF and group.whole:
            return group
        lanes = group.lanes
        self.masks[lanes], self.at[lanes] = masks, m.pc
        self._check_members(lanes)
        if key in self.parked:
            lanes = np.sort(np.concatenate((lanes, self.parked.pop(key))))
        missing = self.masks[lanes] & bits(m.alive)[m.order.warp_of[lanes]] & ~self.ballot(lanes)
        m.waits_at[lanes] = np.where(missing, self.at[lanes], -1)
        if not missing.any():
            return group if len(lanes) == len(group.lanes) else m.group(lanes)
        ready, self.parked[key] = lanes[missing == 0], lanes[missing != 0]
        return m.group(ready) if len(ready) else None

    def ballot(self, lanes: np.ndarray, voters: np.ndarray | None = None) -> np.ndarray:
        """For each lane, 32 bits: those of its warp that are among the voters, by default among `lanes`."""
        return bits_of(lanes if voters is None else voters, self.m.lanes)[self.m.order.warp_of[lanes]]

    def _check_members(self, lanes: np.ndarray) -> None:
        outside = (self.masks[lanes] >> (lanes % 32).astype(np.uint32) & 1) == 0
        if outside.any():
            lane = lanes[outside][0]
            what = f"names the lanes {self.masks[lane]:#010x} of its warp, but it is lane {lane % 32} itself"
            raise self.m.fault(BarrierFault, lane, what)

    def lanes_left(self) -> None:
        """Some lanes have exited: those that wait for them try again."""
        parked, self.parked = self.parked, {}
        for lanes in parked.values():
            for pc, group in self.m.groups(lanes, self.at[lanes]):
                self.m.go(pc, group)

    def stuck(self) -> Fault | None:
        m = self.m
        for lanes in self.parked.values():
            lane = int(lanes[0])
            warp = m.order.warp_of[lane]
            wanted = np.flatnonzero(self.masks[lane] >> np.arange(32, dtype=np.uint32) & 1) + warp * 32
            missing = next(int(x) for x in wanted if m.alive[x] and x not in lanes)
            what = f"waits for the lanes {self.masks[lane]:#010x} of its warp, but {m.whereabouts(missing)}"
            return m.fault(BarrierFault, lane, what, int(self.at[lane]))
        return None


def bits(flags: np.ndarray) -> np.ndarray:
    """One bool per lane, packed into 32 bits per warp."""
    return np.packbits(flags, bitorder="little").view(np.uint32)


def bits_of(lanes: np.ndarray, count: int) -> np.ndarray:
    flags = np.zeros(count, bool)
    flags[lanes] = True
    return bits(flags)
