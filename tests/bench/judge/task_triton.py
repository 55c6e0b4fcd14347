"""A Triton kernel: one program per row."""

import torch
import triton
import triton.language as tl


@triton.jit
def weighted_sum(out, x, w, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    products = tl.load(x + row * columns + i, i < columns, 0) * tl.load(w + i, i < columns, 0)
    tl.store(out + row, tl.sum(products))


def custom_kernel(data):
    x, w = data
    out = torch.empty(len(x), device="cuda", dtype=torch.float32)
    weighted_sum[(len(x),)](out, x, w, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]), num_warps=1)
    return out
