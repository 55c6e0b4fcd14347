// What kron_linear v4 does in float with four factors of 16 x 16 at the right end of a layer: a row is an array of 16 x 16 x 16 x 16 numbers.
//
// Products are made on tensor cores, of numbers split in three of bfloat16: 6 products of m16n8k16. A lane splits its numbers itself, in 11
// instructions for two of them. With the numbers as operand b, mma takes those of an index k from lane bits t, and leaves the results' j in
// lane bits g; the other index, of 8 columns, goes from g to t. So a warp that holds 16 x 16 numbers of two indices, 8 a lane, multiplies
// along one, and along the other, and nothing moves in between.
//
// A row is in two blocks, a cluster. The first pass is over the two right indices: a warp reads 1 KB of neighbours, and its results go to
// the block whose half of them they are. The second is over the left ones, 4 neighbours of the right ones at a time, in shared memory, from
// where whole lines are stored.
//
// On one H200, 1024 x 16^4, in us: 213, where kron_registers.cuh takes 245, and a copy 127. (With one product instead of six 186, without
// stores 188: what is left is waiting.) What helped: whole lines instead of sectors, and waiting for the other block only before the first
// store (241 to 225); results looked at once a pass instead of once a step (to 214); a row's lines fetched to L2 a pass ahead (254 to 241);
// clusters that begin at different times (216 to 212). All that with half of the results looked at, which left some of what overflows with
// a wrong sign; not measured since. What did not: clusters of four blocks, two on a multiprocessor (327: no more than 62 of them run at a
// time, and most numbers go to other blocks); lines fetched to L2 two passes ahead (262); loads past L1 (227 for 219); stores from
// registers, of half sectors (674).
#pragma once
#include "kron_pieces.cuh"
#include "kron_tile.cuh"

template <bool ADDED_>
struct Sixteen4 {
    static constexpr int SIDE = 16, PAGE = SIDE * SIDE, NUMBERS = PAGE * PAGE, CLUSTER = 2, PART = NUMBERS / CLUSTER, THREADS = 512;
    static constexpr bool ADDED = ADDED_;
    // Distances in shared memory, between neighbours of the second and of the first index: lanes that differ in these meet different banks.
    static constexpr int NEXT = PAGE / CLUSTER + 4, SLAB = SIDE * NEXT + 4;
    static constexpr int EACH = PART / PAGE / (THREADS / 32);  // pages of a warp in the first pass
};

constexpr int PIECES = Pieces<float>::COUNT;
using Block16 = float[2][2][2];  // a lane's numbers [n][h][p] of 16 x 16: with k = 2 t + 8 h + p, of column g + 8 n
using Weights16 = unsigned[PIECES][4];

// Pairs of pieces of a and b, each the nearest to what is left. Unless EVERY number is looked after, all must be finite, and in the range of
// bfloat16, and so must be products: of a piece whose sign is another than its number's they may be infinite first, and no piece of
// split_two is such.
template <bool EVERY>
__device__ __forceinline__ void split16(unsigned (&to)[PIECES], float a, float b) {
    if constexpr (EVERY) return split_two(a, b, to);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        float rest[2] = {a, b};
        Vec<__nv_bfloat16, 2> both = pack<__nv_bfloat16, 2>(rest);
        to[i] = reinterpret_cast<const unsigned&>(both);
        a -= __uint_as_float(to[i] << 16), b -= __uint_as_float(to[i] & 0xffff0000);
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
            split16<EVERY>(pieces, v[n][h][0], v[n][h][1]);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) x[i][h] = pieces[i];
        }
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) mma_bf16(d[n], w[right_piece(i)], x[left_piece(i)]);
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e / 2 % 2][e / 4][e % 2] = d[e / 4][e % 4];
}

// N blocks times two factors; returns 0, or NaN. Most have but finite numbers. If one has not, or what lies between the factors has not, or a
// result, that is an infinity or a NaN in some result: unless EVERY number was looked after, all must be done again.
template <bool EVERY, int N>
__device__ __forceinline__ float multiply_twice(Block16 (&v)[N], const Weights16& first, const Weights16& second) {
    float none = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        multiply16<EVERY>(v[i], first);
        multiply16<EVERY>(v[i], second);
#pragma unroll
        for (int e = 0; e < 8; ++e) none = fmaf(v[i][e / 4][e / 2 % 2][e % 2], 0.0f, none);
    }
    return none;
}

// The first pass takes the lanes' four neighbours of k, and leaves four: k and j number 2 t + 8 h + p is 4 t + 2 h + p.
__device__ constexpr int neighbours16(int n) { return n % 8 / 2 * 4 + n / 8 * 2 + n % 2; }

