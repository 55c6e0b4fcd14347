"""Code that is compiled already, PTX and cubins, and the variables of kernels."""

import ctypes

import pytest
import torch
from helpers import DEVICE, gpu, kernels, no_gpu

import cukern
from cukern.runtime.compile import machine_code
from cukern.runtime.compile.compiler import SetupError, arch_of

TABLE = """
namespace n { __constant__ double offset = 0.5; }
__constant__ float table[4] = {1, 2, 3, 4};
__device__ int launches;
template <typename T> __device__ T last;
__global__ void look_up(float* out, int i) {
    static __device__ int calls;
    out[0] = table[i] + n::offset, launches += 1, calls += 2, last<int> = i, last<float> = out[0];
}
__global__ void read(float* out) { out[0] = table[0]; }
"""
MIX = """
struct Pair { int a; double b; };
__global__ void mix(float* out, const float* x, long long n, int shift, Pair p, float s, unsigned char c,
                    bool flip) {
    __shared__ float held[32];
    int i = threadIdx.x;
    held[i] = i < n ? x[i] : 0;
    __syncthreads();
    out[i] = held[(i + 32 + shift) % 32] * s + p.a + p.b + c + (flip ? 100 : 0);
}
__global__ void none() {}
"""


PAIR = """
struct Pointer { const int* p; };
__global__ void add(float* out, int2 pair, Pointer words) {
    out[0] = pair.x + pair.y + words.p[0] + words.p[1];
}
"""


class Ints(ctypes.Structure):
    _fields_ = [("each", ctypes.c_int * 2)]


class Pair(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int), ("b", ctypes.c_double)]


def mixed(kernel, n=32):
    x, out = torch.randn(32, device=DEVICE), torch.empty(32, device=DEVICE)
    version = out._version
    for _ in range(2):  # the second launch on a GPU would be the quick one
        kernel(out, x, n, -1, Pair(3, 0.25), 2.0, 200, True, grid=1, block=32)
    assert torch.equal(out, x.roll(1) * 2 + 3.25 + 300) and out._version == version + 2


@kernels
def test_variables_are_tensors_of_their_memory():
    kernel, out = cukern.compile(TABLE, "look_up"), torch.empty(1, device=DEVICE)
    table = kernel.variable("table", torch.float32)
    assert (
        table.tolist() == [1, 2, 3, 4]
        and table.device == out.device
        and kernel.variable("table").numel() == 16
    )
    kernel(out, 2, grid=1, block=1)
    assert out.item() == 3.5
    table.copy_(torch.arange(4.0) * 10)
    kernel.variable("n::offset", torch.float64).fill_(0.25)
    kernel(out, 3, grid=1, block=1)
    assert out.item() == 30.25
    assert [kernel.variable(name, torch.int32).item() for name in ("launches", "calls")] == [2, 4]
    assert kernel.variable("_Z4lastIfE", torch.float32).tolist() == [30.25]
    other = cukern.compile(TABLE, "read")
    other(out, grid=1, block=1)
    assert out.item() == 1, "each kernel has variables of its own"


@kernels
@pytest.mark.parametrize(
    "given, error, says",
    [
        (("tabel",), ValueError, "look_up has no variable 'tabel'; it has .*table, .*n::offset"),
        (("last",), ValueError, "several variables 'last': write one of _Z4lastI.E, _Z4lastI.E"),
        (("table", torch.complex128), ValueError, None),
        (
            ("launches", torch.float64),
            ValueError,
            "launches has 4 bytes, not a multiple of torch.float64's 8",
        ),
        (("table", 4), TypeError, "takes a str and a dtype, got 'table' and 4"),
    ],
)
def test_wrong_variables(given, error, says):
    kernel = cukern.compile(TABLE, "look_up")
    if says is None:
        assert kernel.variable(*given).numel() == 1
        return
    with pytest.raises(error, match=says):
        kernel.variable(*given)


