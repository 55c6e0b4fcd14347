"""Single instructions, by group, as kernels that carry out each of them on many operands: for a GPU and the
simulator to be compared."""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from sim_oracle import KINDS, SHAPES, edges, operands, width

N = 2048
ROUND = ("rn", "rz", "rm", "rp")
INTS = ("s16", "u16", "s32", "u32", "s64", "u64")


@dataclass(frozen=True)
class Probe:
    """One instruction: its result's and its operands' types ("i5" is the constant 5), the PTX, and how far
    two results may lie apart.

    `bound` is None for equal bits, else ("ulp" | "abs" | "rel", x), of which the last two also allow one ulp.
    `any_nan`: the bits of a NaN are the hardware's own affair.
    """

    name: str
    result: str
    operands: tuple[str, ...]
    asm: str
    bound: tuple[str, float] | None = None
    any_nan: bool = False


def probe(
    opcode: str, result: str, *types: str, asm: str = "", bound: Any = None, any_nan: bool = False
) -> Probe:
    places = ", ".join(f"%{i + 1}" for i in range(len(types)))
    return Probe(opcode, result, types, asm or f"{opcode} %0, {places};", bound, any_nan or result == "f64")


# Operands that are not every bit of a type: counts for shifts and fields, flags, and floats in an interval.
DRAWN = {
    "count": lambda rng: rng.choice(np.array([*range(70), 127, 128, 255, 256, 1 << 31, 0xFFFFFFFF],
                                             np.uint32), N),
    "flag": lambda rng: rng.integers(0, 2, N, dtype=np.uint32),
    "f32.angle": lambda rng: rng.uniform(-np.pi, np.pi, N).astype(np.float32).view(np.uint32),
    "f32.normal": lambda rng: _normal(rng),
    "f64.normal": lambda rng: np.resize(
        (x := edges("f64"))[np.isfinite(x.view(np.float64)) & (np.abs(x.view(np.float64)) > 1e-300)], N),
    "f32.divisor": lambda rng: np.ldexp(rng.uniform(1, 2, N),
                                        rng.integers(-120, 120, N)).astype(np.float32).view(np.uint32),
}  # fmt: skip


def _normal(rng: np.random.Generator) -> np.ndarray:
    """Edges and all bits of float32, less the subnormal numbers."""
    x = np.concatenate((edges("f32"), rng.integers(0, 1 << 32, N, dtype=np.uint32)))
    return x[(x & np.uint32(0x7F800000) != 0) | (x & np.uint32(0x7FFFFFFF) == 0)][:N]


def plain_type(type_: str) -> str:
    return {"count": "u32", "flag": "u32"}.get(type_, type_.partition(".")[0])


