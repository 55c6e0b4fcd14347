"""Floating-point arithmetic with a GPU's results: one rounding, in the given mode; a NaN result is the
canonical NaN.

Registers hold raw bits; a `Format` converts them to numpy values and back. Values of at most 32 bits and
their products are exact in float64. A sum may need more than the 53 bits of float64: `sum_to_odd` returns a
float64 that rounds to any narrower format as the exact sum would. For float64, fma uses error-free sums and
products, and the directed roundings use exact fractions.

Sources: Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding
to odd" (2008); Figueroa, "When is double rounding innocuous?" (1995); NVIDIA's PTX ISA; where the ISA leaves
the result open, measurements on an H200. The canonical NaN is 0x7fffffff in float32, 0x7fffe000 in tf32,
0x7fff in 16 bits, and 0x7ff8000000000000 in float64 (not specified by the ISA).
"""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np

from cukern.sim.numerics.integers import count_nonzero

Array = np.ndarray[Any, Any]
Function = Callable[..., Array]


class Format:
    """A floating-point type: masks of its bits, `values` (bits to numpy floats, exact) and `nearest` (float64
    to bits, ties to even).

    `native`: numpy has the type, and rounds sums, products, quotients and square roots correctly. `unused`:
    number of low bits that are 0.
    """

    def __init__(
        self, name: str, masks: tuple[int, ...], values: Function, nearest: Function, native: bool = True,
        unused: int = 0,
    ):  # fmt: skip
        self.name = name
        self.values = values
        self.nearest = nearest
        self.native = native
        self.unused = unused
        self.bits: type[Any] = {16: np.uint16, 32: np.uint32, 64: np.uint64}[masks[0].bit_length()]
        self.sign, self.exponent, self.nan, self.one = map(self.bits, masks)


def to_odd32(x: Array) -> Array:
    """float64 to the bits of a float32, rounded to odd: an inexact result is the neighbour whose last bit is
    1."""
    bits = x.astype(np.float32).view(np.uint32)
    return _toward_zero(F32, bits, x) | (bits.view(np.float32) != x)


def bf16_of_f32(bits: Array) -> Array:
    """The bits of a float32 to those of the nearest bfloat16, ties to even. Wrong for NaN: the caller handles
    it."""
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _tf32_of_f64(x: Array) -> Array:
    bits = to_odd32(x)
    return (bits + np.uint32(0xFFF) + ((bits >> 13) & 1)) & np.uint32(0xFFFFE000)


def _of_numpy(name: str, dtype: Any, masks: tuple[int, int, int, int]) -> Format:
    bits = np.dtype(f"u{np.dtype(dtype).itemsize}")
    return Format(name, masks, lambda x: x.view(dtype), lambda x: x.astype(dtype, copy=False).view(bits))


F16 = _of_numpy("f16", np.float16, (0x8000, 0x7C00, 0x7FFF, 0x3C00))
F32 = _of_numpy("f32", np.float32, (1 << 31, 0xFF << 23, 0x7FFFFFFF, 127 << 23))
F64 = _of_numpy("f64", np.float64, (1 << 63, 0x7FF << 52, 0x7FF8 << 48, 1023 << 52))
BF16 = Format(
    "bf16",
    (0x8000, 0x7F80, 0x7FFF, 0x3F80),
    lambda bits: (bits.astype(np.uint32) << 16).view(np.float32),
    lambda x: bf16_of_f32(to_odd32(x)),
    native=False,
)
TF32 = Format(
    "tf32", (1 << 31, 0xFF << 23, 0x7FFFE000, 127 << 23), F32.values, _tf32_of_f64, native=False, unused=13
)
FORMATS = {f.name: f for f in (F16, BF16, F32, TF32, F64)}


# ---- one rounding


def round_to(fmt: Format, x: Array, mode: str = "rn") -> Array:
    """float64 to a narrower format, rounded to nearest (rn), toward zero (rz), down (rm) or up (rp)."""
    bits = fmt.nearest(x)
    if mode != "rn":
        down = _toward_zero(fmt, bits, x)
        outward = (x < 0) if mode == "rm" else (x > 0)
        if mode != "rz" and count_nonzero(outward):
            away = _steps(fmt, (np.abs(fmt.values(bits)) < np.abs(x)) & outward)
            down = np.where(outward, bits + away, down)
        bits = down
    return canonical(fmt, bits, x)


