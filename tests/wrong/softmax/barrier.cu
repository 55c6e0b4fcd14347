// Wrong on purpose: softmax_v3 whose tree in shared memory lacks its barrier, so that sums are read before they are written.
#include "softmax/exponential.cuh"

template <class Op, typename C>
__device__ C tree(C value, C* shared) {
    shared[threadIdx.x] = value;
    for (int half = blockDim.x / 2; half > 0; half /= 2) {
        // no __syncthreads()
        if (threadIdx.x < half) shared[threadIdx.x] = Op::of(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return shared[0];
}

template <typename T>
__global__ void softmax_v3(T* out, const T* x, long long rows, long long columns, long long x_row, double scale) {
    using C = compute_t<T>;
    __shared__ C maxima[256], sums[256];
    Exponential<T> exponential(scale);
    const T* from = x + blockIdx.x * x_row;
    C largest = minus_infinity<C>(), sum = 0;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) largest = max(largest, exponential.to_u(load_as(from[i])));
    largest = tree<Max>(largest, maxima);
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) sum += exponential(exponential.to_u(load_as(from[i])), exponential.base(largest));
    Normalizer<T> normalizer(exponential, largest, tree<Sum>(sum, sums), false, largest);
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) out[blockIdx.x * columns + i] = T(normalizer.from_x(load_as(from[i])));
}
