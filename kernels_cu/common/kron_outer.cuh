// The gradients of both factors of a layer of two, 128 x 128 each, of few rows: dW1 += Z G^T and dW2 += X^T H of each row, where Z = X W2
// and H = W1 G have been made.
//
// There are no partial sums in memory. A cluster has a tile of M x N numbers of one gradient, and its blocks every CLUSTER-th row each;
// the sums of their warps, of 32 numbers of k each, are added through shared memory, always in the same order. In float products are those
// of kron_pieces.cuh, of three bfloat16 numbers. The next row's numbers are on their way, in registers, while one's are multiplied.
//
// On one H200, 32 rows, in us: the backward 38 (of inputs that no cache has 43), of which this launch 20; 43 (44) by a cluster for each row,
// which had all in one launch, and partial sums. In bfloat16 19.5, of which this launch 8, and 20. What did not help: 64 numbers of k a block,
// and all 128 x 128 sums of them, which reads and splits nothing twice, but leaves eight partial sums (37.7, and 23).
#pragma once
#include "kron_pieces.cuh"

// How the tiles of a gradient take their operands from a row's two matrices: of LEFT, k is what is contiguous.
template <bool LEFT, typename T>
struct Outer4 {
    static constexpr int SIDE = 128, M = 32, N = 64, CLUSTER = 8, THREADS = 256, TIMES = 4;  // TIMES: of the warps that share k out
    static constexpr int LDA = (LEFT ? SIDE : M) + 8, LDB = (LEFT ? SIDE : N) + 8;
    static constexpr int A = (LEFT ? M : SIDE) * LDA, B = (LEFT ? N : SIDE) * LDB, STAGE = Pieces<T>::COUNT * (A + B);
    using PartA = conditional_t<LEFT, Ahead<M, SIDE, THREADS, T>, Ahead<SIDE, M, THREADS, T>>;
    using PartB = conditional_t<LEFT, Ahead<N, SIDE, THREADS, T>, Ahead<SIDE, N, THREADS, T>>;
    using OperandA = conditional_t<LEFT, Operand<LDA, 1>, Operand<1, LDA>>;
    using OperandB = conditional_t<LEFT, Operand<LDB, 1>, Operand<1, LDB>>;
    __device__ static constexpr int place(int first) { return LEFT ? first * SIDE : first; }
};

// `out`, a gradient, from number (m, n) on: scale times the sum over the rows of a b, as Plan says.
template <class Plan, typename T>
__device__ __forceinline__ void outer_products(T* out, const T* a, const T* b, void* shared, int m, int n, int rows, float scale) {
    using U = typename Pieces<T>::type;
    constexpr int M = Plan::M, N = Plan::N, SIDE = Plan::SIDE, THREADS = Plan::THREADS;
    int rank = cluster_rank(), warp = threadIdx.x / 32, time = warp % Plan::TIMES, half = warp / Plan::TIMES * (N / 2);
    U* stage = static_cast<U*>(shared);
    float sums[2][4][4] = {};
    typename Plan::PartA next_a;
    typename Plan::PartB next_b;
    auto fetch = [&](int row) {
        if (row >= rows) return;
        next_a.fetch(a + row * (SIDE * SIDE) + Plan::place(m), SIDE);
        next_b.fetch(b + row * (SIDE * SIDE) + Plan::place(n), SIDE);
    };
    fetch(rank);
    for (int row = rank; row < rows; row += Plan::CLUSTER) {
        U *as = stage + row / Plan::CLUSTER % 2 * Plan::STAGE, *bs = as + Pieces<T>::COUNT * Plan::A;
        next_a.template put<Plan::A>(as);
        next_b.template put<Plan::B>(bs);
        fetch(row + Plan::CLUSTER);
        __syncthreads();
        multiply_pieces<SIDE / Plan::TIMES, typename Plan::OperandA, typename Plan::OperandB, Plan::A, Plan::B, T>(
            sums, as + time * (SIDE / Plan::TIMES) * Plan::OperandA::K,
            bs + half * Plan::OperandB::ROW + time * (SIDE / Plan::TIMES) * Plan::OperandB::K);
    }
    __syncthreads();
    float* all = static_cast<float*>(shared);  // [time][M][N]
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 16; ++e) {
        float* to = all + (time * M + e / 8 * 16 + e % 2 * 8 + g) * N + half + e / 2 % 4 * 8 + 2 * t;
        store_vec(to, Vec<float, 2>{sums[e / 8][e / 2 % 4][e % 2 * 2], sums[e / 8][e / 2 % 4][e % 2 * 2 + 1]});
    }
    __syncthreads();
    for (int e = threadIdx.x; e < M * N; e += THREADS) {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < Plan::TIMES; ++i) sum += all[i * M * N + e];
        all[e] = sum;
    }
    cluster_sync();
    static_assert(M * N == Plan::CLUSTER * THREADS);
    int own = rank * THREADS + threadIdx.x;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < Plan::CLUSTER; ++i) sum += ld_cluster<float>(shared_of_rank(shared_address(all + own), i));
    out[(m + own / N) * SIDE + n + own % N] = T(sum * scale);
    cluster_sync();
}

#if __CUDA_ARCH__ >= 900
// h is g times W1, z is x times W2. Grid CLUSTER * 16: 8 tiles of dw0, the right factor's, then 8 of dw1; block THREADS; dynamic shared
// memory: two stages.
template <typename T>
__global__ void __cluster_dims__(Outer4<true, T>::CLUSTER, 1, 1) __launch_bounds__(Outer4<true, T>::THREADS, 1)
kron_linear_v4_outer_bwd(T* dw0, T* dw1, const T* x, const T* h, const T* z, const T* g, int rows, double scale) {
    using Left = Outer4<true, T>;
    using Right = Outer4<false, T>;
    extern __shared__ uint4 dynamic[];
    int tile = blockIdx.x / Left::CLUSTER, m = tile % 4 * Left::M, n = tile / 4 % 2 * Left::N;
    wait_for_previous();
    if (tile < 8) outer_products<Right>(dw0, x, h, dynamic, m, n, rows, float(scale));
    else outer_products<Left>(dw1, z, g, dynamic, m, n, rows, float(scale));
}
#endif
