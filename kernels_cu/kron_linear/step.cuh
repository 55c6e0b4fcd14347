// A step of a kron_linear v4 plan, and its computation on the FMA units. See tile.cuh.
#pragma once
#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/ptx/mma.cuh"
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

// One step. On the FMA units a thread has FIBERS x COLUMNS accumulators, and a warp is LANES x (32 / LANES) threads. On tensor cores LANES
// is 1, and a warp has FIBERS x COLUMNS accumulators. PADDED: Q (for step 0, of a slice) rounded up to whole warps. In: the layout of the
// input.
template <int FIBERS_, int COLUMNS_, int LANES_, int PADDED_, class In_, class... Factors>
struct Step4 {
    static constexpr int FIBERS = FIBERS_, COLUMNS = COLUMNS_, LANES = LANES_, PADDED = PADDED_, COUNT = sizeof...(Factors);
    static constexpr int P = (Factors::P * ...), Q = (Factors::Q * ...), GROUPS = PADDED / (LANES == 1 ? COLUMNS : COLUMNS * 32 / LANES);
    static constexpr int FETCHED = FIBERS * LANES * P;  // elements that a warp reads
    using In = In_;

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

// BYTES: size of a copy from global memory. PRODUCTS: products on tensor cores for each product: 1 (TF32 or 16-bit types) or 3 (split
// floats); 0: FMA units. SPLIT: the matrices are split in shared memory. ADDED: with a bias or a residual.
template <int THREADS_, int BLOCKS_, int L_, int R_, long long C_, int BYTES_, int AHEAD_, int SLICES_, int PRODUCTS_, bool SPLIT_,
          bool ADDED_, class... Steps>
struct Plan4 {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, R = R_, BYTES = BYTES_, AHEAD = AHEAD_, SLICES = SLICES_;
    static constexpr int PRODUCTS = PRODUCTS_;
    static constexpr long long C = C_;
    static constexpr bool WHOLE = R == C, TENSOR = PRODUCTS > 0, IN_TF32 = PRODUCTS == 1, SPLIT = SPLIT_,
                          BY_LANES = TENSOR && (IN_TF32 || SPLIT), ADDED = ADDED_;
    static constexpr int P = (Steps::P * ...), Q = (Steps::Q * ...), COUNT = sizeof...(Steps);
    using List = Steps4<Steps...>;
    using Rightmost = typename First<Steps...>::type;
    static constexpr int NUMBERS = L * P * R, COLUMNS = Rightmost::Q / SLICES;  // of a tile; columns per slice in the rightmost step
    static constexpr bool LOCAL = SLICES == 1 && Rightmost::local(NUMBERS, R);  // the first step: each warp copies what it reads
    static constexpr bool REST = AHEAD < NUMBERS;
};

// The outputs of a tile in global memory.
template <typename T>
struct Global4 {
    T* out;
    const T *bias, *residual;
    long long first, features;
    int rows;
    // `one` is 1; the compiler does not know this. Results that are stored as a vector are in consecutive registers. If accumulators
    // themselves were, they would often share a register bank with an operand, and an FMA with two operands in one bank stalls. Multiplying
    // by `one` separates the two.
    compute_t<T> scale, one;
};

// The index of element j of fiber f in an array [left][N][RIGHT].
template <int N, int RIGHT>
__device__ constexpr int spot(int f, int j) {
    return (f / RIGHT * N + j) * RIGHT + f % RIGHT;
}

// Where the results of a step go: element j of fiber f. `place` (shared memory) and `at` (global memory) belong to the thread's first
// result. The others are at constant offsets from it if LINEAR (see below).
template <class Plan, class S, int Q, int RIGHT, class Out, bool LAST>
struct Sums4 {
    int l, place;
    long long at;

    // The row of the output in the tile, in units of C, and the offset in global memory.
    __device__ static constexpr int row(int f, int j) {
        int others = f % RIGHT / Plan::R;
        if (Plan::COUNT > 1) others = others / Plan::COLUMNS * (Plan::COLUMNS * Plan::SLICES) + others % Plan::COLUMNS;
        return f / RIGHT * Plan::Q + j * (Plan::Q / S::Q) + others;
    }
    __device__ static constexpr long long along(int f, int j) { return row(f, j) * Plan::C + f % RIGHT % Plan::R; }

    template <typename T>
    __device__ __forceinline__ void set(int f, int j, const Global4<T>& global) {
        l = f / RIGHT;
        if constexpr (LAST) at = global.first + along(f, j);
        else place = Out::at(spot<Q, RIGHT>(f, j));
    }

