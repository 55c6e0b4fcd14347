// Wrong on purpose: rmsnorm's layernorm_v1 whose next row's sum overwrites this one's while a slow warp still reads it.
#include "common/math.cuh"
#include "common/reduce.cuh"

template <typename T, typename W, bool RMS>
__global__ void layernorm_v1(T* y, T* s, compute_t<T>* stats, const T* x, const T* residual, const W* weight, const W* bias, long long rows,
                             long long columns, long long x_row, long long residual_row, double eps) {
    using C = compute_t<T>;
    __shared__ C sums[32];
    for (long long row = blockIdx.x; row < rows; row += gridDim.x) {
        C sum = 0;
        for (long long i = threadIdx.x; i < columns; i += blockDim.x) sum += load_as(x[row * x_row + i]) * load_as(x[row * x_row + i]);
        C rstd = 1 / sqrt(block_reduce<Sum>(sum, sums) / columns + C(eps));
        for (long long i = threadIdx.x; i < columns; i += blockDim.x)
            y[row * columns + i] = T(load_as(x[row * x_row + i]) * rstd * load_as(weight[i]));
        // no __syncthreads()
    }
}
