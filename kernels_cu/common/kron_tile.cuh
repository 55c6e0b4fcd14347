// What kron_linear v4 does with a tile of the array, from the loads of it and of the factors to the stores of its results.
//
// A group of neighbouring factors a launch, compiled for the factors' sizes and the tile's: every distance is a constant. Factor
// 0 is the rightmost. For the group the array is [A][P][C], and a tile [L][P][R]: L of the A where R is C (WHOLE), else one of
// the A and R of the C, where R divides C. A step sees the tile as [left][P][right] and multiplies it along one index by the
// Kronecker product of one or more neighbouring factors: tiny ones, merged, cost little more and go over the tile once.
//
// A tile arrives in `stage`, as it is stored, by copies that run while the tile before is multiplied; where shared memory does
// not hold two tiles, only the first AHEAD numbers do, and the others come late, to where the results go. Results go to
// `tile`, in float. It has room for one: a step holds all its sums in registers until every thread has read. The rightmost
// factor may be cut into SLICES of its columns, so that several blocks share the work of a tile and none does any twice.
//
// A step is LOCAL where each warp writes what it alone has read. Then warps wait for none but themselves, and while one fetches
// another multiplies; a block's barriers would have all fetch at one time, and all multiply at another.
//
// Everything moves as 16 bytes. A Layout puts a unit of 16 bytes, u, at u ^ (u >> S & M) ^ (u >> S2 & M2), so that the lanes
// which one access serves meet different banks; that is linear in the bits of u, so where all sizes are powers of two the
// place of a sum is the "sum", by exclusive or, of places. (Where they are not, nothing is moved.)
#pragma once
#include "math.cuh"
#include "pack.cuh"
#include "vec.cuh"

constexpr int MOST = 8;  // factors in a launch

template <int S, int M, int S2, int M2, int V>
struct Layout {
    __device__ static constexpr int at(int e) { return e ^ (e >> S & M * V) ^ (e >> S2 & M2 * V); }
    // The place of a + b, from that of a, and from that of b, a constant.
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

// One step. A thread has FIBERS x COLUMNS sums, a warp LANES x 32 / LANES threads; on tensor cores, LANES being 1,
// a warp has FIBERS x COLUMNS.
// PADDED is Q, of a slice for step 0, rounded up to whole warps. In: the layout of what it reads.
template <int FIBERS_, int COLUMNS_, int LANES_, int PADDED_, class In_, class... Factors>
struct Step4 {
    static constexpr int FIBERS = FIBERS_, COLUMNS = COLUMNS_, LANES = LANES_, PADDED = PADDED_, COUNT = sizeof...(Factors);
    static constexpr int P = (Factors::P * ...), Q = (Factors::Q * ...), GROUPS = PADDED / (LANES == 1 ? COLUMNS : COLUMNS * 32 / LANES);
    static constexpr int FETCHED = FIBERS * LANES * P;  // by a warp
    using In = In_;

    // Whether each warp writes what it alone has read.
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

// BYTES: of a copy from memory. PRODUCTS: for each product that many on tensor cores: 1, in TF32 or of 16-bit numbers, or 3, of floats that
// are split; or 0, on the FMA units. SPLIT: the matrices lie split in shared memory. ADDED: with a bias or a residual.
template <int THREADS_, int BLOCKS_, int L_, int R_, long long C_, int BYTES_, int AHEAD_, int SLICES_, int PRODUCTS_, bool SPLIT_, bool ADDED_, class... Steps>
struct Plan4 {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, R = R_, BYTES = BYTES_, AHEAD = AHEAD_, SLICES = SLICES_;
    static constexpr int PRODUCTS = PRODUCTS_;
    static constexpr long long C = C_;
    static constexpr bool WHOLE = R == C, TENSOR = PRODUCTS > 0, IN_TF32 = PRODUCTS == 1, SPLIT = SPLIT_, BY_LANES = TENSOR && (IN_TF32 || SPLIT), ADDED = ADDED_;
    static constexpr int P = (Steps::P * ...), Q = (Steps::Q * ...), COUNT = sizeof...(Steps);
    using List = Steps4<Steps...>;
    using Rightmost = typename First<Steps...>::type;
    static constexpr int NUMBERS = L * P * R, COLUMNS = Rightmost::Q / SLICES;  // of a tile; of the rightmost step in a slice
    static constexpr bool LOCAL = SLICES == 1 && Rightmost::local(NUMBERS, R);  // the first step: each warp copies what it reads
    static constexpr bool REST = AHEAD < NUMBERS;
};

// Where the outputs of a tile go.
template <typename T>
struct Global4 {
    T* out;
    const T *bias, *residual;
    long long first, features;
    int rows;
    // One: what is stored as a vector lies in consecutive registers, and sums that do would often be in the bank of an operand: an
    // FMA that fetches two values from one of the two banks waits. The compiler does not know that the product is the sum itself.
    compute_t<T> scale, one;
};

// Number j of fiber f of an array [left][N][RIGHT].
template <int N, int RIGHT>
__device__ constexpr int spot(int f, int j) {
    return (f / RIGHT * N + j) * RIGHT + f % RIGHT;
}

// Where a step's sums go: number j of fiber f. `place` and `at` are those of the thread's first sum; the others are a constant away,
// unless the fibers do not come in a step's whole pieces (see LINEAR below).
template <class Plan, class S, int Q, int RIGHT, class Out, bool LAST>
struct Sums4 {
    int l, place;
    long long at;

