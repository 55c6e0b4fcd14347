// Counters in global memory, by which a thread block tells others of its grid that it has done something.
// What a thread did before counter_add is done for a thread that has then read the new value by counter_read.
#pragma once

__device__ __forceinline__ int counter_read(const int* x) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(x) : "memory");
    return value;
}
__device__ __forceinline__ void counter_add(int* x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(x) : "memory");
}