@kernels
def test_variables_of_a_launch_with_a_cluster_are_refused():
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    kernel, out = cukern.compile(TABLE, "look_up"), torch.empty(1, device=DEVICE)
    kernel.variable("table")
    with pytest.raises(ValueError, match="declare __cluster_dims__"):
        kernel(out, 2, grid=2, block=1, cluster=2)
    kernel = cukern.compile(TABLE, "read")
    kernel(out, grid=1, block=1, cluster=1)
    with pytest.raises(ValueError, match="declare __cluster_dims__"):
        kernel.variable("table")


@kernels
def test_ptx(tmp_path):
    text = cukern.compile(MIX, "mix").compile("compute_80").code.decode()
    (tmp_path / "k.ptx").write_text(text)
    symbol = next(name for name in cukern.load(tmp_path / "k.ptx", "mix").source.kernels if "mix" in name)
    for kernel in (
        cukern.load(tmp_path / "k.ptx", "mix"),
        cukern.load(str(tmp_path / "k.ptx"), symbol),
        cukern.compile(text, "mix"),
    ):
        mixed(kernel)
    mixed(kernel, n=torch.tensor(32).item())
    with pytest.raises(
        TypeError, match=rf"takes 8 arguments \(.u64 {symbol}_param_0, .u64 .*_param_4\[16\], .f32"
    ):
        kernel(1, grid=1, block=1)
    x = torch.empty(32, device=DEVICE)
    right = (x, x, 32, -1, Pair(3, 0.25), 2.0, 200, True)
    for i, wrong in ((2, 1.5), (3, 1 << 32), (3, -(1 << 31) - 1), (4, b"1234"), (5, "2"), (6, 256)):
        with pytest.raises(
            (TypeError, ValueError), match=f"{symbol}_param_{i}.*the kernel is {symbol}\\(.u64"
        ):
            kernel(*right[:i], wrong, *right[i + 1 :], grid=1, block=32)
    with pytest.raises(TypeError, match=r"_param_4\[16\] has 16 bytes, got 4; the kernel is .*\(\.u64"):
        kernel(*right[:4], b"1234", *right[5:], grid=1, block=32)
    pair = cukern.compile(cukern.compile(PAIR).compile("compute_80").code.decode(), "add")
    words = torch.tensor([3, 4], dtype=torch.int32, device=DEVICE)
    for given in (bytes([3, 0, 0, 0, 4, 0, 0, 0]), (ctypes.c_int * 2)(3, 4), words.cpu().numpy().tobytes()):
        pair(x, Ints(given) if isinstance(given, ctypes.Array) else given, words, grid=1, block=1)
        assert x[0].item() == 14, "8 bytes are a struct by value, or a pointer"
    with pytest.raises(TypeError, match=r"does not fit the parameter \.align 8 \.b8"):
        pair(x, b"1234", words, grid=1, block=1)
    table = cukern.compile(cukern.compile(TABLE, "look_up").compile("compute_80").code, "look_up")
    table.variable("table", torch.float32).fill_(7)
    table(x, 2, grid=1, block=1)
    assert x[0].item() == 7.5


def test_what_compiled_code_does_not_take(tmp_path):
    code = cukern.compile(MIX, "mix").compile("sm_80").code
    (tmp_path / "k.cubin").write_bytes(code)
    with pytest.raises(ValueError, match=r"k\.cubin is compiled: it takes no defines="):
        cukern.load(tmp_path / "k.cubin", "mix", defines={"A": 1})
    with pytest.raises(ValueError, match=r"has no entry 'mixed'; its entries: _Z\w+, _Z\w+$"):
        cukern.compile(code, "mixed")
    entry = ".version 8.0\n.target sm_80\n.address_size 64\n.entry a() { ret; }\n.visible .entry b() { ret; }"
    with pytest.raises(ValueError, match=r"has 2 entries \(a, b\): name one"):
        cukern.compile(f"// made by hand\n/* {entry} */\n{entry}")
    with pytest.raises(ValueError, match="is compiled for sm_80, not for sm_90a"):
        cukern.compile(entry, "a").compile("sm_90a")
    with pytest.raises(FileNotFoundError):
        cukern.load(tmp_path / "absent.ptx")
    for other in (3, b"__global__ void k() {}", b"\xff\x00"):
        with pytest.raises(TypeError, match="must be a str of CUDA C"):
            cukern.compile(other)


