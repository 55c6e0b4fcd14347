// Dropout of attention's weights. Whether a weight is dropped depends on the seed and on the numbers of its
// head, query and key only, so that forward and backward drop the same ones, whatever their tiles are.
//
// A block of 16 queries i and 16 keys j has 32 Philox calls, of 8 numbers of 16 bits each. The call of (i, j)
// has the counter (4 (j / 16) + j % 8 / 2, 8 (i / 16) + i % 8, head, 0); in it, the number is half j % 2 of
// word 2 (i / 8 % 2) + j / 8 % 2. These are the 8 elements that a lane of a warp holds of the block, if the
// rows are queries (multiply_transposed in tile.cuh). If the rows are keys, they are those of two calls, one
// of this lane and one of the lane with the other half of their words.
#pragma once
#include "../common/philox.cuh"

struct Dropout {
    const unsigned long long* seed;
    unsigned threshold;  // a weight is dropped if its number is below
    float scale;         // of the others

    // Call drop(r, n, j) for each dropped element c[r][n][j] of 16 R rows, from `row` on, and 8 N columns,
    // from `column` on, of a warp. KEYS: rows are keys, and columns queries. `row` and `column` are multiples
    // of 16.
    template <bool KEYS, int R, int N, class Drop>
    __device__ __forceinline__ void each(int row, int column, int head, Drop drop) const {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        unsigned long long bits = *seed;
        uint2 key = make_uint2(bits, bits >> 32);
#pragma unroll
        for (int block = 0; block < R * N / 2; block++) {
            int r = block / (N / 2), m = block % (N / 2), down = row / 16 + r, along = column / 16 + m;
            uint4 words =
                KEYS ? philox<7>(make_uint4(4 * down + g / 2, 8 * along + 2 * t + g % 2, head, 0), key)
                     : philox<7>(make_uint4(4 * along + t, 8 * down + g, head, 0), key);
            const unsigned mine[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < (KEYS ? 2 : 1); i++) {
                unsigned all[4];
#pragma unroll
                for (int e = 0; e < 4; e++)
                    all[e] = KEYS ? __shfl_sync(-1u, mine[e], (threadIdx.x & 27) + 4 * i) : mine[e];
#pragma unroll
                for (int e = 0; e < (KEYS ? 4 : 8); e++) {
                    // KEYS: word e is of key g + 8 (e % 2) and query 2 t + i + 8 (e / 2)
                    unsigned number = KEYS ? all[e] >> 16 * (g % 2) : all[e / 2] >> 16 * (e % 2);
                    if ((number & 0xffff) >= threshold) continue;
                    if (KEYS) drop(r, 2 * m + e / 2, 2 * (e % 2) + i);
                    else drop(r, 2 * m + e / 2 % 2, e / 4 * 2 + e % 2);
                }
            }
        }
    }
};
