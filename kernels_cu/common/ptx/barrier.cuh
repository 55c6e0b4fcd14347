// Named barriers for some of a thread block's warps. `number` is 1 to 15; `threads` counts all threads that
// take part.
#pragma once

// Arrive and wait.
__device__ __forceinline__ void barrier_of(int number, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Arrive without waiting.
__device__ __forceinline__ void arrive_at(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