    // In the outputs of the tile, in units of C, and along it.
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

    // Store N sums, neighbours along j where RIGHT is 1, else along f, from (f, j) after the thread's first on.
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

// Whether a step multiplies 16-bit numbers as they are, with no conversion: the first one, if its matrix is a factor.
template <class S, typename In, typename M>
__device__ constexpr bool in_pairs() {
    return sizeof(In) == 2 && sizeof(M) == 2 && S::P % 16 == 0;
}
template <typename T>
__device__ __forceinline__ unsigned pair_of(T a, T b) {
    Vec<T, 2> pair = {a, b};
    return *reinterpret_cast<unsigned*>(&pair);
}
__device__ __forceinline__ void mma_16_bit(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) { mma_f16(d, a, b); }
__device__ __forceinline__ void mma_16_bit(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) { mma_bf16(d, a, b); }
template <typename T>
__device__ __forceinline__ void mma_16_bit(float (&)[4], const unsigned (&)[4], const unsigned (&)[2], T) {}  // never called

// What a row of a step's matrix is turned by in shared memory, for lanes of tensor cores that fetch from 4 rows to meet different banks.
template <class Plan, class S, int RIGHT>
__device__ constexpr int turn(int k) {
    return Plan::TENSOR && S::PADDED % 32 == 0 && S::COLUMNS % 32 == 0 ? (RIGHT == 1 ? k / 2 : k) % 4 * 8 : 0;
}

// The place of number [k][j] of a step's matrix in shared memory: row by row, or (BY_LANES) as the lanes of mma_tf32, or of mma_f16
// (PAIRS), fetch it as operand a, whose rows are the matrix's columns: a lane's are neighbours, WIDE of them, and so are its k where a
// fiber's numbers are.
template <class Plan, class S, bool PAIRS, int RIGHT>
__device__ __forceinline__ int place_of(int k, int j) {
    if constexpr (!Plan::BY_LANES) return k * S::PADDED + (j ^ turn<Plan, S, RIGHT>(k));
    constexpr int WIDE = gcd(S::COLUMNS / 8, 4), K = PAIRS ? 2 : 1;
    int t = RIGHT == 1 ? k % (8 * K) / (2 * K) : k % (4 * K) / K, h = RIGHT == 1 ? k % (2 * K) / K : k % (8 * K) / (4 * K);
    int m = j / (8 * WIDE) * (WIDE / 2) + j % WIDE / 2;
    return (((k / (8 * K) * (S::PADDED / 16) + m) * 32 + j / WIDE % 8 * 4 + t) * 4 + h * 2 + j % 2) * K + k % K;
}

// One step on the FMA units. AHEAD: how many numbers lie at `in`, the others at `rest`.
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
                constexpr int OUTER = S::COLUMNS, INNER = S::FIBERS * S::COLUMNS / OUTER;
#pragma unroll
                for (int n = 0; n < OUTER * INNER; ++n) {  // to and fro, so that one operand always stays
                    int outer = n / INNER, inner = outer % 2 ? INNER - 1 - n % INNER : n % INNER;
                    int i = inner, j = outer;
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

// sums += c x, of 8 DEPTH numbers along k. Tensor cores cut what they add: few products begin at zero, and floats are added to the sums.
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

// One step on tensor cores, in TF32, of split numbers or of 16-bit numbers: the transposed product, of the matrix's columns (M) and the
// fibers (N). P is a multiple of 8, COLUMNS of 16, FIBERS of 8, or of 32 where RIGHT is not 1 but a multiple of 4.
//
// Two fibers that mma_tf32 has side by side, 2 t and 2 t + 1, are neighbours where RIGHT is 1. Else a lane has 4 neighbours, of 4 products,
// the two are PAIR apart, and four lanes' t are neighbours as far as RIGHT goes, so that what they store together are whole sectors.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In, typename M, typename T, class After>
__device__ __forceinline__ void multiply4_tensor(const In* in, const In* rest, float* tile, const M* w, const Global4<T>& global,
                                                 const After& after) {
    constexpr int P = S::P, ALL = LEFT * RIGHT, WIDE = gcd(S::COLUMNS / 8, 4), MS = S::COLUMNS / 16, NS = S::FIBERS / 8;
    constexpr bool ONE = RIGHT == 1, LINEAR = ALL % S::FIBERS == 0 && (RIGHT & (RIGHT - 1)) == 0;
    constexpr bool PAIRS = in_pairs<S, In, M>();
    constexpr int FV = ONE ? 8 : 32, LEAST = ONE ? 1 : 4, K = PAIRS ? 2 : 1, PAIR = ONE ? 1 : RIGHT >= 32 ? 16 : RIGHT >= 16 ? 8 : 4;
    auto fiber = [](int t) { return ONE ? 2 * t : PAIR == 16 ? 4 * t : PAIR == 8 ? t % 2 * 4 + t / 2 * 16 : 8 * t; };
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int f0 = warp / S::GROUPS * S::FIBERS, j0 = warp % S::GROUPS * S::COLUMNS;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / FV], mine = f0 + g % 2 * PAIR + fiber(g / 2);
#pragma unroll
    for (int i = 0; i < S::FIBERS / FV; ++i) {
        if (LINEAR) from[i] = S::In::join(S::In::at(spot<P, RIGHT>(mine, 0)), S::In::at(spot<P, RIGHT>(i * FV, 0)));
        else from[i] = S::In::at(spot<P, RIGHT>(min(mine + i * FV, ALL - LEAST), 0));
        from[i] = S::In::join(from[i], S::In::at(K * t * (ONE ? 2 : RIGHT)));
    }
    float sums[MS][NS][4] = {};
    if constexpr (PAIRS) {
        w += (j0 / 16 * 32 + threadIdx.x % 32) * 8;
#pragma unroll 2
        for (int k0 = 0; k0 < (f0 < ALL ? P : 0); k0 += 16) {
            unsigned x[NS][2], c[MS][4];
#pragma unroll
            for (int i = 0; i < S::FIBERS / FV; ++i) {
                int at = S::In::join(from[i], S::In::at(k0 * RIGHT));
                if constexpr (ONE) {
                    Vec<In, 4> v = load_vec<In, 4>(source + at);
                    x[i][0] = pair_of(v.v[0], v.v[1]);
                    x[i][1] = pair_of(v.v[2], v.v[3]);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        Vec<In, 4> even = load_vec<In, 4>(source + S::In::join(at, S::In::at(8 * h * RIGHT)));
                        Vec<In, 4> odd = load_vec<In, 4>(source + S::In::join(at, S::In::at((8 * h + 1) * RIGHT)));
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
    } else {
        auto number = [](In v) { return Plan::IN_TF32 && sizeof(In) == 4 && AHEAD < (1 << 30) ? to_tf32(load_as(v)) : load_as(v); };
        auto fetch = [&](float(&x)[NS][2], int k) {
#pragma unroll
            for (int i = 0; i < S::FIBERS / FV; ++i) {
                int at = S::In::join(from[i], S::In::at(k * RIGHT));
                if constexpr (ONE) {
                    Vec<In, 2> v = load_vec<In, 2>(source + at);
                    x[i][0] = number(v.v[0]);
                    x[i][1] = number(v.v[1]);
                } else {
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        Vec<In, 4> v = load_vec<In, 4>(source + S::In::join(at, S::In::at(4 * h * RIGHT)));
#pragma unroll
                        for (int e = 0; e < 4; ++e) x[i * 4 + e][h] = number(v.v[e]);
                    }
                }
            }
        };
        w += Plan::BY_LANES ? (j0 / 16 * 32 + threadIdx.x % 32) * 4 : (ONE ? 2 : 1) * t * S::PADDED + ((j0 + g * WIDE) ^ turn<Plan, S, RIGHT>((ONE ? 2 : 1) * t));
        if constexpr (Plan::PRODUCTS == 3) {
            constexpr int DEPTH = P >= 64 && P % 16 == 0 && S::FIBERS <= 32 ? 2 : 1;  // the fewer numbers are added, the less SGEMM errs
#pragma unroll 1
            for (int k0 = 0; k0 < (f0 < ALL ? P : 0); k0 += 8 * DEPTH) {
                float x[DEPTH][NS][2];
#pragma unroll
                for (int d = 0; d < DEPTH; ++d) fetch(x[d], k0 + 8 * d);
                Vec<M, WIDE> rows[DEPTH][2];
                multiply_split<MS>(sums, x, [&](float(&c)[4], float(&small)[4], int d, int m) {
                    if constexpr (Plan::SPLIT) {
                        unpack(c, load_vec<M, 4>(w + d * (S::PADDED * 8) + m * 128));
                        unpack(small, load_vec<M, 4>(w + (P + d * 8) * S::PADDED + m * 128));
                    } else {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            if (m % (WIDE / 2) == 0 && i % 2 == 0)
                                rows[d][i / 2] = load_vec<M, WIDE>(w + (d * 8 + i / 2 * (ONE ? 1 : 4)) * S::PADDED + m * 16);
                            split_tf32(rows[d][i / 2].v[m % (WIDE / 2) * 2 + i % 2], c[i], small[i]);
                        }
                    }
                });
                w += S::PADDED * 8 * DEPTH;
            }
        } else {
#pragma unroll 2
            for (int k0 = 0; k0 < (f0 < ALL ? P : 0); k0 += 8) {
                float x[NS][2], c[MS][4];
                fetch(x, k0);
#pragma unroll
                for (int m = 0; m < MS; ++m) unpack(c[m], load_vec<M, 4>(w + m * 128));
                w += S::PADDED * 8;
#pragma unroll
                for (int m = 0; m < MS; ++m)
#pragma unroll
                    for (int n = 0; n < NS; ++n) mma_tf32(sums[m][n], c[m], x[n]);
            }
        }
    }
    after();
    Sums4<Plan, S, Q, RIGHT, Out, LAST> to;
    int f1 = f0 + fiber(t), j1 = j0 + g * WIDE;
    to.set(f1, j1, global);
    constexpr int SIDE = ONE ? WIDE : 4;
#pragma unroll
    for (int n = 0; n < 2 * NS / (ONE ? 1 : 4); ++n) {
        int f = ONE ? n / 2 * 8 + n % 2 : n / 2 * 32 + n % 2 * PAIR;
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

// The group's factors, as views.
template <typename T>
struct Factors4 {
    const T* at[MOST];
    long long p[MOST], q[MOST];  // distances between rows, between columns
};

// Number [k][j] of the Kronecker product of factors N, N + 1, .. of which the first is the rightmost.
template <int N, class Factor, class... Others, typename T>
__device__ __forceinline__ compute_t<T> element(const Factors4<T>& factors, int k, int j) {
    compute_t<T> value = load_as(factors.at[N][k % Factor::P * factors.p[N] + j % Factor::Q * factors.q[N]]);
    if constexpr (sizeof...(Others)) value *= element<N + 1, Others...>(factors, k / Factor::P, j / Factor::Q);
    return value;
}

// A step's matrix in shared memory: numbers as the factor has them, but products of merged ones as they are computed, and what tensor cores
// take as floats converted once.
template <class Plan, bool FIRST, typename T, class S>
using matrix_t = conditional_t<S::COUNT == 1 && (!Plan::TENSOR || (FIRST && in_pairs<S, T, T>())), T, compute_t<T>>;

template <class Plan, bool FIRST, typename T, class S>
__device__ constexpr int matrix_bytes() {
    return (S::P * S::PADDED * sizeof(matrix_t<Plan, FIRST, T, S>) + 15) / 16 * 16 * (Plan::SPLIT ? 2 : 1);
}
template <class Plan, typename T, class S, class... Others>
__device__ constexpr int matrices_bytes(Steps4<S, Others...>) {
    return matrix_bytes<Plan, true, T, S>() + (0 + ... + matrix_bytes<Plan, false, T, Others>());
}

// f(row, column) of ROWS x COLUMNS, by all threads of a block; the column stays, where it can.
template <int ROWS, int COLUMNS, int THREADS, class F>
__device__ __forceinline__ void share(const F& f) {
    if constexpr (THREADS % COLUMNS == 0) {
#pragma unroll 8
        for (int row = threadIdx.x / COLUMNS; row < ROWS; row += THREADS / COLUMNS) f(row, threadIdx.x % COLUMNS);
    } else {
#pragma unroll 8
        for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) f(e / COLUMNS, e % COLUMNS);
    }
}

// Numbers of a step's matrix to their place; their small parts lie `apart`.
template <class Plan, typename M, int N>
__device__ __forceinline__ void put(M* to, Vec<M, N> numbers, int apart) {
    if constexpr (Plan::SPLIT) {
        Vec<M, N> small;
#pragma unroll
        for (int e = 0; e < N; ++e) split_tf32(numbers.v[e], numbers.v[e], small.v[e]);
        store_vec(to + apart, small);
    } else if constexpr (Plan::IN_TF32 && sizeof(M) == 4) {
#pragma unroll
        for (int e = 0; e < N; ++e) numbers.v[e] = to_tf32(numbers.v[e]);
    }
    store_vec(to, numbers);
}

// Copy a step's matrix, COLUMNS from the first on, to shared memory, with zeros beyond: 16 bytes at once along whichever of its
// dimensions is contiguous.
template <class Plan, int N, int RIGHT, int COLUMNS, typename T, int F, int C, int L, int PADDED, class In, class... Factors>
__device__ __forceinline__ void load_matrix(char* matrix, const Factors4<T>& factors, int first, Step4<F, C, L, PADDED, In, Factors...>) {
    using S = Step4<F, C, L, PADDED, In, Factors...>;
    using M = matrix_t<Plan, N == 0, T, S>;
    M* to = reinterpret_cast<M*>(matrix);
    constexpr bool PAIRS = N == 0 && in_pairs<S, T, M>();
    constexpr int U = 16 / sizeof(T), P = S::P, K = PAIRS ? 2 : 1, THREADS = Plan::THREADS;
    constexpr bool BY_ROWS = S::COUNT == 1 && COLUMNS % U == 0 && (Plan::TENSOR || PADDED % U == 0), BY_COLUMNS = S::COUNT == 1 && P % U == 0;
    auto place = [](int k, int j) { return place_of<Plan, S, PAIRS, RIGHT>(k, j); };
    auto put_one = [&](int k, int j, M value) { put<Plan>(to + place(k, j), Vec<M, 1>{value}, P * PADDED); };
    long long p = factors.p[N], q = factors.q[N];
    const T* from = factors.at[N] + first * q;
    bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
    if (BY_ROWS && q == 1 && p % U == 0 && aligned) {
        if constexpr (BY_ROWS && !Plan::BY_LANES) {
            share<P, COLUMNS / U, THREADS>([&](int k, int i) { cp_async_16(shared_address(to + place(k, i * U)), from + k * p + i * U); });
        } else if constexpr (BY_ROWS) {  // what neighbouring lanes store is contiguous: of all k that an mma takes
            share<P / (8 * K), COLUMNS / U * 8, THREADS>([&](int block, int i) {
                int k = i % 8 * K, j = i / 8 * U;
                Vec<T, U> rows[K];
#pragma unroll
                for (int r = 0; r < K; ++r) rows[r] = load_vec<T, U>(from + (block * (8 * K) + k + r) * p + j);
#pragma unroll
                for (int u = 0; u < U; u += 2) {
                    Vec<M, 2 * K> numbers;
#pragma unroll
                    for (int e = 0; e < 2 * K; ++e) numbers.v[e] = M(rows[e % K].v[u + e / K]);
                    put<Plan>(to + block * (8 * K * PADDED) + place(k, j + u), numbers, P * PADDED);
                }
            });
        }
    } else if (BY_COLUMNS && p == 1 && q % U == 0 && aligned) {
        if constexpr (BY_COLUMNS)
            share<P / U, COLUMNS, THREADS>([&](int i, int j) {
                Vec<T, U> v = load_vec<T, U>(from + i * U + j * q);
#pragma unroll
                for (int u = 0; u < U; ++u) put_one(i * U + u, j, M(v.v[u]));
            });
    } else {
        share<P, COLUMNS, THREADS>([&](int k, int j) {
            if constexpr (S::COUNT == 1) put_one(k, j, from[k * p + j * q]);
            else put_one(k, j, element<N, Factors...>(factors, k, first + j));
        });
    }
    if constexpr (PADDED > COLUMNS) share<P, PADDED - COLUMNS, THREADS>([&](int k, int j) { put_one(k, COLUMNS + j, M(0.0f)); });
}

// The matrices of the steps from factor N on.
template <class Plan, int N, int RIGHT, typename T, class S, class... Others>
__device__ __forceinline__ void load_matrices(char* to, const Factors4<T>& factors, int slice, Steps4<S, Others...>) {
    constexpr int COLUMNS = N == 0 ? Plan::COLUMNS : S::Q;
    load_matrix<Plan, N, RIGHT, COLUMNS>(to, factors, N == 0 ? slice * COLUMNS : 0, S());
    if constexpr (N == 0) cp_async_commit();  // step 0 waits for these, and for its tile, alone
    if constexpr (sizeof...(Others))
        load_matrices<Plan, N + S::COUNT, RIGHT * COLUMNS>(to + matrix_bytes<Plan, N == 0, T, S>(), factors, slice, Steps4<Others...>());
}

// Numbers BEGIN to END of a tile, in the background, and zeros to the end of a unit.
template <class Plan, int BEGIN, int END, class In, typename T>
__device__ __forceinline__ void load_tile4(T* to, const T* x, int rows) {
    constexpr int W = Plan::BYTES / sizeof(T), UNIT = 16 / sizeof(T), OWN = Plan::LOCAL ? Plan::Rightmost::FETCHED : END - BEGIN;
    int thread = Plan::LOCAL ? threadIdx.x % 32 : threadIdx.x, threads = Plan::LOCAL ? 32 : Plan::THREADS;
    int begin = Plan::LOCAL ? threadIdx.x / 32 * OWN : BEGIN, end = begin + OWN;
    if (Plan::LOCAL && (begin < BEGIN || begin >= END)) return;
    for (int e = begin + thread * W; e < (end + UNIT - 1) / UNIT * UNIT; e += threads * W) {
        const T* from = x + e / Plan::R * Plan::C + e % Plan::R;
        bool in = e < (Plan::WHOLE && rows < Plan::L ? min(rows * (Plan::P * Plan::R), end) : end);
        if constexpr (Plan::BYTES == 16) cp_async_16(shared_address(to + In::at(e)), from, in);
        else if constexpr (Plan::BYTES >= 4) cp_async<Plan::BYTES>(shared_address(to + In::at(e)), from, in);
        else to[In::at(e)] = in ? *from : T(0.0f);
    }
}

// The steps from S on, of which `in` and `rest`, from number AHEAD on, are the input. LEFT and RIGHT are those of S. `after` and
// `late`: what to do when the first and the last step's input has been read.
template <class Plan, bool FIRST, int LEFT, int RIGHT, typename In, typename F, typename T, class After, class Late, class S, class... Others>
__device__ __forceinline__ void run4(const In* in, const In* rest, F* tile, const char* matrices, const Global4<T>& global,
                                     const After& after, const Late& late, Steps4<S, Others...>) {
    constexpr bool LAST = sizeof...(Others) == 0;
    constexpr int Q = FIRST ? Plan::COLUMNS : S::Q, AHEAD = !FIRST ? 1 << 30 : Plan::REST ? Plan::AHEAD : LEFT * S::P * RIGHT;
    constexpr bool LOCAL = S::local(LEFT * S::P * RIGHT, RIGHT) && (!FIRST || Plan::LOCAL);
    using Next = typename First<Others..., S>::type;
    using Out = typename Next::In;
    auto have_read = [&] {
        if constexpr (FIRST) after();
        else if constexpr (LAST && Plan::REST) late();
        else if constexpr (LOCAL && (!LAST || S::FETCHED == Plan::Rightmost::FETCHED)) __syncwarp();
        else if constexpr (!LAST || Plan::LOCAL) __syncthreads();
    };
    const auto* w = reinterpret_cast<const matrix_t<Plan, FIRST, T, S>*>(matrices);
    if constexpr (Plan::TENSOR) multiply4_tensor<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    else multiply4<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    if constexpr (!LAST) {
        constexpr int NEXT = LEFT / Next::P;
        if constexpr (FIRST && !Plan::LOCAL) cp_async_wait<1>();  // for the other steps' matrices
        if constexpr (LOCAL && Next::local(NEXT * Next::P * RIGHT * Q, RIGHT * Q) && Next::FETCHED == S::FETCHED) __syncwarp();
        else __syncthreads();
        run4<Plan, false, NEXT, RIGHT * Q>(tile, tile, tile, matrices + matrix_bytes<Plan, FIRST, T, S>(), global, after, late, Steps4<Others...>());
    }
}
