"""One warp per row, reduced by shuffles."""

import torch

import cukern

weighted_sum = cukern.compile("""
__global__ void weighted_sum(float* out, const float* x, const float* w, int rows, int columns) {
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += 32) sum += x[blockIdx.x * columns + i] * w[i];
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
""")


def custom_kernel(data):
    x, w = data
    out = torch.empty_like(x[:, 0])
    weighted_sum[len(x), 32](out, x, w, *x.shape)
    return out
