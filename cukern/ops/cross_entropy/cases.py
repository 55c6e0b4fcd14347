"""The cases of two ops: cross_entropy, cross_entropy_padded (all options, and a padded vocabulary) and
linear_cross_entropy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.cross_entropy import linear
from cukern.ops.cross_entropy.op import VERSIONS, Options, cross_entropy, reference
from cukern.runtime.registry import Case, Cost, Op, register, row_counts

_PADDED: dict[str, Any] = {
    "ignore_index": -1,
    "reduction": "none",
    "label_smoothing": 0.1,
    "z_loss": 1e-2,
    "softcap": 5.0,
}


def _options(padded: bool, columns: int) -> Options:
    padding = 47 if columns > 1000 else 3 if columns > 3 else 0
    return Options(columns - padding, *_PADDED.values()) if padded else Options(columns)


def _padded_call(logits: Tensor, targets: Tensor, version: str | None = None) -> Tensor:
    return cross_entropy(
        logits, targets, vocab_size=_options(True, logits.shape[-1]).vocab, version=version, **_PADDED
    )


def _make(
    padded: bool, dims: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    targets = torch.randint(_options(padded, dims[1]).vocab, dims[:1], dtype=torch.int64, device=device)
    if padded:
        targets = targets.masked_fill(
            torch.arange(dims[0], dtype=torch.int64, device=device) % 4 == 3, -1
        ).int()
    return torch.randn(*dims, dtype=dtype, device=device), targets


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n = dims[0] * dims[1]
    return {
        "fwd": Cost(n * itemsize + 4 * dims[0], 4 * n),
        "bwd": Cost(2 * n * itemsize + 4 * dims[0], 5 * n),
    }


def _magnitude(padded: bool, inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The sums of the terms' absolute values. The softcap's slope, which is at most 1, is left out."""
    (logits, targets), (vocab, ignored, reduction, smoothing, z_loss, softcap, _) = (
        inputs,
        _options(padded, inputs[0].shape[1]),
    )
    c, valid = logits[:, :vocab], (targets != ignored)[:, None]
    c = softcap * torch.tanh(c / softcap) if softcap else c
    lse, weight = c.logsumexp(1, keepdim=True), valid / (1 if reduction == "none" else valid.sum())
    share = torch.nn.functional.one_hot(targets.long().clamp(0), vocab) * (1 - smoothing) + smoothing / vocab
    loss = weight * (lse.abs() + (share * c.abs()).sum(1, keepdim=True) + z_loss * lse * lse)
    dx = weight * douts[0].abs().view(-1, 1) * ((1 + 2 * z_loss * lse.abs()) * (c - lse).exp() + share)
    return loss[:, 0] if reduction == "none" else loss.sum(), torch.nn.functional.pad(
        dx, (0, logits.shape[1] - vocab)
    )


_OP = Op("cross_entropy", "cross_entropy", VERSIONS)
for _name, _function, _padded in (
    ("cross_entropy", cross_entropy, False),
    ("cross_entropy_padded", _padded_call, True),
):
    register(Case(
        name=_name, op=_OP, call=_function, variants=row_counts,
        reference=lambda logits, targets, padded=_padded: reference(logits, targets,
                                                                    _options(padded, logits.shape[-1])),
        make=partial(_make, _padded), magnitude=partial(_magnitude, _padded), roundings=4,
        dims="ROWS COLUMNS", inputs=("logits", "targets"), cost=_cost,
        check_dims=((1, 1), (129, 65), (64, 1000), (33, 4097), (5, 50_257), (7, 50_304)),
        sim_dims=((1, 1), (5, 67), (2, 300)),
        bench_dims=((8192, 50304), (8192, 50257), (32768, 768), (8192, 4096), (4096, 128256)),
    ))  # fmt: skip


# ---- linear_cross_entropy


def _make_linear(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """Logits have a standard deviation of 1. One target in four is ignored."""
    rows, classes, columns = dims
    ignored = torch.arange(rows, dtype=torch.int64, device=device) % 4 == 3
    targets = torch.randint(classes, (rows,), dtype=torch.int64, device=device).masked_fill(ignored, -100)
    x, weight = (torch.randn(n, columns, dtype=dtype, device=device) for n in (rows, classes))
    return x, weight * columns**-0.5, targets


def _linear_magnitude(inputs: tuple[Tensor, ...], douts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The sums of the absolute values of the terms. An error of a logit is one of its probability."""
    x, weight, targets = inputs
    c, valid = x @ weight.mT, (targets >= 0)[:, None]
    size, scale = x.abs() @ weight.abs().mT, valid / valid.sum() * douts[0].abs()
    share = (c - c.logsumexp(1, keepdim=True)).exp()
    d = scale * (share * (1 + size) + torch.nn.functional.one_hot(targets.clamp(0), len(weight)))
    loss = (
        valid / valid.sum() * (c.logsumexp(1, keepdim=True).abs() + size.gather(1, targets.clamp(0)[:, None]))
    )
    return loss.sum(), d @ weight.abs(), d.mT @ x.abs()


def _linear_cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    rows, classes, columns = dims
    one = Cost((rows + classes) * columns * itemsize, 2 * rows * classes * columns)  # of three products
    return {"fwd": one, "bwd": Cost(2 * one.bytes, 2 * one.flops), "bwd:x": one, "bwd:weight": one}


register(Case(
    name="linear_cross_entropy", op=Op("linear_cross_entropy", "cross_entropy", linear.VERSIONS),
    reference=lambda x, weight, targets: linear.reference(x, weight, targets,
                                                          Options(len(weight))).to(x.dtype),
    call=lambda x, *more, version=None: linear.linear_cross_entropy(x, *more, version=version).to(x.dtype),
    make=_make_linear, magnitude=_linear_magnitude, dims="ROWS CLASSES COLUMNS",
    inputs=("x", "weight", "targets"), cost=_linear_cost, bound="compute", roundings=4,
    check_dims=((1, 1, 1), (70, 50_304, 96), (700, 1001, 64), (129, 65, 33)),
    sim_dims=((1, 1, 1), (5, 67, 8), (9, 300, 16)),
    bench_dims=((8192, 50304, 768), (4096, 128256, 2048)),
))  # fmt: skip
