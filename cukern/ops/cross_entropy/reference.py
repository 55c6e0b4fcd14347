"""cross_entropy in torch's operations: for CPU tensors, for tests, and for higher derivatives."""

import struct
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cukern.runtime.autocast import off
from cukern.runtime.tensors import wide


class Options(NamedTuple):
    """What a call computes. `softcap` is 0 without a softcap."""

    vocab: int
    ignored: int = -100
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    version: str = ""

    def packed(self, dloss_step: int = 0) -> bytes:
        """The struct Options of cross_entropy.cu."""
        return struct.pack("3q3d", self.vocab, self.ignored, dloss_step, *self[3:6])


def reference(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    with off(logits):
        vocab, ignored, reduction, smoothing, z_loss, softcap, _ = options
        flat = targets.flatten().long()
        x = logits.to(wide(logits.dtype))[..., :vocab].reshape(len(flat), vocab)
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        inner = "none" if z_loss else reduction
        loss = functional.cross_entropy(x, flat, ignore_index=ignored, reduction=inner, label_smoothing=smoothing)
        if z_loss:
            rows = loss + (z_loss * x.logsumexp(-1).square()).masked_fill(flat == ignored, 0.0)
            loss = rows if reduction == "none" else rows.sum()
            if reduction == "mean":
                loss = loss / (flat != ignored).sum()
        return loss.view(targets.shape) if reduction == "none" else loss