def _toward_zero(fmt: Format, bits: Array, x: Array) -> Array:
    return bits - _steps(fmt, np.abs(fmt.values(bits)) > np.abs(x))


def _steps(fmt: Format, flags: Array) -> Array:
    """Where the flag is set, the difference in bits to the neighbour away from zero; else 0."""
    return flags.astype(fmt.bits) << fmt.unused


def canonical(fmt: Format, bits: Array, values: Array) -> Array:
    """`bits`, with the canonical NaN where `values` is NaN."""
    nan = values != values
    return np.where(nan, fmt.nan, bits) if count_nonzero(nan) else bits


def flush(fmt: Format, bits: Array) -> Array:
    """.ftz: a subnormal becomes a zero of the same sign."""
    exponents = bits & fmt.exponent
    return bits if count_nonzero(exponents) == exponents.size else np.where(exponents, bits, bits & fmt.sign)


def saturate(fmt: Format, bits: Array) -> Array:
    """.sat: clamp to [0, 1]; NaN becomes +0."""
    x = fmt.values(bits)
    bits = np.where(x > 0, bits, fmt.bits(0))
    above = x > 1
    return np.where(above, fmt.one, bits) if count_nonzero(above) else bits


def finite(fmt: Format, bits: Array) -> Array:
    """.satfinite: an infinity becomes the largest finite value."""
    return np.where(bits & ~fmt.sign == fmt.exponent, bits - fmt.bits(1 << fmt.unused), bits)


def relu(fmt: Format, bits: Array) -> Array:
    """.relu: negative values become +0; NaN stays NaN."""
    return np.where((bits & fmt.sign != 0) & (fmt.values(bits) <= 0), fmt.bits(0), bits)


def sum_to_odd(a: Array, b: Array, mode: str = "rn") -> Array:
    """a + b in float64, rounded to odd: an inexact result is the neighbour whose last bit is 1.

    Rounding it again to at most 51 bits, in any mode, gives what rounding the exact sum would. `mode` only
    affects the sign of x - x."""
    total, error = _two_sum(a, b)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    wrong = (error < 0) | (error > 0)
    odd = (bits + step * (wrong & (bits & 1 == 0))).view(np.float64)
    return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, odd) if mode == "rm" else odd


# ---- arithmetic


@functools.cache
def arithmetic(
    kind: str, fmt: Format, mode: str = "rn", ftz: bool = False, sat: bool = False, relu_: bool = False
) -> Function:
    """The function of raw bits for `kind`: add, sub, mul, fma, div, rcp or sqrt."""
    exact = functools.partial(_in_float64, fmt, kind, mode)
    if kind == "fma" and (fmt, mode) in ((F32, "rn"), (F32, "rm"), (F64, "rn")):
        core = _fma64 if fmt is F64 else functools.partial(_fma32, fma32 if mode == "rn" else fma32_down)
    elif kind != "fma" and mode == "rn" and fmt.native:
        core = functools.partial(native, fmt, _UFUNCS[kind])
    else:
        core = (
            functools.partial(_directed64, kind, mode)
            if fmt is F64
            else lambda *args: round_to(fmt, exact(*args), mode)
        )
    if ftz:
        core = functools.partial(_flushed, fmt, core, exact, mode)
    for wanted, finish in ((sat, saturate), (relu_, relu)):
        if wanted:
            core = functools.partial(_finished, fmt, core, finish)
    return core


def _flushed(fmt: Format, core: Function, exact: Function, mode: str, *args: Array) -> Array:
    """Flush operands and result. A result is also flushed if it would be subnormal when rounded with an
    unlimited exponent range."""
    least = fmt.sign - fmt.exponent
    args = tuple(flush(fmt, x) for x in args)
    bits = flush(fmt, core(*args))
    if count_nonzero(bits & ~fmt.sign == least):
        twice = round_to(fmt, 2 * exact(*args), mode)
        bits = np.where(twice & ~fmt.sign < 2 * least, bits & fmt.sign, bits)
    return bits


