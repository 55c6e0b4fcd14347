// kron_linear_v3_sum. Bug: a barrier is dropped.
#include "common/math.cuh"

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
    // no __syncthreads()
    if (threadIdx.y || i >= n) return;
#pragma unroll
    for (int y = 1; y < 8; ++y) sum += sums[y][threadIdx.x];
    out[sample * n + i] = T(sum * Acc(scale));
}
