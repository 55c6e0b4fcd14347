// 4x4 outputs a thread, as in matmul_v4. The rows of `as` are padded to a multiple of 16 bytes.
#include "common/vec.cuh"

// Grid ceil(M / 64) * ceil(N / 64), block 256.
__global__ void matmul_registers(float* out, const float* a, const float* b, int M, int N, int K) {
    __shared__ alignas(16) float as[8][68], bs[8][64];
    int tiles_n = (N + 63) / 64, tx = threadIdx.x % 16 * 4, ty = threadIdx.x / 16 * 4;
    int m0 = blockIdx.x / tiles_n * 64, n0 = blockIdx.x % tiles_n * 64;
    float acc[4][4] = {};
    for (int k0 = 0; k0 < K; k0 += 8) {
        for (int e = threadIdx.x; e < 512; e += 256) {
            int r = e / 8, k = e % 8, c = e % 64, l = e / 64;
            as[k][r] = m0 + r < M && k0 + k < K ? a[(m0 + r) * (long long)K + k0 + k] : 0;
            bs[l][c] = k0 + l < K && n0 + c < N ? b[(k0 + l) * (long long)N + n0 + c] : 0;
        }
        __syncthreads();
        for (int k = 0; k < 8; ++k) {
            Vec<float, 4> column = load_vec<float, 4>(&as[k][ty]);
            Vec<float, 4> row = load_vec<float, 4>(&bs[k][tx]);
#pragma unroll
            for (int i = 0; i < 16; ++i) acc[i / 4][i % 4] += column.v[i / 4] * row.v[i % 4];
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        int m = m0 + ty + i / 4, n = n0 + tx + i % 4;
        if (m < M && n < N) out[m * (long long)N + n] = acc[i / 4][i % 4];
    }
}