def _finished(fmt: Format, core: Function, finish: Function, *args: Array) -> Array:
    return finish(fmt, core(*args))


_UFUNCS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rcp": np.reciprocal,
}
_UFUNCS["sqrt"] = np.sqrt


def native(fmt: Format, ufunc: Function, *args: Array) -> Array:
    """A numpy function of raw bits. Its results are rounded as numpy does, and a NaN is canonical."""
    result = ufunc(*map(fmt.values, args))
    return canonical(fmt, result.view(fmt.bits), result)


def _in_float64(fmt: Format, kind: str, mode: str, *args: Array) -> Array:
    """A float64 that rounds to `fmt` as the exact result would. For quotients and square roots, the float64
    result does: double rounding is innocuous, because float64 has more than twice the digits (Figueroa)."""
    a, *rest = (fmt.values(x).astype(np.float64) for x in args)
    if kind in ("add", "sub"):
        return sum_to_odd(a, rest[0] if kind == "add" else -rest[0], mode)
    return sum_to_odd(a * rest[0], rest[1], mode) if kind == "fma" else _UFUNCS[kind](a, *rest)


def _fma32(function: Function, a: Array, b: Array, c: Array) -> Array:
    return function(
        np.multiply(a.view(np.float32), b.view(np.float32), dtype=np.float64), c.view(np.float32)
    ).view(np.uint32)


