"""Executes a kernel's steps for a batch of blocks.

The group that is furthest behind in the program runs first, so that groups which separated at a branch meet
again where the branch ends."""

import math
from collections.abc import Callable

import numpy as np

from cukern.sim.faults import Fault, Misaligned, OutOfBounds, Race, StepLimit, Uninitialized
from cukern.sim.machine import options, special
from cukern.sim.machine.asynchronous import Copies, Mbarriers, Warpgroups
from cukern.sim.machine.barriers import Barriers, Warps
from cukern.sim.machine.batch import Batch, Group, Launched
from cukern.sim.machine.calls import Calls
from cukern.sim.machine.clusters import Clusters, Distributed
from cukern.sim.machine.options import FAILED, HELD
from cukern.sim.machine.poison import Flow, Poison
from cukern.sim.numerics.integers import UNSIGNED
from cukern.sim.ptx.module import Register

LANES_A_BATCH = 1 << 15
_TURN = 5  # a turn costs as much time as that many instructions
_POLL = 8  # so does a strong load of few lanes; an endless loop of them must end within seconds, too
# every 256 turns another group runs: once, or 256 times if lanes poll (the store that they wait for may be in
# that group)
_TURNS = 256

Step = Callable[["Machine", Group], None]
# Start of a straight-line stretch -> its steps, each with the instruction after it; the end of the stretch;
# the step at the end if that step itself sets where lanes continue (a jump); and for each instruction: its
# step without the guard, the guard, and how it passes uninitialized bits on.
Parts = list[tuple[Step, Register | None, Flow]]
Stretches = dict[int, tuple[list[tuple[Step, int]], int, Step | None, Parts]]


def run(launched: Launched, stretches: Stretches) -> None:
    """Execute a launch, batch by batch. Raises Fault or NotSimulated."""
    try:
        _run(launched, stretches)
    finally:
        if launched.options.coverage is not None and launched.seen is not None:
            launched.options.coverage.add(launched.program, launched.seen)


