// The backward of two large factors of few rows in one launch.
//
// A row of x is a matrix X [P1][P2], one of what came back G [Q1][Q2], and all that is wanted are products of matrices:
//     Z = X W2,  H = W1 G,  dW1 += Z G^T,  dW2 += X^T H,  dX = H W2^T.
// Row i of X makes row i of Z, H, dW1 and dX alone. So SLICES blocks, a cluster, share a row of x: each has ROWS rows of X and of W1, and
// W2; G comes by in chunks of CHUNK rows, from which all make their parts of H and dW1. Only dW2 is a sum over the blocks, which is made
// through their shared memory at the end: few rows fill the GPU, and there are few partial sums.
//
// All are products of 16-bit numbers on tensor cores. A float is three of them (Pieces), made once, when it comes to shared memory: 6
// products of m16n8k16, which take as long as 3 of m16n8k8 in TF32 (kron_backward.cuh) and are more exact. To split in two for TF32 in
// every warp that multiplies a number takes 6 to 8 instructions a product, and more time than the products; both parts would take more
// shared memory. Where rows are many, warpgroups are faster (kron_split.cuh).
//
// On one H200, in us with the partial sums' launch: 32 x (128, 128) 43, and 39 in five launches, but two arrays of extra memory, and five;
// in bfloat16 19 and 26. What did not help: 16-bit numbers of many rows (28 for 23) are better left to kron_backward.cuh. Runs of 32 numbers
// for Z, H and dX as well erred 2.4 times as much as torch.
#pragma once
#include "kron_backward.cuh"

// What a number is in shared memory: COUNT numbers of `type`. A float is x = a + b + c exactly, of 8 bits each, all of its sign.
template <typename T>
struct Pieces {
    using type = T;
    static constexpr int COUNT = 1;
};
template <>
struct Pieces<float> {
    using type = __nv_bfloat16;
    static constexpr int COUNT = 3;
};

// a and b are finite, and c has the infinity or the NaN, so that none comes of their difference.
__device__ __forceinline__ void split_in_three(float x, float (&pieces)[3]) {
    unsigned bits = __float_as_uint(limited(x, 3.40282347e38f));
    float high = __uint_as_float(bits & 0xffff0000), both = __uint_as_float(bits & 0xffffff00);
    pieces[0] = high;
    pieces[1] = both - high;
    pieces[2] = x - both;
}

template <int THREADS_, int SLICES_, int CHUNK_, class Left_, class Right_>
struct Pair4 {
    static constexpr int THREADS = THREADS_, SLICES = SLICES_, CHUNK = CHUNK_;
    static constexpr int P1 = Left_::P, Q1 = Left_::Q, P2 = Right_::P, Q2 = Right_::Q;
    static constexpr int ROWS = P1 / SLICES, CHUNKS = Q1 / CHUNK, SUMS1 = ROWS * Q1, SUMS2 = P2 * Q2;
    // Distances between rows in shared memory: lanes that fetch from 8 of them meet different banks. Then numbers of a piece.
    static constexpr int LD1 = Q1 + 8, LDX = P2 + 8, LDG = Q2 + 8;
    static constexpr int W1 = ROWS * LD1, W2 = P2 * LDG, X = ROWS * LDX, Z = ROWS * LDG, G = CHUNK * LDG;
};

// How WARPS warps share out M x N sums: each has BLOCKS blocks next to each other of 16 MI x 8 NI; TIMES warps have the same sums, of
// different numbers of k.
template <int WARPS, int M, int N, bool KEPT>
struct Share {
    static constexpr int TIMES = KEPT && M * N < 256 * WARPS ? 256 * WARPS / (M * N) : 1, TILES = M * N * TIMES / (128 * WARPS);
    static constexpr int MI = TILES >= 4 ? 2 : 1, NI = TILES / MI < 4 ? TILES / MI : 4, BLOCKS = TILES / MI / NI;
    static constexpr int ACROSS = N / (8 * NI * BLOCKS), DOWN = M / (16 * MI);
    using Sums = float[BLOCKS][MI][NI][4];
    __device__ static int warp() { return threadIdx.x / 32 % WARPS; }
    __device__ static int row() { return warp() / ACROSS % DOWN * (16 * MI); }
    __device__ static int column() { return warp() % ACROSS * (8 * NI * BLOCKS); }
    __device__ static int time() { return warp() / (ACROSS * DOWN); }
    // f(pair, row, column) of each two neighbours of a lane's sums.
    template <class F>
    __device__ static __forceinline__ void for_each(const Sums& sums, const F& f) {
        int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
        for (int e = 0; e < BLOCKS * MI * NI * 2; ++e) {
            int block = e / (MI * NI * 2), m = e / 2 / NI % MI, n = e / 2 % NI;
            const float(&d)[4] = sums[block][m][n];
            f(Vec<float, 2>{d[e % 2 * 2], d[e % 2 * 2 + 1]}, row() + m * 16 + e % 2 * 8 + g, column() + (block * NI + n) * 8 + 2 * t);
        }
    }
};

