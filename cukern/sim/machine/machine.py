"""Runs a kernel's instructions for a batch of blocks at once: a lane is a thread, a register is an array with one element a lane.

Lanes that are at one instruction form a group. The group that is furthest behind runs, so that groups which parted at a branch meet again
where the branch ends. A register that is the same for all lanes, such as a loop counter or an argument, is an array of one element.
"""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from cukern.sim.faults import Dim, Fault, StepLimit, Where
from cukern.sim.instructions.copies import Copies
from cukern.sim.instructions.warp import Warps
from cukern.sim.machine.barriers import Barriers
from cukern.sim.machine.clusters import Clusters, Distributed
from cukern.sim.machine.geometry import block_index, xyz
from cukern.sim.machine.mbarriers import Mbarriers
from cukern.sim.memory.order import Clock, Order
from cukern.sim.memory.spaces import Global, Private, Space

if TYPE_CHECKING:
    from cukern.sim.machine.program import Program

LANES_A_BATCH = 1 << 15
MOST_STEPS = 10_000_000  # instructions of a launch, each counted once for every 2048 lanes that execute it together: about a minute
_TURNS = 256  # after so many turns another group has one, or as many where lanes look for others' stores, or they might wait for ever


class Group:
    """Lanes that are at one instruction. `index` selects them from a register; `whole`: no other lane has yet to go on."""

    __slots__ = ("index", "lanes", "whole")

    def __init__(self, lanes: np.ndarray, all_lanes: int, live: int):
        self.lanes = lanes
        self.index: Any = slice(None) if len(lanes) == all_lanes else lanes
        self.whole = len(lanes) == live


