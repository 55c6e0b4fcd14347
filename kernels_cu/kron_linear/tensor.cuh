// A step of a kron_linear v4 plan on tensor cores. See tile.cuh.
//
// Floats are multiplied in TF32, or with float precision as split numbers: x = big + small, both in TF32, and three products (3xTF32). On
// an H200 an mma_tf32 blocks the issue slot of its SM quadrant for 6 cycles. Every other instruction adds to this time: splitting, and
// adding products to accumulators.
//
// If the rows of a factor are not a multiple of the mma size, its matrix is padded with rows of zeros. The fibers in registers are padded
// with zeros, too, because the memory behind them may contain infinities.
// Experiments: docs/notes/kron_linear.md.
#pragma once
#include "common/ptx/mma.cuh"
#include "step.cuh"

// True if a step multiplies 16-bit types without conversion: the first step, if its matrix is a single factor.
template <class S, typename In, typename M>
__device__ constexpr bool in_pairs() {
    return sizeof(In) == 2 && sizeof(M) == 2 && S::P % 4 == 0 && S::P > 8;
}

// The rows of a step's matrix in shared memory: P rounded up to a multiple of 8, or of 16 with PAIRS, for tensor cores. Rows beyond P are
// zeros.
template <class S, bool PAIRS>
__device__ constexpr int high() {
    constexpr int AT_ONCE = S::LANES > 1 ? 1 : PAIRS ? 16 : 8;
    return (S::P + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
}
template <typename T>
__device__ __forceinline__ unsigned pair_of(T a, T b) {
    Vec<T, 2> pair = {a, b};
    return *reinterpret_cast<unsigned*>(&pair);
}
__device__ __forceinline__ void mma_16_bit(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) { mma_f16(d, a, b); }
__device__ __forceinline__ void mma_16_bit(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
    mma_bf16(d, a, b);
}
template <typename T>
__device__ __forceinline__ void mma_16_bit(float (&)[4], const unsigned (&)[4], const unsigned (&)[2], T) {}  // never called

// The swizzle of row k of a step's matrix in shared memory: lanes that load from 4 rows have no bank conflicts.
template <class Plan, class S, int RIGHT>
__device__ constexpr int turn(int k) {
    return Plan::TENSOR && S::PADDED % 32 == 0 && S::COLUMNS % 32 == 0 ? (RIGHT == 1 ? k / 2 : k) % 4 * 8 : 0;
}

// The offset of element [k][j] of a step's matrix in shared memory: row-major, or with BY_LANES in the order in which the lanes load
// operand a of mma_tf32, or with PAIRS of mma_f16. The rows of operand a are the columns of the matrix. A lane has WIDE neighbouring
// columns, and neighbouring k if fibers are contiguous.
template <class Plan, class S, bool PAIRS, int RIGHT>
__device__ __forceinline__ int place_of(int k, int j) {
    if constexpr (!Plan::BY_LANES) return k * S::PADDED + (j ^ turn<Plan, S, RIGHT>(k));
    constexpr int WIDE = gcd(S::COLUMNS / 8, 4), K = PAIRS ? 2 : 1;
    int t = RIGHT == 1 ? k % (8 * K) / (2 * K) : k % (4 * K) / K, h = RIGHT == 1 ? k % (2 * K) / K : k % (8 * K) / (4 * K);
    int m = j / (8 * WIDE) * (WIDE / 2) + j % WIDE / 2;
    return (((k / (8 * K) * (S::PADDED / 16) + m) * 32 + j / WIDE % 8 * 4 + t) * 4 + h * 2 + j % 2) * K + k % K;
}

// sums += c x, for 8 DEPTH values of k. Tensor cores truncate when they add. Therefore few products are accumulated from zero, and the
// result is added to `sums` by ordinary additions.
template <int MS, int NS, int DEPTH, class Fetch>
__device__ __forceinline__ void multiply_split(float (&sums)[MS][NS][4], float (&x)[DEPTH][NS][2], const Fetch& fetch) {
    float small_x[DEPTH][NS][2];
#pragma unroll
    for (int i = 0; i < DEPTH * NS * 2; ++i) {
        float& number = x[i / (2 * NS)][i / 2 % NS][i % 2];
        split_tf32(number, number, small_x[i / (2 * NS)][i / 2 % NS][i % 2]);
    }
#pragma unroll
    for (int m = 0; m < MS; ++m) {
        float products[NS][4] = {};
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
            float c[4], small_c[4];
            fetch(c, small_c, d, m);
#pragma unroll
            for (int n = 0; n < NS; ++n) mma_tf32(products[n], small_c, x[d][n]);
#pragma unroll
            for (int n = 0; n < NS; ++n) mma_tf32(products[n], c, small_x[d][n]);
#pragma unroll
            for (int n = 0; n < NS; ++n) mma_tf32(products[n], c, x[d][n]);
        }
#pragma unroll
        for (int i = 0; i < NS * 4; ++i) sums[m][i / 4][i % 4] += products[i / 4][i % 4];
    }
}

