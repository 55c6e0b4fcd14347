// Wrong on purpose: softmax_v3 whose tree in shared memory lacks its barrier, so that sums are read before they are written.
#include "common/math.cuh"

template <bool MAX>
__device__ double tree(double value) {
    __shared__ double values[256];
    values[threadIdx.x] = value;
    for (int half = 128; half > 0; half /= 2) {
        // no __syncthreads()
        if (threadIdx.x < half) {
            double other = values[threadIdx.x + half], mine = values[threadIdx.x];
            values[threadIdx.x] = MAX ? max(mine, other) : mine + other;
        }
    }
    __syncthreads();
    return values[0];
}

template <typename T>
__global__ void softmax_v3(T* out, const T* x, long long columns, long long x_row, double scale) {
    x += blockIdx.x * x_row;
    double largest = -1e300, sum = 0;
    for (long long i = threadIdx.x; i < columns; i += 256) largest = max(largest, scale * load_as(x[i]));
    largest = tree<true>(largest);
    for (long long i = threadIdx.x; i < columns; i += 256) sum += exp(scale * load_as(x[i]) - largest);
    sum = tree<false>(sum);
    for (long long i = threadIdx.x; i < columns; i += 256) out[blockIdx.x * columns + i] = T(exp(scale * load_as(x[i]) - largest) / sum);
}
