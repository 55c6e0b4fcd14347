"""Host code beside kernels: it never changes what they compute, and what was taken out is listed."""

import sys

import host_texts
import pytest
import torch
from helpers import run, write

import cukern
from cukern import sim
from cukern.runtime.compile.compiler import CompileError

pytest.importorskip("clang.cindex", reason="host functions are found with libclang, which is not installed")

KERNEL = "__global__ void k(float* out) { out[0] = f(7); }\n"
FLOAT = "__device__ float f(float a) { return a / 2; }\n"
LAUNCH = "void run(float* x) { k<<<1, 1>>>(x); }\n"
CONFIRMED = {  # wrong on an H200 before: the label and the host code
    ("overload behind a macro", "stream"),
    ("specialization", "torch load_inline"),
    ("own namespace at", "none"),
    ("macro with a semicolon", "torch load_inline"),
    ("launch macro", "launch"),
    ("trait of int64_t", "main"),
    ("limits", "none"),
    ("limits of integers", "none"),
    ("alias in a namespace", "stream"),
    ("continued define", "torch load_inline"),
    ("X macro", "comments"),
    ("constructor", "iostream"),
}


def value(text: str, name: str = "k") -> float:
    out = torch.full((4,), -77.0)
    with cukern.backend("sim"):
        cukern.compile(text, name)(out, grid=1, block=1)
    return out[0].item()


@pytest.mark.parametrize("device, host", sorted(CONFIRMED))
def test_host_code_does_not_change_a_kernel(device, host):
    assert value(host_texts.text(device, host)) == host_texts.DEVICE[device][2]


@pytest.mark.slow
@pytest.mark.parametrize("device, host", host_texts.PAIRS)
def test_no_host_code_changes_a_kernel(device, host):
    """nvcc 13.0 gives the same values for the texts without torch."""
    assert value(host_texts.text(device, host)) == host_texts.DEVICE[device][2]


def test_what_was_taken_out_is_listed(tmp_path, empty_cache):
    host = "ncclComm_t odd(ncclComm_t c) {\n  return c;\n}\n"
    host += "#define BIND(n) void run_##n(float* x) { k<<<1, 1>>>(x); }\nBIND(a)\n"
    path = write(tmp_path, FLOAT + KERNEL + LAUNCH + host)
    with cukern.backend("sim"):
        for _ in range(2):  # the second time from the cache
            assert cukern.load(path).removed == ("run (k.cu:3-3)", "odd (k.cu:4-6)", "run_a (k.cu:8-8)")
    assert cukern.compile(FLOAT + KERNEL, "k").removed == ()
    write(tmp_path, FLOAT + KERNEL.replace("f(7)", "g(7)") + LAUNCH.replace("{", "{ hostOnly();"))
    says = r'(?s)k\.cu\(2\): error: identifier "g" is undefined.*taken out as host code: run \(k.cu:3-3\)'
    with pytest.raises(CompileError, match=says):
        cukern.load(path).compile("sm_80")


REFUSED = {
    "an overload that the kernel calls": FLOAT
    + "ncclComm_t f(int a, ncclComm_t c = 0) { return c; }\n"
    + KERNEL,
    "a name that remains": "ncclComm_t g(int a) { return 0; }\n" + FLOAT.replace("a / 2", "g(1)") + KERNEL,
    "a device function behind macros": "#define D __device__\n#define HD D inline\n"
    + FLOAT
    + "HD int f(int a) { return ncclOf(a); }\n"
    + KERNEL,
    "a constexpr function": FLOAT + "constexpr int f(int a) { return sqrtOf(a); }\n" + KERNEL,
    "a deduced type": FLOAT + "auto f(int a) { return hostOf(a); }\n" + KERNEL,
    "a specialization in a macro": "template <typename T> struct S { enum { v = 1 }; };\n#define M(T) "
    "template <> struct S<T> { enum { v = 2 }; }; "
    "void of_##T(ncclComm_t c) {}\nM(float)\n__global__ void k(float* out) { out[0] = S<float>::v; }\n",
    "a type": "struct S { ncclComm_t c; };\n" + FLOAT + KERNEL,
    "a kernel that launches": FLOAT + KERNEL.replace("{", "{ k<<<1, 1>>>(out);"),
    "braces that a directive unbalances": FLOAT
    + "void run(int n) {\n#ifdef A\n if (n) {\n#else\n if (ncclOf(n)) {\n#endif\n } }\n"
    + KERNEL,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_never_taken_out_is_a_compile_error(kind):
    with pytest.raises(CompileError, match=r"\(\d\): error"):
        cukern.compile(REFUSED[kind], "k").compile("sm_80")


def test_a_kernel_that_calls_a_removed_function_does_not_link():
    text = FLOAT + "int f(int a) { return ncclOf(a); }\n" + KERNEL
    with pytest.raises(CompileError, match="cukern_host_code_was_removed"):
        cukern.compile(text, "k").compile("sm_80")
    with cukern.backend("sim"), pytest.raises(sim.NotSimulated, match="cukern_host_code_was_removed"):
        cukern.compile(text, "k")(torch.zeros(1), grid=1, block=1)


def test_without_libclang_the_error_says_what_to_install(monkeypatch, empty_cache):
    monkeypatch.setitem(sys.modules, "clang", None)
    with pytest.raises(CompileError, match=r"(?s)<<<.*pip install libclang"):
        cukern.compile(FLOAT + KERNEL + LAUNCH, "k").compile("sm_80")
    assert cukern.compile(FLOAT + KERNEL, "k").compile("sm_80").code


def test_a_fault_names_the_file_that_was_compiled_now(tmp_path, empty_cache):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write(tmp_path, "__device__ void put(float* x) {\n x[9] = 1; }\n", f"{folder}/h.cuh")
        path = write(
            tmp_path, '#include "h.cuh"\n__global__ void k(float* x) { put(x); }\n', f"{folder}/k.cu"
        )
        with (
            cukern.backend("sim"),
            pytest.raises(sim.OutOfBounds, match=f"{folder}/h.cuh:2.*{folder}/k.cu:2"),
        ):
            cukern.load(path)(torch.zeros(2), grid=1, block=1)
    assert len(list(empty_cache.glob("*.kernel2"))) == 1


def test_compile_lists_what_was_taken_out(tmp_path):
    path = write(tmp_path, FLOAT + KERNEL + LAUNCH)
    printed = run([sys.executable, "-m", "cukern", "compile", str(path), "--arch", "sm_80", "-v"]).stdout
    assert "taken out as host code: run (k.cu:3-3)" in printed
