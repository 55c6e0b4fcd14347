// y = x (W1 (x) W2 (x) .. (x) Wn), a linear layer whose matrix is a Kronecker product that nobody ever forms.
//
// A row of x is an n-dimensional array of p_1 x .. x p_n numbers, the last index fastest, and factor i multiplies along
// index i: a "mode product". Mode products of different indices commute, so a layer is n of them in any order. Each sees
// the array as [A][p][C]: A is everything before the index (the rows of x too), C everything after it, and a "fiber" is
// the p numbers x[a][.][c], C apart:
//     out[a][j][c] = sum over k of x[a][k][c] * w[k][j].
// No array is ever transposed. 16-bit types are multiplied and added in float.
//
//  version  idea
//  v3       a factor a launch: a GEMM whose rows are fibers, read from and written to their places
//  v4       a group of neighbouring factors a launch: a tile of the array stays in shared memory from the first to the last;
//           compiled for the factors' sizes, with 16-bit types (and TF32) on tensor cores
//
// Microseconds on one H200: forward; in parentheses forward and backward together.
//     rows x factors        float: v2       v3    v4            bfloat16: v2    v4
//     32 x (128, 128)       16 (60)         46    10.6 (60)     6.8 (33)        8.5 (43)
//     1024 x 8^5            1308 (4588)     1636  107 (1168)    771 (2102)      115 (853)
//     16 x 8^7              1832 (6152)     2308  157 (1794)    1075 (2699)     168 (1379)
//     1024 x 16^4           1351 (4663)     4950  312 (2009)    533 (1833)      259 (1342)
//     1024 x 32^3           380 (1876)      1500  180 (1008)    133 (604)       90 (535)
//     16 x 64^3             60 (221)        158   50 (248)      19 (79)         28 (143)
//     1024 x (64, 64)       41 (171)        108   32 (149)      13 (77)         17 (82)
//     1024 x (128, 128)     235 (804)       806   226 (862)     41 (237)        75 (249)
//     4096 x (32, 32)       34 (178)        119   21 (117)      14 (81)         12 (69)
//     16 x 2^16             605 (2540)      356   14.3 (1580)   415 (2272)      14 (2304)
// What made v4 fast, in float: the sizes at compile time (1024 x 8^5 from 299 to 143 us), warps that wait for none but themselves
// (130), copies past L1 and the distance C at compile time (113), the late loads before the stores (107). What did not: 8 x 16 sums
// a thread; two slices of a row of 8^5. Its backward's time goes to the gradients of the factors, at half the speed of the FMA units.
//
// (v1 and v2 are torch's own operations.) A factor is a view of any strides: its transpose, for the backward, is the
// same memory. With S samples that have a factor each, A is the same for all of them. Offsets are 64-bit.

#include "common/math.cuh"
#include "common/pack.cuh"
#include "common/vec.cuh"

constexpr int THREADS = 256;

// Where fiber f begins in an array [A][n][C], for f = a * C + c.
__device__ __forceinline__ long long fiber_offset(long long f, int n, long long C) {
    return C == 1 ? f * n : f / C * n * C + f % C;
}

// y = scale * product + bias + residual, rounded once, at out[i]. bias and residual may be null pointers.
template <typename T>
__device__ __forceinline__ void store_result(T* out, const T* bias, const T* residual, long long i, compute_t<T> sum,
                                             compute_t<T> scale) {
    sum *= scale;
    if (bias) sum += load_as(bias[i]);
    if (residual) sum += load_as(residual[i]);
    out[i] = T(sum);
}

// ------------------------------------------------------------------------------------------------------------ v3
//
// A block computes BN columns j of 4096 / BN fibers, a thread 4 x 4 of them. Neighbouring threads are neighbours in
// memory: along c, or along k and j where C is 1.
template <int BN>
struct Tile3 {
    static constexpr int BM = 4096 / BN, BK = BN < 16 ? 8 : 16, TN = BN / 4, TM = BM / 4;
};

// out [S][A][q][C], x [S][A][p][C], w [S][p][q]. Grid S * ceil(A * C / BM) * ceil(q / BN), block 256.
template <typename T, int BN>
__global__ void __launch_bounds__(THREADS)
kron_linear_v3(T* out, const T* x, const T* w, const T* bias, const T* residual, long long A, int p, int q, long long C,
               long long w_s, long long w_p, long long w_q, double scale, long long features) {
    using S = Tile3<BN>;
    using F = compute_t<T>;
    __shared__ F xs[S::BK][S::BM + 1], ws[S::BK][BN + 1];
    __shared__ long long places[S::BM];
    long long fibers = A * C, tiles_m = (fibers + S::BM - 1) / S::BM, block = blockIdx.x;
    int tiles_n = (q + BN - 1) / BN, n0 = block % tiles_n * BN;
    long long m0 = block / tiles_n % tiles_m * S::BM, sample = block / tiles_n / tiles_m;
    x += sample * fibers * p;
    w += sample * w_s;
    bool along_k = C == 1;
    int t = threadIdx.x, tn = along_k ? t % S::TN : t / S::TM, tm = along_k ? t / S::TN : t % S::TM;
    for (int i = t; i < S::BM; i += THREADS) places[i] = m0 + i < fibers ? fiber_offset(m0 + i, p, C) : -1;
    __syncthreads();

    F sums[4][4] = {};
    for (int k0 = 0; k0 < p; k0 += S::BK) {
        for (int e = t; e < S::BM * S::BK; e += THREADS) {
            int m = along_k ? e / S::BK : e % S::BM, k = along_k ? e % S::BK : e / S::BM;
            bool in = places[m] >= 0 && k0 + k < p;
            xs[k][m] = in ? load_as(x[places[m] + (k0 + k) * C]) : F(0);
        }
        for (int e = t; e < BN * S::BK; e += THREADS) {
            int n = e % BN, k = e / BN;
            bool in = n0 + n < q && k0 + k < p;
            ws[k][n] = in ? load_as(w[(k0 + k) * w_p + (n0 + n) * w_q]) : F(0);
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < S::BK; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[i][j] += xs[k][tm + S::TM * i] * ws[k][tn + S::TN * j];
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        long long f = m0 + tm + S::TM * i;
        if (f >= fibers) continue;
        long long first = sample * fibers * q + fiber_offset(f, q, C);
        const T* b = bias ? bias + first % features : nullptr;  // bias has `features` elements, one for each output of a row
        const T* r = residual ? residual + first : nullptr;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = n0 + tn + S::TN * j;
            if (n < q) store_result(out + first, b, r, n * C, sums[i][j], F(scale));
        }
    }
}

