"""Prefix sums, compaction, sorting."""

import torch
from sim_corpus import Kernel, data, ints, zeros

from cukern import sim


def running(x):
    return x.cumsum(0)


KERNELS = [
    Kernel(
        "Hillis and Steele, two buffers",
        """
    __shared__ int s[2][128];
    int from = 0;
    s[0][t] = x[t];
    for (int d = 1; d < 128; d *= 2) {
        __syncthreads();
        s[1 - from][t] = s[from][t] + (t >= d ? s[from][t - d] : 0);
        from = 1 - from;
    }
    out[t] = s[from][t];
""",
        lambda x, n: running(x),
        [
            ("        __syncthreads();\n", "", sim.Race),
            ("s[1 - from][t] =", "s[from = 1 - from, from = 1 - from][t] =", sim.Race),
            ("t >= d ? s[from][t - d] : 0", "s[from][t - d]", sim.OutOfBounds),
        ],
        block=128,
    ),
    Kernel(
        "warps, then a carry",
        """
    __shared__ int carry[4];
    int v = x[t];
    for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(~0u, v, d);
        if (t % 32 >= d) v += below;
    }
    if (t % 32 == 31) carry[t / 32] = v;
    __syncthreads();
    for (int w = 0; w < t / 32; ++w) v += carry[w];
    out[t] = v;
""",
        lambda x, n: running(x),
        [
            ("    __syncthreads();\n", "", sim.Race),
            ("if (t % 32 == 31)", "if (t == 31)", sim.Uninitialized, "carry"),
        ],
        block=128,
    ),
    Kernel(
        "Blelloch, in place",
        """
    __shared__ int s[128];
    s[2 * t] = x[2 * t], s[2 * t + 1] = x[2 * t + 1];
    for (int d = 1; d < 128; d *= 2) {
        __syncthreads();
        if (t < 64 / d) s[2 * d * (t + 1) - 1] += s[2 * d * t + d - 1];
    }
    for (int d = 32; d >= 1; d /= 2) {
        __syncthreads();  // down
        if (t < 64 / d - 1) s[2 * d * (t + 1) + d - 1] += s[2 * d * (t + 1) - 1];
    }
    __syncthreads();
    out[2 * t] = s[2 * t], out[2 * t + 1] = s[2 * t + 1];
""",
        lambda x, n: running(x),
        [
            ("        __syncthreads();\n", "", sim.Race),
            ("        __syncthreads();  // down\n", "", sim.Race),
            ("    __syncthreads();\n    out", "    out", sim.Race),
            ("t < 64 / d - 1", "t < 64 / d", sim.OutOfBounds),
        ],
        lambda: [ints(128), data(128), 128],
    ),
    Kernel(
        "a carry from chunk to chunk",
        """
    __shared__ int carry;
    if (t == 0) carry = 0;
    for (int start = 0; start < n; start += 32) {
        int v = x[start + t];
        for (int d = 1; d < 32; d *= 2) {
            int below = __shfl_up_sync(~0u, v, d);
            if (t >= d) v += below;
        }
        __syncwarp();
        v += carry;
        __syncwarp();
        if (t == 31) carry = v;
        out[start + t] = v;
    }
""",
        lambda x, n: running(x),
        [
            ("        __syncwarp();\n        v", "        v", sim.Race, "__syncwarp"),
            ("        __syncwarp();\n        if", "        if", sim.Race, "__syncwarp"),
            ("if (t == 0) carry = 0;", "", sim.Uninitialized, "carry"),
            ("start < n", "start <= n", sim.OutOfBounds),
        ],
        lambda: [ints(96), data(96), 96],
        block=32,
    ),
    Kernel(
        "blocks that look back",
        """
__global__ void k(int* out, volatile int* sums, volatile int* flags, const int* x) {
    __shared__ int before;
    int t = threadIdx.x, i = blockIdx.x * 32 + t, v = x[i];
    for (int d = 1; d < 32; d *= 2) {
        int below = __shfl_up_sync(~0u, v, d);
        if (t >= d) v += below;
    }
    if (t == 31) {
        before = 0;
        if (blockIdx.x) {
            while (!flags[blockIdx.x - 1]) {}
            __threadfence();  // acquire
            before = sums[blockIdx.x - 1];
        }
        sums[blockIdx.x] = before + v;
        __threadfence();  // release
        flags[blockIdx.x] = 1;
    }
    __syncthreads();
    out[i] = v + before;
}
""",
        lambda sums, flags, x: running(x),
        [
            ("volatile int* flags", "int* flags", sim.Race, "byte .* 'flags'"),
            ("    __syncthreads();\n", "", sim.Race, "before"),
            ("before = 0;\n", "\n", sim.Uninitialized),
            ("flags[blockIdx.x - 1]", "flags[blockIdx.x + 1]", sim.OutOfBounds),
        ],
        lambda: [ints(160), ints(5), zeros(5), data(160)],
        grid=5,
        block=32,
    ),
    Kernel(
        "compaction with a ballot",
        """
__global__ void k(int* out, int* count, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32, start;
    bool mine = i < n && x[i] % 3 == 0;
    unsigned votes = __ballot_sync(~0u, mine);
    if (lane == 0) start = atomicAdd(count, __popc(votes));
    start = __shfl_sync(~0u, start, 0);
    if (mine) out[start + __popc(votes & (1u << lane) - 1)] = x[i];
}
""",
        lambda count, x, n: torch.cat(
            (x[x % 3 == 0], -torch.ones(150 - int((x % 3 == 0).sum()), dtype=torch.int32))
        ),
        [
            ("    start = __shfl_sync(~0u, start, 0);\n", "", sim.Uninitialized),
            ("__ballot_sync(~0u, mine)", "(mine ? __ballot_sync(~0u, 1) : 0)", sim.BarrierFault),
            ("start = atomicAdd(count, __popc(votes))", "start = *count, *count += __popc(votes)", sim.Race),
            ("i < n && ", "", sim.OutOfBounds),
        ],
        lambda: [ints(150), zeros(1), data(150), 150],
        grid=1,
        block=192 - 32,
    ),
    Kernel(
        "bitonic sort",
        """
    __shared__ int s[64];
    s[t] = x[t];
    __syncthreads();
    for (int size = 2; size <= 64; size *= 2)
        for (int d = size / 2; d; d /= 2) {
            int other = t ^ d;
            if (other > t && (s[t] > s[other]) == ((t & size) == 0)) {
                int a = s[t];
                s[t] = s[other];
                s[other] = a;
            }
            __syncthreads();
        }
    out[t] = s[t];
""",
        lambda x, n: x.sort()[0],
        [
            ("            __syncthreads();\n", "            __syncwarp();\n", sim.Race),
            ("other > t && ", "", sim.Race),
            (
                "            __syncthreads();\n",
                "            if (d < 32) __syncwarp(); else __syncthreads();\n",
                sim.Race,
            ),
        ],
    ),
    Kernel(
        "odd-even sort in global memory",
        """
    for (int step = 0; step < 2 * n; ++step) {
        int a = 2 * t + step % 2;
        if (a + 1 < 2 * n && out[a] > out[a + 1]) {
            int v = out[a];
            out[a] = out[a + 1];
            out[a + 1] = v;
        }
        __syncthreads();
    }
""",
        lambda x, n: data(64).sort()[0],
        [("        __syncthreads();\n", "", sim.Race), ("a + 1 < 2 * n && ", "", sim.OutOfBounds)],
        lambda: [data(64), data(1), 32],
        block=32,
    ),
]
