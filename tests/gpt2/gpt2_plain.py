"""GPT-2 in plain torch, written from the specification and not by cukern.gpt2, and the debug states that it
makes."""

import math

import torch
from gpt2_files import SHAPES
from torch.nn.functional import cross_entropy, embedding, gelu, layer_norm, linear

from cukern.gpt2.checkpoint import Config, DebugState

NAMES = [name for name, _ in SHAPES]


def random_weights(c, seed=42):
    """Drawn by torch's global generator, a matrix of a layer at a time."""
    torch.manual_seed(seed)
    L, C = c.num_layers, c.channels
    w = {name: torch.zeros(shape) for name, shape in c.shapes.items()}
    for name in ("ln1w", "ln2w", "lnfw"):
        w[name] = torch.ones_like(w[name])
    torch.nn.init.normal_(w["wte"][: c.vocab_size], std=0.02)
    torch.nn.init.normal_(w["wpe"], std=0.02)
    branch = torch.tensor(0.02) / torch.tensor(2.0 * L).sqrt()
    for i in range(L):
        w["qkvw"][i] = torch.nn.init.normal_(torch.empty(3 * C, C), std=0.02)
        w["attprojw"][i] = torch.empty(C, C).normal_(0, branch.item())
        w["fcw"][i] = torch.nn.init.normal_(torch.empty(4 * C, C), std=0.02)
        w["fcprojw"][i] = torch.empty(C, 4 * C).normal_(0, branch.item())
    return w


def forward(w, tokens, heads, V):
    """The logits of the V tokens of the vocabulary."""
    (B, T), C = tokens.shape, w["wte"].shape[1]
    hidden = torch.ones(T, T, dtype=torch.bool, device=tokens.device).triu(1)
    x = embedding(tokens, w["wte"]) + w["wpe"][:T]
    for i in range(w["ln1w"].shape[0]):
        y = layer_norm(x, (C,), w["ln1w"][i], w["ln1b"][i], 1e-5)
        q, k, v = (
            z.view(B, T, heads, C // heads).transpose(1, 2)
            for z in linear(y, w["qkvw"][i], w["qkvb"][i]).split(C, -1)
        )
        weights = torch.softmax((q @ k.mT / math.sqrt(C // heads)).masked_fill(hidden, -math.inf), -1)
        x = x + linear((weights @ v).transpose(1, 2).reshape(B, T, C), w["attprojw"][i], w["attprojb"][i])
        y = layer_norm(x, (C,), w["ln2w"][i], w["ln2b"][i], 1e-5)
        x = x + linear(
            gelu(linear(y, w["fcw"][i], w["fcb"][i]), approximate="tanh"), w["fcprojw"][i], w["fcprojb"][i]
        )
    return linear(layer_norm(x, (C,), w["lnfw"], w["lnfb"], 1e-5), w["wte"])[..., :V]


def step(w, x, y, c):
    """The logits and the loss, after its backward."""
    logits = forward(w, x, c.num_heads, c.vocab_size)
    loss = cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    return logits.detach(), loss.item()


def reference(
    c: Config, B: int, T: int, device="cpu", steps=10
) -> tuple[dict, DebugState, list[float], list[float]]:
    """Seed-42 weights, the debug state of a random batch, and the losses of tests A and B of llm.c, as
    section 6 describes them."""
    weights = random_weights(c)
    x, y = torch.randint(c.vocab_size, (2, B, T), generator=torch.Generator().manual_seed(1)).to(device)
    state, tables = None, []
    for betas, decay, clip in (((0.9, 0.999), 0.01, None), ((0.9, 0.95), 0.0, 1.0)):
        w = {name: weights[name].to(device, copy=True).requires_grad_() for name in NAMES}
        adamw = torch.optim.AdamW(w.values(), lr=1e-4, betas=betas, eps=1e-8, weight_decay=decay)
        losses = []
        for _ in range(steps):
            adamw.zero_grad()
            logits, loss = step(w, x, y, c)
            state = state or DebugState(
                x.cpu(), y.cpu(), logits.cpu(), loss, {name: w[name].grad.cpu().clone() for name in NAMES}
            )
            losses.append(loss)
            if clip:
                norm = torch.stack([p.grad.norm() for p in w.values()]).norm()
                for p in w.values():
                    p.grad *= min(1.0, clip / norm.item())
            adamw.step()
        tables.append(losses)
    return weights, state, *tables
