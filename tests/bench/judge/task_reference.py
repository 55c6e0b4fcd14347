"""A reference in the format of GPU MODE's reference-kernels: the weighted sum of each row."""

import torch


def generate_input(rows: int, columns: int, seed: int):
    generator = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(rows, columns, device="cuda", dtype=torch.float32, generator=generator)
    w = torch.randn(columns, device="cuda", dtype=torch.float32, generator=generator)
    return x, w


def ref_kernel(data):
    x, w = data
    return (x * w).sum(dim=-1)
