// Wrong on purpose: softmax_v1 by whole vectors of 4, whose last holds zeros where the row has ended: they join the sum.
#include "common/math.cuh"

template <typename T>
__global__ void softmax_v1(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    long long row = blockIdx.x * 256LL + threadIdx.x;
    if (row >= rows) return;
    x += row * x_row;
    double largest = -1e300, sum = 0;
    for (long long i = 0; i < columns; ++i) largest = max(largest, scale * load_as(x[i]));
    for (long long i = 0; i < columns; i += 4)
        for (int j = 0; j < 4; ++j) sum += exp((i + j < columns ? scale * load_as(x[i + j]) : 0.0) - largest);
    for (long long i = 0; i < columns; ++i) out[row * columns + i] = T(exp(scale * load_as(x[i]) - largest) / sum);
}
