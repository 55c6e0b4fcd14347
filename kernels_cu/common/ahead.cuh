// Where one launch's end and the next one's beginning lie side by side (programmatic dependent launch, see ptx.cuh). The last blocks of a
// kernel let those of the next onto the multiprocessors as there is room, and the first of these fetch their inputs to L2 while they wait,
// so that memory has work between the two. To fetch is not to read: all writes go through L2, so what is written there later is seen.
//
// H200, of a copy's speed: softmax of 8192x1024 in bfloat16 1.00 to 1.05, backward 0.97 to 1.08, in float 0.985 to 1.03 and 1.00 to 1.05;
// rope of 168 MB 0.983 to 0.994. Either of the two alone gives little. With the signals of all blocks, of which each takes a multiprocessor
// 80 ns: 0.90, and rope 0.80. What is fetched delays what the kernel before has yet to write: with 10 MB, as much as the first blocks need,
// softmax of 8192x1024 in float is at 0.98, with 26 MB that of 128 K columns at 0.925 for 0.937.
#pragma once
#include "ptx.cuh"

constexpr unsigned MULTIPROCESSORS = 132;              // of an H100 or H200
constexpr unsigned long long FETCHED_AHEAD = 4500000;  // bytes of the first blocks' inputs

// What a kernel does first. fetch() calls prefetch() for the `bytes` of inputs of a block of its 1-D grid; `threads` is how many of them a
// multiprocessor holds at a time.
template <typename F>
__device__ __forceinline__ void take_over(unsigned bytes, unsigned threads, F fetch) {
#if __CUDA_ARCH__ >= 900
    if (blockIdx.x * (unsigned long long)bytes < FETCHED_AHEAD) fetch();
    wait_for_previous();
    unsigned long long left = (gridDim.x - blockIdx.x) * (unsigned long long)(blockDim.x * blockDim.y);
    if (threadIdx.x == 0 && threadIdx.y == 0 && left <= MULTIPROCESSORS * threads) let_next_start();
#endif
}

// kron_linear's blocks, which are all on the multiprocessors at one time, let the next kernel's come as soon as they have asked for their
// first numbers, and those that only wait for what comes before, as the sums, at once. Then each block that leaves makes room for one, and
// if a multiprocessor could hold more of these than its part of them, those that are first have too many: backend.spread() makes them so
// large that it cannot.
__device__ __forceinline__ void let_next_come() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && threadIdx.y == 0) let_next_start();
#endif
}

// Fetch a block's first tile, as far as its part of FETCHED_AHEAD goes: [rows][P][R] of an array [..][P][C], of one row where R is not C.
template <int P, int R, typename T>
__device__ __forceinline__ void prefetch_tile(const T* from, int rows, long long C) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / sizeof(T);
    asm volatile("" : "+l"(from), "+r"(rows));  // else the compiler keeps for the loads what it needs here
    int lines = ((C == R ? rows * P * R : R) + LINE - 1) / LINE;
    int all = min(C == R ? lines : P * lines, unsigned(FETCHED_AHEAD / 128) / gridDim.x);
    for (int i = threadIdx.x; i < all; i += blockDim.x) prefetch(from + i / lines * C + i % lines * LINE);
#endif
}

// Fetch a factor, each block a part of it, if it is no view of few numbers of many.
template <typename T>
__device__ __forceinline__ void prefetch_factor(const T* w, int rows, int columns, long long row, long long column) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / sizeof(T);
    long long numbers = (rows - 1) * row + (columns - 1) * column + 1;
    if (numbers > 2 * rows * columns) return;
    for (int i = (blockIdx.x * blockDim.x + threadIdx.x) * LINE; i < numbers; i += gridDim.x * blockDim.x * LINE) prefetch(w + i);
#endif
}
