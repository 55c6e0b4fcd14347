"""cukern.load and cukern.compile: macros, launches as in CUDA C++, clusters, streams, arrays of other
libraries, hints for errors."""

import importlib.util
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, SCALE, gpu, kernels, no_gpu

import cukern
from cukern.runtime.compile import signature
from cukern.runtime.compile.hints import hint
from cukern.runtime.launch import arguments
from cukern.runtime.launch import driver as launches

COPY = """
__global__ void copy(T* out, const T* x, int n) {
    extern __shared__ char bytes[];
    int i = blockIdx.x * TILE + threadIdx.x;
#ifdef TWICE
    if (i < n) { T* s = (T*)bytes; s[threadIdx.x] = x[i] + x[i]; out[i] = s[threadIdx.x]; }
#else
    if (i < n) out[i] = x[i];
#endif
}
"""
RANK = """
__global__ void rank(int* out) {
    unsigned r, n;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
    if (threadIdx.x == 0) out[blockIdx.x] = r + 10 * n;
}
"""


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_macros_and_launches_in_brackets(dtype, tmp_path):
    (tmp_path / "copy.cu").write_text(COPY)
    defines = {"TILE": 32, "T": dtype}
    once = cukern.load(tmp_path / "copy.cu", defines=defines)
    twice = cukern.compile(COPY, "copy", defines={**defines, "TWICE": None})
    x, out = torch.randn(50, dtype=dtype, device=DEVICE), torch.empty(50, dtype=dtype, device=DEVICE)
    for _ in range(2):  # the second launch on a GPU is the quick one
        once[2, 32](out, x, 50)
        assert torch.equal(out, x)
        twice[(2, 1, 1), 32, 32 * dtype.itemsize](out, x, 50)
        assert torch.equal(out, 2 * x)
    with pytest.raises(
        TypeError, match=r"copy\[grid, block\] or copy\[grid, block, shared, stream\], got copy\[2\]"
    ):
        once[2]


@pytest.mark.parametrize(
    "defines, error, says",
    [
        ({"a b": 1}, ValueError, "the name of a macro must be an identifier, got 'a b'"),
        ({"A": [1]}, TypeError, "A must be a number, a str, a dtype, a bool or None, got list"),
        ({"A": "1\n2"}, ValueError, "A must be one line"),
        ({"A": torch.int32}, ValueError, "A must be one of torch.float16"),
        ("A=1", TypeError, "defines must be a dict such as {'TILE': 32}, got"),
    ],
)
def test_macros_that_are_refused(defines, error, says):
    with pytest.raises(error, match=says):
        cukern.compile(SCALE, defines=defines)


@kernels
def test_a_cluster_is_that_of_the_launch():
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("clusters need compute capability 9.0")
    rank, out = cukern.compile(RANK), torch.empty(4, dtype=torch.int32, device=DEVICE)
    for cluster, expected in ((2, [20, 21, 20, 21]), ((4, 1), [40, 41, 42, 43]), (None, [10, 10, 10, 10])):
        rank(out, grid=4, block=32, cluster=cluster)
        assert out.tolist() == expected
    with pytest.raises(
        cukern.LaunchError, match="grid x = 3 is not a multiple of the cluster size along x, 2"
    ):
        rank(out, grid=3, block=32, cluster=2)
    with pytest.raises(TypeError, match=r"stream must be a torch\.cuda\.Stream"):
        rank(out, grid=3, block=32, stream=5)


@kernels
def test_a_wrong_argument_shows_the_signature():
    scale, x = cukern.compile(SCALE), torch.ones(4, device=DEVICE)
    for args in ((x, "2"), (x.double(), 2.0), (x, 2.0, 3)):
        with pytest.raises((TypeError, ValueError), match=r"scale.*\(float\* x, float s\)"):
            scale[1, 4](*args)
    with pytest.raises(TypeError, match=r"scale\(float\* x, float s\)") as caught:
        scale(x, 2.0)
    assert "a launch needs grid= and block=" in str(caught.value)
    with pytest.raises(
        ValueError, match=r"grid must be at least 1, got 0; the kernel is scale\(float\* x, float s\)"
    ):
        scale[0, 4](x, 2.0)
    with pytest.raises(ValueError, match="has no __global__ function 'other'; it has scale"):
        cukern.compile(SCALE, "other")


