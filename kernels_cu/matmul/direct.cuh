// matmul v5 and newer, for few rows: C = A . B on the FMA units. Reading B limits the speed.
//
// Operands   A is contiguous along k, B along k (ALONG_K) or along n. Both are read in place, in vectors of 4
//            elements where all of an operand's lines consist of aligned ones, else by elements.
// Algorithm  A block computes R rows x 128 / LANES columns of C, with float sums. A thread multiplies patches
//            of 4 k x 4 columns of B. LANES threads of a warp share columns and divide the values of k among
//            them, as do the warps. Shuffles add the sums of the lanes, and those of the warps are added in
//            order. LANES is 8, 16 or 32, chosen at run time: more for few columns and long sums.
// Launch     grid batch * tiles, block 32 * WARPS. The tile sets the order of additions and depends on M: so
//            do the bits of a row.
#pragma once
#include "common/reduce.cuh"
#include "epilogue.cuh"

// BLOCKS per SM; UNROLL patches of B are in flight
template <int R_, bool ALONG_K_, int UNROLL_, int BLOCKS_>
struct DirectTile {
    // at most, with 8 lanes
    static constexpr int R = R_, UNROLL = UNROLL_, BLOCKS = BLOCKS_, WARPS = 8, COLUMNS = 16;
    static constexpr bool ALONG_K = ALONG_K_;
};
using Direct1k = DirectTile<1, true, 2, 3>;
using Direct4k = DirectTile<4, true, 2, 2>;
using Direct1 = DirectTile<1, false, 2, 3>;
using Direct4 = DirectTile<4, false, 2, 2>;

// UNROLL patches, `step` apart along k: of LINES lines, `ld` apart, 4 neighbouring elements each. What is
// outside of the matrix is zero: k_left values of k and `others` of the other dimension are inside.
template <bool VECTORS, bool ALONG_K, int UNROLL, int LINES, typename T>
__device__ __forceinline__ void load_patches(Vec<T, 4> (&y)[UNROLL][LINES], const T* x, long long ld,
                                             int step, int k_left, int others) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        int lines = ALONG_K ? others : k_left, length = ALONG_K ? k_left : others;
#pragma unroll
        for (int i = 0; i < LINES; ++i) {
            y[u][i] = {};
            if (VECTORS && i < lines && length > 0) y[u][i] = load_vec<T, 4>(x + i * ld);
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (!VECTORS && i < lines && j < length) y[u][i].v[j] = x[i * ld + j];
        }
        x += step * (ALONG_K ? 1 : ld);
        k_left -= step;
        asm volatile("" : "+l"(x));  // one address in registers, not one per load
    }
}

template <typename T, typename O, typename S>
__global__ void __launch_bounds__(32 * S::WARPS, S::BLOCKS)
    matmul_direct(O* out, O* pre, const T* a, const T* b, const T* bias, const O* residual, Sizes s,
                  int lanes) {
    __shared__ float sums[S::WARPS][S::R * S::COLUMNS];
    wait_for_previous();
    let_next_start();
    int columns = 128 / lanes, step = 4 * S::WARPS * lanes, lane = threadIdx.x % 32, group = lane / lanes;
    int tiles_m = (s.M + S::R - 1) / S::R, tiles = tiles_m * ((s.N + columns - 1) / columns),
        tile = blockIdx.x % tiles;
    int m0 = tile % tiles_m * S::R, n0 = tile / tiles_m * columns, n = n0 + group * 4, z = blockIdx.x / tiles;
    int k = 4 * int(threadIdx.x / 32 * lanes + lane % lanes);
    a += z * s.a_batch + m0 * s.lda + k;
    b += z * s.b_batch + (S::ALONG_K ? n * s.ldb + k : k * s.ldb + n);
    bool a_vectors = (reinterpret_cast<unsigned long long>(a) / sizeof(T) | s.lda | s.K) % 4 == 0;
    bool b_vectors =
        (reinterpret_cast<unsigned long long>(b) / sizeof(T) | s.ldb | (S::ALONG_K ? s.K : s.N)) % 4 == 0;
    float acc[S::R][4] = {};
#pragma unroll 1
    for (; k < s.K; k += S::UNROLL * step) {
        Vec<T, 4> x[S::UNROLL][S::R], y[S::UNROLL][4];
        if (b_vectors) load_patches<true, S::ALONG_K>(y, b, s.ldb, step, s.K - k, s.N - n);
        else load_patches<false, S::ALONG_K>(y, b, s.ldb, step, s.K - k, s.N - n);
        if (a_vectors) load_patches<true, true>(x, a, s.lda, step, s.K - k, s.M - m0);
        else load_patches<false, true>(x, a, s.lda, step, s.K - k, s.M - m0);
        a += S::UNROLL * step;
        b += S::UNROLL * step * (S::ALONG_K ? 1 : s.ldb);
#pragma unroll
        for (int u = 0; u < S::UNROLL; ++u) {
            float of_b[4][4], of_a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) unpack(of_b[i], y[u][i]);
#pragma unroll
            for (int r = 0; r < S::R; ++r) {
                unpack(of_a, x[u][r]);
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    acc[r][i % 4] += of_a[i / 4] * (S::ALONG_K ? of_b[i % 4][i / 4] : of_b[i / 4][i % 4]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < S::R * 4; ++i) {
        float sum = warp_reduce<Sum>(acc[i / 4][i % 4], lanes);
        if (lane % lanes == 0) sums[threadIdx.x / 32][i / 4 * columns + group * 4 + i % 4] = sum;
    }
    __syncthreads();
    Output<T, O> to{out, pre, bias, residual, s.activation};
    for (int i = threadIdx.x; i < S::R * columns; i += 32 * S::WARPS) {
        int m = m0 + i / columns, column = n0 + i % columns;
        float v[1] = {sums[0][i]};
        for (int w = 1; w < S::WARPS; ++w) v[0] += sums[w][i];
        if (m < s.M && column < s.N)
            to.template finish<1>(v, ((long long)z * s.M + m) * s.N + column, column);
    }
}
