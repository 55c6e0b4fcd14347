// The gradients of both factors of a layer of two, 128 x 128 each, of few rows: dW1 += Z G^T and dW2 += X^T H of each row, where Z = X W2
// and H = W1 G have been made.
//
// A block has 64 of the numbers along which one of the two is summed up, and all 128 x 128 sums of them: so no number is read, or split,
// twice, and all multiprocessors have work where rows are 32. The blocks of a cluster add their sums through shared memory, always in the
// same order, and leave one of eight partial sums. In float products are those of kron_pair.cuh, of three bfloat16 numbers.
#pragma once
#include "kron_pair.cuh"

// How a block takes its part of a row's two matrices: of the LEFT factor's gradient, k is what is contiguous.
template <bool LEFT, typename T>
struct Outer4 {
    static constexpr int SIDE = 128, DEPTH = 64, THREADS = 256, CLUSTER = 8;
    static constexpr int ROWS = LEFT ? SIDE : DEPTH, COLUMNS = LEFT ? DEPTH : SIDE, LD = COLUMNS + 8, PLANE = ROWS * LD;
    using Part = Ahead<ROWS, COLUMNS, THREADS, T>;
    using Side = conditional_t<LEFT, Operand<LD, 1>, Operand<1, LD>>;
    // Where part `unit` begins.
    __device__ static constexpr int place(int unit) { return LEFT ? unit / 2 * SIDE * SIDE + unit % 2 * DEPTH : unit * DEPTH * SIDE; }
};

// out [128][128] = the sum of a b over the cluster's units; units from `units` on are none.
template <class Plan, typename T>
__device__ __forceinline__ void outer_products(float* out, const T* a, const T* b, void* shared, int unit, int units) {
    using U = typename Pieces<T>::type;
    using Side = typename Plan::Side;
    constexpr int SIDE = Plan::SIDE;
    U *as = static_cast<U*>(shared), *bs = as + Pieces<T>::COUNT * Plan::PLANE;
    int warp = threadIdx.x / 32, m = warp / 2 * 32, n = warp % 2 * 64;
    float sums[2][2][4][4] = {};
    if (unit < units) {
        typename Plan::Part part_a, part_b;
        part_a.fetch(a + Plan::place(unit), SIDE);
        part_b.fetch(b + Plan::place(unit), SIDE);
        part_a.template put<Plan::PLANE>(as);
        part_b.template put<Plan::PLANE>(bs);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i)
            multiply_pieces<Plan::DEPTH, 32, Side, Side, Plan::PLANE, Plan::PLANE, T>(sums[i], as + m * Side::ROW, bs + (n + i * 32) * Side::ROW);
        __syncthreads();
    }
    float* all = static_cast<float*>(shared);
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int e = 0; e < 32; ++e) {
        const float(&d)[4] = sums[e / 16][e / 8 % 2][e / 2 % 4];
        float* to = all + (m + e / 8 % 2 * 16 + e % 2 * 8 + g) * SIDE + n + e / 16 * 32 + e / 2 % 4 * 8 + 2 * t;
        store_vec(to, Vec<float, 2>{d[e % 2 * 2], d[e % 2 * 2 + 1]});
    }
    cluster_sync();
    constexpr int OWN = SIDE * SIDE / Plan::CLUSTER, EACH = OWN / 4 / Plan::THREADS;
    int own = cluster_rank() * OWN + threadIdx.x * 4;
    float4 total[EACH] = {};
#pragma unroll
    for (int i = 0; i < EACH * Plan::CLUSTER; ++i) {
        float4& sum = total[i / Plan::CLUSTER];
        float4 other = ld_cluster<float4>(shared_of_rank(shared_address(all + own + i / Plan::CLUSTER * Plan::THREADS * 4), i % Plan::CLUSTER));
        sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
    }
    cluster_arrive();
#pragma unroll
    for (int i = 0; i < EACH; ++i) *reinterpret_cast<float4*>(out + own + i * Plan::THREADS * 4) = total[i];
    cluster_wait();
}
