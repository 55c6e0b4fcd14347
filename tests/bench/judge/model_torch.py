"""Plain torch: addcmul, and relu in place."""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))
        self.shift = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))

    def forward(self, x):
        return torch.addcmul(self.shift, x, self.scale).relu_()