class Launched:
    """What all batches of a launch have in common."""

    def __init__(self, name: str, program: "Program", grid: Dim, block: Dim, shared: int, params: bytes, memory: Global):
        self.name, self.program, self.grid, self.block = name, program, grid, block
        self.shared, self.params, self.memory = shared, params, memory
        self.threads = math.prod(block)
        self.warps = -(-self.threads // 32)
        self.cluster = program.kernel.cluster
        self.clock = Clock(math.prod(grid))
        self.steps = 0

    def run(self) -> None:
        blocks, together = math.prod(self.grid), math.prod(self.cluster)
        batch = max(1, LANES_A_BATCH // (self.warps * 32 * together)) * together
        with np.errstate(all="ignore"):
            for first in range(0, blocks, batch):
                Machine(self, first, min(batch, blocks - first)).run()


class Machine:
    """One batch of blocks."""

    def __init__(self, launched: Launched, first_block: int, blocks: int):
        self.launched, self.program = launched, launched.program
        self.first_block, self.blocks, self.warps = first_block, blocks, launched.warps
        self.lanes_a_block = self.warps * 32
        self.lanes = blocks * self.lanes_a_block
        self.order = Order(launched.clock, first_block, blocks, self.warps, math.prod(launched.cluster))
        self.thread_of = np.arange(self.lanes) % self.lanes_a_block
        self.alive = self.thread_of < launched.threads
        self.live = int(self.alive.sum())
        self.ended = np.zeros(self.lanes, np.int64)  # the instruction with which a lane left
        self.pc = 0
        self.spinning, self.shares = False, 0
        self.waiting: dict[int, Group] = {}
        self.barriers, self.warp_wide, self.copies = Barriers(self), Warps(self), Copies(self)
        self.spaces: dict[str, Space] = {"global": launched.memory, "const": launched.memory}
        names = self.program.shared_names
        self.spaces["shared"] = self.shared = Private("shared", blocks, launched.shared, self.order.block_of, names)
        self.clusters = Clusters(self)
        self.spaces["cluster"] = Distributed(self)
        self.mbarriers = Mbarriers(self)
        if self.program.local_size:
            lanes = np.arange(self.lanes)
            self.spaces["local"] = Private("local", self.lanes, self.program.local_size, lanes, self.program.local_names)
        self.regs: list[np.ndarray] = self.program.registers(self)

    # ---- the loop

    def run(self) -> None:
        self.go(0, self.group(np.flatnonzero(self.alive)))
        stretches, launched, turns = self.program.stretches, self.launched, 0
        while self.live:
            while self.waiting:
                turns += 1
                pc = self._next(turns)
                group = self.waiting.pop(pc)
                group.whole = len(group.lanes) == self.live
                steps, end, last = stretches[pc]
                for step in steps:
                    step(self, group)
                launched.steps += (len(steps) + 1) * (1 + len(group.lanes) // 2048)
                if launched.steps > MOST_STEPS:
                    self.pc = pc
                    raise self.fault(StepLimit, group.lanes[0], f"still runs after {launched.steps} steps: does its loop end?")
                if last is None:
                    self.go(end, group)
                else:
                    self.pc = end
                    last(self, group)
            if self.live:
                raise self.stuck()

    def _next(self, turns: int) -> int:
        """The instruction whose group has this turn: the one furthest behind, but for what lanes that wait for others need."""
        if turns % _TURNS == 0:
            clock = self.launched.clock
            self.spinning, clock.looked = clock.looked, False
            self.shares += self.spinning
        elif not self.spinning:
            return min(self.waiting)
        return sorted(self.waiting)[(self.shares if self.spinning else turns // _TURNS) % len(self.waiting)]

    def go(self, pc: int, group: Group) -> None:
        """These lanes go on at `pc`."""
        other = self.waiting.get(pc)
        if other is not None:
            group = self.group(np.sort(np.concatenate((group.lanes, other.lanes))))
        self.waiting[pc] = group

    def group(self, lanes: np.ndarray) -> Group:
        return Group(lanes, self.lanes, self.live)

    def leave(self, group: Group) -> None:
        """These lanes are done."""
        self.alive[group.lanes] = False
        self.ended[group.lanes] = self.pc
        self.live -= len(group.lanes)
        if self.live:
            self.barriers.lanes_left()
            self.warp_wide.lanes_left()
        self.clusters.lanes_left(group)

    def stuck(self) -> Fault:
        return self.warp_wide.stuck() or self.barriers.stuck() or self.mbarriers.stuck() or self.clusters.stuck()

    def whereabouts(self, lane: int) -> str:
        """Where a lane is that others wait for in vain."""
        thread = self.block_and_thread(lane)[1]
        if not self.alive[lane]:
            return f"thread {thread} has ended at {self.program.location(int(self.ended[lane]))}"
        pc = self.warp_wide.waits_at(lane)
        pc = self.barriers.waits_at(lane) if pc is None else pc
        pc = self.mbarriers.waits_at(lane) if pc is None else pc
        pc = self.clusters.waits_at(lane) if pc is None else pc
        return f"thread {thread} waits at {self.program.location(pc or 0)}"

    # ---- registers

    def get(self, group: Group, register: int) -> np.ndarray:
        """A register of the group's lanes: one element each, or one for all."""
        values = self.regs[register]
        return values if len(values) == 1 else values[group.index]

    def spread(self, group: Group, register: int) -> np.ndarray:
        """A register of the group's lanes, one element each."""
        values = self.regs[register]
        return np.broadcast_to(values, group.lanes.shape) if len(values) == 1 else values[group.index]

    def put(self, group: Group, register: int, values: np.ndarray) -> None:
        if group.whole and (len(values) == 1 or len(values) == self.lanes):
            self.regs[register] = values
            return
        old = self.regs[register]
        new = np.broadcast_to(old, (self.lanes,)).copy() if len(old) == 1 else old.copy()
        new[group.index] = values
        self.regs[register] = new

    def select(self, group: Group, register: int, negated: bool) -> Group | None:
        """The lanes whose predicate holds; None if it holds for none."""
        values = self.regs[register]
        if len(values) == 1:
            return group if bool(values[0]) != negated else None
        chosen = values[group.index]
        if negated:
            chosen = ~chosen
        count = np.count_nonzero(chosen)
        if count == len(chosen):
            return group
        return self.group(group.lanes[chosen]) if count else None

    # ---- faults

    def block_and_thread(self, lane: int) -> tuple[Dim, Dim]:
        """The indices of the block and the thread that a lane of the batch is."""
        return self._indices(int(lane) + self.order.base)

    def _indices(self, lane: int) -> tuple[Dim, Dim]:
        block, thread = divmod(lane, self.lanes_a_block)
        return self.block_index(block), xyz(thread, self.launched.block)

    def block_index(self, block: int) -> Dim:
        """blockIdx of a block of the launch by its number."""
        return block_index(block, self.launched.grid, self.launched.cluster)

    def who(self, stamp: int) -> tuple[Dim, Dim, str]:
        """Block, thread and line of an access."""
        lane, pc = self.order.unpack(stamp)
        return *self._indices(lane), self.program.location(pc)

    def fault(self, kind: type[Fault], lane: int, what: str, pc: int | None = None) -> Fault:
        block, thread = self.block_and_thread(lane)
        return kind(what, Where(self.launched.name, block, thread, self.program.location(self.pc if pc is None else pc)))
