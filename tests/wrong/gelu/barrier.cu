// Wrong on purpose: gelu_bias_bwd with silu and one element per thread, which adds the rows' sums before they are written.
#include "common/math.cuh"

template <typename T, typename B, int FUNCTION, bool ALIGNED = true>
__global__ void gelu_bias_bwd(T* dx, compute_t<T>* partials, B* dbias, const T* x, const B* bias, const T* dout, long long rows,
                              long long cols, long long x_row, long long dout_row, long long rows_per_block) {
    __shared__ float sums[32][32];
    long long tile = blockIdx.x * 32LL, end = min((blockIdx.y + 1) * rows_per_block, rows);
    for (int c = threadIdx.x; c < 32; c += 8) {
        long long col = tile + c;
        float sum = 0;
        for (long long row = blockIdx.y * rows_per_block + threadIdx.y; row < end && col < cols; row += 32) {
            float v = x[row * x_row + col] + bias[col], p = 1 / (1 + expf(-v));
            float d = dout[row * dout_row + col] * (p + v * p * (1 - p));
            dx[row * cols + col] = d;
            sum += d;
        }
        sums[threadIdx.y][c] = sum;
    }
    // no __syncthreads()
    int i = threadIdx.y * 8 + threadIdx.x;
    if (i >= 32 || tile + i >= cols) return;
    float total = 0;
    for (int k = 31; k >= 0; k--) total += sums[k][i];
    if (rows_per_block < rows) partials[blockIdx.y * cols + tile + i] = total;
    else dbias[tile + i] = total;
}
