"""cvt: every conversion between integers, floating-point types and packed pairs, with one rounding.

The source register may be wider than the source type, so the source is truncated first. An 8-bit result is
extended to 16 bits."""

from fractions import Fraction

import numpy as np

from cukern.sim.numerics import floats
from cukern.sim.numerics.floats import BF16, F32, F64, FORMATS, Array, Format, Function
from cukern.sim.numerics.integers import UNSIGNED, dtype_of, unsigned

_INTEGRAL: dict[str, Function] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
MODIFIERS = frozenset({"rn", "rz", "rm", "rp", "rna", "ftz", "sat", "relu", "satfinite", *_INTEGRAL})


def convert(target: str, source: str, modifiers: frozenset[str]) -> Function:
    """The function of cvt.<modifiers>.<target>.<source>. Raises KeyError for an unsupported type or
    modifier."""
    if target.endswith("x2"):
        one = _to_float(FORMATS[target[:-2]], FORMATS[source], modifiers)
        # the first operand goes to the upper half
        return lambda high, low: (one(high).astype(np.uint32) << 16) | one(low)
    if {"relu", "satfinite"} & modifiers and not (target in FORMATS and source in FORMATS):
        raise KeyError("relu")
    if target in FORMATS:
        if source in FORMATS:
            return _to_float(FORMATS[target], FORMATS[source], modifiers)
        return _int_to_float(FORMATS[target], source, modifiers)
    if source in FORMATS:
        return _float_to_int(target, FORMATS[source], modifiers)
    return _int_to_int(target, source, "sat" in modifiers)


def _mode(modifiers: frozenset[str]) -> str:
    return next((m for m in ("rn", "rz", "rm", "rp") if m in modifiers), "rn")


def _to_float(target: Format, source: Format, modifiers: frozenset[str]) -> Function:
    if "satfinite" in modifiers:
        if target in (F32, F64):
            raise KeyError("satfinite")
        function = _to_float(target, source, modifiers - {"satfinite"})
        return lambda x: floats.finite(target, function(x))
    if "rna" in modifiers:
        return _rna_tf32
    if target is BF16 and source is F32 and modifiers == {"rn"}:
        return lambda x: floats.canonical(BF16, floats.bf16_of_f32(x), F32.values(x))
    if target is F32 and source is BF16 and not modifiers:
        return lambda x: x.astype(np.uint32) << 16  # NaNs keep their bits
    integral = next((_INTEGRAL[m] for m in modifiers if m in _INTEGRAL), None)
    ftz = "ftz" in modifiers
    mode = _mode(modifiers)

    def run(x: Array) -> Array:
        x = unsigned(x).astype(source.bits)
        x = floats.flush(source, x) if ftz and source is F32 else x
        if source is target and source.native and not integral:
            values = source.values(x)
            bits = floats.canonical(target, x, values)
        else:
            values = source.values(x).astype(np.float64)
            bits = floats.round_to(target, integral(values) if integral else values, mode)
        if source is F64 and target is not F64:
            bits = np.where(values != values, _nan_of_f64(target, x), bits)
        bits = floats.flush(target, bits) if ftz and target is F32 else bits
        bits = floats.saturate(target, bits) if "sat" in modifiers else bits
        return floats.relu(target, bits) if "relu" in modifiers else bits

    return run


def _nan_of_f64(target: Format, x: Array) -> Array:
    """A float64 NaN in a narrower format: quiet, with the same sign and the top bits of the payload."""
    width = 8 * x.itemsize - 8 * target.bits(0).itemsize
    sign = (x >> width).astype(target.bits) & target.sign
    fraction = target.sign - target.bits(1) - target.exponent
    payload = (x >> (52 - int(fraction).bit_length())).astype(target.bits) & fraction
    return sign | target.exponent | (fraction + target.bits(1)) >> 1 | payload


def _rna_tf32(x: Array) -> Array:
    """To nearest, ties away from zero; a NaN is truncated."""
    values = F32.values(x)
    return np.where(values != values, x, x + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def _int_to_float(target: Format, source: str, modifiers: frozenset[str]) -> Function:
    mode = _mode(modifiers)
    kind = dtype_of(source)

    def run(x: Array) -> Array:
        integers = x.astype(kind)
        if target is F64:
            return _int_to_f64(integers, mode).view(np.uint64)
        bits = floats.round_to(target, _odd_float64(integers), mode)
        return floats.saturate(target, bits) if "sat" in modifiers else bits

    return run


def _odd_float64(x: Array) -> Array:
    """An integer as a float64 that rounds to any narrower format as the integer would: 53 bits, the last a
    sticky bit."""
    if x.itemsize < 8:
        return x.astype(np.float64)
    large = (x >> 53 != 0) & (x >> 53 != -1) if x.dtype == np.int64 else x >> 53 != 0
    low = x & 0xFFF
    return np.where(large, x - low + ((low != 0) << 11).astype(x.dtype), x).astype(np.float64)


def _int_to_f64(x: Array, mode: str) -> Array:
    nearest = x.astype(np.float64)
    if mode == "rn" or x.itemsize < 8:
        return nearest
    error = np.array(
        [(i > r) - (i < r) for i, r in zip(x.tolist(), map(Fraction, nearest.tolist()), strict=True)]
    )
    return floats.step64(nearest, error, mode)


def _float_to_int(target: str, source: Format, modifiers: frozenset[str]) -> Function:
    """Clamps to the target's range. NaN becomes 0, or only the top bit set if the source or the target has 64
    bits."""
    integral = next(_INTEGRAL[m] for m in ("rni", "rzi", "rmi", "rpi") if m in modifiers)
    width = int(target[1:])
    kind = dtype_of(target)
    least = int(np.iinfo(kind).min)
    most = int(np.iinfo(kind).max)
    of_nan = (
        np.uint64(1 << (width - 1) if source is F64 or width == 64 else 0).astype(UNSIGNED[width]).view(kind)
    )

    def run(x: Array) -> Array:
        x = floats.flush(source, x) if "ftz" in modifiers else x
        values = integral(source.values(x).astype(np.float64))
        inside = (values >= least) & (values < float(most + 1))
        result = np.where(inside, values, 0.0).astype(kind)
        result = np.where(
            inside, result, np.where(values < 0, kind(least), np.where(values > 0, kind(most), of_nan))
        )
        return _register(result)

    return run


def _int_to_int(target: str, source: str, saturate: bool) -> Function:
    kind = dtype_of(source)
    goal = dtype_of(target)
    least = max(np.iinfo(kind).min, np.iinfo(goal).min)
    most = min(np.iinfo(kind).max, np.iinfo(goal).max)

    def run(x: Array) -> Array:
        integers = x.astype(kind)
        return _register((np.clip(integers, least, most) if saturate else integers).astype(goal))

    return run


def _register(x: Array) -> Array:
    """Raw bits of a register; 8 bits are extended to 16."""
    if x.itemsize == 1:
        x = x.astype(np.int16 if x.dtype == np.int8 else np.uint16)
    return unsigned(x)
