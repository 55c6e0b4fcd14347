"""Uninitialized: adds to an output that torch.empty made."""

import torch

import cukern

weighted_sum = cukern.compile("""
__global__ void weighted_sum(float* out, const float* x, const float* w, int rows, int columns) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    for (int i = 0; i < columns; ++i) out[row] += x[row * columns + i] * w[i];
}
""")


def custom_kernel(data):
    x, w = data
    out = torch.empty_like(x[:, 0])
    weighted_sum[(len(x) + 31) // 32, 32](out, x, w, *x.shape)
    return out
