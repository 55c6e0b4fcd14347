// Wrong on purpose: gelu_bwd with silu, whose derivative lacks the term of the gate's slope.
#include "common/math.cuh"

template <typename T, typename B, int FUNCTION, int N>
__global__ void gelu_bwd(T* dx, T* dup, const T* x, const T* up, const B* bias, const T* dout, long long rows, long long cols,
                         long long x_row, long long up_row, long long dout_row) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, row = i / cols, col = i % cols;
    if (row >= rows) return;
    float v = x[row * x_row + col], gate = 1 / (1 + expf(-v));
    dx[i] = dout[row * dout_row + col] * gate;
}
