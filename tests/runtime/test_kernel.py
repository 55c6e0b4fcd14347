"""cukern.load and cukern.compile: a kernel as a callable on tensors, its arguments checked against its own
parameter list."""

import ctypes
import re
import struct

import numpy
import pytest
import torch
from helpers import SQUARE_MATRIX, gpu, kernels, no_gpu, run_python, write
from torch._subclasses.fake_tensor import FakeTensorMode

import cukern
import cukern.sim
from cukern.runtime.compile import signature
from cukern.runtime.launch import backend, driver
from cukern.runtime.launch.kernel import Template

ARCH = "sm_90a"
FILL = """
extern "C" __global__ void fill(float* out, int n, float value) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
"""
TWO = """
template <typename T, int N = 2>
__global__ void __launch_bounds__(128) scale(T* __restrict__ out, const T* __restrict__ x, long long n) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = T(N) * x[i];
}
extern "C" __global__ void one(float* out) { *out = 1; }
"""


# ---- finding the kernel


def test_the_only_kernel_needs_no_name(tmp_path):
    kernel = cukern.load(write(tmp_path, FILL, "fill.cu"))
    assert kernel.name == "fill" and [str(p) for p in kernel.params] == ["float* out", "int n", "float value"]
    assert "fill(float* out, int n, float value)" in repr(kernel) and "fill.cu" in repr(kernel)
    assert kernel.compile(ARCH).symbol == "fill"


def test_several_kernels_must_be_named(tmp_path):
    path = write(tmp_path, TWO, "two.cu")
    with pytest.raises(ValueError, match=r"two\.cu has 2 kernels \(scale, one\): name one"):
        cukern.load(str(path))
    for name in ("three", "scal", ""):
        with pytest.raises(ValueError, match=rf"no __global__ function '{name}'; it has scale, one"):
            cukern.load(path, name)
    assert cukern.load(path, "one").compile(ARCH).symbol == "one"
    kernel = cukern.load(path, "scale<double, 3>")
    assert [p.ctype for p in kernel.params] == ["double", "double", "long long"]
    assert "scale" in kernel.compile(ARCH).symbol


def test_a_file_without_a_kernel_or_no_file_at_all(tmp_path):
    with pytest.raises(ValueError, match=r"none\.cu has no kernel"):
        cukern.load(write(tmp_path, "__device__ int x;", "none.cu"))
    with pytest.raises(FileNotFoundError, match=r"missing\.cu"):
        cukern.load(tmp_path / "missing.cu")


NO_STRINGS = (
    ((FILL.encode(),), "source must be a str .*, got bytes"),
    ((FILL, 3), "name must be a str or None, got int 3"),
)


@pytest.mark.parametrize("args, words", NO_STRINGS)
def test_sources_and_names_must_be_strings(args, words):
    with pytest.raises(TypeError, match=words):
        cukern.compile(*args)


def test_an_edit_takes_effect_at_the_next_load(tmp_path):
    path = write(tmp_path, "__global__ void k(float* x) { *x = 1; }")
    before = cukern.load(path).compile(ARCH)
    path.write_text("__global__ void k(float* x, int n) { *x = n; }")
    after = cukern.load(path)
    assert len(after.params) == 2 and after.compile(ARCH).code != before.code


def test_shipped_headers_are_found_from_anywhere(tmp_path):
    text = (
        '#include "common/vec.cuh"\n__global__ void k(float4* x) { store_vec(&x[0].x, load_vec<float, '
        "4>(&x[1].x)); }"
    )
    assert cukern.load(write(tmp_path, text)).compile(ARCH).code


def test_the_load_inline_tutorial_compiles_as_it_stands():
    kernel = cukern.compile("#include <torch/extension.h>\n#include <cuda_runtime.h>\n" + SQUARE_MATRIX)
    assert kernel.name == "square_matrix_kernel" and kernel.compile(ARCH).code


# ---- what kernels of others look like

