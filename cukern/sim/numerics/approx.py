"""The approximate functions: computed in float64 and rounded once, so they are at least as accurate as a
GPU's.

A GPU's result may differ in its last bits. The PTX ISA allows these errors in float32: 1 ulp in rcp, 2 ulp in
div and ex2, 2^-22.9 relative in rsqrt, 2^-23 in sqrt, 2^-22 in lg2 (absolute between 0.5 and 2, else
relative), 2^-11 relative in tanh, and 2^-20.5 absolute in sin and cos between -pi and pi, more for larger
arguments."""

import functools

import numpy as np

from cukern.sim.numerics import floats
from cukern.sim.numerics.floats import F64, Array, Format, Function

_FUNCTIONS: dict[str, Function] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "div.full": np.divide,
    "div": lambda a, b: np.where((np.abs(b) > 2.0**126) & np.isfinite(b), a * np.copysign(0.0, b), a / b),
}
_TYPES = {
    "ex2": ("f16", "bf16", "f32"),
    "tanh": ("f16", "bf16", "f32"),
    "rcp": ("f32", "f64"),
    "rsqrt": ("f32", "f64"),
}


def approximate(kind: str, fmt: Format, ftz: bool) -> Function:
    """`kind` is a base or "div.full". Only "div" returns 0 for a divisor above 2^126. Raises KeyError for
    unsupported types."""
    if fmt.name not in _TYPES.get(kind, ("f32",)):
        raise KeyError(kind)
    function = _FUNCTIONS[kind]
    if fmt is F64:
        return (
            functools.partial(_coarse64, function) if ftz else functools.partial(floats.native, F64, function)
        )

    def run(*args: Array) -> Array:
        args = tuple(floats.flush(fmt, x) for x in args) if ftz else args
        bits = floats.round_to(fmt, function(*(fmt.values(x).astype(np.float64) for x in args)))
        return floats.flush(fmt, bits) if ftz else bits

    return run


def _coarse64(function: Function, x: Array) -> Array:
    """rcp and rsqrt .approx.ftz.f64, the start of a Newton iteration: they read and return only the upper 32
    bits."""
    upper = np.uint64(0xFFFFFFFF00000000)
    return floats.flush(F64, floats.native(F64, function, floats.flush(F64, x) & upper) & upper)
