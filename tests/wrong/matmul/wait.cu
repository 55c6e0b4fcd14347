// Two stages filled by cp.async, as in matmul_v5's ring, with one barrier per stage.
#include "common/ptx/async_copy.cuh"

// Grid ceil(M / 16) * ceil(N / 16), block (16, 16).
__global__ void matmul_ring(float* out, const float* a, const float* b, int M, int N, int K) {
    __shared__ float as[2][16][16], bs[2][16][16];
    int tiles_n = (N + 15) / 16, x = threadIdx.x, y = threadIdx.y;
    int m = blockIdx.x / tiles_n * 16 + y, n = blockIdx.x % tiles_n * 16 + x;
    auto start = [&](int stage, int k0) {
        cp_async<4>(shared_address(&as[stage][y][x]), a + m * (long long)K + k0 + x, m < M && k0 + x < K);
        cp_async<4>(shared_address(&bs[stage][y][x]), b + (k0 + y) * (long long)N + n, k0 + y < K && n < N);
        cp_async_commit();
    };
    float sum = 0;
    start(0, 0);
    for (int k0 = 0, stage = 0; k0 < K; k0 += 16, stage ^= 1) {
        cp_async_wait<0>();
        __syncthreads();  // all threads' copies are there, and nobody reads the other stage any more
        start(stage ^ 1, k0 + 16);
        for (int k = 0; k < 16; ++k) sum += as[stage][y][k] * bs[stage][k][x];
    }
    cp_async_wait<0>();
    if (m < M && n < N) out[m * (long long)N + n] = sum;
}
