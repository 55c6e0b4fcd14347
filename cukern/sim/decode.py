"""From an instruction to the function that carries it out on a group of lanes.

`instruction` gives a step, and whether it may send lanes elsewhere than to the next instruction. What the simulator does not know becomes a
step that raises NotSimulated when a lane comes to it: a kernel may contain what it does not execute.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from cukern.sim import alu, ptx, special
from cukern.sim.faults import Fault, NotSimulated
from cukern.sim.ptx import Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from cukern.sim.spaces import WINDOW, WINDOWS

if TYPE_CHECKING:
    from cukern.sim.machine import Group, Machine
    from cukern.sim.program import Program, Step

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
            return operand.index
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
    from cukern.sim import tables

    base = c.parts[0]
    jumps = base in tables.JUMPS
    try:
        maker = tables.JUMPS.get(base) or tables.STEPS.get(base, arithmetic)
        step = maker(c)
    except NotSimulated as error:
        return _not_simulated(pc, str(error)), True
    except (IndexError, KeyError, ValueError, StopIteration):  # operands that it does not have
        return _not_simulated(pc, c.opcode), True
    guard = c.instruction.guard
    if guard is not None and base != "bra":
        step = _split(step, guard, pc) if jumps else _guarded(step, guard)
    return step, jumps


def _guarded(step: "Step", guard: Register) -> "Step":
    register, negated = guard.index, guard.negated

    def run(m: "Machine", group: "Group") -> None:
        chosen = m.select(group, register, negated)
        if chosen is not None:
            step(m, chosen)

    return run


def _split(step: "Step", guard: Register, pc: int) -> "Step":
    """For what sends lanes on by itself: those whose guard fails go on at the next instruction."""

    def run(m: "Machine", group: "Group") -> None:
        rest = m.select(group, guard.index, not guard.negated)
        chosen = m.select(group, guard.index, guard.negated)
        if rest is not None:
            m.go(pc + 1, rest)
        if chosen is not None:
            step(m, chosen)

    return run


def _not_simulated(pc: int, what: str) -> "Step":
    def run(m: "Machine", group: "Group") -> None:
        raise NotSimulated(f"{what}, in {m.launched.name}, {m.program.location(pc)}")

    return run


# ---- arithmetic


def arithmetic(c: Context) -> "Step":
    """An instruction of the ALU."""
    targets = c.items(c.operands[0])
    types = source_types(c)
    sources = [c.source(x, t) for x, t in zip(c.operands[1:], types, strict=False)]
    negated = [isinstance(x, Register) and x.negated for x in c.operands[1:]]
    if c.parts[0] in ("addc", "subc", "madc"):
        sources.append(_carry(c))
        negated.append(False)
    steps = []
    if "cc" in c.parts:
        steps.append(compute(alu.find(c.opcode, second=True), Register(_carry(c), 1), sources))
    for i, target in enumerate(targets):
        function, register = alu.find(c.opcode, second=True) if i else alu.find(c.opcode), c.target(target)
        if any(negated):
            function = _with_negated(function, negated)
        if register is not None:
            steps.append(compute(_extended(function, register, c.types), register, sources))
    if len(steps) == 1:
        return steps[0]
    if {t.index for t in targets if isinstance(t, Register)} & set(sources):
        return _together(c, steps, sources)
    return _in_turn(steps)


def _carry(c: Context) -> int:
    """The register of the carry flag."""
    program = c.program
    if "carry" not in program.specials:
        program.specials["carry"] = program.hidden(1)
    return program.specials["carry"]


def _in_turn(steps: list["Step"]) -> "Step":
    def run(m: "Machine", group: "Group") -> None:
        for step in steps:
            step(m, group)

    return run


def _together(c: Context, steps: list["Step"], sources: list[int]) -> "Step":
    """Two results, the first of which overwrites an operand of the second: the operands are put back in between."""

    def run(m: "Machine", group: "Group") -> None:
        before = [m.regs[s] for s in sources]
        results = []
        for step in steps:
            step(m, group)
            results.append(list(m.regs))
            for s, values in zip(sources, before, strict=True):
                m.regs[s] = values
        for target, registers in zip(c.items(c.operands[0]), results, strict=True):
            if isinstance(target, Register):
                m.regs[target.index] = registers[target.index]

    return run


def source_types(c: Context) -> list[str]:
    """The types of an ALU instruction's sources, for its literals."""
    base, types = c.parts[0], c.types or ["b32"]
    t = types[-1] if base in ("cvt", "setp", "set") else types[0]
    if base in ("shl", "shr"):
        return [t, "u32"]
    if base == "mad" and "wide" in c.parts:
        return [t, t, {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}.get(t, t)]
    special_cases = {
        "selp": [t, t, "pred"],
        "setp": [t, t, "pred"],
        "set": [t, t, "pred"],
        "slct": [t, t, types[-1]],
        "bfe": [t, "u32", "u32"],
        "bfi": [t, t, "u32", "u32"],
        "dp4a": [t, types[-1], "b32"],
        "dp2a": [t, types[-1], "b32"],
    }
    if base in ("dp4a", "dp2a"):
        return ["b32"] * 3
    return special_cases.get(base, [t] * 4)


