"""Times both passes of the losses that never have all logits, and their peak memory, next to torch.compile's
loss of all logits and Liger's fused one."""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

import cukern
from cukern.bench import environment, timing
from cukern.bench.measure import Row, Table, name_of
from cukern.runtime import checks

SHAPES = (8192, 128256, 2048), (8192, 151936, 4096)  # rows, classes, columns

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy((x @ weight.mT).float(), targets)


def _logprobs(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logprobs, entropies = cukern.linear_logprobs(x, weight, targets, entropy=True)
    return (0.01 * entropies - logprobs).mean()


def _step(loss: Loss, x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(x, weight, targets), (x, weight))


def _losses(device: torch.device) -> dict[str, Loss]:
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    found: dict[str, Loss] = {
        "cukern": cukern.linear_cross_entropy,
        "cukern logprobs": _logprobs,
        "torch.compile": torch.compile(_torch, dynamic=False, backend=backend),
    }
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["liger"] = liger_fused_linear_cross_entropy
    return found


def measure_fused_loss(
    only: Sequence[str] | None, steps: int = 10, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> Iterator[Table]:
    """Yield a table for each shape, in bfloat16 on a GPU, else in float32."""
    device = environment.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    losses = _losses(device)
    chosen = [checks.choice("--only", name, losses) for name in only or losses]
    missing = {} if "liger" in losses else {"liger": "needs liger_kernel and a GPU"}
    for shape in shapes:
        rows, classes, columns = shape
        torch.manual_seed(0)
        x = torch.randn(rows, columns, dtype=dtype, device=device, requires_grad=True)
        weight = torch.randn(classes, columns, dtype=dtype, device=device).mul_(0.02).requires_grad_()
        targets = torch.randint(classes, (rows,), dtype=torch.int64, device=device)
        found = []
        for name in chosen:
            step = partial(_step, losses[name], x, weight, targets)
            times, peak = timing.times_and_peak(step, steps, device)
            us = times.median_us, times.iqr_us
            found.append(Row("fused_loss", "", "fwd+bwd", shape, name_of(dtype), name, *us, peak_mib=peak))
        yield Table(found, missing)