// The gradient of a factor: partials[sample][piece][k][j] = sum over the piece's fibers of x[a][k][c] * g[a][j][c],
// where g is [S][A][q][C]. The block of a piece computes BT x BT of them; (BT / 4)^2 threads, of 4 x 4 each, go over
// every GROUPS-th fiber of a chunk, and the groups' sums are added at the end, always in the same order.
// Acc is compute_t<T>. Grid S * pieces * ceil(p / BT) * ceil(q / BT), block 256.
template <typename T, typename Acc, int BT>
__global__ void __launch_bounds__(THREADS, 1)
kron_linear_v3_bwd(Acc* partials, const T* x, const T* g, long long A, int p, int q, long long C, long long pieces,
                   long long piece) {
    constexpr int SIDE = BT / 4, GROUP = SIDE * SIDE, GROUPS = THREADS / GROUP, CHUNK = GROUPS < 16 ? 16 : GROUPS;
    constexpr int LD = BT + 1, TILES = 2 * CHUNK * LD, SUMS = GROUPS > 1 ? THREADS * 16 : 0;
    __shared__ Acc shared[TILES > SUMS ? TILES : SUMS];
    __shared__ long long x_places[CHUNK], g_places[CHUNK];
    Acc *xs = shared, *gs = shared + CHUNK * LD;
    int tiles_p = (p + BT - 1) / BT, tiles_q = (q + BT - 1) / BT;
    long long block = blockIdx.x, fibers = A * C;
    int j0 = block % tiles_q * BT, k0 = block / tiles_q % tiles_p * BT;
    long long number = block / tiles_q / tiles_p % pieces, sample = block / tiles_q / tiles_p / pieces;
    long long begin = number * piece, end = begin + piece < fibers ? begin + piece : fibers;
    x += sample * fibers * p;
    g += sample * fibers * q;
    int t = threadIdx.x, group = t / GROUP, tk = t % GROUP / SIDE, tj = t % SIDE;

    Acc sums[4][4] = {};
    for (long long f0 = begin; f0 < end; f0 += CHUNK) {
        for (int i = t; i < CHUNK; i += THREADS) {
            bool in = f0 + i < end;
            x_places[i] = in ? fiber_offset(f0 + i, p, C) : -1;
            g_places[i] = in ? fiber_offset(f0 + i, q, C) : -1;
        }
        __syncthreads();
        for (int e = t; e < CHUNK * BT; e += THREADS) {
            int i = C == 1 ? e / BT : e % CHUNK, n = C == 1 ? e % BT : e / CHUNK;
            bool in = x_places[i] >= 0;
            xs[i * LD + n] = in && k0 + n < p ? load_as(x[x_places[i] + (k0 + n) * C]) : Acc(0);
            gs[i * LD + n] = in && j0 + n < q ? load_as(g[g_places[i] + (j0 + n) * C]) : Acc(0);
        }
        __syncthreads();
#pragma unroll 2
        for (int i = group; i < CHUNK; i += GROUPS)
#pragma unroll
            for (int k = 0; k < 4; ++k)
#pragma unroll
                for (int j = 0; j < 4; ++j) sums[k][j] += xs[i * LD + tk + SIDE * k] * gs[i * LD + tj + SIDE * j];
        __syncthreads();
    }
    partials += (sample * pieces + number) * p * q;
    if (GROUPS > 1) {
#pragma unroll
        for (int e = 0; e < 16; ++e) shared[group * BT * BT + (tk + SIDE * (e / 4)) * BT + tj + SIDE * (e % 4)] = sums[e / 4][e % 4];
        __syncthreads();
        for (int e = t; e < BT * BT; e += THREADS) {
            Acc sum = 0;
            for (int i = 0; i < GROUPS; ++i) sum += shared[i * BT * BT + e];
            int k = k0 + e / BT, j = j0 + e % BT;
            if (k < p && j < q) partials[(long long)k * q + j] = sum;
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 16; ++e) {
        int k = k0 + tk + SIDE * (e / 4), j = j0 + tj + SIDE * (e % 4);
        if (k < p && j < q) partials[(long long)k * q + j] = sums[e / 4][e % 4];
    }
}

// out[sample][i] = scale * sum over the pieces of partials[sample][piece][i], i < n, always in the same order.
// Grid S * ceil(n / 32), block (32, 8).
template <typename T, typename Acc>
__global__ void kron_linear_v3_sum(T* out, const Acc* partials, int n, long long pieces, double scale) {
    __shared__ Acc sums[8][32];
    int tiles = (n + 31) / 32, i = blockIdx.x % tiles * 32 + threadIdx.x;
    long long sample = blockIdx.x / tiles;
    Acc sum = 0;
    if (i < n)
        for (long long piece = threadIdx.y; piece < pieces; piece += 8) sum += partials[(sample * pieces + piece) * n + i];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || i >= n) return;
#pragma unroll
    for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
    out[sample * n + i] = T(sum * Acc(scale));
}

