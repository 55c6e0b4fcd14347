"""Reading PTX: declarations, scopes, literals, operands, lines; and what is said of a text that is no PTX."""

import struct

import pytest
import torch

from cukern.ops.matmul.versions import VERSIONS as MATMUL
from cukern.ops.square import VERSIONS as SQUARE
from cukern.runtime.compile.compiler import compile_ptx
from cukern.runtime.compile.sources import Source
from cukern.sim.instructions.decode import instruction
from cukern.sim.instructions.tables import INSTRUCTIONS
from cukern.sim.machine.program import Program
from cukern.sim.ptx.module import (
    Address,
    Immediate,
    PtxError,
    Register,
    Symbol,
    Vector,
    immediate_bits,
    immediate_value,
)
from cukern.sim.ptx.parser import parse

HEAD = ".version 8.8\n.target sm_90\n.address_size 64\n"


def body(code: str, head: str = ""):
    """The kernel `k` with this code."""
    return parse(
        f"{HEAD}{head}\n.visible .entry k(.param .u64 k_param_0, .param .u32 "
        f"k_param_1)\n{{\n{code}\nret;\n}}\n"
    ).kernels["k"]


def bits_of(value: float, form: str) -> int:
    return int.from_bytes(struct.pack("<" + form, value), "little")


@pytest.mark.parametrize(
    "text, type_, bits",
    [
        ("0f3F800000", "f32", 0x3F800000),
        ("0d3FF8000000000000", "f64", 0x3FF8000000000000),
        ("0f3FC00000", "f64", bits_of(1.5, "d")),
        ("0d3FF8000000000000", "f32", bits_of(1.5, "f")),
        ("1.5", "f32", bits_of(1.5, "f")),
        ("-2.25", "f64", bits_of(-2.25, "d")),
        ("42", "u32", 42),
        ("-1", "b32", 0xFFFFFFFF),
        ("-4294967296", "b64", 0xFFFFFFFF00000000),
        ("-3", "s16", 0xFFFD),
        ("0x1F79U", "b16", 0x1F79),
        ("0X80000000U", "b32", 0x80000000),
        ("-0x10", "s64", (1 << 64) - 16),
        ("017", "u32", 15),
        ("0", "u64", 0),
        ("1", "pred", 1),
    ],
)
def test_literals(text, type_, bits):
    assert immediate_bits(Immediate(text), type_) == bits


def test_values_of_literals():
    assert (
        immediate_value(Immediate("-12")) == -12
        and immediate_value(Immediate("0x1F")) == 31
        and immediate_value(Immediate("2.5")) == 2.5
    )


def test_operands_of_every_form():
    kernel = body("""
    .reg .pred %p<3>;
    .reg .b16 %rs<5>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<4>;
    @%p1 ld.global.v2.u32 {%r1, _}, [%rd1+-8];
    @!%p2 st.shared.u32 [table+12], %r2;
    setp.lt.and.s32 %p1|%p2, %r1, -5, !%p0;
    mov.b32 %r3, {%rs1, %rs2};
    mov.u32 %r4, %tid.x;
    mov.u64 %rd2, table+4;
    ld.u8 %rs3, [16];
    atom.add.noftz.f16x2 %r1,[%rd1],%r2;
    cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;
    bra.uni $L_1;
$L_1:
""")
    load, store, setp, pack, special, symbol, byte, atom, copy, bra = kernel.code[:-1]
    p, rs, r, rd = (
        lambda i, base=base, width=width: Register(base + i, width)
        for base, width in ((0, 1), (3, 16), (8, 32), (17, 64))
    )
    assert (
        load.operands == (Vector((r(1), Symbol("_"))), Address(rd(1), -8))
        and load.guard == p(1)
        and load.opcode == "ld.global.v2.u32"
    )
    assert store.operands == (Address(Symbol("table"), 12), r(2)) and store.guard == p(2)._replace(
        negated=True
    )
    assert setp.operands == (Vector((p(1), p(2))), r(1), Immediate("-5"), p(0)._replace(negated=True))
    assert pack.operands == (r(3), Vector((rs(1), rs(2))))
    assert special.operands == (r(4), Symbol("%tid.x")) and symbol.operands == (rd(2), Symbol("table", 4))
    assert byte.operands == (rs(3), Address(None, 16)) and atom.operands == (r(1), Address(rd(1), 0), r(2))
    assert copy.opcode == "cp.async.cg.shared.global.L2::128B" and copy.operands[2] == Immediate("16")
    assert bra.operands == (Symbol("$L_1"),) and kernel.labels == {"$L_1": 10}
    assert [kernel.widths[i] for i in (0, 3, 8, 17)] == [1, 16, 32, 64] and len(kernel.widths) == 21


def test_inner_scopes_have_registers_of_their_own():
    kernel = body("""
    .reg .b32 %r<2>;
    .reg .pred %p<1>;
    { .reg.b32 f, %r1; mov.b32 f, %r0; { .reg .b16 f; mov.b16 f, 1; } mov.b32 %r1, f; }
    mov.b32 %r1, %r0;
""")
    first, second, third, last = kernel.code[:-1]
    outer, inner, deepest = last.operands[0], first.operands[0], second.operands[0]
    assert (
        outer != third.operands[0]
        and inner == third.operands[1]
        and deepest not in (inner, outer)
        and deepest.width == 16
    )