LOOKS = {
    "namespace": "namespace a::b { namespace { __device__ int unused; } namespace c {\n@ } }",
    "anonymous namespace": "namespace {\n@ }",
    "void first": "void __global__ k(float* x, int n) { x[0] = n; }",
    "inline": "__global__ inline void k(float* x, int n) { x[0] = n; }",
    "static inline first": "static inline __global__ void __launch_bounds__(32 * (1 + 1)) k(float* x, int "
    "n) { x[0] = n; }",
    "default argument": "__global__ void k(float* x, int n = 3) { x[0] = n; }",
    "unnamed argument": "__global__ void k(float* x, int n, float*, int) { x[0] = n; }",
    "declared before": "__global__ void k(float*, int);\n__global__ void k(float* x, int n);\n@",
    "long int": "__global__ void k(float* x, long int n) { x[0] = n; }",
    "int64_t of cstdint": "#include <cstdint>\n__global__ void k(float* x, std::int64_t n) { x[0] = "
    "(uint8_t)n; }",
    "int64_t of stdint.h": "#include <stdint.h>\n#include <cstdint>\n__global__ void k(float* x, int64_t n) "
    "{ x[0] = n; }",
    "int64_t of torch": "#include <torch/extension.h>\n#include <cuda_runtime.h>\n__global__ void k(float* "
    "x, int64_t n) { x[0] = n; }",
    "BOM": "\ufeff@",
    "Latin-1": "// \u00fcber \u00b5m\n@",
    "windows": "#define LONG \\\r\n  1\r\n@",
    "host words in a string": '__device__ const char* s = "at::Tensor <<<1, 1>>> }{";\n@',
    "a macro": "#define KERNEL(name) __global__ void name(float* x, int n) { x[0] = n; }\nKERNEL(k)",
    "template heads": "template <class T> __device__ T id(T t) { return t; }\n@\ntemplate <> __device__ int "
    "id(int t) { return t; }",
}


@pytest.mark.parametrize("look", LOOKS)
def test_kernels_of_every_style_are_found_and_run(look, tmp_path):
    text = LOOKS[look].replace("@", "__global__ void k(float* x, int n) { x[0] = n; }")
    (tmp_path / "k.cu").write_bytes(text.encode("latin-1" if look == "Latin-1" else "utf-8"))
    x, rest = torch.zeros(1), (None, 0) if look == "unnamed argument" else ()
    with cukern.backend("sim"):
        for name in ("k",) if look == "a macro" else ("k", None):
            kernel = cukern.load(tmp_path / "k.cu", name)
            kernel(x.zero_(), 7, *rest, grid=1, block=1)
            assert x.item() == 7 and kernel.name.rpartition("::")[2] == "k"


def test_a_kernel_of_two_namespaces_needs_its_namespace():
    text = (
        "namespace a { __global__ void k(float* x) { *x = 1; } }\nnamespace b { __global__ void k(float* x) "
        "{ *x = 2; } }\n"
    )
    with pytest.raises(ValueError, match=r"several kernels 'k' \(a::k, b::k\): write the namespace"):
        cukern.compile(text, "k")
    x = torch.zeros(1)
    with cukern.backend("sim"):
        cukern.compile(text, "b::k")(x, grid=1, block=1)
    assert x.item() == 2


def test_integer_types_without_their_header(empty_cache):
    cukern.compile("__global__ void k(int64_t* x, uint n, uchar* c) {}").compile(ARCH)
    cukern.compile(
        "typedef unsigned long long ulong;\n__global__ void k(ulong* x) { static_assert(sizeof(*x) == 8); }"
    ).compile(ARCH)


