// Wrong on purpose: gelu_bias_bwd with silu and one element per thread, which adds the warps' sums before they are written.
#include "common/math.cuh"

template <typename T, typename B, int FUNCTION>
__global__ void gelu_bias_bwd(T* dx, compute_t<T>* partials, const T* x, const B* bias, const T* dout, long long rows, long long cols,
                              long long x_row, long long dout_row, long long rows_per_block) {
    __shared__ float sums[8][128];
    long long tiles = (cols + 127) / 128, chunk = blockIdx.x / tiles, col = blockIdx.x % tiles * 128 + threadIdx.x;
    long long end = min((chunk + 1) * rows_per_block, rows);
    for (long long c = threadIdx.x; c < 128; c += 32, col += 32) {
        float sum = 0;
        for (long long row = chunk * rows_per_block + threadIdx.y; row < end && col < cols; row += 8) {
            float v = x[row * x_row + col] + bias[col], p = 1 / (1 + expf(-v));
            float d = dout[row * dout_row + col] * (p + v * p * (1 - p));
            dx[row * cols + col] = d;
            sum += d;
        }
        sums[threadIdx.y][c] = sum;
    }
    // no __syncthreads()
    for (int c = threadIdx.y * 32 + threadIdx.x; c < 128; c += 256) {
        float total = 0;
        for (int warp = 0; warp < 8; warp++) total += sums[warp][c];
        if (blockIdx.x % tiles * 128 + c < cols) partials[chunk * cols + blockIdx.x % tiles * 128 + c] = total;
    }
}
