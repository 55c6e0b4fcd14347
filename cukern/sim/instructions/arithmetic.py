"""Instructions that only compute: the ALU's and moves."""

from collections.abc import Callable
from typing import Any

import numpy as np

from cukern.sim.instructions.decode import Context, Machine, Step, compute
from cukern.sim.instructions.fused import Compute
from cukern.sim.machine.special import CLOCKS
from cukern.sim.numerics import alu, fp8
from cukern.sim.numerics.integers import SIGNED, UNSIGNED, Array
from cukern.sim.ptx.module import WIDTHS, Operand, Register, Symbol, Vector


def arithmetic(c: Context) -> Step:
    """An instruction of the ALU."""
    if {"e4m3x2", "e5m2x2"} & set(c.parts):
        sources = [c.source(x, "b32") for x in c.operands[1:]]
        return compute(fp8.convert(c.opcode), c.target(c.operands[0]), sources)
    if c.parts[0] in ("min", "max") and len(c.operands) > 3:
        return _extreme_of_three(c)
    targets = c.items(c.operands[0])
    types = source_types(c)
    sources = [c.source(x, t) for x, t in zip(c.operands[1:], types, strict=False)]
    negated = [isinstance(x, Register) and x.negated for x in c.operands[1:]]
    if c.parts[0] in ("addc", "subc", "madc"):
        sources.append(c.program.carry)
        c.reads.append(c.program.carry)
        negated.append(False)
    results = []
    for i, target in enumerate(targets):
        function, register = alu.find(c.opcode, second=i > 0), c.target(target)
        if any(negated):
            function = _with_negated(function, negated)
        results.append((_extended(function, register, c.types), register))
    if "cc" in c.parts:
        results.append((alu.find(c.opcode, second=True), c.target(Register(c.program.carry, 1))))
    return Compute(results, sources)


def _extreme_of_three(c: Context) -> Step:
    """min and max of three float32 numbers, of sm_100."""
    c.refuse(c.types != ["f32"] or "abs" in c.parts or len(c.operands) != 4)
    function = alu.find(c.opcode)
    sources = [c.source(x, "f32") for x in c.operands[1:]]
    return compute(lambda x, y, z: function(function(x, y), z), c.target(c.operands[0]), sources)


def source_types(c: Context) -> list[str]:
    """The types of an ALU instruction's sources, for its literals."""
    base, types = c.parts[0], c.types or ["b32"]
    t = types[-1] if base in ("cvt", "setp", "set") else types[0]
    if base in ("shl", "shr"):
        return [t, "u32"]
    if base == "mad" and "wide" in c.parts:
        return [t, t, {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64"}.get(t, t)]
    if base in ("selp", "setp", "set"):
        return [t, t, "pred"]
    if base in ("dp4a", "dp2a"):
        return ["b32"] * 3
    special_cases = {"slct": [t, t, types[-1]], "bfe": [t, "u32", "u32"], "bfi": [t, t, "u32", "u32"]}
    return special_cases.get(base, [t] * 4)


def _with_negated(function: Callable, negated: list[bool]) -> Callable:
    return lambda *args: function(*(~x if no else x for x, no in zip(args, negated, strict=True)))


def _extended(function: Callable, register: Register, types: list[str]) -> Callable:
    """`function` with its result extended to the width of the destination register."""
    if register.width == 1 or not types or WIDTHS[types[0]] >= register.width:
        return function
    wide, signed = UNSIGNED[register.width], types[0][0] == "s"

    def run(*args: Array) -> Array:
        result = function(*args)
        if result.dtype == np.bool_ or result.dtype.itemsize * 8 >= register.width:
            return result
        return result.view(SIGNED[result.dtype.itemsize * 8]).astype(wide) if signed else result.astype(wide)

    return run


def constant(register: Register, value: Callable[[Machine], Any]) -> Step:
    """register = value(m), the same for all lanes."""
    dtype = UNSIGNED[register.width]
    return lambda m, group: m.put(group, register.number, np.array([value(m)], dtype))


def create_policy(c: Context) -> Step:
    """createpolicy: the simulator ignores cache policies."""
    register = c.target(c.operands[0])
    c.refuse(c.parts[1] != "fractional")
    return constant(register, lambda m: 0)


def move(c: Context) -> Step:
    target, source = c.operands
    if isinstance(source, Symbol) and source.name in CLOCKS:
        register = c.target(target)
        mask, high = (1 << register.width) - 1, source.name.endswith("_hi")
        return constant(register, lambda m: (m.launched.steps >> (32 if high else 0)) & mask)
    if isinstance(source, Vector):
        return _pack(c, target, source.items)
    if isinstance(target, Vector):
        return _unpack(target.items, c)
    register = c.target(target)
    return compute(_extended(np.copy, register, []), register, [c.source(source, c.types[0])])


def _pack(c: Context, target: Operand, items: tuple[Operand, ...]) -> Step:
    register = c.target(target)
    width = register.width // len(items)
    c.refuse(register.width > 64 or width < 16)
    wide = UNSIGNED[register.width]

    def join(*parts: Array) -> Array:
        result = parts[0].astype(wide)
        for i, part in enumerate(parts[1:], 1):
            result = result | part.astype(wide) << wide(width * i)
        return result

    return compute(join, register, [c.source(x, f"b{width}") for x in items])


def _unpack(items: tuple[Operand, ...], c: Context) -> Step:
    width = WIDTHS[c.types[0]] // len(items)
    c.refuse(width < 16 or width * len(items) > 64)
    results = [(_part(width * i, UNSIGNED[width]), c.target(item)) for i, item in enumerate(items)]
    return Compute(results, [c.source(c.operands[1], c.types[0])])


def _part(shift: int, dtype: Any) -> Callable[[Array], Array]:
    return lambda x: (x >> x.dtype.type(shift)).astype(dtype)
