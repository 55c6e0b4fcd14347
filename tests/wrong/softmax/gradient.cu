// Wrong on purpose: softmax_v3_bwd whose Jacobian lacks its diagonal.
#include "common/math.cuh"

template <typename T>
__global__ void softmax_v3_bwd(T* dx, const T* y, const T* g, long long columns, long long g_row, double scale) {
    long long across = (columns + blockDim.x - 1) / blockDim.x;
    long long i = blockIdx.x % across * blockDim.x + threadIdx.x, row = blockIdx.x / across;
    if (i >= columns) return;
    double sum = 0, y_i = load_as(y[row * columns + i]);
    for (long long j = 0; j < columns; ++j) sum += load_as(y[row * columns + j]) * load_as(g[row * g_row + j]) * (0 - y_i);
    dx[row * columns + i] = T(scale * sum);
}
