"""The simulator's comparisons, choices and packed instructions; and what it does not know."""

import math
import operator
from fractions import Fraction

import numpy as np
import pytest
from sim_oracle import NAN, check, decode, edges, encode, flushed, number, operands, run, width

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import alu

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
@pytest.mark.parametrize(
    "name", ["eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"]
)
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
    expected = [
        compare(number(type_, x), number(type_, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
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
    check(
        "selp",
        run("selp.b32", a, b, p),
        [x if q else y for x, y, q in zip(a.tolist(), b.tolist(), p, strict=True)],
        a,
        b,
    )
    c = np.resize(edges("f32"), len(a))
    by_float = [
        x if decode("f32", z) >= 0 else y for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
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
        normal, subnormal = ((size >= tiny) & np.isfinite(values)) | (size == 0), (size < tiny) & (size > 0)
        for name, expected in (("finite", np.isfinite(values)), ("infinite", np.isinf(values)),
                               ("number", ~np.isnan(values)),
                               ("notanumber", np.isnan(values)), ("normal", normal),
                               ("subnormal", subnormal)):  # fmt: skip
            check(name, run(f"testp.{name}.{type_}", x), expected.tolist(), x)


MINMAX = [
    "min.f32", "max.f32", "min.NaN.f32", "max.NaN.f16", "max.f16", "min.bf16", "max.f64", "min.f64",
    "max.xorsign.abs.f32", "min.ftz.f32",
]  # fmt: skip


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


PACKED = """add.f16x2 mul.bf16x2 fma.rn.f16x2 fma.rn.relu.bf16x2 sub.f16x2 max.NaN.f16x2 min.bf16x2
            neg.f16x2 abs.bf16x2 max.s16x2 min.u16x2
            add.u16x2 ex2.approx.f16x2 tanh.approx.bf16x2 set.lt.f16x2.f16x2"""


@pytest.mark.parametrize("opcode", PACKED.split())
def test_packed_is_the_scalar_twice(opcode):
    scalar = opcode.replace("16x2", "16")
    count = 1 if opcode.startswith(("neg", "abs", "ex2", "tanh")) else 3 if opcode.startswith("fma") else 2
    args = [np.random.default_rng(count + i).integers(0, 2**32, 500, dtype=np.uint32) for i in range(count)]
    halves = [
        run(scalar, *((x >> shift).astype(np.uint16) for x in args)).astype(np.uint32) for shift in (0, 16)
    ]
    if opcode.startswith(("neg", "abs")):  # the scalars leave a NaN's bits alone
        exponent = 0x7F80 if "bf16" in opcode else 0x7C00
        halves = [np.where(x & 0x7FFF > exponent, 0x7FFF, x).astype(np.uint32) for x in halves]
    check(opcode, run(opcode, *args), (halves[0] | halves[1] << 16).tolist(), *args)


@pytest.mark.parametrize("opcode", ["add.f32x2", "sub.rz.f32x2", "mul.ftz.f32x2", "fma.rn.f32x2"])
def test_two_floats_are_the_scalar_twice(opcode):
    scalar = opcode.replace("f32x2", "f32")
    args = [np.concatenate(operands("f32", 1, 300)) for _ in range(3 if "fma" in opcode else 2)]
    halves = [run(scalar, *(x[i::2] for x in args)).astype(np.uint64) for i in (0, 1)]
    found = run(opcode, *(np.ascontiguousarray(x).view(np.uint64) for x in args))
    check(opcode, found, (halves[0] | halves[1] << 32).tolist())


UNKNOWN = """add add.f8 add.rs.f32 neg.f32x2 add.sat.f32x2 add.sat.u32 mul.s32 mul.sat.s32 min.sat.s32
            setp.f32 sqrt.f32 and.f32 shf.l.b32
             cvt.rn.e4m3x2.f32 wgmma.mma_async
             vavrg4.u32.u32.u32 ex2.f32 rcp.approx.f16 sin.approx.f64 cvt.relu.s32.f32 max.relu.f16
            lop3.or.b32
             mad.hi.sat.s32 cvt.s32.f32 cvt.rn.f32 set.lt.f32 dp2a.s32.s32"""


@pytest.mark.parametrize("opcode", UNKNOWN.split())
def test_what_is_not_there_says_so(opcode):
    with pytest.raises(NotSimulated, match=opcode.replace(".", r"\.")):
        alu.find(opcode)
