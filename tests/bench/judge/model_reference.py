"""A reference in the format of KernelBench: an affine map of each column, and relu."""

import torch

batch = 6
features = 4 * 25


class Model(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))
        self.shift = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))

    def forward(self, x):
        return torch.relu(x * self.scale + self.shift)


def get_inputs():
    return [torch.randn(batch, features, dtype=torch.float32)]


def get_init_inputs():
    return [features]
