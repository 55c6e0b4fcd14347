// Wrong on purpose: kron_linear_v3_sum, a number a thread, every sample of which takes the first one's pieces.
#include "common/math.cuh"

template <typename T, typename Acc>
__global__ void kron_linear_v3_sum(T* out, const Acc* partials, int n, long long pieces, double scale) {
    int across = (n + 31) / 32, i = blockIdx.x % across * 32 + threadIdx.x;
    long long sample = blockIdx.x / across, first = 0;
    if (threadIdx.y || i >= n) return;
    Acc sum = 0;
    for (long long piece = 0; piece < pieces; ++piece) sum += partials[(first + piece) * n + i];
    out[sample * n + i] = T(sum * Acc(scale));
}
