// What kron_linear v4 does with four factors of 16 x 16 at the right end of a layer, of 16-bit numbers or float: a row is an array of
// 16 x 16 x 16 x 16 numbers.
//
// Products are made on tensor cores, of floats split in three of bfloat16: 6 products of m16n8k16. A lane splits its numbers itself, in 11
// instructions for two of them. With the numbers as operand b, mma takes those of an index k from lane bits t, and leaves the results' j in
// lane bits g; the other index, of 8 columns, goes from g to t. So a warp that holds 16 x 16 numbers of two indices, 8 a lane, multiplies
// along one, and along the other, and nothing moves in between.
//
// A row is in two blocks, a cluster. The first pass is over the two right indices: a warp reads 8 KB of neighbours, half at a time, and its
// results go to the block whose half of them they are. The second is over the left ones, 4 neighbours of the right ones at a time, in
// shared memory, from where whole lines are stored; meanwhile half of the next row comes to shared memory. Blocks hand over numbers by
// st.async and mbarriers: a cluster barrier's release is MEMBAR.ALL.GPU, which waits also for what a thread stored to global memory.
//
// 16-bit numbers are exact as they come from memory, and then two of bfloat16, cut, as in lanes.cuh: one product of the first factor,
// of the others two, or in float16 three. Of floats:
//
// Most numbers are far from what overflows. A pass looks at its own: the sum of their squares, in bfloat16, of first pieces, which are
// there anyway: 4 instructions for 8 numbers. Below a limit, which the factors' largest numbers give, no product and no sum of the pass can
// be infinite; else, and if there is an infinity or a NaN, all is done again with pieces that are cut, whose products have the right sign.
//
// On one H200, 1024 x 16^4 in bfloat16 takes 107 us, in float16 123, a copy 65, and two launches of the general kernel 178. In float:
// 200, in another process 210, where registers.cuh takes 245, and a copy 127. Of a row's 22000 cycles the two passes take 8500
// each, in which the tensor cores are busy for half; 1300 are waiting for all of the first pass, 3000 reading and storing results. What
// helped (each compared within a run; between runs a version varies by 5%): whole lines instead of sectors, and waiting for the other
// block only before the first store (241 to 225); results, and then numbers, looked at once a pass instead of once a step (224 to 214;
// to look costs 2); clusters that begin at different times (215 to 204, or 223 to 219); half a row ahead in shared memory (226 to 223,
// foreseen 15: it is the barriers that are waited for), with st.async and mbarriers (231 to 209; cluster barriers without release, which
// order nothing, give as much), half of a warp's pages at once (209 to 204), and nothing more fetched to L2 (214 to 203); 128-byte
// boundaries for what st.async and cp.async write (207 to 199). What did not: clusters of four blocks, two on a multiprocessor (327: no
// more than 62 of them run at a time, and most numbers go to other blocks); lines fetched to L2 two passes ahead (262); stores from
// registers, of half sectors (674), or of half as many columns at a time by twice as many warps (nothing); results looked at two in one
// fma, by their product (234 for 226); a block's pages all neighbours at a time, and acquire of the block instead of the cluster
// (nothing).
#pragma once
#include "common/ptx/async_copy.cuh"
#include "common/ptx/barrier.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/launch.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/wgmma.cuh"
#include "split_float.cuh"
#include "tile.cuh"

#if __CUDA_ARCH__ >= 900

template <bool ADDED_>
struct Sixteen4 {
    static constexpr int SIDE = 16, PAGE = SIDE * SIDE, NUMBERS = PAGE * PAGE, CLUSTER = 2, PART = NUMBERS / CLUSTER, THREADS = 512;
    static constexpr bool ADDED = ADDED_;
    // Distances in shared memory, between neighbours of the second and of the first index: lanes that differ in these meet different banks.
    static constexpr int NEXT = PAGE / CLUSTER + 4, SLAB = SIDE * NEXT + 4;
    static constexpr int WARPS = THREADS / 32, EACH = PART / PAGE / WARPS, AT_ONCE = 4;  // pages of a warp in the first pass, and at a time
    template <typename T>
    static constexpr int STAGED = AT_ONCE * 4 / sizeof(T);  // pages of a warp that come ahead
};

constexpr int PIECES = Pieces<float>::COUNT;
using Block16 = float[2][2][2];           // a lane's numbers [n][h][p] of 16 x 16: with k = 2 t + 8 h + p, of column g + 8 n
using Words16 = unsigned[2][2];           // the same as they come, of 16 bits: [n][h]
using Pieces16 = unsigned[2][PIECES][2];  // their pieces as operand b, [n][piece][h]: pairs
template <typename T>
constexpr int FACTOR_PIECES = sizeof(T) == 4 ? PIECES
                              : IS_BF16<T>   ? 1
                                             : 2;
