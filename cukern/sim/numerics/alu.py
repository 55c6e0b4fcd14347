"""From the name of an ALU instruction to the numpy function that computes it.

`find("fma.rn.f32")` returns a function of the source operands in PTX's order: arrays of raw bits (unsigned,
one element per lane, or a single one for a constant), and bool arrays for predicates. It returns the raw bits
of the destination, or bools, and does not change its operands. ptxas may fuse a mul and an add that name no
rounding mode; here each of them is rounded, as with .rn.

The tables map each base to a maker, which builds the function from types and modifiers, and to the modifiers
that it supports. Anything else raises NotSimulated: no instruction is simulated incompletely."""

import functools
from collections.abc import Callable

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import compare, convert, floats, integers
from cukern.sim.numerics.approx import approximate
from cukern.sim.numerics.floats import FORMATS, Function
from cukern.sim.numerics.opcode import PACKED, Opcode, parse

_Row = tuple[Callable[[Opcode], Function], str]


@functools.cache
def find(opcode: str, second: bool = False) -> Function:
    """The function of an instruction; with `second`, of its second result: setp's q, or the carry flag of an
    instruction with .cc.

    An instruction that reads the carry flag (addc, subc, madc) takes it as its last operand. Raises
    NotSimulated."""
    op = parse(opcode)
    try:
        table = _SECOND if second else {**_ANY, **(_FLOAT if op.is_float else _INTEGER)}
        maker, modifiers = table[op.base]
        if len(op.types) > 1 and op.base in _INTEGER:  # add.f32.bf16 of sm_100
            raise NotSimulated(opcode)
        if not set(op.modifiers) <= set(modifiers.split()):
            raise NotSimulated(opcode)
        if op.types[:1] == ("f32x2",) and (op.base not in ("add", "sub", "mul", "fma") or op.has("sat")):
            raise NotSimulated(opcode)
        return maker(op)
    # no types, or a base, types or a combination of modifiers that a table lacks
    except (LookupError, ValueError, StopIteration):
        raise NotSimulated(opcode) from None


# ---- floats


def _rounded(op: Opcode) -> Function:
    kind = "fma" if op.base == "mad" else op.base
    mode = op.one_of(*_ROUND.split()) or "rn"
    return op.each(
        lambda type_: floats.arithmetic(
            kind, FORMATS[type_], mode, op.has("ftz"), op.has("sat"), op.has("relu")
        )
    )


def _root(op: Opcode) -> Function:
    """Functions with an approximate variant. Only div, rcp and sqrt also have a rounded one."""
    kind = op.one_of("approx", "full")
    if kind:
        op.only(kind, "ftz")
        name = "div.full" if kind == "full" else op.base
        return op.each(lambda type_: approximate(name, FORMATS[type_], op.has("ftz")))
    if op.one_of(*_ROUND.split()) is None or op.type not in ("f32", "f64"):
        raise KeyError(op.name)
    return _rounded(op)


def _sign(op: Opcode) -> Function:
    """neg and abs change only the sign bit, also of NaN; but packed types return the canonical NaN."""

    def make(type_: str) -> Function:
        fmt = FORMATS[type_]
        function: Function = {"neg": lambda x: x ^ fmt.sign, "abs": lambda x: x & ~fmt.sign}[op.base]
        if op.type in PACKED:
            return op.flushed(fmt, lambda x: floats.canonical(fmt, function(x), fmt.values(x)))
        return op.flushed(fmt, function)

    return op.each(make)


def _copysign(op: Opcode) -> Function:
    sign = FORMATS[op.type].sign
    return lambda a, b: (a & sign) | (b & ~sign)


# ---- integers


def _sum(op: Opcode) -> Function:
    if op.has("cc"):
        return _carrying(op)
    ufunc = {"add": np.add, "sub": np.subtract}[op.base]
    if op.has("sat"):
        return {"s32": integers.saturating(ufunc)}[op.type]
    return op.each(lambda _: ufunc)


def _product(op: Opcode) -> Function:
    """The lower half of a product (.lo), the upper half (.hi), or all of it (.wide)."""
    makers: dict[str, Callable[[str], Function]] = {
        "lo": lambda type_: np.multiply,
        "hi": integers.high,
        "wide": integers.wide,
    }
    return makers[op.one_of(*makers) or ""](op.type)


def _multiply_add(op: Opcode) -> Function:
    if op.has("cc"):
        return _carrying(op)
    product = _product(op)
    return lambda a, b, c: product(a, b) + c


