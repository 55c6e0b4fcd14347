// What kron_linear v4 does in float with four factors of 16 x 16 at the right end of a layer: a row is an array of 16 x 16 x 16 x 16 numbers.
//
// Products are made on tensor cores, of numbers split in three of bfloat16, each the nearest to what is left: 6 products of m16n8k16, small
// ones first. A lane splits its numbers itself, in 11 instructions for two of them. With the numbers as operand b, mma takes those of an
// index k from lane bits t, and leaves the results' j in lane bits g; the other index, of 8 columns, goes from g to t. So a warp that holds
// 16 x 16 numbers of two indices, 8 a lane, multiplies along one, and along the other, and nothing moves in between.
//
// A row is in four blocks, a cluster. The first pass is over the two right indices: a warp reads 1 KB of neighbours, and its results go to
// the blocks whose quarter of them they are. The second is over the left ones, 4 neighbours of the right ones at a time, in shared memory
// from where a warp stores whole sectors. Two clusters share the multiprocessors: while one waits for its blocks, or for memory, the
// other multiplies.
#pragma once
#include "kron_tile.cuh"

template <bool ADDED_>
struct Sixteen4 {
    static constexpr int SIDE = 16, PAGE = SIDE * SIDE, NUMBERS = PAGE * PAGE, CLUSTER = 4, PART = NUMBERS / CLUSTER, THREADS = 256;
    static constexpr bool ADDED = ADDED_;
    // Distances in shared memory, between neighbours of the second and of the first index: lanes that differ in these meet different banks.
    static constexpr int NEXT = PAGE / CLUSTER + 4, SLAB = SIDE * NEXT + 4;
    static constexpr int EACH = PART / PAGE / (THREADS / 32);  // pages of a warp in the first pass
};

constexpr int PIECES = 3;  // bfloat16 numbers that a float is the sum of
using Block16 = float[2][2][2];  // a lane's numbers [n][h][p] of 16 x 16: with k = 2 t + 8 h + p, of column g + 8 n
using Weights16 = unsigned[PIECES][4];

// What the first pieces of a number are made of: of an infinity or a NaN 1, so that the last piece is the infinity or the NaN, alone.
__device__ __forceinline__ float finite_part(float x) {
    return isfinite(x) ? limited(x, 3.38953139e38f) : 1.0f;
}

// Pairs of pieces of a and b. Unless EVERY number is looked after, all must be finite, and in the range of bfloat16.
template <bool EVERY>
__device__ __forceinline__ void split_pair(unsigned (&to)[PIECES], float a, float b) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        bool whole = EVERY && i + 1 < PIECES;
        float pair[2] = {whole ? finite_part(a) : a, whole ? finite_part(b) : b};
        Vec<__nv_bfloat16, 2> both = pack<__nv_bfloat16, 2>(pair);
        to[i] = reinterpret_cast<const unsigned&>(both);
        a -= __uint_as_float(to[i] << 16);
        b -= __uint_as_float(to[i] & 0xffff0000);
    }
}

// v times w along k; then the results' index is that of the columns, and the columns' that of k.
template <bool EVERY>
__device__ __forceinline__ void multiply16(Block16& v, const Weights16& w) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        unsigned x[PIECES][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned pieces[PIECES];
            split_pair<EVERY>(pieces, v[n][h][0], v[n][h][1]);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) x[i][h] = pieces[i];
        }
        mma_bf16(d[n], w[0], x[2]);
        mma_bf16(d[n], w[2], x[0]);
        mma_bf16(d[n], w[1], x[1]);
        mma_bf16(d[n], w[0], x[1]);
        mma_bf16(d[n], w[1], x[0]);
        mma_bf16(d[n], w[0], x[0]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e / 2 % 2][e / 4][e % 2] = d[e / 4][e % 4];
}

// N blocks times two factors. Most have but finite numbers: if a result is not, all is done again with care, of what again(v) fetches.
template <int N, class Again>
__device__ __forceinline__ void multiply_twice(Block16 (&v)[N], const Weights16& first, const Weights16& second, const Again& again) {
    float none = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        multiply16<false>(v[i], first);
        multiply16<false>(v[i], second);
#pragma unroll
        for (int e = 0; e < 8; ++e) none = fmaf(v[i][e / 4][e / 2 % 2][e % 2], 0.0f, none);
    }
    if (!__any_sync(~0u, none != none)) return;
    again(v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
        multiply16<true>(v[i], first);
        multiply16<true>(v[i], second);
    }
}

// The first pass takes the lanes' four neighbours of k, and leaves four: k and j number 2 t + 8 h + p is 4 t + 2 h + p.
__device__ constexpr int neighbours16(int n) { return n % 8 / 2 * 4 + n / 8 * 2 + n % 2; }

// The factors as operand a, [factor][piece][lane][4]: 6 KB.
template <class Plan, typename T>
__device__ __forceinline__ void load_weights16(unsigned* to, const Factors4<T>& factors) {
#pragma unroll
    for (int f = 0; f < 4; ++f)
        for (int e = threadIdx.x; e < 128; e += Plan::THREADS) {
            int j = e / 16 + e % 2 * 8, k = e / 4 % 4 * 2 + e / 2 % 2 * 8;
            float pair[2];
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                int row = f ? k + p : neighbours16(k + p), column = f ? j : neighbours16(j);
                pair[p] = load_as(factors.at[f][row * factors.p[f] + column * factors.q[f]]);
            }
            unsigned pieces[PIECES];
            split_pair<true>(pieces, pair[0], pair[1]);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) to[(f * PIECES + i) * 128 + e] = pieces[i];
        }
}
__device__ __forceinline__ void fetch_weights16(Weights16& w, const unsigned* from) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        reinterpret_cast<uint4&>(w[i]) = *reinterpret_cast<const uint4*>(from + i * 128 + threadIdx.x % 32 * 4);
}