template <typename T>
using Weights16 = unsigned[FACTOR_PIECES<T>][4];

// Pairs of pieces of a and b. If they are ANY numbers, cut, else each the nearest to what is left, which must be in the range of bfloat16,
// and so must products: of a piece whose sign is another than its number's they may be infinite first, and no piece of split_two is such.
template <bool ANY>
__device__ __forceinline__ void split16(unsigned (&to)[PIECES], float a, float b) {
    if constexpr (ANY) {
        split_two(a, b, to);
    } else {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            float rest[2] = {a, b};
            Vec<__nv_bfloat16, 2> both = pack<__nv_bfloat16, 2>(rest);
            to[i] = reinterpret_cast<const unsigned&>(both);
            a -= __uint_as_float(to[i] << 16), b -= __uint_as_float(to[i] & 0xffff0000);
        }
    }
}
template <bool ANY>
__device__ __forceinline__ void split16(Pieces16& to, const Block16& v) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            unsigned pieces[PIECES];
            split16<ANY>(pieces, v[n][h][0], v[n][h][1]);
#pragma unroll
            for (int i = 0; i < PIECES; ++i) to[n][i][h] = pieces[i];
        }
}

// A pair of the smallest pieces without an infinity or a NaN, which is there of a number that is one.
__device__ __forceinline__ unsigned finite_pair(unsigned pair) {
    constexpr unsigned LOW = 0x7f80, HIGH = LOW << 16;
    return ((pair & LOW) == LOW ? 0 : pair & 0xffff) | ((pair & HIGH) == HIGH ? 0 : pair & 0xffff0000);
}

// Sums as numbers: their index is that of the columns, and the columns' that of k.
__device__ __forceinline__ void keep16(Block16& v, const float (&d)[2][4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e / 2 % 2][e / 4][e % 2] = d[e / 4][e % 4];
}

// v = x w along k; then the results' index is that of the columns, and the columns' that of k. Cut pieces have their number's sign, so what
// is left out does not cancel: of ANY numbers two products more are added, without which errors are 2.4 times those of torch, and so 1.2;
// but if a factor is not finite, as its `limit` says, only one.
template <bool ANY>
__device__ __forceinline__ void multiply16(Block16& v, const Pieces16& x, const Weights16<float>& w, float limit) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        if constexpr (ANY) {
            unsigned x_least[2] = {finite_pair(x[n][2][0]), finite_pair(x[n][2][1])};
            mma_bf16(d[n], w[1], x_least);
            if (limit > 0) mma_bf16(d[n], w[2], x[n][1]);
        }
#pragma unroll
        for (int i = 0; i < PRODUCTS; ++i) mma_bf16(d[n], w[right_piece(i)], x[n][left_piece(i)]);
    }
    keep16(v, d);
}

// A block times two factors. Adds the squares of the numbers, about.
template <bool ANY>
__device__ __forceinline__ void multiply_twice(Block16& v, const Weights16<float>& first, const Weights16<float>& second, float limit,
                                               __nv_bfloat162& squares) {
    Pieces16 x;
    split16<ANY>(x, v);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        __nv_bfloat162 two = reinterpret_cast<__nv_bfloat162&>(x[e / 2][0][e % 2]);
        squares = __hfma2(two, two, squares);
    }
    multiply16<ANY>(v, x, first, limit);
    split16<ANY>(x, v);
    multiply16<ANY>(v, x, second, limit);
}
__device__ __forceinline__ void multiply_any(Block16& v, const Weights16<float>& first, const Weights16<float>& second, float limit) {
    __nv_bfloat162 unused = {};
    multiply_twice<true>(v, first, second, limit, unused);
}

// N blocks times two factors. Returns whether one of the warp's numbers is beyond the limit, or NaN: then what came of them may be wrong,
// and all must be done again, as of any numbers.
template <int N>
__device__ __forceinline__ bool multiply_all(Block16 (&v)[N], const Weights16<float>& first, const Weights16<float>& second, float limit) {
    __nv_bfloat162 squares[N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) multiply_twice<false>(v[i], first, second, limit, squares[i]);
#pragma unroll
    for (int i = 1; i < N; ++i) squares[0] = __hadd2(squares[0], squares[i]);
    float2 sums = __bfloat1622float2(squares[0]);
    return __any_sync(~0u, !(sums.x + sums.y < limit));
}

