// A step of a kron_linear v4 plan, on the FMA units and on tensor cores. See tile.cuh.
#pragma once
#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/vec.cuh"

// A swizzled layout of shared memory, see tile.cuh. V: elements in 16 bytes.
template <int S, int M, int S2, int M2, int V>
struct Layout {
    __device__ static constexpr int at(int e) { return e ^ (e >> S & M * V) ^ (e >> S2 & M2 * V); }
    // The offset of element a + b, from the offsets of a and b. That of b is a constant.
    __device__ static __forceinline__ int join(int a, int b) {
        if (M == 0 && M2 == 0) return a + b;
        return (a ^ (b & (8 * V - 1))) + (b & ~(8 * V - 1));
    }
};

__device__ constexpr int gcd(int a, int b) { return b ? gcd(b, a % b) : a; }

template <int P_, int Q_>
struct Factor {
    static constexpr int P = P_, Q = Q_;
};

// The Kronecker product of neighbouring factors, the rightmost first. Without factors it is 1.
template <class... Factors>
struct Merged {
    static constexpr int P = (Factors::P * ... * 1), Q = (Factors::Q * ... * 1), COUNT = sizeof...(Factors);
    static constexpr int OUTPUTS = ((Factors::P * Factors::Q) + ... + 0);
};

// One step. On the FMA units a thread has FIBERS x COLUMNS accumulators, and a warp is LANES x (32 / LANES)
// threads. On tensor cores LANES is 1, and a warp has FIBERS x COLUMNS accumulators. PADDED: Q (for step 0,
// of a slice) rounded up to whole warps. In: the layout of the input.
template <int FIBERS_, int COLUMNS_, int LANES_, int PADDED_, class In_, class... Factors>
struct Step4 {
    static constexpr int FIBERS = FIBERS_, COLUMNS = COLUMNS_, LANES = LANES_, PADDED = PADDED_,
                         COUNT = sizeof...(Factors);
    static constexpr int P = (Factors::P * ...), Q = (Factors::Q * ...),
                         GROUPS = PADDED / (LANES == 1 ? COLUMNS : COLUMNS * 32 / LANES);
    static constexpr int FETCHED = FIBERS * LANES * P;  // elements that a warp reads
    using In = In_;
    using Product = Merged<Factors...>;

    // True if each warp writes only where it alone has read.
    __device__ static constexpr bool local(int numbers, int right) {
        return GROUPS == 1 && P == Q && PADDED == Q && FIBERS * LANES % right == 0 && numbers % FETCHED == 0;
    }
};

template <class... Steps>
struct Steps4 {};

template <class S, class...>
struct First {
    using type = S;
};

// BYTES: size of a copy from global memory. PRODUCTS: products on tensor cores for each product: 1 (TF32 or
// 16-bit types) or 3 (split floats); 0: FMA units. ONCE: the matrices are rounded or split once, in shared
// memory. ADDED: with a bias or a residual.
template <int THREADS_, int BLOCKS_, int L_, int R_, long long C_, int BYTES_, int AHEAD_, int SLICES_,
          int PRODUCTS_, bool ONCE_, bool ADDED_, class... Steps>
struct Plan4 {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, R = R_, BYTES = BYTES_, AHEAD = AHEAD_,
                         SLICES = SLICES_;
    static constexpr int PRODUCTS = PRODUCTS_;
    static constexpr long long C = C_;
    static constexpr bool WHOLE = R == C, TENSOR = PRODUCTS > 0, IN_TF32 = PRODUCTS == 1, ONCE = ONCE_,
                          SPLIT = ONCE && PRODUCTS == 3, ADDED = ADDED_;
    static constexpr int P = (Steps::P * ...), Q = (Steps::Q * ...), COUNT = sizeof...(Steps);
    using List = Steps4<Steps...>;
    using Rightmost = typename First<Steps...>::type;
    // Elements of a tile; columns per slice in the rightmost step.
    static constexpr int NUMBERS = L * P * R, COLUMNS = Rightmost::Q / SLICES;
    // In the first step, each warp copies what it reads.
    static constexpr bool LOCAL = SLICES == 1 && Rightmost::local(NUMBERS, R);
    static constexpr bool REST = AHEAD < NUMBERS;
};

// The outputs of a tile in global memory.
template <typename T>
struct Global4 {
    T* out;
    const T *bias, *residual;
    long long first, features;
    int rows;  // of the tile
    // `one` is 1, which the compiler does not know. A vector store needs its values in consecutive registers.
    // Accumulators in consecutive registers would often share a register bank with an operand, and an FMA
    // with two operands in one bank stalls. Multiplying by `one` gives the stored values registers of their
    // own.
    compute_t<T> scale, one;

