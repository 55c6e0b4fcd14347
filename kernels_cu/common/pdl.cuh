// Overlap of consecutive launches by PDL (programmatic dependent launch, see ptx/launch.cuh). The last thread
// blocks of a kernel signal that the next kernel may start. The first blocks of the next kernel prefetch
// their inputs into L2 while they wait, so memory stays busy between the two. This is safe: all writes go
// through L2, so a read after the prefetch sees a later write of the previous kernel. Measurements:
// docs/notes/pdl.md.
#pragma once
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

// Both constants are tuned on an H200. They decide only when blocks signal and what is prefetched: on a GPU
// with another number of SMs the overlap is less well timed, and the results are the same.
constexpr unsigned MULTIPROCESSORS = 132;              // SMs of an H100 SXM and an H200
constexpr unsigned long long FETCHED_AHEAD = 4500000;  // prefetched bytes, of all blocks together

// Call this first in a kernel with a 1-D grid. It prefetches, waits for the previous kernel, and lets the
// next one start. fetch() prefetches the input of one block, `bytes` bytes; only the blocks with the first
// FETCHED_AHEAD bytes of the input call it. `threads`: resident threads per SM. Only the blocks of the last
// wave signal.
template <typename F>
__device__ __forceinline__ void take_over(unsigned bytes, unsigned threads, F fetch) {
#if __CUDA_ARCH__ >= 900
    if (blockIdx.x * (unsigned long long)bytes < FETCHED_AHEAD) fetch();
    wait_for_previous();
    unsigned long long left = (gridDim.x - blockIdx.x) * (unsigned long long)(blockDim.x * blockDim.y);
    if (threadIdx.x == 0 && threadIdx.y == 0 && left <= MULTIPROCESSORS * threads) let_next_start();
#endif
}

// For kernels whose blocks all run at the same time: signal as soon as the block has issued its first loads.
// The kernels that add partial sums signal at once. With the second overload, blocks that have many tiles do
// not signal before they exit: they have little to gain, and an early start of the next kernel can slow them
// down.
__device__ __forceinline__ void let_next_come() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && threadIdx.y == 0) let_next_start();
#endif
}
__device__ __forceinline__ void let_next_come(long long tiles, long long blocks) {
    if (tiles <= 8 * blocks) let_next_come();
}

// Prefetch the first tile of a block, at most the block's share of FETCHED_AHEAD. The tile is [rows][P][R] of
// an array [..][P][C]; if R < C it has one row.
template <int P, int R, typename T>
__device__ __forceinline__ void prefetch_tile(const T* from, int rows, long long C) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / sizeof(T);
    // otherwise the compiler keeps these addresses in registers for the loads
    asm volatile("" : "+l"(from), "+r"(rows));
    int lines = ((C == R ? rows * P * R : R) + LINE - 1) / LINE;
    int all = min(C == R ? lines : P * lines, int(FETCHED_AHEAD / 128 / gridDim.x));
    for (int i = threadIdx.x; i < all; i += blockDim.x) prefetch(from + i / lines * C + i % lines * LINE);
#endif
}

// Prefetch a factor, each block a part of it. A strided view that spans more than twice its elements is not
// prefetched.
template <typename T>
__device__ __forceinline__ void prefetch_factor(const T* w, int rows, int columns, long long row,
                                                long long column) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / sizeof(T);
    long long numbers = (rows - 1) * row + (columns - 1) * column + 1;
    if (numbers > 2 * rows * columns) return;
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) * LINE; i < numbers;
         i += gridDim.x * blockDim.x * LINE)
        prefetch(w + i);
#endif
}
