// Inline PTX: the instructions that CUDA C++ has no name for.
#pragma once

// cp.async (sm_80 and newer): copy BYTES (4, 8 or 16) from global to shared memory without passing through
// registers. The copy runs in the background; cp_async_wait says when it is done. Both addresses must be multiples
// of BYTES. Where `valid` is false nothing is read and zeros are written, so `src` may then point anywhere.
template <int BYTES>
__device__ __forceinline__ void cp_async(unsigned shared_dst, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(shared_dst), "l"(src), "n"(BYTES), "r"(valid ? BYTES : 0) : "memory");
}

// Close the group of copies that this thread has issued since the last call.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING of this thread's newest groups are still under way. Other threads' copies are visible
// only after a barrier that follows.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// The address of a shared-memory object as the 32-bit number that PTX instructions take.
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Read 16 bytes that other blocks will read again, among streams that nobody will: L2 keeps them longest (sm_80 and newer).
__device__ __forceinline__ uint4 load_kept(const void* p) {
#if __CUDA_ARCH__ >= 800
    uint4 v;
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    return v;
#else
    return *static_cast<const uint4*>(p);
#endif
}

// Write 16 bytes without keeping their line in L1.
__device__ __forceinline__ void store_past_l1(void* p, uint4 v) {
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
