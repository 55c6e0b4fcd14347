"""A second opinion on the simulator's arithmetic: floating point in Python's integers and fractions, operands
worth trying, and a judge."""

import math
from fractions import Fraction

import numpy as np

from cukern.sim.numerics import alu

# digits, largest exponent, bits of the type
SHAPES = {
    "f16": (11, 15, 16),
    "bf16": (8, 127, 16),
    "tf32": (11, 127, 32),
    "f32": (24, 127, 32),
    "f64": (53, 1023, 64),
}
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "tf32": 0x7FFFE000, "f32": 0x7FFFFFFF, "f64": 0x7FF8 << 48}
KINDS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
Number = Fraction | float  # a float only for infinities, NaN and zeros with their signs


def width(type_: str) -> int:
    return SHAPES[type_][2] if type_ in SHAPES else int(type_[1:])


def _stored(type_: str) -> int:
    """Bits of the stored fraction: a tf32 is kept as a float32."""
    return SHAPES["f32" if type_ == "tf32" else type_][0] - 1


def decode(type_: str, bits: int) -> Number:
    fraction_bits, most, size = _stored(type_), SHAPES[type_][1], width(type_)
    sign = -1 if bits >> (size - 1) else 1
    exponent, fraction = bits >> fraction_bits & (2 * most + 1), bits & ((1 << fraction_bits) - 1)
    if exponent == 2 * most + 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0 and fraction == 0:
        return sign * 0.0
    significand = fraction if exponent == 0 else fraction + (1 << fraction_bits)
    return sign * significand * Fraction(2) ** (max(exponent, 1) - most - fraction_bits)


def encode(type_: str, x: Number, mode: str = "rn") -> int:
    """The bits of x, rounded once: rn, rz, rm, rp, or rna (ties away from zero)."""
    digits, most, size = SHAPES[type_]
    if isinstance(x, float) and math.isnan(x):
        return NAN[type_]
    negative = math.copysign(1, x) < 0 if isinstance(x, float) else x < 0
    top = (1 << (size - 1)) if negative else 0
    infinity = (2 * most + 1) << _stored(type_)
    if isinstance(x, float):
        return top | (infinity if x else 0)
    size_of_x = abs(x)
    exponent = max(_log2(size_of_x), 1 - most)
    unit = Fraction(2) ** (exponent - digits + 1)
    whole, rest = divmod(size_of_x, unit)
    rest /= unit
    half = Fraction(1, 2)
    away = {
        "rn": rest > half or (rest == half and whole & 1 == 1),
        "rna": rest >= half,
        "rz": False,
        "rm": rest > 0 and negative,
        "rp": rest > 0 and not negative,
    }[mode]
    value = (whole + away) * unit
    if value >= Fraction(2) ** (most + 1):
        largest = infinity - (1 << (_stored(type_) - digits + 1))
        return top | (
            infinity
            if mode in ("rn", "rna") or (mode == "rm" and negative) or (mode == "rp" and not negative)
            else largest
        )
    if value == 0:
        return top
    exponent = max(_log2(value), 1 - most)
    significand = int(value / Fraction(2) ** (exponent - _stored(type_)))
    return top | (significand + ((exponent + most - 1) << _stored(type_)))