def test_a_kernel_first_called_inside_of_torch_compile():
    """There is one graph break, and no warnings: torch.compile does not trace into cukern."""
    code = """
import torch, cukern
kernel = cukern.compile("__global__ void k(float* x) { x[threadIdx.x] += 1; }")
def f(x):
    y = x * 2
    kernel(y, grid=1, block=4)
    return y + 1
def g(x):
    y = x * 2
    kernel[1, 4](y)
    return y + 1
with cukern.backend("sim"):
    compiled = torch.compile(f, backend="aot_eager")
    print([compiled(torch.full((4,), 1.0 * i)).tolist() for i in range(3)])
from torch._dynamo.utils import counters
print(sum(counters["graph_break"].values()), dict(counters["frames"]))
torch._dynamo.reset()
try:
    torch.compile(f, backend="aot_eager", fullgraph=True)(torch.zeros(4))
except torch._dynamo.exc.Unsupported as error:
    print("runs outside of graphs" in str(error))
with cukern.backend("sim"):
    print(torch.compile(g, backend="aot_eager")(torch.zeros(4)).tolist())
"""
    ran = run_python(code)
    results, counts, refused, other = ran.stdout.splitlines()
    assert (
        results == str([[2.0 + 2 * i] * 4 for i in range(3)])
        and counts.startswith("1 ")
        and refused == "True"
    )
    assert other == str([2.0] * 4)
    assert len(ran.stderr.splitlines()) <= 3, ran.stderr


def test_template_makes_each_instance_once():
    template = Template("square.cu", "square_v2")
    assert template[torch.float32, 4] is template[torch.float32, 4]
    assert template[torch.float32, 4].name == "square_v2<float, 4>"
    assert template[torch.bfloat16, 8].name == "square_v2<__nv_bfloat16, 8>"


# ---- what is refused before any launch


ON_CPU = r"fill: the argument for float\* out must be on a GPU, it is on cpu"
NO_ARRAY = "out must be a torch.Tensor or an array with __dlpack__, got "


@pytest.mark.parametrize(
    "args, kind, words",
    [
        ((torch.zeros(3),), TypeError, r"fill takes 3 arguments \(float\* out, int n, float value\), got 1"),
        *(
            ((value, 3, 1.0), ValueError, ON_CPU)
            for value in (torch.zeros(3), numpy.zeros(3, dtype=numpy.float32))
        ),
        *(((value, 3, 1.0), TypeError, NO_ARRAY + type(value).__name__) for value in (3, 1.5, "x", [1.0])),
    ],
)
def test_wrong_arguments_are_refused_before_a_launch(args, kind, words):
    with pytest.raises(kind, match=words):
        cukern.compile(FILL)(*args, grid=1, block=1)


def test_gpu_and_simulator_do_not_mix():
    kernel, one = cukern.compile("__global__ void k(float* x, float* y) {}"), torch.zeros(3)
    with cukern.backend("sim"):
        kernel(one, one, grid=1, block=1)
        with (
            cukern.backend("gpu"),
            pytest.raises(ValueError, match=r'must be on a GPU.*cukern.backend\("sim"\)'),
        ):
            kernel(one, one, grid=1, block=1)
    with pytest.raises(ValueError, match="must be on a GPU"):
        kernel(one, one, grid=1, block=1)


@gpu
def test_the_simulator_leaves_gpu_tensors_to_the_gpu():
    x, out = torch.randn(100, device="cuda"), torch.zeros(100)
    with cukern.backend("sim"):
        assert torch.equal(cukern.square(x), x * x) and cukern.square(x).is_cuda
        with pytest.raises(ValueError, match="arguments on several devices: out on the CPU, x on cuda:0"):
            cukern.compile(TWO, "scale<float>")(out, x, 100, grid=1, block=128)


@no_gpu
def test_a_launch_without_a_gpu_says_so():
    with pytest.raises(cukern.SetupError, match="GPU"):
        cukern.compile(FILL)(None, 0, 1.0, grid=1, block=1)


@kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32], ids=str)
def test_another_dtype_is_refused(device, dtype):
    with pytest.raises(
        TypeError, match=rf"fill: the argument for float\* out must be torch\.float32, it is {dtype}"
    ):
        cukern.compile(FILL)(torch.zeros(3, device=device).to(dtype), 3, 1.0, grid=1, block=32)


