// Bulk copies between global and shared memory by the Tensor Memory Accelerator (TMA, sm_90 and newer). One
// thread starts a copy.
//
// Loads report to an mbarrier: one thread calls mbarrier_arrive(mbarrier, bytes) with the bytes of all loads
// of the phase, and all who read the data call mbarrier_wait. A box that reaches beyond the tensor counts in
// full; the part outside is filled with zeros. Stores read shared memory asynchronously: fence_async() by the
// threads that wrote it, a barrier, the store, bulk_commit(). The same thread calls bulk_wait_read<0>()
// before the shared memory changes or the block ends, and bulk_wait<0>() before it reads the result.
//
// A tensor map describes a tensor and the box of a copy. Python makes it (cukern.tensor_map), and a kernel
// takes it as `const __grid_constant__ CUtensorMap map`. Coordinates, {x}, {x, y}, ..., are elements,
// innermost dimension first. They are ints and may be negative (not in a store) or too large. A GPU stops
// with "illegal instruction" if x is not a multiple of 16 bytes, or if a coordinate of a store is negative.
// In shared memory a box is contiguous, innermost dimension first, at a multiple of 128 bytes; with a
// swizzle, at a multiple of 8 times the swizzle. A swizzle of 128 bytes stores the 16-byte unit of address p
// at p ^ (p >> 7 & 7) << 4; one of 64 bytes has & 3, one of 32 & 1.
#pragma once

#include "async_copy.cuh"

struct alignas(64) CUtensorMap {
    unsigned long long opaque[16];
};

// Fetch a tensor map into its cache before the first use.
__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

#define CUKERN_BY_RANK(STATEMENT)                                                                      \
    static_assert(RANK >= 1 && RANK <= 5, "a tensor map has 1 to 5 dimensions");                       \
    if constexpr (RANK == 1) STATEMENT("1d", "{%4}", "r"(at[0]));                                      \
    else if constexpr (RANK == 2) STATEMENT("2d", "{%4, %5}", "r"(at[0]), "r"(at[1]));                 \
    else if constexpr (RANK == 3) STATEMENT("3d", "{%4, %5, %6}", "r"(at[0]), "r"(at[1]), "r"(at[2])); \
    else if constexpr (RANK == 4)                                                                      \
        STATEMENT("4d", "{%4, %5, %6, %7}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));           \
    else STATEMENT("5d", "{%4, %5, %6, %7, %8}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]))

// Load the box at these coordinates, and report its bytes to the mbarrier: tma_load(tile, &map, mbarrier, {x,
// y}).
template <int RANK>
__device__ __forceinline__ void tma_load(unsigned shared_dst, const CUtensorMap* map, unsigned mbarrier,
                                         const int (&at)[RANK]) {
#define CUKERN_LOAD(dim, coordinates, ...)                                                      \
    asm volatile("cp.async.bulk.tensor." dim                                                    \
                 ".shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, " coordinates \
                 "], [%2];" ::"r"(shared_dst),                                                  \
                 "l"(map), "r"(mbarrier), "r"(0), __VA_ARGS__                                   \
                 : "memory")
    CUKERN_BY_RANK(CUKERN_LOAD);
#undef CUKERN_LOAD
}

// Load the box for all blocks of the cluster whose rank is a bit of `ranks`, each at the same offset of its
// shared memory. The mbarrier at the same offset of each of these blocks gets the bytes.
template <int RANK>
__device__ __forceinline__ void tma_multicast(unsigned shared_dst, const CUtensorMap* map, unsigned mbarrier,
                                              const int (&at)[RANK], unsigned short ranks) {
#define CUKERN_MULTICAST(dim, coordinates, ...)                                                           \
    asm volatile(                                                                                         \
        "cp.async.bulk.tensor." dim                                                                       \
        ".shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, " coordinates \
        "], [%2], %3;" ::"r"(shared_dst),                                                                 \
        "l"(map), "r"(mbarrier), "h"(ranks), __VA_ARGS__                                                  \
        : "memory")
    CUKERN_BY_RANK(CUKERN_MULTICAST);
#undef CUKERN_MULTICAST
}

// Store the box at these coordinates. Elements outside of the tensor are left out.
template <int RANK>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, unsigned shared_src,
                                          const int (&at)[RANK]) {
#define CUKERN_STORE(dim, coordinates, ...)                                                     \
    asm volatile("cp.async.bulk.tensor." dim ".global.shared::cta.bulk_group [%1, " coordinates \
                 "], [%0];" ::"r"(shared_src),                                                  \
                 "l"(map), "r"(0), "r"(0), __VA_ARGS__                                          \
                 : "memory")
    CUKERN_BY_RANK(CUKERN_STORE);
#undef CUKERN_STORE
}

// Add the box to the tensor, element by element, atomically. In which order several blocks add is not
// defined.
template <int RANK>
__device__ __forceinline__ void tma_add(const CUtensorMap* map, unsigned shared_src, const int (&at)[RANK]) {
#define CUKERN_ADD(dim, coordinates, ...)                                                                  \
    asm volatile("cp.reduce.async.bulk.tensor." dim ".global.shared::cta.add.bulk_group [%1, " coordinates \
                 "], [%0];" ::"r"(shared_src),                                                             \
                 "l"(map), "r"(0), "r"(0), __VA_ARGS__                                                     \
                 : "memory")
    CUKERN_BY_RANK(CUKERN_ADD);
#undef CUKERN_ADD
}
#undef CUKERN_BY_RANK

// Copy contiguous bytes without a tensor map. Addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(unsigned shared_dst, const void* src, int bytes,
                                          unsigned mbarrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_dst),
        "l"(src), "r"(bytes), "r"(mbarrier)
        : "memory");
}
__device__ __forceinline__ void bulk_store(void* dst, unsigned shared_src, int bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared_src),
                 "r"(bytes)
                 : "memory");
}
// Add floats to global memory, atomically.
__device__ __forceinline__ void bulk_add(float* dst, unsigned shared_src, int bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst),
                 "r"(shared_src), "r"(bytes)
                 : "memory");
}

// Close the group of stores that this thread has started since the last call.
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until at most PENDING of this thread's newest groups are in flight, or still read their shared memory.
template <int PENDING>
__device__ __forceinline__ void bulk_wait() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
