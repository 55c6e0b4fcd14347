"""Integer arithmetic and bit operations of the ALU, on raw bits: unsigned numpy arrays, which wrap around as
registers do.

`signed(x)` reads the same bits as two's complement. Operands have the width of their type: the caller has
truncated wider ones."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

try:  # the function without its wrapper, which takes four times as long
    from numpy._core.multiarray import count_nonzero as count_nonzero
except ImportError:  # numpy 1
    from numpy import count_nonzero as count_nonzero

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]

UNSIGNED: dict[int, Any] = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED: dict[int, Any] = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def signed(x: Array) -> Array:
    return x.view(SIGNED[x.itemsize * 8])


def unsigned(x: Array) -> Array:
    return x.view(UNSIGNED[x.itemsize * 8])


def dtype_of(type_: str) -> Any:
    """The numpy type of an integer type such as "s32" or "u64"."""
    return (SIGNED if type_[0] == "s" else UNSIGNED)[int(type_[1:])]


def as_type(type_: str) -> Function:
    """Reads raw bits as `type_`, such as "s32" or "u64": signed only for s."""
    return signed if type_[0] == "s" else unsigned


def where(condition: Array, a: Array, b: Array) -> Array:
    return np.where(condition, a, b)


def typed(ufunc: Function, type_: str) -> Function:
    """`ufunc` of numpy on operands read as `type_`."""
    if type_[0] != "s":
        return ufunc
    return lambda *args: unsigned(ufunc(*map(signed, args)))


# ---- products


def wide(type_: str) -> Function:
    """mul.wide: the whole product, twice as wide."""
    read = as_type(type_)
    double = dtype_of(f"{type_[0]}{2 * int(type_[1:])}")
    return lambda a, b: unsigned(np.multiply(read(a), read(b), dtype=double))


def high(type_: str) -> Function:
    """mul.hi: the upper half of the product."""
    width = int(type_[1:])
    if width == 64:
        return _high64 if type_[0] == "u" else _high64_signed
    product = wide(type_)
    return lambda a, b: (product(a, b) >> width).astype(UNSIGNED[width])


def _high64(a: Array, b: Array) -> Array:
    low = np.uint64(0xFFFFFFFF)
    a_low = a & low
    a_high = a >> 32
    b_low = b & low
    b_high = b >> 32
    middle = a_high * b_low + ((a_low * b_low) >> 32)
    return a_high * b_high + (middle >> 32) + ((a_low * b_high + (middle & low)) >> 32)


def _high64_signed(a: Array, b: Array) -> Array:
    zero = np.uint64(0)
    return _high64(a, b) - np.where(signed(a) < 0, b, zero) - np.where(signed(b) < 0, a, zero)


def saturating(ufunc: Function) -> Function:
    """add.sat.s32 and sub.sat.s32."""
    return lambda a, b: unsigned(
        np.clip(ufunc(signed(a), signed(b), dtype=np.int64), -(1 << 31), (1 << 31) - 1).astype(np.int32)
    )


# ---- sums with a carry: the flag is one more operand at the end, and one more result


def carrying(part: Function | None, subtract: bool, reads: bool, carry_out: bool, *args: Array) -> Array:
    """add, sub (and mad with `part`, its half of the product) with .cc; for sub, the flag is a borrow."""
    flag = args[-1] if reads else np.zeros(1, bool)
    a, b = (part(args[0], args[1]), args[2]) if part else args[:2]
    first = a - b if subtract else a + b
    last = first - flag if subtract else first + flag
    if carry_out:
        return (a < b) | (first < flag) if subtract else (first < a) | (last < first)
    return last


# ---- quotients


def divided(ufunc: Function, type_: str, a: Array, b: Array) -> Array:
    """div (np.floor_divide) and rem (np.remainder), toward zero. PTX leaves division by zero undefined: GPUs
    return all ones."""
    ones = ~a.dtype.type(0)
    if type_[0] != "s":
        return np.where(b == 0, ones, ufunc(a, b))
    negative_a = signed(a) < 0
    negative_b = signed(b) < 0
    size = ufunc(np.where(negative_a, -a, a), np.where(negative_b, -b, b))
    flip = negative_a ^ negative_b if ufunc is np.floor_divide else negative_a
    return np.where(b == 0, ones, np.where(flip, -size, size))


# ---- shifts and fields


def shift(ufunc: Function, type_: str) -> Function:
    """shl and shr by a 32-bit count; a count >= the width shifts all bits out. numpy does so, too, if the
    types are equal."""
    width = int(type_[1:])
    read = as_type(type_)
    if width == 32:
        return lambda a, count: unsigned(ufunc(read(a), read(count)))
    return lambda a, count: unsigned(
        ufunc(read(a), np.minimum(count, count.dtype.type(width)).astype(read(a).dtype))
    )


def funnel(left: bool, wrap: bool, a: Array, b: Array, count: Array) -> Array:
    """shf: shift the 64 bits b:a and take the upper half (left) or the lower one (right)."""
    both = (b.astype(np.uint64) << 32) | a
    by = (count & 31 if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
    return ((both << by) >> 32 if left else both >> by).astype(np.uint32)


# bfe and bfi: `length` bits from `position` on. Types of 32 bits read the low 8 bits of both operands, types
# of 64 bits read all.


def _clamped(x: Array, width: int) -> Array:
    return np.minimum(x & np.uint32(255) if width == 32 else x, np.uint32(256))


def _mask(length: Array, kind: Any) -> Array:
    return (kind(1) << length.astype(kind)) - kind(1)  # a length >= the width shifts the 1 out: all ones


def extract(type_: str) -> Function:
    """bfe: the field of a, extended to the width. A signed type extends it with the field's top bit, or with
    that of a."""
    width = int(type_[1:])
    kind = UNSIGNED[int(type_[1:])]
    right = shift(np.right_shift, f"u{width}")

    def run(a: Array, position: Array, length: Array) -> Array:
        position = _clamped(position, width)
        length = _clamped(length, width)
        field = right(a, position) & _mask(length, kind)
        if type_[0] == "u":
            return field
        top = right(a, np.minimum(position + length - np.uint32(1), np.uint32(width - 1))) & kind(1)
        inside = np.minimum(length, width - np.minimum(position, np.uint32(width)))
        return np.where((top == 1) & (length != 0), field | ~_mask(inside, kind), field)

    return run


def insert(type_: str) -> Function:
    """bfi: the low bits of a replace the field of b."""
    width = int(type_[1:])
    kind = UNSIGNED[int(type_[1:])]
    left = shift(np.left_shift, f"u{width}")

    def run(a: Array, b: Array, position: Array, length: Array) -> Array:
        position = _clamped(position, width)
        mask = left(_mask(_clamped(length, width), kind), position)
        return (b & ~mask) | (left(a, position) & mask)

    return run


# ---- counting bits


def _bits(x: Array) -> Array:
    """One row per value, lowest bit first."""
    return np.unpackbits(
        np.ascontiguousarray(x).view(np.uint8).reshape(x.size, x.itemsize), axis=1, bitorder="little"
    )


def popc(x: Array) -> Array:
    return _bits(x).sum(axis=1, dtype=np.uint32)


def brev(x: Array) -> Array:
    return np.packbits(_bits(x)[:, ::-1], axis=1, bitorder="little").reshape(-1).view(x.dtype)


def clz(x: Array) -> Array:
    bits = _bits(x)[:, ::-1]
    return np.where(x == 0, bits.shape[1], bits.argmax(axis=1)).astype(np.uint32)


def bfind(type_: str, from_top: bool, x: Array) -> Array:
    """The position of the highest bit that is not a sign bit; with .shiftamt, its distance from the top. All
    ones if there is none."""
    x = np.where(signed(x) < 0, ~x, x) if type_[0] == "s" else x
    zeros = clz(x)
    return np.where(
        x == 0, np.uint32(0xFFFFFFFF), zeros if from_top else np.uint32(x.itemsize * 8 - 1) - zeros
    )


# ---- bytes and tables

_SELECTORS = {
    "f4e": [[s, s + 1, s + 2, s + 3] for s in range(4)],
    "b4e": [[s, s - 1 & 7, s - 2 & 7, s - 3 & 7] for s in range(4)],
    "rc8": [[s] * 4 for s in range(4)],
    "ecl": [[max(s, i) for i in range(4)] for s in range(4)],
    "ecr": [[min(s, i) for i in range(4)] for s in range(4)],
    "rc16": [[2 * (s & 1), 2 * (s & 1) + 1] * 2 for s in range(4)],
}


def permute(mode: str, a: Array, b: Array, c: Array) -> Array:
    """prmt: four of the eight bytes b:a. In the default mode, bit 3 of a selector replicates the byte's
    sign."""
    table = np.array(_SELECTORS[mode]) if mode else None
    both = ((b.astype(np.uint64) << 32) | a).view(np.uint8).reshape(-1, 8)
    select = (
        (c[:, None] >> np.array([0, 4, 8, 12], np.uint32)).astype(np.intp) & 15
        if table is None
        else table[c & 3]
    )
    rows = max(len(both), len(select))
    both = np.broadcast_to(both, (rows, 8))
    select = np.broadcast_to(select, (rows, 4))
    picked = np.take_along_axis(both, select & 7, axis=1)
    picked = np.where(select & 8, (picked.view(np.int8) >> 7).view(np.uint8), picked)
    return picked.view(np.uint32).reshape(-1)


def lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: where the bits of a, b and c form the number i, the result is bit i of the table."""
    result = np.zeros_like(a | b | c)
    for i in range(8):
        if table[0] >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def packed(width: int, function: Function, *args: Array) -> Array:
    """`function` of a type of 16 or 32 bits, on both halves of a register."""
    parts = function(*(x.view(UNSIGNED[width]).reshape(len(x), -1) for x in args))
    return np.ascontiguousarray(parts).view(UNSIGNED[8 * parts.itemsize * parts.shape[1]]).reshape(-1)


