"""Times a Llama block of cukern's ops, forward and backward: eager calls, and the same calls under
torch.compile(fullgraph=True)."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table, name_of

NAME = "llama_block"  # of this benchmark, in place of an op
SHAPES = (1, 4096), (4, 2048)  # sequences and tokens of each
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 32, 8, 128, 14336


def block(x: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
    """Pre-norm attention with rotary embeddings and grouped queries, and a gated MLP. x: (batch, time,
    width)."""
    norm1, query, key_value, out, norm2, gate_up, down = weights
    size = 2 * cos.shape[-1]
    h = cukern.rmsnorm(x, norm1, eps=1e-6)
    q = F.linear(h, query).unflatten(-1, (-1, size))
    k, v = F.linear(h, key_value).unflatten(-1, (2, -1, size)).unbind(2)
    q, k = cukern.rope(q, cos, sin, k=k)
    y = cukern.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    x = x + F.linear(y.transpose(1, 2).flatten(2), out)
    gate, up = F.linear(cukern.rmsnorm(x, norm2, eps=1e-6), gate_up).chunk(2, -1)
    return x + F.linear(cukern.swiglu(gate, up), down)


def steps(
    batch: int,
    tokens: int,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    size: int = HEAD_DIM,
    hidden: int = HIDDEN,
) -> dict:
    """Under "eager" and under "compiled": a function that returns the output and the gradients of x and of
    the weights."""
    device, width = environment.device(), heads * size
    dtype, compiler = (torch.bfloat16, "inductor") if device.type == "cuda" else (torch.float32, "aot_eager")
    columns = (width, 2 * kv_heads * size, width, 2 * hidden, width), (width, width, width, width, hidden)
    query, key_value, out, gate_up, down = (
        torch.randn(n, m, device=device, dtype=dtype) * m**-0.5 for n, m in zip(*columns, strict=True)
    )
    x, dy = torch.randn(2, batch, tokens, width, device=device, dtype=dtype)
    one = torch.ones(width, device=device, dtype=dtype)
    leaves = [t.clone().requires_grad_() for t in (x, one, query, key_value, out, one, gate_up, down)]
    tables = cukern.rope_tables(tokens, size, device=device)

    def step(call) -> tuple[Tensor, ...]:
        y = call(leaves[0], *tables, *leaves[1:])
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    compiled = torch.compile(block, fullgraph=True, backend=compiler, dynamic=False)
    return {"eager": lambda: step(block), "compiled": lambda: step(compiled)}


def measure_llama_block(
    seconds: float, shapes: Sequence[tuple[int, int]] = SHAPES, *sizes: int
) -> Iterator[Table]:
    """Yield the times of both ways, in alternation, for about `seconds` per shape. `sizes`: those of `steps`,
    in its order."""
    device = environment.device()
    for batch, tokens in shapes:
        with timing.side_stream(device):
            calls = steps(batch, tokens, *sizes)
            times, failed = timing.device_times({way: [call] for way, call in calls.items()}, device, seconds)
            dtype = name_of(calls["eager"]()[0].dtype)
            del calls
        for error in failed.values():
            raise error
        yield Table(
            [
                Row(NAME, way, "fwd+bwd", (batch, tokens), dtype, "cukern", t.median_us, t.iqr_us)
                for way, t in times.items()
            ],
            {},
        )
