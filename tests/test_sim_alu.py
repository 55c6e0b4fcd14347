"""The simulator's ALU against Python's integers and fractions, libm and torch."""

import ctypes
import ctypes.util
import math
import operator
from fractions import Fraction

import numpy as np
import pytest
import torch
from sim_oracle import KINDS, NAN, SHAPES, decode, edges, encode, exact, operands, width

from cukern.sim import alu
from cukern.sim.faults import NotSimulated


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):  # as the machine does around a launch
        yield


def run(opcode: str, *args: np.ndarray, **options: bool) -> np.ndarray:
    """Carry out an instruction, and see that it leaves its operands alone and takes constants."""
    before = [a.copy() for a in args]
    function = alu.find(opcode, **options)
    result = function(*args)
    assert all(np.array_equal(a, b) for a, b in zip(args, before, strict=True)), f"{opcode} changed an operand"
    assert not any(np.shares_memory(result, a) for a in args), f"{opcode} returned an operand's memory"
    for i, arg in enumerate(args):
        if opcode.startswith("lop3") and i == 3:
            continue
        constant = [arg[:1] if i == j else a for j, a in enumerate(args)]
        spread = [np.broadcast_to(arg[:1], arg.shape).copy() if i == j else a for j, a in enumerate(args)]
        if len(args) > 1:
            assert np.array_equal(np.broadcast_to(function(*constant), result.shape), function(*spread)), f"{opcode}, operand {i} constant"
    return result


def check(opcode: str, result: np.ndarray, expected: list, *args: np.ndarray) -> None:
    wanted = np.array(expected, result.dtype)
    wrong = np.flatnonzero(result != wanted)
    if len(wrong):
        shown = [f"({', '.join(hex(int(a[i % len(a)])) for a in args)}) -> {int(result[i]):#x}, not {int(wanted[i]):#x}" for i in wrong[:5]]
        raise AssertionError(f"{opcode}: {len(wrong)} of {len(wanted)} are wrong: {'; '.join(shown)}")


# ---- floating point

ARITHMETIC = [
    *(f"{op}{mode}.{t}" for op in ("add", "sub", "mul") for mode in ("", ".rn", ".rz", ".rm", ".rp") for t in ("f32", "f64")),
    *(f"{op}.{mode}.{t}" for op in ("fma", "div", "rcp") for mode in ("rn", "rz", "rm", "rp") for t in ("f32", "f64")),
    *(f"{op}{mode}.{t}" for op in ("add", "sub", "mul") for mode in ("", ".rn") for t in ("f16", "bf16")),
    *(f"fma.rn.{t}" for t in ("f16", "bf16")),
]
COUNT = {"rcp": 1, "fma": 3}


@pytest.mark.parametrize("opcode", ARITHMETIC)
def test_one_rounding(opcode):
    kind, *_, type_ = opcode.split(".")
    mode = opcode.split(".")[1] if opcode.count(".") == 2 else "rn"
    args = operands(type_, COUNT.get(kind, 2), 300)
    expected = [encode(type_, exact(kind, *(decode(type_, int(x)) for x in each), mode=mode), mode) for each in zip(*args, strict=True)]
    check(opcode, run(opcode, *args), expected, *args)