def _fma64(a: Array, b: Array, c: Array) -> Array:
    a, b, c = (x.view(np.float64) for x in (a, b, c))
    product = a * b
    error = _product_error(a, b, product)
    # a*b + c = product + error + c. The small parts are rounded to odd, so the last sum rounds as the exact
    # one would.
    high, low = _two_sum(c, error)
    high, low2 = _two_sum(product, high)
    result = high + sum_to_odd(low, low2)
    size = np.abs(product)
    usual = (
        (size > 2.0**-900)
        & (size < 2.0**1000)
        & (np.abs(a) < 2.0**990)
        & (np.abs(b) < 2.0**990)
        & (np.abs(c) < 2.0**1000)
    )
    if count_nonzero(usual) < usual.size:
        result = np.where(usual, result, product + c)  # correct where a or b is 0, infinite or NaN
        rare = np.flatnonzero(~usual & np.isfinite(a) & np.isfinite(b) & (a != 0) & (b != 0))
        operands = [np.broadcast_to(x, usual.shape) for x in (a, b, c)] if len(rare) else []
        for i in rare:
            result[i] = _fma_of_fractions(*(float(x[i]) for x in operands))
    return canonical(F64, result.view(np.uint64), result)


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """a + b, and its rounding error."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _product_error(a: Array, b: Array, product: Array) -> Array:
    """a * b - product, exactly: a and b are split into halves of 26 bits (Veltkamp)."""
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(x: Array) -> tuple[Array, Array]:
    scaled = 134217729.0 * x  # 2^27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def _fma_of_fractions(a: float, b: float, c: float) -> float:
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        size = float(abs(exact))
    except OverflowError:
        size = math.inf
    return size if exact > 0 else -size


# ---- float32 arithmetic on values. A NaN in a result may have any bits. The product of an fma is a float64
# array.

_ZERO = np.array(0, np.uint64)
_LOW28 = np.array(0x0FFFFFFF, np.uint64)
_EXPONENT32 = np.array(F32.exponent)
_NAN32 = np.array(F32.nan).view(np.float32)
_DOWNWARD = np.array(-np.inf, np.float32)
_ZERO32 = np.array(0, np.float32)


def exact32(x: Array) -> Array:
    """x with the canonical NaN."""
    nan = x != x
    return np.where(nan, _NAN32, x) if count_nonzero(nan) else x


def _inexact(a: Array, b: Array, total: Array) -> Array:
    """True where the total is not exactly a + b, or no number."""
    return (total - a != b) | (total - b != a)


def fma32(product: Array, c: Array) -> Array:
    """Rounding the float64 sum again is correct, unless that sum is inexact and a tie between two float32. A
    NaN is canonical."""
    total = product + c
    result = total.astype(np.float32)
    low = total.view(np.uint64) & _LOW28  # 0 in ties, in infinities and in NaNs
    tie = (low == _ZERO) & (result != total) if count_nonzero(low) < low.size else low
    if tie is not low and count_nonzero(tie) and count_nonzero(tie & _inexact(product, c, total)):
        return round_to(F32, sum_to_odd(product, c.astype(np.float64))).view(np.float32)
    return result


def fma32_down(product: Array, c: Array) -> Array:
    """fma.rm. Where the float64 sum is exact, it is rounded from there. The sign of a zero sum depends on the
    mode."""
    total = product + c
    if count_nonzero(total) < total.size or count_nonzero(_inexact(product, c, total)):
        return round_to(F32, sum_to_odd(product, c.astype(np.float64), "rm"), "rm").view(np.float32)
    result = total.astype(np.float32)
    above = result.astype(np.float64) > total
    if count_nonzero(result > _ZERO32) == result.size:
        return (result.view(np.uint32) - above).view(np.float32)
    return np.where(above, np.nextafter(result, _DOWNWARD), result)


def largest32(x: Array, y: Array) -> Array:
    """max: of a number and NaN the number; +0 is larger than -0."""
    result = np.fmax(x, y)
    nan = result != result  # of two NaNs; or of a signaling NaN and a number
    result = np.where(nan, np.where(y != y, x, y), result) if count_nonzero(nan) else result
    both = (
        (x.view(np.uint32) & y.view(np.uint32)).view(np.float32)
        if count_nonzero(result) < result.size
        else None
    )
    return result if both is None else np.where(x == y, both, result)


def least32(x: Array, y: Array) -> Array:
    return -largest32(-x, -y)


def ex2_ftz(x: Array) -> Array:
    """ex2.approx.ftz: subnormal operands and results are flushed."""
    return _flush32(np.exp2(_flush32(x).astype(np.float64)).astype(np.float32))


def _flush32(x: Array) -> Array:
    exponents = x.view(np.uint32) & _EXPONENT32
    return x if count_nonzero(exponents) == exponents.size else flush(F32, x.view(np.uint32)).view(np.float32)


# ---- float64 in the modes other than rn: element by element, because it is rare


def step64(nearest: Array, error: Array, mode: str) -> Array:
    """From the nearest float64 and the sign of (exact - nearest) to the result in another mode."""
    up = (error > 0) & ((nearest < 0) if mode == "rz" else mode == "rp")
    down = (error < 0) & ((nearest > 0) if mode == "rz" else mode == "rm")
    return np.where(
        up, np.nextafter(nearest, np.inf), np.where(down, np.nextafter(nearest, -np.inf), nearest)
    )


def _directed64(kind: str, mode: str, *args: Array) -> Array:
    nearest = arithmetic(kind, F64)
    near = nearest(*args).view(np.float64)
    values = [np.broadcast_to(x, near.shape).view(np.float64).tolist() for x in args]
    error = np.array([_error_sign(kind, *each) for each in zip(near.tolist(), *values, strict=True)])
    result = step64(near, error, mode)
    if mode == "rm" and kind in ("add", "sub", "fma"):
        # The sum of the negated terms, negated: an exact zero is +0 only if both terms are +0.
        negated = nearest(args[0] ^ F64.sign, *args[1:-1], args[-1] ^ F64.sign) ^ F64.sign
        result = np.where((result == 0) & (error == 0), negated.view(np.float64), result)
    return canonical(F64, result.view(np.uint64), result)


def _error_sign(kind: str, near: float, a: float, b: float = 1.0, c: float = 0.0) -> int:
    if not all(map(math.isfinite, (a, b, c))) or math.isnan(near):
        return 0
    if math.isinf(near):
        by_zero = (kind == "rcp" and a == 0) or (kind == "div" and b == 0)
        return 0 if by_zero else -int(math.copysign(1, near))
    r, x, y, z = map(Fraction, (near, a, b, c))
    exact_less_near = {
        "add": lambda: x + y - r,
        "sub": lambda: x - y - r,
        "mul": lambda: x * y - r,
        "fma": lambda: x * y + z - r,
        "div": lambda: x / y - r,
        "rcp": lambda: 1 / x - r,
        "sqrt": lambda: x - r * r,
    }[kind]()
    return (exact_less_near > 0) - (exact_less_near < 0)
