// Tensor cores by warpgroup: wgmma and setmaxnreg (sm_90a only).
#pragma once

#include "../math.cuh"
#include "async_copy.cuh"

// A warpgroup is four neighbouring warps, the first a multiple of 4. wgmma is asynchronous: registers of a
// and d must not be accessed between wgmma and wgmma_wait, and wgmma_fence must come between earlier writes
// to them and wgmma. Writes of threads to shared memory are visible to wgmma after fence_async and a barrier.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// written(d), and wgmma_fence with arguments: the compiler moves no write to these registers behind this
// point.
template <int N>
__device__ __forceinline__ void written(float (&d)[N][4]) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}
template <int N>
__device__ __forceinline__ void written(unsigned (&a)[N][4]) {
#pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}
template <class... X>
__device__ __forceinline__ void wgmma_fence(X&... registers) {
    (written(registers), ...);
    wgmma_fence();
}
__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// The number of this thread's warpgroup in its block. The shuffle tells the compiler that all lanes have the
// same, so addresses that depend on it stay in uniform registers. wgmma reads its descriptors from there.
// From other registers each takes two moves, which delay the product.
__device__ __forceinline__ int warpgroup_in_block() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// setmaxnreg: from here on a warpgroup has N registers per thread, a multiple of 8. Other warpgroups of its
// block may take the registers that it releases. Each warpgroup must be in its own branch of one if and else.
template <int N>
__device__ __forceinline__ void fewer_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
__device__ __forceinline__ void more_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// Make the compiler compute x >= 0 before the wgmma_wait that follows. It moves a wait up past arithmetic,
// which then no longer overlaps the products, but not past a store. The store is never executed, because x is
// not negative.
__device__ __forceinline__ void before_wait(float x) {
    asm volatile("{ .reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.f32 [%1], %0; }" ::"f"(x),
                 "r"(0)
                 : "memory");
}

// Wait until at most PENDING committed groups are in flight. d is their accumulator; without it, only
// operands in shared memory are free.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    // the compiler must not move reads up
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4])::"memory");
}

// The same for operands a: afterwards they may be written again.
template <int PENDING, int N, int M>
__device__ __forceinline__ void wgmma_wait(unsigned (&a)[N][M][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N * M * 4; ++i) asm volatile("" : "+r"(a[i / (M * 4)][i / 4 % M][i % 4])::"memory");
}

// The matrix descriptor of operand b in shared memory. (For operand a, read "row" for "column".) `along_k`
// and `across` are distances in bytes. The matrix starts at a multiple of eight rows. Layouts:
//
// - No swizzle, b contiguous along k. A core matrix is eight rows of 16 bytes; its rows are columns of b.
//   `along_k` and `across` lead to the next core matrix along k and along the columns.
// - SWIZZLED (128-byte swizzle), b contiguous along the columns. A row holds 64 columns of 16-bit elements:
//   128 bytes, or eight units of 16 bytes. Unit i of row r is stored at position i ^ r. Eight rows are 1024
//   bytes. `along_k` leads to the next 64 columns, `across` to the next eight rows.
// - SWIZZLED, b contiguous along k. A column of b has 64 elements of k in 128 bytes. `across` leads to the
//   next eight columns, `along_k` is not used, and the next 16 elements along k are 32 bytes further.
// - SWIZZLED_64 and SWIZZLED_32: the same with rows of 64 and 32 bytes.
//
// tma_load (tma.cuh) with the same swizzle writes these layouts.
constexpr unsigned long long SWIZZLED = 1ull << 62, SWIZZLED_64 = 2ull << 62, SWIZZLED_32 = 3ull << 62;
__device__ __forceinline__ unsigned long long describe(unsigned shared_address, int along_k, int across) {
    return (shared_address & 0x3ffff) >> 4 | (unsigned long long)(along_k >> 4) << 16 |
           (unsigned long long)(across >> 4) << 32;
}

