// One factor, a thread a fiber and 32 columns a block through shared memory.
__global__ void kron_fibers(float* out, const float* x, const float* w, long long A, int p, int q,
                            long long C, long long w_p, long long w_q) {
    __shared__ float ws[8][32];
    long long f = blockIdx.x * (long long)blockDim.x + threadIdx.x, a = f / C, c = f % C;
    bool inside = f < A * C;
    for (int j0 = 0; j0 < q; j0 += 32) {
        float sums[32] = {};
        for (int k0 = 0; k0 < p; k0 += 8) {
            for (int e = threadIdx.x; e < 256; e += blockDim.x) {
                int k = k0 + e / 32, j = j0 + e % 32;
                ws[e / 32][e % 32] = k < p && j < q ? w[k * w_p + j * w_q] : 0.0f;
            }
            __syncthreads();
            for (int k = 0; k < 8; ++k) {
                float value = inside && k0 + k < p ? x[(a * p + k0 + k) * C + c] : 0.0f;
                for (int j = 0; j < 32; ++j) sums[j] += value * ws[k][j];
            }
            __syncthreads();
        }
        for (int j = 0; j < 32; ++j)
            if (inside && j0 + j < q) out[(a * q + j0 + j) * C + c] = sums[j];
    }
}