def by_parts(name: str, types: Sequence[str], saturates: bool, sums: bool) -> Function:
    """vadd4 and its kind: an operation on each of the 2 halves or 4 bytes of a and b; with `sums`, c plus the
    sum of its results."""
    operation = name[1:-1]
    width = {"2": "16", "4": "8"}[name[-1]]
    kind_d, kind_a, kind_b = (dtype_of(t[0] + width) for t in types)
    ufunc = {"add": np.add, "sub": np.subtract, "absdiff": np.subtract, "min": np.minimum, "max": np.maximum}[
        operation
    ]
    limits = np.iinfo(kind_d)

    def run(a: Array, b: Array, c: Array) -> Array:
        a, b = np.broadcast_arrays(a, b)
        parts = [
            np.ascontiguousarray(x).view(kind).reshape(len(a), -1).astype(np.int64)
            for x, kind in ((a, kind_a), (b, kind_b))
        ]
        result = ufunc(*parts)
        result = np.abs(result) if operation == "absdiff" else result
        result = np.clip(result, limits.min, limits.max) if saturates else result
        if sums:
            return (result.sum(axis=1) + c).astype(np.uint32)
        return np.ascontiguousarray(result.astype(kind_d)).view(np.uint32)[:, 0]

    return run


def nth_bit(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the position of the bit of the mask that is the |offset|-th from `base` on, upwards or downwards;
    all ones if there is none."""
    found = []
    for word, start, n in np.broadcast(mask, base, offset.view(np.int32)):
        order = (
            range(int(start), 32)
            if n > 0
            else range(int(start), -1, -1)
            if n
            else range(int(start), int(start) + 1)
        )
        ones = [i for i in order if int(word) >> i & 1]
        found.append(ones[max(abs(int(n)), 1) - 1] if len(ones) >= max(abs(int(n)), 1) else 0xFFFFFFFF)
    return np.array(found, np.uint32)


def dot(types: Sequence[str], high_half: bool | None) -> Function:
    """c plus a dot product. dp4a: of the four bytes of a and of b. dp2a: of the two halves of a and of two
    bytes of b."""
    kind_a = dtype_of(types[0][0] + ("8" if high_half is None else "16"))
    kind_b = dtype_of(types[1][0] + "8")
    columns = slice(2, 4) if high_half else slice(0, 4 if high_half is None else 2)

    def run(a: Array, b: Array, c: Array) -> Array:
        parts_a = a.view(kind_a).reshape(len(a), -1).astype(np.int64)
        parts_b = b.view(kind_b).reshape(len(b), -1)[:, columns].astype(np.int64)
        return ((parts_a * parts_b).sum(axis=1) + c).astype(np.uint32)

    return run