// ------------------------------------------------------------------------------------------------------------ v4
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

// BYTES: of a copy from memory. TENSOR: multiplied in TF32, on tensor cores. ADDED: with a bias or a residual.
template <int THREADS_, int BLOCKS_, int L_, int R_, long long C_, int BYTES_, int AHEAD_, int SLICES_, bool TENSOR_, bool ADDED_, class... Steps>
struct Plan4 {
    static constexpr int THREADS = THREADS_, BLOCKS = BLOCKS_, L = L_, R = R_, BYTES = BYTES_, AHEAD = AHEAD_, SLICES = SLICES_;
    static constexpr long long C = C_;
    static constexpr bool WHOLE = R == C, TENSOR = TENSOR_, ADDED = ADDED_;
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
                if constexpr (Plan::TENSOR) v.v[i] = to_tf32(sums[i]);
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

// The place of number [k][j] of a step's matrix in shared memory: row by row, or as the lanes of mma_tf32, or of mma_f16 (PAIRS), fetch
// it as operand a, whose rows are the matrix's columns: a lane's are neighbours, WIDE of them, and so are its k where a fiber's
// numbers are.
template <class S, bool TENSOR, bool PAIRS, int RIGHT>
__device__ __forceinline__ int place_of(int k, int j) {
    if constexpr (!TENSOR) return k * S::PADDED + j;
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

// One step on tensor cores, in TF32 or of 16-bit numbers: the transposed product, of the matrix's columns (M) and the fibers (N). Two fibers that mma_tf32
// has side by side are neighbours where RIGHT is 1, else 4 apart, so that a lane's of 4 products are. P is a multiple of 8, COLUMNS
// of 16, FIBERS of 8, or of 32 where RIGHT is not 1 but a multiple of 4.
template <class Plan, class S, int Q, int LEFT, int RIGHT, class Out, bool LAST, int AHEAD, typename In, typename M, typename T, class After>
__device__ __forceinline__ void multiply4_tensor(const In* in, const In* rest, float* tile, const M* w, const Global4<T>& global,
                                                 const After& after) {
    constexpr int P = S::P, ALL = LEFT * RIGHT, WIDE = gcd(S::COLUMNS / 8, 4), MS = S::COLUMNS / 16, NS = S::FIBERS / 8;
    constexpr bool ONE = RIGHT == 1, LINEAR = ALL % S::FIBERS == 0 && (RIGHT & (RIGHT - 1)) == 0;
    constexpr bool PAIRS = in_pairs<S, In, M>();
    constexpr int FV = ONE ? 8 : 32, LEAST = ONE ? 1 : 4, K = PAIRS ? 2 : 1;
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    int f0 = warp / S::GROUPS * S::FIBERS, j0 = warp % S::GROUPS * S::COLUMNS;
    const In* source = AHEAD == ALL * P || f0 * P < AHEAD ? in : rest;
    int from[S::FIBERS / FV];
#pragma unroll
    for (int i = 0; i < S::FIBERS / FV; ++i) {
        if (LINEAR) from[i] = S::In::join(S::In::at(spot<P, RIGHT>(f0 + g * LEAST, 0)), S::In::at(spot<P, RIGHT>(i * FV, 0)));
        else from[i] = S::In::at(spot<P, RIGHT>(min(f0 + i * FV + g * LEAST, ALL - LEAST), 0));
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
        auto number = [](In v) { return sizeof(In) == 4 && AHEAD < (1 << 30) ? to_tf32(load_as(v)) : load_as(v); };
        w += (j0 / 16 * 32 + threadIdx.x % 32) * 4;
#pragma unroll 2
        for (int k0 = 0; k0 < (f0 < ALL ? P : 0); k0 += 8) {
            float x[NS][2], c[MS][4];
#pragma unroll
            for (int i = 0; i < S::FIBERS / FV; ++i) {
                int at = S::In::join(from[i], S::In::at(k0 * RIGHT));
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
#pragma unroll
            for (int m = 0; m < MS; ++m) unpack(c[m], load_vec<M, 4>(w + m * 128));
            w += S::PADDED * 8;
#pragma unroll
            for (int m = 0; m < MS; ++m)
#pragma unroll
                for (int n = 0; n < NS; ++n) mma_tf32(sums[m][n], c[m], x[n]);
        }
    }
    after();
    Sums4<Plan, S, Q, RIGHT, Out, LAST> to;
    int f1 = f0 + (ONE ? 2 : 8) * t, j1 = j0 + g * WIDE;
    to.set(f1, j1, global);
    constexpr int PAIR = ONE ? WIDE : 4;
#pragma unroll
    for (int n = 0; n < 2 * NS / (ONE ? 1 : 4); ++n) {
        int f = ONE ? n / 2 * 8 + n % 2 : n / 2 * 32 + n % 2 * 4;
        if (f1 + f >= ALL) continue;
        if (!LINEAR) {
            to.set(f1 + f, j1, global);
            f = 0;
        }
#pragma unroll
        for (int m = 0; m < (ONE ? 2 * MS / WIDE : 2 * MS); ++m) {
            int j = ONE ? m * 8 * WIDE : m / WIDE * 8 * WIDE + m % WIDE;
            if (S::PADDED > Q && j1 + j >= Q) continue;
            float part[PAIR];
#pragma unroll
            for (int e = 0; e < PAIR; ++e)
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

// A step's matrix in shared memory: numbers as the factor has them, products of merged ones as they are computed.
template <typename T, class S>
struct Matrix {
    using type = compute_t<T>;
};
template <typename T, int F, int C, int L, int PADDED, class In, class One>
struct Matrix<T, Step4<F, C, L, PADDED, In, One>> {
    using type = T;
};

template <typename T, class S>
__device__ constexpr int matrix_bytes() {
    return (S::P * S::PADDED * sizeof(typename Matrix<T, S>::type) + 15) / 16 * 16;
}
template <typename T, class... Steps>
__device__ constexpr int matrices_bytes(Steps4<Steps...>) {
    return (matrix_bytes<T, Steps>() + ...);
}

// Copy a step's matrix, COLUMNS from the first on, to shared memory, with zeros beyond: 16 bytes at once along whichever of its
// dimensions is contiguous.
template <class Plan, int N, int RIGHT, int COLUMNS, typename T, int F, int C, int L, int PADDED, class In, class... Factors>
__device__ __forceinline__ void load_matrix(typename Matrix<T, Step4<F, C, L, PADDED, In, Factors...>>::type* to, const Factors4<T>& factors,
                                            int first, Step4<F, C, L, PADDED, In, Factors...>) {
    using S = Step4<F, C, L, PADDED, In, Factors...>;
    constexpr int U = 16 / sizeof(T), P = S::P;
    using M = typename Matrix<T, S>::type;
    constexpr bool PAIRS = N == 0 && in_pairs<S, T, M>();
    auto put = [&](int k, int j, M value) {
        if constexpr (Plan::TENSOR && sizeof(M) == 4) value = to_tf32(value);
        to[place_of<S, Plan::TENSOR, PAIRS, RIGHT>(k, j)] = value;
    };
    auto put_two = [&](int k, int j, M one, M two) {  // j is even: side by side
        Vec<M, 2> pair = {one, two};
        if constexpr (Plan::TENSOR && sizeof(M) == 4) pair = {to_tf32(one), to_tf32(two)};
        store_vec(to + place_of<S, Plan::TENSOR, PAIRS, RIGHT>(k, j), pair);
    };
    long long p = factors.p[N], q = factors.q[N];
    const T* from = factors.at[N] + first * q;
    bool aligned = reinterpret_cast<unsigned long long>(from) % 16 == 0;
    if (S::COUNT == 1 && COLUMNS % U == 0 && PADDED % 2 == 0 && q == 1 && p % U == 0 && aligned) {
#pragma unroll 4
        for (int e = threadIdx.x; e < P * (COLUMNS / U); e += Plan::THREADS) {
            int k = e / (COLUMNS / U), j = e % (COLUMNS / U) * U;
            if constexpr (!Plan::TENSOR && PADDED % U == 0) {
                cp_async_16(shared_address(to + k * PADDED + j), from + k * p + j);
            } else {
                Vec<T, U> v = load_vec<T, U>(from + k * p + j);
#pragma unroll
                for (int u = 0; u < U; u += 2) {
                    if constexpr (Plan::TENSOR && PAIRS) {
                        put(k, j + u, M(v.v[u]));
                        put(k, j + u + 1, M(v.v[u + 1]));
                    } else {
                        put_two(k, j + u, M(v.v[u]), M(v.v[u + 1]));
                    }
                }
            }
        }
    } else if (S::COUNT == 1 && P % U == 0 && p == 1 && q % U == 0 && aligned) {
#pragma unroll 4
        for (int e = threadIdx.x; e < COLUMNS * (P / U); e += Plan::THREADS) {
            int k = e / COLUMNS * U, j = e % COLUMNS;
            Vec<T, U> v = load_vec<T, U>(from + k + j * q);
#pragma unroll
            for (int u = 0; u < U; ++u) put(k + u, j, M(v.v[u]));
        }
    } else {
#pragma unroll 4
        for (int e = threadIdx.x; e < P * COLUMNS; e += Plan::THREADS) {
            int k = e / COLUMNS, j = e % COLUMNS;
            if constexpr (S::COUNT == 1) put(k, j, from[k * p + j * q]);
            else put(k, j, element<N, Factors...>(factors, k, first + j));
        }
    }
    constexpr int MORE = PADDED > COLUMNS ? PADDED - COLUMNS : 1;
    for (int e = threadIdx.x; PADDED > COLUMNS && e < P * MORE; e += Plan::THREADS) put(e / MORE, COLUMNS + e % MORE, M(0.0f));
}

// The matrices of the steps from factor N on.
template <class Plan, int N, int RIGHT, typename T, class S, class... Others>
__device__ __forceinline__ void load_matrices(char* to, const Factors4<T>& factors, int slice, Steps4<S, Others...>) {
    constexpr int COLUMNS = N == 0 ? Plan::COLUMNS : S::Q;
    load_matrix<Plan, N, RIGHT, COLUMNS>(reinterpret_cast<typename Matrix<T, S>::type*>(to), factors, N == 0 ? slice * COLUMNS : 0, S());
    if constexpr (N == 0) cp_async_commit();  // step 0 waits for these, and for its tile, alone
    if constexpr (sizeof...(Others))
        load_matrices<Plan, N + S::COUNT, RIGHT * COLUMNS>(to + matrix_bytes<T, S>(), factors, slice, Steps4<Others...>());
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
    const auto* w = reinterpret_cast<const typename Matrix<T, S>::type*>(matrices);
    if constexpr (Plan::TENSOR) multiply4_tensor<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    else multiply4<Plan, S, Q, LEFT, RIGHT, Out, LAST, AHEAD>(in, rest, tile, w, global, have_read);
    if constexpr (!LAST) {
        constexpr int NEXT = LEFT / Next::P;
        if constexpr (FIRST && !Plan::LOCAL) cp_async_wait<1>();  // for the other steps' matrices
        if constexpr (LOCAL && Next::local(NEXT * Next::P * RIGHT * Q, RIGHT * Q) && Next::FETCHED == S::FETCHED) __syncwarp();
        else __syncthreads();
        run4<Plan, false, NEXT, RIGHT * Q>(tile, tile, tile, matrices + matrix_bytes<T, S>(), global, after, late, Steps4<Others...>());
    }
}

// wN: factor N, with the distances wN_p and wN_q between its rows and columns; null from the group's count on. Grid SLICES * (the
// tiles, or fewer), block THREADS; dynamic shared memory: the matrices, the stage, the tile.
template <typename T, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, Plan::BLOCKS)
kron_linear_v4(T* out, const T* x, const T* w0, const T* w1, const T* w2, const T* w3, const T* w4, const T* w5, const T* w6,
               const T* w7, const T* bias, const T* residual, long long A, long long w0_p, long long w0_q,
               long long w1_p, long long w1_q, long long w2_p, long long w2_q, long long w3_p, long long w3_q,
               long long w4_p, long long w4_q, long long w5_p, long long w5_q, long long w6_p, long long w6_q,
               long long w7_p, long long w7_q, double scale, long long features) {
    using F = compute_t<T>;
    using In = typename Plan::Rightmost::In;
    extern __shared__ uint4 dynamic[];
    char* matrices = reinterpret_cast<char*>(dynamic);
    T* stage = reinterpret_cast<T*>(matrices + matrices_bytes<T>(typename Plan::List()));
    F* tile = reinterpret_cast<F*>(stage + (Plan::AHEAD * sizeof(T) + 15) / 16 * 16 / sizeof(T));
    Factors4<T> factors = {{w0, w1, w2, w3, w4, w5, w6, w7},
                           {w0_p, w1_p, w2_p, w3_p, w4_p, w5_p, w6_p, w7_p},
                           {w0_q, w1_q, w2_q, w3_q, w4_q, w5_q, w6_q, w7_q}};
    int slice = blockIdx.x % Plan::SLICES;
    constexpr long long ACROSS = Plan::C / Plan::R;
    long long tiles = (A + Plan::L - 1) / Plan::L * ACROSS, step = gridDim.x / Plan::SLICES;
    long long number = blockIdx.x / Plan::SLICES;  // of the tile that is loaded next
    if (number >= tiles) return;                   // a launch is planned for the most rows that there may be
    auto load = [&](bool ahead) {
        if (number >= tiles) return;
        long long a = number / ACROSS * Plan::L, c = number % ACROSS * Plan::R;
        const T* from = x + a * Plan::P * Plan::C + c;
        int rows = int(A - a < Plan::L ? A - a : Plan::L);
        if (ahead) load_tile4<Plan, 0, Plan::AHEAD, In>(stage, from, rows);
        else if constexpr (Plan::REST) load_tile4<Plan, Plan::AHEAD, Plan::NUMBERS, In>(reinterpret_cast<T*>(tile), from, rows);
    };
    load(true);
    load(false);
    load_matrices<Plan, 0, Plan::R>(matrices, factors, slice, typename Plan::List());
    cp_async_commit();
    cp_async_wait<Plan::LOCAL ? 0 : 1>();
    __syncthreads();
    while (true) {
        long long a = number / ACROSS * Plan::L, c = number % ACROSS * Plan::R;
        int rows = int(A - a < Plan::L ? A - a : Plan::L);
        Global4<T> global = {out, bias, residual, (a * Plan::Q + slice * Plan::COLUMNS) * Plan::C + c, features, rows, F(scale), A > 0 ? F(1) : F(0)};
        number += step;
        auto after = [&] {
            if constexpr (Plan::LOCAL) __syncwarp();
            else __syncthreads();
            load(true);
            cp_async_commit();
        };
        auto late = [&] {
            __syncthreads();
            load(false);
            cp_async_commit();
        };
        run4<Plan, true, Plan::NUMBERS / Plan::Rightmost::P / Plan::R, Plan::R>(stage, reinterpret_cast<const T*>(tile), tile, matrices, global,
                                                                                after, late, typename Plan::List());
        if (number >= tiles) break;
        cp_async_wait<0>();
        if constexpr (Plan::LOCAL) __syncwarp();
        else __syncthreads();
    }
}

// The gradient of a factor: partials[piece][k][j] = sum over the piece's fibers of z[a][k][c] * h[a][j][c], z [A][P][C], h [A][Q][C].
// A block makes K x J of them of chunks of fibers, [L][K][R] and [L][J][R], a chunk arriving while the one before is multiplied; its
// threads share out the sums, as many times as they are more than that takes, each time with other fibers of a chunk, and add theirs
// up at the end, always in the same order.
//
// On the FMA units a thread has KW x JW sums. On tensor cores, in TF32, a warp has them, of 8 x 8 of which a lane has two.
template <bool, class X, class>
struct Pick {
    using type = X;
};
template <class X, class Y>
struct Pick<false, X, Y> {
    using type = Y;
};

template <int THREADS_, int L_, int R_, bool WHOLE_, int BYTES_, bool TENSOR_, int P_, int Q_, int K_, int J_, int KW_, int JW_, class Z_, class H_>
struct Gradient4 {
    static constexpr int THREADS = THREADS_, L = L_, R = R_, BYTES = BYTES_, P = P_, Q = Q_, K = K_, J = J_, KW = KW_, JW = JW_;
    static constexpr bool WHOLE = WHOLE_, TENSOR = TENSOR_;
    static constexpr int BLOCKS = THREADS <= 256 ? 2 : 1;  // of a multiprocessor, at least
    static constexpr int FIBERS = L * R, ACROSS = (K + KW - 1) / KW, DOWN = (J + JW - 1) / JW;
    static constexpr int WORKERS = THREADS / (TENSOR ? 32 : 1), TIMES = WORKERS / (ACROSS * DOWN);
    using Z = Z_;
    using H = H_;
};

// Numbers k0 to k0 + K of the fibers of a chunk, of N in all; zeros beyond N and beyond `rows`.
template <class Plan, class In, int K, int N, typename T>
__device__ __forceinline__ void load_chunk(T* to, const T* from, int k0, int rows, long long C) {
    constexpr int W = Plan::BYTES / sizeof(T), R = Plan::R;
    for (int e = threadIdx.x * W; e < Plan::L * K * R; e += Plan::THREADS * W) {
        int l = e / (K * R), k = e / R % K + k0, r = e % R;
        bool in = l < rows && k < N;
        const T* x = from + (Plan::WHOLE ? (l * N + k) * R + r : k * C + r);
        if constexpr (Plan::BYTES == 16) cp_async_16(shared_address(to + In::at(e)), x, in);
        else if constexpr (Plan::BYTES >= 4) cp_async<Plan::BYTES>(shared_address(to + In::at(e)), x, in);
        else to[In::at(e)] = in ? *x : T(0.0f);
    }
}

template <class Plan, typename T, typename Acc>
__device__ __forceinline__ void contract(Acc (&sums)[Plan::KW][Plan::JW], const T* zs, const T* hs) {
    using Z = typename Plan::Z;
    using H = typename Plan::H;
    constexpr int K = Plan::K, J = Plan::J, KW = Plan::KW, JW = Plan::JW, R = Plan::R, V = 16 / sizeof(Acc);
    constexpr int FV = gcd(R, V), KV = R == 1 ? gcd(gcd(K, KW), V) : 1, JV = R == 1 ? gcd(gcd(J, JW), V) : 1;
    constexpr int HALF = R > 1 && JW % 2 == 0 ? JW / 2 : JW;
    int tj = threadIdx.x % Plan::DOWN, tk = threadIdx.x / Plan::DOWN % Plan::ACROSS, time = threadIdx.x / (Plan::DOWN * Plan::ACROSS);
#pragma unroll (R == 1 ? 2 : 1)
    for (int f = time * FV; f < (time < Plan::TIMES ? Plan::FIBERS : 0); f += Plan::TIMES * FV) {
        int l = f / R, r = f % R;
#pragma unroll
        for (int part = 0; part < JW; part += HALF) {  // in halves where each of h is FV numbers: they would not fit in registers
            Acc h[HALF][FV];
#pragma unroll
            for (int j = 0; j < HALF; j += JV) {
                int at = min(((part + j) / JV * Plan::DOWN + tj) * JV, J - JV);
                Vec<T, FV * JV> v = load_vec<T, FV * JV>(hs + H::join(H::at((l * J) * R + r), H::at(at * R)));
#pragma unroll
                for (int e = 0; e < FV * JV; ++e) h[j + e / FV][e % FV] = load_as(v.v[e]);
            }
#pragma unroll
            for (int k = 0; k < KW; k += KV) {
                int at = min((k / KV * Plan::ACROSS + tk) * KV, K - KV);
                Vec<T, FV * KV> v = load_vec<T, FV * KV>(zs + Z::join(Z::at((l * K) * R + r), Z::at(at * R)));
#pragma unroll
                for (int e = 0; e < FV * KV; ++e)
#pragma unroll
                    for (int n = 0; n < HALF; ++n) {
                        int j = (k + e) % 2 ? HALF - 1 - n : n;  // to and fro, as above
                        sums[k + e / FV][part + j] += load_as(v.v[e]) * h[j][e % FV];
                    }
            }
        }
    }
}

// Row `group` of 8 of a warp's WIDTH: the number that lane g has. Where a fiber's numbers are neighbours a lane has up to 4 of them.
template <class Plan, int WIDTH>
__device__ __forceinline__ int row_of(int group, int g) {
    constexpr int N = Plan::R == 1 ? gcd(WIDTH / 8, 4) : 1;
    return group / N * (8 * N) + g * N + group % N;
}

// A lane's part of the operands for 8 fibers (16 where the fibers are neighbours): x[group][i], i the fibers t, t + 4, ..
template <class Plan, class In, int WIDTH, int N, typename T, int FIBERS>
__device__ __forceinline__ void fetch_rows(float (&x)[WIDTH / 8][FIBERS], const T* from, int first, int f0) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto number = [](T v) { return sizeof(T) == 4 ? to_tf32(load_as(v)) : load_as(v); };
    if constexpr (Plan::R == 1) {
        constexpr int WIDE = gcd(WIDTH / 8, 4);
#pragma unroll
        for (int group = 0; group < WIDTH / 8; group += WIDE)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                Vec<T, WIDE> v = load_vec<T, WIDE>(from + In::join(In::at((f0 + t + 4 * i) * N), In::at(first + row_of<Plan, WIDTH>(group, g))));
#pragma unroll
                for (int e = 0; e < WIDE; ++e) x[group + e][i] = number(v.v[e]);
            }
    } else {
        int f = f0 + 4 * t, l = f / Plan::R, r = f % Plan::R;
#pragma unroll
        for (int group = 0; group < WIDTH / 8; ++group) {
            Vec<T, 4> v = load_vec<T, 4>(from + In::join(In::at(l * N * Plan::R + r), In::at((first + group * 8 + g) * Plan::R)));
#pragma unroll
            for (int e = 0; e < 4; ++e) x[group][e] = number(v.v[e]);
        }
    }
}

// The same of 16-bit numbers for 16 fibers, as they are, two fibers in a register.
template <class Plan, class In, int WIDTH, int N, typename T>
__device__ __forceinline__ void fetch_pairs(unsigned (&x)[WIDTH / 8][2], const T* from, int first, int f0) {
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if constexpr (Plan::R == 1) {
        constexpr int WIDE = gcd(WIDTH / 8, 4);
#pragma unroll
        for (int group = 0; group < WIDTH / 8; group += WIDE)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                int at = In::at(first + row_of<Plan, WIDTH>(group, g)), f = f0 + 2 * t + 8 * i;
                Vec<T, WIDE> even = load_vec<T, WIDE>(from + In::join(In::at(f * N), at));
                Vec<T, WIDE> odd = load_vec<T, WIDE>(from + In::join(In::at((f + 1) * N), at));
#pragma unroll
                for (int e = 0; e < WIDE; ++e) x[group + e][i] = pair_of(even.v[e], odd.v[e]);
            }
    } else {
        int f = f0 + 4 * t, l = f / Plan::R, r = f % Plan::R;
#pragma unroll
        for (int group = 0; group < WIDTH / 8; ++group) {
            Vec<T, 4> v = load_vec<T, 4>(from + In::join(In::at(l * N * Plan::R + r), In::at((first + group * 8 + g) * Plan::R)));
            x[group][0] = pair_of(v.v[0], v.v[1]);
            x[group][1] = pair_of(v.v[2], v.v[3]);
        }
    }
}

template <class Plan, typename T>
__device__ __forceinline__ void contract_tensor(float (&sums)[(Plan::KW + 15) / 16][Plan::JW / 8][4], const T* zs, const T* hs) {
    constexpr int AT_ONCE = sizeof(T) == 4 && Plan::R == 1 ? 8 : 16, LAST = Plan::KW / 8 - 1;
    int warp = threadIdx.x / 32, j0 = warp % Plan::DOWN * Plan::JW, k0 = warp / Plan::DOWN % Plan::ACROSS * Plan::KW;
    int time = warp / (Plan::DOWN * Plan::ACROSS);
#pragma unroll 2
    for (int f = time * AT_ONCE; f < Plan::FIBERS; f += Plan::TIMES * AT_ONCE) {
        if constexpr (sizeof(T) == 2) {
            unsigned z[Plan::KW / 8][2], h[Plan::JW / 8][2];
            fetch_pairs<Plan, typename Plan::Z, Plan::KW, Plan::K>(z, zs, k0, f);
            fetch_pairs<Plan, typename Plan::H, Plan::JW, Plan::J>(h, hs, j0, f);
#pragma unroll
            for (int m = 0; m < (Plan::KW + 15) / 16; ++m) {
                int high = 2 * m + 1 < LAST ? 2 * m + 1 : LAST;
                unsigned a[4] = {z[2 * m][0], z[high][0], z[2 * m][1], z[high][1]};
#pragma unroll
                for (int n = 0; n < Plan::JW / 8; ++n) mma_16_bit(sums[m][n], a, h[n], T());
            }
        } else {
            float z[Plan::KW / 8][AT_ONCE / 4], h[Plan::JW / 8][AT_ONCE / 4];
            fetch_rows<Plan, typename Plan::Z, Plan::KW, Plan::K>(z, zs, k0, f);
            fetch_rows<Plan, typename Plan::H, Plan::JW, Plan::J>(h, hs, j0, f);
#pragma unroll
            for (int s = 0; s < AT_ONCE / 4; s += 2)
#pragma unroll
                for (int m = 0; m < (Plan::KW + 15) / 16; ++m) {
                    int high = 2 * m + 1 < LAST ? 2 * m + 1 : LAST;
                    float a[4] = {z[2 * m][s], z[high][s], z[2 * m][s + 1], z[high][s + 1]};
#pragma unroll
                    for (int n = 0; n < Plan::JW / 8; ++n) {
                        float b[2] = {h[n][s], h[n][s + 1]};
                        mma_tf32(sums[m][n], a, b);
                    }
                }
        }
    }
}

// Acc is compute_t<T>. Grid pieces * ceil(P / K) * ceil(Q / J), block THREADS; dynamic shared memory: two chunks of each, or the sums.
template <typename T, typename Acc, class Plan>
__global__ void __launch_bounds__(Plan::THREADS, sizeof(Acc) == 4 ? Plan::BLOCKS : 1)
kron_linear_v4_bwd(Acc* partials, const T* z, const T* h, long long A, long long C, long long pieces) {
    constexpr int P = Plan::P, Q = Plan::Q, K = Plan::K, J = Plan::J, TILES_K = (P + K - 1) / K, TILES_J = (Q + J - 1) / J;
    constexpr int ZS = (Plan::FIBERS * K + 63) / 64 * 64, HS = (Plan::FIBERS * J + 63) / 64 * 64;
    extern __shared__ uint4 dynamic[];
    T *zs = reinterpret_cast<T*>(dynamic), *hs = zs + 2 * ZS;
    long long number = blockIdx.x / (TILES_K * TILES_J), piece = number, across = Plan::WHOLE ? 1 : C / Plan::R;
    long long chunks = (A + Plan::L - 1) / Plan::L * across;
    int k0 = blockIdx.x / TILES_J % TILES_K * K, j0 = blockIdx.x % TILES_J * J, stage = 0;
    auto load = [&](int to) {
        if (number < chunks) {
            long long a = number / across * Plan::L, c = number % across * Plan::R;
            int rows = int(A - a < Plan::L ? A - a : Plan::L);
            load_chunk<Plan, typename Plan::Z, K, P>(zs + to * ZS, z + a * P * C + c, k0, rows, C);
            load_chunk<Plan, typename Plan::H, J, Q>(hs + to * HS, h + a * Q * C + c, j0, rows, C);
        }
        cp_async_commit();
    };
    constexpr int ROWS = Plan::TENSOR ? (Plan::KW + 15) / 16 : Plan::KW, COLUMNS = Plan::TENSOR ? Plan::JW / 8 : Plan::JW;
    typename Pick<Plan::TENSOR, Acc[ROWS][COLUMNS][4], Acc[ROWS][COLUMNS]>::type sums = {};
    for (load(0); number < chunks; stage ^= 1) {
        number += pieces;
        load(stage ^ 1);
        cp_async_wait<1>();
        __syncthreads();
        if constexpr (Plan::TENSOR) contract_tensor<Plan>(sums, zs + stage * ZS, hs + stage * HS);
        else contract<Plan>(sums, zs + stage * ZS, hs + stage * HS);
        __syncthreads();
    }
    cp_async_wait<0>();
    Acc* all = reinterpret_cast<Acc*>(dynamic);
    constexpr int TEAM = Plan::ACROSS * Plan::DOWN, WORKER = Plan::TENSOR ? 32 : 1;
    int worker = threadIdx.x / WORKER, tj = worker % Plan::DOWN, tk = worker / Plan::DOWN % Plan::ACROSS, time = worker / TEAM;
    int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    constexpr bool IN_WARPS = !Plan::TENSOR && 32 % TEAM == 0;  // several teams in a warp, whose sums are added first
    if constexpr (IN_WARPS) {
#pragma unroll
        for (int lanes = 16; lanes >= TEAM; lanes /= 2)
#pragma unroll
            for (int e = 0; e < ROWS * COLUMNS; ++e)
                sums[e / COLUMNS][e % COLUMNS] += __shfl_xor_sync(~0u, sums[e / COLUMNS][e % COLUMNS], lanes);
        time = threadIdx.x % 32 < TEAM ? threadIdx.x / 32 : -1;
    }
    auto add = [&](int k, int j, Acc sum) {
        if (k < K && j < J) all[k * J + j] = time ? all[k * J + j] + sum : sum;
    };
#pragma unroll 1
    for (int turn = 0; turn < (IN_WARPS ? Plan::THREADS / 32 : Plan::TIMES); ++turn) {
        if (turn == time) {
            if constexpr (Plan::TENSOR) {
#pragma unroll
                for (int m = 0; m < ROWS; ++m)
#pragma unroll
                    for (int n = 0; n < COLUMNS; ++n)
#pragma unroll
                        for (int e = 0; e < 4; ++e)
                            if (2 * m + e / 2 < Plan::KW / 8)
                                add(tk * Plan::KW + row_of<Plan, Plan::KW>(2 * m + e / 2, g),
                                    tj * Plan::JW + row_of<Plan, Plan::JW>(n, 2 * t + e % 2), sums[m][n][e]);
            } else {
                constexpr int V = 16 / sizeof(Acc), KV = Plan::R == 1 ? gcd(gcd(K, Plan::KW), V) : 1;
                constexpr int JV = Plan::R == 1 ? gcd(gcd(J, Plan::JW), V) : 1;
#pragma unroll
                for (int k = 0; k < ROWS; ++k)
#pragma unroll
                    for (int j = 0; j < COLUMNS; ++j)
                        add((k / KV * Plan::ACROSS + tk) * KV + k % KV, (j / JV * Plan::DOWN + tj) * JV + j % JV, sums[k][j]);
            }
        }
        __syncthreads();
    }
    partials += piece * P * Q;
    for (int e = threadIdx.x; e < K * J; e += Plan::THREADS)
        if (k0 + e / J < P && j0 + e % J < Q) partials[(k0 + e / J) * Q + j0 + e % J] = all[e];
}
