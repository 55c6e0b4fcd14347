// Counter-based random numbers, and the rounding of float to bfloat16 by them.
#pragma once
#include <cuda_bf16.h>

// Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011): four random words for a counter and a key.
__device__ __forceinline__ uint4 philox(uint4 c, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        unsigned high0 = __umulhi(0xD2511F53u, c.x), high2 = __umulhi(0xCD9E8D57u, c.z);
        c = make_uint4(high2 ^ c.y ^ key.x, 0xCD9E8D57u * c.z, high0 ^ c.w ^ key.y, 0xD2511F53u * c.x);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return c;
}

template <typename T>
constexpr bool IS_BFLOAT16 = false;
template <>
constexpr bool IS_BFLOAT16<__nv_bfloat16> = true;

// One of the two neighbours in bfloat16, the upper one with the probability of the discarded bits / 2^16.
__device__ __forceinline__ __nv_bfloat16 round_randomly(float x, unsigned random) {
    if (!(fabsf(x) < __int_as_float(0x7f800000))) return __nv_bfloat16(x);
    return __ushort_as_bfloat16((__float_as_uint(x) + (random & 0xffff)) >> 16);
}
