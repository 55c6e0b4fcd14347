"""Parameter lists are read as C++ means them, and arguments are packed as the kernel reads them, or refused."""

import ctypes
import math
import struct

import pytest
import torch

from cukern.runtime.signature import Param, explain_misfit, kernel_names, offsets, packer, parse
from cukern.runtime.sources import Source

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
settings = hypothesis.settings(deadline=None)  # a busy machine is no fault of the code

INTEGERS = {
    "char": ctypes.c_int8,
    "signed char": ctypes.c_int8,
    "unsigned char": ctypes.c_uint8,
    "short": ctypes.c_int16,
    "unsigned short": ctypes.c_uint16,
    "int": ctypes.c_int32,
    "unsigned": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint32,
    "long": ctypes.c_int64,
    "long long": ctypes.c_int64,
    "unsigned long": ctypes.c_uint64,
    "unsigned long long": ctypes.c_uint64,
    "size_t": ctypes.c_uint64,
}
CTYPES = {**INTEGERS, "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool}


def limits(ctype: str) -> tuple[int, int]:
    bits = 8 * ctypes.sizeof(INTEGERS[ctype])
    signed = INTEGERS[ctype](-1).value < 0
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def params(source: str, name: str = "k") -> list[tuple[str, str, bool]]:
    return [(p.name, p.ctype, p.pointer) for p in parse(Source.from_text(source), name)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", []),
        ("float* x", [("x", "float", True)]),
        ("const float *x", [("x", "float", True)]),
        ("float const* x", [("x", "float", True)]),
        ("const float* __restrict__ x", [("x", "float", True)]),
        ("const float* const __restrict__ x", [("x", "float", True)]),
        ("const float *__restrict__ x, float *__restrict y", [("x", "float", True), ("y", "float", True)]),
        ("float x[]", [("x", "float", True)]),
        ("volatile int* flags", [("flags", "int", True)]),
        ("const __half* x", [("x", "__half", True)]),
        ("const float4* x", [("x", "float4", True)]),
        ("int n", [("n", "int", False)]),
        ("const int n", [("n", "int", False)]),
        ("int const n", [("n", "int", False)]),
        ("unsigned n, unsigned int m", [("n", "unsigned", False), ("m", "unsigned int", False)]),
        ("long long n, unsigned   long\nlong m", [("n", "long long", False), ("m", "unsigned long long", False)]),
        (
            "float* x, /* how many, at least 1 */ int n, // last\n float scale",
            [("x", "float", True), ("n", "int", False), ("scale", "float", False)],
        ),
        ("bool causal, double p, size_t bytes", [("causal", "bool", False), ("p", "double", False), ("bytes", "size_t", False)]),
    ],
)
def test_parameter_lists(text, expected):
    assert params(f"__global__ void k({text}) {{}}") == expected


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void k",
        'extern "C" __global__ void k',
        "static __global__ void k",
        "__global__ static void k",
        "__global__ void __launch_bounds__(256) k",
        "__global__ void __launch_bounds__(256, 2) k",
        "__global__ __launch_bounds__(32 * (4 + 4)) void k",
        "__global__ __cluster_dims__(2, 1, 1) void k",
        "__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128) k",
        'extern "C" __global__ __launch_bounds__(64) void\nk ',
    ],
)
def test_qualifiers_and_attributes(head):
    assert params(f"{head}(float* x, int n) {{}}") == [("x", "float", True), ("n", "int", False)]


def test_kernels_are_listed_in_order_and_comments_do_not_count():
    source = Source.from_text(
        """
        // __global__ void commented_out(int n) {}
        /* __global__ void neither(int n) {} */
        __device__ void helper(int n) {}
        template <typename T> __global__ void second_to_none(T* x) {}
        extern "C" { __global__ void inside(int n) {} }
        __global__ void last() {}
        """
    )
    assert kernel_names(source) == ["second_to_none", "inside", "last"]


@pytest.mark.parametrize(
    "name, expected",
    [
        ("k<float>", [("out", "float", True), ("x", "float", True), ("s", "float", False)]),
        ("k<double, 4>", [("out", "double", True), ("x", "double", True), ("s", "double", False)]),
        ("k<float, 8, true>", [("out", "float", True), ("x", "float", True), ("s", "float", False)]),
        (
            "k <unsigned long long>",
            [("out", "unsigned long long", True), ("x", "unsigned long long", True), ("s", "unsigned long long", False)],
        ),
    ],
)
def test_template_arguments_are_put_in(name, expected):
    source = "template <typename T, int N = 4, bool FAST = true>\n__global__ void k(T* out, const T* __restrict__ x, T s) {}"
    assert params(source, name) == expected


@pytest.mark.parametrize(
    "head, name, expected",
    [
        ("template <class T = float>", "k<>", "float"),
        ("template <typename S, typename T = S>", "k<double>", "double"),
        ("template <typename T, int N = 16 / sizeof(T)>", "k<float>", "float"),
    ],
)
def test_template_defaults(head, name, expected):
    assert params(f"{head}\n__global__ void k(T x) {{}}", name) == [("x", expected, False)]


@pytest.mark.parametrize("name", ["k", "k<>", "k<float, 4, true, 5>"])
def test_wrong_number_of_template_arguments(name):
    with pytest.raises(ValueError, match="kernel 'k' has 3 template parameters"):
        params("template <typename T, int N = 4, bool F = true> __global__ void k(T* x) {}", name)


