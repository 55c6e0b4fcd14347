"""Element by element: vectors and tails, strides, structs, gathers, work in place."""

import torch
from sim_corpus import Kernel, data, ints, zeros

from cukern import sim

KERNELS = [
    Kernel(
        "vectors of four and a tail",
        """
__global__ void k(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n / 4) {
        float4 v = ((const float4*)x)[i];
        ((float4*)out)[i] = make_float4(v.x + 1, v.y + 1, v.z + 1, v.w + 1);
    } else if (n / 4 * 4 + i - n / 4 < n) {
        int j = n / 4 * 4 + i - n / 4;
        out[j] = x[j] + 1;
    }
}
""",
        lambda x, n: x + 1,
        [
            ("if (i < n / 4)", "if (i < (n + 3) / 4)", sim.OutOfBounds, "across the end"),
            ("((const float4*)x)[i]", "*(const float4*)(x + 3 * i)", sim.Misaligned),
            ("n / 4 * 4 + i - n / 4 < n", "n / 4 * 4 + i - n / 4 <= n", sim.OutOfBounds),
            ("out[j] =", "out[n / 4 * 4] =", sim.Race, "another value"),
        ],
        lambda: [torch.zeros(243), torch.randn(243), 243],
    ),
    Kernel(
        "pairs of half and an odd last one",
        """
#include <cuda_fp16.h>
__global__ void k(__half* out, const __half* x, int n) {
    int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 1 < n) *(__half2*)(out + i) = __hmul2(*(const __half2*)(x + i), __float2half2_rn(2));
    else if (i < n) out[i] = __hmul(x[i], __float2half(2));
}
""",
        lambda x, n: 2 * x,
        [("i + 1 < n", "i < n", sim.OutOfBounds), ("(x + i), ", "(x + i + 1), ", sim.Misaligned)],
        lambda: [zeros(77, torch.float16), torch.randn(77).half(), 77],
    ),
    Kernel(
        "eight bfloat16 at once",
        """
#include <cuda_bf16.h>
__global__ void k(__nv_bfloat16* out, const __nv_bfloat16* x, int n) {
    int i = 8 * threadIdx.x;
    if (i >= n) return;
    alignas(16) __nv_bfloat16 v[8];
    *(int4*)v = *(const int4*)(x + i);
    for (int j = 0; j < 8; ++j) v[j] = __float2bfloat16(-__bfloat162float(v[j]));
    *(int4*)(out + i) = *(int4*)v;
}
""",
        lambda x, n: -x,
        [
            ("8 * threadIdx.x", "4 * threadIdx.x", sim.Misaligned),
            ("if (i >= n) return;", "if (i > n) return;", sim.OutOfBounds),
            (
                "*(int4*)v = *(const int4*)(x + i)",
                "*(int2*)v = *(const int2*)(x + i)",
                sim.Uninitialized,
                "no statement has set|nobody wrote",
            ),
        ],
        lambda: [zeros(200, torch.bfloat16), torch.randn(200).bfloat16(), 200],
        block=32,
    ),
    Kernel(
        "grid-stride loop",
        """
    for (int j = i; j < n; j += gridDim.x * blockDim.x) out[j] = 3 * x[j];
""",
        lambda x, n: 3 * x,
        [
            ("j < n", "j <= n", sim.OutOfBounds, "0 bytes after the end"),
            ("out[j] = 3 * x[j]", "out[j / 2] = 3 * x[j]", sim.Race, "another value|nothing orders"),
            ("j += gridDim.x * blockDim.x", "j += gridDim.x * blockDim.x * (n / 1000)", sim.StepLimit),
        ],
        lambda: [ints(500), data(500), 500],
        grid=2,
    ),
    Kernel(
        "rows and columns",
        """
__global__ void k(int* out, const int* x, int rows, int columns) {
    int c = blockIdx.x * 16 + threadIdx.x, r = blockIdx.y * 4 + threadIdx.y;
    if (c < columns && r < rows) out[r * columns + c] = x[r * columns + c] + r;
}
""",
        lambda x, rows, columns: x + torch.arange(rows * columns) // columns,
        [
            ("c < columns && r < rows", "c < columns || r < rows", sim.OutOfBounds),
            ("c < columns && r < rows", "c < columns && r <= rows", sim.OutOfBounds),
            ("r * columns + c] +", "r * columns + 2 * c] +", sim.OutOfBounds),
        ],
        lambda: [ints(9 * 21), data(9 * 21), 9, 21],
        grid=(2, 3),
        block=(16, 4),
    ),
    Kernel(
        "structs with padding",
        """
struct Item { char tag; int value; short extra; };
__global__ void k(int* out, const int* x) {
    __shared__ Item items[32];
    int t = threadIdx.x;
    items[t].tag = x[t], items[t].value = 3 * x[t], items[t].extra = t;
    __syncwarp();
    Item one = items[31 - t];
    out[t] = one.value + one.tag * 1000 + one.extra * 100000;
}
""",
        lambda x: (x * 1003 + torch.arange(32) * 100000).flip(0),
        [
            ("    __syncwarp();\n", "", sim.Race),
            (", items[t].extra = t", "", sim.Uninitialized),
            ("items[31 - t]", "items[32 - t]", sim.OutOfBounds),
        ],
        lambda: [ints(32), data(32)],
        block=32,
    ),
    Kernel(
        "a gather by index",
        """
__global__ void k(int* out, const int* x, const long long* index, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = index[i] < 0 ? 0 : x[index[i]];
}
""",
        lambda x, index, n: torch.where(index < 0, 0, x[index.clamp(min=0)]),
        [
            ("index[i] < 0 ? 0 : ", "", sim.OutOfBounds, "before the start"),
            ("x[index[i]]", "x[2 * index[i]]", sim.OutOfBounds),
        ],
        lambda: [ints(90), data(40), torch.arange(90) * 7 % 41 - 1, 90],
        grid=2,
    ),
    Kernel(
        "a scatter that adds",
        """
    atomicAdd(out + x[i] % 16, 1);
""",
        lambda x, n: torch.bincount(x % 16, minlength=16),
        [
            ("atomicAdd(out + x[i] % 16, 1)", "out[x[i] % 16] += 1", sim.Race),
            ("x[i] % 16", "x[i] % 17", sim.OutOfBounds),
        ],
        lambda: [zeros(16), data(128), 128],
        grid=2,
    ),
    Kernel(
        "in place",
        """
    if (i < n) out[i] = out[i] * 2 + x[i];
""",
        lambda x, n: data(100) * 2 + x,
        [("out[i] * 2", "out[(i + 64) % 100] * 2", sim.Race), ("if (i < n) ", "", sim.OutOfBounds)],
        lambda: [data(100), data(100), 100],
        grid=2,
    ),
    Kernel(
        "an optional bias",
        """
__global__ void k(int* out, const int* x, const int* bias) {
    out[threadIdx.x] = x[threadIdx.x] + (bias ? bias[threadIdx.x % 8] : 0);
}
""",
        lambda x, bias: x,
        [("(bias ? bias[threadIdx.x % 8] : 0)", "bias[threadIdx.x % 8]", sim.OutOfBounds, "null pointer")],
        lambda: [ints(64), data(64), None],
    ),
    Kernel(
        "early return, then a barrier",
        """
    __shared__ int s[64];
    if (t >= n) return;
    s[t] = x[t];
    __syncthreads();
    out[t] = s[n - 1 - t];
""",
        lambda x, n: x.flip(0),
        [
            ("s[n - 1 - t]", "s[n - t]", sim.Uninitialized),
            ("    __syncthreads();\n", "", sim.Race),
            ("t >= n", "t > n", sim.OutOfBounds),
        ],
        lambda: [ints(41), data(41), 41],
    ),
    Kernel(
        "rows with a leading dimension",
        """
__global__ void k(int* out, const int* x, int rows, int columns, int stride) {
    for (int r = threadIdx.y; r < rows; r += 2)
        for (int c = threadIdx.x; c < columns; c += 32) out[r * columns + c] = x[r * stride + c];
}
""",
        lambda x, rows, columns, stride: x.reshape(-1),
        [
            ("x[r * stride + c]", "x[c * stride + r]", sim.OutOfBounds),
            ("c < columns", "c < stride", sim.OutOfBounds, "between the rows|another|after the end"),
        ],
        lambda: [ints(5 * 20), data(5 * 24).view(5, 24)[:, :20], 5, 20, 24],
        block=(32, 2),
    ),
    Kernel(
        "a private array",
        """
    int a[8];
    for (int j = 0; j < 8; ++j) a[j] = 0;
    for (int j = 0; j < n; ++j) a[x[(i + j) % n] % 8] += 1;
    int best = 0;
    for (int j = 1; j < 8; ++j)
        if (a[j] > a[best]) best = j;
    out[i] = a[best];
""",
        lambda x, n: torch.bincount(x % 8).max().repeat(64),
        [
            (
                "for (int j = 0; j < 8; ++j) a[j] = 0;",
                "for (int j = 1; j < 8; ++j) a[j] = 0;",
                sim.Uninitialized,
            ),
            ("% 8] += 1", "% 9 - (x[0] == 0)] += 1", sim.OutOfBounds),
        ],
    ),
    Kernel(
        "offsets from one address, and a tail",
        """
__global__ void k(int* out, const int* x, int n) {  // three elements per thread; the last threads have fewer
    const int* p = x + 3 * (blockIdx.x * 64 + threadIdx.x);
    int* q = out + (p - x);
    int left = n - (int)(p - x);
    for (int round = 0; round < 3; ++round) {
        if (left > 0) q[0] = p[0] + q[0];
        if (left > 1) q[1] = p[1] + q[1];
        if (left > 2) q[2] = p[2] + q[2];
    }
}
""",
        lambda x, n: 3 * x,
        [
            (
                "if (left > 2) q[2] = p[2]",
                "if (left > 1) q[2] = p[2]",
                sim.OutOfBounds,
                "0 bytes after the end of the tensor",
            ),
            ("if (left > 1) q[1] = p[1]", "if (left > 3) q[3] = p[1]", sim.Race),
            ("x + 3 * (", "x + 2 * (", sim.Race),
            ("const int* p = x + 3", "const int* p = (const int*)((const char*)x + 1) + 3", sim.Misaligned),
            ("q[1] = p[1] + q[1]", "*(volatile long long*)(q + 1) = 0", sim.Misaligned),
        ],
        lambda: [zeros(320), data(320), 320],
        grid=2,
    ),
]