def quick_of(text: str, seen: list, device: int = -1, most_shared: int = 48 << 10):
    """The kernel of a text and its quick launch, with a recorder in the place of the driver, on the device -1
    of CPU tensors."""
    kernel = cukern.compile(text)
    with cukern.backend("sim"):
        params = kernel.params
    packer = signature.packer(params)
    local = launches._Arguments(bytes(packer.size), params, 0)

    def launch(function, gx, gy, gz, bx, by, bz, shared, stream, each, extra):
        if gx > 2**31 - 1:
            raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
        seen.append(((gx, gy, gz), (bx, by, bz), shared, *packer.unpack(local.parts[0])))

    loaded = SimpleNamespace(
        function=7, pack=packer.pack_into, arguments=local, launch=launch, most_shared=[most_shared]
    )
    return kernel, arguments.quick(loaded, params, device)


@pytest.fixture
def no_stream(monkeypatch):
    monkeypatch.setattr(launches, "current_stream", lambda device: 0)
    # with several GPUs, a quick launch needs the current one
    monkeypatch.setattr(launches, "current_device", lambda: -1)


def test_the_quick_launch_takes_only_right_arguments(no_stream):
    seen, x = [], torch.ones(4)
    _, quick = quick_of("__global__ void k(float* x, void* y, int n) {}", seen)
    assert quick((x, x.int(), 3), 1, (32, 2), 16) and quick((torch.nn.Parameter(x), x, 4), 2, 8, 0)
    assert seen[0][:3] == ((1, 1, 1), (32, 2, 1), 16) and seen[0][3] == x.data_ptr() and seen[0][5] == 3
    assert seen[1][:3] == ((2, 1, 1), (8, 1, 1), 0) and seen[1][3:] == (x.data_ptr(), x.data_ptr(), 4)
    wrong = [
        (x.double(), x, 1),
        (x, None, 1),
        (x, x),
        (x, x, 1, 2),
        (x, x, x),
        (x, x, "1"),
        (1, x, 1),
        (x.numpy(), x, 1),
        (),
    ]
    wrong += [
        (x.to_sparse(), x, 1),
        (torch._neg_view(x), x, 1),
        (x, torch.ones(4).cfloat().conj(), 1),
        (x, x, 2**31),
        (x, x, 0.5),
    ]
    assert not any(quick(args, 1, 32, 0) for args in wrong)
    geometry = [
        (0, 32, 0),
        (1, 0, 0),
        (1, "x", 0),
        (1, True, 0),
        (True, 1, 0),
        (1.0, 32, 0),
        (1, 32, -1),
        (1, 32, 0.5),
        (1, 32, True),
    ]
    geometry += [
        (1, 32, (48 << 10) + 1),
        (-1, 32, 0),
        ((1, 0), 32, 0),
        ((1, 1, 1, 1), 32, 0),
        (2**31, 32, 0),
        ([1], 32, 0),
    ]
    assert not any(quick((x, x, 1), *dims) for dims in geometry)
    assert len(seen) == 2


def test_what_has_no_quick_launch():
    """A conjugate of a complex tensor; parameters that need a conversion; a launch whose GPU only the context
    tells."""
    seen, z = [], torch.ones(4, dtype=torch.cfloat)
    _, quick = quick_of("__global__ void k(float2* x) {}", seen)
    assert not quick((z.conj(),), 1, 32, 0) and not seen
    for text in ("float* x, bool b", "float* x, float2 v", "float* x, __nv_bfloat16 b", "int n"):
        assert quick_of(f"#include <cuda_bf16.h>\n__global__ void k({text}) {{}}", seen)[1] is arguments.never


def test_a_quick_launch_on_several_gpus(monkeypatch, no_stream):
    """It launches only on the current GPU, and a kernel has one for each."""
    seen, x, current = [], torch.ones(4), [0]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(launches, "current_device", lambda: current[0])
    kernel, quick = quick_of("__global__ void k(float* x) {}", seen)
    assert not quick((x,), 1, 32, 0)
    current[0] = -1
    assert quick((x,), 1, 32, 0)
    kernel._quicks = {-1: quick, 5: quick_of("__global__ void k(float* x) {}", [], 5)[1]}
    kernel.quick = kernel._quicks[5]
    kernel(x, grid=3, block=32)
    assert kernel.quick is quick and seen[-1][0] == (3, 1, 1)