def operand_bits(type_: str) -> np.ndarray:
    """(3, N) uint64: what the first, second and third operand of a type are, in thread i."""
    if type_ in DRAWN:
        return np.stack([DRAWN[type_](np.random.default_rng(i)) for i in range(3)]).astype(np.uint64)
    if type_.endswith("x2"):
        halves = operand_bits(type_[:-2])
        return halves | np.roll(halves, 5, axis=1) << np.uint64(16)
    columns = operands(
        type_.replace("b", "u") if type_[1:].isdigit() and type_[0] == "b" else type_, 3, N, seed=11
    )
    return np.stack([np.concatenate((c[: N // 2], c[-N // 2 :])) for c in columns]).astype(np.uint64)


# ---- the groups


def _integer() -> list[Probe]:
    probes = [
        probe(f"{op}.{t}", t, t, t)
        for op in ("add", "sub", "mul.lo", "mul.hi", "min", "max", "div", "rem")
        for t in INTS
    ]
    probes += [
        probe(f"{op}.{t}", t, t, t, t)
        for op in ("mad.lo", "mad.hi", "sad")
        for t in INTS
        if op != "mad.hi" or t[1:] != "16"
    ]
    for t, double in (("s16", "s32"), ("u16", "u32"), ("s32", "s64"), ("u32", "u64")):
        probes += [probe(f"mul.wide.{t}", double, t, t), probe(f"mad.wide.{t}", double, t, t, double)]
    probes += [probe(f"{op}.{t}", t, t) for op in ("neg", "abs") for t in INTS if t[0] == "s"]
    probes += [probe(f"{op}.sat.s32", "s32", "s32", "s32") for op in ("add", "sub")]
    probes += [
        probe(f"dp4a.{a}.{b}", "u32", "u32", "u32", "u32") for a in ("s32", "u32") for b in ("s32", "u32")
    ]
    probes += [
        probe(f"dp2a.{h}.{a}.{b}", "u32", "u32", "u32", "u32")
        for h in ("lo", "hi")
        for a in ("s32", "u32")
        for b in ("s32", "u32")
    ]
    probes += [probe(f"{op}.{t}", "u32", "u32", "u32") for op in ("min", "max") for t in ("s16x2", "u16x2")]
    for t in ("u32", "u64"):
        probes += [
            _in_two(f"add.cc.{t}", t, f"add.cc.{t} d, %1, %2;", f"addc.{t} %0, 0, %3;"),
            _in_two(f"addc.{t}", t, f"add.cc.{t} d, %1, %2;", f"addc.{t} %0, %2, %3;"),
            _in_two(
                f"addc.cc.{t}", t, f"add.cc.{t} d, %1, %2; addc.cc.{t} d, %2, %3;", f"addc.{t} %0, d, d;"
            ),
            _in_two(f"subc.{t}", t, f"sub.cc.{t} d, %1, %2;", f"subc.{t} %0, %2, %3;"),
            _in_two(
                f"subc.cc.{t}", t, f"sub.cc.{t} d, %1, %2; subc.cc.{t} d, %2, %3;", f"subc.{t} %0, d, 0;"
            ),
            _in_two(f"madc.hi.{t}", t, f"mad.lo.cc.{t} d, %1, %2, %3;", f"madc.hi.{t} %0, %1, %2, d;"),
            _in_two(
                f"madc.hi.cc.{t}",
                t,
                f"mad.lo.cc.{t} d, %1, %2, %3; madc.hi.cc.{t} d, %1, %2, %3;",
                f"addc.{t} %0, d, d;",
            ),
        ]
    return probes


def _in_two(name: str, t: str, first: str, last: str) -> Probe:
    """An instruction that sets the carry flag, and one that reads it."""
    return probe(name, t, t, t, t, asm=f"{{ .reg .{t} d; {first} {last} }}")


def _logic() -> list[Probe]:
    probes = [probe(f"{op}.{t}", t, t, t) for op in ("and", "or", "xor") for t in ("b16", "b32", "b64")]
    probes += [probe(f"{op}.{t}", t, t) for op in ("not", "cnot") for t in ("b16", "b32", "b64")]
    lop3 = [f"lop3.b32 %0, %1, %2, %3, {table:#x};" for table in (0x96, 0xE8, 0xC0, 0x1A, 0xFE, 0x2D)]
    probes += [probe(asm, "u32", "u32", "u32", "u32", asm=asm) for asm in lop3]
    probes += [probe(f"shl.{t}", t, t, "count") for t in ("b16", "b32", "b64")]
    probes += [probe(f"shr.{t}", t, t, "count") for t in INTS]
    probes += [
        probe(f"shf.{side}.{bound}.b32", "u32", "u32", "u32", "count")
        for side in "lr"
        for bound in ("wrap", "clamp")
    ]
    return probes


def _fields() -> list[Probe]:
    probes = [probe(f"bfe.{t}", t, t, "count", "count") for t in ("s32", "u32", "s64", "u64")]
    probes += [
        probe(
            f"bfi.b{n}",
            f"u{n}",
            f"u{n}",
            "count",
            "count",
            asm=f"{{ .reg .b{n} b; not.b{n} b, %1; bfi.b{n} %0, %1, b, %2, %3; }}",
        )
        for n in (32, 64)
    ]
    probes += [probe(f"{op}.b{n}", "u32", f"u{n}") for op in ("popc", "clz") for n in (32, 64)]
    probes += [probe(f"brev.b{n}", f"u{n}", f"u{n}") for n in (32, 64)]
    probes += [
        probe(f"bfind{s}.{t}", "u32", t) for s in ("", ".shiftamt") for t in ("s32", "u32", "s64", "u64")
    ]
    probes += [
        probe(f"prmt.b32{m}", "u32", "u32", "u32", "u32")
        for m in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16")
    ]
    return probes


def _float(t: str) -> list[Probe]:
    ftz = ("", ".ftz") if t == "f32" else ("",)
    probes = [
        probe(f"{op}.{m}{f}.{t}", t, t, t) for op in ("add", "sub", "mul", "div") for m in ROUND for f in ftz
    ]
    probes += [probe(f"fma.{m}{f}.{t}", t, t, t, t) for m in ROUND for f in ftz]
    probes += [probe(f"{op}.{m}{f}.{t}", t, t) for op in ("rcp", "sqrt") for m in ROUND for f in ftz]
    probes += [probe(f"{op}{f}.{t}", t, t, t) for op in ("min", "max") for f in ftz]
    probes += [probe(f"{op}{f}.{t}", t, t, any_nan=True) for op in ("neg", "abs") for f in ftz]
    probes += [probe(f"copysign.{t}", t, t, t, any_nan=True)]
    if t == "f32":
        probes += [probe(f"{op}.sat.f32", t, t, t) for op in ("add", "sub", "mul")] + [
            probe("fma.rn.sat.f32", t, t, t, t)
        ]
        probes += [
            probe(f"{op}.f32", t, t, t)
            for op in ("min.NaN", "max.NaN", "min.xorsign.abs", "max.NaN.xorsign.abs")
        ]
    classes = ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    probes += [
        probe(
            f"testp.{c}.{t}", "u32", t, asm=f"{{ .reg .pred p; testp.{c}.{t} p, %1; selp.u32 %0, 1, 0, p; }}"
        )
        for c in classes
    ]
    return probes


def _half(t: str) -> list[Probe]:
    probes = []
    for u in (t, f"{t}x2"):
        probes += [probe(f"{op}{m}.{u}", u, u, u) for op in ("add", "sub", "mul") for m in ("", ".rn")]
        probes += [probe(f"fma.rn{m}.{u}", u, u, u, u) for m in ("", ".relu")]
        probes += [
            probe(f"{op}{n}.{u}", u, u, u) for op in ("min", "max") for n in ("", ".NaN", ".xorsign.abs")
        ]
        probes += [probe(f"{op}.{u}", u, u, any_nan=True) for op in ("neg", "abs")]
        if t == "f16":
            probes += [
                probe(f"{op}{m}.{u}", u, u, u)
                for op in ("add", "sub", "mul")
                for m in (".ftz", ".sat", ".ftz.sat")
            ]
            probes += [probe(f"fma.rn{m}.{u}", u, u, u, u) for m in (".ftz", ".sat", ".ftz.relu")]
            probes += [probe(f"{op}.ftz.{u}", u, u, u) for op in ("min", "max")]
        ex2 = f"ex2.approx.{u}" if t == "f16" else f"ex2.approx.ftz.{u}"
        probes += [probe(ex2, u, u, bound=("ulp", 2)), probe(f"tanh.approx.{u}", u, u, bound=("ulp", 2))]
    return probes


_COMPARE_INT = ("eq", "ne", "lt", "le", "gt", "ge")
_COMPARE_FLOAT = (*_COMPARE_INT, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _setp(name: str, t: str, third: str = "") -> Probe:
    """p + 2 * q, with the third operand as a predicate if the opcode has .and, .or or .xor."""
    take = "setp.ne.u32 c, %3, 0;" if third else ""
    if t in ("f16", "bf16"):  # these have no q
        return probe(name, "u32", t, t, asm=f"{{ .reg .pred p; {name} p, %1, %2; selp.u32 %0, 1, 0, p; }}")
    both = (
        f"{take} {name} p|q, %1, %2{', c' if third else ''}; selp.u32 x, 1, 0, p; selp.u32 y, 2, 0, q; "
        f"or.b32 %0, x, y;"
    )
    return probe(
        name,
        "u32",
        t,
        t,
        *([third] if third else []),
        asm=f"{{ .reg .pred p, q, c; .reg .u32 x, y; {both} }}",
    )


def _compare() -> list[Probe]:
    probes = [_setp(f"setp.{c}.{t}", t) for t in INTS for c in _COMPARE_INT]
    probes += [_setp(f"setp.{c}.{t}", t) for t in ("u16", "u32", "u64") for c in ("lo", "ls", "hi", "hs")]
    probes += [
        _setp(f"setp.{c}.{t}", t)
        for t in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2")
        for c in _COMPARE_FLOAT
    ]
    probes += [_setp(f"setp.{c}.ftz.f32", "f32") for c in _COMPARE_FLOAT]
    probes += [
        _setp(f"setp.lt.{b}.{t}", t, "flag") for b in ("and", "or", "xor") for t in ("s32", "f32", "f16x2")
    ]
    probes += [
        probe(f"set.{c}.{d}.{t}", d, t, t)
        for c in ("lt", "ltu", "ne", "nan")
        for t in ("f32", "f64")
        for d in ("u32", "f32")
    ]
    probes += [
        probe(f"set.{c}.{t}.{t}", t, t, t)
        for c in ("lt", "leu", "neu", "num")
        for t in ("f16", "f16x2", "bf16", "bf16x2")
    ]
    flag = "{ .reg .pred c; setp.ne.u32 c, %3, 0;"
    names = [f"set.lt.{b}.u32.s32" for b in ("and", "or", "xor")]
    probes += [
        probe(name, "u32", "s32", "s32", "flag", asm=f"{flag} {name} %0, %1, %2, c; }}") for name in names
    ]
    probes += [
        probe(f"selp.{t}", t, t, t, "flag", asm=f"{flag} selp.{t} %0, %1, %2, c; }}")
        for t in ("b16", "b32", "b64")
    ]
    probes += [probe(f"slct.{t}.{c}", t, t, t, c) for t in ("b32", "b64") for c in ("s32", "f32")]
    return probes


def _to_float() -> list[Probe]:
    probes = [probe(f"cvt.{m}.{t}.f32", t, "f32") for m in ("rn", "rz") for t in ("f16", "bf16")]
    probes += [probe(f"cvt.{m}.{d}.{s}", d, s) for m in ROUND for d, s in (("f32", "f64"), ("f16", "f64"))]
    probes += [probe(f"cvt.rn.relu.{t}.f32", t, "f32") for t in ("f16", "bf16")]
    probes += [
        probe(f"cvt.{m}{r}.{t}x2.f32", f"{t}x2", "f32", "f32")
        for m in ("rn", "rz")
        for r in ("", ".relu")
        for t in ("f16", "bf16")
    ]
    plain = """cvt.f32.f16 cvt.f32.bf16 cvt.f64.f16 cvt.f64.f32 cvt.ftz.f64.f32 cvt.rn.ftz.f32.f64
               cvt.rn.ftz.f16.f32 cvt.ftz.f32.f16
               cvt.rn.bf16.f64 cvt.rn.bf16.f16 cvt.sat.f32.f32 cvt.ftz.sat.f32.f32 cvt.sat.f16.f16
               cvt.sat.f64.f64"""
    probes += [probe(name, *name.split(".")[-2:]) for name in plain.split()]
    probes += [probe(f"cvt.{m}.tf32.f32", "f32", "f32") for m in ("rna", "rn", "rz")]
    probes += [
        probe(f"cvt.{m}.{t}.{t}", t, t)
        for m in ("rni", "rzi", "rmi", "rpi")
        for t in ("f16", "bf16", "f32", "f64")
    ]
    probes += [probe(f"cvt.{m}.ftz.f32.f32", "f32", "f32") for m in ("rni", "rzi", "rmi", "rpi")]
    kinds = (*INTS, "s8", "u8")
    probes += [probe(f"cvt.{m}.{d}.{s}", d, s) for m in ROUND for d in ("f32", "f64", "f16",
                                                                        "bf16") for s in kinds
               if (d, s[1:]) != ("bf16", "8")]  # fmt: skip
    return probes


def _holds(target: str, source: str) -> bool:
    """Whether one integer type has all values of another: then PTX has no cvt.sat between them."""
    same, room = target[0] == source[0], int(target[1:]) - int(source[1:])
    return room >= 0 if same else target[0] == "s" and room > 0


def _to_int() -> list[Probe]:
    modes, kinds = ("rni", "rzi", "rmi", "rpi"), (*INTS, "s8", "u8")
    probes = [probe(f"cvt.{m}.{d}.{s}", d, s) for m in modes for d in kinds for s in ("f32", "f64", "f16")]
    probes += [
        probe(f"cvt.{m}.{d}.bf16", d, "bf16")
        for m in modes
        for d in ("s16", "u16", "s32", "u32", "s64", "u64")
    ]
    probes += [probe(f"cvt.{m}.ftz.{d}.f32", d, "f32") for m in modes for d in ("s32", "u64")]
    probes += [probe(f"cvt.{d}.{t}", d, t) for d, t in itertools.permutations(kinds, 2)]
    probes += [
        probe(f"cvt.sat.{d}.{t}", d, t) for d, t in itertools.permutations(kinds, 2) if not _holds(d, t)
    ]
    return probes


def _approximate() -> list[Probe]:
    """Bounds as the PTX ISA and the CUDA guide state them, and one rounding more, since both sides are
    rounded."""
    probes = []
    for f, t in (("", "f32"), (".ftz", "f32")):
        probes += [
            probe(f"{op}.approx{f}.f32", "f32", t, bound=("ulp", n))
            for op, n in (("ex2", 3), ("rcp", 2), ("rsqrt", 3), ("sqrt", 3))
        ]
        probes += [probe(f"lg2.approx{f}.f32", "f32", t, bound=("lg2", 2.0**-22))]
        probes += [
            probe(f"{op}.approx{f}.f32", "f32", "f32.angle", bound=("abs", 2.0**-20.5))
            for op in ("sin", "cos")
        ]
        probes += [probe(f"div.approx{f}.f32", "f32", "f32.normal", "f32.divisor", bound=("ulp", 3))]
        probes += [probe(f"div.full{f}.f32", "f32", "f32.normal", "f32.divisor", bound=("ulp", 3))]
    probes += [probe("tanh.approx.f32", "f32", "f32", bound=("rel", 2.0**-10.9))]
    seeds = ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64")
    probes += [probe(name, "f64", "f64.normal", bound=("rel", 2.0**-19)) for name in seeds]
    return probes


GROUPS: dict[str, list[Probe]] = {
    "integer": _integer(),
    "logic and shifts": _logic(),
    "fields": _fields(),
    "float32": _float("f32"),
    "float64": _float("f64"),
    "float16": _half("f16"),
    "bfloat16": _half("bf16"),
    "compare": _compare(),
    "cvt to float": _to_float(),
    "cvt to int": _to_int(),
    "approximate": _approximate(),
}


def source_of(probes: list[Probe], name: str) -> str:
    """The kernel `name(out, in, n)`: out[probe][i] from in[type][operand][i], all as 64-bit words."""
    types, lines = types_of(probes), []
    for row, p in enumerate(probes):
        places = [f"in[({types.index(t)} * 3 + {j}) * n + i]" for j, t in enumerate(p.operands)]
        loads = [
            f'"{_CONSTRAINT[_size(t)]}"(({_CTYPE[_size(t)]}){place})'
            for t, place in zip(p.operands, places, strict=True)
        ]
        size = _size(p.result)
        asm = f'asm volatile("{p.asm}" : "={_CONSTRAINT[size]}"(d) : {", ".join(loads)});'
        lines.append(f"    {{ {_CTYPE[size]} d; {asm} out[{row} * n + i] = d; }}")
    head = f'extern "C" __global__ void {name}(long long* out, const long long* in, int n)'
    return "\n".join([f"{head} {{", "    int i = blockIdx.x * blockDim.x + threadIdx.x;", *lines, "}"])


_CONSTRAINT = {16: "h", 32: "r", 64: "l"}
_CTYPE = {16: "unsigned short", 32: "unsigned", 64: "unsigned long long"}


def _size(type_: str) -> int:
    """Bits of a register for the type."""
    plain = plain_type(type_)
    return 32 if plain.endswith("x2") else max(16, width(plain))


def types_of(probes: list[Probe]) -> list[str]:
    return sorted({t for p in probes for t in p.operands})


def inputs_of(probes: list[Probe]) -> np.ndarray:
    return np.stack([operand_bits(t) for t in types_of(probes)]).view(np.int64)


# ---- judging


def _values(type_: str, bits: np.ndarray) -> np.ndarray:
    plain = plain_type(type_)
    if plain.endswith("x2"):
        return np.stack([_values(plain[:-2], bits >> np.uint64(s) & np.uint64(0xFFFF)) for s in (0, 16)])
    raw = bits.astype(KINDS[width(plain)])
    if plain == "bf16":
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[plain])


def _ulp(type_: str, x: np.ndarray) -> np.ndarray:
    digits, most, _ = SHAPES[plain_type(type_).removesuffix("x2")]
    return np.ldexp(1.0, np.maximum(np.frexp(np.abs(x))[1] - 1, 1 - most) - digits + 1)


def agree(p: Probe, ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Where the simulator's results (64-bit words) and the GPU's are as near as they must be."""
    same = ours == theirs
    if p.bound is None and not p.any_nan:
        return same
    x, y = (_values(p.result, bits).astype(np.float64) for bits in (ours, theirs))
    equal = x == y if p.bound else same
    near = equal | (np.isnan(x) & np.isnan(y))
    if p.bound:
        kind, limit = p.bound
        ulp = _ulp(p.result, np.where(np.isfinite(y), y, 0))
        size = np.abs(np.where(np.isfinite(y), y, 0))
        allowed = {
            "ulp": limit * ulp,
            "abs": limit + ulp,
            "rel": limit * size + ulp,
            "lg2": limit * np.maximum(1, size) + ulp,
        }[kind]
        near |= np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= allowed)
    return near if near.ndim == 1 else near.all(axis=0)


def differences(probes: list[Probe], inputs: np.ndarray, ours: np.ndarray, theirs: np.ndarray) -> list[str]:
    """A line for each instruction whose results disagree, with up to four examples. `ours` and `theirs`:
    (probes, N)."""
    types, lines = types_of(probes), []
    mask = {16: 0xFFFF, 32: 0xFFFFFFFF, 64: (1 << 64) - 1}
    for p, our, their in zip(probes, ours.view(np.uint64), theirs.view(np.uint64), strict=True):
        with np.errstate(all="ignore"):
            wrong = np.flatnonzero(~agree(p, our, their))
        if len(wrong):
            shown = []
            for i in wrong[:: max(1, len(wrong) // 4)][:4]:
                args = ", ".join(
                    f"{int(inputs[types.index(t), j, i]) & mask[_size(t)]:#x}"
                    for j, t in enumerate(p.operands)
                )
                shown.append(f"({args}): GPU {int(their[i]):#x}, simulator {int(our[i]):#x}")
            lines.append(f"{p.name}: {len(wrong)} of {len(our)} differ\n      " + "\n      ".join(shown))
    return lines
