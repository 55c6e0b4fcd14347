"""A Llama block with cukern's ops under torch.compile(fullgraph=True), next to the same block in plain torch.

python examples/llama_block.py        on a GPU it also prints the times of both
"""

import torch
import torch.nn.functional as F
from torch import nn

import cukern


class Block(nn.Module):
    """Pre-norm attention with rotary embeddings and grouped queries, and a gated MLP. `plain`: torch's
    operations only."""

    def __init__(
        self, width: int = 256, heads: int = 8, kv_heads: int = 2, hidden: int = 688, plain: bool = False
    ):
        super().__init__()
        self.heads, self.kv_heads, self.size, self.plain = heads, kv_heads, width // heads, plain
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.gate_up, self.down = (
            nn.Linear(width, 2 * hidden, bias=False),
            nn.Linear(hidden, width, bias=False),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, steps, _ = x.shape
        h = self.norm(x, self.norm1)
        q = self.q(h).view(batch, steps, self.heads, self.size)
        k, v = self.kv(h).view(batch, steps, 2, self.kv_heads, self.size).unbind(2)
        q, k = (rotated(q, cos, sin), rotated(k, cos, sin)) if self.plain else cukern.rope(q, cos, sin, k=k)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            if self.plain
            else cukern.attention(q, k, v)
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, steps, -1))
        gate, up = self.gate_up(self.norm(x, self.norm2)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up if self.plain else cukern.swiglu(gate, up))

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return (
            F.rms_norm(x, weight.shape, weight, 1e-6) if self.plain else cukern.rmsnorm(x, weight, eps=1e-6)
        )


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


def step(
    block: nn.Module, head: torch.Tensor, x: torch.Tensor, targets: torch.Tensor, tables: tuple, loss
) -> torch.Tensor:
    found = loss(block(x, *tables) @ head, targets)
    found.backward()
    return found.detach()


def main(steps: int = 64, width: int = 256) -> None:
    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    ours = Block(width).to(device, dtype)
    plain = Block(width, plain=True).to(device, dtype)
    plain.load_state_dict(ours.state_dict())
    tables = cukern.rope_tables(steps, ours.size, device=device)
    x = torch.randn(2, steps, width, device=device, dtype=dtype)
    head, targets = (
        torch.randn(width, 1000, device=device, dtype=dtype) * 0.05,
        torch.randint(1000, (2, steps), device=device),
    )
    compiled = torch.compile(ours, fullgraph=True, backend="inductor" if gpu else "aot_eager")

    def torch_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    mine = step(compiled, head, x, targets, tables, cukern.cross_entropy)
    theirs = step(plain, head, x, targets, tables, torch_loss)
    print(f"loss {mine.item():.5f}, plain torch {theirs.item():.5f}")
    torch.testing.assert_close(
        mine.float(), theirs.float(), rtol=2e-2 if gpu else 1e-5, atol=1e-3 if gpu else 1e-5
    )
    for (name, a), b in zip(ours.named_parameters(), plain.parameters(), strict=True):
        error = (a.grad.float() - b.grad.float()).norm() / b.grad.float().norm()
        assert error < (5e-2 if gpu else 1e-4), f"gradient of {name}: relative error {error:.1e}"
    print("all gradients agree")
    if gpu:
        jobs = {"cukern": (compiled, cukern.cross_entropy), "torch": (torch.compile(plain), torch_loss)}
        for name, (block, loss) in jobs.items():
            print(
                f"{name}: {time_us(lambda b=block, f=loss: step(b, head, x, targets, tables, f)):.0f} us a "
                f"step"
            )


def time_us(call, count: int = 50) -> float:
    for _ in range(5):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / count


if __name__ == "__main__":
    main(2048, 2048) if torch.cuda.is_available() else main()