// The factors as operand a, [factor][piece][lane][4]: 6 KB. Of the second one the results are in turn, those first that stay in this block.
template <class Plan, typename T>
__device__ __forceinline__ void load_weights16(unsigned* to, const Factors4<T>& factors, int rank) {
    static_assert(Plan::THREADS == 4 * 128);
    int f = threadIdx.x / 128, e = threadIdx.x % 128, j = e / 16 + e % 2 * 8, k = e / 4 % 4 * 2 + e / 2 % 2 * 8;
    float pair[2];
#pragma unroll
    for (int n = 0; n < 4; ++n)
        if (n == f)
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                int row = n ? k + p : neighbours16(k + p), column = n == 0 ? neighbours16(j) : n == 1 ? j ^ rank * 8 : j;
                pair[p] = load_as(factors.at[n][row * factors.p[n] + column * factors.q[n]]);
            }
    unsigned pieces[PIECES];
    split16<true>(pieces, pair[0], pair[1]);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) to[(f * PIECES + i) * 128 + e] = pieces[i];
}
__device__ __forceinline__ void fetch_weights16(Weights16& w, const unsigned* from) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
        reinterpret_cast<uint4&>(w[i]) = *reinterpret_cast<const uint4*>(from + i * 128 + threadIdx.x % 32 * 4);
}

// N pages, of those from `own` on.
template <class Plan, typename T, int N>
__device__ __forceinline__ void load_pages16(Block16 (&v)[N], const T* own, int page) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i)
        reinterpret_cast<Vec<T, 4>&>(v[i / 2][i % 2]) = load_vec<T, 4>(own + page * Plan::PAGE + i * 128);
}
// Half of their results stay in this block, and half go to the other one.
template <class Plan, int N>
__device__ __forceinline__ void put_pages16(float* mine, unsigned others, int page, const Block16 (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        store_vec(mine + (page + i) * Plan::NEXT, reinterpret_cast<const Vec<float, 4>&>(v[i][0]));
        st_cluster(others + (page + i) * Plan::NEXT * 4, reinterpret_cast<const float4&>(v[i][1]));
    }
}

// A warp's pages times the two right factors, of which `ahead` are the first two.
template <class Plan, typename T>
__device__ __forceinline__ void first_pass16(Block16 (&ahead)[2], const T* own, float* mine, unsigned others, const Weights16& first,
                                             const Weights16& second) {
    float none = 0;
#pragma unroll 2
    for (int page = 0; page < Plan::EACH; page += 2) {
        Block16 v[2];
#pragma unroll
        for (int e = 0; e < 16; ++e) v[e / 8][e / 4 % 2][e / 2 % 2][e % 2] = ahead[e / 8][e / 4 % 2][e / 2 % 2][e % 2];
        if (page + 2 < Plan::EACH) load_pages16<Plan>(ahead, own, page + 2);
        none += multiply_twice<false>(v, first, second);
        if (page == 0) cluster_wait();  // until the other block has read
        put_pages16<Plan>(mine, others, page, v);
    }
    if (!__any_sync(~0u, none != none)) return;
#pragma unroll 1
    for (int page = 0; page < Plan::EACH; ++page) {
        Block16 v[1];
        load_pages16<Plan>(v, own, page);
        multiply_twice<true>(v, first, second);
        put_pages16<Plan>(mine, others, page, v);
    }
}

// N columns, neighbours, of which the first number of the lane is at `from`; and their results to where they were.
template <class Plan>
__device__ __forceinline__ float* place16(float* from, int e) {
    return from + e / 4 * (8 * Plan::SLAB) + (e / 2 % 2 * 8 + e % 2) * Plan::NEXT;
}
template <class Plan, int N>
__device__ __forceinline__ void fetch_columns16(Block16 (&v)[N], float* from) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        Vec<float, N> some = load_vec<float, N>(place16<Plan>(from, e));
#pragma unroll
        for (int i = 0; i < N; ++i) v[i][e / 4][e / 2 % 2][e % 2] = some.v[i];
    }
}
template <class Plan, int N>
__device__ __forceinline__ void put_columns16(float* to, const Block16 (&v)[N]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        Vec<float, N> some;
#pragma unroll
        for (int i = 0; i < N; ++i) some.v[i] = v[i][e / 4][e / 2 % 2][e % 2];
        store_vec(place16<Plan>(to, e), some);
    }
}

// A warp's eight columns times the two left factors.
template <class Plan>
__device__ __forceinline__ void second_pass16(float* columns, const Weights16& first, const Weights16& second) {
#pragma unroll 1
    for (int c = 0; c < 8; c += 4) {
        Block16 v[4];
        fetch_columns16<Plan>(v, columns + c);
        float none = multiply_twice<false>(v, first, second);
        if (!__any_sync(~0u, none != none)) {
            put_columns16<Plan>(columns + c, v);
            continue;
        }
#pragma unroll 1
        for (int i = c; i < c + 4; ++i) {
            Block16 one[1];
            fetch_columns16<Plan>(one, columns + i);
            multiply_twice<true>(one, first, second);
            put_columns16<Plan>(columns + i, one);
        }
    }
}

