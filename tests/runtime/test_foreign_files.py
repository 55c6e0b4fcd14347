"""Files of other projects load unchanged: parameter types, namespaces, host code next to the kernels, headers
that NVRTC lacks."""

import ctypes

import numpy as np
import pytest
import torch

import cukern
from cukern import sim
from cukern.runtime.compile.compiler import header_wheel, nvrtc

HOST = """
#include <cstdio>
#include <stdlib.h>
#include <assert.h>
#include <math.h>
#include <float.h>
#include <vector>
#include <cuda_runtime.h>
#define CHECK(x) do { if ((x) != cudaSuccess) { printf("error\\n"); exit(1); } } while (0)
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))
using namespace std;

struct Scale { float by; int n; };
static const int BLOCK = 128;

namespace outer { namespace {
template <typename T>
__global__ void scale(T* __restrict__ out, const T* __restrict__ x, const __grid_constant__ Scale s) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    assert(s.n >= 0);
    if (i < s.n) out[i] = x[i] * s.by;
    if (i == 0 && s.n == 0) out[0] = -FLT_MAX + INFINITY;
}
} }

void scale_cpu(float* out, const float* x, Scale s) { for (int i = 0; i < s.n; i++) out[i] = x[i] * s.by; }

void launch(float* out, const float* x, Scale s, cudaStream_t stream = 0) {
    outer::scale<float><<<CEIL_DIV(s.n, BLOCK), BLOCK, 0, stream>>>(out, x, s);
    CHECK(cudaGetLastError());
}

int main(int argc, char** argv) {
    std::vector<float> x(1000);
    float* d;
    cudaMalloc(&d, 4000);
    launch(d, d, Scale{2.f, 1000});
    free(x.data());
    return 0;
}
"""


class Scale(ctypes.Structure):
    _fields_ = (("by", ctypes.c_float), ("n", ctypes.c_int))


@pytest.mark.kernels
def test_file_with_host_code_and_a_struct_by_value():
    kernel, x, out = cukern.compile(HOST, "scale<float>"), torch.randn(300), torch.full((300,), -1.0)
    with cukern.backend("sim"):
        kernel(out, x, Scale(3.0, 290), grid=3, block=128)
    assert torch.equal(out[:290], x[:290] * 3) and (out[290:] == -1).all()