    // The element of the bias.
    __device__ __forceinline__ long long in_row(long long at) const { return bias ? at % features : 0; }
};

// Load N neighbours and convert them to the compute type. `to` is a part of an array.
template <int N, typename A, typename T>
__device__ __forceinline__ void load_to(A* to, const T* from) {
    unpack(reinterpret_cast<A(&)[N]>(*to), load_vec<T, N>(from));
}

// part = scale part + bias + residual, for N neighbours of an output: the first is element i of the bias and
// element j of the residual, which may be null pointers.
template <bool ADDED, typename T, typename F, int N>
__device__ __forceinline__ void finish(F (&part)[N], F scale, const T* bias, long long i, const T* residual,
                                       long long j) {
#pragma unroll
    for (int e = 0; e < N; ++e) {
        part[e] *= scale;
        if (ADDED && bias) part[e] += load_as(bias[i + e]);
        if (ADDED && residual) part[e] += load_as(residual[j + e]);
    }
}

// sums += d for accumulators, in the columns from 8 * `from` on.
template <int M, int N>
__device__ __forceinline__ void add(float (&sums)[M][4], const float (&d)[N][4], int from = 0) {
#pragma unroll
    for (int e = 0; e < 4 * N; ++e) sums[from + e / 4][e % 4] += d[e / 4][e % 4];
}

// The index of element j of fiber f in an array [left][N][RIGHT].
template <int N, int RIGHT>
__device__ constexpr int index_of(int f, int j) {
    return (f / RIGHT * N + j) * RIGHT + f % RIGHT;
}

// Where the results of a step go: element j of fiber f. `place` (shared memory) and `at` (global memory)
// belong to the thread's first result.
template <class Plan, class S, int Q, int RIGHT, class Out, bool LAST>
struct Sums4 {
    int l, place;
    long long at;

    // The row of the output in the tile, in units of C, and the offset in global memory.
    __device__ static constexpr int row(int f, int j) {
        int others = f % RIGHT / Plan::R;
        if (Plan::COUNT > 1)
            others = others / Plan::COLUMNS * (Plan::COLUMNS * Plan::SLICES) + others % Plan::COLUMNS;
        return f / RIGHT * Plan::Q + j * (Plan::Q / S::Q) + others;
    }
    __device__ static constexpr long long along(int f, int j) {
        return row(f, j) * Plan::C + f % RIGHT % Plan::R;
    }

    template <typename T>
    __device__ __forceinline__ void set(int f, int j, const Global4<T>& global) {
        l = f / RIGHT;
        if constexpr (LAST) at = global.first + along(f, j);
        else place = Out::at(index_of<Q, RIGHT>(f, j));
    }

    // Store N results from (f, j), relative to the thread's first, on. They are neighbours along j if RIGHT
    // is 1, otherwise along f.
    template <int N, typename F, typename T>
    __device__ __forceinline__ void store(F* tile, const Global4<T>& global, int f, int j,
                                          F (&sums)[N]) const {
        if constexpr (!LAST) {
            Vec<F, N> v;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if constexpr (Plan::IN_TF32) v.v[i] = to_tf32(sums[i]);
                else v.v[i] = sums[i] * global.one;
            }
            store_vec(tile + Out::join(place, Out::at(index_of<Q, RIGHT>(f, j))), v);
        } else {
            constexpr int W = Plan::BYTES / sizeof(T), G = Plan::WHOLE ? N : gcd(N, W ? W : 1);
            if (l + f / RIGHT >= global.rows) return;
            long long first = at + along(f, j);
#pragma unroll
            for (int n = 0; n < N; n += G) {
                F(&part)[G] = reinterpret_cast<F(&)[G]>(sums[n]);
                finish<Plan::ADDED>(part, global.scale, global.bias, global.in_row(first) + n,
                                    global.residual, first + n);
                store_vec(global.out + first + n, pack<T, G>(part));
            }
        }
    }

    // Store all results of a thread: N x M parts of SIDE neighbours. Part (n, m) begins at fiber f0 +
    // fiber(n) and column j0 + column(m), and its element e is number(n, m, e). LINEAR: all parts are at
    // constant offsets from the first.
    template <bool LINEAR, int ALL, int N, int M, int SIDE, typename F, typename T, class Fiber, class Column,
              class Number>
    __device__ static __forceinline__ void store_all(F* tile, const Global4<T>& global, int f0, int j0,
                                                     const Fiber& fiber, const Column& column,
                                                     const Number& number) {
        Sums4 to;
        to.set(f0, j0, global);
#pragma unroll
        for (int n = 0; n < N; ++n) {
            int f = fiber(n);
            if (f0 + f >= ALL) continue;
            if (!LINEAR) to.set(f0 + f, j0, global);
#pragma unroll
            for (int m = 0; m < M; ++m) {
                if (S::PADDED > Q && j0 + column(m) >= Q) continue;
                F part[SIDE];
#pragma unroll
                for (int e = 0; e < SIDE; ++e) part[e] = number(n, m, e);
                to.store(tile, global, LINEAR ? f : 0, column(m), part);
            }
        }
    }
};

