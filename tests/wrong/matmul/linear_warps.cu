// Sums of columns to which eight warps add at one time.

// Grid ceil(N / 32), block (32, 8).
__global__ void column_sums_by_warps(float* out, const float* x, int M, int N) {
    __shared__ float sums[32];
    int n = blockIdx.x * 32 + threadIdx.x;
    if (threadIdx.y == 0) sums[threadIdx.x] = 0;
    __syncthreads();
    float sum = 0;
    if (n < N)
        for (int m = threadIdx.y; m < M; m += 8) sum += x[m * (long long)N + n];
    atomicAdd(&sums[threadIdx.x], sum);
    __syncthreads();
    if (threadIdx.y == 0 && n < N) out[n] = sums[threadIdx.x];
}