// The elements of a lane (g = lane / 4, t = lane % 4). mma_tf32 has two adjacent fibers per lane, 2 t and 2 t + 1. If RIGHT is 1, they are
// neighbours in the array. Otherwise a lane has 4 neighbours, from 4 products, the two fibers are PAIR apart, and the four lanes t are
// neighbours as far as RIGHT allows, so that together they store whole sectors.
template <class S, int RIGHT>
struct Lanes4 {
    static constexpr bool ONE = RIGHT == 1;
    static constexpr int WIDE = gcd(S::COLUMNS / 8, 4), MS = S::COLUMNS / 16, NS = S::FIBERS / 8;
    static constexpr int FV = ONE ? 8 : 32, LEAST = ONE ? 1 : 4, PAIR = ONE ? 1 : RIGHT >= 32 ? 16 : RIGHT >= 16 ? 8 : 4;

    __device__ static constexpr int fiber(int t) { return ONE ? 2 * t : PAIR == 16 ? 4 * t : PAIR == 8 ? t % 2 * 4 + t / 2 * 16 : 8 * t; }
};

// sums += the products of `count` 16-bit elements of each fiber, without conversion, with zeros beyond the last.
template <class S, int RIGHT, int MS, int NS, int FROM, typename In>
__device__ __forceinline__ void multiply_pairs(float (&sums)[MS][NS][4], const In* source, const int (&from)[FROM], const In* w,
                                               int count) {
#pragma unroll 2
    for (int k0 = 0; k0 < count; k0 += 16) {
        unsigned x[NS][2], c[MS][4];
        int first = k0 + threadIdx.x % 4 * (RIGHT == 1 ? 4 : 2);
#pragma unroll
        for (int i = 0; i < FROM; ++i) {
            int at = S::In::join(from[i], S::In::at(k0 * RIGHT));
            if constexpr (RIGHT == 1) {
                Vec<In, 4> v = {};
                if (S::P % 16 == 0 || first < S::P) v = load_vec<In, 4>(source + at);
                x[i][0] = pair_of(v.v[0], v.v[1]);
                x[i][1] = pair_of(v.v[2], v.v[3]);
            } else {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    Vec<In, 4> even = {}, odd = {};
                    if (S::P % 16 == 0 || first + 8 * h < S::P) {
                        even = load_vec<In, 4>(source + S::In::join(at, S::In::at(8 * h * RIGHT)));
                        odd = load_vec<In, 4>(source + S::In::join(at, S::In::at((8 * h + 1) * RIGHT)));
                    }
#pragma unroll
                    for (int e = 0; e < 4; ++e) x[i * 4 + e][h] = pair_of(even.v[e], odd.v[e]);
                }
            }
        }
#pragma unroll
        for (int m = 0; m < MS; ++m) {
            Vec<unsigned, 4> v = load_vec<unsigned, 4>(reinterpret_cast<const unsigned*>(w + m * 256));
#pragma unroll
            for (int e = 0; e < 4; ++e) c[m][e] = v.v[e];
        }
        w += S::PADDED * 16;
#pragma unroll
        for (int m = 0; m < MS; ++m)
#pragma unroll
            for (int n = 0; n < NS; ++n) mma_16_bit(sums[m][n], c[m], x[n], In());
    }
}