def _run(launched: Launched, stretches: Stretches) -> None:
    blocks, together = math.prod(launched.grid), math.prod(launched.cluster)
    batch = max(1, LANES_A_BATCH // (launched.warps * 32 * together)) * together
    with np.errstate(all="ignore"):
        started: list[Machine] = []
        limit = launched.options.steps or options.MOST_STEPS
        first = 0
        while started or first < blocks:
            if first < blocks:  # no batch is there, or those that are wait for others
                started.append(Machine(launched, stretches, first, min(batch, blocks - first)))
                first += batch
            try:
                started = [
                    machine
                    for machine in started
                    if not machine.run(limit, yields=first < blocks or len(started) > 1)
                ]
            except Fault as error:
                _report(launched, error, -1)
                return
    for shadow, positions, flags, fault_of in launched.stored:
        left = np.flatnonzero((flags & shadow.poisoned_bytes(positions, flags.shape[1])).any(axis=1))
        if len(left):
            fault = fault_of(int(left[0]))
            _report(launched, fault, hash(fault.where.location))
    for race in launched.suspects.values():
        _report(launched, race(), -1)


def _report(launched: Launched, fault: Fault, pc: int) -> None:
    """Raise a fault, or collect it."""
    collected = launched.options.collected
    if collected is None:
        raise fault
    if (type(fault), pc) not in launched.muted:
        launched.muted.add((type(fault), pc))
        collected.append(fault)


class Machine(Batch):
    """A batch with everything that its threads do together."""

    def __init__(self, launched: Launched, stretches: Stretches, first_block: int, blocks: int):
        super().__init__(launched, first_block, blocks)
        self.stretches, options_ = stretches, launched.options
        self.tolerant = options_.collected is not None or bool(options_.off)
        self.slow = self.tolerant or launched.seen is not None
        self.spinning, self.shares, self.turns, self.steps, self.limit = False, 0, 0, 0, 0
        self.barriers, self.warp_wide, self.copies = Barriers(self), Warps(self), Copies(self)
        self.clusters, self.mbarriers = Clusters(self), Mbarriers(self)
        self.bulk = Copies(self, "a wait for the copy (cp.async.bulk.wait_group)")
        self.warpgroups = Warpgroups(self)
        self.spaces["cluster"] = Distributed(self, self.clusters)
        self.regs = special.registers(self)
        self.calls = Calls(self)
        self.poison = Poison(self, launched.program.undefined)
        self.go(0, self.group(np.flatnonzero(self.alive)))

    def run(self, limit: int, yields: bool) -> bool:
        """Run to the end. Returns False before, if it `yields`, when lanes only poll: what they wait for may
        come from another batch."""
        self.limit = limit
        while self.live:
            while self.waiting:
                self.turns += 1
                pc = self._next(self.turns)
                if yields and self.spinning and self.turns % _TURNS == 0:
                    return False
                group = self.waiting.pop(pc)
                group.whole = len(group.lanes) == self.live
                steps, end, last, parts = self.stretches[pc]
                self._stretch(group, pc, end, steps, parts)
                self.launched.steps += end - pc + 1
                self.steps += (end - pc + _TURN) * (1 + len(group.lanes) // 8192)
                if self.steps > limit:
                    self.pc = pc
                    raise self.fault(
                        StepLimit, group.lanes[0], f"still runs after {self.steps} steps: does its loop end?"
                    )
                if last is None:
                    self.go(end, group)
                else:
                    self.pc = end
                    self._see(group, parts[-1][1])
                    last(self, group)
            if self.live:
                raise self.stuck()
        return True

    def advance(self, group: Group, most: int) -> int:
        """A step executes up to `most` further instructions, which would take a turn each. Returns how many,
        and counts them: as many as nothing could come between."""
        if not group.whole or self.slow or self.poisoned:
            return 0
        cost = _TURN * (1 + len(group.lanes) // 8192)
        count = min(most, _TURNS - 1 - self.turns % _TURNS, (self.limit - self.steps) // cost)
        self.launched.steps += count
        self.steps += count * cost
        self.turns += count
        self.pc += count
        return count

    def _stretch(self, group: Group, pc: int, end: int, steps: list[tuple[Step, int]], parts: Parts) -> None:
        """Execute the instructions before `end`: one by one where there are uninitialized values, or if
        faults or lines are recorded."""
        done = pc
        for step, upto in steps:
            if self.slow or self.poisoned:
                break
            step(self, group)
            done = upto
        for self.pc in range(done, end):
            self._see(group, parts[self.pc - pc][1])
            (self._tolerant_step if self.tolerant else self._step_with_poison)(group, *parts[self.pc - pc])

    def _see(self, group: Group, guard: Register | None) -> None:
        """These lanes come to an instruction: record it for the coverage."""
        if self.launched.seen is not None:
            holds = np.ones(1, bool) if guard is None else self.get(group, guard.number) ^ guard.negated
            self.launched.seen[self.pc] |= HELD * bool(holds.any()) | FAILED * bool(not holds.all())

    def _tolerant_step(self, group: Group, step: Step, guard: Register | None, flow: Flow) -> None:
        """Execute an instruction; a fault is collected, or ignored, and the access of its lanes left out."""
        while True:
            try:
                self._step_with_poison(group, step, guard, flow)
                return
            except Fault as fault:
                pc, kind = self.pc, type(fault)
                if kind not in self.launched.options.off:
                    _report(self.launched, fault, pc)
                if kind in (OutOfBounds, Misaligned):
                    group = self.group(np.setdiff1d(group.lanes, fault.lanes))
                    for register in flow.writes:
                        self.put(
                            self.group(np.asarray(fault.lanes)),
                            register,
                            np.zeros(1, UNSIGNED[self.program.widths[register]]),
                        )
                    if not len(group.lanes):
                        return
                elif kind not in (Race, Uninitialized):
                    raise

    def _step_with_poison(self, group: Group, step: Step, guard: Register | None, flow: Flow) -> None:
        if guard is not None:
            self.poison.check(group, (guard.number,), "a predicate")
            chosen = self.select(group, guard)
            if chosen is None:
                return
            group = chosen
        if flow.kind:
            self.poison.compute(step, flow, group)
        else:
            step(self, group)

    def _next(self, turns: int) -> int:
        """The instruction whose group runs now: the one furthest behind, or every _TURNS turns another
        one."""
        if turns % _TURNS == 0:
            clock = self.launched.clock
            self.spinning, clock.looked = clock.looked, False
            self.shares += self.spinning
        elif not self.spinning:
            return min(self.waiting)
        return sorted(self.waiting)[(self.shares if self.spinning else turns // _TURNS) % len(self.waiting)]

    def leave(self, group: Group) -> None:
        """These lanes exit."""
        self.bulk.leave(group.lanes)
        self.warpgroups.wait(group.lanes, None)
        self.alive[group.lanes] = False
        self.ended[group.lanes] = self.pc
        self.live -= len(group.lanes)
        if self.live:
            self.barriers.lanes_left()
            self.warp_wide.lanes_left()
        self.clusters.lanes_left(group)

    def polled(self, lanes: int, rounds: int = 1) -> None:
        """A strong load, or an atomic of `rounds` lanes one after the other: count what it costs."""
        self.steps += _POLL + 2 * rounds + lanes // 64

    def divergence(self, lane: int) -> str | None:
        return self.barriers.divergence(lane)

    def stuck(self) -> Fault:
        return (
            self.warp_wide.stuck() or self.barriers.stuck() or self.mbarriers.stuck() or self.clusters.stuck()
        )
