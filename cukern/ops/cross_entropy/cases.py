"""The registry's ops: cross_entropy with the default options, and cross_entropy_padded with all others on a padded vocabulary."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.cross_entropy.op import VERSIONS, cross_entropy
from cukern.ops.cross_entropy.reference import Options, reference
from cukern.runtime import checks
from cukern.runtime.registry import Cost, Op, register, row_counts


def _options(logits: Tensor, is_padded: bool) -> Options:
    columns = logits.shape[-1]
    if not is_padded:
        return Options(columns)
    return Options(columns - (47 if columns > 1000 else 3 if columns > 3 else 0), -1, "none", 0.1, 1e-2, 5.0)


def _call(is_padded: bool, logits: Tensor, targets: Tensor, version: str | None = None) -> Tensor:
    vocab, ignored, reduction, smoothing, z_loss, softcap = _options(logits, is_padded)
    loss = cross_entropy(
        logits, targets, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing, z_loss=z_loss, softcap=softcap or None,
        vocab_size=vocab, version=version,
    )  # fmt: skip
    return loss.to(logits.dtype)  # the tools expect outputs of the inputs' dtype


def _reference(is_padded: bool, logits: Tensor, targets: Tensor) -> Tensor:
    return reference(logits, targets, _options(logits, is_padded)).to(logits.dtype)


def _make(is_padded: bool, dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    logits = torch.randn(*dims, dtype=dtype, device=device)
    targets = torch.randint(_options(logits, is_padded).vocab, dims[:1], device=device)
    if is_padded:
        targets = targets.masked_fill(torch.arange(dims[0], device=device) % 4 == 3, -1).int()
    return logits, targets


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    rows, columns = dims
    n = rows * columns
    return {"fwd": Cost(n * itemsize + 4 * rows, 4 * n), "bwd": Cost(2 * n * itemsize + 4 * rows, 5 * n)}


def _magnitude(is_padded: bool, inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The sums of the terms' absolute values, without the softcap's slope, which is at most 1."""
    (logits, targets), (vocab, ignored, reduction, smoothing, z_loss, softcap) = inputs, _options(inputs[0], is_padded)
    x, valid = logits[:, :vocab], (targets != ignored)[:, None]
    c = softcap * torch.tanh(x / softcap) if softcap else x
    lse, t = c.logsumexp(1, keepdim=True), targets.long().clamp(0)[:, None]
    share = torch.full_like(c, smoothing / vocab).scatter_add(1, t, torch.full_like(lse, 1 - smoothing))
    loss = (lse.abs() + (share * c.abs()).sum(1, keepdim=True) + z_loss * lse * lse) * valid
    weight = valid * (douts[0].abs()[:, None] if reduction == "none" else douts[0].abs() / valid.sum())
    dx = torch.zeros_like(logits)
    dx[:, :vocab] = weight * ((1 + 2 * z_loss * lse.abs()) * (c - lse).exp() + share)
    return loss[:, 0] if reduction == "none" else loss.sum() / valid.sum(), dx


for _name, _is_padded in (("cross_entropy", False), ("cross_entropy_padded", True)):
    _calls: dict[str, Any] = {"spread" if _name == "cross_entropy" else "function": partial(_call, _is_padded)}
    register(
        Op(
            **{"function": cross_entropy, **_calls}, name=_name, stem="cross_entropy", variants=row_counts,
            reference=partial(_reference, _is_padded), versions=VERSIONS, dtypes=checks.FLOATS, dims="ROWS COLUMNS",
            make=partial(_make, _is_padded), inputs=("logits", "targets"), cost=_cost, bound="memory",
            magnitude=partial(_magnitude, _is_padded), roundings=4,
            check_dims=((1, 1), (129, 65), (64, 1000), (33, 4097), (5, 50_257), (7, 50_304)),
            sim_dims=((1, 1), (5, 67), (2, 300)),
            bench_dims=((8192, 50304), (8192, 50257), (32768, 4096), (4096, 128256)),
        )
    )  # fmt: skip
