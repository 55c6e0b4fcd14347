// matmul v6 and newer, for few rows or short sums: C = A . B on the FMA units. Reading B or writing C limits the speed.
//
// Operands   A and B are read in place, element by element, so any alignment works. LANES_K: both are contiguous along k; else B along n.
// Algorithm  A block computes R x COLUMNS elements of C, with float sums. Its warps divide the values of k among them. LANES_K: so do the
//            lanes of a warp, whose sums shuffles add. Else a lane has C columns, 32 apart. The sums of the warps are added in order.
// Launch     grid batch * tiles, block 32 * WARPS. The tile sets the order of additions and depends on M: so do the bits of a row.
#pragma once
#include "common/reduce.cuh"
#include "epilogue.cuh"

template <int R_, int C_, int UNROLL_, int WARPS_, bool LANES_K_, int BLOCKS_>  // BLOCKS per SM; C * UNROLL loads of B are in flight
struct DirectTile {
    static constexpr int R = R_, C = C_, UNROLL = UNROLL_, WARPS = WARPS_, BLOCKS = BLOCKS_, LANES = LANES_K_ ? 32 : 1, ACROSS = 32 / LANES,
                         COLUMNS = C * ACROSS;
    static constexpr int STEP = WARPS * LANES;
};
using Direct1k = DirectTile<1, 4, 4, 8, true, 4>;
using Direct4k = DirectTile<4, 4, 4, 8, true, 3>;
using Direct1 = DirectTile<1, 1, 16, 32, false, 1>;

template <typename T, typename O, typename S>
__global__ void __launch_bounds__(32 * S::WARPS, S::BLOCKS)
    matmul_direct(O* out, O* pre, const T* a, const T* b, const T* bias, const O* residual, Sizes s, long long a_m, long long a_k,
                  long long b_k, long long b_n) {
    __shared__ float sums[S::WARPS][S::R * S::COLUMNS];
    wait_for_previous();
    let_next_start();
    int across = (s.N + S::COLUMNS - 1) / S::COLUMNS, tiles = (s.M + S::R - 1) / S::R * across, z = blockIdx.x / tiles;
    int tile = blockIdx.x % tiles, m0 = tile / across * S::R, n0 = tile % across * S::COLUMNS, column = threadIdx.x % S::ACROSS;
    int k0 = threadIdx.x / S::ACROSS;
    if (S::LANES > 1) a_k = b_k = 1;
    else b_n = 1;
    a += z * s.a_batch + m0 * a_m + k0 * a_k;
    b += z * s.b_batch + (n0 + column) * b_n + k0 * b_k;
    float acc[S::R][S::C] = {};
#pragma unroll 1
    for (; k0 < s.K; k0 += S::UNROLL * S::STEP) {
        T y[S::UNROLL][S::C];
#pragma unroll
        for (int u = 0; u < S::UNROLL; ++u) {
#pragma unroll
            for (int c = 0; c < S::C; ++c) {
                bool inside = k0 + u * S::STEP < s.K && n0 + column + c * S::ACROSS < s.N;
                y[u][c] = inside ? b[c * S::ACROSS * b_n] : T(0);
            }
            b += S::STEP * b_k;
            asm volatile("" : "+l"(b));  // one address in registers, not one per load
        }
#pragma unroll
        for (int u = 0; u < S::UNROLL; ++u) {
#pragma unroll
            for (int r = 0; r < S::R; ++r) {
                float x = k0 + u * S::STEP < s.K && m0 + r < s.M ? load_as(a[r * a_m]) : 0.0f;
#pragma unroll
                for (int c = 0; c < S::C; ++c) acc[r][c] += x * load_as(y[u][c]);
            }
            a += S::STEP * a_k;
            asm volatile("" : "+l"(a));
        }
    }
#pragma unroll
    for (int i = 0; i < S::R * S::C; ++i) {
        float sum = S::LANES > 1 ? warp_reduce<Sum>(acc[i / S::C][i % S::C]) : acc[i / S::C][i % S::C];
        if (threadIdx.x % S::LANES == 0) sums[threadIdx.x / 32][i * S::ACROSS + column] = sum;
    }
    __syncthreads();
    long long first = (long long)z * s.M * s.N;
    Output<T, O> to{out, pre, bias, residual, s.activation};
#pragma unroll 4
    for (int i = threadIdx.x; i < S::R * S::COLUMNS; i += 32 * S::WARPS) {
        int m = m0 + i / S::COLUMNS, n = n0 + i % S::COLUMNS;
        float v[1] = {sums[0][i]};
        for (int w = 1; w < S::WARPS; ++w) v[0] += sums[w][i];
        if (m < s.M && n < s.N) to.template finish<1>(v, first + m * (long long)s.N + n, n);
    }
}
