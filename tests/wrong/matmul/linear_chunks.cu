// Sums of columns over chunks of rows.

// Grid ceil(N / 32) * ceil(M / rows_per_chunk), block (32, 8).
template <typename T>
__global__ void column_sums(T* out, const T* x, int M, int N, int rows_per_chunk, long long x_m,
                            long long x_n) {
    __shared__ T sums[8][32];
    int tiles_n = (N + 31) / 32;
    int chunk = blockIdx.x / tiles_n, n = blockIdx.x % tiles_n * 32 + threadIdx.x;
    long long first = (long long)chunk * rows_per_chunk;
    int end = first + rows_per_chunk < M ? int(first + rows_per_chunk) : M;
    T sum = 0;
    if (n < N)
        for (int m = int(first) + threadIdx.y; m < end; m += 8) sum += x[m * x_m + n * x_n];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && n < N) {
#pragma unroll
        for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
        out[chunk * (long long)N + n] = sum;
    }
}
