"""Sums and maxima: of a warp, a block, a grid; histograms."""

import torch
from sim_corpus import Kernel, data, ints, total, zeros

from cukern import sim

KERNELS = [
    Kernel(
        "tree of a block",
        """
    __shared__ int s[256];
    s[t] = x[i];
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if (t < half) s[t] += s[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = s[0];
""",
        lambda x, n: x.view(2, 256).sum(1),
        [
            ("        __syncthreads();\n    }", "    }", sim.Race, "no barrier is between"),
            ("s[t] = x[i];\n    __syncthreads();", "s[t] = x[i];", sim.Race),
            ("half = 128", "half = 256", sim.OutOfBounds),
        ],
        lambda: [ints(2), data(512), 512],
        grid=2,
        block=256,
    ),
    Kernel(
        "warps, then their sums",
        """
    __shared__ int sums[8];
    int v = x[i];
    for (int d = 16; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
    if (t % 32 == 0) sums[t / 32] = v;
    __syncthreads();
    if (t < 32) {
        v = t < blockDim.x / 32 ? sums[t] : 0;
        for (int d = 4; d; d /= 2) v += __shfl_down_sync(~0u, v, d);
        if (t == 0) out[blockIdx.x] = v;
    }
""",
        lambda x, n: x.view(2, 192).sum(1),
        [
            ("    __syncthreads();\n    if (t < 32)", "    if (t < 32)", sim.Race),
            ("t < blockDim.x / 32 ? sums[t] : 0", "t < 8 ? sums[t] : 0", sim.Uninitialized, "sums"),
        ],
        lambda: [ints(2), data(384), 384],
        grid=2,
        block=192,
    ),
    Kernel(
        "a sum that is used again in a loop",
        """
    __shared__ int sums[4];
    for (int row = 0; row < n; ++row) {
        int v = x[row * 128 + t], all = 0;
        v = __reduce_add_sync(~0u, v);
        if (t % 32 == 0) sums[t / 32] = v;
        __syncthreads();
        for (int w = 0; w < 4; ++w) all += sums[w];
        __syncthreads();
        out[row * 128 + t] = x[row * 128 + t] - all;
    }
""",
        lambda x, n: (x.view(3, 128) - x.view(3, 128).sum(1, keepdim=True)).view(-1),
        [
            ("        __syncthreads();\n        out", "        out", sim.Race, "read at"),
            ("        __syncthreads();\n        for", "        for", sim.Race),
            ("row < n", "row <= n", sim.OutOfBounds, "'x'"),
        ],
        lambda: [ints(384), data(384), 3],
        block=128,
    ),
    Kernel(
        "a butterfly in part of a warp",
        """
    int v = x[t];
    unsigned mask = __ballot_sync(__activemask(), t < 16);
    if (t < 16) {
        for (int d = 8; d; d /= 2) v = max(v, __shfl_xor_sync(mask, v, d));
        out[t] = v;
    }
""",
        lambda x, n: x[:16].max().repeat(16),
        [("int d = 8", "int d = 16", sim.Uninitialized, "lane 16 of its warp, which is not in the mask")],
        lambda: [ints(16), data(24), 24],
        block=24,
    ),
    Kernel(
        "largest value and its place",
        """
    unsigned long long key = (unsigned long long)x[i] << 32 | (unsigned)~i;
    atomicMax((unsigned long long*)out, key);
""",
        lambda x, n: torch.tensor([~int(x.argmax()), int(x.max())]),
        [
            (
                "atomicMax((unsigned long long*)out, key)",
                "if (key > *(unsigned long long*)out) *(unsigned long long*)out = key",
                sim.Race,
            ),
            ("(unsigned long long*)out", "(unsigned long long*)(out + 1)", sim.Misaligned),
        ],
        lambda: [zeros(2), data(101), 101],
        grid=1,
        block=101,
    ),
    Kernel(
        "blocks add to one sum",
        """
    int v = i < n ? x[i] : 0;
    v = __reduce_add_sync(~0u, v);
    if (t % 32 == 0) atomicAdd(out, v);
""",
        lambda x, n: total(x),
        [("atomicAdd(out, v)", "*out += v", sim.Race), ("i < n ? x[i] : 0", "x[i]", sim.OutOfBounds)],
        lambda: [zeros(1), data(150), 150],
        grid=3,
    ),
    Kernel(
        "the last block adds up",
        """
__device__ unsigned arrived;
__global__ void k(int* out, int* part, const int* x) {
    __shared__ bool last;
    int t = threadIdx.x, v = __reduce_add_sync(~0u, x[blockIdx.x * 32 + t]);
    if (t == 0) {
        part[blockIdx.x] = v;
        __threadfence();
        last = atomicAdd(&arrived, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    v = 0;
    for (int b = t; b < gridDim.x; b += 32) v += ((volatile int*)part)[b];
    v = __reduce_add_sync(~0u, v);
    if (t == 0) *out = v, arrived = 0;
}
""",
        lambda part, x: total(x),
        [
            ("__threadfence();", "", sim.Race, "nothing orders two blocks"),
            ("    __syncthreads();", "", sim.Race, "last"),
            ("gridDim.x - 1", "gridDim.x - 2", sim.Race),
            ("b < gridDim.x", "b <= gridDim.x", sim.OutOfBounds, "'part'"),
        ],
        lambda: [ints(1), ints(40), data(1280)],
        grid=40,
        block=32,
    ),
    Kernel(
        "a histogram in shared memory",
        """
    __shared__ int bins[32];
    if (t < 32) bins[t] = 0;
    __syncthreads();
    atomicAdd(bins + x[i] % 32, 1);
    __syncthreads();
    if (t < 32) atomicAdd(out + t, bins[t]);
""",
        lambda x, n: torch.bincount(x % 32, minlength=32),
        [
            ("    __syncthreads();\n    atomicAdd", "    atomicAdd", sim.Race),
            ("    __syncthreads();\n    if", "    if", sim.Race),
            ("atomicAdd(bins + x[i] % 32, 1)", "bins[x[i] % 32]++", sim.Race),
            ("if (t < 32) bins[t] = 0;", "if (t < 31) bins[t] = 0;", sim.Uninitialized),
            ("x[i] % 32", "x[i] % 64", sim.OutOfBounds),
        ],
        lambda: [zeros(32), data(256), 256],
        grid=2,
        block=128,
    ),
    Kernel(
        "online softmax, a warp a row",
        """
__global__ void k(float* out, const float* x, int n) {
    int row = blockIdx.x * 2 + threadIdx.y, lane = threadIdx.x;
    if (row >= n) return;
    float m = -1e30f, s = 0;
    for (int j = lane; j < 50; j += 32) {
        float v = x[row * 50 + j], old = m;
        m = fmaxf(m, v);
        s = s * expf(old - m) + expf(v - m);
    }
    for (int d = 16; d; d /= 2) {
        float other = __shfl_xor_sync(~0u, m, d), sum = __shfl_xor_sync(~0u, s, d), both = fmaxf(m, other);
        s = s * expf(m - both) + sum * expf(other - both);
        m = both;
    }
    for (int j = lane; j < 50; j += 32) out[row * 50 + j] = expf(x[row * 50 + j] - m) / s;
}
""",
        lambda x, n: x.view(5, 50).softmax(1).view(-1),
        [
            ("if (row >= n) return;", "", sim.OutOfBounds, "'x'"),
            (
                "if (row >= n) return;",
                "if (row >= n || lane >= 50 - 32) return;",
                sim.Uninitialized,
                "lane .* of its warp, which is not there",
            ),
            ("s = 0;", "s;", sim.Uninitialized, "no statement has set"),
        ],
        lambda: [torch.zeros(250), torch.randn(250), 5],
        grid=3,
        block=(32, 2),
        close=True,
    ),
    Kernel(
        "layernorm, a block a row",
        """
__global__ void k(float* out, const float* x, int n) {
    __shared__ float2 sums[4];
    float2 v = {0, 0};
    for (int j = threadIdx.x; j < n; j += 128) {
        float a = x[blockIdx.x * n + j];
        v.x += a, v.y += a * a;
    }
    for (int d = 16; d; d /= 2) v.x += __shfl_xor_sync(~0u, v.x, d), v.y += __shfl_xor_sync(~0u, v.y, d);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    v = sums[0];
    for (int w = 1; w < 4; ++w) v.x += sums[w].x, v.y += sums[w].y;
    float mean = v.x / n, scale = rsqrtf(v.y / n - mean * mean + 1e-5f);
    for (int j = threadIdx.x; j < n; j += 128) {
        out[blockIdx.x * n + j] = (x[blockIdx.x * n + j] - mean) * scale;
    }
}
""",
        lambda x, n: torch.nn.functional.layer_norm(x.view(3, 200), (200,)).view(-1),
        [
            ("    __syncthreads();\n", "    __syncwarp();\n", sim.Race),
            ("if (threadIdx.x % 32 == 0) sums", "sums", sim.Race, "another value"),
            ("w < 4", "w < 5", sim.OutOfBounds),
        ][::2],
        lambda: [torch.zeros(600), torch.randn(600), 200],
        grid=3,
        block=128,
        close=True,
    ),
    Kernel(
        "counts of a block",
        """
    int even = __syncthreads_count(x[i] % 2 == 0), any = __syncthreads_or(x[i] == 100);
    out[i] = 2 * even + (any != 0);
""",
        lambda x, n: (2 * (x.view(2, 64) % 2 == 0).sum(1) + (x.view(2, 64) == 100).any(1)).repeat_interleave(
            64
        ),
        grid=2,
    ),
]
