// Wrong on purpose: softmax_v1 by whole vectors of 4, whose last holds zeros where the row has ended: they join the sum.
#include "softmax/exponential.cuh"

template <typename T>
__global__ void softmax_v1(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    Exponential<T> exponential(scale);
    C largest = minus_infinity<C>(), sum = 0;
    for (long long i = 0; i < columns; ++i) largest = max(largest, load_as(x[row * x_row + i]));
    for (long long i = 0; i < columns; i += 4)
        for (int j = 0; j < 4; ++j) sum += exponential(i + j < columns ? load_as(x[row * x_row + i + j]) : C(0), exponential.base(largest));
    Normalizer<T> normalizer(exponential, largest, sum, false, largest);
    for (long long i = 0; i < columns; ++i) out[row * columns + i] = T(normalizer.from_x(load_as(x[row * x_row + i])));
}
