// matmul v5 and newer, for few rows: C = A . B on the FMA units. Reading B limits the speed.
//
// Operands   A is contiguous along k; B along k (ALONG_K) or along n. Both are read in place: in vectors of 4 elements where an operand
//            consists of aligned ones, else by elements.
// Algorithm  A block computes R x COLUMNS elements of C, with float sums. A lane multiplies patches of 4 k x 4 columns of B. The LANES lanes
//            that share columns divide the values of k among them, and so do the warps. Shuffles add the sums of the lanes, and the sums of
//            the warps are added in order.
// Launch     grid batch * splits * tiles, block 32 * WARPS. With splits > 1, partial sums go to `partials`, and matmul_v6_reduce adds them.
//            The tile sets the order of additions and depends on M: so do the bits of a row.
#pragma once
#include "common/reduce.cuh"
#include "epilogue.cuh"

template <int R_, bool ALONG_K_, int LANES_, int UNROLL_, int WARPS_, int BLOCKS_>  // BLOCKS per SM; 4 * UNROLL vectors of B are in flight
struct DirectTile {
    static constexpr bool ALONG_K = ALONG_K_;
    static constexpr int R = R_, LANES = LANES_, UNROLL = UNROLL_, WARPS = WARPS_, BLOCKS = BLOCKS_, COLUMNS = 4 * 32 / LANES;
    static constexpr int STEP = 4 * WARPS * LANES;
};
using Direct1k = DirectTile<1, true, 16, 4, 8, 2>;
using Direct4k = DirectTile<4, true, 8, 2, 8, 3>;
using Direct1 = DirectTile<1, false, 16, 4, 8, 2>;

// True if 4 elements at each multiple of 4 of a line are aligned, and lines of `length` elements consist of them.
template <typename T>
__device__ __forceinline__ bool whole_vectors(const T* x, long long ld, long long of_batch, int length) {
    return (reinterpret_cast<unsigned long long>(x) / sizeof(T) | ld | of_batch | length) % 4 == 0;
}

// 4 elements of a line, of which the first `left` exist. `vectors`: all or none exist, and they are aligned.
template <typename T>
__device__ __forceinline__ Vec<T, 4> load_four(const T* x, int left, bool vectors) {
    Vec<T, 4> y = {};
    if (vectors) {
        if (left > 0) y = load_vec<T, 4>(x);
        return y;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (i < left) y.v[i] = x[i];
    return y;
}

// A lane's patches of B for the next UNROLL steps. x is the first element, of which k_left and n_left values of k and columns exist.
template <typename S, typename T>
__device__ __forceinline__ void load_patches(Vec<T, 4> (&y)[S::UNROLL][4], const T* x, long long ld, int k_left, int n_left, bool vectors) {
#pragma unroll
    for (int u = 0; u < S::UNROLL; ++u) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int along = S::ALONG_K ? k_left : n_left, lines = S::ALONG_K ? n_left : k_left;
            y[u][i] = load_four(x + i * ld, i < lines ? along : 0, vectors);
        }
        x += S::STEP * (S::ALONG_K ? 1 : ld);
        k_left -= S::STEP;
        asm volatile("" : "+l"(x));  // one address in registers, not one per load
    }
}

template <typename T, typename O, typename S>
__global__ void __launch_bounds__(32 * S::WARPS, S::BLOCKS)
    matmul_direct(O* out, O* pre, float* partials, const T* a, const T* b, const T* bias, const O* residual, Sizes s) {
    __shared__ float sums[S::WARPS][S::R * S::COLUMNS];
    wait_for_previous();
    let_next_start();
    int tiles_m = (s.M + S::R - 1) / S::R, tiles = tiles_m * ((s.N + S::COLUMNS - 1) / S::COLUMNS), tile = blockIdx.x % tiles;
    int split = blockIdx.x / tiles % s.splits, z = blockIdx.x / tiles / s.splits;
    int m0 = tile % tiles_m * S::R, n0 = tile / tiles_m * S::COLUMNS, lane = threadIdx.x % 32, n = n0 + lane / S::LANES * 4;
    int steps = (s.K + S::STEP - 1) / S::STEP, end = min(int((split + 1ll) * steps / s.splits) * S::STEP, s.K);
    int k = int((long long)split * steps / s.splits) * S::STEP + 4 * (threadIdx.x / 32 * S::LANES + lane % S::LANES);
    a += z * s.a_batch + m0 * s.lda + k;
    b += z * s.b_batch + (S::ALONG_K ? n * s.ldb + k : k * s.ldb + n);
    bool a_vectors = whole_vectors(a, s.lda, 0, s.K), b_vectors = whole_vectors(b, s.ldb, 0, S::ALONG_K ? s.K : s.N);
    float acc[S::R][4] = {};
#pragma unroll 1
    for (; k < end; k += S::UNROLL * S::STEP) {
        Vec<T, 4> y[S::UNROLL][4];
        if (b_vectors) load_patches<S>(y, b, s.ldb, end - k, s.N - n, true);
        else load_patches<S>(y, b, s.ldb, end - k, s.N - n, false);
        b += S::UNROLL * S::STEP * (S::ALONG_K ? 1 : s.ldb);
#pragma unroll
        for (int u = 0; u < S::UNROLL; ++u) {
            float columns[4][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) unpack(columns[i], y[u][i]);
#pragma unroll
            for (int r = 0; r < S::R; ++r) {
                float x[4];
                unpack(x, load_four(a + r * s.lda, m0 + r < s.M ? end - k - u * S::STEP : 0, a_vectors));
#pragma unroll
                for (int j = 0; j < 4; ++j)
#pragma unroll
                    for (int c = 0; c < 4; ++c) acc[r][c] += x[j] * (S::ALONG_K ? columns[c][j] : columns[j][c]);
            }
            a += S::STEP;
            asm volatile("" : "+l"(a));
        }
    }
#pragma unroll
    for (int i = 0; i < S::R * 4; ++i) {
        float sum = warp_reduce<Sum>(acc[i / 4][i % 4], S::LANES);
        if (lane % S::LANES == 0) sums[threadIdx.x / 32][i / 4 * S::COLUMNS + lane / S::LANES * 4 + i % 4] = sum;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < S::R * S::COLUMNS; i += 32 * S::WARPS) {
        int m = m0 + i / S::COLUMNS, column = n0 + i % S::COLUMNS;
        float v[1] = {sums[0][i]};
        for (int w = 1; w < S::WARPS; ++w) v[0] += sums[w][i];
        if (m >= s.M || column >= s.N) continue;
        long long at = ((long long)z * s.M + m) * s.N + column;
        if (s.splits > 1) partials[(long long)split * s.batch * s.M * s.N + at] = v[0];
        else Output<T, O>{out, pre, bias, residual, s.activation}.template finish<1>(v, at, column);
    }
}
