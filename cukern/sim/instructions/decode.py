"""From an instruction to a step, the function that executes it for a group of lanes.

An instruction that is not simulated becomes a step that raises NotSimulated when a lane reaches it: a kernel
may contain instructions that it does not execute. The table of makers (tables.py) is passed in."""

import bisect
import collections
import functools
import itertools
import operator
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.instructions.fused import Compute, Fused
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step, Stretches
from cukern.sim.machine.poison import Flow
from cukern.sim.machine.program import PARAMETER, Program
from cukern.sim.numerics.integers import UNSIGNED as UNSIGNED
from cukern.sim.numerics.integers import Array
from cukern.sim.ptx.module import (
    WIDTHS,
    Address,
    Immediate,
    Instruction,
    Operand,
    Register,
    Symbol,
    Vector,
    immediate_bits,
)


class Context:
    """One instruction being decoded: its parts, and the registers of its operands."""

    def __init__(self, program: Program, pc: int):
        self.program, self.pc = program, pc
        self.instruction: Instruction = program.kernel.code[pc]
        self.opcode, self.operands = self.instruction.opcode, self.instruction.operands
        self.parts, self.types = _parts(self.opcode)
        self.reads: list[int] = []  # the registers of its operands, as the maker asks for them
        self.writes: list[int] = []

    def unknown(self) -> NotSimulated:
        return NotSimulated(self.opcode)

    def refuse(self, bad: object) -> None:
        """Raise NotSimulated if something is wrong with the form of the instruction."""
        if bad:
            raise self.unknown()

    def source(self, operand: Operand, type_: str) -> int:
        """The number of the register that holds an operand; `type_` is the type of a literal."""
        self.reads.append(self._source(operand, type_))
        return self.reads[-1]

    def _source(self, operand: Operand, type_: str) -> int:
        program, width = self.program, max(16, WIDTHS[type_]) if type_ != "pred" else 1
        if isinstance(operand, Register):
            return operand.number
        if isinstance(operand, Immediate):
            return program.constant(immediate_bits(operand, type_), width)
        if isinstance(operand, Symbol):
            if operand.name in program.addresses:
                return program.constant(program.addresses[operand.name][1] + operand.offset, width)
            if operand.name in program.params and program.kernel.is_parameter(operand.name):
                return program.special(f"{PARAMETER}{program.params[operand.name] + operand.offset}")
            if operand.name.startswith("%") or operand.name == "WARP_SZ":
                return program.special(operand.name)
        raise self.unknown()

    def target(self, operand: Operand) -> Register:
        """The register that an operand names, which may be the sink `_`."""
        if isinstance(operand, Register):
            self.writes.append(operand.number)
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


@functools.lru_cache(4096)
def _parts(opcode: str) -> tuple[list[str], list[str]]:
    """The parts of an opcode, and those that are types."""
    parts = opcode.split(".")
    return parts, [p for p in parts if p in WIDTHS]


Maker = Callable[[Context], Step]


class Table(NamedTuple):
    """The maker for each opcode or its first part. The steps of `jumps` set where their lanes continue;
    `other`: all other opcodes."""

    steps: dict[str, Maker]
    jumps: dict[str, Maker]
    other: Maker

    def base(self, opcode: str) -> str:
        """The key of an opcode in one of the tables, or ""."""
        parts = opcode.split(".")
        names = [".".join(parts[:n]) for n in (3, 2, 1)]  # st.async is found before st
        if opcode.startswith("cp.async.bulk.prefetch"):
            del names[0]
        return next((name for name in names if name in self.steps or name in self.jumps), "")


