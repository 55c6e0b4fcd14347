// Wrong on purpose: layernorm_v2 whose variance also counts the elements behind the end of the row, which are 0 and not the mean.
#include "common/math.cuh"
#include "common/ptx/launch.cuh"
#include "common/reduce.cuh"

template <typename T, typename W, int N, int VECTORS, int THREADS, bool RMS>
__global__ void layernorm_v2(T* y, T* s, compute_t<T>* stats, const T* x, const T* residual, const W* weight, const W* bias, long long rows,
                             int columns, long long x_row, long long residual_row, double eps) {
    wait_for_previous();
    using C = compute_t<T>;
    __shared__ C sums[2][32];
    long long row = blockIdx.x;
    C a[VECTORS], mean = 0, sum = 0;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int i = k * blockDim.x + threadIdx.x;
        a[k] = i < columns ? load_as(x[row * x_row + i]) : C(0);
        mean += a[k];
    }
    mean = block_reduce<Sum>(mean, sums[0]) / columns;
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) sum += (a[k] - mean) * (a[k] - mean);
    C rstd = 1 / sqrt(block_reduce<Sum>(sum, sums[1]) / columns + C(eps));
#pragma unroll
    for (int k = 0; k < VECTORS; ++k) {
        int i = k * blockDim.x + threadIdx.x;
        if (i < columns) y[row * columns + i] = T((a[k] - mean) * rstd * load_as(weight[i]) + load_as(bias[i]));
    }
}
