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
//
// (v1 and v2 are torch's own operations.) A factor is a view of any strides: its transpose, for the backward, is the
// same memory. With S samples that have a factor each, A is the same for all of them. Offsets are 64-bit.

#include "common/math.cuh"

constexpr int THREADS = 256;

// Where fiber f begins in an array [A][n][C], for f = a * C + c.
__device__ __forceinline__ long long fiber_offset(long long f, int n, long long C) {
    return C == 1 ? f * n : f / C * n * C + f % C;
}

// y = scale * product + bias + residual, each rounded once. bias has `features` elements, one for each output of a row.
template <typename T>
__device__ __forceinline__ void store_result(T* out, long long at, compute_t<T> sum, compute_t<T> scale, const T* bias,
                                             const T* residual, long long features) {
    sum *= scale;
    if (bias) sum += load_as(bias[at % features]);
    if (residual) sum += load_as(residual[at]);
    out[at] = T(sum);
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
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            int n = n0 + tn + S::TN * j;
            if (n < q) store_result(out, first + n * C, sums[i][j], F(scale), bias, residual, features);
        }
    }
}

// The gradient of a factor: partials[sample][piece][k][j] = sum over the piece's fibers of x[a][k][c] * g[a][j][c],
// where g is [S][A][q][C]. The block of a piece computes BT x BT of them; (BT / 4)^2 threads, of 4 x 4 each, go over
// every GROUPS-th fiber of a chunk, and the groups' sums are added at the end, always in the same order.
// Acc is compute_t<T>. Grid S * pieces * ceil(p / BT) * ceil(q / BT), block 256.
template <typename T, typename Acc, int BT>
__global__ void __launch_bounds__(THREADS)
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
#pragma unroll 4
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