// One step on the FMA units. AHEAD: the number of elements that are at `in`; the others are at `rest`.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In,
          typename F, typename M, typename T, class After>
__device__ __forceinline__ void multiply4(const In* in, const In* rest, F* tile, const M* w,
                                          const Global4<T>& global, const After& after) {
    constexpr int P = S::P, LC = 32 / S::LANES, ALL = LEFT * RIGHT, V = 16 / sizeof(F);
    constexpr int FV = gcd(gcd(RIGHT, S::FIBERS), V), KV = RIGHT == 1 ? gcd(P, 16 / sizeof(In)) : 1,
                  JV = gcd(S::COLUMNS, V);
    constexpr int KC = P <= 16 ? P : gcd(P, 16), QV = gcd(Q, JV), STEP = S::LANES * FV;
    constexpr bool LINEAR = ALL % (S::LANES * S::FIBERS) == 0 && (RIGHT & (RIGHT - 1)) == 0;
    int warp = threadIdx.x / 32, lf = threadIdx.x % 32 % S::LANES, lc = threadIdx.x % 32 / S::LANES;
    int f0 = warp / S::GROUPS * (S::LANES * S::FIBERS), j0 = warp % S::GROUPS * (LC * S::COLUMNS) + lc * JV;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / FV];
#pragma unroll
    for (int i = 0; i < S::FIBERS / FV; ++i) {
        if (LINEAR)
            from[i] = S::In::join(S::In::at(index_of<P, RIGHT>(f0 + lf * FV, 0)),
                                  S::In::at(index_of<P, RIGHT>(i * STEP, 0)));
        else from[i] = S::In::at(index_of<P, RIGHT>(min(f0 + i * STEP + lf * FV, ALL - FV), 0));
    }
    F sums[S::FIBERS][S::COLUMNS] = {};
    w += j0;
#pragma unroll 1
    for (int k0 = 0; k0 < (f0 < ALL ? P : 0); k0 += KC) {  // a warp without fibers has no work
        int at[S::FIBERS / FV];
#pragma unroll
        for (int i = 0; i < S::FIBERS / FV; ++i) at[i] = S::In::join(from[i], S::In::at(k0 * RIGHT));
#pragma unroll
        for (int k = 0; k < KC; k += KV) {
            F x[S::FIBERS][KV];
#pragma unroll
            for (int i = 0; i < S::FIBERS; i += FV) {
                const In* p = source + S::In::join(at[i / FV], S::In::at(k * RIGHT));
                load_to<KV == 1 ? FV : KV>(x[i], p);
            }
#pragma unroll
            for (int kk = 0; kk < KV; ++kk) {
                F c[S::COLUMNS];
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j += JV)
                    load_to<JV>(c + j, w + (k + kk) * S::PADDED + j * LC);
#pragma unroll
                for (int n = 0; n < S::FIBERS * S::COLUMNS; ++n) {  // back and forth: reuses one operand
                    int j = n / S::FIBERS, i = j % 2 ? S::FIBERS - 1 - n % S::FIBERS : n % S::FIBERS;
                    sums[i][j] += x[i][kk] * c[j];
                }
            }
        }
        w += KC * S::PADDED;
    }
    after();
    constexpr int EACH = RIGHT == 1 ? QV : 1;
    Sums4<Plan, S, Q, RIGHT, Out, LAST>::template store_all<LINEAR, ALL, S::FIBERS / FV, S::COLUMNS / EACH,
                                                            RIGHT == 1 ? QV : FV>(
        tile, global, f0 + lf * FV, j0, [](int n) { return n * FV * S::LANES; },
        [](int m) { return m * EACH / JV * (JV * LC) + m * EACH % JV; },
        [&](int n, int m, int e) { return RIGHT == 1 ? sums[n * FV][m * EACH + e] : sums[n * FV + e][m]; });
}