def near_ties(type_: str, n: int) -> list[np.ndarray]:
    """a, b, c for which a*b + c lies at, or just beside, the middle between two numbers, or nearly cancels."""
    rng, (digits, most, size) = np.random.default_rng(1), SHAPES[type_]
    triples = []
    for _ in range(n):
        low, high = int(rng.integers(1, 2 ** (digits // 2))), int(rng.integers(1, 2 ** (digits // 2)))
        a, b = Fraction(low), Fraction(high)
        shift = int(rng.integers(-2 * digits - 4, 2 * digits + 4))
        c = Fraction(int(rng.integers(1, 2**digits))) * Fraction(2) ** shift
        scale = Fraction(2) ** int(rng.integers(-most // 2, most // 4))
        sign = -1 if rng.integers(2) else 1
        triples.append([encode(type_, x) for x in (a * scale, sign * b, -c * scale if shift % 3 else -a * b * scale)])
        tiny = Fraction(int(rng.integers(0, 5)), 2 ** (digits - 1))  # (1 + tiny) * (1 - tiny) is just below 1
        whole = 2 * int(rng.integers(2 ** (digits - 2), 2 ** (digits - 1))) + int(rng.integers(2))
        step = min(0, most - 2 * digits)
        triples.append(
            [encode(type_, x * Fraction(2) ** step) for x in ((1 + tiny) / 2, sign * (1 - tiny) / Fraction(2) ** step, Fraction(whole))]
        )
    return [np.array(x, KINDS[size]) for x in zip(*triples, strict=True)]


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
def test_fma_at_ties_and_cancellations(type_, mode):
    if type_ in ("f16", "bf16") and mode != "rn":
        pytest.skip("PTX has no such instruction")
    a, b, c = near_ties(type_, 400)
    expected = [encode(type_, exact("fma", *(decode(type_, int(x)) for x in each), mode=mode), mode) for each in zip(a, b, c, strict=True)]
    check(f"fma.{mode}.{type_}", run(f"fma.{mode}.{type_}", a, b, c), expected, a, b, c)


@pytest.mark.parametrize("type_", ["f32", "f64"])
def test_fma_against_libm(type_):
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    function, kind = (libm.fmaf, ctypes.c_float) if type_ == "f32" else (libm.fma, ctypes.c_double)
    function.restype, function.argtypes = kind, [kind] * 3
    values = np.float32 if type_ == "f32" else np.float64
    args = operands(type_, 3, 10000, seed=3)
    got = run(f"fma.rn.{type_}", *args).view(values)
    expected = np.array([function(*each) for each in zip(*(x.view(values).tolist() for x in args), strict=True)], values)
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
            root = Fraction(math.isqrt(int(value * Fraction(4) ** 1200)), 2**1200)  # far more digits than any tie needs, cut
            inexact = root * root != value
            wanted = encode(type_, root + Fraction(inexact, 2**1201), mode)
        assert got == wanted, f"sqrt.{mode}.{type_}({bits:#x}) is {got:#x}, not {wanted:#x}"


def flushed(type_: str, bits: int) -> int:
    value = decode(type_, bits)
    small = isinstance(value, Fraction) and abs(value) < Fraction(2) ** (1 - SHAPES[type_][1])
    return bits & 1 << (width(type_) - 1) if small else bits


FTZ = "add.ftz.f32 sub.rn.ftz.f32 mul.ftz.f32 fma.rn.ftz.f32 div.rn.ftz.f32 fma.rz.ftz.f32 add.ftz.f16"


@pytest.mark.parametrize("opcode", FTZ.split())
def test_ftz_flushes_operands_and_results(opcode):
    kind, type_ = opcode.split(".")[0], opcode.split(".")[-1]
    mode = "rz" if ".rz." in opcode else "rn"
    args = operands(type_, COUNT.get(kind, 2), 500)
    flush = [[decode(type_, flushed(type_, int(x))) for x in each] for each in zip(*args, strict=True)]
    expected = [flushed(type_, encode(type_, exact(kind, *each, mode=mode), mode)) for each in flush]
    check(opcode, run(opcode, *args), expected, *args)


@pytest.mark.parametrize("opcode", ["add.sat.f32", "fma.rn.sat.f32", "mul.sat.f16", "fma.rn.relu.f16", "fma.rn.relu.bf16", "add.sat.f16"])
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


PACKED = """add.f16x2 mul.bf16x2 fma.rn.f16x2 fma.rn.relu.bf16x2 sub.f16x2 max.NaN.f16x2 min.bf16x2 neg.f16x2 abs.bf16x2 max.s16x2 min.u16x2
            add.u16x2 ex2.approx.f16x2 tanh.approx.bf16x2 set.lt.f16x2.f16x2"""


@pytest.mark.parametrize("opcode", PACKED.split())
def test_packed_is_the_scalar_twice(opcode):
    scalar = opcode.replace("16x2", "16")
    count = 1 if opcode.startswith(("neg", "abs", "ex2", "tanh")) else 3 if opcode.startswith("fma") else 2
    args = [np.random.default_rng(count + i).integers(0, 2**32, 500, dtype=np.uint32) for i in range(count)]
    halves = [alu.find(scalar)(*((x >> shift).astype(np.uint16) for x in args)).astype(np.uint32) for shift in (0, 16)]
    check(opcode, run(opcode, *args), (halves[0] | halves[1] << 16).tolist(), *args)


MINMAX = [
    "min.f32",
    "max.f32",
    "min.NaN.f32",
    "max.NaN.f16",
    "max.f16",
    "min.bf16",
    "max.f64",
    "min.f64",
    "max.xorsign.abs.f32",
    "min.ftz.f32",
]


@pytest.mark.parametrize("opcode", MINMAX)
def test_min_and_max(opcode):
    type_ = opcode.split(".")[-1]
    a, b = operands(type_, 2, 300)
    expected = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        sign = (x ^ y) & 1 << (width(type_) - 1) if "xorsign" in opcode else 0
        if "ftz" in opcode:
            x, y = flushed(type_, x), flushed(type_, y)
        if "xorsign" in opcode:
            x, y = (v & ~(1 << (width(type_) - 1)) for v in (x, y))
        pair = [(v, bits) for bits in (x, y) if (v := decode(type_, bits)) == v]
        if not pair or (len(pair) < 2 and "NaN" in opcode):
            expected.append(NAN[type_])
        else:
            key = lambda p: (p[0], math.copysign(1, p[0]) if p[0] == 0 else 0)  # noqa: E731
            expected.append((min if opcode.startswith("min") else max)(pair, key=key)[1] | sign)
    check(opcode, run(opcode, a, b), expected, a, b)


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


# ---- comparisons

ORDERED = {"eq": operator.eq, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def float_compare(name: str, x, y) -> bool:
    unordered = x != x or y != y
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u") and name not in ("equ", "neu"):
        return unordered or ORDERED[name[:-1]](x, y)
    if name in ("equ", "neu"):
        return unordered or (x == y) == (name == "equ")
    if name == "ne":
        return not unordered and x != y
    return not unordered and ORDERED[name](x, y)


@pytest.mark.parametrize("type_", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"])
def test_float_comparisons(name, type_):
    a, b = operands(type_, 2, 100)
    values = [(decode(type_, x), decode(type_, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    expected = [float_compare(name, x, y) for x, y in values]
    check(name, run(f"setp.{name}.{type_}", a, b), expected, a, b)
    check(name, run(f"setp.{name}.{type_}", a, b, second=True), [not e for e in expected], a, b)
    if type_ != "f64":
        one = encode(type_, Fraction(1))
        check(name, run(f"set.{name}.{type_}.{type_}", a, b), [one if e else 0 for e in expected], a, b)
    check(name, run(f"set.{name}.u32.{type_}", a, b), [0xFFFFFFFF if e else 0 for e in expected], a, b)


@pytest.mark.parametrize("type_", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", ["eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs"])
def test_integer_comparisons(name, type_):
    if name in ("lo", "ls", "hi", "hs") and type_[0] == "s":
        return
    a, b = operands(type_, 2, 100)
    same = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}.get(name, name)
    compare = operator.ne if same == "ne" else ORDERED[same]
    expected = [compare(number(type_, x), number(type_, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    check(name, run(f"setp.{name}.{type_}", a, b), expected, a, b)


def test_setp_with_a_predicate_and_halves():
    a, b = operands("s32", 2, 100)
    c = np.random.default_rng(0).integers(0, 2, len(a)).astype(bool)
    less = a.view(np.int32) < b.view(np.int32)
    for name, combine in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        check(name, run(f"setp.lt.{name}.s32", a, b, c), combine(less, c).tolist(), a, b, c)
        check(name, run(f"setp.lt.{name}.s32", a, b, c, second=True), combine(~less, c).tolist(), a, b, c)
    low, high = (x.view(np.float16)[0::2] for x in (a, b)), (x.view(np.float16)[1::2] for x in (a, b))
    check("lower halves", run("setp.ltu.f16x2", a, b), (~operator.ge(*low)).tolist(), a, b)
    check("upper halves", run("setp.ltu.f16x2", a, b, second=True), (~operator.ge(*high)).tolist(), a, b)
    tiny = np.array([1], np.uint32)
    assert not run("setp.eq.f32", tiny, tiny * 0)[0]
    assert run("setp.eq.ftz.f32", tiny, tiny * 0)[0]


def test_choices():
    a, b = operands("u32", 2, 100)
    p = np.random.default_rng(0).integers(0, 2, len(a)).astype(bool)
    check("selp", run("selp.b32", a, b, p), [x if q else y for x, y, q in zip(a.tolist(), b.tolist(), p, strict=True)], a, b)
    c = np.resize(edges("f32"), len(a))
    by_float = [x if decode("f32", z) >= 0 else y for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    check("slct", run("slct.u32.f32", a, b, c), by_float, a, b, c)
    check(
        "slct",
        run("slct.u32.s32", a, b, c),
        [x if z < 1 << 31 else y for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)],
        a,
        b,
        c,
    )
    for type_ in ("f32", "f64"):
        x = edges(type_)
        values = x.view(np.float32 if type_ == "f32" else np.float64)
        tiny = np.finfo(values.dtype).smallest_normal
        size = np.abs(values)
        normal, subnormal = (size >= tiny) & np.isfinite(values), (size < tiny) & (size > 0)
        for name, expected in (("finite", np.isfinite(values)), ("infinite", np.isinf(values)), ("number", ~np.isnan(values)),
                               ("notanumber", np.isnan(values)), ("normal", normal), ("subnormal", subnormal)):  # fmt: skip
            check(name, run(f"testp.{name}.{type_}", x), expected.tolist(), x)


# ---- integers


def number(type_: str, bits: int) -> int:
    """The bits as a Python integer of the type."""
    size = int(type_[1:])
    bits &= (1 << size) - 1
    return bits - (1 << size) if type_[0] == "s" and bits >> (size - 1) else bits


def quotient(a: int, b: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int) -> int:
    return -1 if b == 0 else a - b * quotient(a, b)


TWO = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "div": quotient,
    "rem": remainder,
    "min": min,
    "max": max,
}


@pytest.mark.parametrize("type_", ["s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("name", [*TWO, "mul.hi", "mul.wide", "mad.lo", "mad.hi", "mad.wide", "sad", "neg", "abs"])
def test_integer_arithmetic(name, type_):
    size = int(type_[1:])
    if (name.endswith("wide") and size == 64) or (name in ("neg", "abs") and type_[0] == "u"):
        return
    out = 2 * size if name.endswith("wide") else size
    args = operands(type_, 1 if name in ("neg", "abs") else 3 if name[:3] in ("mad", "sad") else 2, 400)
    if name == "mad.wide":
        args[2] = np.resize(operands(f"u{out}", 1, 300)[0], len(args[0]))
    shift = size if name.endswith("hi") else 0
    by_name = {
        **TWO,
        "mul.hi": lambda a, b: a * b >> shift,
        "mul.wide": operator.mul,
        "mad.lo": lambda a, b, c: a * b + c,
        "mad.hi": lambda a, b, c: (a * b >> shift) + c,
        "mad.wide": lambda a, b, c: a * b + c,
        "sad": lambda a, b, c: c + abs(a - b),
        "neg": operator.neg,
        "abs": abs,
    }[name]
    types = [type_, type_, type_[0] + str(out)]
    expected = [
        by_name(*(number(t, x) for t, x in zip(types, each, strict=False))) & (1 << out) - 1
        for each in zip(*(a.tolist() for a in args), strict=True)
    ]
    check(f"{name}.{type_}", run(f"{name}.{type_}", *args), expected, *args)


def test_saturating_sums():
    a, b = operands("s32", 2, 300)
    for name, function in (("add", operator.add), ("sub", operator.sub)):
        sums = [function(number("s32", x), number("s32", y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        check(name, run(f"{name}.sat.s32", a, b), [max(-(1 << 31), min((1 << 31) - 1, s)) & 0xFFFFFFFF for s in sums], a, b)


@pytest.mark.parametrize("size", [32, 64])
def test_carries(size):
    a, b, c = operands(f"u{size}", 3, 300)
    flag = np.random.default_rng(0).integers(0, 2, len(a)).astype(bool)
    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), flag.tolist(), strict=True))
    top, t = 1 << size, f"u{size}"
    whole = {
        f"add.cc.{t}": ([x + y for x, y, *_ in rows], (a, b)),
        f"addc.cc.{t}": ([x + y + f for x, y, _, f in rows], (a, b, flag)),
        f"sub.cc.{t}": ([x - y for x, y, *_ in rows], (a, b)),
        f"subc.cc.{t}": ([x - y - f for x, y, _, f in rows], (a, b, flag)),
        f"mad.lo.cc.{t}": ([x * y % top + z for x, y, z, _ in rows], (a, b, c)),
        f"madc.hi.cc.{t}": ([(x * y >> size) + z + f for x, y, z, f in rows], (a, b, c, flag)),
    }
    for opcode, (exact_sums, args) in whole.items():
        check(opcode, run(opcode, *args), [s % top for s in exact_sums], *args)
        check(opcode, run(opcode, *args, second=True), [not 0 <= s < top for s in exact_sums], *args)
    check("addc", run(f"addc.{t}", a, b, flag), [(x + y + f) % top for x, y, _, f in rows], a, b, flag)
    with pytest.raises(NotSimulated):
        alu.find(f"addc.{t}", second=True)


@pytest.mark.parametrize("size", [16, 32, 64])
def test_shifts_and_logic(size):
    a, b = operands(f"u{size}", 2, 300)
    count = np.resize(np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1 << 31, 0xFFFFFFFF], np.uint32), len(a))
    rows = list(zip(a.tolist(), b.tolist(), count.tolist(), strict=True))
    ones = (1 << size) - 1
    check("shl", run(f"shl.b{size}", a, count), [x << min(n, 64) & ones for x, _, n in rows], a, count)
    check("shr.u", run(f"shr.u{size}", a, count), [x >> n for x, _, n in rows], a, count)
    check("shr.s", run(f"shr.s{size}", a, count), [number(f"s{size}", x) >> n & ones for x, _, n in rows], a, count)
    for name in ("and", "or", "xor"):
        check(
            name, run(f"{name}.b{size}", a, b), [getattr(operator, f"{name}_" if name != "xor" else name)(x, y) for x, y, _ in rows], a, b
        )
    check("not", run(f"not.b{size}", a), [~x & ones for x, *_ in rows], a)
    check("cnot", run(f"cnot.b{size}", a), [int(x == 0) for x, *_ in rows], a)
    check("mov", run(f"mov.b{size}", a), a.tolist(), a)


def test_predicates():
    p, q = np.array([0, 0, 1, 1], bool), np.array([0, 1, 0, 1], bool)
    for name, expected in (("and", p & q), ("or", p | q), ("xor", p ^ q)):
        assert np.array_equal(run(f"{name}.pred", p, q), expected)
    assert np.array_equal(run("not.pred", p), ~p)
    assert np.array_equal(run("mov.pred", p), p)


def test_funnel_shifts():
    a, b = operands("u32", 2, 200)
    count = np.resize(np.array([0, 1, 7, 31, 32, 33, 63, 64, 0xFFFFFFFF], np.uint32), len(a))
    for side in "lr":
        for bound in ("wrap", "clamp"):
            expected = []
            for low, high, n in zip(a.tolist(), b.tolist(), count.tolist(), strict=True):
                n = n & 31 if bound == "wrap" else min(n, 32)
                both = high << 32 | low
                expected.append((both << n >> 32 if side == "l" else both >> n) & 0xFFFFFFFF)
            check("shf", run(f"shf.{side}.{bound}.b32", a, b, count), expected, a, b, count)


@pytest.mark.parametrize("type_", ["u32", "s32", "u64", "s64"])
def test_bit_fields(type_):
    size = int(type_[1:])
    a, b = operands(type_, 2, 1500)
    rng = np.random.default_rng(0)
    position = rng.choice(np.array([0, 1, 4, 8, 30, 31, 32, 33, 62, 63, 64, 200, 256, 300], np.uint32), len(a))
    length = rng.choice(np.array([0, 1, 2, 8, 16, 31, 32, 33, 62, 63, 64, 255, 256, 257], np.uint32), len(a))
    fields, inserted = [], []
    for x, y, start, count in zip(a.tolist(), b.tolist(), (position & 255).tolist(), (length & 255).tolist(), strict=True):
        bit = 0 if type_[0] == "u" or count == 0 else x >> min(start + count - 1, size - 1) & 1
        bits = [x >> start + i & 1 if i < count and start + i < size else bit for i in range(size)]
        fields.append(sum(v << i for i, v in enumerate(bits)))
        for i in range(count):
            if start + i < size:
                y = y & ~(1 << start + i) | (x >> i & 1) << start + i
        inserted.append(y)
    check("bfe", run(f"bfe.{type_}", a, position, length), fields, a, position, length)
    check("bfi", run(f"bfi.b{size}", a, b, position, length), inserted, a, b, position, length)


@pytest.mark.parametrize("size", [32, 64])
def test_counting(size):
    (a,) = operands(f"u{size}", 1, 500)
    a = np.concatenate((a, np.array([1], a.dtype) << np.arange(size, dtype=a.dtype)))
    numbers = a.tolist()
    check("popc", run(f"popc.b{size}", a), [x.bit_count() for x in numbers], a)
    check("clz", run(f"clz.b{size}", a), [size - x.bit_length() for x in numbers], a)
    check("brev", run(f"brev.b{size}", a), [int(f"{x:0{size}b}"[::-1], 2) for x in numbers], a)
    for type_ in (f"u{size}", f"s{size}"):
        magnitudes = [~x if type_[0] == "s" and x < 0 else x for x in (number(type_, x) for x in numbers)]
        check("bfind", run(f"bfind.{type_}", a), [(x.bit_length() - 1) & 0xFFFFFFFF for x in magnitudes], a)
        expected = [size - x.bit_length() if x else 0xFFFFFFFF for x in magnitudes]
        check("bfind", run(f"bfind.shiftamt.{type_}", a), expected, a)


def test_permutations():
    a, b = operands("u32", 2, 300)
    c = np.random.default_rng(5).integers(0, 2**32, len(a), dtype=np.uint32)
    expected = []
    for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        source = (y << 32 | x).to_bytes(8, "little")
        picked = []
        for i in range(4):
            nibble = z >> 4 * i & 15
            byte = source[nibble & 7]
            picked.append((255 if byte >> 7 else 0) if nibble & 8 else byte)
        expected.append(int.from_bytes(bytes(picked), "little"))
    check("prmt", run("prmt.b32", a, b, c), expected, a, b, c)
    bytes_of = np.array([0x03020100], np.uint32), np.array([0x07060504], np.uint32)
    table = {  # the tables of the PTX ISA, from byte 3 to byte 0
        "f4e": ("3210", "4321", "5432", "6543"),
        "b4e": ("5670", "6701", "7012", "0123"),
        "rc8": ("0000", "1111", "2222", "3333"),
        "ecl": ("3210", "3211", "3222", "3333"),
        "ecr": ("0000", "1110", "2210", "3210"),
        "rc16": ("1010", "3232", "1010", "3232"),
    }
    for mode, rows in table.items():
        for control, row in enumerate(rows):
            got = run(f"prmt.b32.{mode}", *bytes_of, np.array([control + 4], np.uint32))
            assert f"{int(got[0]):08x}"[1::2] == row, f"prmt.{mode} {control}"


def test_lop3():
    a, b = operands("u32", 2, 50)
    c = np.random.default_rng(5).integers(0, 2**32, len(a), dtype=np.uint32)
    for table in (0, 0xC0, 0x96, 0xE8, 0xFE, 0x1A, 0x80, 0xFF):
        expected = [
            sum((table >> ((x >> i & 1) * 4 + (y >> i & 1) * 2 + (z >> i & 1)) & 1) << i for i in range(32))
            for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
        ]
        check("lop3", run("lop3.b32", a, b, c, np.array([table], np.uint32)), expected, a, b, c)


def test_dot_products():
    a, b, c = operands("u32", 3, 300)
    for type_a in ("s32", "u32"):
        for type_b in ("s32", "u32"):
            part = lambda t, x, i, n: number(f"{t[0]}{n}", x >> n * i)  # noqa: E731
            rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
            four = [z + sum(part(type_a, x, i, 8) * part(type_b, y, i, 8) for i in range(4)) & 0xFFFFFFFF for x, y, z in rows]
            check("dp4a", run(f"dp4a.{type_a}.{type_b}", a, b, c), four, a, b, c)
            for first, name in ((0, "lo"), (2, "hi")):
                two = [z + sum(part(type_a, x, i, 16) * part(type_b, y, i + first, 8) for i in range(2)) & 0xFFFFFFFF for x, y, z in rows]
                check("dp2a", run(f"dp2a.{name}.{type_a}.{type_b}", a, b, c), two, a, b, c)


# ---- conversions

FLOAT_TO_FLOAT = [
    *(f"cvt.{m}.{t}.f32" for m in ("rn", "rz", "rm", "rp") for t in ("f16", "bf16")),
    *(f"cvt.{m}.{t}.f64" for m in ("rn", "rz", "rm", "rp") for t in ("f32", "f16", "bf16")),
    *(f"cvt.f32.{t}" for t in ("f16", "bf16")), "cvt.f64.f16", "cvt.f64.f32", "cvt.rn.bf16.f16", "cvt.rn.tf32.f32",
    "cvt.rz.tf32.f32", "cvt.rna.tf32.f32",
]  # fmt: skip


def crowded(target: str, source: str) -> np.ndarray:
    """Edges and random bits of `source`, numbers about the range of `target`, and ties of `target` with their neighbours."""
    (bits,) = operands(source, 1, 400)
    rng, (digits, most, _) = np.random.default_rng(2), SHAPES[target]
    ties = []
    for _ in range(300):
        middle = Fraction(2 * int(rng.integers(2 ** (digits - 1), 2**digits)) + 1) * Fraction(2) ** int(
            rng.integers(-most - 12, most - digits + 2)
        )
        near = encode(source, middle * (-1) ** int(rng.integers(2)))
        ties += [max(near - 1, 0), near, near + 1]
    return np.concatenate((bits, np.array(ties, bits.dtype)))


@pytest.mark.parametrize("opcode", FLOAT_TO_FLOAT)
def test_float_to_float(opcode):
    *modes, target, source = opcode.split(".")[1:]
    bits = crowded(target, source)
    expected = [encode(target, decode(source, x), *modes) for x in bits.tolist()]
    check(opcode, run(opcode, bits), expected, bits)


def test_half_types_against_torch():
    (x,) = operands("f32", 1, 5000)
    for opcode, dtype in (("cvt.rn.f16.f32", torch.float16), ("cvt.rn.bf16.f32", torch.bfloat16)):
        numbers = ~np.isnan(x.view(np.float32))
        theirs = torch.from_numpy(x.view(np.float32)[numbers].copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
        check(opcode, run(opcode, x[numbers]), theirs.tolist(), x[numbers])


def test_pairs_saturation_and_relu():
    a, b = operands("f32", 2, 300)
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    for type_ in ("f16", "bf16"):
        one = lambda x, t=type_: encode(t, decode("f32", x))  # noqa: E731
        check("pair", run(f"cvt.rn.{type_}x2.f32", a, b), [one(x) << 16 | one(y) for x, y in rows], a, b)
        check("relu", run(f"cvt.rn.relu.{type_}.f32", a), [0 if decode("f32", x) <= 0 else one(x) for x, _ in rows], a)
    clamped = [0x3F800000 if (v := decode("f32", x)) > 1 else x if v > 0 else 0 for x, _ in rows]
    check("sat", run("cvt.sat.f32.f32", a), clamped, a)
    check("ftz", run("cvt.ftz.f32.f16", np.array([1], np.uint16)), [encode("f32", decode("f16", 1))])
    assert run("cvt.rn.ftz.f32.f64", np.array([1e-40]).view(np.uint64))[0] == 0
    assert run("cvt.ftz.f64.f32", np.array([1], np.uint32))[0] == 0


INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


@pytest.mark.parametrize("mode", INTEGRAL)
@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_to_integers(source, mode):
    (bits,) = operands(source, 1, 500)
    halves = [encode(source, Fraction(n, 2)) for n in range(-20, 21) if n]
    limits = [encode(source, Fraction(2) ** p + d, "rz") for p in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)]
    bits = np.concatenate((bits, np.array(halves + limits, bits.dtype)))
    for target in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
        size = int(target[1:])
        least, most = (-(1 << size - 1), (1 << size - 1) - 1) if target[0] == "s" else (0, (1 << size) - 1)
        expected = []
        for x in bits.tolist():
            value = decode(source, x)
            if value != value:
                integer = 1 << size - 1 if source == "f64" or size == 64 else 0
            elif isinstance(value, float):
                integer = 0 if value == 0 else most if value > 0 else least
            else:
                integer = max(least, min(most, INTEGRAL[mode](value)))
            if size == 8 and target[0] == "s":
                integer = number("s8", integer)
            expected.append(integer & (1 << max(size, 16)) - 1)
        check(f"cvt.{mode}.{target}.{source}", run(f"cvt.{mode}.{target}.{source}", bits), expected, bits)
    wanted = [
        encode(source, Fraction(r)) if isinstance(v := decode(source, x), Fraction) and (r := INTEGRAL[mode](v)) else None
        for x in bits.tolist()
    ]
    for x, got, want in zip(bits.tolist(), run(f"cvt.{mode}.{source}.{source}", bits).tolist(), wanted, strict=True):
        value = decode(source, x)
        zero = x & 1 << (width(source) - 1)
        assert got == (want if want is not None else NAN[source] if value != value else x if value in (math.inf, -math.inf) else zero)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_from_integers(source, mode):
    size = int(source[1:])
    (bits,) = operands(source, 1, 500)
    rng = np.random.default_rng(7)
    ties = [(2 * int(rng.integers(1 << d)) + 1 << max(0, size - d - 2)) + e for d in (8, 11, 24, 53) for _ in range(40) for e in (-1, 0, 1)]
    small = (
        rng.integers(0, 1 << size, 500, dtype=np.uint64, endpoint=False) if size < 64 else rng.integers(0, 1 << 63, 500, dtype=np.uint64)
    )
    small >>= rng.integers(0, size, 500, dtype=np.uint64)
    bits = np.concatenate((bits, np.array([t % (1 << size) for t in ties], bits.dtype), small.astype(bits.dtype)))
    register = bits.astype(np.uint16) | np.uint16(0x5500) if size == 8 else bits  # what lies above the type is not read
    for target in ("f16", "bf16", "f32", "f64"):
        numbers = [number(source, x) for x in bits.tolist()]
        expected = [encode(target, Fraction(n), mode) if n else 0 for n in numbers]
        check(f"cvt.{mode}.{target}.{source}", run(f"cvt.{mode}.{target}.{source}", register), expected, register)


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_between_integers(target, source):
    (bits,) = operands("u64", 1, 200)
    register = bits.astype(KINDS[max(16, int(source[1:]))])
    size = int(target[1:])
    least, most = (-(1 << size - 1), (1 << size - 1) - 1) if target[0] == "s" else (0, (1 << size) - 1)
    numbers = [number(source, x) for x in register.tolist()]
    mask = (1 << max(size, 16)) - 1
    check("cvt", run(f"cvt.{target}.{source}", register), [number(target, n) & mask for n in numbers], register)
    check("cvt.sat", run(f"cvt.sat.{target}.{source}", register), [max(least, min(most, n)) & mask for n in numbers], register)


# ---- approximate functions

APPROXIMATE = {
    "ex2": lambda x: 2.0**x, "lg2": math.log2, "sin": math.sin, "cos": math.cos, "tanh": math.tanh, "rcp": lambda x: 1 / x,
    "sqrt": math.sqrt, "rsqrt": lambda x: 1 / math.sqrt(x),
}  # fmt: skip


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximations_are_within_one_ulp(name):
    x = np.random.default_rng(0).uniform(0.01, 30, 500).astype(np.float32)
    got = run(f"{name}.approx.f32", x.view(np.uint32)).view(np.float32)
    expected = np.array([APPROXIMATE[name](v) for v in x.tolist()])
    assert np.all(np.abs(got - expected) <= np.spacing(np.abs(expected).astype(np.float32)))
    if name in ("ex2", "tanh"):
        for type_ in ("f16", "bf16"):
            half = alu.find(f"cvt.rn.{type_}.f32")(x.view(np.uint32))
            near = run(f"{name}.approx.{type_}", half)
            wide = np.array([APPROXIMATE[name](float(decode(type_, v))) for v in half.tolist()])
            check(name, near, alu.find(f"cvt.rn.{type_}.f64")(wide.view(np.uint64)).tolist(), half)


SPECIAL = {  # the tables of the PTX ISA: operand, result
    "ex2.approx.f32": [(-math.inf, 0.0), (-0.0, 1.0), (math.inf, math.inf), (math.nan, math.nan), (1e-40, 1.0), (-140.0, 2.0**-140)],
    "ex2.approx.ftz.f32": [(-140.0, 0.0), (-126.0, 2.0**-126), (1e-40, 1.0)],
    "lg2.approx.f32": [(-1.0, math.nan), (-math.inf, math.nan), (-0.0, -math.inf), (0.0, -math.inf), (math.inf, math.inf)],
    "lg2.approx.ftz.f32": [(2.0**-140, -math.inf), (-(2.0**-140), -math.inf)],
    "sin.approx.f32": [(-0.0, -0.0), (0.0, 0.0), (math.inf, math.nan), (-math.inf, math.nan)],
    "cos.approx.f32": [(-0.0, 1.0), (math.inf, math.nan)],
    "tanh.approx.f32": [(-math.inf, -1.0), (math.inf, 1.0), (-0.0, -0.0), (2.0**-140, 2.0**-140), (math.nan, math.nan)],
    "rcp.approx.f32": [(-math.inf, -0.0), (0.0, math.inf), (-0.0, -math.inf), (math.inf, 0.0), (2.0**127, 2.0**-127)],
    "rcp.approx.ftz.f32": [(2.0**127, 0.0), (2.0**-140, math.inf), (-(2.0**-140), -math.inf)],
    "sqrt.approx.f32": [(-math.inf, math.nan), (-1.0, math.nan), (-0.0, -0.0), (math.inf, math.inf), (2.0**-140, 2.0**-70)],
    "sqrt.approx.ftz.f32": [(-(2.0**-140), -0.0), (2.0**-140, 0.0)],
    "rsqrt.approx.f32": [(-math.inf, math.nan), (-1.0, math.nan), (-0.0, -math.inf), (0.0, math.inf), (2.0**-140, 2.0**70)],
    "rsqrt.approx.ftz.f32": [(2.0**-140, math.inf)],
}  # fmt: skip


@pytest.mark.parametrize("opcode", SPECIAL)
def test_special_values(opcode):
    x, expected = (np.array(column, np.float32).view(np.uint32) for column in zip(*SPECIAL[opcode], strict=True))
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
    assert np.allclose(run("rsqrt.approx.f64", x.view(np.uint64)).view(np.float64), 1 / np.sqrt(x), rtol=2.0**-50)


UNKNOWN = """add add.f8 add.rs.f32 fma.rn.f32x2 add.sat.u32 mul.s32 mul.sat.s32 min.sat.s32 setp.f32 sqrt.f32 and.f32 shf.l.b32
             cvt.rn.e4m3x2.f32 wgmma.mma_async
             vabsdiff4.u32.u32.u32 ex2.f32 rcp.approx.f16 sin.approx.f64 cvt.relu.s32.f32 max.relu.f16 lop3.or.b32
             mad.hi.sat.s32 cvt.s32.f32 cvt.rn.f32 set.lt.f32 dp2a.s32.s32"""


@pytest.mark.parametrize("opcode", UNKNOWN.split())
def test_what_is_not_there_says_so(opcode):
    with pytest.raises(NotSimulated, match=opcode.replace(".", r"\.")):
        alu.find(opcode)
