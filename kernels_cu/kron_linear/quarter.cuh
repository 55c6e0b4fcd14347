// The backward of a layer of two factors, 128 x 128 each, of few rows, in one launch by warpgroups (sm_90a) and that of the partial sums.
//
// A row is X, and G of its output:
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T.
// Four blocks have a row, each a quarter of Z and of H: 64 rows of X and W1, and 64 columns of W2 and G, which is all that it reads. From
// these it has halves of the sums of 64 rows of dW1, of 64 columns of dW2, and of 64 rows of dX. Two blocks, a cluster, exchange those of
// dX and dW1; of the factors' gradients there are partial sums. The first warpgroup makes Z and dW1, the second one H and dX, each half of
// dW2.
//
// On one H200, 32 rows, of inputs that no cache has, in us: 14.9 in float, of which the sum 2, and 10.7 in bfloat16. Four launches (Z, H,
// both gradients by mma.sync with no partial sums, dX) took 42.9 and 20.3: of that third one's clusters of eight only 15 of 16 ran at a
// time, as of clusters of four 30 would, and of two 66. Predicted were 16 in float; it was 20.0, because kron_linear_v4_sum took 6.6 for 8
// MB, with 32 warps a block (by 8 warps 2.7). A sum of its own that reads 16 bytes a lane, partial sums as lanes have them, and those of
// dW1 exchanged: 16.6; st.async, where barriers of the cluster wait for all stores, and 16 warps a block of the sum: 14.9. Until all is
// split in shared memory it takes 5.5 (in bfloat16 4.3), then to the end of the second products 2.9, and for exchange, third products and
// stores 3.9. Side by side with other launches (pdl.cuh) 14.1 and 10.1. What did not help: the first product begun when half of its
// numbers are there, beside whose products the others are split (0.4 more, predicted 0.7 less); whole lines read by a warp, whose stores to
// shared memory then meet the same banks (0.7 more). The forward so: 8.6, of which 5.2 to the end of the products (by slice.cuh 6.6).
//
// Partial sums were 1.5 times as large as x and y in float. Two launches side by side, of 16 rows each, of which the second adds its own to
// the first one's: half of that, and 15.5 us for 14.0 (said: 15.2); 16.1 where they read past L1. (A cluster of four, that adds up a row's, would not fit, as
// above.)
#pragma once
#include "common/pdl.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "warpgroups.cuh"

// A warpgroup's 64 x 128 sums, of which this block of a cluster of two keeps the half of 64 columns that has its rank, and adds the other
// block's. That comes to `space`, which must have been free in both, and `full`, an mbarrier of one arrival, knows when it is there.
__device__ __forceinline__ void send_half(const float (&sums)[16][4], float4* space, unsigned full, int rank) {
    unsigned to = shared_of_rank(shared_address(space + threadIdx.x % 128), rank ^ 1), theirs = shared_of_rank(full, rank ^ 1);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 half;
#pragma unroll
        for (int e = 0; e < 4; ++e) (&half.x)[e] = rank ? sums[i][e] : sums[i + 8][e];
        st_async(to + i * 128 * sizeof(float4), half, theirs);
    }
    if (threadIdx.x % 128 == 0) mbarrier_arrive(full, 8 * 128 * sizeof(float4));
}
__device__ __forceinline__ void keep_half(float (&half)[8][4], const float (&sums)[16][4], const float4* space, unsigned full, int rank) {
    mbarrier_wait(full, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float4 more = space[i * 128 + threadIdx.x % 128];
#pragma unroll
        for (int e = 0; e < 4; ++e) half[i][e] = (rank ? sums[i + 8][e] : sums[i][e]) + (&more.x)[e];
    }
}

// Partial sums: of each row 12 parts of 64 x 64, of dw1 [down][right], then of dw0 [two][down][right], each as a warpgroup's lanes have it.
// MORE: the sum of these and those that are there.
constexpr int PARTS = 12;
__device__ __forceinline__ void store_part(float4* partials, int part, const float (&sums)[8][4], bool more) {
    float4 there[8] = {}, *to = partials + part * 1024 + threadIdx.x % 128;
    if (more)
#pragma unroll
        for (int i = 0; i < 8; ++i) there[i] = to[i * 128];
#pragma unroll
    for (int i = 0; i < 8; ++i)
        to[i * 128] = make_float4(sums[i][0] + there[i].x, sums[i][1] + there[i].y, sums[i][2] + there[i].z, sums[i][3] + there[i].w);
}

