// The forward of a layer of two float factors of 128 x 128 with few rows, in one launch by warpgroups (sm_90a), in strict float or TF32.
//
// Four thread blocks share each row X. Each computes 32 columns of
//     Z = X W2,  Y = W1^T Z,
// from all of X and W1 and 32 columns of W2. Only Z goes from warp to warp. X and W1 are operands a in registers: each element is in one
// lane, which splits it (split.cuh explains why and how). Two warpgroups compute Z, 64 rows each. Meanwhile two others load and split W2,
// which goes to shared memory as Z does, and load W1, with which they compute Y.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/launch.cuh"
#include "warpgroups.cuh"

// 64 x K elements of a warpgroup as operand a. They are split in steps of 16 k: AHEAD steps before the products, the others during the
// products of earlier steps.
template <int K, typename Kind, int AHEAD>
struct Splitting {
    static constexpr int STEPS = K / 16;
    float numbers[K / 8][4];
    Rows<16, Kind> a[STEPS];

    __device__ __forceinline__ void split(int k) {
        float two[2][4];
#pragma unroll
        for (int e = 0; e < 8; ++e) two[e / 4][e % 4] = numbers[2 * k + e / 4][e % 4];
        a[k].split(two);
    }
    __device__ __forceinline__ void split_ahead() {
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) split(k);
    }
    // d = a b. The small products have their own accumulators.
    template <class B, int N>
    __device__ __forceinline__ void multiply(float (&d)[N][4], const B& b) {
        constexpr int FIRST = first_product(Pieces<Kind>::COUNT);
        float small[N][4];
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (k >= AHEAD) split(k);
            wgmma_fence();
#pragma unroll
            for (int e = FIRST; e < PRODUCTS; ++e)
                wgmma<__nv_bfloat16, B::DOWN>(e + 1 < PRODUCTS ? small : d, a[k].pieces[left_piece(e)][0], b(right_piece(e), k),
                                              k > 0 || (e > FIRST && e + 1 < PRODUCTS));
            wgmma_commit();
            if (k > 0) wgmma_wait<1>(a[k - 1].pieces);
        }
        wgmma_wait<0>(small);
        wgmma_wait<0>(d);
        add(d, small);
    }
};

// kron_linear_v4 for two factors and few rows. Grid: SIDE / 32 blocks per row; block 512. Dynamic shared memory: the block's columns of W2
// and Z, split.
template <typename T, typename Kind, int SIDE>
__global__ void __launch_bounds__(512, 1)
    kron_linear_v4_slice(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                         const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                         long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                         long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                         long long features) {
    static_assert(SIDE == 128, "64 rows of Z, and of Y, for each of two warpgroups");
    constexpr int COLUMNS = 32, SLICES = SIDE / COLUMNS, THREADS = 512;
    using Slice = Tiles<SIDE, COLUMNS, Kind>;
    if (blockIdx.x / SLICES >= A) return;  // the grid is planned for the largest number of rows in a bucket
    extern __shared__ uint4 dynamic[];
    __nv_bfloat16 *right = reinterpret_cast<__nv_bfloat16*>(dynamic), *zs = right + Slice::BYTES / 2;
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), half = warp / 4 % 2 * 64, lane = threadIdx.x % 32;
    bool first = warp < 8;
    long long row = blockIdx.x / SLICES * (SIDE * SIDE);
    int column = blockIdx.x % SLICES * COLUMNS;
    prefetch_factor(w0, SIDE, SIDE, w0_p, w0_q);
    prefetch_factor(w1, SIDE, SIDE, w1_p, w1_q);
    prefetch_tile<SIDE * COLUMNS, 1>(x + blockIdx.x * (SIDE * COLUMNS), 1, 1);
    wait_for_previous();
    Splitting<SIDE, Kind, 4> left;  // X, or W1^T: two of its 16 rows, neighbours in memory, are in one lane
    if (first) {
        fetch_seated(left.numbers, x + row + half * SIDE, SIDE);
        let_next_come();
        left.split_ahead();
        __syncthreads();
    } else {
        Underway<Slice, THREADS / 2> factor;
        factor.fetch_any(w0 + column * w0_q, w0_p, w0_q);
        factor.template put<true>(right);
        fence_async();
        __syncthreads();
        const T* from = w1 + (half + warp % 4 * 16 + lane / 4 * 2) * w1_q + lane % 4 * 2 * w1_p;
        bool twos = w1_q == 1 && w1_p % 2 == 0 && reinterpret_cast<unsigned long long>(w1) % 8 == 0;
#pragma unroll
        for (int e = 0; e < SIDE / 4; ++e) {
            const T* at = from + (e / 2 * 8 + e % 2) * w1_p;
            Vec<T, 2> two = twos ? load_vec<T, 2>(at) : Vec<T, 2>{at[0], at[w1_q]};
#pragma unroll
            for (int i = 0; i < 2; ++i) left.numbers[e / 2][i * 2 + e % 2] = two.v[i];
        }
        left.split_ahead();
        barrier_of(1, THREADS);
    }
    float sums[COLUMNS / 8][4];
    left.multiply(sums, Described<Slice, true>(first ? right : zs));
    if (first) {
        put_rows<Slice>(zs + Slice::tile(half, 0), sums);
        fence_async();
        return arrive_at(1, THREADS);
    }
    store_seated(out, bias, residual, sums, features, float(scale),
                 [&](int m, int n) { return row + (half + m / 16 * 16 + m % 8 * 2 + m % 16 / 8) * SIDE + column + n; });
}
