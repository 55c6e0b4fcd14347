// kron_linear v4 for four factors of 16 x 16 at the right end of a layer, in float or 16-bit types. A row is an array of 16 x 16 x 16 x 16.
//
// Algorithm  Products use tensor cores. A float is split into three bfloat16 numbers: 6 products by mma m16n8k16. A lane splits its
//            elements itself, in 11 instructions for two of them. The elements are operand b: mma takes k from the lane bits t and leaves j
//            in the lane bits g, and the index of the 8 columns moves from g to t. So a warp that holds 16 x 16 elements of two indices, 8
//            per lane, multiplies along one index and then along the other without moving data.
// Passes     The two blocks of a cluster share a row. The first pass multiplies by the two right factors: a warp reads 8 KB of contiguous
//            memory, half at a time, and sends its results to the block that owns them. The second pass multiplies by the two left factors,
//            for 4 neighbours of the right indices at a time, in shared memory, from which whole cache lines are stored. Meanwhile half of
//            the next row is copied to shared memory. The blocks exchange elements by st.async and mbarriers, because the release of a
//            cluster barrier is MEMBAR.ALL.GPU, which also waits for a thread's stores to global memory.
// 16 bits    Inputs are exact. Then an element is two bfloat16 numbers, truncated, as in lanes.cuh: one product for the first factor, two
// (float16:
//            three) for the others.
// float      A fast path assumes that nothing overflows. A pass sums the squares of its elements, in bfloat16, from the first pieces: 4
// instructions
//            for 8 elements. Below a limit, which depends on the largest elements of the factors, no product and no sum of the pass can be
//            infinite. Otherwise, and for an infinity or NaN, the pass is repeated with truncated pieces, whose products have the correct
//            sign (ANY).
// Experiments: docs/notes/kron_linear.md.
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
    // Padded strides in shared memory, of the second and of the first index: lanes that differ in these indices have no bank conflicts.
    static constexpr int NEXT = PAGE / CLUSTER + 4, SLAB = SIDE * NEXT + 4;
    static constexpr int WARPS = THREADS / 32, EACH = PART / PAGE / WARPS, AT_ONCE = 4;  // pages per warp in the first pass, and at a time
    template <typename T>
    static constexpr int STAGED = AT_ONCE * 4 / sizeof(T);  // pages per warp in the stage
};

constexpr int PIECES = Pieces<float>::COUNT;
using Block16 = float[2][2][2];           // a lane's elements [n][h][p] of 16 x 16: k = 2 t + 8 h + p, column g + 8 n
using Words16 = unsigned[2][2];           // the same in 16 bits, as loaded, in pairs: [n][h]
using Pieces16 = unsigned[2][PIECES][2];  // split, as operand b, in pairs: [n][piece][h]
template <typename T>
constexpr int FACTOR_PIECES = sizeof(T) == 4 ? PIECES
                              : IS_BF16<T>   ? 1
                                             : 2;
template <typename T>
using Weights16 = unsigned[FACTOR_PIECES<T>][4];

// Split a and b into pairs of pieces. With ANY the pieces are truncated, as in split_two, and have the sign of their number. Without ANY
// each piece is the rest rounded to nearest. Then numbers and products must be in the range of bfloat16, because products of pieces with
// another sign than their number may be infinite although the sum is not.
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

// A pair of third pieces, with 0 instead of an infinity or NaN. The third piece is infinite or NaN if the number is.
__device__ __forceinline__ unsigned finite_pair(unsigned pair) {
    constexpr unsigned LOW = 0x7f80, HIGH = LOW << 16;
    return ((pair & LOW) == LOW ? 0 : pair & 0xffff) | ((pair & HIGH) == HIGH ? 0 : pair & 0xffff0000);
}

// Accumulators become elements: j becomes the index of the columns, and the former index of the columns becomes k.
__device__ __forceinline__ void keep16(Block16& v, const float (&d)[2][4]) {
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e / 2 % 2][e / 4][e % 2] = d[e / 4][e % 4];
}

// v = x w along k. Afterwards j is the index of the columns, and the former index of the columns is k. Truncated pieces have the sign of
// their number, so the omitted products do not cancel. Therefore ANY adds two more products: the error is 1.2 times that of torch instead
// of 2.4 times. If a factor is not finite (limit is 0 or NaN), it adds only one.
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

// Multiply a block by two factors. Adds the approximate squares of its elements to `squares`.
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

// Multiply N blocks by two factors. Returns true if an element of the warp exceeds the limit or is NaN. Then the results may be wrong, and
// all blocks must be multiplied again with multiply_any.
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

// Multiply a block by a 16-bit factor: multiply_words16 for elements as loaded from memory, multiply_cut16 for floats that are truncated to
// two pieces. Their products cannot be infinite before the sum is.
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

// The limit for the sum of squares. A factor multiplies magnitudes by at most 16 times its largest element, and slightly more because of
// the pieces of both. Below the limit all products and sums with two factors are far below 2^127. `largest`: the bits of the largest
// magnitude in each warp's part of the two factors; the bits of a NaN are larger than all others. The result is 0 or NaN if no element is
// small enough.
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