def stretches(program: Program, table: Table) -> Stretches:
    """The whole program, decoded and divided into stretches without a jump."""
    last = len(program.kernel.code)
    bases = {opcode: table.base(opcode) for opcode in {one.opcode for one in program.kernel.code}}
    decoded = [
        instruction(program, pc, table, bases[one.opcode]) for pc, one in enumerate(program.kernel.code)
    ]
    jumps = {pc for pc, one in enumerate(decoded) if one.jumps}
    live = _liveness(program, decoded)
    leaders, starts = sorted(live), {0, *(f.start for f in program.functions.values())}
    program.undefined = [
        r for r in range(len(program.kernel.widths)) if any(live[start] >> r & 1 for start in starts)
    ]
    constants = _constants(program, decoded)
    found: Stretches = {last: ([], last, Machine.leave, [])}
    for start in {*leaders, *jumps} - {last}:  # lanes may have to execute a jump again
        end = leaders[bisect.bisect(leaders, start)]
        parts = [(one.bare, one.guard, one.flow) for one in decoded[start:end]]
        jump = decoded[end - 1].step if end - 1 in jumps else None
        body = end - 1 if jump else end
        after = _after(program, live, end)
        after = after & ~decoded[body].written | decoded[body].read if jump else after
        found[start] = _fused(program, decoded, start, body, after, constants), body, jump, parts
    return found


class Decoded(NamedTuple):
    """An instruction: its step, the same without its guard, and True if the step sets where its lanes
    continue."""

    step: Step
    bare: Step
    jumps: bool
    guard: Register | None = None
    flow: Flow = Flow("")
    read: int = 0  # the registers that it reads, as bits
    written: int = 0  # those that it writes, whatever its guard


def instruction(program: Program, pc: int, table: Table, base: str) -> Decoded:
    """`base`: the key of its opcode in the table."""
    c = Context(program, pc)
    jumps = base in table.jumps
    try:
        step = (table.jumps if jumps else table.steps).get(base, table.other)(c)
    except NotSimulated as error:
        unknown = _not_simulated(pc, str(error))
        return Decoded(unknown, unknown, jumps=True)
    except (IndexError, KeyError, ValueError, StopIteration):  # operands that the instruction does not have
        unknown = _not_simulated(pc, c.opcode)
        return Decoded(unknown, unknown, jumps=True)
    guard = c.instruction.guard
    flow = flow_of(c, computes=(not jumps and base not in table.steps) or base == "mov")
    read, written = (
        functools.reduce(lambda bits, r: bits | 1 << r, some, 0) for some in (flow.reads, flow.writes)
    )
    if guard is None:
        return Decoded(step, step, jumps, guard, flow, read, written)
    guarded: Step = (
        functools.partial(_split, step, guard, pc) if jumps else functools.partial(_guarded, step, guard)
    )
    return Decoded(guarded, step, jumps, guard, flow, read | 1 << guard.number)


# The operands after which a move of bits does not depend on the bits of the others: for example the count of
# a shift.
_MOVES = {
    "mov": (),
    "cvt": (),
    "prmt": (2,),
    "shl": (1,),
    "shr": (1,),
    "shf": (2,),
    "bfe": (1, 2),
    "bfi": (2, 3),
    "selp": (2,),
    "brev": (),
}
_BITWISE = {"and": "and", "or": "or", "xor": "mix", "not": "mix", "lop3": "mix"}


def flow_of(c: Context, computes: bool) -> Flow:
    """How an instruction passes uninitialized bits on."""
    base, reads, writes = c.parts[0], tuple(c.reads), tuple(c.writes)
    if not computes:
        return Flow("", reads, writes)
    integers = all(t[0] in "usb" and t != "bf16" for t in c.types) and "sat" not in c.parts
    if base in _MOVES and (base != "cvt" or integers):
        return Flow("move", reads, writes, tuple(reads[i] for i in _MOVES[base]))
    if base in _BITWISE and len(writes) == 1:
        return Flow(_BITWISE[base], reads, writes)
    return Flow(
        "halves"
        if {"f16x2", "bf16x2", "f32x2"} & set(c.types) and base not in ("cvt", "set", "setp")
        else "all",
        reads,
        writes,
    )


