"""Plain torch with other operations, in place on its own tensor."""

import torch


class ModelNew(torch.nn.Module):
    def __init__(self, features):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))
        self.shift = torch.nn.Parameter(torch.randn(features, dtype=torch.float32))

    def forward(self, x):
        return x.mul(self.scale).add_(self.shift).clamp_(min=0)