def test_a_grid_that_no_driver_takes_names_its_limit(monkeypatch, no_stream):
    """2**32 does not fit the driver's unsigned int, so that CuPy refuses it; launches with an attribute pack
    it."""
    driver = pytest.importorskip("cupy_backends.cuda.api.driver")
    kernel, x = (
        cukern.compile("#include <cuda_fp16.h>\n__global__ void k(float* x, __half h) {}"),
        torch.ones(4),
    )
    monkeypatch.setattr(driver, "ctxGetCurrent", lambda: 0)
    monkeypatch.setattr(driver, "funcGetAttribute", lambda attribute, _: 1 if attribute else 1024)
    launch = launches.Loaded(0, "k", kernel.compile("sm_90a"), kernel.params_on(-1), -1, 0)
    bound = launch.bound((2**32, 1, 1), (32, 1, 1), 0)
    for call in (
        lambda: launch((2**32, 1, 1), (32, 1, 1), 0, x.data_ptr(), 1.0),
        lambda: bound(x.data_ptr(), 1.0),
    ):
        with pytest.raises(
            cukern.LaunchError,
            match=r"k <<<grid \(4294967296, 1, 1\).* grid x = 4294967296 is not in 1..2147483647",
        ):
            call()
    with pytest.raises(ValueError, match=r"1000000\.0 does not fit the parameter __half h"):
        launch((1, 1, 1), (32, 1, 1), 0, x.data_ptr(), 1e6)


def test_a_launch_after_a_fork_says_so(monkeypatch):
    """The quick launch fails in the child, where torch sees no GPU."""
    kernel = cukern.compile("__global__ void k(float* x) {}")
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(cukern.LaunchError, match="k: CUDA was initialised before this process was forked"):
        kernel._launch(0, kernel.params_on(-1), [], ((1, 1, 1), (32, 1, 1), 0, 0), None)


def test_a_quick_launch_makes_few_calls(no_stream):
    seen, calls, x = [], [], torch.ones(4)
    kernel, kernel.quick = quick_of("__global__ void k(float* x, float* y, int n) {}", seen)
    for launch in (lambda: kernel(x, x, 3, grid=1, block=32), lambda: kernel[1, 32](x, x, 3)):
        sys.setprofile(
            lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None
        )
        launch()
        sys.setprofile(None)
    ours = [name for name in calls if name not in ("<lambda>", "launch", "increment_version")]
    assert ours == ["__call__", "quick", "__getitem__", "_launch_at", "quick"] and len(seen) == 2


@gpu
def test_a_stream_and_arrays_of_other_libraries():
    scale, x, stream = cukern.compile(SCALE), torch.ones(4, device="cuda"), torch.cuda.Stream()
    scale[1, 4](x, 1.0)  # compiles
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(1_000_000_000)
    scale[1, 4, 0, stream](x, 3.0)
    with torch.cuda.stream(stream):
        assert x.tolist() == [3.0] * 4
    assert not torch.cuda.current_stream().query(), "the launch is on the other stream"
    torch.cuda.synchronize()

    class Array:  # what Numba's device arrays have
        __cuda_array_interface__ = x.__cuda_array_interface__

    scale[1, 4](Array(), 2.0)
    assert x.tolist() == [6.0] * 4


@pytest.mark.parametrize("library", ["jax", "cupy", "numba"])
@gpu
def test_arrays_of(library):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    import numpy

    host, out = numpy.arange(4, dtype=numpy.float32), torch.empty(4, device="cuda")
    if library == "jax":
        import jax.numpy as jnp

        x = jnp.asarray(host)
    elif library == "cupy":
        import cupy

        x = cupy.asarray(host)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its import uses deprecated parts of NumPy
            from numba import cuda
        x = cuda.to_device(host)
    copy = cukern.compile(COPY, defines={"TILE": 32, "T": "float"})
    copy[1, 32](out, x, 4)
    assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
    if library == "jax":
        with pytest.raises(ValueError, match="JAX arrays are immutable"):
            copy[1, 32](x, out, 4)


