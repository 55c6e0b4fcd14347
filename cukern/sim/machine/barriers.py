"""The barriers of a block, and warp-wide instructions: the lanes that wait at each of them.

Lanes wait until all others have come: those of the block, or those of the warp that their mask names. Lanes
that have exited are not waited for. If no lane of a batch can continue, those that wait would wait forever: a
fault."""

from collections.abc import Callable

import numpy as np

from cukern.sim.faults import BarrierFault, Fault
from cukern.sim.machine.batch import Batch, Group
from cukern.sim.memory.spaces import Array, first_row

SYNC = -1  # stands for all bar.warp.sync: lanes may meet at different ones


class _Meeting:
    """The lanes that wait at one barrier number, in all blocks of the batch."""

    def __init__(self, m: Batch):
        self.here = np.zeros(m.lanes, bool)  # lanes that wait
        self.count = np.zeros(m.blocks, np.int64)  # threads that the barrier waits for; 0: all of the block
        self.holds = np.zeros(m.lanes, bool)  # the predicate of a bar.red
        self.signals: dict[int, Array] = {}  # what each warp knew that has arrived and does not wait


class Barriers:
    def __init__(self, m: Batch):
        self.m = m
        self.meetings: dict[int, _Meeting] = {}
        # by instruction: writes the result of a bar.red
        self.outcomes: dict[int, Callable[[Group, Array, Array], None]] = {}
        self.passed = np.full(m.lanes, -1)  # the last barrier that a lane has passed, an instruction
        # block -> two instructions at which its threads met at one __syncthreads()
        self.divergent: dict[int, tuple[int, int]] = {}

    def sync(self, group: Group, barrier: int, count: int, holds: Array | None = None) -> None:
        """These lanes wait."""
        m = self.m
        self._check_count(group, barrier, count)
        everybody = len(group.lanes) == m.blocks * m.launched.threads
        if everybody and not count and holds is None and barrier not in self.meetings:
            self._everybody_met()
            self.passed[:] = m.pc
            m.go(m.pc + 1, group)
            return
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        m.waits_at[group.lanes], meeting.here[group.lanes] = m.pc, True
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        meeting.holds[group.lanes] = False if holds is None else holds
        self._complete(barrier, meeting)

    def arrive(self, group: Group, barrier: int, count: int) -> None:
        """These lanes arrive without waiting."""
        m = self.m
        self._check_count(group, barrier, count)
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        for w in np.unique(m.order.warp_of[group.lanes]).tolist():
            meeting.signals[w] = m.order.knowledge(w)
        m.go(m.pc + 1, group)
        self._complete(barrier, meeting)

    def _check_count(self, group: Group, barrier: int, count: int) -> None:
        """A barrier of a block has one of 16 numbers, and all who meet there name the same number of
        threads."""
        m = self.m
        if barrier > 15 or count % 32:
            rule = "the numbers are 0 to 15" if barrier > 15 else f"{count} threads are not whole warps"
            raise m.fault(BarrierFault, group.lanes[0], f"is at barrier {barrier}, but {rule}")
        meeting = self.meetings.get(barrier)
        if meeting is None:
            return
        blocks = m.order.block_of[group.lanes]
        came = np.zeros(m.blocks, bool)
        came[m.order.block_of[meeting.here]] = True
        came[[w // m.warps for w in meeting.signals]] = True
        differs = came[blocks] & (meeting.count[blocks] != count)
        if differs.any():
            row = first_row(differs)
            theirs, ours = (
                f"{n} threads" if n else "all threads" for n in (meeting.count[blocks[row]], count)
            )
            what = f"meets {ours} at barrier {barrier}, but others who are there meet {theirs}"
            raise m.fault(BarrierFault, group.lanes[row], f"{what}: all must name the same number")

    def lanes_left(self) -> None:
        for barrier, meeting in list(self.meetings.items()):
            self._complete(barrier, meeting)

    def _everybody_met(self) -> None:
        self.m.order.barrier(np.arange(self.m.blocks))
        if self.m.order.blocks_a_cluster == 1:  # else other blocks may have read, too
            self.m.shared.shadow.forget_accesses()

    def _complete(self, barrier: int, meeting: _Meeting) -> None:
        """Release the blocks in which all threads have arrived."""
        m = self.m
        by_warp = meeting.here.reshape(-1, 32).sum(axis=1)
        whole_warps = (by_warp > 0) & (by_warp == m.alive.reshape(-1, 32).sum(axis=1))
        whole_warps[list(meeting.signals)] = True
        counted = whole_warps.reshape(m.blocks, -1).sum(axis=1) * 32
        arrived = by_warp.reshape(m.blocks, -1).sum(axis=1)
        alive = m.alive.reshape(m.blocks, -1).sum(axis=1)
        done = np.where(
            meeting.count == 0, arrived == alive, (meeting.count > 0) & (counted >= meeting.count)
        ) & (arrived > 0)
        if not done.any():
            return
        released = np.flatnonzero(meeting.here & done[m.order.block_of])
        self._check_alignment(released)
        self._note_divergence(released, meeting)
        self.passed[released] = m.waits_at[released]
        self._order(np.flatnonzero(done), meeting)
        self._go(released, meeting)
        meeting.here[released] = False
        meeting.signals = {w: told for w, told in meeting.signals.items() if not done[w // m.warps]}
        if not meeting.here.any() and not meeting.signals:
            del self.meetings[barrier]

    def _order(self, blocks: Array, meeting: _Meeting) -> None:
        m = self.m
        if len(blocks) == m.blocks and not meeting.count.any():
            self._everybody_met()
            return
        for block in blocks:
            warps = np.arange(block * m.warps, (block + 1) * m.warps)
            if not meeting.count[block]:
                m.order.barrier(np.array([block]))
                continue
            waiting = warps[meeting.here.reshape(-1, 32)[warps].any(axis=1)]
            told = [m.order.knowledge(int(w)) for w in waiting] + [
                meeting.signals[int(w)] for w in warps if int(w) in meeting.signals
            ]
            m.order.learn(waiting, np.max(told, axis=0))

    def _go(self, released: Array, meeting: _Meeting) -> None:
        m = self.m
        blocks = m.order.block_of[released]
        held = np.bincount(blocks[meeting.holds[released]], minlength=m.blocks)
        came = np.bincount(blocks, minlength=m.blocks)
        for pc, group in m.resume(released):
            if pc in self.outcomes:
                own = m.order.block_of[group.lanes]
                self.outcomes[pc](group, held[own], came[own])

    def _check_alignment(self, lanes: Array) -> None:
        """All lanes of a warp must wait at the same instruction."""
        m = self.m
        pcs = m.waits_at[lanes]
        first = np.full(m.lanes // 32, np.iinfo(np.int64).max)
        np.minimum.at(first, m.order.warp_of[lanes], pcs)
        apart = pcs != first[m.order.warp_of[lanes]]
        if apart.any():
            lane, pc = lanes[apart][0], pcs[apart][0]
            other = next(
                x for x in lanes if m.order.warp_of[x] == m.order.warp_of[lane] and m.waits_at[x] != pc
            )
            another = (
                f"thread {m.block_and_thread(other)[1]} waits at another, at "
                f"{m.program.location(m.waits_at[other])}"
            )
            raise m.fault(BarrierFault, lane, f"waits at a barrier, while of its warp {another}", pc)

    def _note_divergence(self, released: Array, meeting: _Meeting) -> None:
        """Remember the blocks whose threads meet at __syncthreads() of different lines."""
        m = self.m
        pcs, blocks = m.waits_at[released], m.order.block_of[released]
        if (pcs == pcs[0]).all():
            return
        for block in np.unique(blocks).tolist():
            met = np.unique(pcs[blocks == block]).tolist()
            others = [pc for pc in met if m.program.location(pc) != m.program.location(met[0])]
            if others and not meeting.count[block]:
                self.divergent.setdefault(block, (met[0], others[0]))

    def divergence(self, lane: int) -> str | None:
        """How threads of the lane's block have missed each other at a __syncthreads(), if they have."""
        m, block = self.m, int(self.m.order.block_of[lane])
        if block in self.divergent:
            here, there = (m.program.location(pc) for pc in self.divergent[block])
            return (
                f"the threads of the block have met at different __syncthreads(), some at {here} and others "
                f"at {there}"
            )
        for meeting in self.meetings.values():
            passed_by = (
                meeting.here
                & (m.order.block_of == block)
                & (m.waits_at < m.pc)
                & (m.waits_at != self.passed[lane])
            )
            if passed_by.any() and not meeting.count[block]:
                other = first_row(passed_by)
                thread, line = m.block_and_thread(other)[1], m.program.location(int(m.waits_at[other]))
                return (
                    f"thread {thread} waits at the __syncthreads() at {line}, which this thread has passed by"
                )
        return None

    def stuck(self) -> Fault | None:
        """The fault if lanes wait for others that never arrive."""
        m = self.m
        barrier, meeting = next(((b, x) for b, x in self.meetings.items() if x.here.any()), (0, None))
        if meeting is None:
            return None
        lane = first_row(meeting.here)
        block = m.order.block_of[lane]
        mine = (m.order.block_of == block) & (m.thread_of < m.launched.threads)
        missing = np.flatnonzero(mine & ~meeting.here)
        for_whom = f"{meeting.count[block]} threads" if meeting.count[block] else "all threads of the block"
        what = f"waits at barrier {barrier} for {for_whom}"
        what += f", but {m.whereabouts(missing[0])}" if len(missing) else ", and the block has no more"
        return m.fault(BarrierFault, lane, what, m.waits_at[lane])


class Warps:
    """Lanes that wait for others of their warp."""

    def __init__(self, m: Batch):
        self.m = m
        self.parked: dict[int, Array] = {}  # by instruction, or SYNC
        self.at = np.zeros(m.lanes, np.int64)
        self.masks = np.zeros(m.lanes, np.uint32)

    def meet(self, group: Group, masks: Array, key: int, warpgroups: bool = False) -> Group | None:
        """The lanes whose partners have all arrived; the others park. `warpgroups`: the partners are the four
        warps of a warpgroup."""
        m = self.m
        if key not in self.parked and len(masks) == 1 and masks[0] == 0xFFFFFFFF and group.whole:
            return group
        lanes = group.lanes
        self.masks[lanes], self.at[lanes] = masks, m.pc
        self._check_members(lanes)
        if key in self.parked:
            lanes = np.sort(np.concatenate((lanes, self.parked.pop(key))))
        missing = self.masks[lanes] & bits(m.alive)[m.order.warp_of[lanes]] & ~self.ballot(lanes)
        if warpgroups:
            groups = m.order.warpgroup_of(np.arange(m.lanes // 32))
            absent = np.bincount(groups, (bits(m.alive) & ~bits_of(lanes, m.lanes)) != 0, len(groups))
            missing = absent[groups[m.order.warp_of[lanes]]] != 0
        m.waits_at[lanes] = np.where(missing, self.at[lanes], -1)
        if not missing.any():
            return group if len(lanes) == len(group.lanes) else m.group(lanes)
        ready, self.parked[key] = lanes[missing == 0], lanes[missing != 0]
        return m.group(ready) if len(ready) else None

    def ballot(self, lanes: Array, voters: Array | None = None) -> Array:
        """For each lane, 32 bits: those of its warp that are among the voters, by default among `lanes`."""
        return bits_of(lanes if voters is None else voters, self.m.lanes)[self.m.order.warp_of[lanes]]

    def _check_members(self, lanes: Array) -> None:
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
            whom, first = f"lanes {self.masks[lane]:#010x} of its warp", 32 * int(m.order.warpgroup_of(warp))
            if np.isin(wanted[m.alive[wanted]], lanes).all():
                whom, wanted = "four warps of its warpgroup", np.arange(first, min(first + 128, m.lanes))
            missing = next(int(x) for x in wanted if m.alive[x] and x not in lanes)
            what = f"waits for the {whom}, but {m.whereabouts(missing)}"
            return m.fault(BarrierFault, lane, what, int(self.at[lane]))
        return None


def bits(flags: Array) -> Array:
    """One bool per lane, packed into 32 bits per warp."""
    return np.packbits(flags, bitorder="little").view(np.uint32)


def bits_of(lanes: Array, count: int) -> Array:
    flags = np.zeros(count, bool)
    flags[lanes] = True
    return bits(flags)
