"""`cukern sim`: a kernel of any .cu file from the command line."""

import pytest
from test_cli import call, refused

TEXT = """
#include <cstdio>
namespace mine {
__global__ void scale(float* y, const float* x, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        y[i] = a * x[i];
        if (x[i] > 1e6f)
            y[i + 1] = 0;  // far
    }
}
}
template <class T> __global__ void count(T* total, const T* x) { atomicAdd(total, x[threadIdx.x]); }
__global__ void take(float2* y, float2 v, const float* x, bool swap) {
    y[threadIdx.x] = x && swap ? make_float2(v.y, v.x) : v;
}
int main() { mine::scale<<<1, 2>>>(nullptr, nullptr, 1, 2); }
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "scale.cu"
    path.write_text(TEXT)
    return path


def sim(file, kernel, args, *options, status=0):
    return call("sim", file, kernel, "--args", args, *options, status=status).stdout


def test_a_right_kernel(file):
    out = sim(file, "scale", "f32:100 f32:100=iota 0.5 100", "--grid", 2, "--block", "64")
    assert (
        "y  float32 100: 0 to 49.5, 0 NaN\n" in out
        and "<<<grid 2, block 64>>>: no faults" in out
        and "executed" not in out
    )


def test_faults_and_status(file):
    out = sim(file, "scale", "f32:100 f32:90 0.5 100", "--grid", "2,1", "--block", 64, status=1)
    assert (
        "OutOfBounds: mine::scale, block (1, 0, 0), thread (26, 0, 0)" in out and "which has 360 bytes" in out
    )
    assert ": 2 faults" in out  # x is read in two lines
    assert sim(file, "scale", "f32:100 f32:90 0.5 100", "--grid", "2,1", "--block", 64, status=1) == out


def test_coverage(file):
    out = sim(file, "scale", "f32:100 f32:100 2 64", "--block", 64, "--coverage")
    assert f"not executed: {file}:9  y[i + 1] = 0;  // far\n" in out and "lines executed" in out
    assert "144 of 400 bytes not written" in out and "36 NaN" in out
    assert f"a branch went one way: {file}:6" in out


@pytest.mark.parametrize("fill, total", [("=0", "3 to 3"), ("=-4", "-1 to -1")])
def test_what_is_filled(file, fill, total):
    assert f"total  int32 1: {total}, 0 NaN\n" in sim(
        file, "count<int>", f"i32:1{fill} i32:3=1", "--block", 3
    )


def test_an_output_that_is_read_first(file):
    assert "Uninitialized: count<int>" in sim(file, "count<int>", "i32:1 i32:32", status=1)


def test_vectors_null_and_flags(file):
    assert ": 1 to 2, 0 NaN" in sim(file, "take", "f32:32x2 1,2 null true")
    assert ": 1 to 2, 0 NaN" in sim(file, "take", "f32:32x2 1,2 f32:1 true")


def test_random_inputs_depend_on_the_seed(file):
    outs = [sim(file, "scale", "f32:8 f32:8 1 8", "--seed", seed) for seed in (0, 0, 1)]
    assert outs[0] == outs[1] != outs[2]


@pytest.mark.parametrize(
    "word", ["f16:4", "bf16:4", "f64:4", "i8:4=-3", "u8:4=200", "i64:4=iota", "e4m3:4=2", "bool:4=1"]
)
@pytest.mark.parametrize("direction", ["in", "out"])
def test_every_type(tmp_path, word, direction):
    path = tmp_path / "any.cu"
    path.write_text(
        "__global__ void k(void* out, const void* x) { ((char*)out)[threadIdx.x] = ((const "
        "char*)x)[threadIdx.x]; }"
    )
    arguments = f"u8:4 {word}" if direction == "in" else f"{word} u8:4"
    assert "no faults" in sim(path, "k", arguments, "--block", 4)


WRONG = [
    (
        "scale",
        "f32:4 f32:4 1",
        (),
        "takes 4 arguments (float* y, const float* x, float a, int n), got 3 in --args",
    ),
    ("scale", "f32:4 f32:-4 1 4", (), "'f32:-4' for const float* x must be a tensor"),
    ("scale", "f32:4 f33:4 1 4", (), "the type of 'f33:4' must be one of f16,"),
    (
        "scale",
        "f32:4 i32:4 1 4",
        (),
        "the argument for const float* x must be torch.float32, it is torch.int32",
    ),
    (
        "scale",
        "f32:4 f32:4=one 1 4",
        (),
        "'f32:4=one': it must end in a number or one of rand, iota, empty, got 'one'",
    ),
    ("scale", "f32:4 i32:4=1.5 1 4", (), "'i32:4=1.5': 1.5 does not fit its elements"),
    ("scale", "f32:4 f32:9999999x9999999 1 4", (), "GiB, there are"),
    ("scale", "f32:4 f32:4 1 4.5", (), "4.5"),
    ("scale", "f32:4 f32:4 1 four", (), "'four' for int n is no number"),
    (
        "scale",
        "f32:4 f32:4 1 4",
        ("--grid", "0"),
        "--grid must be one to three positive sizes such as 4,2, got '0'",
    ),
    ("scale", "f32:4 f32:4 1 4", ("--block", "2,2,2,2"), "--block must be"),
    ("scale", "f32:4 f32:4 1 4", ("--block", "2048"), "2048"),
    ("scale", "f32:4 f32:4 1 4", ("--shared", "-1"), "--shared must be at least 0, got -1"),
    ("scale", "f32:4 f32:4 1 4", ("--seed", "-1"), "--seed must be"),
    ("nope", "1", (), "has no __global__ function 'nope'; it has mine::scale"),
]


@pytest.mark.parametrize("kernel, args, options, words", WRONG)
def test_what_it_refuses(file, kernel, args, options, words):
    assert words in refused("sim", file, kernel, "--args", args, *options)


def test_files_that_are_not_there(tmp_path):
    assert "No such file" in refused("sim", tmp_path / "none.cu", "--args", "1")


PTX = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x, .param .u64 .ptr .global .align 1 y, .param .u32 n, .param .f32 a)
{
    .reg .pred %p<2>;
    .reg .b32 %r<3>;
    .reg .b64 %rd<6>;
    .reg .f32 %f<4>;
    ld.param.u64 %rd1, [x];
    ld.param.u64 %rd2, [y];
    ld.param.u32 %r1, [n];
    ld.param.f32 %f1, [a];
    mov.u32 %r2, %tid.x;
    setp.ge.s32 %p1, %r2, %r1;
    @%p1 bra DONE;
    mul.wide.s32 %rd3, %r2, 4;
    add.s64 %rd4, %rd1, %rd3;
    add.s64 %rd5, %rd2, %rd3;
    ld.global.f32 %f2, [%rd4];
    mul.f32 %f3, %f2, %f1;
    st.global.f32 [%rd5], %f3;
DONE:
    ret;
}
"""


