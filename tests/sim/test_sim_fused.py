"""Generated functions for stretches of arithmetic give the bits that the instructions give one by one."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cukern import sim
from cukern.runtime.compile.compiler import Ptx
from cukern.runtime.compile.signature import Param
from cukern.sim.instructions import fused
from cukern.sim.numerics import alu
from cukern.sim.numerics.integers import UNSIGNED
from cukern.sim.ptx.module import Register

SPECIAL = [
    0, 1, 0x80000000, 0x80000001, 0x7FFFFF, 0x800000, 0x80800000, 0x3F800000, 0xBF800000, 0x3F800001,
    0x33800000, 0x4B400001,
]  # fmt: skip
SPECIAL += [
    0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFABCDEF,
    0x3F000000, 0xC2AEAC50,
]  # fmt: skip
BINARY = ["add.f32", "sub.rn.f32", "mul.f32", "div.rn.f32", "max.f32", "min.f32"]
INTEGER = [
    "add.s32", "sub.u32", "mul.lo.s32", "and.b32", "or.b32", "xor.b32", "min.s32", "max.u32", "shl.b32",
    "shr.s32", "prmt.b32",
]  # fmt: skip
OPERANDS = {"fma": 3, "selp": 3, "prmt": 3, "mad": 3}


def patterns(rng: np.random.Generator, count: int) -> np.ndarray:
    """Special values, moderate numbers, and random bits."""
    moderate = rng.normal(0, 4, count).astype(np.float32).view(np.uint32)
    bits = np.where(rng.random(count) < 0.5, moderate, rng.integers(0, 1 << 32, count, dtype=np.uint32))
    return np.where(rng.random(count) < 0.5, rng.choice(np.array(SPECIAL, np.uint32), count), bits)


def compare(
    program: list[tuple[str, int, list[int]]],
    registers: dict[int, np.ndarray],
    constants: dict[int, np.ndarray],
) -> None:
    """Run (opcode, target, sources) one by one and as one function."""
    steps = [
        (
            opcode,
            fused.Compute(
                [(alu.find(opcode), Register(target, 1 if opcode.startswith("setp") else 32))], sources
            ),
        )
        for opcode, target, sources in program
    ]
    results = []
    for runs in (0, fused._RUNS):
        regs = dict(registers)
        lanes = np.arange(len(next(iter(registers.values()))))
        m: Any = SimpleNamespace(
            regs=regs,
            get=lambda group, r, regs=regs: regs[r],
            put=lambda group, r, v, regs=regs: regs.update({r: v}),
        )
        one = fused.Fused(steps, [target for _, target, _ in program], constants)
        one.runs = runs
        with np.errstate(all="ignore"):
            one(m, SimpleNamespace(whole=True, lanes=lanes))
        results.append(regs)
    for register in results[0]:
        a, b = np.broadcast_arrays(results[0][register], results[1][register])
        assert a.dtype == b.dtype and b.ndim == 1
        np.testing.assert_array_equal(a, b, str(program))


@pytest.mark.parametrize("opcode", [*fused._TEMPLATES, *INTEGER])
def test_instruction(opcode):
    """Operands are arrays, one constant, or one value for all lanes."""
    count, rng = (
        OPERANDS.get(
            opcode.split(".")[0], 1 if opcode.split(".")[0] in ("neg", "abs", "sqrt", "ex2", "cvt") else 2
        ),
        np.random.default_rng(1),
    )
    for fixed in range(-1, count):
        for uniform in range(-1, count):
            for _ in range(8):
                registers = {i: patterns(rng, 1 if i in (fixed, uniform) else 64) for i in range(count)} | {
                    9: np.arange(64, dtype=np.uint32)
                }
                constants = {fixed: registers[fixed]} if fixed >= 0 else {}
                compare([(opcode, 4, list(range(count)))], {9: registers[9], **registers}, constants)


@pytest.mark.parametrize("seed", range(40))
def test_stretch(seed):
    """A NaN that is not yet canonical must be so where a sign or bits of it are read; a register may be
    written again."""
    rng, program = np.random.default_rng(seed), []
    names = [
        *BINARY, *INTEGER, "fma.rn.f32", "fma.rm.f32", "ex2.approx.ftz.f32", "cvt.sat.f32.f32", "neg.f32",
        "abs.f32", "mov.b32", "sqrt.rn.f32",
    ]  # fmt: skip
    for _ in range(24):
        opcode = str(rng.choice(names))
        base = opcode.split(".")[0]
        count = OPERANDS.get(base, 1 if base in ("neg", "abs", "sqrt", "ex2", "cvt", "mov") else 2)
        program.append((opcode, int(rng.integers(0, 8)), rng.integers(0, 10, count).tolist()))
    registers = {r: patterns(rng, 64) for r in range(8)} | {8: patterns(rng, 1), 9: patterns(rng, 1)}
    assert {r.dtype for r in registers.values()} == {np.dtype(UNSIGNED[32])}
    compare(program, registers, {8: registers[8]})


@pytest.mark.parametrize("opcode", ["max", "min"])
def test_three_operands(opcode):
    """The largest or smallest of three values, of sm_100, also once the stretch is a generated function."""
    ptx = f"""
.version 8.8
.target sm_100
.address_size 64
.visible .entry third(.param .u64 out) {{
    .reg .b32 %r<3>;
    .reg .f32 %f<6>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    cvt.rn.f32.u32 %f1, %r1;
    neg.f32 %f2, %f1;
    add.f32 %f3, %f1, %f1;
    sub.f32 %f4, %f2, %f1;
    {opcode}.f32 %f5, %f1, %f2, %f{3 if opcode == "max" else 4};
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f5;
    ret;
}}
"""
    launch = sim.load("third", Ptx(ptx, "third"), (Param("out", "float", pointer=True),))
    for _ in range(8):
        out = torch.full((32,), math.nan)
        with sim.memory.scope([out]):
            launch((1, 1, 1), (32, 1, 1), 0, out.data_ptr())
        assert torch.equal(out, torch.arange(32.0) * (2 if opcode == "max" else -2))
