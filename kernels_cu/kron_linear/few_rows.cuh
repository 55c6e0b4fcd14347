// The backward of a layer of two factors of 128 x 128 with few rows, by warpgroups (sm_90a): one launch, and
// one that adds the partial sums.
//
// A row is X; G is the gradient of its output:
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T.
// Four thread blocks share each row. Each computes a quarter of Z and of H. It reads 64 rows of X and W1, and
// 64 columns of W2 and G, and nothing else. From these it computes half of the sums for 64 rows of dW1, 64
// columns of dW2, and 64 rows of dX. The two blocks of a cluster exchange their halves of dX and dW1. The
// gradients of the factors are stored as partial sums. The first warpgroup computes Z and dW1, the second H
// and dX, and each half of dW2. With MORE, two overlapping launches share the rows, and the second adds to
// the partial sums of the first. This halves their memory.
#pragma once
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "split_float.cuh"
#include "tile.cuh"

// Exchange halves of a warpgroup's 64 x 128 accumulators within a cluster of two blocks. Each block keeps the
// 64 columns that belong to its rank and adds those from the other block. They arrive in `space`, which must
// be free in both blocks. `full` is an mbarrier with one arrival; its phase ends when they are there.
__device__ __forceinline__ void send_half(const float (&sums)[16][4], float4* space, unsigned full,
                                          int rank) {
    unsigned to = shared_of_rank(shared_address(space + threadIdx.x % 128), rank ^ 1),
             theirs = shared_of_rank(full, rank ^ 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 half;
#pragma unroll
        for (int e = 0; e < 4; ++e) (&half.x)[e] = rank ? sums[i][e] : sums[i + 8][e];
        st_async(to + i * 128 * sizeof(float4), half, theirs);
    }
    if (threadIdx.x % 128 == 0) mbarrier_arrive(full, 8 * 128 * sizeof(float4));
}
__device__ __forceinline__ void keep_half(float (&half)[8][4], const float (&sums)[16][4],
                                          const float4* space, unsigned full, int rank) {
    mbarrier_wait(full, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 more = space[i * 128 + threadIdx.x % 128];
#pragma unroll
        for (int e = 0; e < 4; ++e) half[i][e] = (rank ? sums[i + 8][e] : sums[i][e]) + (&more.x)[e];
    }
}

// Partial sums: 12 parts of 64 x 64 for each row, dw1 [down][right], then dw0 [two][down][right], each in the
// order of a warpgroup's accumulators. MORE: add them to the stored ones.
constexpr int PARTS = 12;
__device__ __forceinline__ void store_part(float4* partials, int part, const float (&sums)[8][4], bool more) {
    float4 there[8] = {}, *to = partials + part * 1024 + threadIdx.x % 128;
    if (more)
#pragma unroll
        for (int i = 0; i < 8; ++i) there[i] = to[i * 128];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        to[i * 128] = make_float4(sums[i][0] + there[i].x, sums[i][1] + there[i].y, sums[i][2] + there[i].z,
                                  sums[i][3] + there[i].w);
}

