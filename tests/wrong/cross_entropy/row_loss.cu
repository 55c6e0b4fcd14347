// Online softmax: the loss of a row of logits. `columns` - `vocab` columns are padding.
#include "common/reduce.cuh"

__global__ void row_loss(float* loss, const float* x, const long long* targets, int columns, int vocab) {
    __shared__ float maxima[32], sums[32];
    x += blockIdx.x * (long long)columns;
    float largest = minus_infinity<float>(), sum = 0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        float before = largest;
        largest = max(largest, x[i]);
        sum = sum * exp(before - largest) + exp(x[i] - largest);
    }
    float top = block_reduce<Max>(largest, maxima);
    sum = block_reduce<Sum>(sum * exp(largest - top), sums);
    if (threadIdx.x == 0) loss[blockIdx.x] = top - x[targets[blockIdx.x]] + log(sum);
}