def test_variables_and_their_values():
    module = parse(
        HEAD
        + """
.global .align 4 .u32 counter = 7;
.const .align 4 .b8 bytes[16] = {0, 0, 128, 63, 255};
.global .align 8 .f64 values[2] = {0d3FF0000000000000, 2.5};
.global .align 1 .b8 $str[6] = {104, 101, 108, 108, 111};
.global .align 8 .u64 pointers[2] = {generic($str), counter+4};
.extern .shared .align 16 .b8 dynamic[];
.shared .align 4 .b8 matrix[4][8];
.extern .func (.param .b32 func_retval0) vprintf (.param .b64 a, .param .b64 b);
.func helper(.param .b32 a) { .reg .b32 %r<2>; ret; }
.entry k() { ret; }
"""
    )
    counter, data, values, text, pointers, dynamic, matrix = module.variables
    assert (counter.space, counter.size, counter.data) == ("global", 4, b"\7\0\0\0")
    assert (data.space, data.size, data.data) == ("const", 16, b"\0\0\x80?\xff")
    assert values.data == struct.pack("<2d", 1, 2.5) and text.data == b"hello" and text.size == 6
    assert pointers.pointers == [(0, Symbol("$str")), (8, Symbol("counter", 4))] and pointers.size == 16
    assert (dynamic.space, dynamic.size, dynamic.align) == ("shared", 0, 16) and matrix.size == 32
    assert list(module.kernels) == ["k"] and len(module.kernels["k"].code) == 1


def test_parameters_lie_as_c_lays_them_out():
    text = (
        ".visible .entry k(.param .u8 a, .param .f64 b, .param .u16 c, .param .u32 d, .param .align 8 .b8 "
        "e[12], .param .u64 f) { ret; }"
    )
    assert list(Program(parse(HEAD + text), "k").params.values()) == [0, 8, 16, 20, 24, 40]


def test_variables_lie_at_multiples_of_their_alignment():
    declared = ".shared .align 1 .b8 a[3]; .shared .align 8 .b8 b[8]; .shared .align 2 .u16 c;"
    declared += ".local .align 4 .b8 d[5]; .local .align 16 .b8 e[4];"
    program = Program(
        parse(HEAD + ".extern .shared .align 16 .b8 f[];\n.entry k() {" + declared + "ret; }"), "k"
    )
    at = {name: address for name, (_, address) in program.addresses.items()}
    assert (
        at == {"a": 0, "b": 8, "c": 16, "d": 0, "e": 16, "f": 32}
        and program.shared_size == 18
        and program.local_size == 20
    )


def test_launch_bounds():
    assert (
        parse(HEAD + ".entry k() .maxntid 16, 8, 2 .minnctapersm 3 { ret; }").kernels["k"].max_threads == 256
    )


def test_lines_name_each_place_that_was_inlined():
    kernel = parse(
        HEAD
        + """
.entry k() {
    .reg .b32 %r<2>;
    .loc 1 10 0
    mov.u32 %r1, 0;
    .loc 2 5 3, function_name $L__info_string0, inlined_at 1 12 5
    mov.u32 %r1, 1;
    .loc 3 7 1, function_name $L__info_string1, inlined_at 2 5 3
    mov.u32 %r1, 2;
    .loc 1 0 3
    mov.u32 %r1, 3;
    ret;
}
    .file 1 "/src/k.cu"
    .file 2 "/src/a.cuh"
    .file 3 "/elsewhere/<cukern.compile 0123>"
    .section .debug_str
    {
$L__info_string0:
.b8 95,90,0
    }
"""
    )
    places = [kernel.location(i.line) for i in kernel.kernels["k"].code]
    assert places[0] == "/src/k.cu:10"
    assert places[1] == "/src/a.cuh:5 (inlined at /src/k.cu:12)"
    assert places[2] == "<cukern.compile 0123>:7 (inlined at /src/a.cuh:5, /src/k.cu:12)"
    assert places[3] == places[2], "line 0 belongs to what is before it"


@pytest.mark.parametrize(
    "code, line, what",
    [
        ("mov.u32 %r1 0;", 7, "';' expected"),
        (".reg .b33 %r<3>;", 7, "a type of registers expected"),
        ("@%p1 bra x;", 7, "%p1 is no register"),
        ("\n\n mov.u32 %r, *;", 9, "an operand expected"),
        ("ld.u32 %r, [%rd+x];", 7, "a number expected"),
        ("5;", 7, "an instruction expected"),
    ],
)
def test_a_text_that_is_no_ptx(code, line, what):
    with pytest.raises(PtxError, match=rf"PTX line {line}: {what}"):
        body(code)


@pytest.mark.parametrize(
    "text",
    [
        ".entry k() {",
        ".entry k(",
        "nonsense",
        ".section .x {",
        ".global .u32 x",
        '.entry k() { mov.u32 %r, "',
    ],
)
def test_a_text_that_ends_too_early(text):
    with pytest.raises(PtxError, match="PTX line"):
        parse(HEAD + text)


@pytest.mark.parametrize(
    "versions, dtype",
    [(SQUARE, torch.float16), (SQUARE, torch.bfloat16), (MATMUL, torch.float32), (MATMUL, torch.float64)],
)
def test_every_instruction_of_the_shipped_kernels_is_known(versions, dtype):
    for version in versions.values():
        for kernel in list(version.instances(dtype))[:4]:
            ptx = compile_ptx(kernel.source, kernel.name)
            program = Program(parse(ptx.text), ptx.symbol)
            steps = [
                (i.opcode, instruction(program, pc, INSTRUCTIONS, INSTRUCTIONS.base(i.opcode))[0])
                for pc, i in enumerate(program.kernel.code)
            ]
            assert not {
                opcode for opcode, step in steps if "not_simulated" in getattr(step, "__qualname__", "")
            }, kernel.name


def test_source_text_is_named_as_python_names_it():
    source = Source.from_text("__global__ void k(int* x) {\n    *x = 1;\n}\n")
    ptx = compile_ptx(source, "k")
    module = parse(ptx.text)
    assert module.location(module.kernels[ptx.symbol].code[-2].line) == f"{source.path}:2"