    // Store N results from (f, j), relative to the thread's first, on. They are neighbours along j if RIGHT is 1, otherwise along f.
    template <int N, typename F, typename T>
    __device__ __forceinline__ void store(F* tile, const Global4<T>& global, int f, int j, const F (&sums)[N]) const {
        if constexpr (!LAST) {
            Vec<F, N> v;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if constexpr (Plan::IN_TF32) v.v[i] = to_tf32(sums[i]);
                else v.v[i] = sums[i] * global.one;
            }
            store_vec(tile + Out::join(place, Out::at(spot<Q, RIGHT>(f, j))), v);
        } else {
            constexpr int W = Plan::BYTES / sizeof(T), G = Plan::WHOLE ? N : gcd(N, W ? W : 1);
            if (l + f / RIGHT >= global.rows) return;
            long long first = at + along(f, j);
#pragma unroll
            for (int n = 0; n < N; n += G) {
                F part[G];
#pragma unroll
                for (int i = 0; i < G; ++i) {
                    part[i] = sums[n + i] * global.scale;
                    if (Plan::ADDED && global.bias) part[i] += load_as(global.bias[first % global.features + n + i]);
                    if (Plan::ADDED && global.residual) part[i] += load_as(global.residual[first + n + i]);
                }
                store_vec(global.out + first + n, pack<T, G>(part));
            }
        }
    }
};

// One step on the FMA units. AHEAD: the number of elements that are at `in`; the others are at `rest`.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In, typename F, typename M, typename T,
          class After>
__device__ __forceinline__ void multiply4(const In* in, const In* rest, F* tile, const M* w, const Global4<T>& global, const After& after) {
    constexpr int P = S::P, LC = 32 / S::LANES, ALL = LEFT * RIGHT, V = 16 / sizeof(F);
    constexpr int FV = gcd(gcd(RIGHT, S::FIBERS), V), KV = RIGHT == 1 ? gcd(P, 16 / sizeof(In)) : 1, JV = gcd(S::COLUMNS, V);
    constexpr int KC = P <= 16 ? P : gcd(P, 16), QV = gcd(Q, JV), STEP = S::LANES * FV;
    constexpr bool LINEAR = ALL % (S::LANES * S::FIBERS) == 0 && (RIGHT & (RIGHT - 1)) == 0;
    int warp = threadIdx.x / 32, lf = threadIdx.x % 32 % S::LANES, lc = threadIdx.x % 32 / S::LANES;
    int f0 = warp / S::GROUPS * (S::LANES * S::FIBERS), j0 = warp % S::GROUPS * (LC * S::COLUMNS) + lc * JV;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / FV];
#pragma unroll
    for (int i = 0; i < S::FIBERS / FV; ++i) {
        if (LINEAR) from[i] = S::In::join(S::In::at(spot<P, RIGHT>(f0 + lf * FV, 0)), S::In::at(spot<P, RIGHT>(i * STEP, 0)));
        else from[i] = S::In::at(spot<P, RIGHT>(min(f0 + i * STEP + lf * FV, ALL - FV), 0));
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
                if constexpr (KV > 1) {
                    unpack(x[i], load_vec<In, KV>(p));
                } else {
                    Vec<In, FV> v = load_vec<In, FV>(p);
#pragma unroll
                    for (int e = 0; e < FV; ++e) x[i + e][0] = load_as(v.v[e]);
                }
            }
#pragma unroll
            for (int kk = 0; kk < KV; ++kk) {
                F c[S::COLUMNS];
#pragma unroll
                for (int j = 0; j < S::COLUMNS; j += JV) {
                    Vec<M, JV> v = load_vec<M, JV>(w + (k + kk) * S::PADDED + j * LC);
#pragma unroll
                    for (int e = 0; e < JV; ++e) c[j + e] = load_as(v.v[e]);
                }
#pragma unroll
                for (int n = 0; n < S::FIBERS * S::COLUMNS; ++n) {  // back and forth, so that one operand is reused
                    int j = n / S::FIBERS, i = j % 2 ? S::FIBERS - 1 - n % S::FIBERS : n % S::FIBERS;
                    sums[i][j] += x[i][kk] * c[j];
                }
            }
        }
        w += KC * S::PADDED;
    }
    after();
    Sums4<Plan, S, Q, RIGHT, Out, LAST> to;
    to.set(f0 + lf * FV, j0, global);
#pragma unroll
    for (int i = 0; i < S::FIBERS; i += FV) {
        int f = i * S::LANES;
        if (f0 + lf * FV + f >= ALL) continue;
        if (!LINEAR) {
            to.set(f0 + lf * FV + f, j0, global);
            f = 0;
        }
#pragma unroll
        for (int j = 0; j < S::COLUMNS; j += RIGHT == 1 ? QV : 1) {
            int n = j / JV * (JV * LC) + j % JV;
            if (S::PADDED > Q && j0 + n >= Q) continue;
            F part[RIGHT == 1 ? QV : FV];
#pragma unroll
            for (int e = 0; e < (RIGHT == 1 ? QV : FV); ++e) part[e] = RIGHT == 1 ? sums[i][j + e] : sums[i + e][j];
            to.store(tile, global, f, n, part);
        }
    }
}
