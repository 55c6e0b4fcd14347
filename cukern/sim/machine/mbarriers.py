"""mbarrier: a barrier in shared memory, whose phase ends when the arrivals that it counts are there, also from other blocks of the cluster,
and the bytes that it expects of st.async.

What st.async writes is known to those who have waited at its mbarrier, and in flight until then. Lenient is that an arrival tells those who
wait all that its warp knew, whatever its scope is, also for the other lanes, and so does an st.async; that a wait of one lane is one of its
warp; and that arrivals at a block that may have ended are not seen, only at one that has. Strict is that all arrivals of one instruction
are of one phase. try_wait waits until it is true. PTX ISA, mbarrier and st.async.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cukern.sim.faults import BarrierFault, Fault
from cukern.sim.instructions import access
from cukern.sim.instructions.decode import UNSIGNED, Context
from cukern.sim.memory.order import IN_FLIGHT
from cukern.sim.ptx import module as ptx

if TYPE_CHECKING:
    from cukern.sim.machine.machine import Group, Machine
    from cukern.sim.machine.program import Step

_SCOPES = {"release", "acquire", "cta", "cluster", "shared", "shared::cta", "shared::cluster", "b64"}


@dataclass
class _Mbarrier:
    count: int  # arrivals of a phase
    missing: int
    told: np.ndarray  # what those who arrived knew, of all phases
    learned: np.ndarray  # what those learn who wait, of the phases that have ended
    bytes: int = 0  # expected, and not there yet
    phase: int = 0
    flights: list[tuple[int, np.ndarray, np.ndarray, int]] = field(default_factory=list)  # instruction, positions, lanes, size


class Mbarriers:
    """All of a batch, by their position in shared memory, and who waits at them."""

    def __init__(self, m: "Machine"):
        self.m = m
        self.at: dict[int, _Mbarrier] = {}
        self.pcs = np.full(m.lanes, -1)  # where a lane waits
        self.positions, self.parities = np.zeros(m.lanes, np.int64), np.zeros(m.lanes, np.int64)
        self.results: dict[int, int] = {}  # by instruction: its predicate

    def init(self, group: "Group", addresses: np.ndarray, counts: np.ndarray) -> None:
        m = self.m
        positions = m.shared.store(m, group.lanes, addresses, 8, np.zeros(1, np.uint64))
        for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
            nothing = np.zeros(m.order.warps_a_cluster, np.int64)
            self.at[position] = _Mbarrier(count, count, nothing.copy(), nothing)

    def find(self, group: "Group", space: str, addresses: np.ndarray) -> np.ndarray:
        """The positions of the mbarriers of these lanes, which must know of their init."""
        m, where = self.m, self.m.spaces[space]
        where.load(m, group.lanes, addresses, 8, strong=True)
        positions = np.broadcast_to(where.place(m, group.lanes, addresses, 8, "uses").at, group.lanes.shape)
        for row, position in enumerate(positions.tolist()):
            if position not in self.at:
                raise m.fault(BarrierFault, group.lanes[row], f"uses {where.describe(m.shared.region, position)}, which is no mbarrier")
        return positions

    def arrive(self, group: "Group", positions: np.ndarray, expected: np.ndarray) -> None:
        m, order = self.m, self.m.order
        for position in np.unique(positions).tolist():
            barrier, rows = self.at[position], positions == position
            lanes = group.lanes[rows]
            if len(lanes) > barrier.missing:
                raise m.fault(BarrierFault, lanes[0], f"arrives at an mbarrier at which only {barrier.missing} arrivals are missing")
            barrier.missing -= len(lanes)
            barrier.bytes += int(expected[rows].sum())
            for warp in np.unique(order.warp_of[lanes]).tolist():
                np.maximum(barrier.told, order.knowledge(warp), out=barrier.told)
            self._complete(position)

    def bring(self, group: "Group", positions: np.ndarray, to: np.ndarray, size: int) -> None:
        """These lanes' st.async have written `size` bytes each."""
        for position in np.unique(positions).tolist():
            rows = positions == position
            self.at[position].bytes -= size * int(rows.sum())
            self.at[position].flights.append((self.m.pc, to[rows], group.lanes[rows], size))
            self._complete(position)

    def wait(self, group: "Group", positions: np.ndarray, parities: np.ndarray, result: int) -> None:
        lanes = group.lanes
        self.pcs[lanes], self.positions[lanes], self.parities[lanes] = self.m.pc, positions, parities
        self.results[self.m.pc] = result
        for position in np.unique(positions).tolist():
            self._let_go(position)

    def _complete(self, position: int) -> None:
        """End the phase, if nothing is missing."""
        barrier, order = self.at[position], self.m.order
        if barrier.missing or barrier.bytes:
            return
        for pc, to, lanes, size in barrier.flights:
            order.clock.tick(pc)
            self.m.shared.shadow.arrived(order, to, size, lanes)
            barrier.told[np.unique(order.warp_of[lanes]) % order.warps_a_cluster] = order.clock.now + 1
        barrier.learned = barrier.told.copy()
        barrier.phase, barrier.missing = barrier.phase + 1, barrier.count
        barrier.flights.clear()
        self._let_go(position)

    def _let_go(self, position: int) -> None:
        """Those who wait for a phase that has ended go on."""
        m, barrier = self.m, self.at[position]
        lanes = np.flatnonzero((self.pcs >= 0) & (self.positions == position) & (self.parities != barrier.phase % 2))
        if not len(lanes):
            return
        m.order.learn(np.unique(m.order.warp_of[lanes]), barrier.learned)
        pcs = self.pcs[lanes]
        self.pcs[lanes] = -1
        for pc in np.unique(pcs).tolist():
            group = m.group(lanes[pcs == pc])
            m.put(group, self.results[pc], np.ones(1, bool))
            m.go(pc + 1, group)

    def waits_at(self, lane: int) -> int | None:
        """The instruction at which a lane waits, if it does."""
        return int(self.pcs[lane]) if self.pcs[lane] >= 0 else None

    def stuck(self) -> Fault | None:
        """The fault of lanes that wait for what never comes."""
        waiting = np.flatnonzero(self.pcs >= 0)
        if not len(waiting):
            return None
        lane = int(waiting[0])
        barrier = self.at[int(self.positions[lane])]
        what = f"waits at an mbarrier for {barrier.missing} arrivals and {barrier.bytes} bytes"
        return self.m.fault(BarrierFault, lane, what, int(self.pcs[lane]))


