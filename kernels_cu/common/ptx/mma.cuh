// Tensor cores by warp: mma.sync, ldmatrix, and the split of a float into two TF32 numbers (sm_80 and newer).
#pragma once

// Round to TF32 (8 exponent bits, 10 fraction bits). Ties go to even on sm_90 and newer, away from zero on
// older GPUs.
__device__ __forceinline__ float to_tf32(float x) {
    unsigned bits;
#if __CUDA_ARCH__ >= 900
    asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#endif
    return __uint_as_float(bits);
}

// The largest finite TF32 number.
constexpr float LARGEST_TF32 = 3.40116213e38f;

// The largest finite bfloat16 number.
constexpr float LARGEST_BF16 = 3.38953139e38f;

// Clamp |x| to the finite `most` and keep the sign. NaN becomes `most`.
__device__ __forceinline__ float limited(float x, float most) {
#if __CUDA_ARCH__ >= 860
    float y;
    asm("min.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(x), "f"(most));
    return y;
#else
    return fmaxf(fminf(x, most), -most);
#endif
}

// x = big + small for tensor cores. With the small products added first, a b = small_a big_b + big_a
// small_b + big_a big_b has a relative error of about 2^-22. big is a finite TF32 number, rounded to nearest
// with two integer instructions. An infinity or NaN goes into small, so that x - big does not create a NaN.
// small has a sign and at most 12 significant bits; tensor cores use 11 of them. Rounding small to TF32 first
// would not be more accurate.
__device__ __forceinline__ void split_tf32(float x, float& big, float& small) {
    big = __uint_as_float((__float_as_uint(limited(x, LARGEST_TF32)) + 0x1000) & 0xffffe000);
    small = x - big;
}

// Store four 8x8 matrices of 16-bit elements (sm_90 and newer). Lane l has the elements 2 (l % 4) + {0, 1} of
// row l / 4 of matrix i in bits[i], and the shared address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(unsigned to, const unsigned (&bits)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(bits[0]),
                 "r"(bits[1]), "r"(bits[2]), "r"(bits[3])
                 : "memory");
}

// d += a b by one warp in TF32 with float accumulators; a is 16x8, b is 8x8. Lane l with g = l / 4 and t = l
// % 4 holds a[g + 8 i][t + 4 k] in a[i + 2 k], b[t + 4 k][g] in b[k], and d[g + 8 i][2 t + j] in d[2 i + j].
__device__ __forceinline__ void mma_tf32(float (&d)[4], const float (&a)[4], const float (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])),
          "r"(__float_as_uint(a[3])), "r"(__float_as_uint(b[0])), "r"(__float_as_uint(b[1])));
}

// The same for 16-bit types; a is 16x16, b is 16x8. A register holds two neighbours along k: lane l holds
// a[g + 8 i][2 t + 8 k ..] in a[i + 2 k] and b[2 t + 8 k ..][g] in b[k].
__device__ __forceinline__ void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ldmatrix: load 8x8 tiles of 16-bit numbers from shared memory into mma fragments. Lane 8 i + j passes the
// address of row j of tile i (16 bytes). With g and t as in mma_tf32, a lane receives numbers 2 t and 2 t + 1
// of row g, or of column g if TRANSPOSED.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tiles(unsigned (&tiles)[4], unsigned row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(tiles[0]), "=r"(tiles[1]), "=r"(tiles[2]), "=r"(tiles[3])
                     : "r"(row)
                     : "memory");
}
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tiles(unsigned (&tiles)[2], unsigned row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(tiles[0]), "=r"(tiles[1])
                     : "r"(row)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(tiles[0]), "=r"(tiles[1])
                     : "r"(row)
                     : "memory");
}