TYPES = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
typedef struct { double d; char c; } Mixed;
struct Pointers { const float* x; float* out; };
__global__ void k(float* out, uint a, int64_t b, ptrdiff_t c, half h, __nv_bfloat16 bf, float2 v, uchar4 u,
    Mixed m, bool flag,
                  float** rows, int, size_t last = 3) {
    out[0] = a; out[1] = b; out[2] = c; out[3] = (float)h; out[4] = (float)bf; out[5] = v.x; out[6] = v.y;
    out[7] = u.w;
    out[8] = m.d; out[9] = m.c; out[10] = flag; out[11] = rows[1][2]; out[12] = last;
}
__global__ void through(Pointers p, int n) { if (threadIdx.x < n) p.out[threadIdx.x] = p.x[threadIdx.x] + 1; }
"""


class Mixed(ctypes.Structure):
    _fields_ = (("d", ctypes.c_double), ("c", ctypes.c_char))


@pytest.mark.kernels
def test_every_type_of_parameter():
    kernel = cukern.compile(TYPES, "k")
    out, table = torch.zeros(13), torch.arange(10.0)
    rows = torch.tensor([table.data_ptr(), table[5:].data_ptr()])
    mixed = np.zeros((), np.dtype([("d", "f8"), ("c", "i1")], align=True))
    mixed["d"], mixed["c"] = 2.5, 7
    with cukern.backend("sim"), sim.memory.scope([table]):
        kernel(
            out,
            3,
            -4,
            1 << 20,
            0.5,
            1.5,
            (1.25, -2.0),
            (1, 2, 3, 4),
            mixed,
            True,
            rows,
            0,
            9,
            grid=1,
            block=1,
        )
    assert out.tolist() == [3, -4, 1 << 20, 0.5, 1.5, 1.25, -2, 4, 2.5, 7, 1, 7, 9]


@pytest.mark.kernels
def test_struct_of_pointers():
    kernel, x, out = cukern.compile(TYPES, "through"), torch.randn(40), torch.zeros(40)
    pointers = x.data_ptr().to_bytes(8, "little") + out.data_ptr().to_bytes(8, "little")
    with cukern.backend("sim"):
        with sim.memory.scope([x, out]):
            kernel(pointers, 33, grid=1, block=64)
        with pytest.raises(sim.OutOfBounds):
            kernel(pointers, 33, grid=1, block=64)
    assert torch.equal(out[:33], x[:33] + 1)


@pytest.mark.parametrize(
    "value, error, words",
    [
        (b"123", ValueError, "Scale s has 8 bytes, got 3"),
        (Mixed(), ValueError, "Scale s has 8 bytes, got 16"),
        (7, TypeError, "Scale s takes bytes, a ctypes.Structure or a numpy record of 8 bytes, got 7"),
        (None, TypeError, "Scale s takes bytes, a ctypes.Structure or a numpy record of 8 bytes, got None"),
        ((1.0, 2), TypeError, "Scale s takes bytes"),
    ],
)
def test_struct_that_does_not_fit(value, error, words):
    kernel, x = cukern.compile(HOST, "scale<float>"), torch.zeros(4)
    with cukern.backend("sim"), pytest.raises(error, match=words):
        kernel(x, x.clone(), value, grid=1, block=128)


@pytest.mark.parametrize(
    "value, error, words",
    [
        ((1.0,), ValueError, "float2 v has 2 elements, got 1"),
        (1.0, TypeError, "float2 v"),
        (("a", 1), TypeError, "float2 v"),
    ],
)
def test_vector_that_does_not_fit(value, error, words):
    kernel = cukern.compile("__global__ void k(float* out, float2 v) { out[0] = v.x; }")
    with cukern.backend("sim"), pytest.raises(error, match=words):
        kernel(torch.zeros(1), value, grid=1, block=1)


@pytest.mark.parametrize(
    "value, error",
    [("a", TypeError), (None, TypeError), (1e39, ValueError), (True, None), (float("nan"), None)],
)
def test_bfloat16_that_does_not_fit(value, error):
    text = "#include <cuda_bf16.h>\n__global__ void k(float* out, __nv_bfloat16 v) { out[0] = (float)v; }"
    kernel, out = cukern.compile(text), torch.zeros(1)
    with cukern.backend("sim"):
        if error is None:
            kernel(out, value, grid=1, block=1)
            assert out.item() == value or (value != value and out.isnan())
        else:
            with pytest.raises(error, match="__nv_bfloat16 v"):
                kernel(out, value, grid=1, block=1)


HEADERS = {  # a header, and a kernel that uses it
    "cooperative_groups/reduce.h": "namespace cg = cooperative_groups; __global__ void k(int* o) "
    "{ *o = cg::reduce(cg::tiled_partition<32>(cg::this_thread_block()), 1, cg::plus<int>()); }",
    "cub/cub.cuh": "using R = cub::BlockReduce<int, 64>; __global__ void k(int* o) { __shared__ "
    "R::TempStorage t; *o = R(t).Sum(1); }",
    "cuda/std/array": "__global__ void k(int* o) { cuda::std::array<int, 2> a{1, 2}; *o = a[1]; }",
    "cuda/atomic": "__global__ void k(int* o) { cuda::atomic_ref<int, "
    "cuda::thread_scope_device>(*o).fetch_add(1); }",
    "cuda.h": "__global__ void k(int* o) { *o = CUDA_VERSION; }",
    "mma.h": "__global__ void k(float* o) { nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, "
    "float> c; *o = c.x[0]; }",
    "curand_kernel.h": "__global__ void k(float* o) { curandStatePhilox4_32_10_t s; curand_init(1, 0, 0, "
    "&s); *o = curand_uniform(&s); }",
}


@pytest.mark.parametrize("header", HEADERS)
def test_headers_of_nvidia(header):
    """CuPy's wheel has those of CCCL. mma.h and curand_kernel.h need a wheel, which the error names."""
    kernel = cukern.compile(f"#include <{header}>\n{HEADERS[header]}")
    inner = {"mma.h": "crt/mma.h", "curand_kernel.h": "curand_kernel.h"}.get(header, "")
    wheel = header_wheel(inner, nvrtc().getVersion()[0])
    try:
        kernel.compile("sm_80")
    except cukern.CompileError as error:
        assert wheel and f"pip install {wheel}" in str(error)


@pytest.mark.parametrize(
    "header, cuda12, cuda13",
    [
        ("cub/cub.cuh", "nvidia-cuda-cccl-cu12", "nvidia-cuda-cccl"),
        ("crt/mma.h", "nvidia-cuda-nvcc-cu12", "nvidia-cuda-crt"),
        ("curand_kernel.h", "nvidia-curand-cu12", "nvidia-curand"),
        ("mine.h", "", ""),
    ],
)
def test_the_wheel_of_a_header(header, cuda12, cuda13):
    assert (header_wheel(header, 12), header_wheel(header, 13)) == (cuda12, cuda13)
