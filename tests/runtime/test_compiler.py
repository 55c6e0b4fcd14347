"""NVRTC's error messages and reports, and the errors where it is missing. Needs no GPU. The cache is tested
in test_cache.py."""

import types
from pathlib import Path

import pytest
from helpers import SCALE, count_compilations, run_python, write

import cukern
from cukern.runtime.compile import bindings, compiler
from cukern.runtime.compile.compiler import CompileError, SetupError, arch_of
from cukern.runtime.compile.sources import Source

ARCH = "sm_90a"


@pytest.mark.parametrize(
    "capability, arch",
    [((7, 5), "sm_75"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((12, 0), "sm_120a")],
)
def test_arch_of(capability, arch):
    assert arch_of(capability) == arch


# ---- the compiler's messages


def test_error_names_file_and_line_and_quotes_the_compiler(tmp_path, empty_cache):
    path = write(tmp_path, "\n\n__global__ void k(float* x) {\n  x[0] = undeclared_name;\n}\n")
    with pytest.raises(CompileError) as caught:
        cukern.load(path).compile(ARCH)
    message = str(caught.value)
    assert f'{path}(4): error: identifier "undeclared_name" is undefined' in message
    assert ARCH in message and message.startswith("k ")
    assert not list(empty_cache.glob("*")), "a failure is not cached"


def test_error_in_a_header_names_the_header(tmp_path, empty_cache):
    write(tmp_path, "\n#error the header is not meant to be used\n", "h.cuh")
    path = write(tmp_path, '#include "h.cuh"\n__global__ void k() {}\n')
    with pytest.raises(CompileError, match=r"h\.cuh\(2\).*the header is not meant to be used"):
        cukern.load(path).compile(ARCH)


def test_missing_header_is_named(tmp_path, empty_cache):
    with pytest.raises(CompileError, match=r'k\.cu\(1\): .*open source file "nowhere\.cuh"'):
        cukern.load(write(tmp_path, '#include "nowhere.cuh"\n__global__ void k() {}\n')).compile(ARCH)


def test_instance_that_does_not_compile_names_the_instance(tmp_path, empty_cache):
    path = write(
        tmp_path, 'template <int N> __global__ void k(int* x) { static_assert(N < 4, "N is too large"); }\n'
    )
    cukern.load(path, "k<3>").compile(ARCH)
    with pytest.raises(CompileError, match=r"(?s)k<4>.*N is too large"):
        cukern.load(path, "k<4>").compile(ARCH)


ODD_LINE = "#include <torch/extension.h>\n__global__ void k(int* x) {\n  x[0] = ;\n}\n"


@pytest.mark.parametrize(
    "text, arch, words",
    [(SCALE, "sm_10", "sm_10"), (ODD_LINE, ARCH, r"compile \w+>\(3\): error: expected a")],
)
def test_error_of_a_text_names_its_line_or_the_architecture(empty_cache, text, arch, words):
    with pytest.raises(CompileError, match=words):
        cukern.compile(text).compile(arch)


# ---- the report


def test_report_is_of_the_kernel_that_was_asked_for(empty_cache):
    text = """
    __global__ void small(float* x) { x[threadIdx.x] = 1; }
    __global__ void tiled(float* x) {
        __shared__ float t[256]; t[threadIdx.x] = x[0]; __syncthreads(); x[0] = t[255 - threadIdx.x]; }
    template <int N> __global__ void __launch_bounds__(1024) spilling(float* x) {
        float r[N];
    #pragma unroll
        for (int i = 0; i < N; i++) r[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
    #pragma unroll
        for (int i = 0; i < N; i++) x[(N - 1 - i) * 1024 + threadIdx.x] = r[i] * r[(i * 7 + 3) % N];
    }
    """
    small, tiled, spilling = (
        cukern.compile(text, name).compile(ARCH).report for name in ("small", "tiled", "spilling<120>")
    )
    assert (small.shared, small.spill_stores, small.spill_loads) == (0, 0, 0) and 0 < small.registers <= 32
    assert (tiled.shared, tiled.spill_stores) == (1024, 0)
    assert spilling.spill_stores > 0 and spilling.spill_loads > 0 and spilling.registers == 64, (
        "65536 registers / 1024 threads"
    )


# ---- PTX


def test_ptx_has_the_entry_and_the_source_lines_and_is_cached(empty_cache, monkeypatch):
    calls = count_compilations(monkeypatch)
    source = Source.from_text(SCALE)
    first, second = (compiler.compile_ptx(source, "scale") for _ in range(2))
    assert len(calls) == 1 and first == second and first.symbol == "scale"
    assert ".entry scale(" in first.text and ".target sm_90" in first.text
    assert f'{source.path}"' in first.text and ".loc" in first.text
    assert len(list(empty_cache.iterdir())) == 1


def test_ptx_of_a_wrong_source_raises_the_compilers_message(empty_cache):
    with pytest.raises(CompileError, match=r"compute_80[\s\S]*expected a"):
        compiler.compile_ptx(Source.from_text("__global__ void k(int* x) { x[0] = ; }"), "k", "compute_80")


# ---- missing packages


@pytest.mark.parametrize(
    "breakage, words",
    [
        ("sys.modules.update(dict.fromkeys(('cupy.cuda', 'cupy._core')))", "pip install cupy-cuda1"),
        ("from cupy.cuda import nvrtc; nvrtc.getVersion = lambda: 1 / 0", "pip install nvidia-cuda-nvrtc"),
    ],
    ids=["a broken CuPy", "no NVRTC"],
)
def test_missing_packages_are_named_with_the_install_command(tmp_path, breakage, words):
    code = f"""
import sys, cukern
{breakage}
try:
    cukern.compile({SCALE!r}).compile({ARCH!r})
except cukern.SetupError as error:
    print(error)
"""
    assert words in run_python(code, CUKERN_CACHE_DIR=str(tmp_path)).stdout


def test_an_older_cupy_finds_nvrtc_of_a_wheel(monkeypatch):
    """Its first call fails. Then the wheels' libraries are loaded, and no others."""
    loaded, calls = [], []

    def version():
        calls.append(0)
        if len(calls) == 1:
            raise RuntimeError
        return 12, 9

    binding = types.SimpleNamespace(getVersion=version)
    monkeypatch.setattr(compiler, "_cupy_nvrtc", lambda: binding)
    monkeypatch.setattr(bindings, "has_cupy", lambda: True)
    monkeypatch.setattr(compiler.ctypes, "CDLL", loaded.append)
    compiler.nvrtc.cache_clear()
    try:
        assert compiler.nvrtc() is binding and all("libnvrtc.so" in library for library in loaded)
        assert not {"libnvrtc.so.13", "libnvrtc.so.12"} & set(loaded)
    finally:
        compiler.nvrtc.cache_clear()


def test_missing_cuda_headers_are_named_with_the_install_command(monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    compiler.cuda_include.cache_clear()
    with pytest.raises(SetupError, match="pip install nvidia-cuda-runtime"):
        compiler.cuda_include()


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """A folder for NVIDIA's wheels, of CUDA 13."""
    monkeypatch.setattr(compiler, "_wheel_folders", lambda: [tmp_path])
    monkeypatch.setattr(compiler, "nvrtc", lambda: types.SimpleNamespace(getVersion=lambda: (13, 0)))
    for function in (compiler.cuda_include, compiler._more_includes):
        function.cache_clear()
    yield tmp_path
    for function in (compiler.cuda_include, compiler._more_includes):
        function.cache_clear()


def test_headers_of_the_wheels_of_cuda_13_are_found(wheels):
    """They lie in one folder, and CCCL, which cooperative groups and curand need, in a folder inside of
    it."""
    cccl = wheels / "cu13/include/cccl"
    cccl.mkdir(parents=True)
    (cccl.parent / "cuda_fp16.h").write_text("")
    assert compiler.cuda_include() == cccl.parent
    assert compiler._more_includes()[0] == cccl