// d = a b, or with `add` d += a b. d is 64 x 8 N. For 16-bit types a is 64 x 16 and b is 16 x 8 N; for TF32
// (float) a is 64 x 8 and b is 8 x 8 N. a is in registers. Each warp has 16 rows, with the fragments of mma.
// ACROSS: b is contiguous along the columns instead of k, and may be SWIZZLED.
#define CUKERN_D1(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUKERN_D2(i) CUKERN_D1(i), CUKERN_D1(i + 1)
#define CUKERN_D4(i) CUKERN_D2(i), CUKERN_D2(i + 2)
#define CUKERN_D8(i) CUKERN_D4(i), CUKERN_D4(i + 4)
#define CUKERN_D16(i) CUKERN_D8(i), CUKERN_D8(i + 8)
#define CUKERN_P16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define CUKERN_P32 CUKERN_P16 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define CUKERN_P48 CUKERN_P32 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define CUKERN_P64 CUKERN_P48 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define CUKERN_P80 CUKERN_P64 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define CUKERN_P96 CUKERN_P80 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define CUKERN_P112 CUKERN_P96 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define CUKERN_P128 CUKERN_P112 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define CUKERN_P144 CUKERN_P128 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define CUKERN_P160 CUKERN_P144 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define CUKERN_P192 \
    CUKERN_P160 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define CUKERN_P224                                                                            \
    CUKERN_P192                                                                                \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, " \
    "%111"
#define CUKERN_P256 \
    CUKERN_P224     \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define CUKERN_WGMMA_OF(n, types, places, a, b, across, add)                                         \
    "{\n.reg .pred add;\nsetp.ne.b32 add, %" #add ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types \
    " {" places "}, " a ", %" #b ", add, 1, 1" across ";\n}"
