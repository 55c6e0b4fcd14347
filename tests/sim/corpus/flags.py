"""Atomics, locks, flags and fences: threads and blocks that tell each other something through global
memory."""

import torch
from sim_corpus import Kernel, data, ints, total, zeros

from cukern import sim

GRID_BARRIER = """
__device__ void wait(int* count, int goal) {
    __syncthreads();  // before
    if (threadIdx.x == 0) {
        __threadfence();  // release
        atomicAdd(count, 1);
        while (*(volatile int*)count < goal) {}
        __threadfence();  // acquire
    }
    __syncthreads();  // after
}
__global__ void k(int* out, int* middle, int* count, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    middle[i] = x[i] + 1;
    wait(count, gridDim.x);
    int v = middle[n - 1 - i];
    wait(count, 2 * gridDim.x);
    middle[i] = 2 * v;
    wait(count, 3 * gridDim.x);
    out[i] = middle[(i + 64) % n];
}
"""
PTX_FLAG = """
__global__ void k(int* out, int* part, int* flag, const int* x) {
    int t = threadIdx.x, seen = 0;
    if (blockIdx.x == 0) {
        part[t] = 5 * x[t];
        __syncthreads();
        if (t == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" :: "l"(flag) : "memory");
    } else {
        if (t == 0)
            while (!seen) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag)
                : "memory");
        __syncthreads();
        out[t] = part[63 - t];
    }
}
"""
CHAIN = """
__global__ void k(int* out, int* data, volatile int* flag) {  // each block waits for the one before it
    int b = blockIdx.x, i = b * 32 + threadIdx.x;
    if (b) {
        if (threadIdx.x == 0) {
            while (flag[b - 1] == 0) {}
            __threadfence();  // acquire
        }
        __syncthreads();  // known
    }
    int v = b ? data[i - 32] : threadIdx.x;
    data[i] = v + 1;
    __threadfence();  // release
    __syncthreads();  // written
    if (threadIdx.x == 0) flag[b] = 1;
    out[i] = v;
}
"""