def test_ptx(tmp_path):
    path = tmp_path / "twice.ptx"
    path.write_text(PTX)
    out = call("sim", path, "--args", "f32:40=iota f32:40=empty 40 0.5", "--block", 64).stdout
    assert "y  float32 40: 0 to 19.5, 0 NaN" in out and "<<<grid 1, block 64>>>: no faults" in out
    out = call("sim", path, "twice", "--args", "f32:40 f32:40=empty 41 1", "--block", 64, status=1).stdout
    assert "OutOfBounds: twice, block (0, 0, 0), thread (40, 0, 0)" in out and "argument 'x'" in out
    assert "has no entry 'thrice'; its entries: twice" in call("sim", path, "thrice", status=2).stderr
    assert (
        "twice takes 4 arguments (.u64 x, .u64 y, .u32 n, .f32 a), got 1 in --args"
        in call("sim", path, "twice", "--args", "f32:4", status=2).stderr
    )
    path.write_text(PTX.replace(".u64 .ptr .global .align 1 y", ".align 8 .b8 y[24]"))
    assert (
        "'f32:40=empty' for .align 8 .b8 y[24] is no number"
        in call("sim", path, "--args", "f32:40 f32:40=empty 40 0.5", status=2).stderr
    )


TRITON = """
import triton
import triton.language as tl

@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i), mask=i < n)
"""


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION", "ignore:cukern.sim.triton is tested with")
def test_triton(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    # else a fault may name the file of an earlier run
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    path = tmp_path / "own.py"
    path.write_text(TRITON)
    words = "f32:1000=iota f32:1024=1 f32:1000=empty 1000 BLOCK=256 num_warps=2"
    out = call(
        "sim", path, "--triton", "add", "--args", words, "--grid", 4, "--arch", "sm_80", "--coverage"
    ).stdout
    assert (
        "out  float32 1000: 1 to 1000, 0 NaN" in out
        and "add <<<grid 4>>>: no faults" in out
        and "3 of 3 lines executed" in out
    )
    out = call(
        "sim", path, "--triton", "add", "--args", words.replace("1024", "1000"), "--grid", 4, status=1
    ).stdout
    assert "OutOfBounds: add, block (3, 0, 0)" in out and f"{path}:8: reads" in out and "argument 'y'" in out
    assert (
        "has no Triton kernel 'sub'; its @triton.jit functions: add"
        in call("sim", path, "--triton", "sub", status=2).stderr
    )
    assert (
        "arch must be one of sm_80"
        in call("sim", path, "--triton", "add", "--arch", "sm_70", status=2).stderr
    )