// ------------------------------------------------------------------------------------------ on tensor cores
//
// Floats are multiplied in TF32, or with float precision as split numbers: x = big + small, both in TF32, and
// three products (3xTF32).
//
// If the rows of a factor are not a multiple of the mma size, its matrix is padded with rows of zeros. The
// fibers in registers are padded with zeros, too, because the memory behind them may contain infinities.

// True if a step multiplies 16-bit types without conversion: the first step, if its matrix is a single
// factor.
template <class S, typename In, typename M>
__device__ constexpr bool in_pairs() {
    return sizeof(In) == 2 && sizeof(M) == 2 && S::P % 4 == 0 && S::P > 8;
}

// The rows of a step's matrix in shared memory: P rounded up, with zeros, for tensor cores to a multiple of
// 8, or of 16 with PAIRS.
template <class S, bool PAIRS>
__device__ constexpr int high() {
    constexpr int AT_ONCE = S::LANES > 1 ? 1 : PAIRS ? 16 : 8;
    return (S::P + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
}
template <typename T>
__device__ __forceinline__ void mma_16_bit(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (IS_BF16<T>) mma_bf16(d, a, b);
    else mma_f16(d, a, b);
}

// The swizzle of row k of a step's matrix in shared memory: lanes that load from 4 rows have no bank
// conflicts.
template <class Plan, class S, int RIGHT>
__device__ constexpr int turn(int k) {
    return Plan::TENSOR && S::PADDED % 32 == 0 && S::COLUMNS % 32 == 0 ? (RIGHT == 1 ? k / 2 : k) % 4 * 8 : 0;
}

// The offset of element [k][j] of a step's matrix in shared memory: row-major, or with ONCE in the order in
// which the lanes load operand a of mma_tf32, or with PAIRS of mma_f16. The rows of operand a are the columns
// of the matrix. A lane has WIDE neighbouring columns, and neighbouring k if fibers are contiguous.
template <class Plan, class S, bool PAIRS, int RIGHT>
__device__ __forceinline__ int place_of(int k, int j) {
    if constexpr (!Plan::ONCE) return k * S::PADDED + (j ^ turn<Plan, S, RIGHT>(k));
    constexpr int WIDE = gcd(S::COLUMNS / 8, 4), K = PAIRS ? 2 : 1;
    int t = RIGHT == 1 ? k % (8 * K) / (2 * K) : k % (4 * K) / K,
        h = RIGHT == 1 ? k % (2 * K) / K : k % (8 * K) / (4 * K);
    int m = j / (8 * WIDE) * (WIDE / 2) + j % WIDE / 2;
    return (((k / (8 * K) * (S::PADDED / 16) + m) * 32 + j / WIDE % 8 * 4 + t) * 4 + h * 2 + j % 2) * K +
           k % K;
}

// The elements of a lane (g = lane / 4, t = lane % 4). mma_tf32 has two adjacent fibers per lane, 2 t and 2 t
// + 1. If RIGHT is 1, they are neighbours in the array. Otherwise a lane has 4 neighbours, from 4 products,
// the two fibers are PAIR apart, and the four lanes t are neighbours as far as RIGHT allows, so that together
// they store whole sectors.
template <class S, int RIGHT>
struct Lanes4 {
    static constexpr bool ONE = RIGHT == 1;
    static constexpr int WIDE = gcd(S::COLUMNS / 8, 4), MS = S::COLUMNS / 16, NS = S::FIBERS / 8;
    static constexpr int FV = ONE ? 8 : 32, LEAST = ONE ? 1 : 4,
                         PAIR = ONE           ? 1
                                : RIGHT >= 32 ? 16
                                : RIGHT >= 16 ? 8
                                              : 4;

    __device__ static constexpr int fiber(int t) {
        return ONE ? 2 * t : PAIR == 16 ? 4 * t : PAIR == 8 ? t % 2 * 4 + t / 2 * 16 : 8 * t;
    }
};

// Load a lane's elements of a warp's fibers as operand b, from k on, with zeros beyond the last: for 8 values
// of k in float, ROUNDed to TF32, or for 16 in 16-bit types, without conversion. EACH: elements per register.
template <class S, int RIGHT, int EACH, bool ROUND, typename U, int NS, int FROM, typename In>
__device__ __forceinline__ void fetch_fibers(U (&x)[NS][2], const In* source, const int (&from)[FROM],
                                             int k) {
    auto operand = [](In a, In b) {
        Vec<In, 2> pair = {a, b};
        if constexpr (EACH == 2) return reinterpret_cast<const unsigned&>(pair);
        else return ROUND ? to_tf32(load_as(a)) : load_as(a);
    };
    int first = k + threadIdx.x % 4 * (RIGHT == 1 ? 2 * EACH : EACH);
#pragma unroll
    for (int i = 0; i < FROM; ++i) {
        int at = S::In::join(from[i], S::In::at(k * RIGHT));
        if constexpr (RIGHT == 1) {
            Vec<In, 2 * EACH> v = {};
            if (S::P % (8 * EACH) == 0 || first < S::P) v = load_vec<In, 2 * EACH>(source + at);
            x[i][0] = operand(v.v[0], v.v[EACH - 1]);
            x[i][1] = operand(v.v[EACH], v.v[2 * EACH - 1]);
        } else {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                Vec<In, 4> v[EACH] = {};
                if (S::P % (8 * EACH) == 0 || first + 4 * EACH * h < S::P)
#pragma unroll
                    for (int e = 0; e < EACH; ++e)
                        v[e] =
                            load_vec<In, 4>(source + S::In::join(at, S::In::at((4 * EACH * h + e) * RIGHT)));
#pragma unroll
                for (int e = 0; e < 4; ++e) x[i * 4 + e][h] = operand(v[0].v[e], v[EACH - 1].v[e]);
            }
        }
    }
}

