// Where one launch's end and the next one's beginning lie side by side (programmatic dependent launch, see ptx.cuh). The last blocks of a
// kernel let those of the next onto the multiprocessors as there is room, and the first of these fetch their inputs to L2 while they wait,
// so that memory has work between the two. To fetch is not to read: all writes go through L2, so what is written there later is seen.
//
// H200, of a copy's speed: softmax of 8192x1024 in bfloat16 1.00 to 1.05, backward 0.97 to 1.08, in float 0.985 to 1.03 and 1.00 to 1.05;
// rope of 168 MB 0.983 to 0.994. Either of the two alone gives little. With the signals of all blocks, of which each takes a multiprocessor
// 80 ns: 0.90, and rope 0.80. What is fetched delays what the kernel before has yet to write: with 10 MB, as much as the first blocks need,
// softmax of 8192x1024 in float is at 0.98, with 26 MB that of 128 K columns at 0.925 for 0.937.
#pragma once
#include "ptx/launch.cuh"
#include "ptx/memory.cuh"

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

// kron_linear's blocks are all on the multiprocessors at one time. They let the next kernel's come as soon as they have asked for their
// first numbers, the sums of its backward at once. On one H200, in us: 1024 x (64, 64) in bfloat16 from 6.0 to 5.4, backward from 23.7 to
// 22.9; 4096 x (32, 32) from 6.5 to 5.6 and from 19.8 to 18.2, in float from 16.3 to 14.8; 16 x 2^16 from 10.3 to 9.5 and from 48.2 to
// 45.8; 16 x 64^3 in bfloat16 from 18.0 to 17.5 and from 38.9 to 37.0; 32 x (128, 128) backward from 15.1 to 14.2. Predicted were 0.7 a
// launch. The forward of 32 x (128, 128) gained nothing: a block that comes finds no room until one has left, and 5.8 of its 8.1 are
// products. Of a backward's gain most is by the sums' signals. What is fetched gives a third to a half; with 12 MB 16 x 64^3 takes 18.2.
//
// Blocks that come while others leave crowd onto the multiprocessors that have room: 16 x 2^16 took 12.5, until backend.spread() made each
// block so large that none has room for more than its part. And 1024 x 8^5 backward took 902 for 742: probably since a multiprocessor
// keeps its division into L1 and shared memory while it has any block, and those launches want different ones. So where blocks have many
// tiles, and thus little to gain, nobody comes before their end.
__device__ __forceinline__ void let_next_come() {
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0 && threadIdx.y == 0) let_next_start();
#endif
}
__device__ __forceinline__ void let_next_come(long long tiles, long long blocks) {
    if (tiles <= 8 * blocks) let_next_come();
}

// Fetch a block's first tile, as far as its part of FETCHED_AHEAD goes: [rows][P][R] of an array [..][P][C], of one row where R is not C.
template <int P, int R, typename T>
__device__ __forceinline__ void prefetch_tile(const T* from, int rows, long long C) {
#if __CUDA_ARCH__ >= 900
    constexpr int LINE = 128 / sizeof(T);
    asm volatile("" : "+l"(from), "+r"(rows));  // else the compiler keeps for the loads what it needs here
    int lines = ((C == R ? rows * P * R : R) + LINE - 1) / LINE;
    int all = min(C == R ? lines : P * lines, int(FETCHED_AHEAD / 128 / gridDim.x));
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
