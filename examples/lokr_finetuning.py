"""LoKr fine-tuning: a LyCORIS network takes cukern's kernels by one line, and its losses stay the same. Needs
`pip install lycoris-lora`."""

import copy

import torch
from lycoris import create_lycoris
from torch import nn

import cukern


def losses(patched: bool, steps: int = 60) -> list[float]:
    """Of adapters W + scale * (W1 kron W2) on a frozen network, which learn a changed task."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)).requires_grad_(False).to(device)
    x, changed = torch.randn(256, 64, device=device), copy.deepcopy(model)
    for layer in (changed[0], changed[2]):  # the new task: weights that differ by a Kronecker product
        small = torch.randn(layer.out_features // 8, 2) @ torch.randn(2, layer.in_features // 8)
        layer.weight += torch.kron(torch.randn(8, 8), small).to(device) / 64
    target = changed(x)
    network = create_lycoris(model, algo="lokr", factor=8, linear_dim=2, linear_alpha=2)
    network.apply_to()
    network.to(device)
    if patched:
        print(cukern.patch_lycoris(network))  # the one line
    optimizer, found = torch.optim.AdamW(network.parameters(), lr=1e-2), []
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def main() -> tuple[list[float], list[float]]:
    plain, ours = losses(False), losses(True)
    worst = max(abs(a - b) / a for a, b in zip(plain, ours, strict=True))
    print(f"loss {plain[0]:.4f}, after {len(plain)} steps {plain[-1]:.6f}, with the patch {ours[-1]:.6f}")
    print(f"largest relative difference of the losses: {worst:.1e}")
    return plain, ours


if __name__ == "__main__":
    main()
