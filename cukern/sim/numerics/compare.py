"""Comparison and selection: setp, set, selp, slct, testp, min and max."""

import operator

import numpy as np

from cukern.sim.numerics import floats, integers
from cukern.sim.numerics.floats import FORMATS, Array, Format, Function
from cukern.sim.numerics.integers import UNSIGNED
from cukern.sim.numerics.opcode import PACKED, Opcode

_ORDERED: dict[str, Function] = {
    "eq": operator.eq,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
    "num": lambda a, b: (a == a) & (b == b),
}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt", "nan": "num"}
_INTEGER = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_BOOL: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
MODIFIERS = " ".join((*_ORDERED, *_OPPOSITE, *_INTEGER, *_BOOL, "ftz"))


def _comparison(op: Opcode, type_: str) -> Function:
    """A function of the bits of two values. A comparison with NaN is false, or true if its name ends in u."""
    name = op.modifiers[0]
    if type_ not in FORMATS:
        read = integers.as_type(type_)
        compare = _ORDERED[_INTEGER.get(name, name)]
        return lambda a, b: compare(read(a), read(b))
    values = FORMATS[type_].values
    ordered = _ORDERED[_OPPOSITE.get(name, name)]
    if name in _OPPOSITE:
        return op.flushed(FORMATS[type_], lambda a, b: ~ordered(values(a), values(b)))
    return op.flushed(FORMATS[type_], lambda a, b: ordered(values(a), values(b)))


def setp(op: Opcode, second: bool = False) -> Function:
    """p, or with `second` q: the opposite of p; for packed types, p compares the lower halves and q the upper
    halves."""
    compare = _comparison(op, PACKED.get(op.type, op.type))
    half = int(second) if op.type in PACKED else None
    combine = _BOOL[op.modifiers[1]] if op.one_of(*_BOOL) else None
    if half is None and not second and combine is None:
        return compare

    def run(a: Array, b: Array, *rest: Array) -> Array:
        if half is not None:
            a, b = (x.view(np.uint16)[half::2] for x in (a, b))
        flags = compare(a, b)
        flags = ~flags if second and half is None else flags
        return combine(flags, rest[0]) if combine else flags

    return run


def set_(op: Opcode) -> Function:
    """set: 1.0 where the comparison holds, or all bits 1 for an integer."""
    target, source = op.types

    def make(type_: str) -> Function:
        compare = _comparison(op, PACKED.get(source, source))
        one = FORMATS[type_].one if type_ in FORMATS else ~UNSIGNED[int(type_[1:])](0)
        combine = _BOOL[op.modifiers[1]] if op.one_of(*_BOOL) else lambda flags: flags
        return lambda a, b, *c: np.where(combine(compare(a, b), *c), one, one.dtype.type(0))

    if (target in PACKED) != (source in PACKED):
        raise KeyError(op.name)
    return op.each(make)


def slct(op: Opcode) -> Function:
    """a where c >= 0, else b; also where c is NaN."""
    fmt = FORMATS.get(op.types[1])
    read = op.flushed(fmt, fmt.values) if fmt else integers.as_type(op.types[1])
    return lambda a, b, c: integers.where(read(c) >= 0, a, b)


_CLASSES: dict[str, Function] = {
    "finite": lambda fmt, x: x & fmt.exponent != fmt.exponent,
    "infinite": lambda fmt, x: x & ~fmt.sign == fmt.exponent,
    "number": lambda fmt, x: x & ~fmt.sign <= fmt.exponent,
    "notanumber": lambda fmt, x: x & ~fmt.sign > fmt.exponent,
    "normal": lambda fmt, x: (
        ((x & fmt.exponent != 0) & (x & fmt.exponent != fmt.exponent)) | (x & ~fmt.sign == 0)
    ),
    "subnormal": lambda fmt, x: (x & fmt.exponent == 0) & (x & ~fmt.sign != 0),
}
CLASSES = " ".join(_CLASSES)


def testp(op: Opcode) -> Function:
    test = _CLASSES[op.modifiers[0]]
    fmt = FORMATS[op.type]
    return lambda x: test(fmt, x)


def extreme(op: Opcode) -> Function:
    """min and max of floats."""
    return op.each(lambda type_: op.flushed(FORMATS[type_], _extreme(FORMATS[type_], op)))


def _extreme(fmt: Format, op: Opcode) -> Function:
    """If one operand is NaN, the result is the other one; with .NaN, it is NaN. -0 is less than +0."""
    before, zero_before = (operator.lt, operator.gt) if op.base == "min" else (operator.gt, operator.lt)
    keeps_nan = op.has("NaN")
    xorsign = op.has("xorsign")
    if xorsign != op.has("abs"):
        raise KeyError(op.name)

    def run(a: Array, b: Array) -> Array:
        sign = (a ^ b) & fmt.sign
        if xorsign:
            a = a & ~fmt.sign
            b = b & ~fmt.sign
        x = fmt.values(a)
        y = fmt.values(b)
        # equal values with different bits are zeros; -0 has the larger bits
        zeros = (x == y) & zero_before(a, b)
        bits = np.where(before(x, y) | zeros | (y != y), a, b)
        bits = bits | sign if xorsign else bits
        if keeps_nan:
            return np.where((x != x) | (y != y), fmt.nan, bits)
        return floats.canonical(fmt, bits, fmt.values(bits))

    return run
