"""llm.c's tests A (test_gpt2_fp32.cu) and B (test_gpt2.cu): logits, gradients, and the losses of ten steps on the debug state's batch.

llm.c's published losses hold for its published model and debug state. Besides llm.c's limits there is a stricter one: the relative L2
error of each gradient is at most 1e-4.
"""

import contextlib
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
Limits = tuple[float, float, float, float]  # of logits, losses, elements of gradients, and of these relative to the element


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
    adamw = optimizer(model.parameters(), lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    return _compare(model, state, losses, adamw, math.inf, (1e-2, 1e-2, 1e-2, 0.0))


def test_b(model: GPT2, state: DebugState, losses: Sequence[float] = LOSSES_B, optimizer: Any = torch.optim.AdamW) -> list[Row]:
    """As `test_a`, llm.c's test of its main program in float32: no decay, betas 0.9 and 0.95, the gradient's norm clipped to 1."""
    adamw = optimizer(model.parameters(), lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    return _compare(model, state, losses, adamw, 1.0, (1e-3, 1e-5, 1e-6, 0.079))


def _compare(model: GPT2, state: DebugState, losses: Sequence[float], optimizer: Any, max_norm: float, limits: Limits) -> list[Row]:
    device, V, rows = model.wte.device, model.config.vocab_size, list[Row]()
    expect(model.wte.dtype == torch.float32, "a float32 model", model.wte.dtype, error=TypeError)
    expect(state.logits.shape[-1] == V, f"logits of {V} tokens", state.logits.shape[-1])
    x, y = state.x.to(device), state.y.to(device)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
        error = (model(x).detach()[..., :V] - state.logits.to(device)).abs().max()
        rows.append(Row("logits, largest error", 0.0, error.item(), limits[0]))
        for step, expected in enumerate(losses):
            model.zero_grad()
            loss = model(x, y)
            loss.backward()
            if step == 0:
                rows.append(Row("loss of the debug state", state.loss, loss.item(), limits[1]))
                for name, found in model.gradients_by_name().items():
                    gradient = state.gradients[name].to(device)
                    error = found - gradient
                    share = (error.abs() / (limits[2] + limits[3] * gradient.abs())).max().item()
                    rows.append(Row(f"gradient of {name}, largest share of llm.c's limit", 0.0, share, 1.0))
                    rows.append(Row(f"gradient of {name}, relative L2 error", 0.0, (error.norm() / gradient.norm()).item(), 1e-4))
            rows.append(Row(f"loss of step {step}", expected, loss.item(), limits[1]))
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
    return rows