def test_jax_arrays_in_the_simulator():
    """JAX arrays are inputs on the CPU too. An output that is a JAX array is refused, because it cannot be
    written."""
    jax = pytest.importorskip("jax", reason="jax is not installed")
    jnp, cpu = jax.numpy, jax.devices("cpu")[0]
    copy, out = cukern.compile(COPY, defines={"TILE": 32, "T": "float"}), torch.empty(4)
    with cukern.backend("sim"), jax.default_device(cpu):
        copy[1, 32](out, jnp.arange(4, dtype=jnp.float32), 4)
        assert out.tolist() == [0.0, 1.0, 2.0, 3.0]
        with pytest.raises(ValueError, match="JAX arrays are immutable"):
            copy[1, 32](jnp.zeros(4), out, 4)


@no_gpu
def test_an_array_on_a_gpu_that_is_not_there():
    class Array:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (4,), "typestr": "<f4", "data": (0, False), "version": 3}

    with cukern.backend("sim"), pytest.raises(TypeError, match=r"x \(Array\) cannot become a tensor"):
        cukern.compile(SCALE)[1, 4](Array(), 2.0)


TRAPS = {
    "__global__ void k(__half* x) {}": "add #include <cuda_fp16.h>",
    "#include <cuda_fp16.h>\n__global__ void k(__half* x) { x[0] = x[0] + 1.0; }": "convert first, as in "
    "float(x)",
    "__global__ void k(float* x, int n) { __shared__ float s[n]; x[0] = s[0]; }": "the size of a shared "
    "array is a constant",
    "__global__ void k(float* x) { x[0] = __shfl_xor(x[0], 1); }": "__shfl_xor_sync(0xffffffff, v, 1)",
    "__global__ void k(float* x) { __shared__ float s[99999]; s[threadIdx.x] = 1; "
    "__syncthreads(); x[0] = s[1]; }": "ends at 48 KiB",
    "__global__ void k(float* x) { x[0] = 1 \n}": "the line before it lacks a semicolon",
    "template <class T> __global__ void k(T* x) {}": "the kernel is a template: name an instance of it, "
    "such as scale<float>",
    '#include "nowhere.cuh"\n__global__ void k(float* x) {}': "headers are searched in the folder of the "
    ".cu file",
}


@pytest.mark.parametrize("text", TRAPS)
def test_the_usual_traps_have_a_hint(text):
    with pytest.raises(cukern.CompileError) as caught:
        cukern.compile(text, "k").compile("sm_90a")
    assert f"{TRAPS[text]}" in str(caught.value).splitlines()[-1]
    assert str(caught.value).count("hint: ") == 1


def test_no_hint_where_none_fits():
    assert hint('k.cu(1): error: identifier "y" is undefined') == ""


@kernels
def test_options_and_folders_of_headers(tmp_path):
    """An option changes the code: fast math flushes a subnormal result to zero. An edit of a header in a
    folder is seen."""
    (tmp_path / "mine").mkdir()
    header, file = tmp_path / "mine/factor.cuh", tmp_path / "k.cu"
    file.write_text(
        '#include "factor.cuh"\n__global__ void k(float* out, const float* x) { *out = FACTOR * *x; }'
    )
    x, out = torch.full((1,), 1e-38, device=DEVICE), torch.empty(1, device=DEVICE)

    def result(factor, *options):
        header.write_text(f"#define FACTOR {factor}")
        cukern.load(file, options=options, include_dirs=[tmp_path / "mine"])(out, x, grid=1, block=1)
        return out.item()

    assert [result("1.0f"), result("0.5f"), result("0.5f", "--use_fast_math")] == [
        x.item(),
        (x / 2).item(),
        0,
    ]


@pytest.mark.parametrize(
    "given, error, says",
    [
        ({"options": "--use_fast_math"}, TypeError, "options must be a list of str"),
        ({"options": ["-arch=sm_90"]}, ValueError, "options must not have '-arch=sm_90'"),
        ({"options": ["-I/usr/include"]}, ValueError, "include_dirs= adds folders"),
        ({"include_dirs": "."}, TypeError, "include_dirs must be a list of folders"),
        ({"include_dirs": ["absent"]}, ValueError, "there is no folder 'absent'"),
    ],
)
def test_wrong_options(given, error, says):
    with pytest.raises(error, match=says):
        cukern.compile("__global__ void k() {}", **given)
