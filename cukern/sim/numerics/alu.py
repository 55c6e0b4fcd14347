"""From the name of an ALU instruction to the numpy function that computes it.

`find("fma.rn.f32")` returns a function of the source operands in PTX's order: arrays of raw bits (unsigned, one element per lane, or a
single one for a constant), bool arrays for predicates. It returns the raw bits of the destination, or bools, and does not change its
operands. A GPU's assembler may fuse a mul and an add that name no rounding mode; here each of them is rounded, as with .rn.

`_TABLE` maps each base to a maker, which builds the function from types and modifiers, and to the modifiers that it supports. Anything
else raises NotSimulated: no instruction is simulated incompletely.
"""

import functools
from collections.abc import Callable

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import compare, convert, floats, integers
from cukern.sim.numerics.approx import approximate
from cukern.sim.numerics.floats import FORMATS, Function
from cukern.sim.numerics.opcode import Opcode, parse


@functools.cache
def find(opcode: str, second: bool = False) -> Function:
    """The function of an instruction; with `second`, of its second result: setp's q, or the carry flag of an instruction with .cc.

    An instruction that reads the carry flag (addc, subc, madc) takes it as its last operand. Raises NotSimulated.
    """
    op = parse(opcode)
    maker, modifiers = (_SECOND if second else _TABLE).get(op.base, (None, ""))
    if maker is None or not op.types or not set(op.modifiers) <= set(modifiers.split()):
        raise NotSimulated(opcode)
    try:
        return maker(op)
    except (LookupError, ValueError, StopIteration):  # types, or a combination of modifiers, that a table lacks
        raise NotSimulated(opcode) from None


# ---- arithmetic


def _rounded(op: Opcode, kind: str) -> Function:
    mode = op.one_of(*_ROUND.split()) or "rn"
    return op.each(lambda type_: floats.arithmetic(kind, FORMATS[type_], mode, op.has("ftz"), op.has("sat"), op.has("relu")))


_RAW: dict[str, Function] = {"add": np.add, "sub": np.subtract}


def _sum(op: Opcode) -> Function:
    if op.is_float:
        op.only("ftz", "sat", "relu", *_ROUND.split())
        return _rounded(op, op.base)
    if op.writes_carry or op.reads_carry:
        return _carrying(op)
    if op.has("sat"):
        return {"s32": integers.saturating(_RAW[op.base])}[op.type]
    op.only()
    return op.each(lambda _: _RAW[op.base])


def _product(op: Opcode) -> Function:
    if op.is_float:
        op.only("ftz", "sat", *_ROUND.split())
        return _rounded(op, "mul")
    return _half(op)


def _half(op: Opcode) -> Function:
    """An integer product: the lower half (.lo), the upper half (.hi), or all of it (.wide)."""
    op.only("lo", "hi", "wide", "cc")
    makers: dict[str, Callable[[str], Function]] = {"lo": lambda type_: np.multiply, "hi": integers.high, "wide": integers.wide}
    return makers[op.one_of("lo", "hi", "wide") or ""](op.type)


def _multiply_add(op: Opcode) -> Function:
    if op.is_float:
        op.only("ftz", "sat", "relu", *_ROUND.split())
        return _rounded(op, "fma")
    if op.writes_carry or op.reads_carry:
        return _carrying(op)
    product = _half(op)
    return lambda a, b, c: product(a, b) + c


def _carrying(op: Opcode, flag: bool = False) -> Function:
    op.only("cc", "lo", "hi")
    part = _half(op) if op.base.startswith("mad") else None
    return integers.carrying(part, op.base.startswith("sub"), op.reads_carry, flag)


def _carry(op: Opcode) -> Function:
    if not op.writes_carry:
        raise KeyError(op.name)
    return _carrying(op, True)


def _quotient(op: Opcode) -> Function:
    if not op.is_float:
        op.only()
        return integers.divided(op.base, op.type)
    kind = op.one_of("approx", "full")
    if kind:
        op.only(kind, "ftz")
        return approximate({"approx": "div", "full": "div.full"}[kind], FORMATS[op.type], op.has("ftz"))
    return _root(op)


def _root(op: Opcode) -> Function:
    """Functions that have a rounded and an approximate variant."""
    if op.has("approx"):
        op.only("approx", "ftz")
        return approximate(op.base, FORMATS[op.type], op.has("ftz"))
    if op.one_of(*_ROUND.split()) is None or op.type not in ("f32", "f64"):
        raise KeyError(op.name)
    return _rounded(op, op.base)


def _approximate(op: Opcode) -> Function:
    if not op.has("approx"):
        raise KeyError(op.name)
    return op.each(lambda type_: approximate(op.base, FORMATS[type_], op.has("ftz")))


