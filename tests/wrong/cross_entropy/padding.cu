// Wrong on purpose: the sum runs over the padding of the vocabulary too.
#include "common/reduce.cuh"

__global__ void row_loss(float* loss, const float* x, const long long* targets, int columns, int vocab) {
    __shared__ float maxima[32], sums[32];
    x += blockIdx.x * (long long)columns;
    float largest = minus_infinity<float>(), sum = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) largest = max(largest, x[i]);
    largest = block_reduce<Max>(largest, maxima);
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += exp(x[i] - largest);
    sum = block_reduce<Sum>(sum, sums);
    if (threadIdx.x == 0) loss[blockIdx.x] = largest - x[targets[blockIdx.x]] + log(sum);
}