// The first pass loads and stores four neighbours per lane: k (and j) with number 2 t + 8 h + p is element 4 t + 2 h + p.
__device__ constexpr int neighbours16(int n) { return n % 8 / 2 * 4 + n / 8 * 2 + n % 2; }

// Write the factors to shared memory as operand a, [factor][piece][lane][4], 6 KB, and the largest magnitude of each warp's part. The
// columns of the second factor are rotated, so that the results that stay in this block come first.
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

// Load N pages to registers. `from` is the lane's first element of the first page. stage_pages16 copies N pages to the stage in shared
// memory, which only this warp reads; there `from` is the lane's first 16 bytes.
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

// The destinations of a lane's results of the first pass: half go to `mine`, half to the same place in the other block, at shared-memory
// distance `apart`. The mbarrier `full` of that block signals their arrival. A phase of `free` ends when both blocks have read the previous
// contents.
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

// Multiply a warp's pages, from `own` on, by the two right factors, N at a time. The first pages are in the stage or in flight. When N
// pages are in registers the copy of further pages starts, at the end that of the `next` row, if there is one.
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

// Load N neighbouring columns; the lane's first element is at `from`. put_columns16 stores the results in the same place.
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

// Multiply a warp's eight columns by the two left factors.
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

// Store a lane's results, four neighbours of each 16th of a row, to global memory, from offset `first` on. read() is called after they have
// been read from shared memory, before the stores.
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

// kron_linear_v4 for four factors of 16 x 16. Grid: at most CLUSTER * the number of rows; block THREADS. Dynamic shared memory: the stage
// and a part of a row, both aligned to 128 bytes, the factors, the largest magnitude of each warp's part of them, two mbarriers.
template <typename T, class Plan>
__global__ void __cluster_dims__(Plan::CLUSTER, 1, 1) __launch_bounds__(Plan::THREADS, 1)
    kron_linear_v4_sixteen(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
                           const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q, long long w1_p,
                           long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q, long long w4_p, long long w4_q,
                           long long w5_p, long long w5_q, long long w6_p, long long w6_q, long long w7_p, long long w7_q, double scale,
                           long long features) {
    constexpr int PAGE = Plan::PAGE, NEXT = Plan::NEXT, SLAB = Plan::SLAB, EACH = Plan::EACH, WARPS = Plan::WARPS;
    constexpr int STAGED = Plan::template STAGED<T>, WEIGHTS = FACTOR_PIECES<T> * 128, V = 16 / sizeof(T);
    constexpr int LINE = 128 / sizeof(T), TOGETHER = LINE / 8;  // warps that together store whole cache lines
    extern __shared__ uint4 dynamic[];
    float* numbers = reinterpret_cast<float*>(dynamic) + WARPS * Plan::AT_ONCE * PAGE;  // after the stage
    unsigned* weights = reinterpret_cast<unsigned*>(numbers + Plan::SIDE * SLAB);
    unsigned *largest = weights + 4 * WEIGHTS, *mbarriers = largest + WARPS;
    Factors4<T> factors = {{w0, w1, w2, w3}, {w0_p, w1_p, w2_p, w3_p}, {w0_q, w1_q, w2_q, w3_q}};
    int rank = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = A;
    int row = blockIdx.x / Plan::CLUSTER;
    auto after = [](int row) { return row + int(gridDim.x / Plan::CLUSTER); };
    // `full`: the warps of this block have written their results of a row, and those of the other block have arrived. `free`: both blocks
    // have read theirs.
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
    // For the first pass: the EACH pages of a warp, and the destinations of their results.
    auto own = [&](int row) { return x + (long long)row * Plan::NUMBERS + (rank * Plan::PART + warp * (EACH * PAGE) + lane * V); };
    T* stage = reinterpret_cast<T*>(dynamic) + warp * (STAGED * PAGE) + lane * V;
    float* mine = numbers + (rank * 8 + warp / 2) * SLAB + warp % 2 * (EACH * NEXT) + lane * 4;
    Places16 to = {mine, apart, full, free};
    // For the second pass: the lane's elements of columns, and the four neighbours that it stores.
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
    // Clusters that have one row less start later by half the time of a row. Otherwise all clusters multiply at the same time, and then all
    // store.
    int more = rows % (gridDim.x / Plan::CLUSTER);
    if (row < rows && row >= more && more)
        for (int us = 0; us < (sizeof(T) == 4 ? 7 : 3); ++us) __nanosleep(1000);
    for (; row < rows; row = after(row), parity ^= 1) {
        Weights16<T> first, second;
        fetch_weights16(first, weights);
        fetch_weights16(second, weights + WEIGHTS);
        first_pass16<Plan, T>(own(row), after(row) < rows ? own(after(row)) : nullptr, stage, to, parity, first, second, limits[0]);
        __syncwarp();
        if (lane == 0) mbarrier_arrive(full, EACH * PAGE / Plan::CLUSTER * 4);  // the other block sends as many bytes as it receives
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
