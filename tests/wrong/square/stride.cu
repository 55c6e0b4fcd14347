// The squares of rows that are x_row elements apart. A block a row.

// A block a row.
__global__ void square_rows(float* out, const float* x, int n, long long x_row) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float v = x[blockIdx.x * x_row + i];
        out[blockIdx.x * (long long)n + i] = v * v;
    }
}
