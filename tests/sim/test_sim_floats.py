"""Float arithmetic of the simulator, and its approximate functions, against fractions, libm and the tables of
the PTX ISA."""

import ctypes
import ctypes.util
import math
from fractions import Fraction

import numpy as np
import pytest
from sim_oracle import KINDS, NAN, SHAPES, check, decode, encode, exact, flushed, operands, run, width

ARITHMETIC = [
    *(
        f"{op}{mode}.{t}"
        for op in ("add", "sub", "mul")
        for mode in ("", ".rn", ".rz", ".rm", ".rp")
        for t in ("f32", "f64")
    ),
    *(
        f"{op}.{mode}.{t}"
        for op in ("fma", "div", "rcp")
        for mode in ("rn", "rz", "rm", "rp")
        for t in ("f32", "f64")
    ),
    *(f"{op}{mode}.{t}" for op in ("add", "sub", "mul") for mode in ("", ".rn") for t in ("f16", "bf16")),
    *(f"fma.rn.{t}" for t in ("f16", "bf16")),
]
COUNT = {"rcp": 1, "fma": 3}


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_one_rounding(opcode):
    kind, *_, type_ = opcode.split(".")
    mode = opcode.split(".")[1] if opcode.count(".") == 2 else "rn"
    args = operands(type_, COUNT.get(kind, 2), 300)
    expected = [
        encode(type_, exact(kind, *(decode(type_, int(x)) for x in each), mode=mode), mode)
        for each in zip(*args, strict=True)
    ]
    check(opcode, run(opcode, *args), expected, *args)


