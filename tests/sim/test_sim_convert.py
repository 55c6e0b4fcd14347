"""The simulator's conversions against Python's fractions, and torch."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from sim_oracle import KINDS, NAN, SHAPES, check, decode, encode, number, operands, run, width

FLOAT_TO_FLOAT = [
    *(f"cvt.{m}.{t}.f32" for m in ("rn", "rz", "rm", "rp") for t in ("f16", "bf16")),
    *(f"cvt.{m}.{t}.f64" for m in ("rn", "rz", "rm", "rp") for t in ("f32", "f16", "bf16")),
    *(f"cvt.f32.{t}" for t in ("f16", "bf16")), "cvt.f64.f16", "cvt.f64.f32", "cvt.rn.bf16.f16",
    "cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rna.tf32.f32",
]  # fmt: skip


def crowded(target: str, source: str) -> np.ndarray:
    """Edges and random bits of `source`, numbers about the range of `target`, and ties of `target` with their
    neighbours."""
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
    expected = [
        nan_of(opcode, x) if math.isnan(v := decode(source, x)) else encode(target, v, *modes)
        for x in bits.tolist()
    ]
    check(opcode, run(opcode, bits), expected, bits)


def nan_of(opcode: str, bits: int) -> int:
    """What an H200 makes of a NaN: nothing in its last bits is promised."""
    *_, target, source = opcode.split(".")
    if source == "f64":
        sign, payload = bits >> 63, bits & (1 << 52) - 1
        return {
            "f32": sign << 31 | 0x7FC00000 | payload >> 29,
            "f16": sign << 15 | 0x7E00 | payload >> 42,
            "bf16": sign << 15 | 0x7FC0 | payload >> 45,
        }[target]
    return bits << 16 if opcode == "cvt.f32.bf16" else bits & ~0x1FFF if "rna" in opcode else NAN[target]


def test_half_types_against_torch():
    (x,) = operands("f32", 1, 5000)
    for opcode, dtype in (("cvt.rn.f16.f32", torch.float16), ("cvt.rn.bf16.f32", torch.bfloat16)):
        numbers = ~np.isnan(x.view(np.float32))
        theirs = (
            torch.from_numpy(x.view(np.float32)[numbers].copy())
            .to(dtype)
            .view(torch.int16)
            .numpy()
            .view(np.uint16)
        )
        check(opcode, run(opcode, x[numbers]), theirs.tolist(), x[numbers])


def test_pairs_saturation_and_relu():
    a, b = operands("f32", 2, 300)
    rows = list(zip(a.tolist(), b.tolist(), strict=True))
    for type_ in ("f16", "bf16"):
        one = lambda x, t=type_: encode(t, decode("f32", x))  # noqa: E731
        check("pair", run(f"cvt.rn.{type_}x2.f32", a, b), [one(x) << 16 | one(y) for x, y in rows], a, b)
        largest = {"f16": 0x7BFF, "bf16": 0x7F7F}[type_]
        inside = [x & 0x8000 | largest if (x := one(y)) & 0x7FFF == largest + 1 else x for y, _ in rows]
        check("satfinite", run(f"cvt.rn.satfinite.{type_}.f32", a), inside, a)
        check(
            "relu",
            run(f"cvt.rn.relu.{type_}.f32", a),
            [0 if decode("f32", x) <= 0 else one(x) for x, _ in rows],
            a,
        )
    ends = np.array([0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F7FE000, 0x3F800001], np.uint32)
    check(
        "tf32",
        run("cvt.rna.satfinite.tf32.f32", ends),
        [0x7F7FE000, 0x7F7FE000, 0xFF7FE000, 0x7F7FE000, 0x3F800000],
        ends,
    )
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
    limits = [
        encode(source, Fraction(2) ** p + d, "rz") for p in (7, 8, 15, 16, 31, 32, 63, 64) for d in (-1, 0, 1)
    ]
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
        encode(source, Fraction(r))
        if isinstance(v := decode(source, x), Fraction) and (r := INTEGRAL[mode](v))
        else None
        for x in bits.tolist()
    ]
    for x, got, want in zip(
        bits.tolist(), run(f"cvt.{mode}.{source}.{source}", bits).tolist(), wanted, strict=True
    ):
        value = decode(source, x)
        zero = x & 1 << (width(source) - 1)
        assert got == (
            want
            if want is not None
            else NAN[source]
            if value != value
            else x
            if value in (math.inf, -math.inf)
            else zero
        )


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_from_integers(source, mode):
    size = int(source[1:])
    (bits,) = operands(source, 1, 500)
    rng = np.random.default_rng(7)
    ties = [
        (2 * int(rng.integers(1 << d)) + 1 << max(0, size - d - 2)) + e
        for d in (8, 11, 24, 53)
        for _ in range(40)
        for e in (-1, 0, 1)
    ]
    small = (
        rng.integers(0, 1 << size, 500, dtype=np.uint64, endpoint=False)
        if size < 64
        else rng.integers(0, 1 << 63, 500, dtype=np.uint64)
    )
    small >>= rng.integers(0, size, 500, dtype=np.uint64)
    bits = np.concatenate(
        (bits, np.array([t % (1 << size) for t in ties], bits.dtype), small.astype(bits.dtype))
    )
    # bits above the 8-bit type are not read
    register = bits.astype(np.uint16) | np.uint16(0x5500) if size == 8 else bits
    for target in ("f16", "bf16", "f32", "f64"):
        numbers = [number(source, x) for x in bits.tolist()]
        expected = [encode(target, Fraction(n), mode) if n else 0 for n in numbers]
        check(
            f"cvt.{mode}.{target}.{source}",
            run(f"cvt.{mode}.{target}.{source}", register),
            expected,
            register,
        )


@pytest.mark.parametrize("source", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("target", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_between_integers(target, source):
    (bits,) = operands("u64", 1, 200)
    register = bits.astype(KINDS[max(16, int(source[1:]))])
    size = int(target[1:])
    least, most = (-(1 << size - 1), (1 << size - 1) - 1) if target[0] == "s" else (0, (1 << size) - 1)
    numbers = [number(source, x) for x in register.tolist()]
    mask = (1 << max(size, 16)) - 1
    check(
        "cvt", run(f"cvt.{target}.{source}", register), [number(target, n) & mask for n in numbers], register
    )
    check(
        "cvt.sat",
        run(f"cvt.sat.{target}.{source}", register),
        [max(least, min(most, n)) & mask for n in numbers],
        register,
    )