// Load a lane's elements of a warp's fibers for 8 values of k, from k on, with zeros beyond the last. ROUND: to TF32.
template <class S, int RIGHT, bool ROUND, int NS, int FROM, typename In>
__device__ __forceinline__ void fetch_fibers(float (&x)[NS][2], const In* source, const int (&from)[FROM], int k) {
    auto number = [](In v) { return ROUND ? to_tf32(load_as(v)) : load_as(v); };
    int first = k + threadIdx.x % 4 * (RIGHT == 1 ? 2 : 1);
#pragma unroll
    for (int i = 0; i < FROM; ++i) {
        int at = S::In::join(from[i], S::In::at(k * RIGHT));
        if constexpr (RIGHT == 1) {
            Vec<In, 2> v = {};
            if (S::P % 8 == 0 || first < S::P) v = load_vec<In, 2>(source + at);
            x[i][0] = number(v.v[0]);
            x[i][1] = number(v.v[1]);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Vec<In, 4> v = {};
                if (S::P % 8 == 0 || first + 4 * h < S::P) v = load_vec<In, 4>(source + S::In::join(at, S::In::at(4 * h * RIGHT)));
#pragma unroll
                for (int e = 0; e < 4; ++e) x[i * 4 + e][h] = number(v.v[e]);
            }
        }
    }
}

// sums += the products of `count` elements of each fiber, in TF32.
template <class S, int RIGHT, bool ROUND, int MS, int NS, int FROM, typename In>
__device__ __forceinline__ void multiply_tf32(float (&sums)[MS][NS][4], const In* source, const int (&from)[FROM], const float* w,
                                              int count) {
#pragma unroll 2
    for (int k0 = 0; k0 < count; k0 += 8) {
        float x[NS][2], c[MS][4];
        fetch_fibers<S, RIGHT, ROUND>(x, source, from, k0);
#pragma unroll
        for (int m = 0; m < MS; ++m) unpack(c[m], load_vec<float, 4>(w + m * 128));
        w += S::PADDED * 8;
#pragma unroll
        for (int m = 0; m < MS; ++m)
#pragma unroll
            for (int n = 0; n < NS; ++n) mma_tf32(sums[m][n], c[m], x[n]);
    }
}

// The same with split numbers. Fewer products are accumulated on tensor cores if the sum is shorter, because the error of SGEMM is then
// smaller, too.
template <class S, int RIGHT, bool SPLIT, int UNROLL, int MS, int NS, int FROM>
__device__ __forceinline__ void multiply_three(float (&sums)[MS][NS][4], const float* source, const int (&from)[FROM], const float* w,
                                               int count) {
    constexpr int DEPTH = S::P >= 64 && S::P % 16 == 0 && S::FIBERS <= 32 ? 2 : 1, WIDE = Lanes4<S, RIGHT>::WIDE;
#pragma unroll(UNROLL)
    for (int k0 = 0; k0 < count; k0 += 8 * DEPTH) {
        float x[DEPTH][NS][2];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) fetch_fibers<S, RIGHT, false>(x[d], source, from, k0 + 8 * d);
        Vec<float, WIDE> rows[DEPTH][2];
        multiply_split<MS>(sums, x, [&](float (&c)[4], float (&small)[4], int d, int m) {
            if constexpr (SPLIT) {
                unpack(c, load_vec<float, 4>(w + d * (S::PADDED * 8) + m * 128));
                unpack(small, load_vec<float, 4>(w + (high<S, false>() + d * 8) * S::PADDED + m * 128));
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (m % (WIDE / 2) == 0 && i % 2 == 0)
                        rows[d][i / 2] = load_vec<float, WIDE>(w + (d * 8 + i / 2 * (RIGHT == 1 ? 1 : 4)) * S::PADDED + m * 16);
                    split_tf32(rows[d][i / 2].v[m % (WIDE / 2) * 2 + i % 2], c[i], small[i]);
                }
            }
        });
        w += S::PADDED * 8 * DEPTH;
    }
}