@kernels
@pytest.mark.parametrize(
    "n, value, kind, words",
    [
        (2**31, 1.0, ValueError, ("2147483648", "int n")),
        (-(2**31) - 1, 1.0, ValueError, ("-2147483649", "int n")),
        (2.0, 1.0, TypeError, ("2.0", "float", "int n")),
        ("2", 1.0, TypeError, ("'2'", "str", "int n")),
        (2, "1", TypeError, ("'1'", "str", "float value")),
        (2, None, TypeError, ("None", "float value")),
    ],
    ids=str,
)
def test_scalars_that_do_not_fit_are_refused(device, n, value, kind, words):
    x = torch.zeros(3, device=device)
    with pytest.raises(kind) as caught:
        cukern.compile(FILL)(x, n, value, grid=1, block=32)
    assert all(word in str(caught.value) for word in ("fill", *words))
    assert not x.any(), "nothing was launched"


@kernels
def test_lazy_negation_and_conjugation_are_refused(device):
    kernel = cukern.compile("__global__ void k(float2* x) {}")
    with pytest.raises(ValueError, match="conj"):
        kernel(torch.zeros(3, dtype=torch.complex64, device=device).conj(), grid=1, block=1)
    with pytest.raises(ValueError, match="lazy negation"):
        cukern.compile(FILL)(torch._neg_view(torch.zeros(3, device=device)), 3, 1.0, grid=1, block=32)


def test_tensors_without_memory_are_refused():
    kernel, real = cukern.compile(FILL), torch.zeros(4)
    with FakeTensorMode() as mode, cukern.backend("sim"):
        fake = mode.from_tensor(real)
        with pytest.raises(
            TypeError,
            match=r"fill: the argument for float\* out must have memory of its own, a FakeTensor has none",
        ):
            kernel(fake, 4, 1.0, grid=1, block=32)
    with cukern.backend("sim"):
        with pytest.raises(TypeError, match="transform has none"):
            torch.func.vmap(lambda x: kernel(x, 4, 1.0, grid=1, block=32))(torch.zeros(2, 4))
        with pytest.raises(TypeError, match=r"float\* out must be a strided tensor, it is torch.sparse_coo"):
            kernel(real.to_sparse(), 4, 1.0, grid=1, block=32)
        with pytest.raises(ValueError, match="is on meta"):
            kernel(torch.zeros(4, device="meta"), 4, 1.0, grid=1, block=32)


def test_numpy_arrays_are_arguments_in_the_simulator():
    out, x = numpy.zeros(100, numpy.float32), numpy.arange(100, dtype=numpy.float32)
    with cukern.backend("sim"):
        cukern.compile(TWO, "scale<float>")(out, x, 100, grid=1, block=128)
        with pytest.raises(cukern.sim.OutOfBounds, match="the tensor of argument 'out'"):
            cukern.compile(TWO, "scale<float>")(out[:50], x, 51, grid=1, block=128)
    assert (out == 2 * x).all()


def test_pointers_to_vectors_and_aliases_take_their_dtypes_alone():
    kernel = cukern.compile(
        "typedef double real;\n__global__ void k(float2* a, uchar4* b, real* c, void* d) {}"
    )
    one = {
        d: torch.zeros(4, dtype=d)
        for d in (torch.float32, torch.complex64, torch.uint8, torch.float64, torch.int32)
    }
    with cukern.backend("sim"):
        for a, d in ((torch.float32, torch.int32), (torch.complex64, torch.uint8)):
            kernel(one[a], one[torch.uint8], one[torch.float64], one[d], grid=1, block=1)
        right = torch.float32, torch.uint8, torch.float64
        for i, wrong in enumerate((torch.float64, torch.int32, torch.float32)):
            with pytest.raises(TypeError, match=r"k: the argument for .* must be torch\.\w+"):
                kernel(*(one[d] for d in (*right[:i], wrong, *right[i + 1 :])), None, grid=1, block=1)


