"""Parameter lists are read by the rules of C++. Arguments are packed as the kernel reads them, or refused."""

import ctypes
import math
import struct

import pytest
import torch

import cukern
from cukern.runtime.compile import signature
from cukern.runtime.compile.compiler import compiled
from cukern.runtime.compile.signature import Param, demangled, explain_misfit, offsets, packer, probe
from cukern.runtime.compile.sources import Source

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
settings = hypothesis.settings(deadline=None)  # a busy machine must not fail the tests

SIGNED = {
    "char": ctypes.c_int8,
    "short": ctypes.c_int16,
    "int": ctypes.c_int32,
    "long": ctypes.c_int64,
    "long long": ctypes.c_int64,
}
UNSIGNED = {
    "char": ctypes.c_uint8,
    "short": ctypes.c_uint16,
    "int": ctypes.c_uint32,
    "long": ctypes.c_uint64,
    "long long": ctypes.c_uint64,
}
INTEGERS = {
    "signed char": ctypes.c_int8,
    **SIGNED,
    **{f"unsigned {name}": type_ for name, type_ in UNSIGNED.items()},
}
CTYPES = {**INTEGERS, "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool}


def limits(ctype: str) -> tuple[int, int]:
    bits = 8 * ctypes.sizeof(INTEGERS[ctype])
    signed = INTEGERS[ctype](-1).value < 0
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def params(text: str, name: str = "k") -> list[tuple[str, str, bool]]:
    return [(p.name, p.ctype, p.pointer) for p in cukern.compile(text, name).params]


# What the compiler sees of each, all in one program: a text of parameters, and what they are.
LISTS = [
    ("", []),
    ("void", []),
    ("float* x", [("x", "float", True)]),
    ("float const* x", [("x", "float", True)]),
    ("const float *__restrict__ x, float *__restrict y", [("x", "float", True), ("y", "float", True)]),
    ("float x[]", [("x", "float", True)]),
    ("volatile int* flags", [("flags", "int", True)]),
    ("const volatile int* const flags", [("flags", "int", True)]),
    ("const half* x, __nv_bfloat162* y", [("x", "__half", True), ("y", "__nv_bfloat162", True)]),
    (
        "const float4* x, uchar4* y, longlong2* z",
        [("x", "float4", True), ("y", "uchar4", True), ("z", "longlong2", True)],
    ),
    ("int const n, long int m", [("n", "int", False), ("m", "long", False)]),
    ("unsigned n, unsigned int m", [("n", "unsigned int", False), ("m", "unsigned int", False)]),
    ("long long n, unsigned   long\nlong m", [("n", "long long", False), ("m", "unsigned long long", False)]),
    (
        "float* x, /* how many, at least 1 */ int n, // last\n float s",
        [("x", "float", True), ("n", "int", False), ("s", "float", False)],
    ),
    (
        "bool causal, double p, size_t bytes",
        [("causal", "bool", False), ("p", "double", False), ("bytes", "unsigned long", False)],
    ),
    ("half h, void* any", [("h", "__half", False), ("any", "void", True)]),
    (
        "float*, unsigned int, int n = 3",
        [("arg0", "float", True), ("arg1", "unsigned int", False), ("n", "int", False)],
    ),
    (
        "real* x, const Alias y, int64_t n",
        [("x", "float", True), ("y", "unsigned char", False), ("n", "long", False)],
    ),
    ("#if 0\n double* x\n#else\n float* x\n#endif\n, int n", [("x", "float", True), ("n", "int", False)]),
    ("#if 0\n double* x,\n#endif\n int n", [("arg0", "int", False)]),
    ("const unit* x, unit n", [("x", "int", True), ("n", "int", False)]),
    ("TWO(float, double)", [("arg0", "double", True), ("arg1", "float", True)]),
    ("Wide<float>::type* x, inner::Same<int> n", [("x", "double", True), ("n", "int", False)]),
]
HEAD = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cstdint>
#define unit int
#define TWO(a, b) b* first, a* second
typedef float real;
using Alias = uint8_t;
template <class T> struct Wide { using type = double; };
namespace inner { template <class T> using Same = T; }
"""


@pytest.fixture(scope="module")
def lists():
    """The parameters of each kernel of LISTS."""
    source = Source.from_text(
        HEAD + "".join(f"__global__ void k{i}(\n{text}\n) {{}}\n" for i, (text, _) in enumerate(LISTS))
    )
    names = list(source.kernels)
    with compiled(source, [probe(name) for name in names], "compute_80") as (_, mangled, _):
        return [signature.params(n, m, source.kernels[n]) for n, m in zip(names, mangled, strict=True)]


@pytest.mark.parametrize("i", range(len(LISTS)), ids=[text for text, _ in LISTS])
def test_parameters_are_those_that_the_compiler_sees(i, lists):
    assert [(p.name.replace("first", "arg0"), p.ctype, p.pointer) for p in lists[i]] == LISTS[i][1]


def test_macros_and_aliases_in_parameters():
    """The text says unsigned, the compiler sees float; and the dtypes of an alias are those of its type."""
    assert params("#define unsigned float\n__global__ void k(unsigned n, int m) {}") == [
        ("n", "float", False),
        ("m", "int", False),
    ]
    (x,) = cukern.compile("typedef double real;\n__global__ void k(real* x) {}").params
    assert x.dtypes == (torch.float64,)


@pytest.mark.parametrize(
    "mangled, types",
    [
        ("PFvvE", []),
        (
            "PFvPfPKfixmbcasdE",
            [
                "float*",
                "const float*",
                "int",
                "long long",
                "unsigned long",
                "bool",
                "char",
                "signed char",
                "short",
                "double",
            ],
        ),
        ("PFvP6__halfPKS0_S0_E", ["__half*", "const __half*", "__half"]),
        ("PFvPPfPKPKiPVxE", ["float**", "const int* const*", "volatile long long*"]),
        ("PFvPA4_iPFffERiE", ["int[4]*", "float(float)*", "int&"]),
        (
            "PFvN2ns1SEPKS1_NS0_1EENS0_1FENS0_1PIiEEPNS6_I6float4EEE",
            ["ns::S", "const ns::S*", "ns::E", "ns::F", "ns::P<int>", "ns::P<float4>*"],
        ),
        ("PFv1XILi4ELN1n1EE0ELb1EES2_E", ["X<(int)4, (n::E)0, (bool)1>", "n::E"]),
        (
            "PFvPN2ns36_GLOBAL__N__00000000_4_k_cu_3bf7cd7a1HEPSt4pairIifEE",
            ["ns::(anonymous namespace)::H*", "std::pair<int, float>*"],
        ),
    ],
)
def test_mangled_names(mangled, types):
    assert demangled(f"_Z16cukern_signatureI{mangled}EvT_") == types


@pytest.mark.parametrize(
    "mangled",
    ["", "_Z1kv", "_Z16cukern_signatureIPFv", "_Z16cukern_signatureIPFvP", "_Z16cukern_signatureIPFvS9_E"],
)
def test_mangled_names_that_are_cut_or_foreign_are_refused(mangled):
    with pytest.raises(TypeError, match="cannot read"):
        demangled(mangled)


def test_every_mangled_name_is_read_or_refused():
    """A mangled name that is cut or has a changed letter gives types or a TypeError, and fast."""
    whole = "_Z16cukern_signatureIPFvN2ns1SEPKS1_NS0_1PIiEEPNS4_I6float4EEPA4_iPFffERiPVxEEvT_"
    for i in range(len(whole)):
        for text in (whole[:i], *(whole[:i] + c + whole[i + 1 :] for c in "ESN9_P1IL")):
            try:
                demangled(text)
            except TypeError:
                continue


@pytest.mark.parametrize(
    "text, words",
    [
        ("const Config* c", r"const Config\* c must hold; declare it void\*"),
        ("int& n", "int& n cannot"),
        ("float (*f)(float)", r"float\(float\)\* arg0 must hold"),
    ],
)
def test_unsupported_parameter_types_are_refused_by_name(text, words):
    head = (
        "#include <cuda_bf16.h>\nstruct Config { int a; }; enum Colour { RED }; namespace ns { template "
        "<class T> struct Box { T t; }; }\n"
    )
    kernel = cukern.compile(f"{head}__global__ void k({text}) {{}}")
    with pytest.raises(TypeError, match=f"k: .*{words}"):
        assert kernel.params


def test_structs_enums_and_pointers_to_pointers():
    text = """
struct Config { int a; }; enum Colour { RED }; namespace ns { template <class T> struct Box { T t[3]; }; }
__global__ void k(Config c, Colour colour, float** x, ns::Box<double> b) {}
"""
    found = [(p.name, p.ctype, p.size, p.align) for p in cukern.compile(text).params]
    assert found == [
        ("c", "Config", 4, 4),
        ("colour", "int", 0, 0),
        ("x", "float*", 0, 0),
        ("b", "ns::Box<double>", 24, 8),
    ]


@pytest.mark.parametrize(
    "name, types",
    [
        ("k<float>", ["float", "float", "float"]),
        ("k<double, 4>", ["double", "double", "double"]),
        ("k <unsigned long long>", ["unsigned long long"] * 3),
        ("k<Id<int>::type, 8, true>", ["int", "int", "int"]),
    ],
)
def test_template_arguments_are_put_in(name, types):
    text = (
        "template <class T> struct Id { using type = T; };\ntemplate <typename T, int N = 4, bool FAST = "
        "true>\n"
    )
    assert [
        ctype
        for _, ctype, _ in params(f"{text}__global__ void k(T* out, const T* __restrict__ x, T s) {{}}", name)
    ] == types


@pytest.mark.parametrize("name", ["k", "k<float, 4, true, 5>"])
def test_wrong_template_arguments_are_left_to_the_compiler(name):
    with pytest.raises(cukern.CompileError, match="k"):
        params("template <typename T, int N = 4, bool F = true> __global__ void k(T* x) {}", name)


@pytest.mark.parametrize(
    "ctype, dtypes",
    [
        ("__half", [torch.float16]),
        ("__nv_bfloat16", [torch.bfloat16]),
        ("float", [torch.float32]),
        ("double", [torch.float64]),
        ("int", [torch.int32]),
        ("long", [torch.int64]),
        ("unsigned long", [torch.uint64]),
        ("unsigned char", [torch.uint8, torch.bool]),
        ("float2", [torch.float32, torch.complex64]),
        ("double2", [torch.float64, torch.complex128]),
        ("float4", [torch.float32]),
        ("uint4", [torch.uint32]),
        ("uchar4", [torch.uint8]),
        ("ulonglong2", [torch.uint64]),
        ("__half2", [torch.float16]),
        ("__nv_fp8_e4m3", [torch.float8_e4m3fn]),
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
    """ctypes lays out a struct by the rules of C, which kernel parameters follow too."""
    types, values = call
    fields = [(f"p{i}", ctypes.c_uint64 if t == "pointer" else CTYPES[t]) for i, t in enumerate(types)]
    layout = type("Layout", (ctypes.Structure,), {"_fields_": fields})
    params = tuple(
        Param(f"p{i}", "float" if t == "pointer" else t, t == "pointer") for i, t in enumerate(types)
    )
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
@hypothesis.given(
    st.sampled_from(list(INTEGERS)), st.one_of(st.floats(), st.text(), st.none(), st.complex_numbers())
)
def test_non_integers_are_refused(ctype, value):
    error = misfit(ctype, value)
    assert isinstance(error, TypeError)
    assert all(word in str(error) for word in (repr(value), type(value).__name__, f"{ctype} count"))


NOT_FLOATS = [
    (ctype, value, TypeError) for ctype in ("float", "double") for value in ("1.0", None, 1j, [1.0])
]


@pytest.mark.parametrize("ctype, value, error", [*NOT_FLOATS, ("double", 10**400, ValueError)])
def test_what_is_no_floating_point_number_is_refused(ctype, value, error):
    assert isinstance(misfit(ctype, value), error)
