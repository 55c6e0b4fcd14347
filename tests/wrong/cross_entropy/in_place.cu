// The gradient is written over the logits, the loss into column `vocab`.
#include "common/reduce.cuh"

__global__ void row_gradient(float* x, const long long* targets, int columns, int vocab) {
    __shared__ float sums[32];
    x += blockIdx.x * (long long)columns;
    long long target = targets[blockIdx.x];
    float sum = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += exp(x[i]);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) x[vocab] = log(sum) - x[target];
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) x[i] = exp(x[i]) / sum - (i == target);
}