def _log2(x: Fraction) -> int:
    """The floor of log2."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def exact(kind: str, *args: Number, mode: str = "rn") -> Number:
    """add, sub, mul, div, rcp, fma with no rounding."""
    if kind == "sub":
        return exact("add", args[0], -args[1], mode=mode)
    if kind == "rcp":
        return exact("div", Fraction(1), args[0])
    if kind == "fma":
        return exact("add", exact("mul", *args[:2]), args[2], mode=mode)
    a, b = args
    if kind == "add":
        if all(isinstance(x, Fraction) for x in args):
            return a + b or (-0.0 if mode == "rm" else 0.0)
        if a == b == 0:
            same = math.copysign(1, a) == math.copysign(1, b)
            return a if same else (-0.0 if mode == "rm" else 0.0)
        return b if a == 0 else a if b == 0 else _special(a) + _special(b)
    if kind == "mul":
        both = all(isinstance(x, Fraction) for x in args)
        return a * b if both else _special(a) * _special(b)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a / b
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(math.inf, _special(a)) * math.copysign(1, b)
    return _special(a) / _special(b)


def _special(x: Number) -> float:
    """A float of the same sign and the same class: zero, finite, infinite, NaN."""
    return x if isinstance(x, float) else float(2 * (x > 0) - 1)


def edges(type_: str) -> np.ndarray:
    """Zeros, the smallest and largest subnormals and normals, neighbours of 1 and of 2, the largest,
    infinity, NaNs, of both signs."""
    stored, most, size = _stored(type_), SHAPES[type_][1], width(type_)
    infinity = (2 * most + 1) << stored
    one = most << stored
    positive = [
        0,
        1,
        2,
        3,
        (1 << stored) - 1,
        1 << stored,
        (1 << stored) + 1,
        one - 1,
        one,
        one + 1,
        one + (1 << stored),
        infinity - 1,
    ]
    positive += [
        infinity,
        infinity + 1,
        infinity | 1 << (stored - 1),
        one + (1 << (stored - 1)),
        7 << stored,
        one // 2,
        one + one // 2,
    ]
    kind = KINDS[size]
    both = np.array(positive, kind)
    return np.concatenate((both, both | kind(1 << (size - 1))))


def operands(type_: str, count: int, random: int, seed: int = 0) -> list[np.ndarray]:
    """`count` operands of a type: every pair of edges (triples are drawn), then `random` bits, half of them
    with exponents near 1."""
    rng, size = np.random.default_rng(seed), width(type_)
    kind = KINDS[size]
    if type_ in SHAPES:
        edge = edges(type_)
    else:
        edge = np.array(
            [0, 1, 2, 3, 7, (1 << size - 1) - 1, 1 << size - 1, (1 << size) - 1, (1 << size) - 2, 31, 32, 33],
            kind,
        )
    grid = np.stack(np.meshgrid(edge, edge, indexing="ij")).reshape(2, -1) if count > 1 else edge[None]
    third = [rng.choice(edge, grid.shape[1]) for _ in range(count - len(grid))]
    drawn = rng.integers(0, (1 << size) - 1, (count, random), dtype=kind, endpoint=True)
    if type_ in SHAPES:
        stored, most, _ = _stored(type_), *SHAPES[type_][1:]
        near = rng.integers(most - 3, most + 4, (count, random // 2), dtype=kind) << kind(stored)
        near |= drawn[:, : random // 2] & kind(1 << (size - 1) | (1 << stored) - 1)
        drawn[:, : random // 2] = near
    return [np.concatenate((a, b)) for a, b in zip([*grid, *third], drawn, strict=True)]


def number(type_: str, bits: int) -> int:
    """The bits as a Python integer of the type."""
    size = int(type_[1:])
    bits &= (1 << size) - 1
    return bits - (1 << size) if type_[0] == "s" and bits >> (size - 1) else bits


def flushed(type_: str, bits: int) -> int:
    value = decode(type_, bits)
    small = isinstance(value, Fraction) and abs(value) < Fraction(2) ** (1 - SHAPES[type_][1])
    return bits & 1 << (width(type_) - 1) if small else bits


def run(opcode: str, *args: np.ndarray, **options: bool) -> np.ndarray:
    """Carry out an instruction, and see that it leaves its operands alone and takes constants."""
    found, before = alu.find(opcode, **options), [a.copy() for a in args]

    def function(*args: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):  # as the machine does around a launch
            return found(*args)

    result = function(*args)
    assert all(np.array_equal(a, b) for a, b in zip(args, before, strict=True)), (
        f"{opcode} changed an operand"
    )
    assert not any(np.shares_memory(result, a) for a in args), f"{opcode} returned an operand's memory"
    for i, arg in enumerate(args):
        if opcode.startswith("lop3") and i == 3:
            continue
        constant = [arg[:1] if i == j else a for j, a in enumerate(args)]
        spread = [np.broadcast_to(arg[:1], arg.shape).copy() if i == j else a for j, a in enumerate(args)]
        if len(args) > 1:
            assert np.array_equal(np.broadcast_to(function(*constant), result.shape), function(*spread)), (
                f"{opcode}, operand {i} constant"
            )
    return result


def check(opcode: str, result: np.ndarray, expected: list, *args: np.ndarray) -> None:
    wanted = np.array(expected, result.dtype)
    wrong = np.flatnonzero(result != wanted)
    if len(wrong):
        shown = [
            f"({', '.join(hex(int(a[i % len(a)])) for a in args)}) -> {int(result[i]):#x}, not "
            f"{int(wanted[i]):#x}"
            for i in wrong[:5]
        ]
        raise AssertionError(f"{opcode}: {len(wrong)} of {len(wanted)} are wrong: {'; '.join(shown)}")
