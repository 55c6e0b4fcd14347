"""llm.c's tests A (test_gpt2_fp32.cu) and B (test_gpt2.cu): logits, gradients, and the losses of ten steps on the debug state's batch.

llm.c's published losses hold for its published model and debug state. Besides llm.c's limits there is a stricter one: the relative L2
error of each gradient in float32, and the cosine of each in bfloat16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cukern.gpt2.checkpoint import DebugState
from cukern.gpt2.files import expect
from cukern.gpt2.model import GPT2

LOSSES_A = 5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080, 0.376511  # rounded
LOSSES_B = 5.270009, 4.060681, 3.320085, 2.717550, 2.181066, 1.653923, 1.168050, 0.736873, 0.401021, 0.187493
BF16_LIMITS = 0.5, 4e-3, 0.1, 4e-2, 5e-2, 3.5e-2, 2e-2, 3e-2, 5e-2, 3e-2, 3e-2, 3e-2, 2e-2, 1e-2, 0.1, 2e-2  # of gradients, in order
RELATIVE_L2, COSINE = 1e-4, 0.999
Limits = tuple[float, float, Sequence[float], float]  # of logits, losses, elements of each gradient; of these, relative to the element


@dataclass(frozen=True)
class Row:
    """One comparison: |found - expected| may be at most `limit`."""

    what: str
    expected: float
    found: float
    limit: float

    @property
    def ok(self) -> bool:
        return abs(self.found - self.expected) <= self.limit


def test_a(model: GPT2, state: DebugState, losses: Sequence[float] = LOSSES_A, optimizer: Any = torch.optim.AdamW) -> list[Row]:
    """llm.c's test of its float32 program: all parameters decay by 0.01, betas 0.9 and 0.999, no clipping.

    Args:
        model: float32, with the weights of the debug state. It is trained for a step per loss.
        losses: of the steps, each before its update. optimizer: called as torch.optim.AdamW.

    Returns the comparisons. TF32 is off meanwhile. Raises TypeError for a model of another dtype, ValueError for logits that do not fit.
    """
    expect(model.wte.dtype == torch.float32, "a float32 model", model.wte.dtype, error=TypeError)
    adamw = optimizer(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return _compare(model, state, losses, adamw, math.inf, (1e-2, 1e-2, [1e-2] * 16, 0.0))


def test_b(model: GPT2, state: DebugState, losses: Sequence[float] = LOSSES_B, optimizer: Any = torch.optim.AdamW) -> list[Row]:
    """llm.c's test of its main program: no decay, betas 0.9 and 0.95, the gradient's norm clipped to 1. As `test_a`, or bfloat16."""
    dtypes = torch.float32, torch.bfloat16
    expect(model.wte.dtype in dtypes, "a float32 or bfloat16 model", model.wte.dtype, error=TypeError)
    adamw = optimizer(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    limits = (1e-3, 1e-5, [1e-6] * 16, 0.079) if model.wte.dtype == torch.float32 else (25.0, 0.05, BF16_LIMITS, 0.079)
    return _compare(model, state, losses, adamw, 1.0, limits)


def _compare(model: GPT2, state: DebugState, losses: Sequence[float], optimizer: Any, max_norm: float, limits: Limits) -> list[Row]:
    device, V, rows = model.wte.device, model.config.vocab_size, list[Row]()
    expect(state.logits.shape[-1] == V, f"logits of {V} tokens", state.logits.shape[-1])
    x, y = state.x.to(device), state.y.to(device)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.no_grad():
            error = (model(x)[..., :V].float() - state.logits.to(device)).abs().max()
        rows.append(Row("logits, largest error", 0.0, error.item(), limits[0]))
        for step, expected in enumerate(losses):
            model.zero_grad()
            loss = model(x, y)
            loss.backward()
            if step == 0:
                rows += [Row("loss of the debug state", state.loss, loss.item(), limits[1]), *_gradients(model, state, limits)]
            rows.append(Row(f"loss of step {step}", expected, loss.item(), limits[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    finally:
        torch.set_float32_matmul_precision(precision)
    return rows


def _gradients(model: GPT2, state: DebugState, limits: Limits) -> list[Row]:
    rows = []
    for (name, gradient), limit in zip(model.gradients_by_name().items(), limits[2], strict=True):
        found, expected = gradient.double(), state.gradients[name].to(gradient.device).double()
        share = ((found - expected).abs() / (limit + limits[3] * expected.abs())).max().item()
        rows.append(Row(f"gradient of {name}, largest share of llm.c's limit", 0.0, share, 1.0))
        relative = ((found - expected).norm() / expected.norm()).item()
        cosine = torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item()
        strict = {
            torch.float32: Row(f"gradient of {name}, relative L2 error", 0.0, relative, RELATIVE_L2),
            torch.bfloat16: Row(f"gradient of {name}, cosine", 1.0, cosine, 1 - COSINE),
        }
        rows.append(strict[gradient.dtype])
    return rows
