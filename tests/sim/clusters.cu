// What the blocks of a cluster do together: each thread writes all that it sees.
#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"

extern "C" __global__ void __cluster_dims__(2, 2, 1) clusters(int* out, const int* in, int n) {
    __shared__ float2 pairs[64];
    __shared__ int counts[16];
    int t = threadIdx.x, i = (blockIdx.x + gridDim.x * blockIdx.y) * blockDim.x + t, v = in[i], r = 0;
    unsigned rank = cluster_rank(), value;
    out[r++ * n + i] = rank;
    asm volatile("mov.u32 %0, %%cluster_ctaid.y;" : "=r"(value));
    out[r++ * n + i] = value;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(value));
    out[r++ * n + i] = value;
    asm volatile("mov.u32 %0, %%nclusterid.y;" : "=r"(value));
    out[r++ * n + i] = value;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(value));
    out[r++ * n + i] = value;
    pairs[t] = make_float2(v & 0xffff, rank);
    if (t < 16) counts[t] = 0;
    cluster_sync();

    // loads: by a number, and by a pointer
    unsigned other = v & 3, there = shared_of_rank(shared_address(pairs + 63 - t), other);
    float2 pair = ld_cluster<float2>(there);
    out[r++ * n + i] = (int)pair.x + (int)ld_cluster<float>(there + 4);
    const float2* pointer = static_cast<const float2*>(__cluster_map_shared_rank(pairs, other));
    out[r++ * n + i] = (int)pointer[t ^ 5].x;
    out[r++ * n + i] = __cluster_query_shared_rank(pointer) + 10 * __cluster_query_shared_rank(pairs);
    cluster_sync();

    // stores to the next block, and atomics on any
    unsigned next = shared_of_rank(shared_address(pairs + (t + 7) % 64), (rank + 1) % 4);
    if (t % 2) st_cluster(next, make_float2(t, rank));
    else st_cluster(next, (float)(v & 0xff));
    asm volatile("red.shared::cluster.add.u32 [%0], %1;"
                 :: "r"(shared_of_rank(shared_address(counts + (v >> 8 & 15)), other)), "r"(v & 7)
                 : "memory");
    atomicMax(static_cast<int*>(__cluster_map_shared_rank(counts, other ^ 1)) + 15, v >> 8);
    cluster_arrive();
    out[r++ * n + i] = v;
    cluster_wait();
    out[r++ * n + i] = (int)pairs[t].x * 4 + (int)pairs[t].y;
    out[r++ * n + i] = counts[t % 15];
}