def near_ties(type_: str, n: int) -> list[np.ndarray]:
    """a, b, c for which a*b + c lies at, or just beside, the middle between two numbers, or nearly
    cancels."""
    rng, (digits, most, size) = np.random.default_rng(1), SHAPES[type_]
    triples = []
    for _ in range(n):
        low, high = int(rng.integers(1, 2 ** (digits // 2))), int(rng.integers(1, 2 ** (digits // 2)))
        a, b = Fraction(low), Fraction(high)
        shift = int(rng.integers(-2 * digits - 4, 2 * digits + 4))
        c = Fraction(int(rng.integers(1, 2**digits))) * Fraction(2) ** shift
        scale = Fraction(2) ** int(rng.integers(-most // 2, most // 4))
        sign = -1 if rng.integers(2) else 1
        triples.append(
            [encode(type_, x) for x in (a * scale, sign * b, -c * scale if shift % 3 else -a * b * scale)]
        )
        tiny = Fraction(int(rng.integers(0, 5)), 2 ** (digits - 1))  # (1 + tiny) * (1 - tiny) is just below 1
        whole = 2 * int(rng.integers(2 ** (digits - 2), 2 ** (digits - 1))) + int(rng.integers(2))
        step = min(0, most - 2 * digits)
        triples.append(
            [
                encode(type_, x * Fraction(2) ** step)
                for x in ((1 + tiny) / 2, sign * (1 - tiny) / Fraction(2) ** step, Fraction(whole))
            ]
        )
    return [np.array(x, KINDS[size]) for x in zip(*triples, strict=True)]


FMA = [
    ("f16", "rn"),
    ("bf16", "rn"),
    *((t, mode) for t in ("f32", "f64") for mode in ("rn", "rz", "rm", "rp")),
]


@pytest.mark.parametrize(("type_", "mode"), FMA)
def test_fma_at_ties_and_cancellations(type_, mode):
    a, b, c = near_ties(type_, 400)
    expected = [
        encode(type_, exact("fma", *(decode(type_, int(x)) for x in each), mode=mode), mode)
        for each in zip(a, b, c, strict=True)
    ]
    check(f"fma.{mode}.{type_}", run(f"fma.{mode}.{type_}", a, b, c), expected, a, b, c)


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_fma_against_libm(type_):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    function, kind = (libm.fmaf, ctypes.c_float) if type_ == "f32" else (libm.fma, ctypes.c_double)
    function.restype, function.argtypes = kind, [kind] * 3
    values = np.float32 if type_ == "f32" else np.float64
    args = operands(type_, 3, 10000, seed=3)
    got = run(f"fma.rn.{type_}", *args).view(values)
    expected = np.array(
        [function(*each) for each in zip(*(x.view(values).tolist() for x in args), strict=True)], values
    )
    assert np.array_equal(got, expected, equal_nan=True)
    assert np.array_equal(np.signbit(got)[got == 0], np.signbit(expected)[got == 0])


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_sqrt(type_, mode):
    (x,) = operands(type_, 1, 800)
    result = run(f"sqrt.{mode}.{type_}", x)
    for bits, got in zip(x.tolist(), result.tolist(), strict=True):
        value = decode(type_, bits)
        if isinstance(value, float) or value < 0:
            wanted = bits if value == 0 or value == math.inf else NAN[type_]
        else:
            # far more digits than any tie needs, cut
            root = Fraction(math.isqrt(int(value * Fraction(4) ** 1200)), 2**1200)
            inexact = root * root != value
            wanted = encode(type_, root + Fraction(inexact, 2**1201), mode)
        assert got == wanted, f"sqrt.{mode}.{type_}({bits:#x}) is {got:#x}, not {wanted:#x}"


FTZ = "add.ftz.f32 sub.rn.ftz.f32 mul.ftz.f32 fma.rn.ftz.f32 div.rn.ftz.f32 fma.rz.ftz.f32 add.ftz.f16"


@pytest.mark.parametrize("opcode", FTZ.split())
def test_ftz_flushes_operands_and_results(opcode):
    kind, type_ = opcode.split(".")[0], opcode.split(".")[-1]
    mode = "rz" if ".rz." in opcode else "rn"
    args = operands(type_, COUNT.get(kind, 2), 500)
    flush = [[decode(type_, flushed(type_, int(x))) for x in each] for each in zip(*args, strict=True)]
    expected = []
    for each in flush:
        value = exact(kind, *each, mode=mode)
        result = flushed(type_, encode(type_, value, mode))
        sign = 1 << width(type_) - 1
        least = 0x400 if type_ == "f16" else 0x800000
        # The least normal number may owe that to the few digits of subnormal ones. An H200 flushes it then.
        if result & ~sign == least and encode(type_, 2 * value, mode) & ~sign < 2 * least:
            result &= sign
        expected.append(result)
    check(opcode, run(opcode, *args), expected, *args)


@pytest.mark.parametrize(
    "opcode",
    ["add.sat.f32", "fma.rn.sat.f32", "mul.sat.f16", "fma.rn.relu.f16", "fma.rn.relu.bf16", "add.sat.f16"],
)
def test_sat_and_relu(opcode):
    kind, type_ = opcode.split(".")[0], opcode.split(".")[-1]
    args = operands(type_, COUNT.get(kind, 2), 500)
    expected = []
    for each in zip(*args, strict=True):
        bits = encode(type_, exact(kind, *(decode(type_, int(x)) for x in each)))
        value = decode(type_, bits)
        clamped = encode(type_, Fraction(1)) if value > 1 else bits if value > 0 else 0
        expected.append(clamped if "sat" in opcode else 0 if value <= 0 else bits)
    check(opcode, run(opcode, *args), expected, *args)


def test_signs():
    for type_ in ("f16", "bf16", "f32", "f64"):
        a, b = operands(type_, 2, 100)
        top = 1 << (width(type_) - 1)
        check("neg", run(f"neg.{type_}", a), [x ^ top for x in a.tolist()], a)
        check("abs", run(f"abs.{type_}", a), [x & ~top for x in a.tolist()], a)
        if type_ in ("f32", "f64"):
            expected = [y & ~top | x & top for x, y in zip(a.tolist(), b.tolist(), strict=True)]
            check("copysign", run(f"copysign.{type_}", a, b), expected, a, b)
    check("neg.ftz.f32", run("neg.ftz.f32", np.array([1, 0x80000001], np.uint32)), [1 << 31, 0])


APPROXIMATE = {
    "ex2": lambda x: 2.0**x, "lg2": math.log2, "sin": math.sin, "cos": math.cos, "tanh": math.tanh,
    "rcp": lambda x: 1 / x, "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x),
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_are_within_one_ulp(name):
    x = np.random.default_rng(0).uniform(0.01, 30, 500).astype(np.float32)
    got = run(f"{name}.approx.f32", x.view(np.uint32)).view(np.float32)
    expected = np.array([APPROXIMATE[name](v) for v in x.tolist()])
    assert np.all(np.abs(got - expected) <= np.spacing(np.abs(expected).astype(np.float32)))
    if name in ("ex2", "tanh"):
        for type_ in ("f16", "bf16"):
            half = run(f"cvt.rn.{type_}.f32", x.view(np.uint32))
            near = run(f"{name}.approx.{type_}", half)
            wide = np.array([APPROXIMATE[name](float(decode(type_, v))) for v in half.tolist()])
            check(name, near, run(f"cvt.rn.{type_}.f64", wide.view(np.uint64)).tolist(), half)


SPECIAL = {  # the tables of the PTX ISA: operand, result
    "ex2.approx.f32": [(-math.inf, 0.0), (-0.0, 1.0), (math.inf, math.inf), (math.nan, math.nan),
                       (1e-40, 1.0), (-140.0, 2.0**-140)],
    "ex2.approx.ftz.f32": [(-140.0, 0.0), (-126.0, 2.0**-126), (1e-40, 1.0)],
    "lg2.approx.f32": [(-1.0, math.nan), (-math.inf, math.nan), (-0.0, -math.inf), (0.0, -math.inf),
                       (math.inf, math.inf)],
    "lg2.approx.ftz.f32": [(2.0**-140, -math.inf), (-(2.0**-140), -math.inf)],
    "sin.approx.f32": [(-0.0, -0.0), (0.0, 0.0), (math.inf, math.nan), (-math.inf, math.nan)],
    "cos.approx.f32": [(-0.0, 1.0), (math.inf, math.nan)],
    "tanh.approx.f32": [(-math.inf, -1.0), (math.inf, 1.0), (-0.0, -0.0), (2.0**-140, 2.0**-140),
                        (math.nan, math.nan)],
    "rcp.approx.f32": [(-math.inf, -0.0), (0.0, math.inf), (-0.0, -math.inf), (math.inf, 0.0),
                       (2.0**127, 2.0**-127)],
    "rcp.approx.ftz.f32": [(2.0**127, 0.0), (2.0**-140, math.inf), (-(2.0**-140), -math.inf)],
    "sqrt.approx.f32": [(-math.inf, math.nan), (-1.0, math.nan), (-0.0, -0.0), (math.inf, math.inf),
                        (2.0**-140, 2.0**-70)],
    "sqrt.approx.ftz.f32": [(-(2.0**-140), -0.0), (2.0**-140, 0.0)],
    "rsqrt.approx.f32": [(-math.inf, math.nan), (-1.0, math.nan), (-0.0, -math.inf), (0.0, math.inf),
                         (2.0**-140, 2.0**70)],
    "rsqrt.approx.ftz.f32": [(2.0**-140, math.inf)],
}  # fmt: skip


@pytest.mark.parametrize("opcode", SPECIAL)
def test_special_values(opcode):
    x, expected = (
        np.array(column, np.float32).view(np.uint32) for column in zip(*SPECIAL[opcode], strict=True)
    )
    expected = np.where(np.isnan(expected.view(np.float32)), NAN["f32"], expected)
    check(opcode, run(opcode, x), expected.tolist(), x)


def test_approximate_division():
    a = np.array([1, math.inf, 0, -1, 1, 6], np.float32).view(np.uint32)
    b = np.array([2.0**127, 2.0**127, 2.0**127, 2.0**127, math.inf, 3], np.float32).view(np.uint32)
    bits = lambda values: np.array(values, np.float32).view(np.uint32).tolist()  # noqa: E731
    check("div.approx", run("div.approx.f32", a, b), [0, NAN["f32"], 0, 1 << 31, 0, *bits([2])], a, b)
    check("div.full", run("div.full.f32", a, b), bits([2.0**-127, math.inf, 0, -(2.0**-127), 0, 2]), a, b)
    check("div.full", run("div.full.ftz.f32", a, b), bits([0, math.inf, 0, -0.0, 0, 2]), a, b)


def test_seeds_of_newtons_iterations():
    x = np.random.default_rng(0).uniform(0.001, 1000, 500)
    for name in ("rcp", "rsqrt"):
        seed = run(f"{name}.approx.ftz.f64", x.view(np.uint64))
        assert not np.any(seed & 0xFFFFFFFF)
        expected = 1 / x if name == "rcp" else 1 / np.sqrt(x)
        assert np.all(np.abs(seed.view(np.float64) / expected - 1) < 2.0**-19)
    assert np.allclose(
        run("rsqrt.approx.f64", x.view(np.uint64)).view(np.float64), 1 / np.sqrt(x), rtol=2.0**-50
    )
