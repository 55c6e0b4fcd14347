// mbarriers (sm_90): 8 bytes of shared memory that count, in phases, `count` arrivals and the bytes that
// asynchronous copies deliver. Unlike the cluster barrier, an mbarrier does not wait for a thread's stores to
// global memory.
// One thread initializes it; mbarriers_made() and a cluster barrier must follow before others use it.
#pragma once

__device__ __forceinline__ void mbarrier_init(unsigned mbarrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(mbarrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarriers_made() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrive, also at another block's mbarrier (shared_of_rank): waiters may then overwrite what this thread has
// read. Writes of this thread are visible to waiters in its own block; for other blocks a cluster_fence()
// must come first. With `bytes`, only at this block's mbarrier: the phase also waits for that many more bytes
// (expect_tx).
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mbarrier) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(unsigned mbarrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes)
                 : "memory");
}

// Wait until this block's mbarrier has completed the phase of this parity. The first phase has parity 0; a
// fresh mbarrier counts as having completed a phase of parity 1.
__device__ __forceinline__ void mbarrier_wait(unsigned mbarrier, unsigned parity) {
    unsigned ended;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 "
            "%0, 1, 0, p; }"
            : "=r"(ended)
            : "r"(mbarrier), "r"(parity)
            : "memory");
    } while (!ended);
}

// The same if only this block's threads arrive. Acquires at block scope, which does not invalidate the L1
// cache.
__device__ __forceinline__ void mbarrier_wait_in_block(unsigned mbarrier, unsigned parity) {
    unsigned ended;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(ended)
            : "r"(mbarrier), "r"(parity)
            : "memory");
    } while (!ended);
}

// Store four floats to a block's shared memory and signal that block's mbarrier. Threads that wait for its
// phase see them.
__device__ __forceinline__ void st_async(unsigned address, float4 x, unsigned mbarrier) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
            address),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(mbarrier)
        : "memory");
}