def test_half_by_value_and_floats_that_do_not_fit():
    kernel = cukern.compile(
        "#include <cuda_fp16.h>\n__global__ void k(float* x, half h, float f) { x[0] = (float)h + f; }"
    )
    out = torch.zeros(1)
    with cukern.backend("sim"):
        kernel(out, 0.5, 0.25, grid=1, block=1)
        assert out.item() == 0.75
        for h, f, name in ((1e6, 1.0, "__half h"), (1.0, 10**400, "float f")):
            with pytest.raises(ValueError, match=f"does not fit the parameter {name}"):
                kernel(out, h, f, grid=1, block=1)


@kernels
@pytest.mark.parametrize(
    "changed, kind, words",
    [
        *(
            ({what: value}, TypeError, f"{what} must be an int")
            for what in ("grid", "block")
            for value in (1.5, (1.0,), "32")
        ),
        *(
            ({what: value}, ValueError, f"{what} must be at least 1, got")
            for what in ("grid", "block")
            for value in (0, -1, (1, 0))
        ),
        *(
            ({what: value}, ValueError, f"{what} must be one to three")
            for what in ("grid", "block")
            for value in ((), (1, 1, 1, 1))
        ),
        ({"shared": "16"}, TypeError, "shared must be an int, got str '16'"),
        ({"shared": -1}, ValueError, "shared must be at least 0, got -1"),
    ],
    ids=str,
)
def test_geometry_is_checked(device, changed, kind, words):
    with pytest.raises(kind, match=words):
        cukern.compile(FILL)(torch.zeros(3, device=device), 3, 1.0, **{"grid": 1, "block": 32, **changed})


def test_strings_are_refused_for_a_bool():
    with cukern.backend("sim"), pytest.raises(TypeError, match="bool b must be a bool, got str 'no'"):
        cukern.compile("__global__ void k(bool b) {}")("no", grid=1, block=1)


@gpu
def test_arguments_on_two_gpus_are_refused():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    kernel = cukern.compile("__global__ void k(float* x, float* y) {}")
    with pytest.raises(ValueError, match="x on cuda:0, y on cuda:1"):
        kernel(torch.zeros(3, device="cuda:0"), torch.zeros(3, device="cuda:1"), grid=1, block=1)


# ---- launches