#if __CUDA_ARCH__ >= 900
// Arguments as for kron_linear_v4_split_wgmma_bwd. MORE: the previous launch computed other rows, at least as
// many, and this launch adds to its partial sums. It waits for the previous one, which has waited for all
// earlier kernels, only before it adds: the two overlap. Grid: four blocks per row. Dynamic shared memory: X,
// W2, W1, G and H, split.
template <typename T, int SIDE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1)
    kron_linear_v4_few_rows_bwd(float* partials, T* dx, const T* x, const T* g, Factors4<T> factors, int more,
                                double scale) {
    using U = typename Pieces<T>::type;
    constexpr int HALF = SIDE / 2, MATRIX = Pieces<T>::COUNT * SIDE * HALF;
    using Wide = Tiles<HALF, SIDE>;
    using Tall = Tiles<SIDE, HALF>;
    using Square = Tiles<HALF, HALF>;
    extern __shared__ uint4 dynamic[];
    // w1s also receives the accumulators of the other block, 16 KB per warpgroup, while gs is still in use.
    constexpr int ROOM = MATRIX > 16384 ? MATRIX : 16384;
    U *xs = reinterpret_cast<U*>(dynamic), *w2s = xs + MATRIX, *w1s = w2s + MATRIX, *gs = w1s + ROOM,
      *hs = gs + MATRIX;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0), right = cluster_rank(), down = blockIdx.x / 2 % 2;
    long long row = blockIdx.x / 4;
    U *wide = group ? w1s : xs, *tall = group ? gs : w2s, *other = group ? w2s : gs;
    unsigned full = shared_address(hs + Pieces<T>::COUNT * Square::PLANE) + group * 8;
    if (threadIdx.x % 128 == 0) {
        mbarrier_init(full, 1);
        mbarriers_made();
    }
    prefetch_factor(factors.at[0], SIDE, SIDE, factors.p[0], factors.q[0]);
    prefetch_factor(factors.at[1], SIDE, SIDE, factors.p[1], factors.q[1]);
    for (const T* rows : {x, g})
        prefetch_tile<SIDE * SIDE / 4, 1>(rows + blockIdx.x * (SIDE * SIDE / 4), 1, 1);
    if (!more) wait_for_previous();
    let_next_come();
    {
        RegisterTile<Wide, 128, T> rows;
        RegisterTile<Tall, 128, T> columns;
        long long p = group ? factors.p[1] : SIDE, q = group ? factors.q[1] : 1;
        rows.fetch_any((group ? factors.at[1] : x + row * (SIDE * SIDE)) + down * HALF * p, p, q);
        p = group ? SIDE : factors.p[0], q = group ? 1 : factors.q[0];
        columns.fetch_any((group ? g + row * (SIDE * SIDE) : factors.at[0]) + right * HALF * q, p, q);
        rows.template put<false>(wide);
        columns.template put<false>(tall);
    }
    fence_async();
    __syncthreads();
    float first[8][4], second[16][4], third[8][4];
    start_product<SIDE, T>(first, SharedOperand<Wide, false>(wide), SharedOperand<Tall, true>(tall));
    wgmma_wait<0>(first);
    RegisterOperand<HALF, T> between;
    between.split(first);
    start_product<HALF, T>(second, between, SharedOperand<Tall, false>(other));
    if (group) between.template put<Square>(hs);
    fence_async();
    cluster_arrive();  // w1s may now receive the other block's accumulators
    __syncthreads();
    start_product<HALF, T>(third, SharedOperand<Wide, true>(xs, group * HALF),
                           SharedOperand<Square, true>(hs));
    wgmma_wait<1>(second);
    cluster_wait();
    float4 *space = reinterpret_cast<float4*>(w1s) + group * 1024,
           *parts = reinterpret_cast<float4*>(partials) + row * (PARTS * 1024);
    send_half(second, space, full, right);
    wgmma_wait<0>(third);
    if (more) wait_for_previous();
    store_part(parts, 4 + down * 4 + group * 2 + right, third, more);
    keep_half(first, second, space, full, right);
    if (!group) return store_part(parts, down * 2 + right, first, more);
    dx += row * (SIDE * SIDE) + down * HALF * SIDE + right * HALF;
    each_part<false>(first, [&](Vec<float, 2> two, int row, int column) {
        store_vec(dx + row * SIDE + column, pack<T, 2>({two.v[0] * float(scale), two.v[1] * float(scale)}));
    });
}
#endif

// dw0 and dw1 = scale * the sum of the parts of A rows, in a fixed order. Grid 8 * 32: the parts of both
// factors, and of each part the 16 rows x 8 columns of a warp. Block (32, 16).
template <typename T, int SIDE>
__global__ void __launch_bounds__(512)
    kron_linear_v4_few_rows_sum(T* dw0, T* dw1, const float* partials, long long A, double scale) {
    constexpr int SHARE = 16;
    __shared__ Vec<float, 4> sums[SHARE][32];
    int part = blockIdx.x / 32, at = blockIdx.x % 32, lane = threadIdx.x;
    partials += (part * 1024 + at * 32 + lane) * 4;
    float sum[4] = {};
    let_next_come();
    wait_for_previous();
#pragma unroll 2
    for (int row = threadIdx.y; row < A; row += SHARE) {
        add_to(sum, load_vec<float, 4>(partials + row * (PARTS * 4096)));
        if (part >= 4) add_to(sum, load_vec<float, 4>(partials + (row * PARTS + 4) * 4096));
    }
    sums[threadIdx.y][lane] = pack<float, 4>(sum);
    __syncthreads();
    if (threadIdx.y) return;
#pragma unroll
    for (int y = 1; y < SHARE; ++y) add_to(sum, sums[y][lane]);
    T* to = (part < 4 ? dw1 : dw0) + (part / 2 % 2 * 64 + at % 4 * 16 + lane / 4) * SIDE + part % 2 * 64 +
            at / 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i)
        store_vec(to + i * 8 * SIDE, pack<T, 2>({sum[2 * i] * float(scale), sum[2 * i + 1] * float(scale)}));
}
