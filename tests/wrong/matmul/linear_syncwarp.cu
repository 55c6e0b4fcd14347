// Sums of columns whose lanes exchange their parts through shared memory.

// A warp a column: grid N, block 32.
__global__ void column_sums_by_lanes(float* out, const float* x, int M, int N) {
    __shared__ float sums[32];
    int lane = threadIdx.x;
    float sum = 0;
    for (int m = lane; m < M; m += 32) sum += x[m * (long long)N + blockIdx.x];
    for (int distance = 16; distance > 0; distance /= 2) {
        sums[lane] = sum;
        __syncwarp();
        sum += sums[lane ^ distance];
        __syncwarp();
    }
    if (lane == 0) out[blockIdx.x] = sum;
}