// V neighbours to their places, of each piece, which lie PLANE apart.
template <int PLANE, typename T, int V>
__device__ __forceinline__ void put_pieces(typename Pieces<T>::type* to, const Vec<T, V>& numbers) {
    if constexpr (sizeof(T) == 2) {
        store_vec(to, numbers);
    } else {
        float pieces[V][3];
#pragma unroll
        for (int i = 0; i < V; ++i) split_in_three(numbers.v[i], pieces[i]);
#pragma unroll
        for (int piece = 0; piece < 3; ++piece) {
            if constexpr (V == 1) {
                to[piece * PLANE] = __ushort_as_bfloat16(__float_as_uint(pieces[0][piece]) >> 16);
            } else {
                Vec<unsigned, V / 2> pairs;
#pragma unroll
                for (int i = 0; i < V / 2; ++i)
                    pairs.v[i] = __byte_perm(__float_as_uint(pieces[2 * i][piece]), __float_as_uint(pieces[2 * i + 1][piece]), 0x7632);
                store_vec(reinterpret_cast<unsigned*>(to + piece * PLANE), pairs);
            }
        }
    }
}

// A part of a matrix on its way from memory to shared memory, row by row. The threads begin each time in the same column.
template <int ROWS, int COLUMNS, int THREADS, typename T>
struct Ahead {
    static constexpr int V = 16 / sizeof(T), COUNT = ROWS * COLUMNS / V / THREADS;
    Vec<T, V> part[COUNT];

    __device__ static int row(int i) { return (threadIdx.x % THREADS + i * THREADS) / (COLUMNS / V); }
    __device__ static int column() { return threadIdx.x % (COLUMNS / V) * V; }
    __device__ __forceinline__ void fetch(const T* from, long long stride) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) part[i] = load_vec<T, V>(from + row(i) * stride + column());
    }
    // The same to the L2 cache alone, a line a thread.
    __device__ static __forceinline__ void ahead(const T* from, long long stride) {
        constexpr int LINE = 128 / sizeof(T) < COLUMNS ? 128 / sizeof(T) : COLUMNS, LINES = COLUMNS / LINE;
        for (int e = threadIdx.x % THREADS; e < ROWS * LINES; e += THREADS) prefetch(from + e / LINES * stride + e % LINES * LINE);
    }
    template <int PLANE>
    __device__ __forceinline__ void put(typename Pieces<T>::type* to) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) put_pieces<PLANE>(to + row(i) * (COLUMNS + 8) + column(), part[i]);
    }
};

// Rows of a factor, of any strides.
template <int ROWS, int COLUMNS, int THREADS, int PLANE, typename T>
__device__ __forceinline__ void load_rows(typename Pieces<T>::type* to, const T* from, long long p, long long q) {
    constexpr int V = 16 / sizeof(T);
    if (q == 1 && p % V == 0 && reinterpret_cast<unsigned long long>(from) % 16 == 0) {
        Ahead<ROWS, COLUMNS, THREADS, T> part;
        part.fetch(from, p);
        part.template put<PLANE>(to);
    } else {
#pragma unroll 8
        for (int e = threadIdx.x; e < ROWS * COLUMNS; e += THREADS) {
            int k = p < q ? e % ROWS : e / COLUMNS, j = p < q ? e / ROWS : e % COLUMNS;
            put_pieces<PLANE>(to + k * (COLUMNS + 8) + j, Vec<T, 1>{from[k * p + j * q]});
        }
    }
}

// What a warp multiplies at once: 16 MI rows of a and 8 NI columns of b, 16 numbers of k, all pieces. PA, PB: distances between pieces.
template <class A, class B, int PA, int PB, int COUNT, int MI, int NI>
struct Fragments {
    unsigned x[COUNT][MI][4], y[COUNT][NI][2];

