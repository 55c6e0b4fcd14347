"""Writes into the buffer that the reference writes, too."""

import torch


def custom_kernel(data):
    torch.maximum(data["x"], data["slope"] * data["x"], out=data["out"])
    return data["out"]
