"""From an instruction to the function that carries it out on a group of lanes.

`instruction` gives a step, and whether it may send lanes elsewhere than to the next instruction. What the simulator does not know becomes a
step that raises NotSimulated when a lane comes to it: a kernel may contain what it does not execute.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.ptx import module as ptx
from cukern.sim.ptx.module import Address, Immediate, Instruction, Operand, Register, Symbol, Vector

if TYPE_CHECKING:
    from cukern.sim.machine.machine import Group, Machine
    from cukern.sim.machine.program import Program, Step

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


class Context:
    """One instruction under way: its parts, and where its operands are found."""

    def __init__(self, program: "Program", pc: int):
        self.program, self.pc = program, pc
        self.instruction: Instruction = program.kernel.code[pc]
        self.opcode, self.operands = self.instruction.opcode, self.instruction.operands
        self.parts = self.opcode.split(".")
        self.types = [p for p in self.parts if p in ptx.WIDTHS]

    def unknown(self) -> NotSimulated:
        return NotSimulated(self.opcode)

    def source(self, operand: Operand, type_: str) -> int:
        """The number of the register with an operand's value, of that type if it is a literal."""
        program, width = self.program, max(16, ptx.WIDTHS[type_]) if type_ != "pred" else 1
        if isinstance(operand, Register):
            return operand.number
        if isinstance(operand, Immediate):
            return program.constant(ptx.immediate_bits(operand, type_), width)
        if isinstance(operand, Symbol):
            if operand.name in program.addresses:
                return program.constant(program.addresses[operand.name][1] + operand.offset, width)
            if operand.name.startswith("%") or operand.name == "WARP_SZ":
                return program.special(operand.name)
        raise self.unknown()

    def target(self, operand: Operand) -> Register | None:
        """The register that an operand names; None for the sink `_`."""
        if isinstance(operand, Register):
            return operand
        if isinstance(operand, Symbol) and operand.name == "_":
            return None
        raise self.unknown()

    def address(self, operand: Operand) -> tuple[int, int]:
        """The register and the offset of an address in brackets."""
        if not isinstance(operand, Address):
            raise self.unknown()
        if operand.base is None:
            return self.program.constant(0, 64), operand.offset
        return self.source(operand.base, "b64"), operand.offset

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vector) else (operand,)


Maker = Callable[[Context], "Step"]


def instruction(program: "Program", pc: int) -> tuple["Step", bool]:
    c = Context(program, pc)
    from cukern.sim.instructions import tables

    makers = tables.STEPS | tables.JUMPS
    base = next((name for name in (".".join(c.parts[:2]), c.parts[0]) if name in makers), "")  # st.async is no st
    jumps = base in tables.JUMPS
    try:
        step = makers.get(base, tables.ALU)(c)
    except NotSimulated as error:
        return _not_simulated(pc, str(error)), True
    except (IndexError, KeyError, ValueError, StopIteration):  # operands that it does not have
        return _not_simulated(pc, c.opcode), True
    guard = c.instruction.guard
    if guard is not None and base != "bra":
        step = _split(step, guard, pc) if jumps else _guarded(step, guard)
    return step, jumps


def _guarded(step: "Step", guard: Register) -> "Step":
    register, negated = guard.number, guard.negated

    def run(m: "Machine", group: "Group") -> None:
        chosen = m.select(group, register, negated)
        if chosen is not None:
            step(m, chosen)

    return run


def _split(step: "Step", guard: Register, pc: int) -> "Step":
    """For what sends lanes on by itself: those whose guard fails go on at the next instruction."""

    def run(m: "Machine", group: "Group") -> None:
        rest = m.select(group, guard.number, not guard.negated)
        chosen = m.select(group, guard.number, guard.negated)
        if rest is not None:
            m.go(pc + 1, rest)
        if chosen is not None:
            step(m, chosen)

    return run


def _not_simulated(pc: int, what: str) -> "Step":
    def run(m: "Machine", group: "Group") -> None:
        raise NotSimulated(f"{what}, in {m.launched.name}, {m.program.location(pc)}")

    return run


def compute(function: Callable[..., np.ndarray], target: Register, sources: list[int]) -> "Step":
    """target = function(sources)."""
    t = target.number

    def run(m: "Machine", group: "Group") -> None:
        regs = m.regs
        if group.whole:
            regs[t] = function(*[regs[s] for s in sources])
        else:
            m.put(group, t, function(*[m.get(group, s) for s in sources]))

    return run
