// kron_linear_v3_bwd. Bug: the last piece goes past the last fiber.
#include "common/math.cuh"

constexpr int THREADS = 256;

// Where fiber f begins in an array [A][n][C], for f = a * C + c.
__device__ __forceinline__ long long fiber_offset(long long f, int n, long long C) {
    return C == 1 ? f * n : f / C * n * C + f % C;
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
    long long begin = number * piece, end = begin + piece;
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
