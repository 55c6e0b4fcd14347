"""Branches, traps, and calls: of functions, printf, a failed assert. Their arguments and results are in the
areas of machine/calls.py."""

import re
import sys
from collections.abc import Callable

import numpy as np

from cukern.sim.faults import Fault, NotSimulated
from cukern.sim.instructions.access import through
from cukern.sim.instructions.decode import Context, Group, Machine, Step
from cukern.sim.ptx.link import called
from cukern.sim.ptx.module import Register, Symbol

_FORMAT = re.compile(
    r"%(?P<how>[-+ #0]*\d*(?:\.\d+)?)(?P<long>hh|h|ll|l|z|t|j)?(?P<kind>[diouxXeEfFgGaAcsp%])"
)


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


def call(c: Context) -> Step:
    target, _, _ = called(c.instruction)
    caller = c.program.function_at(c.pc)
    if isinstance(target, Register):
        pointer = c.source(target, "b64")

        def run(m: Machine, group: Group) -> None:
            m.poison.check(group, (pointer,), "the address of a function")
            for name, some in m.calls.target(group, m.get(group, pointer)):
                m.calls.call(some, caller, name)

        return run
    if target.name in _BUILT_IN:
        return _BUILT_IN[target.name](c)
    if target.name not in c.program.functions:
        raise NotSimulated(f"call of {target.name}")
    return lambda m, group: m.calls.call(group, caller, target.name)


def leave(c: Context) -> Step:
    """ret: lanes return from a function; those in no call exit."""
    if c.parts[0] == "exit" or not c.program.functions:
        return Machine.leave

    def run(m: Machine, group: Group) -> None:
        rest = m.calls.leave(group)
        if rest is not None:
            m.leave(rest)

    return run


def _assertion(c: Context) -> Step:
    """__assertfail(message, file, line, function, size)."""

    def run(m: Machine, group: Group) -> None:
        words = m.calls.arguments[group.lanes[0], :20]
        (message, file), line = words[:16].view(np.uint64).tolist(), int(words[16:].view(np.uint32)[0])
        memory = m.launched.memory
        raise m.fault(
            Fault, group.lanes[0], f"assertion failed: {memory.text(message)} ({memory.text(file)}:{line})"
        )

    return run


def _print(c: Context) -> Step:
    """vprintf(format, arguments): lane after lane, each line with its block and thread."""

    def run(m: Machine, group: Group) -> None:
        for lane in group.lanes.tolist():
            form, buffer = m.calls.arguments[lane, :16].view(np.uint64).tolist()
            block, thread = m.block_and_thread(lane)
            text = _formatted(m, lane, m.launched.memory.text(form), buffer)
            sys.stdout.write(
                f"{m.launched.name}, block {block}, thread {thread}: {text}"
                + "\n" * (not text.endswith("\n"))
            )
        m.calls.result[group.lanes, :4] = 0
        m.go(m.pc + 1, group)

    return run


def _formatted(m: Machine, lane: int, form: str, buffer: int) -> str:
    at = buffer

    def value(match: re.Match[str]) -> str:
        nonlocal at
        kind, how, long = match["kind"], match["how"], match["long"] or ""
        if kind == "%":
            return "%"
        size = 8 if kind in "eEfFgGaAsp" or long in ("l", "ll", "z", "t", "j") else 4
        at += -at % size
        address = np.array([at], np.uint64)
        bits = through(
            m,
            "generic",
            np.array([lane]),
            address,
            lambda where, lanes, places: where.load(m, lanes, places, size),
        )
        at += size
        if kind in "eEfFgG":
            return f"%{how}{kind}" % bits.view(np.float64)[0]
        if kind in "aA":
            return float(bits.view(np.float64)[0]).hex()
        number = int(bits.view(np.int64 if size == 8 else np.int32)[0])
        if kind == "s":
            return f"%{how}s" % m.launched.memory.text(number)
        if kind == "c":
            return f"%{how}s" % chr(number & 0xFF)
        if kind == "p":
            return f"%{how}s" % hex(number)
        return f"%{how}{kind}" % (number if kind in "di" else number & (1 << 8 * size) - 1)

    return _FORMAT.sub(value, form)


_BUILT_IN: dict[str, Callable[[Context], Step]] = {"__assertfail": _assertion, "vprintf": _print}