def _with_negated(function: Callable, negated: list[bool]) -> Callable:
    return lambda *args: function(*(~x if no else x for x, no in zip(args, negated, strict=True)))


def _extended(function: Callable, register: Register, types: list[str]) -> Callable:
    """`function`, with its result extended where the destination register is wider than it."""
    if register.width == 1 or not types or ptx.WIDTHS[types[0]] >= register.width:
        return function
    wide, signed = UNSIGNED[register.width], types[0][0] == "s"

    def run(*args: np.ndarray) -> np.ndarray:
        result = function(*args)
        if result.dtype == np.bool_ or result.dtype.itemsize * 8 >= register.width:
            return result
        return result.view(SIGNED[result.dtype.itemsize * 8]).astype(wide) if signed else result.astype(wide)

    return run


def compute(function: Callable[..., np.ndarray], target: Register, sources: list[int]) -> "Step":
    """target = function(sources)."""
    t = target.index

    def run(m: "Machine", group: "Group") -> None:
        regs = m.regs
        if group.whole:
            regs[t] = function(*[regs[s] for s in sources])
        else:
            m.put(group, t, function(*[m.get(group, s) for s in sources]))

    return run


def constant(c: Context, register: Register, value: Callable[["Machine"], Any]) -> "Step":
    """register = value(m), the same for all lanes."""
    dtype = UNSIGNED[register.width]

    def run(m: "Machine", group: "Group") -> None:
        m.put(group, register.index, np.array([value(m)], dtype))

    return run


def move(c: Context) -> "Step":
    target, source = c.operands
    if isinstance(source, Symbol) and source.name in special.CLOCKS:
        register = c.target(target)
        assert register is not None
        mask, high = (1 << register.width) - 1, source.name.endswith("_hi")
        return constant(c, register, lambda m: (m.launched.steps >> (32 if high else 0)) & mask)
    if isinstance(source, Vector):
        return _pack(c, target, source.items)
    if isinstance(target, Vector):
        return _unpack(target.items, c)
    register = c.target(target)
    if register is None:
        raise c.unknown()
    return compute(_extended(np.copy, register, []), register, [c.source(source, c.types[0])])


def _pack(c: Context, target: Operand, items: tuple[Operand, ...]) -> "Step":
    register = c.target(target)
    if register is None or register.width > 64:
        raise c.unknown()
    width = register.width // len(items)
    if width < 16:
        raise c.unknown()
    wide = UNSIGNED[register.width]

    def join(*parts: np.ndarray) -> np.ndarray:
        result = parts[0].astype(wide)
        for i, part in enumerate(parts[1:], 1):
            result = result | part.astype(wide) << wide(width * i)
        return result

    return compute(join, register, [c.source(x, f"b{width}") for x in items])


