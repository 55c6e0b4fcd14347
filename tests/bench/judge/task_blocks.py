"""One thread block per row, reduced in shared memory."""

import torch

import cukern

weighted_sum = cukern.compile("""
__global__ void weighted_sum(float* out, const float* x, const float* w, int rows, int columns) {
    __shared__ float part[64];
    float sum = 0;
    for (int i = threadIdx.x; i < columns; i += 64) sum += x[blockIdx.x * columns + i] * w[i];
    part[threadIdx.x] = sum;
    for (int half = 32; half; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
""")


def custom_kernel(data):
    x, w = data
    out = torch.empty_like(x[:, 0])
    weighted_sum[len(x), 64](out, x, w, *x.shape)
    return out