def _liveness(program: Program, decoded: list[Decoded]) -> dict[int, int]:
    """The start of each block without jumps inside -> the registers that may be read from there on before
    they are written, as bits."""
    code, labels = program.kernel.code, program.kernel.labels
    starts = {f.start for f in program.functions.values()}
    leaders = sorted(
        {0, len(code), *starts, *labels.values(), *(pc + 1 for pc, one in enumerate(decoded) if one.jumps)}
    )
    blocks = []
    for start, end in itertools.pairwise(leaders):
        need = give = 0  # the registers that the block reads before it writes them, and those that it writes
        for one in decoded[start:end]:
            need, give = need | one.read & ~give, give | one.written
        blocks.append((start, end, need, give))
    live = dict.fromkeys(leaders, 0)
    changed = True
    while changed:
        changed = False
        for start, end, need, give in reversed(blocks):
            now = need | _after(program, live, end) & ~give
            changed |= now != live[start]
            live[start] = now
    return live


def _after(program: Program, live: dict[int, int], end: int) -> int:
    """The registers that may be read after a block that ends here."""
    return functools.reduce(operator.or_, (live[successor] for successor in _successors(program, end - 1)), 0)


def _constants(program: Program, decoded: list[Decoded]) -> dict[int, Array]:
    """The constants of the program, and the registers that only one instruction sets, to a constant."""
    written = collections.Counter(r for one in decoded for r in one.flow.writes)
    found = dict(program.constants)
    for one in decoded:
        if isinstance(one.step, Compute) and one.step.functions == [np.copy] and one.step.sources[0] in found:
            (target,) = one.step.targets
            if written[target] == 1 and target not in program.undefined:
                found[target] = found[one.step.sources[0]]
    return found


def _fused(
    program: Program, code: list[Decoded], start: int, end: int, live: int, fixed: dict[int, Array]
) -> list[tuple[Step, int]]:
    """The steps of a stretch, each with the instruction after it. `live`: the registers that may be read
    after it."""
    found: list[tuple[Step, int]] = []
    steps: list[tuple[str, Compute]] = []
    own = range(len(program.kernel.widths))
    for pc in reversed(range(start, end)):
        one = code[pc]
        if isinstance(one.step, Compute):
            if not steps:
                upto, after = pc + 1, live
            steps.insert(0, (program.kernel.code[pc].opcode, one.step))
        else:
            found.insert(0, (one.step, pc + 1))
        live = live & ~one.written | one.read
        if steps and (pc == start or not isinstance(code[pc - 1].step, Compute)):
            targets = dict.fromkeys(t for _, step in steps for t in step.targets)
            outputs = [r for r in targets if program.functions or r not in own or after >> r & 1]
            found.insert(0, (Fused(steps, outputs, fixed), upto))
            steps = []
    return found


def _successors(program: Program, pc: int) -> list[int]:
    """Where lanes may continue after an instruction at the end of a block."""
    code, labels, tables = program.kernel.code, program.kernel.labels, program.kernel.tables
    opcode, operands, guard, _ = code[pc]
    base = opcode.split(".")[0]
    found = (
        [labels[x.name] for x in operands if isinstance(x, Symbol) and x.name in labels]
        if base == "bra"
        else []
    )
    if base == "brx":
        found = [labels[t] for x in operands if isinstance(x, Symbol) for t in tables[x.name]]
    return found if base in ("bra", "brx", "ret", "exit", "trap") and guard is None else [*found, pc + 1]


def _guarded(step: Step, guard: Register, m: Machine, group: Group) -> None:
    chosen = m.select(group, guard)
    if chosen is not None:
        step(m, chosen)


def _split(step: Step, guard: Register, pc: int, m: Machine, group: Group) -> None:
    """A guarded jump: lanes whose guard is false continue at the next instruction."""
    if m.poisoned:
        m.pc = pc
        m.poison.check(group, (guard.number,), "a branch")
    chosen = m.select(group, guard)
    rest = None if chosen is group else m.select(group, guard._replace(negated=not guard.negated))
    if rest is not None:
        m.go(pc + 1, rest)
    if chosen is not None:
        step(m, chosen)


def _not_simulated(pc: int, what: str) -> Step:
    def run(m: Machine, group: Group) -> None:
        raise m.not_simulated(what, pc)

    return run


def compute(function: Callable[..., Array], target: Register, sources: list[int]) -> Step:
    """target = function(sources)."""
    return Compute([(function, target)], sources)
