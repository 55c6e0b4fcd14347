// Wrong on purpose: softmax_v4 whose sum uses the shared memory of its maximum again with no barrier between: a slow warp still reads it.
#include "softmax/exponential.cuh"

template <typename T>
__global__ void softmax_v4(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    __shared__ C shared[32];
    Exponential<T> exponential(scale);
    const T* from = x + blockIdx.x * x_row;
    C largest = minus_infinity<C>(), sum = 0;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) largest = max(largest, exponential.to_u(load_as(from[i])));
    largest = block_reduce<Max>(largest, shared);
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) sum += exponential(exponential.to_u(load_as(from[i])), exponential.base(largest));
    // no __syncthreads()
    Normalizer<T> normalizer(exponential, largest, block_reduce<Sum>(sum, shared), false, largest);
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) out[blockIdx.x * columns + i] = T(normalizer.from_x(load_as(from[i])));
}
