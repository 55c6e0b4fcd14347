// Loads, stores and prefetches with cache hints, and flags in global memory.
#pragma once

// Prefetch into the L2 cache: the 128-byte line that holds *p, or `bytes` bytes from p on, rounded down to
// multiples of 16 (sm_90).
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ void prefetch(const void* p, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    if (bytes >= 16)
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(
                         reinterpret_cast<unsigned long long>(p) & ~15ull),
                     "r"(bytes & ~15u));
#endif
}

// Load 8 or 16 bytes that other thread blocks will read again, and keep their line in L2 as long as possible
// (evict_last, sm_80).
__device__ __forceinline__ void load_kept(uint2& to, const void* p) {
#if __CUDA_ARCH__ >= 800
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
                 : "=r"(to.x), "=r"(to.y)
                 : "l"(p), "l"(policy));
#else
    to = *static_cast<const uint2*>(p);
#endif
}
__device__ __forceinline__ void load_kept(uint4& to, const void* p) {
#if __CUDA_ARCH__ >= 800
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(p), "l"(policy));
#else
    to = *static_cast<const uint4*>(p);
#endif
}

// Store 16 or 8 bytes without allocating a line in L1.
__device__ __forceinline__ void store_past_l1(void* p, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_past_l1(void* p, uint2 v) {
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}

// Store a flag that another thread block polls, load one, or poll until one is not 0. Relaxed: a flag orders
// no other memory access.
__device__ __forceinline__ void post(unsigned long long* to, unsigned long long word) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ unsigned long long look(const unsigned long long* from) {
    unsigned long long word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(from) : "memory");
    return word;
}
__device__ __forceinline__ unsigned long long wait_for(const unsigned long long* from) {
    unsigned long long word;
    do word = look(from);
    while (word == 0);
    return word;
}