def _carrying(op: Opcode, flag: bool = False) -> Function:
    """The sum, or the carry flag."""
    op.only("cc", "lo", "hi")
    if flag and not op.has("cc"):
        raise KeyError(op.name)
    part = _product(op) if op.base.startswith("mad") else None
    return functools.partial(
        integers.carrying, part, op.base.startswith("sub"), op.base in ("addc", "subc", "madc"), flag
    )


def _sad(op: Opcode) -> Function:
    largest = integers.typed(np.maximum, op.type)
    least = integers.typed(np.minimum, op.type)
    return lambda a, b, c: c + (largest(a, b) - least(a, b))


def _typed(ufunc: Function) -> _Row:
    """A row of the table: one numpy function, on signed or unsigned integers."""
    return lambda op: op.each(lambda type_: integers.typed(ufunc, type_)), ""


# ---- the rest


def _same(function: Function, *types: str) -> _Row:
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
    return functools.partial(integers.funnel, side == "l", bound == "wrap")


def _dot(op: Opcode) -> Function:
    return integers.dot(op.types, {"lo": False, "hi": True}[op.modifiers[0]] if op.base == "dp2a" else None)


def _video(op: Opcode) -> Function:
    return integers.by_parts(op.base, op.types, op.has("sat"), op.has("add"))


_ROUND = "rn rz rm rp"
_LOGIC = ("b16", "b32", "b64", "pred")

_FLOAT: dict[str, _Row] = {
    **{base: (_rounded, f"{_ROUND} ftz sat relu") for base in ("add", "sub", "mad", "fma")},
    "mul": (_rounded, f"{_ROUND} ftz sat"),
    "div": (_root, f"{_ROUND} ftz approx full"),
    "rcp": (_root, f"{_ROUND} ftz approx"),
    "sqrt": (_root, f"{_ROUND} ftz approx"),
    **{base: (_root, "approx ftz") for base in ("rsqrt", "ex2", "lg2", "sin", "cos", "tanh")},
    "neg": (_sign, "ftz"),
    "abs": (_sign, "ftz"),
    "min": (compare.extreme, "ftz NaN xorsign abs"),
    "max": (compare.extreme, "ftz NaN xorsign abs"),
    "copysign": (_copysign, ""),
    "testp": (compare.testp, compare.CLASSES),
}
_INTEGER: dict[str, _Row] = {
    "add": (_sum, "sat cc"),
    "addc": (_carrying, "cc"),
    "sub": (_sum, "sat cc"),
    "subc": (_carrying, "cc"),
    "mul": (_product, "lo hi wide"),
    "mad": (_multiply_add, "lo hi wide cc"),
    "madc": (_carrying, "lo hi cc"),
    "div": (lambda op: functools.partial(integers.divided, np.floor_divide, op.type), ""),
    "rem": (lambda op: functools.partial(integers.divided, np.remainder, op.type), ""),
    "neg": _typed(np.negative),
    "abs": _typed(np.abs),
    "min": _typed(np.minimum),
    "max": _typed(np.maximum),
    "sad": (_sad, ""),
}
_ANY: dict[str, _Row] = {
    "dp4a": (_dot, ""),
    "dp2a": (_dot, "lo hi"),
    **{
        f"v{name}{n}": (_video, "sat add") for name in ("add", "sub", "absdiff", "min", "max") for n in (2, 4)
    },
    "fns": _same(integers.nth_bit, "b32"),
    "setp": (compare.setp, compare.MODIFIERS),
    "set": (compare.set_, compare.MODIFIERS),
    "selp": _same(lambda a, b, p: integers.where(p, a, b)),
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
    "bfind": (lambda op: functools.partial(integers.bfind, op.type, op.has("shiftamt")), "shiftamt"),
    "popc": _same(integers.popc),
    "clz": _same(integers.clz),
    "brev": _same(integers.brev),
    "prmt": (
        lambda op: functools.partial(integers.permute, "".join(op.modifiers[:1])),
        "f4e b4e rc8 ecl ecr rc16",
    ),
    "cvt": (_convert, " ".join(convert.MODIFIERS)),
}
_SECOND: dict[str, _Row] = {
    "setp": (functools.partial(compare.setp, second=True), compare.MODIFIERS),
    **{
        base: (functools.partial(_carrying, flag=True), "lo hi cc")
        for base in ("add", "addc", "sub", "subc", "mad", "madc")
    },
}