template <typename T, bool ACROSS, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b,
                                      bool add) {
    static_assert(N % 2 == 0 && N <= 20 || N == 32, "16, 32, ..., 160, 256 columns");
#define CUKERN_WGMMA_IN(n, types, places, a0, a1, a2, a3, at, more, across, ...)                        \
    asm volatile(                                                                                       \
        CUKERN_WGMMA_OF(n, types, places, "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}", at, across, more) \
        : __VA_ARGS__                                                                                   \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(int(ACROSS)))
#define CUKERN_WGMMA(n, places, a0, a1, a2, a3, at, more, flag, ...)                                         \
    if constexpr (N * 8 == n && sizeof(T) == 4)                                                              \
        CUKERN_WGMMA_IN(n, "k8.f32.tf32.tf32", places, a0, a1, a2, a3, at, more, "", __VA_ARGS__);           \
    else if constexpr (N * 8 == n && IS_BF16<T>)                                                             \
        CUKERN_WGMMA_IN(n, "k16.f32.bf16.bf16", places, a0, a1, a2, a3, at, more, ", %" #flag, __VA_ARGS__); \
    else if constexpr (N * 8 == n)                                                                           \
    CUKERN_WGMMA_IN(n, "k16.f32.f16.f16", places, a0, a1, a2, a3, at, more, ", %" #flag, __VA_ARGS__)
    CUKERN_WGMMA(16, CUKERN_P16, 8, 9, 10, 11, 12, 13, 14, CUKERN_D2(0));
    CUKERN_WGMMA(32, CUKERN_P32, 16, 17, 18, 19, 20, 21, 22, CUKERN_D4(0));
    CUKERN_WGMMA(48, CUKERN_P48, 24, 25, 26, 27, 28, 29, 30, CUKERN_D4(0), CUKERN_D2(4));
    CUKERN_WGMMA(64, CUKERN_P64, 32, 33, 34, 35, 36, 37, 38, CUKERN_D8(0));
    CUKERN_WGMMA(80, CUKERN_P80, 40, 41, 42, 43, 44, 45, 46, CUKERN_D8(0), CUKERN_D2(8));
    CUKERN_WGMMA(96, CUKERN_P96, 48, 49, 50, 51, 52, 53, 54, CUKERN_D8(0), CUKERN_D4(8));
    CUKERN_WGMMA(112, CUKERN_P112, 56, 57, 58, 59, 60, 61, 62, CUKERN_D8(0), CUKERN_D4(8), CUKERN_D2(12));
    CUKERN_WGMMA(128, CUKERN_P128, 64, 65, 66, 67, 68, 69, 70, CUKERN_D8(0), CUKERN_D8(8));
    CUKERN_WGMMA(144, CUKERN_P144, 72, 73, 74, 75, 76, 77, 78, CUKERN_D8(0), CUKERN_D8(8), CUKERN_D2(16));
    CUKERN_WGMMA(160, CUKERN_P160, 80, 81, 82, 83, 84, 85, 86, CUKERN_D8(0), CUKERN_D8(8), CUKERN_D4(16));
    CUKERN_WGMMA(256, CUKERN_P256, 128, 129, 130, 131, 132, 133, 134, CUKERN_D16(0), CUKERN_D16(16));
#undef CUKERN_WGMMA
#undef CUKERN_WGMMA_IN
}

// The same with both operands in shared memory. A_ACROSS: a is contiguous along the rows instead of k. Float
// (TF32) has neither.
template <bool A_ACROSS, bool ACROSS, typename T = __nv_bfloat16, int N>
__device__ __forceinline__ void wgmma(float (&d)[N][4], unsigned long long a, unsigned long long b,
                                      bool add) {
    static_assert(N % 4 == 0 && N <= 32 || N == 6 || N == 10, "32, 48, 64, 80, 96, 128, ..., 256 columns");
    static_assert(sizeof(T) == 2 || !A_ACROSS && !ACROSS, "TF32 is contiguous along k");
#define CUKERN_WGMMA(n, places, at_a, at_b, at_add, flag_a, flag_b, ...)                                    \
    if constexpr (N * 8 == n && sizeof(T) == 4)                                                             \
        asm volatile(CUKERN_WGMMA_OF(n, "k8.f32.tf32.tf32", places, "%" #at_a, at_b, "", at_add)            \
                     : __VA_ARGS__                                                                          \
                     : "l"(a), "l"(b), "r"(int(add)));                                                      \
    else if constexpr (N * 8 == n && IS_BF16<T>)                                                            \
        asm volatile(CUKERN_WGMMA_OF(n, "k16.f32.bf16.bf16", places, "%" #at_a, at_b,                       \
                                     ", %" #flag_a ", %" #flag_b, at_add)                                   \
                     : __VA_ARGS__                                                                          \
                     : "l"(a), "l"(b), "r"(int(add)), "n"(int(A_ACROSS)), "n"(int(ACROSS)));                \
    else if constexpr (N * 8 == n)                                                                          \
    asm volatile(                                                                                           \
        CUKERN_WGMMA_OF(n, "k16.f32.f16.f16", places, "%" #at_a, at_b, ", %" #flag_a ", %" #flag_b, at_add) \
        : __VA_ARGS__                                                                                       \
        : "l"(a), "l"(b), "r"(int(add)), "n"(int(A_ACROSS)), "n"(int(ACROSS)))
    CUKERN_WGMMA(32, CUKERN_P32, 16, 17, 18, 19, 20, CUKERN_D4(0));
    CUKERN_WGMMA(48, CUKERN_P48, 24, 25, 26, 27, 28, CUKERN_D4(0), CUKERN_D2(4));
    CUKERN_WGMMA(64, CUKERN_P64, 32, 33, 34, 35, 36, CUKERN_D8(0));
    CUKERN_WGMMA(80, CUKERN_P80, 40, 41, 42, 43, 44, CUKERN_D8(0), CUKERN_D2(8));
    CUKERN_WGMMA(96, CUKERN_P96, 48, 49, 50, 51, 52, CUKERN_D8(0), CUKERN_D4(8));
    CUKERN_WGMMA(128, CUKERN_P128, 64, 65, 66, 67, 68, CUKERN_D16(0));
    CUKERN_WGMMA(160, CUKERN_P160, 80, 81, 82, 83, 84, CUKERN_D16(0), CUKERN_D4(16));
    CUKERN_WGMMA(192, CUKERN_P192, 96, 97, 98, 99, 100, CUKERN_D16(0), CUKERN_D8(16));
    CUKERN_WGMMA(224, CUKERN_P224, 112, 113, 114, 115, 116, CUKERN_D16(0), CUKERN_D8(16), CUKERN_D4(24));
    CUKERN_WGMMA(256, CUKERN_P256, 128, 129, 130, 131, 132, CUKERN_D16(0), CUKERN_D16(16));
}
#undef CUKERN_P16
#undef CUKERN_P32
#undef CUKERN_P48
#undef CUKERN_P64
#undef CUKERN_P80
#undef CUKERN_P96
#undef CUKERN_P112
#undef CUKERN_P128
#undef CUKERN_P144
#undef CUKERN_P160
#undef CUKERN_P192
#undef CUKERN_P224
#undef CUKERN_P256
#undef CUKERN_WGMMA
#undef CUKERN_WGMMA_OF
#undef CUKERN_D16
#undef CUKERN_D8
#undef CUKERN_D4
#undef CUKERN_D2
#undef CUKERN_D1
