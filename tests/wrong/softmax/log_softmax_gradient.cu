// Wrong on purpose: softmax_inner_bwd that takes y for the probability whose logarithm it is.
#include "common/math.cuh"

template <typename T>
__global__ void softmax_inner_bwd(T* dx, const T* y, const T* g, long long rows, long long columns, long long inner, double scale,
                                  bool log) {
    using C = compute_t<T>;
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    C total = 0;
    for (long long i = 0; i < columns; ++i) total += load_as(g[at + i * inner]);
    for (long long i = 0; i < columns; ++i) dx[at + i * inner] = T(load_as(g[at + i * inner]) - load_as(y[at + i * inner]) * total);
}
