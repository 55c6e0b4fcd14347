// The forward of two factors of float in TF32 by warpgroups (sm_90a), for 80 to 128 columns q of the left factor, in one launch. split.cuh,
// which defines the terms, needs a launch for each factor of 128 x 128.
//
// A float is split into two bfloat16 numbers, so that two factors of 128 x 128 fit. Registers hold W1 as operand a (64 rows per warpgroup)
// and the part of Z = W1^T X that Y = Z W2 takes. Shared memory holds W2, X, and the next X, which arrives by cp.async. Two warpgroups
// alternate (ping-pong): one multiplies while the other splits Z and the next X, and stores.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/launch.cuh"
#include "warpgroups.cuh"

// X [P1][P2], Y [Q1][Q2]: multiples of 16.
template <class Left_, class Right_>
struct Both4 {
    static constexpr int P1 = Left_::P, Q1 = Left_::Q, P2 = Right_::P, Q2 = Right_::Q, THREADS = (Q1 + 63) / 64 * 128;
    using X = Tiles<P1, P2, Tf32>;
    using W1 = Tiles<P1, Q1, Tf32>;
    using W2 = Tiles<P2, Q2, Tf32>;
    static constexpr int STAGED = X::BYTES > Staged<W1>::SPACE ? X::BYTES : Staged<W1>::SPACE;  // bytes of X; W1 is staged there first
};

// Arguments as for kron_linear_v4_split. Any grid, block THREADS. Dynamic shared memory: W2 and X, split, and the next X.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, 1)
    kron_linear_v4_both(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                        const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                        long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                        long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                        long long features) {
    using X = typename Plan::X;
    using W1 = typename Plan::W1;
    using W2 = typename Plan::W2;
    constexpr int P1 = Plan::P1, Q1 = Plan::Q1, P2 = Plan::P2, Q2 = Plan::Q2, THREADS = Plan::THREADS;
    extern __shared__ uint4 dynamic[];
    int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), group = warp / 4;
    __nv_bfloat16 *right = reinterpret_cast<__nv_bfloat16*>(dynamic), *xs = right + W2::BYTES / 2;
    Arriving<X, THREADS, T> next{reinterpret_cast<Vec<T, 4>*>(xs + Plan::STAGED / 2) + threadIdx.x};
    auto fetch = [&](long long a) {
        if (a < A) next.fetch(x + a * (P1 * P2), P2);
    };
    long long a = blockIdx.x, step = gridDim.x;
    let_next_come();
    factor_ahead<W2, THREADS>(w0, w0_p, w0_q);
    factor_ahead<W1, THREADS>(w1, w1_p, w1_q);
    if (a < A) Ahead<P1, P2, THREADS, T>::ahead(x + a * (P1 * P2), P2);
    wait_for_previous();
    Rows<P1, Tf32> left;  // [q][p] for the 64 q of this warpgroup; zeros beyond the last q
    {
        Underway<W1, THREADS> factor1;
        Underway<W2, THREADS> factor2;
        factor1.fetch_any(w1, w1_p, w1_q);
        factor2.fetch_any(w0, w0_p, w0_q);
        fetch(a);
        float *staged = reinterpret_cast<float*>(xs), numbers[P1 / 8][4];
        Staged<W1>::put(staged, factor1);
        factor2.template put<true>(right);
        __syncthreads();
        int q = 64 * group + warp % 4 * 16 + threadIdx.x % 32 / 4, p = threadIdx.x % 4 * 2;
#pragma unroll
        for (int e = 0; e < P1 / 2; ++e) {
            int j = q + e / 2 % 2 * 8;
            numbers[e / 4][e % 4] = j < Q1 ? staged[(p + e % 2 + e / 4 * 8) * Staged<W1>::ROW + j] : 0.0f;
        }
        left.split(numbers);
        __syncthreads();
    }
    cp_async_wait<0>();
    if (a < A) next.put(xs);
    fence_async();
    fetch(a + step);
    __syncthreads();
    // Split the next X to shared memory when neither warpgroup multiplies the current one any more.
    auto put = [&] {
        barrier_of(3 + group, THREADS);
        cp_async_wait<0>();
        if (a + step < A) next.template put<4>(xs);
        fence_async();
        fetch(a + 2 * step);
    };
    Turns<2> turns{0, group};
    if (a < A) turns.first();
#pragma unroll 1
    for (; a < A; a += step) {
        Rows<P2, Tf32> rows;
        float z[P2 / 8][4], y[Q2 / 8][4];
        turns.begin();
        start_product<P1, Tf32>(z, left, Described<X, true>(xs));
        turns.end(true);
        wgmma_wait<0>(z);
        arrive_at(4 - group, THREADS);
        rows.split(z);
        if (group == 1) put();
        turns.begin();
        start_product<P2, Tf32>(y, rows, Described<W2, true>(right));
        turns.end(a + step < A);
        if (group == 0) put();
        wgmma_wait<0>(y);
        store_seated(out, bias, residual, y, features, float(scale), [&](int row, int column) {
            row += 64 * group;
            return row < Q1 ? (a * Q1 + row) * Q2 + column : -1;
        });
    }
}