#if __CUDA_ARCH__ >= 900
// As kron_linear_v4_split_bwd, but w0 and w1 are the right and the left factor. MORE: the launch before was of other rows, as many or more,
// to whose partial sums these are added. It runs beside this one, which waits for it as late as that, and need not wait for those before:
// it had, when it let this one come. Grid four blocks a row; dynamic shared memory: X, W2, W1, G and H in pieces.
template <typename T, int SIDE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(256, 1)
    kron_linear_v4_quarter_bwd(float* partials, T* dx, const T* x, const T* g, const T* w0, const T* w1, int more, long long w0_p,
                               long long w0_q, long long w1_p, long long w1_q, double scale) {
    using U = typename Pieces<T>::type;
    constexpr int HALF = SIDE / 2, MATRIX = Pieces<T>::COUNT * SIDE * HALF;
    using Wide = Tiles<HALF, SIDE>;
    using Tall = Tiles<SIDE, HALF>;
    using Square = Tiles<HALF, HALF>;
    extern __shared__ uint4 dynamic[];
    // w1s has room for what comes from the other block: 16 KB for each warpgroup, while gs is still multiplied.
    constexpr int ROOM = MATRIX > 16384 ? MATRIX : 16384;
    U *xs = reinterpret_cast<U*>(dynamic), *w2s = xs + MATRIX, *w1s = w2s + MATRIX, *gs = w1s + ROOM, *hs = gs + MATRIX;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0), right = cluster_rank(), down = blockIdx.x / 2 % 2;
    long long row = blockIdx.x / 4;
    U *wide = group ? w1s : xs, *tall = group ? gs : w2s, *other = group ? w2s : gs;
    unsigned full = shared_address(hs + Pieces<T>::COUNT * Square::PLANE) + group * 8;
    if (threadIdx.x % 128 == 0) {
        mbarrier_init(full, 1);
        mbarriers_made();
    }
    prefetch_factor(w0, SIDE, SIDE, w0_p, w0_q);
    prefetch_factor(w1, SIDE, SIDE, w1_p, w1_q);
    for (const T* rows : {x, g}) prefetch_tile<SIDE * SIDE / 4, 1>(rows + blockIdx.x * (SIDE * SIDE / 4), 1, 1);
    if (!more) wait_for_previous();
    let_next_come();
    {
        Underway<Wide, 128, T> rows;
        Underway<Tall, 128, T> columns;
        long long p = group ? w1_p : SIDE, q = group ? w1_q : 1;
        rows.fetch_any((group ? w1 : x + row * (SIDE * SIDE)) + down * HALF * p, p, q);
        p = group ? SIDE : w0_p, q = group ? 1 : w0_q;
        columns.fetch_any((group ? g + row * (SIDE * SIDE) : w0) + right * HALF * q, p, q);
        rows.put_unseated(wide);
        columns.put_unseated(tall);
    }
    fence_async();
    __syncthreads();
    float first[8][4], second[16][4], third[8][4];
    start_product<SIDE, T>(first, Described<Wide, false>(wide), Described<Tall, true>(tall));
    wgmma_wait<0>(first);
    Rows<HALF, T> between;
    between.split(first);
    start_product<HALF, T>(second, between, Described<Tall, false>(other));
    if (group) between.template put<Square>(hs);
    fence_async();
    cluster_arrive();  // to w1s may come the other block's sums
    __syncthreads();
    start_product<HALF, T>(third, Described<Wide, true>(xs, group * HALF), Described<Square, true>(hs));
    wgmma_wait<1>(second);
    cluster_wait();
    float4 *space = reinterpret_cast<float4*>(w1s) + group * 1024, *parts = reinterpret_cast<float4*>(partials) + row * (PARTS * 1024);
    send_half(second, space, full, right);
    wgmma_wait<0>(third);
    if (more) wait_for_previous();
    store_part(parts, 4 + down * 4 + group * 2 + right, third, more);
    keep_half(first, second, space, full, right);
    if (!group) return store_part(parts, down * 2 + right, first, more);
    dx += row * (SIDE * SIDE) + down * HALF * SIDE + right * HALF;
    each_two(first, [&](Vec<float, 2> two, int row, int column) {
        float scaled[2] = {two.v[0] * float(scale), two.v[1] * float(scale)};
        store_vec(dx + row * SIDE + column, pack<T, 2>(scaled));
    });
}
#endif

// dw0 and dw1: scale times the sums of A rows' parts, always in the same order. Grid 8 * 32: parts of both, and of each a warp's 16 rows of
// 8 columns; block (32, 16).
template <typename T, int SIDE>
__global__ void __launch_bounds__(512) kron_linear_v4_quarter_sum(T* dw0, T* dw1, const float* partials, long long A, double scale) {
    constexpr int SHARE = 16;
    __shared__ float4 sums[SHARE][32];
    int part = blockIdx.x / 32, at = blockIdx.x % 32, lane = threadIdx.x;
    const float4* from = reinterpret_cast<const float4*>(partials) + part * 1024 + at * 32 + lane;
    auto add = [](float4& a, float4 b) { a = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); };
    float4 sum = {};
    let_next_come();
    wait_for_previous();
#pragma unroll 2
    for (int row = threadIdx.y; row < A; row += SHARE) {
        add(sum, from[row * (PARTS * 1024)]);
        if (part >= 4) add(sum, from[(row * PARTS + 4) * 1024]);
    }
    sums[threadIdx.y][lane] = sum;
    __syncthreads();
    if (threadIdx.y) return;
#pragma unroll
    for (int y = 1; y < SHARE; ++y) add(sum, sums[y][lane]);
    T* to = (part < 4 ? dw1 : dw0) + (part / 2 % 2 * 64 + at % 4 * 16 + lane / 4) * SIDE + part % 2 * 64 + at / 4 * 8 + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float two[2] = {(i ? sum.z : sum.x) * float(scale), (i ? sum.w : sum.y) * float(scale)};
        store_vec(to + i * 8 * SIDE, pack<T, 2>(two));
    }
}
