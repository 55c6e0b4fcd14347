"""Asynchronous copies: cp.async, mbarriers, bulk copies by TMA, clusters."""

from sim_corpus import Kernel, data, ints

from cukern import sim

HEAD = """#include "common/ptx/tma.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
"""
PIPELINE = (
    HEAD
    + """
__global__ void k(int* out, const int* x, int n) {  // three stages
    __shared__ alignas(16) int s[3][64];
    int t = threadIdx.x, sum = 0;
    for (int j = 0; j < 2; ++j) {
        if (t < 16) cp_async_16(shared_address(s[j] + 4 * t), x + j * 64 + 4 * t);
        cp_async_commit();
    }
    for (int j = 0; j < n; ++j) {
        cp_async_wait<1>();
        __syncthreads();
        if (t < 16 && j + 2 < n) cp_async_16(shared_address(s[(j + 2) % 3] + 4 * t),
            x + (j + 2) * 64 + 4 * t);
        cp_async_commit();
        sum += s[j % 3][63 - t];
    }
    out[t] = sum;
}
"""
)
FOLLOWED = (
    HEAD
    + """
__global__ void k(int* out, const int* x) {  // an mbarrier waits for cp.async
    __shared__ int s[64];
    __shared__ unsigned long long full;
    int t = threadIdx.x;
    unsigned bar = shared_address(&full);
    if (t == 0) mbarrier_init(bar, 64);
    __syncthreads();
    cp_async<4>(shared_address(s + t), x + t, true);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bar) : "memory");
    mbarrier_wait_in_block(bar, 0);
    out[t] = s[63 - t];
}
"""
)
BULK = (
    HEAD
    + """
__global__ void k(int* out, const int* x) {
    __shared__ alignas(16) int s[64];
    __shared__ unsigned long long full;
    int t = threadIdx.x;
    unsigned bar = shared_address(&full);
    if (t == 0) {
        mbarrier_init(bar, 1);
        mbarriers_made();
    }
    __syncthreads();
    if (t == 0) {
        mbarrier_arrive(bar, 256);
        bulk_load(shared_address(s), x + 64 * blockIdx.x, 256, bar);
    }
    mbarrier_wait_in_block(bar, 0);
    int v = s[t ^ 1];
    __syncthreads();  // read
    s[t] = v + 1;
    fence_async();
    __syncthreads();
    if (t == 0) {
        bulk_store(out + 64 * blockIdx.x, shared_address(s), 256);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""
)
COPIED = (
    HEAD
    + """
__global__ void k(int* out, const int* x) {  // cp.async writes what TMA reads, in two ways
    __shared__ alignas(16) int s[64], r[64];
    __shared__ unsigned long long full;
    int t = threadIdx.x;
    unsigned bar = shared_address(&full);
    if (t == 0) mbarrier_init(bar, 64);
    cp_async<4>(shared_address(s + t), x + t, true);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async();  // of the writers
    __syncthreads();
    cp_async<4>(shared_address(r + t), x + 64 + t, true);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(bar) : "memory");
    if (t == 0) {
        bulk_store(out, shared_address(s), 256);
        mbarrier_wait_in_block(bar, 0);
        fence_async();  // of the reader
        bulk_store(out + 64, shared_address(r), 256);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
"""
)
CLUSTER = (
    HEAD
    + """
__global__ void __cluster_dims__(2, 1, 1) k(int* out, const int* x) {
    __shared__ int s[64];
    int t = threadIdx.x, i = blockIdx.x * 64 + t, v;
    s[t] = x[i];
    cluster_sync();  // written
    unsigned other = shared_of_rank(shared_address(s + 63 - t), cluster_rank() ^ 1);
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(other) : "memory");
    cluster_sync();  // read
    out[i] = v;
}
"""
)

KERNELS = [
    Kernel(
        "three stages of cp.async",
        PIPELINE,
        lambda x, n: x.view(5, 64).sum(0).flip(0),
        [
            ("        cp_async_wait<1>();\n", "", sim.Race, "asynchronous copy still writes"),
            ("cp_async_wait<1>", "cp_async_wait<2>", sim.Race, "asynchronous copy still writes"),
            ("        __syncthreads();\n", "", sim.Race),
            ("s[(j + 2) % 3]", "s[(j + 3) % 3]", sim.Race),
            ("t < 16 && j + 2 < n", "t < 16", sim.OutOfBounds),
            ("shared_address(s[j] + 4 * t), x", "shared_address(s[j] + 4 * t), 1 + x", sim.Misaligned),
        ],
        lambda: [ints(64), data(320), 5],
    ),
    Kernel(
        "an mbarrier that waits for cp.async",
        FOLLOWED,
        lambda x: x.flip(0),
        [
            ("    mbarrier_wait_in_block(bar, 0);\n", "", sim.Race, "asynchronous copy"),
            ("mbarrier_init(bar, 64)", "mbarrier_init(bar, 65)", sim.BarrierFault, "for 1 arrivals"),
            (
                "mbarrier_init(bar, 64)",
                "mbarrier_init(bar, 63)",
                sim.BarrierFault,
                "only 63 arrivals are missing",
            ),
            (".noinc", "", sim.BarrierFault, "for 64 arrivals"),
            ("    __syncthreads();\n", "", sim.Race),
        ],
        lambda: [ints(64), data(64)],
    ),
    Kernel(
        "bulk copies",
        BULK,
        lambda x: x.view(-1, 2).flip(1).reshape(-1) + 1,
        [
            ("    mbarrier_wait_in_block(bar, 0);\n", "", sim.Race, "mbarrier is missing"),
            (
                "mbarrier_arrive(bar, 256)",
                "mbarrier_arrive(bar, 128)",
                sim.BarrierFault,
                "128 bytes more have come",
            ),
            ("mbarrier_arrive(bar, 256)", "mbarrier_arrive(bar)", sim.Race),
            ("    fence_async();\n", "", sim.Race, "a fence.proxy.async is missing"),
            ("    fence_async();\n    __syncthreads();\n", "    fence_async();\n", sim.Race),
            ("    __syncthreads();  // read\n", "", sim.Race),
            ("        bulk_wait_read<0>();\n", "        s[5] = 0;\n", sim.Race, "still reads"),
            ("x + 64 * blockIdx.x, 256", "x + 64 * blockIdx.x + 32, 256", sim.OutOfBounds),
            ("out + 64 * blockIdx.x", "out + 64 * blockIdx.x + 1", sim.Misaligned),
            (
                "mbarrier_wait_in_block(bar, 0)",
                "mbarrier_wait_in_block(bar, 0); mbarrier_wait_in_block(bar, 1)",
                sim.BarrierFault,
            ),
        ],
        lambda: [ints(128), data(128)],
        grid=2,
    ),
    Kernel(
        "cp.async before a bulk copy",
        COPIED,
        lambda x: x,
        [
            (
                "    fence_async();  // of the writers\n",
                "",
                sim.Race,
                "s \\+ .*wrote at .*: a fence.proxy.async is missing",
            ),
            (
                "    cp_async_wait<0>();\n    fence_async();",
                "    fence_async(); cp_async_wait<0>();",
                sim.Race,
                "fence.proxy.async is missing",
            ),
            (
                "        fence_async();  // of the reader\n",
                "",
                sim.Race,
                "r \\+ .*wrote at .*: a fence.proxy.async is missing",
            ),
            ("    __syncthreads();\n", "", sim.Race),
        ],
        lambda: [ints(128), data(128)],
    ),
    Kernel(
        "blocks of a cluster",
        CLUSTER,
        lambda x: x.view(-1, 2, 64).flip((1, 2)).reshape(-1),
        [
            ("    cluster_sync();  // written\n", "    __syncthreads();\n", sim.Race),
            ("    cluster_sync();  // read\n", "", sim.Race),
            ("s + 63 - t", "s + 64 - t", sim.OutOfBounds),
            ("cluster_rank() ^ 1", "cluster_rank() + 1", sim.OutOfBounds),
        ],
        lambda: [ints(256), data(256)],
        grid=4,
    ),
]