    template <typename U>
    __device__ __forceinline__ void load(const U* a, const U* b) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
#pragma unroll
            for (int m = 0; m < MI; ++m) load_tiles<A::K != 1>(x[i][m], shared_address(a + i * PA + 16 * m * A::ROW));
#pragma unroll
            for (int n = 0; n < NI; n += 2) {
                unsigned four[4];
                load_tiles<B::K != 1>(four, shared_address(b + i * PB + 8 * n * B::ROW));
#pragma unroll
                for (int e = 0; e < 4; ++e) y[i][n + e / 2][e % 2] = four[e];
            }
        }
    }
    template <typename U>
    __device__ __forceinline__ void multiply(float (&sums)[MI][NI][4], int i, int j) const {
#pragma unroll
        for (int m = 0; m < MI; ++m)
#pragma unroll
            for (int n = 0; n < NI; ++n) mma_16_bit(sums[m][n], x[i][m], y[j][n], U());
    }
};

// sums += a b, of K numbers of k; products of three pieces in runs that begin at zero: tensor cores cut what they add.
template <int K, int MOST_RUN, class A, class B, int PA, int PB, typename T, int MI, int NI, typename U>
__device__ __forceinline__ void multiply_pieces(float (&sums)[MI][NI][4], const U* a, const U* b) {
    constexpr int COUNT = Pieces<T>::COUNT, RUN = MOST_RUN < K ? MOST_RUN : K;
    int row = threadIdx.x % 8, tile = threadIdx.x % 32 / 8;
    a += tile % 2 * (8 * A::ROW) + tile / 2 * (8 * A::K) + (A::K == 1 ? row * A::ROW : row * A::K);
    b += tile / 2 * (8 * B::ROW) + tile % 2 * (8 * B::K) + (B::K == 1 ? row * B::ROW : row * B::K);
#pragma unroll 1
    for (int k0 = 0; k0 < K; k0 += RUN) {
        float part[MI][NI][4] = {};
#pragma unroll
        for (int k = 0; k < RUN; k += 16) {
            Fragments<A, B, PA, PB, COUNT, MI, NI> now;
            now.load(a + k * A::K, b + k * B::K);
            if constexpr (COUNT == 1) {
                now.template multiply<U>(sums, 0, 0);
            } else {  // small products first; those that are left out are below 2^-22
                now.template multiply<U>(part, 2, 0);
                now.template multiply<U>(part, 0, 2);
                now.template multiply<U>(part, 1, 1);
                now.template multiply<U>(part, 1, 0);
                now.template multiply<U>(part, 0, 1);
                now.template multiply<U>(part, 0, 0);
            }
        }
        if constexpr (COUNT > 1)
#pragma unroll
            for (int e = 0; e < MI * NI * 4; ++e) sums[e / 4 / NI][e / 4 % NI][e % 4] += part[e / 4 / NI][e / 4 % NI][e % 4];
        a += RUN * A::K;
        b += RUN * B::K;
    }
}

// A warp's part of the M x N sums of K, as S shares them out.
template <class S, int K, int MOST_RUN, class A, class B, int PA, int PB, typename T, typename U>
__device__ __forceinline__ void multiply_shared(typename S::Sums& sums, const U* a, const U* b) {
    a += S::row() * A::ROW + S::time() * (K / S::TIMES) * A::K;
    b += S::column() * B::ROW + S::time() * (K / S::TIMES) * B::K;
#pragma unroll
    for (int i = 0; i < S::BLOCKS; ++i) multiply_pieces<K / S::TIMES, MOST_RUN, A, B, PA, PB, T>(sums[i], a, b + i * (8 * S::NI) * B::ROW);
}

// all[row][column] += a warp's kept sums, or = the first ones; all's rows are LD long.
template <class S, int LD>
__device__ __forceinline__ void gather_kept(float* all, const typename S::Sums& sums, bool add) {
    S::for_each(sums, [&](Vec<float, 2> two, int row, int column) {
        Vec<float, 2> before = add ? load_vec<float, 2>(all + row * LD + column) : Vec<float, 2>{0, 0};
        store_vec(all + row * LD + column, Vec<float, 2>{before.v[0] + two.v[0], before.v[1] + two.v[1]});
    });
}
