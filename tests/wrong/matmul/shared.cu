// Tiles in dynamic shared memory: the launch brings 2 * 32 * 32 floats.

constexpr int LD = 32;

// Grid ceil(M / 32) * ceil(N / 32), block (32, 32).
__global__ void matmul_tile(float* out, const float* a, const float* b, int M, int N, int K) {
    extern __shared__ float tiles[];
    float *as = tiles, *bs = tiles + 32 * LD;
    int tiles_n = (N + 31) / 32, x = threadIdx.x, y = threadIdx.y;
    int m = blockIdx.x / tiles_n * 32 + y, n = blockIdx.x % tiles_n * 32 + x;
    float sum = 0;
    for (int k0 = 0; k0 < K; k0 += 32) {
        as[y * LD + x] = m < M && k0 + x < K ? a[m * (long long)K + k0 + x] : 0;
        bs[y * LD + x] = k0 + y < K && n < N ? b[(k0 + y) * (long long)N + n] : 0;
        __syncthreads();
        for (int k = 0; k < 32; ++k) sum += as[y * LD + k] * bs[k * LD + x];
        __syncthreads();
    }
    if (m < M && n < N) out[m * (long long)N + n] = sum;
}
