"""From an instruction to a step, the function that executes it for a group of lanes.

An instruction that is not simulated becomes a step that raises NotSimulated when a lane reaches it: a kernel may contain instructions that
it does not execute. The table of makers (tables.py) is passed in.
"""

import bisect
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step, Stretches
from cukern.sim.machine.program import Program
from cukern.sim.ptx.module import WIDTHS, Address, Immediate, Instruction, Operand, Register, Symbol, Vector, immediate_bits


class Context:
    """One instruction being decoded: its parts, and the registers of its operands."""

    def __init__(self, program: Program, pc: int):
        self.program, self.pc = program, pc
        self.instruction: Instruction = program.kernel.code[pc]
        self.opcode, self.operands = self.instruction.opcode, self.instruction.operands
        self.parts = self.opcode.split(".")
        self.types = [p for p in self.parts if p in WIDTHS]

    def unknown(self) -> NotSimulated:
        return NotSimulated(self.opcode)

    def source(self, operand: Operand, type_: str) -> int:
        """The number of the register that holds an operand; `type_` is the type of a literal."""
        program, width = self.program, max(16, WIDTHS[type_]) if type_ != "pred" else 1
        if isinstance(operand, Register):
            return operand.number
        if isinstance(operand, Immediate):
            return program.constant(immediate_bits(operand, type_), width)
        if isinstance(operand, Symbol):
            if operand.name in program.addresses:
                return program.constant(program.addresses[operand.name][1] + operand.offset, width)
            if operand.name.startswith("%") or operand.name == "WARP_SZ":
                return program.special(operand.name)
        raise self.unknown()

    def target(self, operand: Operand) -> Register:
        """The register that an operand names, which may be the sink `_`."""
        if isinstance(operand, Register):
            return operand
        if operand == Symbol("_"):
            return self.program.sink
        raise self.unknown()

    def targets(self, operand: Operand) -> tuple[Register, Register]:
        """The registers d and p of `d|p`; p is the sink if the operand is only d."""
        d, *p = self.items(operand)
        return self.target(d), self.target(p[0]) if p else self.program.sink

    def address(self, operand: Operand) -> tuple[int, int]:
        """The register and the offset of an address in brackets."""
        if not isinstance(operand, Address):
            raise self.unknown()
        if operand.base is None:
            return self.program.constant(0, 64), operand.offset
        return self.source(operand.base, "b64"), operand.offset

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vector) else (operand,)


Maker = Callable[[Context], Step]


class Table(NamedTuple):
    """The maker for each opcode or its first part. The steps of `jumps` set where their lanes continue; `other`: all other opcodes."""

    steps: dict[str, Maker]
    jumps: dict[str, Maker]
    other: Maker


def stretches(program: Program, table: Table) -> Stretches:
    """The whole program, decoded and divided into stretches without a jump."""
    last = len(program.kernel.code)
    decoded = [instruction(program, pc, table) for pc in range(last)]
    jumps = {pc for pc, (_, jump) in enumerate(decoded) if jump}
    leaders = sorted({0, last, *program.kernel.labels.values(), *(pc + 1 for pc in jumps)})
    found: Stretches = {last: ([], last, Machine.leave)}
    for start in {*leaders, *jumps} - {last}:  # lanes may have to execute a jump again
        end = leaders[bisect.bisect(leaders, start)]
        steps = [step for step, _ in decoded[start:end]]
        found[start] = (steps[:-1], end - 1, steps[-1]) if end - 1 in jumps else (steps, end, None)
    return found


def instruction(program: Program, pc: int, table: Table) -> tuple[Step, bool]:
    """The step of an instruction, and True if the step sets where its lanes continue."""
    c = Context(program, pc)
    names = ".".join(c.parts[:2]), c.parts[0]  # st.async is found before st
    base = next((name for name in names if name in table.steps or name in table.jumps), "")
    jumps = base in table.jumps
    try:
        step = (table.jumps if jumps else table.steps).get(base, table.other)(c)
    except NotSimulated as error:
        return _not_simulated(pc, str(error)), True
    except (IndexError, KeyError, ValueError, StopIteration):  # operands that the instruction does not have
        return _not_simulated(pc, c.opcode), True
    guard = c.instruction.guard
    if guard is None:
        return step, jumps
    return (lambda m, group: _split(step, guard, pc, m, group)) if jumps else (lambda m, group: _guarded(step, guard, m, group)), jumps


def _guarded(step: Step, guard: Register, m: Machine, group: Group) -> None:
    chosen = m.select(group, guard)
    if chosen is not None:
        step(m, chosen)


def _split(step: Step, guard: Register, pc: int, m: Machine, group: Group) -> None:
    """A guarded jump: lanes whose guard is false continue at the next instruction."""
    chosen = m.select(group, guard)
    rest = None if chosen is group else m.select(group, guard._replace(negated=not guard.negated))
    if rest is not None:
        m.go(pc + 1, rest)
    if chosen is not None:
        step(m, chosen)


def _not_simulated(pc: int, what: str) -> Step:
    def run(m: Machine, group: Group) -> None:
        raise NotSimulated(f"{what}, in {m.launched.name}, {m.program.location(pc)}")

    return run


def compute(function: Callable[..., np.ndarray], target: Register, sources: list[int]) -> Step:
    """target = function(sources)."""
    t = target.number

    def run(m: Machine, group: Group) -> None:
        regs = m.regs
        if group.whole:
            regs[t] = function(*[regs[s] for s in sources])
        else:
            m.put(group, t, function(*[m.get(group, s) for s in sources]))

    return run