def mbarrier(c: Context) -> "Step":
    """mbarrier.init, .arrive, .arrive.expect_tx, whose state nobody takes, and .try_wait.parity, which waits until it is true."""
    kind, rest = c.parts[1], set(c.parts[2:]) - _SCOPES
    space = "cluster" if "shared::cluster" in c.parts else "shared"
    pc, operands = c.pc, list(c.operands)
    target = None if kind == "init" else c.target(operands.pop(0))
    known = {"init": set(), "arrive": {"expect_tx"} & rest, "try_wait": {"parity"}}
    if rest != known.get(kind) or (target is None) != (kind != "try_wait"):
        raise c.unknown()
    base, offset = c.address(operands[0])
    number = c.source(operands[1], "u32") if len(operands) > 1 else c.program.constant(0, 32)
    if kind == "arrive" and (len(operands) > 1) != bool(rest):
        raise c.unknown()

    def run(m: "Machine", group: "Group") -> None:
        m.pc = pc
        m.order.clock.tick(pc)
        addresses, numbers = access.offset_by(m.get(group, base), offset), m.spread(group, number)
        if kind == "init":
            m.mbarriers.init(group, addresses, numbers)
            m.go(pc + 1, group)
            return
        positions = m.mbarriers.find(group, space, addresses)
        if kind == "arrive":
            m.go(pc + 1, group)
            m.mbarriers.arrive(group, positions, numbers)
        else:
            assert target is not None
            m.mbarriers.wait(group, positions, numbers.astype(np.int64), target.number)

    return run


def store_async(c: Context) -> "Step":
    """st.async [to], values, [mbarrier]."""
    type_, pc = c.types[-1], c.pc
    (to, to_offset), (barrier, barrier_offset) = c.address(c.operands[0]), c.address(c.operands[2])
    sources = [c.source(x, type_) for x in c.items(c.operands[1])]
    width, count = ptx.WIDTHS[type_], len(sources)
    known = {"st", "async", "weak", "shared::cluster", "mbarrier::complete_tx::bytes", "v2", "v4", type_}
    if set(c.parts) - known or width not in (32, 64):
        raise c.unknown()
    size = width // 8 * count

    def run(m: "Machine", group: "Group") -> None:
        m.pc = pc
        m.order.clock.tick(pc)
        values = access.vectors(m, group, sources, UNSIGNED[width])
        positions = m.mbarriers.find(group, "cluster", access.offset_by(m.get(group, barrier), barrier_offset))
        addresses = access.offset_by(m.get(group, to), to_offset)
        m.order.clock.tick(pc)
        at = m.spaces["cluster"].store(m, group.lanes, addresses, size, values, IN_FLIGHT)
        if (at // m.shared.stride != positions // m.shared.stride).any():
            raise m.fault(BarrierFault, group.lanes[0], "writes to one block by st.async, and tells the mbarrier of another")
        m.go(pc + 1, group)
        m.mbarriers.bring(group, positions, at, size)

    return run