// A block of 16-bit numbers times a factor: of what comes from memory, or of numbers cut in two, whose products cannot be infinite before
// the sum is.
template <typename T>
__device__ __forceinline__ void multiply_words16(Block16& v, const Words16& x, const Weights16<T>& w) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) mma_16_bit(d[n], w[0], x[n], T());
    keep16(v, d);
}
template <typename T>
__device__ __forceinline__ void multiply_cut16(Block16& v, const Weights16<T>& w) {
    float d[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        unsigned big[2], small[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) cut_pair(v[n][h][0], v[n][h][1], big[h], small[h]);
        mma_bf16(d[n], w[0], small);
        if constexpr (FACTOR_PIECES<T> > 1) mma_bf16(d[n], w[1], big);
        mma_bf16(d[n], w[0], big);
    }
    keep16(v, d);
}

// The limit of a sum of squares. By a factor numbers become at most 16 times as large as its largest one, and a little more for the pieces
// of both: all products and sums of two factors are then far below 2^127. `largest`: of each warp's part of the two factors, as bits,
// which for a NaN are most. 0, or NaN, if no number is small enough.
template <class Plan>
__device__ __forceinline__ float limit16(const unsigned* largest) {
    float times = 1;
#pragma unroll
    for (int f = 0; f < 2; ++f) {
        unsigned most = 0;
#pragma unroll
        for (int i = 0; i < Plan::WARPS / 4; ++i) most = max(most, largest[f * (Plan::WARPS / 4) + i]);
        times *= 1 + 32 * __uint_as_float(most);
    }
    return 0x1p120f / times * (0x1p120f / times);
}

// The first pass takes the lanes' four neighbours of k, and leaves four: k and j number 2 t + 8 h + p is 4 t + 2 h + p.
__device__ constexpr int neighbours16(int n) { return n % 8 / 2 * 4 + n / 8 * 2 + n % 2; }

// The factors as operand a, [factor][piece][lane][4]: 6 KB. Of the second one the results are in turn, those first that stay in this block.
// And the largest number of each warp's.
template <class Plan, typename T>
__device__ __forceinline__ void load_weights16(unsigned* to, unsigned* largest, const Factors4<T>& factors, int rank) {
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
    to += f * FACTOR_PIECES<T> * 128 + e;
    if constexpr (sizeof(T) == 2) {
        if (IS_BF16<T> || f == 0) {
            Vec<T, 2> both = pack<T, 2>(pair);
            to[0] = reinterpret_cast<unsigned&>(both);
        } else {
            cut_pair(pair[0], pair[1], to[0], to[128]);
        }
        return;
    }
    unsigned pieces[PIECES];
    split16<true>(pieces, pair[0], pair[1]);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) to[i * 128] = pieces[i];
    unsigned most = __reduce_max_sync(~0u, max(__float_as_uint(fabsf(pair[0])), __float_as_uint(fabsf(pair[1]))));
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
}
template <int N>
__device__ __forceinline__ void fetch_weights16(unsigned (&w)[N][4], const unsigned* from) {
#pragma unroll
    for (int i = 0; i < N; ++i) reinterpret_cast<uint4&>(w[i]) = *reinterpret_cast<const uint4*>(from + i * 128 + threadIdx.x % 32 * 4);
}

// N pages from `from` on, where the lane's numbers of the first one begin, to registers; or, from where its 16 bytes begin, to their stage
// in shared memory, which no other warp reads.
template <typename T, typename Block, int N>
__device__ __forceinline__ void load_pages16(Block (&v)[N], const T* from) {
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) reinterpret_cast<Vec<T, 4>&>(v[i / 2][i % 2]) = load_vec<T, 4>(from + i * 128);
}
template <int N, typename T>
__device__ __forceinline__ void stage_pages16(T* to, const T* from) {
    constexpr int V = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < N * 8 / V; ++i) cp_async_16(shared_address(to + i * (32 * V)), from + i * (32 * V));
}

// Where a lane's results of the first pass go: half to `mine`, half to there in the other block, whose addresses are `apart`. It learns of
// them by its mbarrier `full`; when both blocks have read what was there before, a phase of `free` has ended.
struct Places16 {
    float* mine;
    unsigned apart, full, free;
};
template <class Plan, int N>
__device__ __forceinline__ void put_pages16(const Places16& to, int page, const Block16 (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float* mine = to.mine + (page + i) * Plan::NEXT;
        store_vec(mine, reinterpret_cast<const Vec<float, 4>&>(v[i][0]));
        st_async(shared_address(mine) + to.apart, reinterpret_cast<const float4&>(v[i][1]), to.full + to.apart);
    }
}