def _unpack(items: tuple[Operand, ...], c: Context) -> "Step":
    width = ptx.WIDTHS[c.types[0]] // len(items)
    if width < 16 or width * len(items) > 64:
        raise c.unknown()
    source = c.source(c.operands[1], c.types[0])
    steps = []
    for i, item in enumerate(items):
        register = c.target(item)
        if register is not None:
            steps.append(compute(_part(width * i, UNSIGNED[width]), register, [source]))
    return _in_turn(steps)


def _part(shift: int, dtype: Any) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (x >> x.dtype.type(shift)).astype(dtype)


def convert_address(c: Context) -> "Step":
    """cvta: between the addresses of a space and generic ones."""
    space = next(p for p in c.parts[1:] if p not in ("to", *c.types))
    if space not in WINDOWS:
        raise c.unknown()
    register = c.target(c.operands[0])
    assert register is not None
    window = np.array([WINDOWS[space] << WINDOW if register.width == 64 else 0], UNSIGNED[register.width])
    function = (lambda x: x - window) if "to" in c.parts else (lambda x: x + window)
    return compute(function, register, [c.source(c.operands[1], c.types[0])])


def is_space(c: Context) -> "Step":
    register = c.target(c.operands[0])
    space = c.parts[1]
    if space not in ("global", "shared", "local") or register is None:
        raise c.unknown()
    return compute(lambda x: x >> np.uint64(WINDOW) == WINDOWS[space], register, [c.source(c.operands[1], "b64")])


def nothing(c: Context) -> "Step":
    return lambda m, group: None


# ---- jumps


def branch(c: Context) -> "Step":
    (label,) = c.operands
    assert isinstance(label, Symbol)
    target, guard, pc = c.program.kernel.labels[label.name], c.instruction.guard, c.pc
    if guard is None:
        return lambda m, group: m.go(target, group)
    register, negated = guard.index, guard.negated

    def run(m: "Machine", group: "Group") -> None:
        values = m.regs[register]
        if len(values) == 1:
            m.go(target if bool(values[0]) != negated else pc + 1, group)
            return
        chosen = values[group.index] != negated
        count = np.count_nonzero(chosen)
        if count == len(chosen):
            m.go(target, group)
        elif count == 0:
            m.go(pc + 1, group)
        else:
            m.go(target, m.group(group.lanes[chosen]))
            m.go(pc + 1, m.group(group.lanes[~chosen]))

    return run


def branch_indexed(c: Context) -> "Step":
    index, table = c.operands
    if not isinstance(index, Register) or not isinstance(table, Symbol):
        raise c.unknown()
    targets = np.array([c.program.kernel.labels[t] for t in c.program.kernel.tables[table.name]])

    def run(m: "Machine", group: "Group") -> None:
        goals = targets[m.spread(group, index.index)]
        for goal in np.unique(goals):
            m.go(int(goal), m.group(group.lanes[goals == goal]))

    return run


def exit_(m: "Machine", group: "Group") -> None:
    m.leave(group)


def leave(c: Context) -> "Step":
    return exit_


def trap(c: Context) -> "Step":
    def run(m: "Machine", group: "Group") -> None:
        raise m.fault(Fault, group.lanes[0], "trap: the kernel stopped itself")

    return run


def call(c: Context) -> "Step":
    """Only __assertfail(message, file, line, function, size) is known: a failed assert."""
    name = next((x.name for x in c.operands if isinstance(x, Symbol)), c.opcode)
    arguments = next((x.items for x in c.operands if isinstance(x, Vector)), ())
    if name != "__assertfail":
        raise NotSimulated(f"call of {name}")
    registers = [c.program.params[a.name] for a in arguments if isinstance(a, Symbol)]

    def run(m: "Machine", group: "Group") -> None:
        message, file, line = (int(m.spread(group, r)[0]) for r in registers[:3])
        memory = m.launched.memory
        raise m.fault(Fault, group.lanes[0], f"assertion failed: {memory.text(message)} ({memory.text(file)}:{line})")

    return run
