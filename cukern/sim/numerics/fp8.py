"""Conversions between the 8-bit floats e4m3 and e5m2 and wider ones: PTX ISA, cvt with .e4m3x2 and
.e5m2x2."""

from collections.abc import Callable

import numpy as np

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import floats
from cukern.sim.numerics.floats import F16, F32, Array


def _values(exponent_bits: int, last: int) -> Array:
    """The values of the codes 0 up to `last`, the largest finite one."""
    bits = 7 - exponent_bits
    bias = (1 << exponent_bits - 1) - 1
    codes = np.arange(last + 1)
    exponents = codes >> bits
    fractions = codes & (1 << bits) - 1
    normal = (1 + fractions / (1 << bits)) * 2.0 ** (exponents - bias)
    return np.where(exponents == 0, fractions / (1 << bits) * 2.0 ** (1 - bias), normal)


FINITE = {"e4m3": _values(4, 0x7E), "e5m2": _values(5, 0x7B)}


def decode(name: str, codes: Array) -> Array:
    """The values of 8-bit codes as float64."""
    low = (codes & 0x7F).astype(np.int64)
    table = np.full(128, np.nan)
    table[: len(FINITE[name])] = FINITE[name]
    if name == "e5m2":
        table[0x7C] = np.inf
    return np.where(codes & 0x80, -table[low], table[low])


def encode(name: str, values: Array, relu: bool = False) -> Array:
    """float64 values to the nearest codes, ties to even, saturating at the largest finite value
    (.satfinite)."""
    finite = FINITE[name]
    middles = (finite[1:] + finite[:-1]) / 2
    size = np.abs(values)
    code = np.searchsorted(middles, size)  # of two equally near codes the lower
    tie = (code < len(middles)) & (middles[np.minimum(code, len(middles) - 1)] == size)
    code = np.where(tie & (code % 2 == 1), code + 1, code)
    negative = np.signbit(values)
    if relu:
        code = np.where(negative, 0, code)
        negative = np.zeros_like(negative)
    code = code | negative.astype(np.int64) << 7
    return np.where(values != values, 0x7F, code).astype(np.uint8)


def convert(opcode: str) -> Callable[..., Array]:
    """The function of a cvt to or from pairs of 8-bit floats. Raises NotSimulated."""
    parts = opcode.split(".")[1:]
    *modifiers, target, source = parts
    relu = "relu" in modifiers
    if (
        target in ("e4m3x2", "e5m2x2")
        and source in ("f32", "f16x2")
        and set(modifiers) - {"relu"} == {"rn", "satfinite"}
    ):
        name = target[:-2]

        def narrow(*args: Array) -> Array:
            high, low = (
                (F32.values(x) for x in args)
                if source == "f32"
                else (F16.values(x) for x in _halves(args[0])[::-1])
            )
            codes = [encode(name, x.astype(np.float64), relu).astype(np.uint16) for x in (high, low)]
            return codes[0] << np.uint16(8) | codes[1]

        return narrow
    if source in ("e4m3x2", "e5m2x2") and target == "f16x2" and set(modifiers) - {"relu"} == {"rn"}:
        name = source[:-2]

        def widen(x: Array) -> Array:
            halves = [
                floats.round_to(F16, decode(name, codes), "rn")
                for codes in (x & np.uint16(0xFF), x >> np.uint16(8))
            ]
            halves = [floats.relu(F16, h) if relu else h for h in halves]
            return halves[0].astype(np.uint32) | halves[1].astype(np.uint32) << np.uint32(16)

        return widen
    raise NotSimulated(opcode)


def _halves(x: Array) -> tuple[Array, Array]:
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)