// A warp's pages, from `own` on, times the two right factors, N at a time. The first ones are in the stage, or on their way; when N are in
// registers others follow, and at last those of the `next` row, if there is one.
template <class Plan, typename T>
__device__ __forceinline__ void first_pass16(const T* own, const T* next, T* stage, const Places16& to, unsigned parity,
                                             const Weights16<T>& first, const Weights16<T>& second, float limit) {
    constexpr int N = Plan::AT_ONCE, STAGED = Plan::template STAGED<T>;
    int lane = threadIdx.x % 32 * (16 / sizeof(T) - 4);
#pragma unroll 1
    for (int page = 0; page < Plan::EACH; page += N) {
        conditional_t<sizeof(T) == 2, Words16, Block16> x[N];
        T* from = stage + page % STAGED * Plan::PAGE;
        cp_async_wait<STAGED / N - 1>();
        __syncwarp();
        load_pages16(x, from - lane);
        __syncwarp();
        const T* after = page + STAGED < Plan::EACH ? own + (page + STAGED) * Plan::PAGE : next;
        if (after) stage_pages16<N>(from, after + (STAGED < Plan::EACH ? 0 : page * Plan::PAGE));
        cp_async_commit();
        if constexpr (sizeof(T) == 2) {
            Block16 v[N];
#pragma unroll
            for (int i = 0; i < N; ++i) multiply_words16<T>(v[i], x[i], first);
#pragma unroll
            for (int i = 0; i < N; ++i) multiply_cut16<T>(v[i], second);
            if (page == 0) mbarrier_wait(to.free, parity ^ 1);
            put_pages16<Plan>(to, page, v);
        } else {
            bool again = multiply_all(x, first, second, limit);
            if (page == 0) mbarrier_wait(to.free, parity ^ 1);
            if (!again) {
                put_pages16<Plan>(to, page, x);
                continue;
            }
#pragma unroll 1
            for (int i = page; i < page + N; ++i) {
                Block16 one[1];
                load_pages16(one, own + i * Plan::PAGE);
                multiply_any(one[0], first, second, limit);
                put_pages16<Plan>(to, i, one);
            }
        }
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
template <class Plan, typename T>
__device__ __forceinline__ void second_pass16(float* columns, const Weights16<T>& first, const Weights16<T>& second, float limit) {
#pragma unroll 1
    for (int c = 0; c < 8; c += 4) {
        Block16 v[4];
        fetch_columns16<Plan>(v, columns + c);
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply_cut16<T>(v[i], first);
#pragma unroll
            for (int i = 0; i < 4; ++i) multiply_cut16<T>(v[i], second);
            put_columns16<Plan>(columns + c, v);
        } else if (!multiply_all(v, first, second, limit)) {
            put_columns16<Plan>(columns + c, v);
        } else {
#pragma unroll 1
            for (int i = c; i < c + 4; ++i) {
                Block16 one[1];
                fetch_columns16<Plan>(one, columns + i);
                multiply_any(one[0], first, second, limit);
                put_columns16<Plan>(columns + i, one);
            }
        }
    }
}

// A lane's results, four neighbours of each 16th of a row, to their places, of which `first` is the first one. read(): what to do when they
// have been read, before the stores.
template <class Plan, typename T, class Read>
__device__ __forceinline__ void store16(T* out, const T* bias, const T* residual, const float* from, long long first, long long features,
                                        float scale, const Read& read) {
    Vec<float, 4> results[Plan::SIDE];
#pragma unroll
    for (int i = 0; i < Plan::SIDE; ++i) results[i] = load_vec<float, 4>(from + i * Plan::SLAB);
    read();
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
        store_vec_past_l1(out + at, pack<T, 4>(four.v));
    }
}

