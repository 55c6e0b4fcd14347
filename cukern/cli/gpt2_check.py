"""`cukern gpt2 check`: llm.c's tests A (test_gpt2_fp32.cu) and B (test_gpt2.cu) on the batch of a debug
state, in float32.

llm.c's published losses hold for its published model and debug state. Besides llm.c's limits there is a
stricter one: the relative L2 error of each gradient is at most 1e-4.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

import cukern
from cukern.bench.environment import float32_products
from cukern.cli.common import say
from cukern.cli.gpt2_train import (
    MODEL,
    Device,
    MatmulForward,
    ModelFile,
    SoftmaxBackward,
    SoftmaxForward,
    kernels,
    pick_device,
)
from cukern.gpt2 import checkpoint
from cukern.gpt2.checkpoint import Config, DebugState
from cukern.gpt2.files import expect
from cukern.gpt2.model import GPT2


class Parity(NamedTuple):
    """A test of llm.c: the loss before each update, the numbers of AdamW, the norm to which the gradient is
    clipped, and the limits of the errors of logits, of losses, and of an element of a gradient, as an
    absolute and a relative one."""

    losses: Sequence[float]
    betas: tuple[float, float]
    weight_decay: float
    max_norm: float
    logits: float
    loss: float
    absolute: float
    relative: float


# rounded
LOSSES_A = 5.270007, 4.059707, 3.375123, 2.800783, 2.315382, 1.849029, 1.394656, 0.999147, 0.624080, 0.376511
LOSSES_B = 5.270009, 4.060681, 3.320085, 2.717550, 2.181066, 1.653923, 1.168050, 0.736873, 0.401021, 0.187493
_LOSSES = {
    True: "llm.c's published losses of ten updates",
    False: "the one in the state; no other file has the losses of its updates",
}
TESTS = {
    "A": Parity(LOSSES_A, (0.9, 0.999), 0.01, math.inf, 1e-2, 1e-2, 1e-2, 0.0),  # all parameters decay
    "B": Parity(LOSSES_B, (0.9, 0.95), 0.0, 1.0, 1e-3, 1e-5, 1e-6, 0.079),
}


def is_published(config: Config, state: DebugState) -> bool:
    """True for the debug state of llm.c's starter pack, for which its losses hold: sizes, batch and loss are
    the published ones."""
    return config == Config() and tuple(state.x.shape) == (4, 64) and abs(state.loss - LOSSES_A[0]) < 1e-4


class Row(NamedTuple):
    """One comparison: |found - expected| may be at most `limit`."""

    what: str
    expected: float
    found: float
    limit: float

    @property
    def ok(self) -> bool:
        return abs(self.found - self.expected) <= self.limit


def compare(
    test: Parity, model: GPT2, state: DebugState, optimizer: Any = torch.optim.AdamW, losses: bool = True
) -> list[Row]:
    """The comparisons of a test.

    Args:
        model: float32, with the weights of the debug state. It is trained for a step per loss.
        optimizer: called as torch.optim.AdamW.
        losses: compare the losses before all updates with those of the test; without, only the first loss,
            with the state's.

    TF32 is off meanwhile. Raises TypeError for a model of another dtype, ValueError for logits that do not
    fit.
    """
    device, V, rows = model.wte.device, model.config.vocab_size, list[Row]()
    expect(model.wte.dtype == torch.float32, "a float32 model", model.wte.dtype, error=TypeError)
    expect(state.logits.shape[-1] == V, f"logits of {V} tokens", state.logits.shape[-1])
    adamw = optimizer(model.parameters(), lr=1e-4, betas=test.betas, eps=1e-8, weight_decay=test.weight_decay)
    x, y = state.x.to(device), state.y.to(device)
    with float32_products(False):
        error = (model(x).detach()[..., :V] - state.logits.to(device)).abs().max()
        rows.append(Row("logits, largest error", 0.0, error.item(), test.logits))
        for step, expected in enumerate(test.losses if losses else test.losses[:1]):
            model.zero_grad()
            loss = model(x, y)
            loss.backward()
            if step == 0:
                rows.append(Row("loss of the debug state", state.loss, loss.item(), test.loss))
                for name, found in model.gradients_by_name().items():
                    gradient = state.gradients[name].to(device)
                    error = found - gradient
                    share = (error.abs() / (test.absolute + test.relative * gradient.abs())).max().item()
                    rows.append(Row(f"gradient of {name}, largest share of llm.c's limit", 0.0, share, 1.0))
                    rows.append(
                        Row(
                            f"gradient of {name}, relative L2 error",
                            0.0,
                            (error.norm() / gradient.norm()).item(),
                            1e-4,
                        )
                    )
            if losses:
                rows.append(Row(f"loss of step {step}", expected, loss.item(), test.loss))
            torch.nn.utils.clip_grad_norm_(model.parameters(), test.max_norm)
            adamw.step()
    return rows


def check(
    model: ModelFile = MODEL,
    state: Annotated[Path, typer.Option("--debug-state", help="The debug state of this model.")] = Path(
        "gpt2_124M_debug_state.bin"
    ),
    device: Device = None,
    softmax_forward_kernel: SoftmaxForward = None,
    softmax_backward_kernel: SoftmaxBackward = None,
    matmul_forward_kernel: MatmulForward = None,
) -> None:
    """Compare logits, loss and gradients with a debug state, and with the published one the losses of ten
    updates: llm.c's tests A and B. Exits with 1 if one differs."""
    place = pick_device(device)
    config, parameters = checkpoint.read_model(model)
    debug = checkpoint.read_debug_state(state, config)
    wrong, published = 0, is_published(config, debug)
    say(
        f"the debug state is {'' if published else 'not '}the published one: losses are compared with "
        f"{_LOSSES[published]}"
    )
    for name, test in TESTS.items():
        made = GPT2(config, device=place, dtype=torch.float32)
        made.load_parameters(parameters)
        with kernels(place, softmax_forward_kernel, softmax_backward_kernel, matmul_forward_kernel):
            rows = compare(test, made, debug, cukern.AdamW, published)
        say(f"test {name}")
        for row in rows:
            verdict = (
                f"{'ok   ' if row.ok else 'WRONG'} {row.what}: {row.found:.6g}, expected {row.expected:.6g} "
                f"+- {row.limit:.1g}"
            )
            say(verdict, None if row.ok else "red")
        wrong += sum(not row.ok for row in rows)
    say(f"{wrong or 'nothing'} wrong", "red" if wrong else "green")
    if wrong:
        raise typer.Exit(1)
