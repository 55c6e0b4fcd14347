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

// 2^x with an error of at most 2 units in the last place; results below 2^-126 become 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