@kernels
def test_load_inline_tutorial_against_torch(device):
    kernel = cukern.compile(SQUARE_MATRIX)
    x = torch.randn(129, 67, device=device)
    result = torch.empty_like(x)
    kernel(
        x, result, x.shape[1], x.shape[0], grid=(-(-x.shape[1] // 16), -(-x.shape[0] // 16)), block=(16, 16)
    )
    assert torch.equal(result, x * x)


@kernels
def test_every_argument_arrives(device):
    """Parameters of every size, in an order that needs padding between them."""
    kernel = cukern.compile("""
    __global__ void echo(double* out, char a, double b, short c, long long d, bool e, float f,
        unsigned char g, const int* h,
                         unsigned i, size_t j, int k, long long* none) {
        double values[] = {(double)a, b, (double)c, (double)d, (double)e, (double)f, (double)g, (double)*h,
            (double)i, (double)j,
                           (double)k};
        for (int n = 0; n < 11; n++) out[n] = values[n];
        out[11] = none == nullptr;
    }
    """)
    out = torch.empty(12, dtype=torch.float64, device=device)
    h = torch.tensor([7, -42], dtype=torch.int32, device=device)[1:]
    kernel(
        out, -5, 1e300, -300, -(2**40), True, 0.5, 200, h, 2**32 - 1, 2**50, -(2**31), None, grid=1, block=1
    )
    assert out.tolist() == [-5, 1e300, -300, -(2**40), 1, 0.5, 200, -42, 2**32 - 1, 2**50, -(2**31), 1]


@kernels
def test_numbers_of_numpy_are_numbers_and_those_of_ctypes_are_not(device):
    x = torch.empty(4, device=device)
    cukern.compile(FILL)(x, numpy.int64(4), numpy.float32(0.25), grid=1, block=32)
    assert x.tolist() == [0.25] * 4
    with pytest.raises(TypeError):
        cukern.compile(FILL)(x, ctypes.c_int(4), 0.5, grid=1, block=32)


@kernels
def test_template_instances_and_dtypes(device, tmp_path):
    path = write(tmp_path, TWO)
    instances = (
        (torch.float64, "scale<double, 3>", 3),
        (torch.float32, "scale<float>", 2),
        (torch.int64, "scale<long long, 5>", 5),
    )
    for dtype, name, factor in instances:
        x = torch.arange(1000, device=device).to(dtype)
        out = torch.empty_like(x)
        cukern.load(path, name)(out, x, x.numel(), grid=8, block=128)
        assert torch.equal(out, factor * x)


@gpu
def test_dlpack_arrays_and_parameters_are_arguments():
    cupy = pytest.importorskip("cupy")
    array = cupy.asarray(numpy.zeros(5, dtype=numpy.float32))
    kernel = cukern.compile(FILL)
    kernel(array, 5, 3.0, grid=1, block=32)
    torch.cuda.synchronize()
    assert array.get().tolist() == [3.0] * 5
    parameter = torch.nn.Parameter(torch.zeros(5, device="cuda"))
    kernel(parameter, 5, 2.0, grid=(1,), block=(32, 1, 1))
    assert parameter.tolist() == [2.0] * 5


@gpu
def test_launches_on_the_current_stream():
    kernel = cukern.compile(TWO, "scale<float>")
    x = torch.ones(1 << 20, device="cuda")
    y = torch.zeros(1 << 20, device="cuda")
    kernel(y, x, 1, grid=1, block=128)  # loads it
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        x.fill_(4)
        kernel(y, x, x.numel(), grid=1 << 13, block=128)
    side.synchronize()
    assert (y == 8).all()


MAPS = """#include "common/ptx/tma.cuh"
extern "C" __global__ void maps(float* out, const __grid_constant__ CUtensorMap map, int n) {
    prefetch_tensor_map(&map); out[0] = n; }
"""


def test_aligned_structs_are_passed_by_pointers():
    """ptxas aligns their addresses in the constant bank, where parameters start at 0x210: their offsets are
    not those of a C struct."""
    kernel = cukern.compile(MAPS)
    params = kernel.params_on(backend.SIMULATED)
    assert signature.offsets(params) == [0, 64, 192]
    code, found = kernel.compile("sm_90a").code, {}
    # EIATTR_KPARAM_INFO: index, ordinal, offset, flags and size
    for info in re.finditer(rb"\x04\x17\x0c\x00", code):
        _, ordinal, offset, _ = struct.unpack_from("<IHHI", code, info.end())
        found[ordinal] = offset
    assert found == {0: 0, 1: 48, 2: 176}
    packed = bytes(signature.packer(params).size)
    _, pointers, description = driver._Arguments(packed, params, 0).parts
    assert pointers and not description
    _, pointers, description = driver._Arguments(bytes(8), params[:1], 0).parts
    assert description and not pointers


COPY = (
    "__global__ void copy(float* out, const float* x, int n) { if (threadIdx.x < n) out[threadIdx.x] = "
    "x[threadIdx.x]; }"
)


@kernels
def test_a_launch_increments_the_version_of_what_it_may_write(device):
    kernel, out, x = cukern.compile(COPY), torch.zeros(4, device=device), torch.ones(4, device=device)
    for count in (1, 2, 3):  # the second launch on a GPU takes the quick path
        kernel(out, x, 4, grid=1, block=32)
        assert (out._version, x._version) == (count, 0)
    kernel[1, 32](out, x, 4)
    assert (out._version, x._version) == (4, 0)
    w = torch.ones(4, device=device, requires_grad=True)
    y = (w * out).sum()
    kernel(out, x, 4, grid=1, block=32)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
    with torch.inference_mode():
        kernel(torch.zeros(4, device=device), x, 4, grid=1, block=32)