// Load a lane's elements of a matrix in rows as operand a, for tile m of 16 columns: `rows` has those of the
// next tiles, too.
template <class S, int RIGHT, int WIDE>
__device__ __forceinline__ void fetch_rows(float (&c)[4], Vec<float, WIDE> (&rows)[2], const float* w,
                                           int m) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (m % (WIDE / 2) == 0 && i % 2 == 0)
            rows[i / 2] = load_vec<float, WIDE>(w + i / 2 * (RIGHT == 1 ? 1 : 4) * S::PADDED + m * 16);
        c[i] = rows[i / 2].v[m % (WIDE / 2) * 2 + i % 2];
    }
}

// sums += the products of `count` elements of each fiber: of 16-bit types (PAIRS), in TF32, or of split
// numbers. Tensor cores truncate when they add, so only DEPTH products of split numbers are accumulated
// there: fewer for short sums, where SGEMM errs less, too.
template <class Plan, class S, int RIGHT, bool PAIRS, bool ROUND, int UNROLL, int MS, int NS, int FROM,
          typename In, typename M>
__device__ __forceinline__ void multiply_run(float (&sums)[MS][NS][4], const In* source,
                                             const int (&from)[FROM], const M* w, int count) {
    constexpr bool THREE = Plan::PRODUCTS == 3;
    constexpr int DEPTH = THREE && S::P >= 64 && S::P % 16 == 0 && S::FIBERS <= 32 ? 2 : 1,
                  EACH = PAIRS ? 2 : 1;
    using U = conditional_t<PAIRS, unsigned, float>;
#pragma unroll(UNROLL)
    for (int k0 = 0; k0 < count; k0 += 8 * EACH * DEPTH) {
        U x[DEPTH][NS][2];
        float small_x[DEPTH][NS][2];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
            fetch_fibers<S, RIGHT, EACH, ROUND && !THREE>(x[d], source, from, k0 + 8 * EACH * d);
        if constexpr (THREE)
#pragma unroll
            for (int i = 0; i < DEPTH * NS * 2; ++i)
                split_tf32(x[i / NS / 2][i / 2 % NS][i % 2], x[i / NS / 2][i / 2 % NS][i % 2],
                           small_x[i / NS / 2][i / 2 % NS][i % 2]);
        Vec<float, Lanes4<S, RIGHT>::WIDE> rows[DEPTH][2];
#pragma unroll
        for (int m = 0; m < MS; ++m) {
            float products[NS][4] = {};
#pragma unroll
            for (int d = 0; d < DEPTH; ++d) {
                U c[4];
                float small_c[4];
                const M* at = w + d * (S::PADDED * 8 * EACH);
                if constexpr (Plan::ONCE) load_to<4>(c, reinterpret_cast<const U*>(at + m * 128 * EACH));
                else fetch_rows<S, RIGHT>(c, rows[d], at, m);
                if constexpr (Plan::SPLIT) load_to<4>(small_c, at + high<S, false>() * S::PADDED + m * 128);
                if constexpr (!Plan::ONCE)
#pragma unroll
                    for (int i = 0; i < 4; ++i)
                        if constexpr (THREE) split_tf32(c[i], c[i], small_c[i]);
                        else c[i] = to_tf32(c[i]);
                if constexpr (THREE) {
#pragma unroll
                    for (int n = 0; n < NS; ++n) mma_tf32(products[n], small_c, x[d][n]);
#pragma unroll
                    for (int n = 0; n < NS; ++n) mma_tf32(products[n], c, small_x[d][n]);
                }
#pragma unroll
                for (int n = 0; n < NS; ++n)
                    if constexpr (PAIRS) mma_16_bit<In>(sums[m][n], c, x[d][n]);
                    else mma_tf32(THREE ? products[n] : sums[m][n], c, x[d][n]);
            }
            if constexpr (THREE) add(sums[m], products);
        }
        w += S::PADDED * 8 * EACH * DEPTH;
    }
}

