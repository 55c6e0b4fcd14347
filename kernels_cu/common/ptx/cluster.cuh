// Thread block clusters (sm_90 and newer). The blocks of a cluster run at the same time and access each
// other's shared memory. A kernel's `__cluster_dims__` gives the cluster size; the grid must be a multiple of
// it. NVRTC rejects that attribute for older GPUs, even in a template that is never instantiated, so guard
// the kernel with `#if __CUDA_ARCH__ >= 900`.
#pragma once

// The rank of this block in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The cluster barrier in two halves. Writes before a thread's arrive are visible to every thread of the
// cluster after its wait. Each thread arrives once, then waits once.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// barrier.cluster.arrive.relaxed: arrives without releasing earlier writes. Use it at the start of a kernel,
// to learn that the other blocks run and that their shared memory may be written.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// A __syncthreads() for the cluster. One is needed before the first access to another block's shared memory,
// because that block may not have started, and one after the last access, because that block must not exit
// earlier.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// The shared::cluster address, in block `rank`, of the object at `shared_address` in this block.
__device__ __forceinline__ unsigned shared_of_rank(unsigned shared_address, unsigned rank) {
    unsigned address;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address), "r"(rank));
    return address;
}

// Load and store through such an address: one float, float2 (8-byte aligned) or float4 (16-byte aligned).
template <typename T>
__device__ __forceinline__ T ld_cluster(unsigned address);
template <>
__device__ __forceinline__ float ld_cluster(unsigned address) {
    float x;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
    return x;
}
template <>
__device__ __forceinline__ float2 ld_cluster(unsigned address) {
    float2 x;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(x.x), "=f"(x.y)
                 : "r"(address)
                 : "memory");
    return x;
}
template <>
__device__ __forceinline__ float4 ld_cluster(unsigned address) {
    float4 x;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(address)
                 : "memory");
    return x;
}
__device__ __forceinline__ void st_cluster(unsigned address, float x) {
    asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void st_cluster(unsigned address, float2 x) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x.x), "f"(x.y) : "memory");
}
__device__ __forceinline__ void st_cluster(unsigned address, float4 x) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y),
                 "f"(x.z), "f"(x.w)
                 : "memory");
}

// Store a flag to another block's shared memory, and poll one in this block's own until it is not 0.
__device__ __forceinline__ void post_cluster(unsigned address, unsigned long long word) {
    asm volatile("st.relaxed.cluster.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(word) : "memory");
}
__device__ __forceinline__ unsigned long long wait_for_shared(unsigned address) {
    unsigned long long word;
    do {
        asm volatile("ld.relaxed.cluster.shared::cta.u64 %0, [%1];" : "=l"(word) : "r"(address) : "memory");
    } while (word == 0);
    return word;
}

// Order this thread's earlier writes before its later ones for all threads of the cluster.
__device__ __forceinline__ void cluster_fence() { asm volatile("fence.acq_rel.cluster;" ::: "memory"); }
