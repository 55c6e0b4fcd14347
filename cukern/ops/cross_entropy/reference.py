"""cross_entropy and its second derivative in torch's operations."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cukern.runtime.autocast import off


class Options(NamedTuple):
    """What a call computes. `softcap` is 0 without a softcap."""

    vocab: int
    ignored: int = -100
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0


def wide(x: Tensor) -> torch.dtype:
    """The dtype of the computation and of the loss."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def reference(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    with off(logits):
        x = logits.to(wide(logits))
        if options.vocab != logits.shape[-1]:
            x = x[..., : options.vocab]
        x, flat = x.reshape(-1, options.vocab), targets.reshape(-1).long()
        if options.softcap:
            x = options.softcap * torch.tanh(x / options.softcap)
        rest = {"ignore_index": options.ignored, "label_smoothing": options.smoothing}
        if not options.z_loss:
            loss = functional.cross_entropy(x, flat, reduction=options.reduction, **rest)
            return loss.view(targets.shape) if options.reduction == "none" else loss
        rows = functional.cross_entropy(x, flat, reduction="none", **rest)
        rows = rows + (options.z_loss * torch.logsumexp(x, -1).square()).masked_fill(flat == options.ignored, 0.0)
        return reduce(rows, flat, options).view(targets.shape if options.reduction == "none" else ())


def reduce(rows: Tensor, targets: Tensor, options: Options) -> Tensor:
    """The rows' losses as `reduction` says."""
    if options.reduction == "none":
        return rows
    return rows.sum() / (targets != options.ignored).sum() if options.reduction == "mean" else rows.sum()


def second(x: Tensor, targets: Tensor, dloss: Tensor, d: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """For the gradient G(x, dloss) of the logits x (rows, columns): (dG/dx d, d G/dloss). dG/dx is symmetric.

    In torch's operations, so that it can be differentiated again.

        G = w c' (k p - t),  k = 1 + 2 z_loss lse,  dG/dx d = w (c'' d (k p - t) + c' p (k (c' d - s) + 2 z_loss s)),  s = sum(p c' d)
    """
    with off(x):
        targets, valid = targets.long(), targets != options.ignored
        z, d, dloss = x[:, : options.vocab].to(wide(x)), d[:, : options.vocab].to(wide(x)), dloss.to(wide(x))
        weight = dloss / valid.sum() if options.reduction == "mean" else dloss
        weight = torch.where(valid, weight.expand(targets.shape), 0.0)[:, None]
        c, slope, bend = z, torch.ones_like(z), torch.zeros_like(z)
        if options.softcap:
            t = torch.tanh(z / options.softcap)
            c, slope = options.softcap * t, 1 - t * t
            bend = -2 / options.softcap * t * slope
        lse = torch.logsumexp(c, -1, keepdim=True)
        p, k = (c - lse).exp(), 1 + 2 * options.z_loss * lse
        classes = torch.arange(options.vocab, device=x.device)
        share = (classes == targets[:, None]).to(z.dtype) * (1 - options.smoothing) + options.smoothing / options.vocab
        error, change = k * p - share, (p * slope * d).sum(-1, keepdim=True)
        dx = weight * (bend * d * error + slope * p * (k * (slope * d - change) + 2 * options.z_loss * change))
        per_row = (slope * error * d).sum(-1).masked_fill(~valid, 0.0)
        return functional.pad(dx, (0, x.shape[1] - options.vocab)).to(x.dtype), reduce(per_row, targets, options)
