// The sum of the squares of each chunk.
#include "common/reduce.cuh"

constexpr int CHUNK = 512;

__global__ void adamw_squares(float* out, const float* grad, int n) {
    __shared__ float sums[32];
    float sum = 0;
    for (int i = blockIdx.x * CHUNK + threadIdx.x; i < min((blockIdx.x + 1) * CHUNK, n); i += blockDim.x)
        sum += grad[i] * grad[i];
    sum = warp_reduce<Sum>(sum);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    sum = warp_reduce<Sum>(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0.0f);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