// A lane's results, four neighbours of each 16th of a row, to their places, of which `first` is the first one. The other block may write where
// they were as soon as they have been read: to arrive after the stores would wait for these. then(): what to do next.
template <class Plan, typename T, class Then>
__device__ __forceinline__ void store16(T* out, const T* bias, const T* residual, const float* from, long long first, long long features,
                                        float scale, const Then& then) {
    Vec<float, 4> results[Plan::SIDE];
#pragma unroll
    for (int i = 0; i < Plan::SIDE; ++i) results[i] = load_vec<float, 4>(from + i * Plan::SLAB);
    cluster_arrive();
    then();
#pragma unroll
    for (int i = 0; i < Plan::SIDE; ++i) {
        Vec<float, 4>& four = results[i];
        long long at = first + i * (Plan::SIDE * Plan::PAGE);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            four.v[e] *= scale;
            if (Plan::ADDED && bias) four.v[e] += load_as(bias[at % features + e]);
            if (Plan::ADDED && residual) four.v[e] += load_as(residual[at + e]);
        }
        store_vec_past_l1(out + at, four);
    }
}

#if __CUDA_ARCH__ >= 900
// kron_linear_v4 of four factors of 16 x 16. Grid CLUSTER * (the rows, or fewer), block THREADS; dynamic shared memory: the factors, a part
// of a row.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, 1)
kron_linear_v4_sixteen(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                       const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q,
                       long long w1_p, long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q,
                       long long w4_p, long long w4_q, long long w5_p, long long w5_q, long long w6_p, long long w6_q,
                       long long w7_p, long long w7_q, double scale, long long features) {
    constexpr int PAGE = Plan::PAGE, NEXT = Plan::NEXT, SLAB = Plan::SLAB, EACH = Plan::EACH, WEIGHTS = PIECES * 128;
    extern __shared__ uint4 dynamic[];
    unsigned* weights = reinterpret_cast<unsigned*>(dynamic);
    float* numbers = reinterpret_cast<float*>(weights + 4 * WEIGHTS);
    Factors4<T> factors = {{w0, w1, w2, w3}, {w0_p, w1_p, w2_p, w3_p}, {w0_q, w1_q, w2_q, w3_q}};
    int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = A;
    int row = blockIdx.x / Plan::CLUSTER, step = gridDim.x / Plan::CLUSTER;
    cluster_arrive_relaxed();
    wait_for_previous();
    // Of the first pass: EACH pages of a warp, and where their results go, in this block, and in the other one.
    auto own = [&](int row) { return x + (long long)row * Plan::NUMBERS + (rank * Plan::PART + warp * (EACH * PAGE) + lane * 4); };
    float* mine = numbers + (rank * 8 + warp / 2) * SLAB + warp % 2 * (EACH * NEXT) + lane * 4;
    unsigned others = shared_of_rank(shared_address(mine), rank ^ 1);
    // Of the second: the lane's numbers of columns, and those which it stores, when four warps have made whole lines of them.
    float* column = numbers + lane / 4 * SLAB + lane % 4 * (2 * NEXT) + warp * 8;
    int line = warp % 4 * 4 + lane / 8, within = warp / 4 * 32 + lane % 8 * 4;
    auto ahead_of = [&](int row) {  // to the L2 cache, a line a lane
        for (int i = 0; i < EACH / 4; ++i) prefetch(own(row) + i * (4 * PAGE) + lane * 28);
    };
    Block16 ahead[2];
    if (row < rows) {
        ahead_of(row);
        load_pages16<Plan>(ahead, own(row), 0);
    }
    load_weights16<Plan>(weights, factors, rank);
    __syncthreads();
    // Clusters of one row less begin half a row's time later: else all multiply at one time, and all store at another.
    if (row < rows && row >= rows % step && rows % step)
        for (int us = 0; us < 7; ++us) __nanosleep(1000);
    for (; row < rows; row += step) {
        Weights16 first, second;
        fetch_weights16(first, weights);
        fetch_weights16(second, weights + WEIGHTS);
        first_pass16<Plan>(ahead, own(row), mine, others, first, second);
        cluster_arrive();
        fetch_weights16(first, weights + 2 * WEIGHTS);
        fetch_weights16(second, weights + 3 * WEIGHTS);
        cluster_wait();
        if (row + step < rows) ahead_of(row + step);
        second_pass16<Plan>(column, first, second);
        barrier_of(1 + warp / 4, 128);
        long long at = (long long)row * Plan::NUMBERS + line * PAGE + rank * (PAGE / Plan::CLUSTER) + within;
        store16<Plan>(out, bias, residual, numbers + line * NEXT + within, at, features, float(scale), [&] {
            if (row + step < rows) load_pages16<Plan>(ahead, own(row + step), 0);
        });
    }
    cluster_wait();
}
#endif