// kron_linear_v4 of four factors of 16 x 16. Grid CLUSTER * (the rows, or fewer), block THREADS; dynamic shared memory: the stage, a part
// of a row, which both begin at multiples of 128 bytes, the factors, the largest number of each warp's part of them, two mbarriers.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, 1)
    kron_linear_v4_sixteen(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                           const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                           long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                           long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                           long long features) {
    constexpr int PAGE = Plan::PAGE, NEXT = Plan::NEXT, SLAB = Plan::SLAB, EACH = Plan::EACH, WARPS = Plan::WARPS;
    constexpr int STAGED = Plan::template STAGED<T>, WEIGHTS = FACTOR_PIECES<T> * 128, V = 16 / sizeof(T);
    constexpr int LINE = 128 / sizeof(T), TOGETHER = LINE / 8;  // warps that make whole lines
    extern __shared__ uint4 dynamic[];
    float* numbers = reinterpret_cast<float*>(dynamic) + WARPS * Plan::AT_ONCE * PAGE;  // after the stage
    unsigned* weights = reinterpret_cast<unsigned*>(numbers + Plan::SIDE * SLAB);
    unsigned *largest = weights + 4 * WEIGHTS, *mbarriers = largest + WARPS;
    Factors4<T> factors = {{w0, w1, w2, w3}, {w0_p, w1_p, w2_p, w3_p}, {w0_q, w1_q, w2_q, w3_q}};
    int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = A;
    int row = blockIdx.x / Plan::CLUSTER;
    auto after = [](int row) { return row + int(gridDim.x / Plan::CLUSTER); };
    // `full`: this block's warps have put their results of a row, and the other's numbers are there. `free`: both have read theirs.
    unsigned full = shared_address(mbarriers), free = full + 8, apart = shared_of_rank(full, rank ^ 1) - full, parity = 0;
    if (threadIdx.x == 0) {
        mbarrier_init(full, WARPS);
        mbarrier_init(free, 2 * WARPS);
        mbarriers_made();
    }
    cluster_arrive_relaxed();
    for (int i = 0; i < 4; ++i) prefetch_factor(factors.at[i], 16, 16, factors.p[i], factors.q[i]);
    if (row < rows) prefetch_tile<Plan::PART, 1>(x + (long long)row * Plan::NUMBERS + rank * Plan::PART, 1, 1);
    wait_for_previous();
    // Of the first pass: EACH pages of a warp, and where their results go.
    auto own = [&](int row) { return x + (long long)row * Plan::NUMBERS + (rank * Plan::PART + warp * (EACH * PAGE) + lane * V); };
    T* stage = reinterpret_cast<T*>(dynamic) + warp * (STAGED * PAGE) + lane * V;
    float* mine = numbers + (rank * 8 + warp / 2) * SLAB + warp % 2 * (EACH * NEXT) + lane * 4;
    Places16 to = {mine, apart, full, free};
    // Of the second: the lane's numbers of columns, and those which it stores, four neighbours.
    float* column = numbers + lane / 4 * SLAB + lane % 4 * (2 * NEXT) + warp * 8;
    int line = warp % TOGETHER * (16 / TOGETHER) + lane / (LINE / 4), within = warp / TOGETHER * LINE + lane % (LINE / 4) * 4;
    for (int page = 0; page < STAGED; page += Plan::AT_ONCE) {
        if (row < rows) stage_pages16<Plan::AT_ONCE>(stage + page * PAGE, own(row) + page * PAGE);
        cp_async_commit();
    }
    load_weights16<Plan>(weights, largest, factors, rank);
    let_next_come();
    __syncthreads();
    float limits[2] = {limit16<Plan>(largest), limit16<Plan>(largest + WARPS / 2)};
    cluster_wait();
    // Clusters of one row less begin half a row's time later: else all multiply at one time, and all store at another.
    int more = rows % (gridDim.x / Plan::CLUSTER);
    if (row < rows && row >= more && more)
        for (int us = 0; us < (sizeof(T) == 4 ? 7 : 3); ++us) __nanosleep(1000);
    for (; row < rows; row = after(row), parity ^= 1) {
        Weights16<T> first, second;
        fetch_weights16(first, weights);
        fetch_weights16(second, weights + WEIGHTS);
        first_pass16<Plan, T>(own(row), after(row) < rows ? own(after(row)) : nullptr, stage, to, parity, first, second, limits[0]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full, EACH * PAGE / Plan::CLUSTER * 4);  // as much as goes to the other block comes from there
        fetch_weights16(first, weights + 2 * WEIGHTS);
        fetch_weights16(second, weights + 3 * WEIGHTS);
        mbarrier_wait(full, parity);
        second_pass16<Plan, T>(column, first, second, limits[1]);
        barrier_of(1 + warp / TOGETHER, 32 * TOGETHER);
        long long at = (long long)row * Plan::NUMBERS + line * PAGE + rank * (PAGE / Plan::CLUSTER) + within;
        store16<Plan>(out, bias, residual, numbers + line * NEXT + within, at, features, float(scale), [&] {
            __syncwarp();
            if (lane == 0 && after(row) < rows) {
                mbarrier_arrive(free);
                mbarrier_arrive(free + apart);
            }
        });
    }
}
#endif
