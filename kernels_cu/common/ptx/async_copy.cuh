// Asynchronous copies from global to shared memory (cp.async, sm_80 and newer).
#pragma once

// The 32-bit shared-memory address that PTX instructions take.
__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Copy BYTES (4, 8 or 16) bytes from global to shared memory without using registers. The copy is
// asynchronous: call cp_async_wait before reading the data. Both addresses must be multiples of BYTES. If
// `valid` is false, the copy writes zeros and does not read `src`.
template <int BYTES>
__device__ __forceinline__ void cp_async(unsigned shared_dst, const void* src, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared_dst), "l"(src), "n"(BYTES),
                 "r"(valid ? BYTES : 0)
                 : "memory");
}

// Copy 16 bytes and bypass the L1 cache. With `bytes`, copy that many and fill the rest with zeros; with
// `valid`, all 16 or none.
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_dst), "l"(src) : "memory");
}
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_dst), "l"(src), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void cp_async_16(unsigned shared_dst, const void* src, bool valid) {
    cp_async_16(shared_dst, src, valid ? 16 : 0);
}

// Copy the first `bytes` of 4 bytes and fill the rest with zeros.
__device__ __forceinline__ void cp_async_4(unsigned shared_dst, const void* src, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_dst), "l"(src), "r"(bytes)
                 : "memory");
}

// Close the group of copies that this thread has issued since the last call.
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most PENDING of this thread's newest groups are in flight. Other threads' copies become
// visible only after a barrier.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Make writes of this thread to shared memory visible to bulk copies (tma.cuh) and wgmma, once a barrier
// follows.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
