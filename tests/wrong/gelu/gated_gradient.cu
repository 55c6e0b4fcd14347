// Wrong on purpose: gelu_bwd with silu and a gate, where the gradient of `up` has the gate instead of x times the gate.
#include "common/math.cuh"

template <typename T, typename B, int FUNCTION, int N>
__global__ void gelu_bwd(T* dx, T* dup, const T* x, const T* up, const B* bias, const T* dout, long long rows, long long cols,
                         long long x_row, long long up_row, long long dout_row) {
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x, row = i / cols, col = i % cols;
    if (row >= rows) return;
    float v = x[row * x_row + col], d = dout[row * dout_row + col], p = 1 / (1 + expf(-v));
    dx[i] = d * up[row * up_row + col] * (p + v * p * (1 - p));
    dup[i] = d * p;
}
