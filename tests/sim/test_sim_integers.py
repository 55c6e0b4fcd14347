"""Integer arithmetic and bit operations of the simulator against Python's integers."""

import operator

import numpy as np
import pytest
from sim_oracle import check, number, operands, run

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics import alu


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
@pytest.mark.parametrize(
    "name", [*TWO, "mul.hi", "mul.wide", "mad.lo", "mad.hi", "mad.wide", "sad", "neg", "abs"]
)
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
        sums = [
            function(number("s32", x), number("s32", y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)
        ]
        check(
            name,
            run(f"{name}.sat.s32", a, b),
            [max(-(1 << 31), min((1 << 31) - 1, s)) & 0xFFFFFFFF for s in sums],
            a,
            b,
        )


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
    count = np.resize(
        np.array([0, 1, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 1 << 31, 0xFFFFFFFF], np.uint32), len(a)
    )
    rows = list(zip(a.tolist(), b.tolist(), count.tolist(), strict=True))
    ones = (1 << size) - 1
    check("shl", run(f"shl.b{size}", a, count), [x << min(n, 64) & ones for x, _, n in rows], a, count)
    check("shr.u", run(f"shr.u{size}", a, count), [x >> n for x, _, n in rows], a, count)
    check(
        "shr.s",
        run(f"shr.s{size}", a, count),
        [number(f"s{size}", x) >> n & ones for x, _, n in rows],
        a,
        count,
    )
    for name in ("and", "or", "xor"):
        check(
            name,
            run(f"{name}.b{size}", a, b),
            [getattr(operator, f"{name}_" if name != "xor" else name)(x, y) for x, y, _ in rows],
            a,
            b,
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
    position = rng.choice(
        np.array([0, 1, 4, 8, 30, 31, 32, 33, 62, 63, 64, 200, 256, 300], np.uint32), len(a)
    )
    length = rng.choice(np.array([0, 1, 2, 8, 16, 31, 32, 33, 62, 63, 64, 255, 256, 257], np.uint32), len(a))
    fields, inserted = [], []
    read = np.uint32(255 if size == 32 else 0xFFFFFFFF)
    for x, y, start, count in zip(
        a.tolist(), b.tolist(), (position & read).tolist(), (length & read).tolist(), strict=True
    ):
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
            four = [
                z + sum(part(type_a, x, i, 8) * part(type_b, y, i, 8) for i in range(4)) & 0xFFFFFFFF
                for x, y, z in rows
            ]
            check("dp4a", run(f"dp4a.{type_a}.{type_b}", a, b, c), four, a, b, c)
            for first, name in ((0, "lo"), (2, "hi")):
                two = [
                    z + sum(part(type_a, x, i, 16) * part(type_b, y, i + first, 8) for i in range(2))
                    & 0xFFFFFFFF
                    for x, y, z in rows
                ]
                check("dp2a", run(f"dp2a.{name}.{type_a}.{type_b}", a, b, c), two, a, b, c)
