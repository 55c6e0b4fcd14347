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
    """A function of the bits of two values. For floats, a comparison with NaN is false, unless its name ends in u: then it is true."""
    name = op.modifiers[0]
    if type_ not in FORMATS:
        read, compare = integers.as_type(type_), _ORDERED[_INTEGER.get(name, name)]
        return lambda a, b: compare(read(a), read(b))
    values = FORMATS[type_].values
    if name in _OPPOSITE:
        ordered = _ORDERED[_OPPOSITE[name]]
        return op.flushed(FORMATS[type_], lambda a, b: ~ordered(values(a), values(b)))
    compare = _ORDERED[name]
    return op.flushed(FORMATS[type_], lambda a, b: compare(values(a), values(b)))


def setp(op: Opcode) -> Function:
    return _predicate(op, False)


def setp_second(op: Opcode) -> Function:
    """q: the opposite of p; for packed types, p compares the lower halves and q the upper halves."""
    return _predicate(op, True)


def _predicate(op: Opcode, second: bool) -> Function:
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


def selp(op: Opcode) -> Function:
    def run(a: Array, b: Array, p: Array) -> Array:
        return np.where(p, a, b)

    return run


def slct(op: Opcode) -> Function:
    """a where c >= 0, else b; also where c is NaN."""
    c_type = op.types[1]
    fmt = FORMATS.get(c_type)
    read = op.flushed(fmt, fmt.values) if fmt else integers.as_type(c_type)

    def run(a: Array, b: Array, c: Array) -> Array:
        return np.where(read(c) >= 0, a, b)

    return run


_CLASSES: dict[str, Function] = {
    "finite": lambda fmt, x: x & fmt.exponent != fmt.exponent,
    "infinite": lambda fmt, x: x & ~fmt.sign == fmt.exponent,
    "number": lambda fmt, x: x & ~fmt.sign <= fmt.exponent,
    "notanumber": lambda fmt, x: x & ~fmt.sign > fmt.exponent,
    "normal": lambda fmt, x: ((x & fmt.exponent != 0) & (x & fmt.exponent != fmt.exponent)) | (x & ~fmt.sign == 0),
    "subnormal": lambda fmt, x: (x & fmt.exponent == 0) & (x & ~fmt.sign != 0),
}
CLASSES = " ".join(_CLASSES)


def testp(op: Opcode) -> Function:
    test, fmt = _CLASSES[op.modifiers[0]], FORMATS[op.type]
    return lambda x: test(fmt, x)


def extreme(op: Opcode) -> Function:
    """min and max."""

    def make(type_: str) -> Function:
        if type_ not in FORMATS:
            op.only()
            return integers.typed({"min": np.minimum, "max": np.maximum}[op.base], type_)
        return op.flushed(FORMATS[type_], _float_extreme(FORMATS[type_], op))

    return op.each(make)


def _float_extreme(fmt: Format, op: Opcode) -> Function:
    """The result is the operand that is not NaN, but with .NaN it is NaN. -0 is less than +0."""
    before, zero_before = (operator.lt, operator.gt) if op.base == "min" else (operator.gt, operator.lt)
    keeps_nan, xorsign = op.has("NaN"), op.has("xorsign")
    if xorsign != op.has("abs"):
        raise KeyError(op.name)

    def run(a: Array, b: Array) -> Array:
        sign = (a ^ b) & fmt.sign
        if xorsign:
            a, b = a & ~fmt.sign, b & ~fmt.sign
        x, y = fmt.values(a), fmt.values(b)
        zeros = (x == y) & zero_before(a, b)  # equal values with different bits: zeros, of which -0 has the larger bits
        bits = np.where(before(x, y) | zeros | (y != y), a, b)
        bits = bits | sign if xorsign else bits
        if keeps_nan:
            return np.where((x != x) | (y != y), fmt.nan, bits)
        return floats.canonical(fmt, bits, fmt.values(bits))

    return run