// Store a warp's accumulators, for fibers from f0 and columns from j0 on.
template <class Plan, class S, int Q, int RIGHT, int ALL, class Out, bool LAST, int MS, int NS, typename T>
__device__ __forceinline__ void store_tensor(const float (&sums)[MS][NS][4], float* tile, const Global4<T>& global, int f0, int j0) {
    using Lanes = Lanes4<S, RIGHT>;
    constexpr bool ONE = Lanes::ONE, LINEAR = ALL % S::FIBERS == 0 && (RIGHT & (RIGHT - 1)) == 0;
    constexpr int WIDE = Lanes::WIDE, SIDE = ONE ? WIDE : 4;
    Sums4<Plan, S, Q, RIGHT, Out, LAST> to;
    int f1 = f0 + Lanes::fiber(threadIdx.x % 4), j1 = j0 + threadIdx.x % 32 / 4 * WIDE;
    to.set(f1, j1, global);
#pragma unroll
    for (int n = 0; n < 2 * NS / (ONE ? 1 : 4); ++n) {
        int f = n / 2 * Lanes::FV + n % 2 * Lanes::PAIR;
        if (f1 + f >= ALL) continue;
        if (!LINEAR) {
            to.set(f1 + f, j1, global);
            f = 0;
        }
#pragma unroll
        for (int m = 0; m < (ONE ? 2 * MS / WIDE : 2 * MS); ++m) {
            int j = ONE ? m * 8 * WIDE : m / WIDE * 8 * WIDE + m % WIDE;
            if (S::PADDED > Q && j1 + j >= Q) continue;
            float part[SIDE];
#pragma unroll
            for (int e = 0; e < SIDE; ++e)
                part[e] = ONE ? sums[(m * WIDE + e) / 2][n / 2][e % 2 * 2 + n % 2] : sums[m / 2][n / 2 * 4 + e][m % 2 * 2 + n % 2];
            to.store(tile, global, f, j, part);
        }
    }
}

// One step on tensor cores, in TF32, with split numbers or 16-bit types. It computes the transposed product: M are the columns of the
// matrix, N the fibers. P is even if RIGHT is 1. COLUMNS is a multiple of 16. FIBERS is a multiple of 8, or of 32 if RIGHT is not 1 but a
// multiple of 4.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In, typename M, typename T,
          class After>
__device__ __forceinline__ void multiply4_tensor(const In* in, const In* rest, float* tile, const M* w, const Global4<T>& global,
                                                 const After& after) {
    using Lanes = Lanes4<S, RIGHT>;
    constexpr int P = S::P, ALL = LEFT * RIGHT;
    constexpr bool LINEAR = ALL % S::FIBERS == 0 && (RIGHT & (RIGHT - 1)) == 0, PAIRS = in_pairs<S, In, M>();
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, row = t * (RIGHT == 1 ? 2 : 1);  // of the matrix
    int f0 = warp / S::GROUPS * S::FIBERS, j0 = warp % S::GROUPS * S::COLUMNS, count = f0 < ALL ? P : 0;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / Lanes::FV], mine = f0 + g % 2 * Lanes::PAIR + Lanes::fiber(g / 2);
#pragma unroll
    for (int i = 0; i < S::FIBERS / Lanes::FV; ++i) {
        if (LINEAR) from[i] = S::In::join(S::In::at(spot<P, RIGHT>(mine, 0)), S::In::at(spot<P, RIGHT>(i * Lanes::FV, 0)));
        else from[i] = S::In::at(spot<P, RIGHT>(min(mine + i * Lanes::FV, ALL - Lanes::LEAST), 0));
        from[i] = S::In::join(from[i], S::In::at((PAIRS ? 2 : 1) * row * RIGHT));
    }
    if (Plan::BY_LANES) w += (j0 / 16 * 32 + threadIdx.x % 32) * (PAIRS ? 8 : 4);
    else w += row * S::PADDED + ((j0 + g * Lanes::WIDE) ^ turn<Plan, S, RIGHT>(row));
    float sums[Lanes::MS][Lanes::NS][4] = {};
    if constexpr (PAIRS) multiply_pairs<S, RIGHT>(sums, source, from, w, count);
    else if constexpr (Plan::PRODUCTS == 3)  // with only four warps per SM there are registers for prefetching
        multiply_three<S, RIGHT, Plan::SPLIT, Plan::THREADS * Plan::BLOCKS == 128 ? 2 : 1>(sums, source, from, w, count);
    else multiply_tf32 < S, RIGHT, sizeof(In) == 4 && AHEAD<(1 << 30)>(sums, source, from, w, count);
    after();
    store_tensor<Plan, S, Q, RIGHT, ALL, Out, LAST>(sums, tile, global, f0, j0);
}
