"""A kernel with the functions that it may call, as one program: the functions' code follows the kernel's."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cukern.sim.ptx.module import (
    Address,
    Instruction,
    Kernel,
    Module,
    Operand,
    Register,
    Symbol,
    Variable,
    Vector,
)


@dataclass
class Function:
    """The instructions of a function, its registers, and the bytes of its parameters. The kernel's name is
    ""."""

    start: int
    end: int
    registers: range
    params_size: int = 0


class Linked(NamedTuple):
    """`slots`: where a variable of a call lives, by its name: an area ("": the arguments of a call, "return":
    its result, else the parameters of that function), and an offset."""

    kernel: Kernel
    functions: dict[str, Function]
    slots: dict[str, tuple[str, int]]
    recursive: set[str]
    arguments_size: int
    result_size: int


def link(module: Module, kernel: Kernel) -> Linked:
    calls = [i for i in kernel.code if i.opcode.startswith("call")]
    if not calls:
        return Linked(kernel, {}, {}, set(), 0, 0)
    merged = replace(
        kernel, code=[*kernel.code, _RETURN], widths=list(kernel.widths), labels=dict(kernel.labels)
    )
    merged.variables = list(kernel.variables)
    merged.tables = dict(kernel.tables)
    functions = {"": Function(0, len(merged.code), range(len(kernel.widths)))}
    slots: dict[str, tuple[str, int]] = {}
    arguments = results = 16
    for name, function in module.functions.items():
        functions[name] = _append(merged, name, function)
        functions[name].params_size = _lay_out(name, function.params, slots)
        results = max(results, _lay_out("return", function.results, slots))
    sizes = {v.name: v for v in merged.variables if v.space == "param"}
    for one in merged.code:
        if one.opcode.startswith("call"):
            _, given, taken = called(one)
            arguments = max(arguments, _lay_out("", [sizes[x.name] for x in given], slots))
            results = max(results, _lay_out("return", [sizes[x.name] for x in taken], slots))
    return Linked(merged, functions, slots, _recursive(module, merged, functions), arguments, results)


def _append(merged: Kernel, name: str, function: Kernel) -> Function:
    """Append the code of a function to that of the kernel."""
    start = len(merged.code)
    first = len(merged.widths)
    names = {label: f"{name}:{label}" for label in (*function.labels, *function.tables)}
    for one in function.code:
        operands = tuple(_moved(x, first, names) for x in one.operands)
        guard = one.guard and one.guard._replace(number=one.guard.number + first)
        merged.code.append(Instruction(one.opcode, operands, guard, one.line))
    merged.code.append(_RETURN)
    merged.widths += function.widths
    merged.labels |= {names[label]: pc + start for label, pc in function.labels.items()}
    merged.tables |= {
        names[table]: tuple(names[x] for x in labels) for table, labels in function.tables.items()
    }
    merged.variables += function.variables
    return Function(start, len(merged.code), range(first, len(merged.widths)))


_RETURN = Instruction("ret", (), None, None)


def called(one: Instruction) -> tuple[Register | Symbol, tuple[Symbol, ...], tuple[Symbol, ...]]:
    """What a call calls, its arguments, and its results."""
    operands = list(one.operands)
    taken = operands.pop(0) if isinstance(operands[0], Vector) else Vector(())
    target = operands[0]
    given = operands[1] if len(operands) > 1 else Vector(())
    given = given if isinstance(given, Vector) else Vector(())
    assert isinstance(target, Register | Symbol) and isinstance(taken, Vector)
    return target, given.items, taken.items


def _lay_out(area: str, variables: list[Variable], slots: dict[str, tuple[str, int]]) -> int:
    """Give each variable its slot. Returns the size of the area."""
    at = 0
    for v in variables:
        at += -at % v.align
        slots[v.name] = area, at
        at += v.size
    return at


def _moved(operand: Operand, by: int, names: dict[str, str]) -> Operand:
    """An operand with the registers and labels of the whole program."""
    if isinstance(operand, Register):
        return operand._replace(number=operand.number + by)
    if isinstance(operand, Symbol):
        return operand._replace(name=names.get(operand.name, operand.name))
    if isinstance(operand, Vector):
        return Vector(tuple(_moved(x, by, names) for x in operand.items))
    if isinstance(operand, Address) and operand.base is not None:
        base = _moved(operand.base, by, names)
        return operand._replace(base=base)  # type: ignore[arg-type]
    return operand


def _recursive(module: Module, merged: Kernel, functions: dict[str, Function]) -> set[str]:
    """The functions that may call themselves, directly or through others."""
    pointed_to = {s.name for v in module.variables for _, s in v.pointers}
    pointed_to |= {
        x.name
        for one in merged.code
        if not one.opcode.startswith("call")
        for x in one.operands
        if isinstance(x, Symbol)
    }
    reaches = {
        name: _called_by(merged, function, pointed_to) & functions.keys()
        for name, function in functions.items()
    }
    for _ in functions:
        reaches = {name: there.union(*(reaches[x] for x in there)) for name, there in reaches.items()}
    return {name for name, there in reaches.items() if name in there}


def _called_by(merged: Kernel, function: Function, pointed_to: set[str]) -> set[str]:
    """What a function may call directly. `pointed_to`: all that a pointer may point to."""
    found: set[str] = set()
    for one in merged.code[function.start : function.end]:
        if one.opcode.startswith("call"):
            target, _, _ = called(one)
            found |= {target.name} if isinstance(target, Symbol) else pointed_to
    return found