// One step on tensor cores, in TF32, with split numbers or 16-bit types. It computes the transposed product:
// M are the columns of the matrix, N the fibers. P is even if RIGHT is 1. COLUMNS is a multiple of 16. FIBERS
// is a multiple of 8, or of 32 if RIGHT is not 1 but a multiple of 4.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In,
          typename M, typename T, class After>
__device__ __forceinline__ void multiply4_tensor(const In* in, const In* rest, float* tile, const M* w,
                                                 const Global4<T>& global, const After& after) {
    using Lanes = Lanes4<S, RIGHT>;
    constexpr int P = S::P, ALL = LEFT * RIGHT, WIDE = Lanes::WIDE;
    constexpr bool LINEAR = ALL % S::FIBERS == 0 && (RIGHT & (RIGHT - 1)) == 0, PAIRS = in_pairs<S, In, M>(),
                   ONE = Lanes::ONE;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
        row = t * (RIGHT == 1 ? 2 : 1);  // of the matrix
    int f0 = warp / S::GROUPS * S::FIBERS, j0 = warp % S::GROUPS * S::COLUMNS, count = f0 < ALL ? P : 0;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / Lanes::FV], mine = f0 + g % 2 * Lanes::PAIR + Lanes::fiber(g / 2);
#pragma unroll
    for (int i = 0; i < S::FIBERS / Lanes::FV; ++i) {
        if (LINEAR)
            from[i] = S::In::join(S::In::at(index_of<P, RIGHT>(mine, 0)),
                                  S::In::at(index_of<P, RIGHT>(i * Lanes::FV, 0)));
        else from[i] = S::In::at(index_of<P, RIGHT>(min(mine + i * Lanes::FV, ALL - Lanes::LEAST), 0));
        from[i] = S::In::join(from[i], S::In::at((PAIRS ? 2 : 1) * row * RIGHT));
    }
    if (Plan::ONCE) w += (j0 / 16 * 32 + threadIdx.x % 32) * (PAIRS ? 8 : 4);
    else w += row * S::PADDED + ((j0 + g * WIDE) ^ turn<Plan, S, RIGHT>(row));
    float sums[Lanes::MS][Lanes::NS][4] = {};
    // Blocks that are alone on their SM have registers for prefetching.
    constexpr int UNROLL = Plan::PRODUCTS == 3 ? (Plan::THREADS * Plan::BLOCKS == 128 ? 2 : 1)
                           : Plan::BLOCKS == 1 ? 4
                                               : 2;
    multiply_run<Plan, S, RIGHT, PAIRS, (sizeof(In) == 4 && AHEAD < 1 << 30), UNROLL>(sums, source, from, w,
                                                                                      count);
    after();
    constexpr int NS = 2 * Lanes::NS / (ONE ? 1 : 4), MS = 2 * Lanes::MS / (ONE ? WIDE : 1);
    Sums4<Plan, S, Q, RIGHT, Out, LAST>::template store_all<LINEAR, ALL, NS, MS, ONE ? WIDE : 4>(
        tile, global, f0 + Lanes::fiber(t), j0 + g * WIDE,
        [](int n) { return n / 2 * Lanes::FV + n % 2 * Lanes::PAIR; },
        [](int m) { return ONE ? m * 8 * WIDE : m / WIDE * 8 * WIDE + m % WIDE; },
        [&](int n, int m, int e) {
            return ONE ? sums[(m * WIDE + e) / 2][n / 2][e % 2 * 2 + n % 2]
                       : sums[m / 2][n / 2 * 4 + e][m % 2 * 2 + n % 2];
        });
}
