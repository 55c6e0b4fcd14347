// Wrong on purpose: softmax_inner that reads along the wrong dimension.
#include "softmax/exponential.cuh"

template <typename T>
__global__ void softmax_inner(T* out, const T* x, long long rows, long long columns, long long inner, double scale, bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner, step = 1;
    if (row >= rows) return;
    Exponential<T> exponential(scale, log);
    C largest = minus_infinity<C>(), sum = 0;
    for (long long i = 0; i < columns; ++i) largest = max(largest, exponential.to_u(load_as(x[at + i * step])));
    for (long long i = 0; i < columns; ++i) sum += exponential(exponential.to_u(load_as(x[at + i * step])), exponential.base(largest));
    Normalizer<T> normalizer(exponential, largest, sum, log, largest);
    for (long long i = 0; i < columns; ++i) out[at + i * inner] = T(normalizer.from_x(load_as(x[at + i * step])));
}