def _sign(op: Opcode) -> Function:
    """neg and abs. For floats they change only the sign bit, also of NaN; but packed types return the canonical NaN."""

    def make(type_: str) -> Function:
        if type_ not in FORMATS:
            op.only()
            return integers.typed({"neg": np.negative, "abs": np.abs}[op.base], type_)
        fmt = FORMATS[type_]
        function: Function = {"neg": lambda x: x ^ fmt.sign, "abs": lambda x: x & ~fmt.sign}[op.base]
        if op.type.endswith("x2"):
            return op.flushed(fmt, lambda x: floats.canonical(fmt, function(x), fmt.values(x)))
        return op.flushed(fmt, function)

    return op.each(make)


def _copysign(op: Opcode) -> Function:
    sign = FORMATS[op.type].sign
    return lambda a, b: (a & sign) | (b & ~sign)


def _sad(op: Opcode) -> Function:
    largest, least = integers.typed(np.maximum, op.type), integers.typed(np.minimum, op.type)
    return lambda a, b, c: c + (largest(a, b) - least(a, b))


# ---- the rest


def _same(function: Function, *types: str) -> tuple[Callable[[Opcode], Function], str]:
    """A row of the table: one function for all of these types (for every type if none is named)."""

    def make(op: Opcode) -> Function:
        if types and op.type not in types:
            raise KeyError(op.name)
        return function

    return make, ""


def _convert(op: Opcode) -> Function:
    target, source = op.types
    return convert.convert(target, source, frozenset(op.modifiers))


def _funnel(op: Opcode) -> Function:
    (side,) = {"l", "r"} & set(op.modifiers)
    (bound,) = {"wrap", "clamp"} & set(op.modifiers)
    return integers.funnel(side == "l", bound == "wrap")


def _permute(op: Opcode) -> Function:
    return integers.permute(op.modifiers[0] if op.modifiers else None)


def _dot(op: Opcode) -> Function:
    if op.base == "dp2a":
        return integers.dot(op.types, {"lo": False, "hi": True}[op.modifiers[0]])
    return integers.dot(op.types, None)


_ROUND = "rn rz rm rp"
_FLOAT = f"{_ROUND} ftz sat relu"
_LOGIC = ("b16", "b32", "b64", "pred")

_TABLE: dict[str, tuple[Callable[[Opcode], Function], str]] = {
    "add": (_sum, f"{_FLOAT} cc"),
    "addc": (_sum, "cc"),
    "sub": (_sum, f"{_FLOAT} cc"),
    "subc": (_sum, "cc"),
    "mul": (_product, f"{_FLOAT} lo hi wide"),
    "mad": (_multiply_add, f"{_FLOAT} lo hi wide cc"),
    "madc": (_multiply_add, "lo hi cc"),
    "fma": (_multiply_add, _FLOAT),
    "div": (_quotient, f"{_ROUND} ftz approx full"),
    "rem": (_quotient, ""),
    "rcp": (_root, f"{_ROUND} ftz approx"),
    "sqrt": (_root, f"{_ROUND} ftz approx"),
    **{base: (_approximate, "approx ftz") for base in ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")},
    "neg": (_sign, "ftz"),
    "abs": (_sign, "ftz"),
    "min": (compare.extreme, "ftz NaN xorsign abs"),
    "max": (compare.extreme, "ftz NaN xorsign abs"),
    "copysign": (_copysign, ""),
    "testp": (compare.testp, compare.CLASSES),
    "sad": (_sad, ""),
    "dp4a": (_dot, ""),
    "dp2a": (_dot, "lo hi"),
    "setp": (compare.setp, compare.MODIFIERS),
    "set": (compare.set_, compare.MODIFIERS),
    "selp": (compare.selp, ""),
    "slct": (compare.slct, "ftz"),
    "mov": _same(np.copy),
    "and": _same(np.bitwise_and, *_LOGIC),
    "or": _same(np.bitwise_or, *_LOGIC),
    "xor": _same(np.bitwise_xor, *_LOGIC),
    "not": _same(np.invert, *_LOGIC),
    "cnot": _same(lambda x: (x == 0).astype(x.dtype), *_LOGIC),
    "lop3": _same(integers.lop3, "b32"),
    "shl": (lambda op: integers.shift(np.left_shift, op.type), ""),
    "shr": (lambda op: integers.shift(np.right_shift, op.type), ""),
    "shf": (_funnel, "l r wrap clamp"),
    "bfe": (lambda op: integers.extract(op.type), ""),
    "bfi": (lambda op: integers.insert(op.type), ""),
    "bfind": (lambda op: integers.bfind(op.type, op.has("shiftamt")), "shiftamt"),
    "popc": _same(integers.popc),
    "clz": _same(integers.clz),
    "brev": _same(integers.brev),
    "prmt": (_permute, "f4e b4e rc8 ecl ecr rc16"),
    "cvt": (_convert, " ".join(convert.MODIFIERS)),
}
_SECOND: dict[str, tuple[Callable[[Opcode], Function], str]] = {
    "setp": (compare.setp_second, compare.MODIFIERS),
    **{base: (_carry, "lo hi cc") for base in ("add", "addc", "sub", "subc", "mad", "madc")},
}