@no_gpu
def test_the_simulator_runs_no_machine_code():
    kernel = cukern.compile(cukern.compile(MIX, "mix").compile("sm_80").code, "mix")
    with cukern.backend("sim"), pytest.raises(SetupError, match="is machine code, which only a GPU runs"):
        kernel(torch.empty(1), grid=1, block=1)
    assert "_Z3mix" in repr(kernel)


@gpu
def test_a_cubin(tmp_path):
    arch = arch_of(torch.cuda.get_device_capability())
    (tmp_path / "k.cubin").write_bytes(cukern.compile(MIX, "mix").compile(arch).code)
    kernel = cukern.load(tmp_path / "k.cubin", "mix")
    mixed(kernel)
    assert [(p.ctype, p.size) for p in kernel.params] == [
        (".b64", 0), (".b64", 0), (".b64", 0), (".b32", 0), (".align 32 .b8", 16), (".b32", 0),
        (".b8", 0), (".b8", 0),
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"takes 8 arguments \(.b64 arg0"):
        kernel(1, grid=1, block=1)
    table = cukern.compile(cukern.compile(TABLE, "look_up").compile(arch).code, "look_up")
    table.variable("n::offset", torch.float64).fill_(7)
    table(out := torch.empty(1, device="cuda"), 2, grid=1, block=1)
    assert out.item() == 10
    empty = cukern.compile(cukern.compile(MIX, "none").compile(arch).code, "none")
    assert empty.params == ()
    empty(grid=1, block=1)


@gpu
@pytest.mark.parametrize("arch", ["sm_75", "compute_120"])
def test_code_for_another_gpu(arch):
    kernel, x = (
        cukern.compile(cukern.compile(MIX, "mix").compile(arch).code, "mix"),
        torch.empty(32, device="cuda"),
    )
    with pytest.raises(cukern.LaunchError, match=r"does not load on .*, which is sm_\d+: CUDA_ERROR_\w+"):
        kernel(x, x, 32, 0, Pair(), 0.0, 0, False, grid=1, block=32)


def test_parameters_of_ptx():
    """Forms that other compilers write. A 64-bit integer may be an address."""
    text = """.version 8.0 .target sm_80 .visible .entry k( // (a comment)
        .param .u64 .ptr .global .align 16 x, .param .b64 y, .param .f64 d,
        .param .align 64 .b8 map[128], .param .s16 h)
        { ret; } .entry v(.param .v2 .f32 pair) {}"""
    found = machine_code.MachineCode(machine_code.Path("k.ptx"), text.encode())
    assert found.kernels == ["k", "v"] and found.target == "sm_80"
    assert [(p.name, p.pointer, p.format, p.align) for p in found.params("k")] == [
        ("x", True, "Q", 0), ("y", True, "Q", 0), ("d", False, "d", 0), ("map[128]", False, "128s", 64),
        ("h", False, "H", 0),
    ]  # fmt: skip
    with pytest.raises(TypeError, match=r"v: the parameter '\.param .v2 .f32 pair' cannot be passed"):
        found.params("v")


@pytest.mark.parametrize(
    "symbol, name",
    [
        ("table", "table"),
        ("_Z5scalePfi", "scale"),
        ("_Z4lastIfE", "last"),
        ("_ZL5table", "table"),
        ("_ZN1n5tableE", "n::table"),
        ("_ZN1n12_GLOBAL__N_11gE", "n::g"),
        ("_ZZ1kIfEvPT_iE5calls", "calls"),
        ("_ZZ1kvE", "_ZZ1kvE"),
        ("_Zli1_x", "_Zli1_x"),
    ],
)
def test_names_in_the_source(symbol, name):
    assert machine_code.source_name(symbol) == name
