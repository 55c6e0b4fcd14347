// Inline PTX of Hopper's warpgroups.
#pragma once

// Products by four neighbouring warps, the first a multiple of 4 (sm_90a alone). They run in the background: registers of a and d may not
// be touched before wgmma_wait, and what was written to them before only after wgmma_fence. What threads wrote to shared memory is seen by
// them after fence_async, and a barrier.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool HAS_WGMMA = true;
#else
constexpr bool HAS_WGMMA = false;
#endif
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Wait until at most PENDING committed groups are under way; d is theirs.
template <int PENDING, int N>
__device__ __forceinline__ void wgmma_wait(float (&d)[N][4]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
#pragma unroll
    for (int i = 0; i < N * 4; ++i) asm volatile("" : "+f"(d[i / 4][i % 4]) :: "memory");  // not read before
}

// What describes operand b, 16 x N, in shared memory. Eight numbers along k are neighbours, and so are such eights of eight columns;
// `along_k` and `across` are bytes to the next eight numbers and to the next eight columns.
__device__ __forceinline__ unsigned long long describe(unsigned shared_address, int along_k, int across) {
    return (shared_address & 0x3ffff) >> 4 | (unsigned long long)(along_k >> 4) << 16 | (unsigned long long)(across >> 4) << 32;
}

// d += a b in bfloat16, a 64 x 16 and b 16 x 32 or 16 x 64: each warp has 16 rows, and its registers are those of mma_bf16, from d[FIRST] on.
#define CUKERN_ROW(i) "+f"(d[FIRST + i][0]), "+f"(d[FIRST + i][1]), "+f"(d[FIRST + i][2]), "+f"(d[FIRST + i][3])
template <int COLUMNS, int FIRST, int N>
__device__ __forceinline__ void wgmma_bf16(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b) {
    if constexpr (COLUMNS == 32)
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, add, 1, 1, 0;\n}"
            : CUKERN_ROW(0), CUKERN_ROW(1), CUKERN_ROW(2), CUKERN_ROW(3)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
    else
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
            "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}"
            : CUKERN_ROW(0), CUKERN_ROW(1), CUKERN_ROW(2), CUKERN_ROW(3), CUKERN_ROW(4), CUKERN_ROW(5), CUKERN_ROW(6), CUKERN_ROW(7)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef CUKERN_ROW

// d = a b, or d += a b, of N columns, 64 or 128; a is 64 x 16, in registers or described as b is, by `describe`. DOWN: in shared memory not
// eight numbers along k are neighbours, but eight rows (a) or columns (b), and those of the next of eight k follow; `along_k` and `across`
// still are the bytes to the next eight k and the next eight rows or columns.
#define CUKERN_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define CUKERN_64 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define CUKERN_ROW(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define CUKERN_ROWS(i) CUKERN_ROW(i), CUKERN_ROW(i + 1), CUKERN_ROW(i + 2), CUKERN_ROW(i + 3)
#define CUKERN_WGMMA(columns, to, operands) \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " operands "0;\n" \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 " to ", "
template <bool DOWN, int N>
__device__ __forceinline__ void wgmma_pieces(float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, bool add) {
    if constexpr (N == 8)
        asm volatile(CUKERN_WGMMA("64", CUKERN_32, "%37, ") "{%32, %33, %34, %35}, %36, add, 1, 1, %38;\n}"
            : CUKERN_ROWS(0), CUKERN_ROWS(4) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(DOWN));
    else
        asm volatile(CUKERN_WGMMA("128", CUKERN_64, "%69, ") "{%64, %65, %66, %67}, %68, add, 1, 1, %70;\n}"
            : CUKERN_ROWS(0), CUKERN_ROWS(4), CUKERN_ROWS(8), CUKERN_ROWS(12)
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)), "n"(DOWN));
}
template <bool A_DOWN, bool DOWN, int N>
__device__ __forceinline__ void wgmma_pieces(float (&d)[N][4], unsigned long long a, unsigned long long b, bool add) {
    if constexpr (N == 8)
        asm volatile(CUKERN_WGMMA("64", CUKERN_32, "%34, ") "%32, %33, add, 1, 1, %35, %36;\n}"
            : CUKERN_ROWS(0), CUKERN_ROWS(4) : "l"(a), "l"(b), "r"(int(add)), "n"(A_DOWN), "n"(DOWN));
    else
        asm volatile(CUKERN_WGMMA("128", CUKERN_64, "%66, ") "%64, %65, add, 1, 1, %67, %68;\n}"
            : CUKERN_ROWS(0), CUKERN_ROWS(4), CUKERN_ROWS(8), CUKERN_ROWS(12) : "l"(a), "l"(b), "r"(int(add)), "n"(A_DOWN), "n"(DOWN));
}
#undef CUKERN_32
#undef CUKERN_64
#undef CUKERN_ROW
#undef CUKERN_ROWS
#undef CUKERN_WGMMA
