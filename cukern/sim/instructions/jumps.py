"""Branches and traps."""

import numpy as np

from cukern.sim.faults import Fault
from cukern.sim.instructions.decode import Context
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step
from cukern.sim.ptx.module import Register, Symbol


def branch(c: Context) -> Step:
    (label,) = c.operands
    assert isinstance(label, Symbol)
    target = c.program.kernel.labels[label.name]
    return lambda m, group: m.go(target, group)


def branch_indexed(c: Context) -> Step:
    index, table = c.operands
    if not isinstance(index, Register) or not isinstance(table, Symbol):
        raise c.unknown()
    c.source(index, "u32")
    targets = np.array([c.program.kernel.labels[t] for t in c.program.kernel.tables[table.name]])

    def run(m: Machine, group: Group) -> None:
        m.poison.check(group, (index.number,), "a branch")
        for goal, some in m.groups(group.lanes, targets[m.spread(group, index.number)]):
            m.go(goal, some)

    return run


def trap(c: Context) -> Step:
    def run(m: Machine, group: Group) -> None:
        raise m.fault(Fault, group.lanes[0], "trap: the kernel stopped itself")

    return run
