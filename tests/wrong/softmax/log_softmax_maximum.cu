// Wrong on purpose: softmax_inner that forgets the largest element, so that the exponentials of large scores overflow.
#include "common/math.cuh"

template <typename T>
__global__ void softmax_inner(T* out, const T* x, long long rows, long long columns, long long inner, double scale, bool log) {
    long long row = blockIdx.x * (long long)blockDim.x + threadIdx.x, at = row / inner * columns * inner + row % inner;
    if (row >= rows) return;
    compute_t<T> largest = 0, sum = 0;
    for (long long i = 0; i < columns; ++i) sum += exp(load_as(x[at + i * inner]) - largest);
    for (long long i = 0; i < columns; ++i) out[at + i * inner] = T(load_as(x[at + i * inner]) - largest - ::log(sum));
}
