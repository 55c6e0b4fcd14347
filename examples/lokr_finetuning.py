"""LoKr fine-tuning: a frozen network learns a changed task through adapters W + scale * (W1 kron W2), without
forming the product."""

import copy

import torch
from torch import nn

import cukern


class LoKrLinear(nn.Module):
    """A frozen linear layer with an adapter. It starts as the layer itself, because W2's second factor is
    0."""

    def __init__(self, base: nn.Linear, outer: int = 8, rank: int = 4, scale: float = 1.0):
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        out, into = base.out_features // outer, base.in_features // outer
        self.w1 = nn.Parameter(torch.randn(outer, outer) / outer**0.5)
        self.a = nn.Parameter(torch.randn(out, rank) / rank**0.5)
        self.b = nn.Parameter(torch.zeros(rank, into))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cukern.lokr_linear(x, self.w1, (self.a, self.b), scale=self.scale, residual=self.base(x))


def main(steps: int = 150) -> tuple[float, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).to(device)
    target = copy.deepcopy(base)
    with torch.no_grad():  # the new task: weights that differ by a Kronecker product
        for layer in (target[0], target[2]):
            small = torch.randn(layer.out_features // 8, 2) @ torch.randn(2, layer.in_features // 8)
            layer.weight += torch.kron(torch.randn(8, 8) / 8, small / 8).to(device)
    model = nn.Sequential(LoKrLinear(base[0]), nn.GELU(), LoKrLinear(base[2])).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    counts = sum(p.numel() for p in trained), sum(p.numel() for p in base.parameters())
    print(f"{counts[0]} of {counts[1]} parameters are trained")
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(steps):
        x = torch.randn(256, 64, device=device)
        loss = (model(x) - target(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"loss {losses[0]:.4f}, after {steps} steps {losses[-1]:.6f}")
    return losses[0], losses[-1]


if __name__ == "__main__":
    main()
