"""Barriers of a block: bar.sync, bar.arrive and bar.red.

Threads that come first wait. When no lane of a batch can go on, those that wait wait for ever: a fault.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cukern.sim.faults import BarrierFault, Fault
from cukern.sim.instructions import warp
from cukern.sim.instructions.decode import Context
from cukern.sim.machine import clusters
from cukern.sim.ptx.module import Operand, Register

if TYPE_CHECKING:
    from cukern.sim.machine.machine import Group, Machine
    from cukern.sim.machine.program import Step


class _Meeting:
    """One barrier: who waits at it, in all blocks of the batch."""

    def __init__(self, m: "Machine"):
        self.pcs = np.full(m.lanes, -1)  # where a lane waits
        self.count = np.zeros(m.blocks, np.int64)  # of threads; 0: all of the block
        self.holds = np.zeros(m.lanes, bool)  # the predicate of a bar.red
        self.signals: dict[int, np.ndarray] = {}  # by warp that did not wait: what it could tell


class Barriers:
    def __init__(self, m: "Machine"):
        self.m = m
        self.meetings: dict[int, _Meeting] = {}
        self.outcomes: dict[int, Callable[[Group, np.ndarray], None]] = {}  # by instruction: what a bar.red does with the counts

    def sync(self, group: "Group", barrier: int, count: int, holds: np.ndarray | None = None) -> None:
        """These lanes wait."""
        m = self.m
        everybody = len(group.lanes) == m.blocks * m.launched.threads
        if everybody and not count and holds is None and barrier not in self.meetings:
            self._everybody_met()
            m.go(m.pc + 1, group)
            return
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        meeting.pcs[group.lanes] = m.pc
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        meeting.holds[group.lanes] = False if holds is None else holds
        self._complete(barrier, meeting)

    def arrive(self, group: "Group", barrier: int, count: int) -> None:
        """These lanes' warps signal, and go on."""
        m = self.m
        meeting = self.meetings.setdefault(barrier, _Meeting(m))
        meeting.count[np.unique(m.order.block_of[group.lanes])] = count
        for w in np.unique(m.order.warp_of[group.lanes]).tolist():
            meeting.signals[w] = m.order.knowledge(w)
        m.go(m.pc + 1, group)
        self._complete(barrier, meeting)

    def lanes_left(self) -> None:
        for barrier, meeting in list(self.meetings.items()):
            self._complete(barrier, meeting)

    def _everybody_met(self) -> None:
        self.m.order.barrier(np.arange(self.m.blocks))
        if self.m.order.blocks_a_cluster == 1:  # else others than the block's own may have read
            self.m.shared.shadow.forget_reads()

    def _complete(self, barrier: int, meeting: _Meeting) -> None:
        """Let go the blocks in which all have come."""
        m = self.m
        here = meeting.pcs >= 0
        by_warp = here.reshape(-1, 32).sum(axis=1)
        whole_warps = (by_warp > 0) & (by_warp == m.alive.reshape(-1, 32).sum(axis=1))
        whole_warps[list(meeting.signals)] = True
        counted = whole_warps.reshape(m.blocks, -1).sum(axis=1) * 32
        arrived = by_warp.reshape(m.blocks, -1).sum(axis=1)
        done = np.where(meeting.count == 0, arrived == m.launched.threads, (meeting.count > 0) & (counted >= meeting.count)) & (arrived > 0)
        if not done.any():
            return
        released = np.flatnonzero(here & done[m.order.block_of])
        self._check_alignment(released, meeting)
        self._order(np.flatnonzero(done), meeting, here)
        self._go(released, meeting)
        meeting.pcs[released] = -1
        meeting.signals = {w: told for w, told in meeting.signals.items() if not done[w // m.warps]}
        if not (meeting.pcs >= 0).any() and not meeting.signals:
            del self.meetings[barrier]

    def _order(self, blocks: np.ndarray, meeting: _Meeting, here: np.ndarray) -> None:
        m = self.m
        if len(blocks) == m.blocks and not meeting.count.any():
            self._everybody_met()
            return
        for block in blocks:
            warps = np.arange(block * m.warps, (block + 1) * m.warps)
            if not meeting.count[block]:
                m.order.barrier(np.array([block]))
                continue
            waiting = warps[here.reshape(-1, 32)[warps].any(axis=1)]
            told = [m.order.knowledge(int(w)) for w in waiting] + [meeting.signals[int(w)] for w in warps if int(w) in meeting.signals]
            m.order.learn(waiting, np.max(told, axis=0))

    def _go(self, released: np.ndarray, meeting: _Meeting) -> None:
        m = self.m
        blocks = m.order.block_of[released]
        held = np.bincount(blocks[meeting.holds[released]], minlength=m.blocks)
        came = np.bincount(blocks, minlength=m.blocks)
        pcs = meeting.pcs[released]
        for pc in np.unique(pcs):
            group = m.group(released[pcs == pc])
            outcome = self.outcomes.get(int(pc))
            if outcome is not None:
                own = m.order.block_of[group.lanes]
                outcome(group, np.stack((held[own], came[own])))
            m.go(int(pc) + 1, group)

    def _check_alignment(self, lanes: np.ndarray, meeting: _Meeting) -> None:
        """The lanes of one warp must wait at one instruction."""
        m = self.m
        pcs = meeting.pcs[lanes]
        first = np.full(m.lanes // 32, np.iinfo(np.int64).max)
        np.minimum.at(first, m.order.warp_of[lanes], pcs)
        apart = pcs != first[m.order.warp_of[lanes]]
        if apart.any():
            lane, pc = lanes[apart][0], int(pcs[apart][0])
            other = next(x for x in lanes if m.order.warp_of[x] == m.order.warp_of[lane] and meeting.pcs[x] != pc)
            raise m.fault(BarrierFault, lane, f"waits at a barrier, while of its warp {self._waits(other, int(meeting.pcs[other]))}", pc)

    def _waits(self, lane: int, pc: int) -> str:
        m = self.m
        return f"thread {m.block_and_thread(lane)[1]} waits at another, at {m.program.location(pc)}"

    def waits_at(self, lane: int) -> int | None:
        """The instruction at which a lane waits, if it does."""
        return next((int(x.pcs[lane]) for x in self.meetings.values() if x.pcs[lane] >= 0), None)

    def stuck(self) -> Fault | None:
        """The fault of lanes that wait for those that never come."""
        m = self.m
        barrier, meeting = next(((b, x) for b, x in self.meetings.items() if (x.pcs >= 0).any()), (0, None))
        if meeting is None:
            return None
        lane = int(np.flatnonzero(meeting.pcs >= 0)[0])
        block = m.order.block_of[lane]
        mine = (m.order.block_of == block) & (m.thread_of < m.launched.threads)
        missing = int(np.flatnonzero(mine & (meeting.pcs < 0))[0]) if (mine & (meeting.pcs < 0)).any() else None
        for_whom = f"{meeting.count[block]} threads" if meeting.count[block] else "all threads of the block"
        what = f"waits at barrier {barrier} for {for_whom}"
        what += f", but {m.whereabouts(missing)}" if missing is not None else ", and the block has no more"
        return m.fault(BarrierFault, lane, what, int(meeting.pcs[lane]))


def barrier(c: Context) -> "Step":
    if c.parts[:2] == ["bar", "warp"]:
        return warp.sync(c)
    if c.parts[:2] == ["barrier", "cluster"]:
        return clusters.barrier(c)
    parts = [p for p in c.parts[1:] if p not in ("cta", "aligned")]
    kind = parts[0]
    if kind not in ("sync", "arrive", "red") or (kind != "red" and len(parts) > 1):
        raise c.unknown()
    operands = list(c.operands)
    target = operands.pop(0) if kind == "red" else None
    predicate = operands.pop() if kind == "red" else None
    number = c.source(operands[0], "u32")
    count = c.source(operands[1], "u32") if len(operands) > 1 else c.program.constant(0, 32)
    holds = c.source(predicate, "pred") if predicate is not None else None
    negated = isinstance(predicate, Register) and predicate.negated
    outcome = _outcome(c, parts[1], target) if kind == "red" else None

    def run(m: "Machine", group: "Group") -> None:
        if outcome is not None:
            m.barriers.outcomes[c.pc] = lambda lanes, counts: outcome(m, lanes, counts)
        numbers, counts = m.spread(group, number), m.spread(group, count)
        for n, threads in (
            set(zip(numbers.tolist(), counts.tolist(), strict=True)) if len(m.regs[number]) > 1 else {(numbers[0], counts[0])}
        ):
            chosen = (numbers == n) & (counts == threads)
            some = group if chosen.all() else m.group(group.lanes[chosen])
            if kind == "arrive":
                m.barriers.arrive(some, int(n), int(threads))
            else:
                m.barriers.sync(some, int(n), int(threads), None if holds is None else m.spread(some, holds) ^ negated)

    return run


def _outcome(c: Context, operation: str, target: Operand | None) -> Callable[["Machine", "Group", np.ndarray], None]:
    """Puts the result of a bar.red into its register, from how many lanes held and came."""
    results: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "and": lambda held, came: held == came,
        "or": lambda held, came: held > 0,
        "popc": lambda held, came: held.astype(np.uint32),
    }
    register = c.target(target) if target is not None else None
    if operation not in results or register is None:
        raise c.unknown()
    return lambda m, group, counts: m.put(group, register.number, results[operation](counts[0], counts[1]))