KERNELS = [
    Kernel(
        "a chain of blocks",
        CHAIN,
        lambda data, flag: torch.arange(32).repeat(4) + torch.arange(4).repeat_interleave(32),
        [
            ("            __threadfence();  // acquire\n", "", sim.Race, "nothing orders two blocks"),
            ("    __threadfence();  // release\n", "", sim.Race, "nothing orders two blocks"),
            ("volatile int* flag", "int* flag", sim.Race),
            ("        __syncthreads();  // known\n", "", sim.Race, "nothing orders two blocks"),
            ("data[i - 32]", "data[i - 31]", sim.Race),
            ("data[i - 32]", "data[i - 65]", sim.OutOfBounds),
        ],
        lambda: [ints(128), ints(128), zeros(4)],
        grid=4,
        block=32,
    ),
    Kernel(
        "largest float by compare-and-swap",
        """
__global__ void k(float* out, const float* x) {
    int* p = (int*)out;
    float v = x[blockIdx.x * blockDim.x + threadIdx.x];
    int old = *p, assumed;
    do {
        assumed = old;
        if (__int_as_float(assumed) >= v) break;
        old = atomicCAS(p, assumed, __float_as_int(v));
    } while (old != assumed);
}
""",
        lambda x: x.max()[None],
        [("old = atomicCAS(p, assumed, __float_as_int(v));", "*p = __float_as_int(v);", sim.Race)],
        lambda: [torch.full((1,), -9.0), torch.arange(128.0) * 37 % 101],
        grid=2,
    ),
    Kernel(
        "a lock",
        """
__global__ void k(int* out, int* lock, const int* x) {
    if (threadIdx.x) return;
    while (atomicCAS(lock, 0, 1)) {}
    __threadfence();  // acquire
    *(volatile int*)out = *(volatile int*)out + x[blockIdx.x];
    __threadfence();  // release
    atomicExch(lock, 0);
}
""",
        lambda lock, x: total(x),
        [("    atomicExch(lock, 0);\n", "", sim.StepLimit)],
        lambda: [zeros(1), zeros(1), data(10)],
        grid=10,
    ),
    Kernel(
        "a lock around plain accesses",
        """
__global__ void k(int* out, int* lock, const int* x) {
    if (threadIdx.x) return;
    while (atomicCAS(lock, 0, 1)) {}
    __threadfence();  // acquire
    *out += x[blockIdx.x];
    __threadfence();  // release
    atomicExch(lock, 0);
}
""",
        lambda lock, x: total(x),
        [
            ("    __threadfence();  // release\n", "", sim.Race, "nothing orders two blocks"),
            ("    while (atomicCAS(lock, 0, 1)) {}\n", "", sim.Race),
            ("atomicExch(lock, 0)", "*lock = 0", sim.Race),
        ],
        lambda: [zeros(1), zeros(1), data(10)],
        grid=10,
    ),
    Kernel(
        "a barrier of the grid",
        GRID_BARRIER,
        lambda middle, count, x: (2 * (x.flip(0) + 1)).roll(-64),
        [
            ("        __threadfence();  // release\n", "", sim.Race, "nothing orders two blocks"),
            ("    __syncthreads();  // before\n", "", sim.Race, "nothing orders two blocks"),
            ("    __syncthreads();  // after\n", "", sim.Race),
            ("    wait(count, 2 * gridDim.x);\n", "", sim.Race),
            ("*(volatile int*)count < goal", "*(volatile int*)count <= goal", sim.StepLimit),
            ("atomicAdd(count, 1)", "atomicAdd_block(count, 1)", sim.Race),
        ],
        lambda: [ints(256), ints(256), zeros(1), data(256)],
        grid=4,
    ),
    Kernel(
        "a flag with fences",
        """
__global__ void k(int* out, int* part, volatile int* flag, const int* x) {
    if (blockIdx.x == 1) {
        part[threadIdx.x] = 7 * x[threadIdx.x];
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) *flag = 1;
    } else {
        if (threadIdx.x == 0) {
            while (*flag == 0) {}
            __threadfence();
        }
        __syncthreads();
        out[threadIdx.x] = part[threadIdx.x ^ 1];
    }
}
""",
        lambda part, flag, x: 7 * x.view(-1, 2).flip(1).reshape(-1),
        [
            (
                "        __threadfence();\n        __syncthreads();\n        if",
                "        __syncthreads();\n        if",
                sim.Race,
            ),
            ("        __syncthreads();\n        if", "        if", sim.Race),
            ("        __syncthreads();\n        out", "        out", sim.Race),
            ("            __threadfence();\n", "", sim.Race),
            ("*flag == 0", "*flag != 2", sim.StepLimit),
        ],
        lambda: [ints(64), ints(64), zeros(1), data(64)],
        grid=2,
    ),
    Kernel(
        "release and acquire",
        PTX_FLAG,
        lambda part, flag, x: 5 * x.flip(0),
        [
            ("st.release.gpu", "st.relaxed.gpu", sim.Race, "nothing orders two blocks"),
            ("ld.acquire.gpu", "ld.relaxed.gpu", sim.Race, "nothing orders two blocks"),
            ("        __syncthreads();\n        if", "        if", sim.Race),
            ("        __syncthreads();\n        out", "        out", sim.Race),
        ],
        lambda: [ints(64), ints(64), zeros(1), data(64)],
        grid=2,
    ),
    Kernel(
        "a queue of work",
        """
__global__ void k(int* out, int* next, const int* x, int n) {
    __shared__ int row;
    for (;;) {
        if (threadIdx.x == 0) row = atomicAdd(next, 1);
        __syncthreads();
        int mine = row;
        __syncthreads();
        if (mine >= n) break;
        out[mine * 64 + threadIdx.x] = x[mine * 64 + threadIdx.x] - mine;
    }
}
""",
        lambda next, x, n: x - torch.arange(len(x)) // 64,
        [
            ("        __syncthreads();\n        int", "        int", sim.Race),
            ("        __syncthreads();\n        if", "        if", sim.Race),
            ("mine >= n", "mine > n", sim.OutOfBounds),
            ("row = atomicAdd(next, 1)", "row = (*next)++", sim.Race),
        ],
        lambda: [ints(448), zeros(1), data(448), 7],
        grid=3,
    ),
    Kernel(
        "a hash table",
        """
__global__ void k(int* out, int* table, const int* x) {
    int key = x[threadIdx.x] + 1, slot = key % 128;
    for (;;) {
        int old = atomicCAS(table + slot, 0, key);
        if (old == 0 || old == key) break;
        slot = (slot + 1) % 128;
    }
    __syncthreads();
    out[threadIdx.x] = table[slot];
}
""",
        lambda table, x: x + 1,
        [
            (
                "int old = atomicCAS(table + slot, 0, key);",
                "int old = table[slot];\n        if (old == 0) table[slot] = key;",
                sim.Race,
            ),
            ("    __syncthreads();\n", "", sim.Race),
            ("key % 128", "key * 9", sim.OutOfBounds),
        ],
        lambda: [ints(64), zeros(128), data(64) % 20],
    ),
    Kernel(
        "chunks handed from block to block",
        """
__global__ void k(int* out, int* turn, const int* x) {
    if (threadIdx.x == 0) {
        while (atomicAdd(turn, 0) != blockIdx.x) {}
        __threadfence();
        out[0] = out[0] * 3 % 10007 + x[blockIdx.x];
        __threadfence();
        atomicAdd(turn, 1);
    }
}
""",
        lambda turn, x: _folded(x),
        [
            ("        __threadfence();\n        atomicAdd", "        atomicAdd", sim.Race),
            ("        while (atomicAdd(turn, 0) != blockIdx.x) {}\n", "", sim.Race),
            ("blockIdx.x) {}", "blockIdx.x + 1) {}", sim.StepLimit),
        ],
        lambda: [zeros(1), zeros(1), data(9)],
        grid=9,
        block=32,
    ),
]


def _folded(x):
    total_ = 0
    for v in x.tolist():
        total_ = total_ * 3 % 10007 + v
    return torch.tensor([total_])