def test_unknown_kernel_names_those_that_are_there():
    with pytest.raises(ValueError, match=r"no __global__ function 'c'; it has a, b"):
        params("__global__ void a() {}\n__global__ void b() {}", "c")
    with pytest.raises(ValueError, match="it has none"):
        params("int x;", "c")


def test_a_kernel_of_a_file_that_is_included(tmp_path):
    (tmp_path / "inner.cuh").write_text("// __global__ void b(int no) {}\n__global__ void b(float* x, int n) {}")
    (tmp_path / "outer.cuh").write_text('#include "inner.cuh"')
    (tmp_path / "file.cu").write_text('#include "outer.cuh"\n__global__ void a(int m) {}')
    source = Source.read(tmp_path / "file.cu")
    assert [p.name for p in parse(source, "b")] == ["x", "n"] and [p.name for p in parse(source, "a")] == ["m"]
    assert kernel_names(source) == ["a"], "which one is meant where none is named: the file's own"


@pytest.mark.parametrize("text", ["struct Config c", "float** x", "int& n", "__half h", "float (*f)(float)", "std::pair<int, int> p"])
def test_what_cannot_be_passed_is_refused_by_name(text):
    with pytest.raises(TypeError) as caught:
        params(f"__global__ void k({text}) {{}}")
    assert text in str(caught.value) and "'k'" in str(caught.value)


@pytest.mark.parametrize(
    "ctype, dtypes",
    [
        ("__half", [torch.float16]),
        ("half", [torch.float16]),
        ("__nv_bfloat16", [torch.bfloat16]),
        ("float", [torch.float32]),
        ("double", [torch.float64]),
        ("int", [torch.int32]),
        ("long long", [torch.int64]),
        ("unsigned char", [torch.uint8, torch.bool]),
        ("MyStruct", []),
        ("void", []),
    ],
)
def test_dtypes_of_a_pointer(ctype, dtypes):
    assert set(Param("x", ctype, True).dtypes) == set(dtypes)


# ---- packing


@st.composite
def calls(draw):
    """A parameter list and a fitting value for each."""
    types = draw(st.lists(st.sampled_from([*CTYPES, "pointer"]), max_size=12))
    values = []
    for t in types:
        if t == "pointer":
            values.append(draw(st.integers(0, 2**64 - 1)))
        elif t in INTEGERS:
            values.append(draw(st.integers(*limits(t))))
        elif t == "bool":
            values.append(draw(st.booleans()))
        else:
            values.append(draw(st.floats(width=32 if t == "float" else 64)))
    return types, values


@settings
@hypothesis.given(calls())
def test_arguments_lie_where_the_kernel_reads_them(call):
    """ctypes lays a struct out by the C rules, which are those of a kernel's parameters."""
    types, values = call
    fields = [(f"p{i}", ctypes.c_uint64 if t == "pointer" else CTYPES[t]) for i, t in enumerate(types)]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": fields})
    params = tuple(Param(f"p{i}", "float" if t == "pointer" else t, t == "pointer") for i, t in enumerate(types))
    packed = packer(params).pack(*values)
    assert offsets(params) == [getattr(layout, field).offset for field, _ in fields]
    read = layout.from_buffer_copy(packed.ljust(ctypes.sizeof(layout), b"\0"))
    for (field, _), value in zip(fields, values, strict=True):
        got = getattr(read, field)
        assert got == value or (isinstance(value, float) and math.isnan(value) and math.isnan(got))


def misfit(ctype: str, value: object) -> Exception:
    """The error that a call with this value gives; the packing itself must fail first."""
    param = Param("count", ctype, False)
    with pytest.raises((struct.error, OverflowError)):
        packer((param,)).pack(value)
    return explain_misfit("scale<float>", (param,), (value,))


@settings
@hypothesis.given(st.sampled_from(list(INTEGERS)), st.data())
def test_integers_out_of_range_are_refused(ctype, data):
    low, high = limits(ctype)
    value = data.draw(st.one_of(st.integers(max_value=low - 1), st.integers(min_value=high + 1)))
    error = misfit(ctype, value)
    assert isinstance(error, ValueError)
    assert all(word in str(error) for word in ("scale<float>", str(value), f"{ctype} count"))


@settings
@hypothesis.given(st.sampled_from(list(INTEGERS)), st.one_of(st.floats(), st.text(), st.none(), st.complex_numbers()))
def test_what_is_no_integer_is_refused(ctype, value):
    error = misfit(ctype, value)
    assert isinstance(error, TypeError)
    assert all(word in str(error) for word in (repr(value), type(value).__name__, f"{ctype} count"))


@pytest.mark.parametrize("ctype", ["float", "double"])
@pytest.mark.parametrize("value", ["1.0", None, 1j, [1.0]], ids=repr)
def test_what_is_no_number_is_refused(ctype, value):
    assert isinstance(misfit(ctype, value), TypeError)


def test_an_integer_that_is_too_large_for_a_double_is_refused():
    assert isinstance(misfit("double", 10**400), ValueError)


def test_wrong_number_of_arguments():
    two = (Param("x", "float", True), Param("n", "int", False))
    error = explain_misfit("k", two, (1, 2, 3))
    assert isinstance(error, TypeError) and str(error) == "k takes 2 arguments (float* x, int n), got 3"
