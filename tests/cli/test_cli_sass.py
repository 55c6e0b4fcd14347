"""`cukern sass`: machine instructions by kind and source line."""

import itertools
import re

import pytest
import torch
from test_cli import call, refused

from cukern.cli import sass
from cukern.ops.attention import wgmma
from cukern.runtime.compile.compiler import SetupError

LISTING = """
\t//## File "/tmp/a.cu", line 3
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 IMAD.WIDE R2, R3, 0x4, R4 ;
\t//## File "/tmp/b.cuh", line 7 inlined at "/tmp/a.cu", line 4
        /*0020*/               @P1 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   STL [R1], R4 ;
        /*0040*/                   FFMA R4, R4, R4, RZ ;
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ ;
        /*0060*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0070*/                   EXIT ;
        /*0080*/                   NOP;
"""


def test_instructions_by_kind_and_line():
    kinds, places = sass.counted(LISTING)
    assert kinds == {
        "moves and constants": 1,
        "integers and addresses": 1,
        "global memory": 1,
        "local memory (spills)": 1,
        "float32": 1,
        "tensor cores": 1,
        "barriers and shuffles": 1,
        "branches": 1,
    }
    assert places == {("a.cu", 3): 2, ("b.cuh", 7): 6}


def test_source_lines_fit_the_terminal(monkeypatch, tmp_path):
    """The column of the text is cut, not those before it."""
    file = tmp_path / "a.cu"
    file.write_text(
        f"__global__ void k(float* x) {{\n    x[0] = 1;\n    x[1] = {' + '.join('1' * 40)};\n}}\n"
    )
    monkeypatch.setattr(sass, "disassembler", lambda: "")
    monkeypatch.setattr(sass, "disassembled", lambda program, code: LISTING)
    out = call("sass", file).stdout
    assert (
        "source line  instructions  text" in out
        and "a.cu:3 " in out
        and max(map(len, out.splitlines())) <= 80
    )


def test_without_nvdisasm_the_cure_is_named(monkeypatch):
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sass, "find_spec", lambda name: None)
    assert 'pip install "cukern[sass]"' in refused("sass", "square")


def test_the_wheel_of_nvdisasm_is_found(monkeypatch, tmp_path):
    for name in ("CUDA_HOME", "CUDA_PATH", "PATH"):
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "nvidia/cu99/bin/nvdisasm"
    program.parent.mkdir(parents=True)
    program.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert sass.disassembler() == str(program)


@pytest.fixture
def nvdisasm():
    try:
        sass.disassembler()
    except SetupError:
        pytest.skip("needs nvdisasm")


def test_kernels_of_a_cu_file(nvdisasm, tmp_path):
    file = tmp_path / "twice.cu"
    file.write_text(
        "template <typename T>\n__global__ void twice(T* x) {\n    x[threadIdx.x] *= 2;  // "
        + "a long comment " * 9
        + "\n}\n"
    )
    out = call("sass", file, "--kernel", "twice<float>", "--arch", "sm_90a").stdout
    assert "twice<float> for sm_90a" in out and "twice.cu:3" in out and "x[threadIdx.x] *= 2;" in out
    assert all(len(row) <= 80 for row in out.splitlines())
    assert "only templates" in refused("sass", file)


def test_kernels_of_an_op(nvdisasm):
    out = call("sass", "square", "--arch", "sm_90a", "--kernel", "square_v2<float, 4>").stdout
    assert "registers, no spills" in out
    assert "global memory" in out and "square.cu:" in out and "return T(load_as(x) * load_as(x));" in out
    assert all(len(row) <= 80 for row in out.splitlines())
    assert "square has no kernel with 'v9'" in refused("sass", "square", "--kernel", "v9")
    assert "--arch must be names such as" in refused("sass", "square", "--arch", "sm_70")


@pytest.mark.slow
def test_the_products_of_attention_wait_for_no_moves():
    """wgmma reads its descriptors from uniform registers. If the compiler keeps an address elsewhere, it
    moves it (R2UR) before each product."""
    try:
        program = sass.disassembler()
    except SetupError as error:
        pytest.skip(str(error))
    chosen = r"v4<\w+, (64, 64|128),.*false, false>|bwd<true, \w+, 64,.*false, false>|ordered"
    kernels = [k for k in wgmma.instances(torch.bfloat16) if re.search(chosen, k.name)]
    assert len(kernels) == 4
    for kernel in kernels:
        rows = sass.disassembled(program, kernel.compile("sm_90a").code).splitlines()
        products = [i for i, row in enumerate(rows) if "HGMMA" in row]
        moves = [sum("R2UR" in row for row in rows[a:b]) for a, b in itertools.pairwise(products)]
        assert len(moves) > 14 and sum(moves) <= 1, kernel.name  # one between two loops
