"""Accesses in flight: cp.async, bulk copies, and st.async with the mbarrier that it reports to. PTX ISA,
cp.async, mbarrier, st.async.

The simulator writes the data to shared memory at once. The shadow memory marks it as not yet readable. A
cp.async completes when its thread waits for it. The phase of an mbarrier ends when all expected arrivals
(also from other blocks of the cluster) and all expected bytes have come; then the writes of its st.async and
bulk copies become visible to those who wait for it. Some races are missed: an arrival or an st.async
publishes all that its warp knows, whatever its scope and lane; a wait of one lane counts for its warp; an
arrival at a block that may have exited is reported only if the block has exited. One rule is stricter than
PTX: all arrivals of one instruction belong to one phase."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cukern.sim.faults import BarrierFault, Fault, Race
from cukern.sim.machine.batch import Array, Batch, Group
from cukern.sim.memory.order import WARPGROUP
from cukern.sim.memory.shadow import BY_ASYNC_PROXY, BY_GENERIC_PROXY


class Flight(NamedTuple):
    numbers: Array  # of the commit group, by row
    lanes: Array
    positions: Array
    size: int
    pc: int
    time: int  # of the start
    read: bool  # of shared memory; else written

    def rows(self, chosen: Array) -> "Flight":
        return self._replace(
            numbers=self.numbers[chosen], lanes=self.lanes[chosen], positions=self.positions[chosen]
        )


class Copies:
    """Accesses to shared memory in flight, in groups that threads commit and wait for: the writes of
    cp.async, or the reads of bulk copies.

    A read in flight counts as an access when it ends; what was written meanwhile races with it."""

    def __init__(self, m: Batch, wait: str = "", flags: int = 0):
        """wait: what ends an access; flags: of the stamps of a read."""
        self.m, self.wait_name, self.flags = m, wait, flags
        self.flights: list[Flight] = []
        self.committed = np.zeros(m.lanes, np.int64)

    def commit(self, lanes: Array) -> None:
        self.committed[lanes] += 1

    def start(self, pc: int, lanes: Array, positions: Array, size: int, read: bool = False) -> None:
        self.flights.append(
            Flight(self.committed[lanes], lanes, positions, size, pc, self.m.order.clock.now, read)
        )

    def wait(self, lanes: Array, newest: int | None) -> None:
        """These lanes wait until at most their `newest` last groups are in flight; None: until none is."""
        if not self.flights:
            return
        limit = np.full(self.m.lanes, -1)
        limit[lanes] = 1 << 62 if newest is None else self.committed[lanes] - newest
        self.land(limit)

    def leave(self, lanes: Array) -> None:
        """These lanes exit. A read in flight may come after the end of the block, which frees its shared
        memory."""
        m, flights = self.m, self.flights
        self.wait(lanes, None)
        flight, row = next(
            ((f, row) for f in flights for row in np.flatnonzero(np.isin(f.lanes, lanes))[:1]), (None, 0)
        )
        if flight is not None and not m.mutes(Race):
            lane, where = flight.lanes[row], m.shared.describe(m.shared.region, int(flight.positions[row]))
            commit = "a cp.async.bulk.commit_group and " * bool(flight.numbers[row] == self.committed[lane])
            what = (
                f"still reads {flight.size} bytes, {where}, when its thread ends: {commit}{self.wait_name} "
                f"is missing before the end"
            )
            raise m.fault(Race, lane, what, flight.pc)

    def land(self, limit: Array) -> None:
        """The groups of each lane with a lower number than its limit have ended."""
        flights, self.flights = self.flights, []
        for flight in flights:
            landed = flight.numbers < limit[flight.lanes]
            if not landed.all():
                self.flights.append(flight.rows(~landed))
            if landed.any():
                self._land(flight if landed.all() else flight.rows(landed))

    def take(self, lanes: Array) -> list[Flight]:
        """The accesses of these lanes, which from now on something else waits for."""
        chosen = np.zeros(self.m.lanes, bool)
        chosen[lanes] = True
        flights, self.flights = self.flights, []
        self.flights = [rest for f in flights if len((rest := f.rows(~chosen[f.lanes])).lanes)]
        return [mine for f in flights if len((mine := f.rows(chosen[f.lanes])).lanes)]

    def _land(self, flight: Flight) -> None:
        m, shadow = self.m, self.m.shared.shadow
        if not flight.read:
            m.order.clock.tick(flight.pc)
            shadow.arrived(m.order, flight.positions, flight.size, flight.lanes)
            return
        found = shadow.written_since(flight.positions, flight.size, flight.time)
        if found is not None and not m.mutes(Race):
            row, stamp = found
            block, thread, line = m.who(stamp)
            where = m.shared.describe(m.shared.region, int(flight.positions[row]))
            what = (
                f"still reads {flight.size} bytes, {where}, when block {block}, thread {thread} writes "
                f"there at {line}"
            )
            raise m.fault(
                Race, flight.lanes[row], f"{what}: {self.wait_name} is missing before the write", flight.pc
            )
        m.order.clock.tick(flight.pc)
        shadow.read(m.order, flight.positions, flight.size, flight.lanes, flags=self.flags)


class Warpgroups(Copies):
    """wgmma in flight. PTX ISA, asynchronous warpgroup-level matrix instructions.

    A product is computed at once. Until a wgmma.wait_group of its commit group, its results must not be used,
    and the shared memory of its operands must not be written. Results in flight are marked like uninitialized
    registers (poison.py), so that moves of them are allowed. The four warps of a warpgroup execute a wgmma
    together: if one of them has waited, the shared memory may be written."""

    def __init__(self, m: Batch):
        super().__init__(m, "a wgmma.wait_group", WARPGROUP)

    def results(self, group: Group, registers: list[int]) -> None:
        """A wgmma of these lanes, not yet in a commit group, has written these registers."""
        self.m.poison.start(group, registers, self.committed[group.lanes])

    def wait(self, lanes: Array, newest: int | None) -> None:
        """These lanes wait until at most their `newest` last groups are in flight; None: they exit."""
        order = self.m.order
        limit = np.full(len(lanes), 1 << 62) if newest is None else self.committed[lanes] - newest
        self.m.poison.land(lanes, limit)
        if self.flights:
            groups = order.warpgroup_of(order.warp_of[lanes])
            of_group = np.full(order.lanes // 32 + 1, -1)
            np.maximum.at(of_group, groups, limit)
            self.land(of_group[order.warpgroup_of(order.warp_of)])


@dataclass
class _Mbarrier:
    count: int  # arrivals per phase
    missing: int
    told: Array  # what the arrived warps knew, in all phases
    learned: Array  # what waiting warps learn, from the phases that have ended
    bytes: int = 0  # expected, and not yet written
    phase: int = 0
    # instruction, positions, lanes, size, copied
    flights: list[tuple[int, Array, Array, int, int]] = field(default_factory=list)


class Mbarriers:
    """The mbarriers of a batch by their position in shared memory, and the lanes that wait at them."""

    def __init__(self, m: Batch):
        self.m = m
        self.at: dict[int, _Mbarrier] = {}
        self.positions = np.full(m.lanes, -1)  # of the mbarrier at which a lane waits, or -1
        self.parities = np.zeros(m.lanes, np.int64)
        self.results: dict[int, int] = {}  # instruction -> register of its predicate

    def init(self, group: Group, addresses: Array, counts: Array) -> None:
        m = self.m
        positions = m.shared.store(m, group.lanes, addresses, 8, np.zeros(1, np.uint64))
        for position, count in zip(positions.tolist(), counts.tolist(), strict=True):
            nothing = np.zeros(m.order.warps_a_cluster, np.int64)
            self.at[position] = _Mbarrier(count, count, nothing.copy(), nothing)

    def find(self, group: Group, space: str, addresses: Array) -> Array:
        """The positions of these lanes' mbarriers. Checks that their mbarrier.init happened before."""
        m, where = self.m, self.m.spaces[space]
        where.load(m, group.lanes, addresses, 8, strong=True)
        positions = where.place(m, group.lanes, addresses, 8, "uses")[0]
        for row, position in enumerate(positions.tolist()):
            if position not in self.at:
                raise m.fault(
                    BarrierFault,
                    group.lanes[row],
                    f"uses {where.describe(m.shared.region, position)}, which is no mbarrier",
                )
        return positions

    def phases(self, positions: Array) -> Array:
        """The numbers of the current phases."""
        return np.array([self.at[position].phase for position in positions.tolist()], np.uint64)

    def forget(self, positions: Array) -> None:
        """mbarrier.inval."""
        for position in set(positions.tolist()):
            del self.at[position]

    def expect(self, positions: Array, bytes_: Array) -> None:
        """The current phases also wait for these bytes."""
        for position in np.unique(positions).tolist():
            self.at[position].bytes += int(bytes_[positions == position].sum())
            self._complete(position)

    def check_incomplete(self, group: Group, positions: Array, counts: Array) -> None:
        """An arrival with .noComplete must not be the last one of its phase."""
        for position in np.unique(positions).tolist():
            if int(counts[positions == position].sum()) >= self.at[position].missing:
                lane = group.lanes[positions == position][-1]
                raise self.m.fault(
                    BarrierFault, lane, "arrives with .noComplete at an mbarrier, and completes its phase"
                )

    def arrive(
        self, group: Group, positions: Array, counts: Array, expected: Array, drop: bool = False
    ) -> None:
        """`counts`: arrivals of each lane; `expected`: bytes for which the phase also waits; `drop`: later
        phases have fewer arrivals."""
        m, order = self.m, self.m.order
        for position in np.unique(positions).tolist():
            barrier, rows = self.at[position], positions == position
            lanes = group.lanes[rows]
            count = int(counts[rows].sum())
            if count > barrier.missing:
                raise m.fault(
                    BarrierFault,
                    lanes[0],
                    f"arrives at an mbarrier at which only {barrier.missing} arrivals are missing",
                )
            barrier.missing -= count
            barrier.count -= count if drop else 0
            barrier.bytes += int(expected[rows].sum())
            for warp in np.unique(order.warp_of[lanes]).tolist():
                np.maximum(barrier.told, order.knowledge(warp), out=barrier.told)
            self._complete(position)

    def bring(self, lanes: Array, positions: Array, to: Array, size: int) -> None:
        """Asynchronous writes of these lanes, of `size` bytes each, have arrived; a lane may have several."""
        for position in np.unique(positions).tolist():
            rows = positions == position
            self.at[position].bytes -= size * int(rows.sum())
            self.at[position].flights.append((self.m.pc, to[rows], lanes[rows], size, BY_ASYNC_PROXY))
            self._complete(position)

    def follow(self, copies: Copies, lanes: Array, positions: Array) -> None:
        """The phase of the mbarrier of each lane ends after the copies that the lane has started."""
        of_lane = np.full(self.m.lanes, -1)
        of_lane[lanes] = positions
        for flight in copies.take(lanes):
            mine = of_lane[flight.lanes]
            for position in np.unique(mine).tolist():
                rows = mine == position
                self.at[position].flights.append(
                    (flight.pc, flight.positions[rows], flight.lanes[rows], flight.size, BY_GENERIC_PROXY)
                )

    def wait(self, group: Group, positions: Array, parities: Array, result: int, blocks: bool = True) -> None:
        """These lanes wait for the end of a phase; if it does not `block`, those whose phase has not ended
        get False."""
        lanes, m = group.lanes, self.m
        if not blocks:
            early = np.array(
                [
                    self.at[p].phase % 2 == parity
                    for p, parity in zip(positions.tolist(), parities.tolist(), strict=True)
                ]
            )
            m.order.clock.looked = True
            if early.any():
                waiting = m.group(lanes[early])
                m.put(waiting, result, np.zeros(1, bool))
                m.go(m.pc + 1, waiting)
                if early.all():
                    return
                lanes, positions, parities = lanes[~early], positions[~early], parities[~early]
        self.m.waits_at[lanes], self.positions[lanes], self.parities[lanes] = self.m.pc, positions, parities
        self.results[self.m.pc] = result
        for position in np.unique(positions).tolist():
            self._let_go(position)

    def _complete(self, position: int) -> None:
        """End the phase, if nothing is missing."""
        barrier, order = self.at[position], self.m.order
        if barrier.missing or barrier.bytes:
            return
        for pc, to, lanes, size, copied in barrier.flights:
            order.clock.tick(pc)
            self.m.shared.shadow.arrived(order, to, size, lanes, copied)
            barrier.told[np.unique(order.warp_of[lanes]) % order.warps_a_cluster] = order.clock.now + 1
        barrier.learned = barrier.told.copy()
        barrier.phase, barrier.missing = barrier.phase + 1, barrier.count
        barrier.flights.clear()
        self._let_go(position)

    def _let_go(self, position: int) -> None:
        """Release the lanes that wait for a phase that has ended."""
        m, barrier = self.m, self.at[position]
        lanes = np.flatnonzero((self.positions == position) & (self.parities != barrier.phase % 2))
        if not len(lanes):
            return
        m.order.learn(np.unique(m.order.warp_of[lanes]), barrier.learned)
        self.positions[lanes] = -1
        for pc, group in m.resume(lanes):
            m.put(group, self.results[pc], np.ones(1, bool))

    def stuck(self) -> Fault | None:
        """The fault if lanes wait for arrivals or bytes that never arrive."""
        waiting = np.flatnonzero(self.positions >= 0)
        if not len(waiting):
            return None
        lane = int(waiting[0])
        barrier = self.at[int(self.positions[lane])]
        what = f"waits at an mbarrier for {barrier.missing} arrivals"
        if barrier.bytes >= 0:
            what += f" and {barrier.bytes} bytes"
        else:
            what += f", and {-barrier.bytes} bytes more have come than its arrivals announced (expect_tx)"
        return self.m.fault(BarrierFault, lane, what, self.m.waits_at[lane])
