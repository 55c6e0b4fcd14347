"""From an instruction to a step, the function that executes it for a group of lanes.

An instruction that is not simulated becomes a step that raises NotSimulated when a lane reaches it: a kernel may contain instructions that
it does not execute. The table of makers (tables.py) is passed in.
"""

import bisect
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.machine.batch import Group
from cukern.sim.machine.machine import Machine, Step, Stretches
from cukern.sim.machine.poison import Flow
from cukern.sim.machine.program import PARAMETER, Program
from cukern.sim.ptx.module import WIDTHS, Address, Immediate, Instruction, Operand, Register, Symbol, Vector, immediate_bits


class Context:
    """One instruction being decoded: its parts, and the registers of its operands."""

    def __init__(self, program: Program, pc: int):
        self.program, self.pc = program, pc
        self.instruction: Instruction = program.kernel.code[pc]
        self.opcode, self.operands = self.instruction.opcode, self.instruction.operands
        self.parts = self.opcode.split(".")
        self.types = [p for p in self.parts if p in WIDTHS]
        self.reads: list[int] = []  # the registers of its operands, as the maker asks for them
        self.writes: list[int] = []

    def unknown(self) -> NotSimulated:
        return NotSimulated(self.opcode)

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
    jumps = {pc for pc, one in enumerate(decoded) if one.jumps}
    program.undefined = undefined(program, decoded)
    starts = {f.start for f in program.functions.values()}
    leaders = sorted({0, last, *starts, *program.kernel.labels.values(), *(pc + 1 for pc in jumps)})
    found: Stretches = {last: ([], last, Machine.leave, [])}
    for start in {*leaders, *jumps} - {last}:  # lanes may have to execute a jump again
        end = leaders[bisect.bisect(leaders, start)]
        steps = [one.step for one in decoded[start:end]]
        parts = [(one.bare, one.guard, one.flow) for one in decoded[start:end]]
        found[start] = (steps[:-1], end - 1, steps[-1], parts) if end - 1 in jumps else (steps, end, None, parts)
    return found


class Decoded(NamedTuple):
    """An instruction: its step, the same without its guard, and True if the step sets where its lanes continue."""

    step: Step
    bare: Step
    jumps: bool
    guard: Register | None = None
    flow: Flow = Flow("")


def instruction(program: Program, pc: int, table: Table) -> Decoded:
    c = Context(program, pc)
    names = [".".join(c.parts[:n]) for n in (3, 2, 1)]  # st.async is found before st
    if c.opcode.startswith("cp.async.bulk.prefetch"):
        del names[0]
    base = next((name for name in names if name in table.steps or name in table.jumps), "")
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
    if guard is None:
        return Decoded(step, step, jumps, guard, flow)
    if jumps:
        return Decoded(lambda m, group: _split(step, guard, pc, m, group), step, jumps, guard, flow)
    return Decoded(lambda m, group: _guarded(step, guard, m, group), step, jumps, guard, flow)


# The operands after which a move of bits does not depend on the bits of the others: for example the count of a shift.
_MOVES = {"mov": (), "cvt": (), "prmt": (2,), "shl": (1,), "shr": (1,), "shf": (2,), "bfe": (1, 2), "bfi": (2, 3), "selp": (2,), "brev": ()}
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
    return Flow("halves" if {"f16x2", "bf16x2"} & set(c.types) and base not in ("cvt", "set", "setp") else "all", reads, writes)


def undefined(program: Program, decoded: list[Decoded]) -> list[int]:
    """The registers that a kernel may read before it writes them: those that are live at its start."""
    code, labels = program.kernel.code, program.kernel.labels
    declared = len(program.kernel.widths)
    starts = {f.start for f in program.functions.values()}
    leaders = sorted({0, len(code), *starts, *labels.values(), *(pc + 1 for pc, one in enumerate(decoded) if one.jumps)})
    blocks = list(itertools.pairwise(leaders))
    needs = {start: _needs(decoded[start:end], declared) for start, end in blocks}
    live = dict.fromkeys(leaders, 0)
    changed = True
    while changed:
        changed = False
        for start, end in reversed(blocks):
            after = 0
            for successor in _successors(program, end - 1):
                after |= live[successor]
            now = needs[start][0] | after & ~needs[start][1]
            changed |= now != live[start]
            live[start] = now
    starts |= {0} if blocks else set()
    return [r for r in range(declared) if any(live[start] >> r & 1 for start in starts)]


def _needs(decoded: list[Decoded], declared: int) -> tuple[int, int]:
    """Of a block without jumps inside: the registers that it reads before it writes them, and those that it writes, as bits."""
    need = give = 0
    for one in decoded:
        guard = (one.guard.number,) if one.guard else ()
        need |= sum(1 << r for r in {*one.flow.reads, *guard} if r < declared) & ~give
        if not guard:
            give |= sum(1 << r for r in set(one.flow.writes) if r < declared)
    return need, give


def _successors(program: Program, pc: int) -> list[int]:
    """Where lanes may continue after an instruction at the end of a block."""
    code, labels, tables = program.kernel.code, program.kernel.labels, program.kernel.tables
    opcode, operands, guard, _ = code[pc]
    base = opcode.split(".")[0]
    found = [labels[x.name] for x in operands if isinstance(x, Symbol) and x.name in labels] if base == "bra" else []
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
