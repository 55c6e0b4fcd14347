"""What to do about the usual errors of NVRTC, as a line after its log."""

import re

_HOST = "declare it __device__, or constexpr __device__ for a constant"
_HINTS = {
    r"(?:function|variable)s? without (?:execution|memory) space annotations.*\n(?!.*__global__)": (
        f"NVRTC compiles device code only: {_HOST}"
    ),
    r'namespace "std" has no member "(?:max|min|abs|exp|sqrt|pow|log|floor|ceil|round|tanh|isnan|isinf)"': (
        "NVRTC has no std:: functions: call CUDA's own, such as fmaxf, max, expf, without std::"
    ),
    r'namespace "std" has no member|name followed by "::" must be a class or namespace': (
        "NVRTC has no C++ standard library: use arrays, pointers and the functions of CUDA; cuda::std has "
        "more, such as <cuda/std/array>"
    ),
    r'identifier "(?:__)?half2?" is undefined': "add #include <cuda_fp16.h>",
    r'identifier "__nv_bfloat162?" is undefined': "add #include <cuda_bf16.h>",
    r'identifier "__nv_fp8\w*" is undefined': "add #include <cuda_fp8.h>",
    r'identifier "__(?:shfl\w*|ballot|all|any)" is undefined': (
        "warp functions take a mask since CUDA 9, such as __shfl_xor_sync(0xffffffff, v, 1)"
    ),
    r'identifier "(?:load_as|compute_t)" is undefined': 'add #include "common/math.cuh" of cukern',
    r'identifier "(?:INFINITY|NAN|(?:FLT|DBL)_\w+)" is undefined': (
        "NVRTC has no math.h and float.h: use __int_as_float(0x7f800000) for infinity, 0x7fc00000 for NaN, "
        "3.4028235e38f for FLT_MAX"
    ),
    r'identifier "M_PI" is undefined': "NVRTC has no math.h: write 3.14159265358979323846, or use sinpif "
    "and cospif",
    r'identifier "assert" is undefined': "NVRTC has no assert.h: use `if (!condition) __trap();`",
    r"operand types are: .*__(?:half|nv_bfloat16)": (
        'convert first, as in float(x): 16-bit types mix with no other type; load_as of "common/math.cuh" '
        "gives float or double"
    ),
    r"expression must have a constant value(?s:.)*?__shared__": (
        "the size of a shared array is a constant: use a template parameter, a macro (defines=), or extern "
        "__shared__ with shared= bytes"
    ),
    r"declaration is incompatible with previous(?s:.)*?extern __shared__": (
        "extern __shared__ arrays of one file have one type: declare `extern __shared__ char bytes[];` and "
        "cast the pointer"
    ),
    r"uses too much shared data": "static shared memory ends at 48 KiB: use extern __shared__, with shared= "
    "bytes at the launch",
    r'cannot open source file "(?!nv/|cuda/|cub/|thrust/|crt/|curand)': (
        "headers are searched in the folder of the .cu file, in include_dirs= of cukern.load and in cukern's "
        "kernels_cu"
    ),
    r'expected a ";"': "if that line is right, the line before it lacks a semicolon",
    r"cannot determine which instance of function template": "the kernel is a template: name an instance of "
    "it, such as scale<float>",
    r"Error in parsing name expression": "the kernel's name or a template argument is unknown in the file",
    r"no instance of (?:function|overloaded function)|too (?:few|many) arguments": "compare the call with "
    "the declaration that "
    "NVRTC names",
}


def hint(log: str) -> str:
    """The first hint that belongs to a log, as a line, or ""."""
    return next((f"\nhint: {text}" for pattern, text in _HINTS.items() if re.search(pattern, log)), "")
