"""Branches, exits and calls."""

import numpy as np

from cukern.sim.faults import Fault, NotSimulated
from cukern.sim.instructions.decode import Context
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step
from cukern.sim.ptx.module import Register, Symbol, Vector


def branch(c: Context) -> Step:
    (label,) = c.operands
    assert isinstance(label, Symbol)
    target = c.program.kernel.labels[label.name]
    return lambda m, group: m.go(target, group)


def branch_indexed(c: Context) -> Step:
    index, table = c.operands
    if not isinstance(index, Register) or not isinstance(table, Symbol):
        raise c.unknown()
    targets = np.array([c.program.kernel.labels[t] for t in c.program.kernel.tables[table.name]])

    def run(m: Machine, group: Group) -> None:
        m.poison.check(group, (index.number,), "a branch")
        for goal, some in m.groups(group.lanes, targets[m.spread(group, index.number)]):
            m.go(goal, some)

    return run


def leave(c: Context) -> Step:
    return Machine.leave


def trap(c: Context) -> Step:
    def run(m: Machine, group: Group) -> None:
        raise m.fault(Fault, group.lanes[0], "trap: the kernel stopped itself")

    return run


def call(c: Context) -> Step:
    """Only __assertfail(message, file, line, function, size) is simulated: a failed assert."""
    name = next((x.name for x in c.operands if isinstance(x, Symbol)), c.opcode)
    if any(isinstance(x, Register) for x in c.operands):
        name = "a function through a pointer"
    arguments = next((x.items for x in c.operands if isinstance(x, Vector)), ())
    if name != "__assertfail":
        raise NotSimulated(f"call of {name}")
    registers = [c.program.params[a.name] for a in arguments if isinstance(a, Symbol)]

    def run(m: Machine, group: Group) -> None:
        message, file, line = (int(m.spread(group, r)[0]) for r in registers[:3])
        memory = m.launched.memory
        raise m.fault(Fault, group.lanes[0], f"assertion failed: {memory.text(message)} ({memory.text(file)}:{line})")

    return run
