"""linear_cross_entropy of a weight whose rows are divided among the ranks of a process group: no rank has all
logits of a row.

With c the logits, capped if asked, a chunk of rows takes two all-reduces: of max(c), and of
sum(exp(c - max)), the target's logit and, for label smoothing, sum(c). The backward computes the chunk's
logits again, as in per_token.py, with the logsumexp of the forward. The gradient of x is all-reduced once.
torch's operations compute the rows' sums and gradients, in float32 for 16-bit logits.
"""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from cukern.ops.cross_entropy.op import Options, checked_targets
from cukern.ops.cross_entropy.per_token import add_product, chunks, token_losses
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed
from cukern.runtime.recording import local
from cukern.runtime.tensors import as_matrix, wide


def ranks_of(group: Any, version: str | None) -> int:
    """The number of ranks, 1 without a group. Raises TypeError and ValueError."""
    if group is None:
        return 1
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup or None, got {checks.brief(group)}")
    if version is not None:
        raise ValueError(f"version must be None with group=, whose losses torch computes, got {version!r}")
    if torch.compiler.is_compiling() or transformed():
        raise NotImplementedError(
            "linear_cross_entropy(group=...) has no rule for torch.compile and torch.func"
        )
    if local.recorder is not None:
        local.recorder.fail("collectives are not replayed")
    return group.size()


def parallel_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, group: Any, options: Options
) -> Tensor:
    """The loss of each row, the same on all ranks. weight and bias are those of the rank."""
    if group is None:
        return token_losses(x, weight, bias, targets, chunk, options)
    if not x.is_cuda:
        checked_targets(targets, options)
    losses = _Losses.apply(as_matrix(x), weight, bias, targets.flatten(), chunk, group, options)
    return losses.view(targets.shape)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, targets, chunk, group, options):
        losses, lses = x.new_empty(2, len(x), dtype=wide(x.dtype))
        shard = _Shard(weight, group, options)
        with autocast.off(x):
            for logits, chosen, rows in chunks(x, weight, bias, targets, chunk, 1.0):
                losses[rows], lses[rows] = shard.losses(logits, chosen)
        ctx.save_for_backward(x, weight, bias, targets, lses)
        ctx.rest = chunk, group, options
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        x, weight, bias, targets, lses = ctx.saved_tensors
        chunk, group, options = ctx.rest
        wants_dx, wants_dweight, wants_dbias = ctx.needs_input_grad[:3]
        shard, dtype = _Shard(weight, group, options), lses.dtype
        dx, dweight = (t.new_zeros(t.shape if want else (0,), dtype=dtype) for t, want in (
            (x, wants_dx), (weight, wants_dweight),
        ))  # fmt: skip
        dbias = weight.new_zeros(len(weight), dtype=dtype)
        with autocast.off(x):
            for logits, chosen, rows in chunks(x, weight, bias, targets, chunk, 1.0):
                gradient = logits.copy_(shard.gradient(logits, chosen, lses[rows], dloss[rows]))
                if wants_dx:
                    add_product(dx[rows], gradient, weight, first=True)
                if wants_dweight:
                    add_product(dweight, gradient.t(), x[rows])
                if wants_dbias:
                    dbias += gradient.sum(0, dtype=dtype)
        if wants_dx:
            distributed.all_reduce(dx, group=group)
        found = (dx, x, wants_dx), (dweight, weight, wants_dweight), (dbias, bias, wants_dbias)
        return *(total.to(t.dtype) if want else None for total, t, want in found), *(None,) * 4


class _Shard:
    """The classes of one rank. `first` is the index of the first one, `size` their number. Those after the
    first `used` are padding."""

    def __init__(self, weight: Tensor, group: Any, options: Options):
        self.group, self.options, self.size = group, options, len(weight)
        self.first = group.rank() * self.size
        self.used = min(max(options.vocab - self.first, 0), self.size)

    def capped(self, logits: Tensor) -> Tensor:
        """The logits in the dtype of computation, after the softcap; minus infinity for padding."""
        cap, c = self.options.softcap, logits.to(wide(logits.dtype))
        c = cap * torch.tanh(c / cap) if cap else c
        c[:, self.used :] = -torch.inf
        return c

    def column(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The column of each target, (rows, 1), and whether it is one of this rank."""
        at = targets.long()[:, None] - self.first
        return at.clamp(0, self.size - 1), (at >= 0) & (at < self.size)

    def losses(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the logsumexp of each row of all logits."""
        _, ignored, _, smoothing, z_loss, _, _ = self.options
        c, (column, mine) = self.capped(logits), self.column(targets)
        most = torch.cat((c.amax(1), c.new_tensor([self.size, -self.size])))
        distributed.all_reduce(most, distributed.ReduceOp.MAX, self.group)
        same = most[-2] == -most[-1]
        if not (logits.is_cuda or same):
            raise ValueError(
                f"weight must have as many rows on each rank, got {int(-most[-1])} to {int(most[-2])}"
            )
        most = most[:-2]
        sums = torch.stack((
            (c - most[:, None]).exp().sum(1),
            c.gather(1, column).masked_fill(~mine, 0.0)[:, 0],
            c[:, : self.used].sum(1) if smoothing else torch.zeros_like(most),
        ))  # fmt: skip
        distributed.all_reduce(sums, group=self.group)
        total, of_target, of_all = sums
        lse = most + total.log()
        losses = lse - (1 - smoothing) * of_target + z_loss * lse * lse
        losses = losses - smoothing / self.options.vocab * of_all if smoothing else losses
        losses = losses.masked_fill(self.wrong(targets) | ~same, torch.nan)
        return losses.masked_fill(targets == ignored, 0.0), lse

    def wrong(self, targets: Tensor) -> Tensor:
        """Targets outside of the classes. Their rows become NaN."""
        return (targets < 0) | (targets >= self.options.vocab)

    def gradient(self, logits: Tensor, targets: Tensor, lse: Tensor, dloss: Tensor) -> Tensor:
        """The gradient of the rank's logits."""
        vocab, ignored, _, smoothing, z_loss, cap, _ = self.options
        c, (column, mine) = self.capped(logits), self.column(targets)
        g = (c - lse[:, None]).exp() * (1 + 2 * z_loss * lse)[:, None] - smoothing / vocab
        g.scatter_add_(1, column, (smoothing - 1) * mine.to(g.dtype))
        g *= dloss[:, None]
        if cap:
            g *= 1 - (c / cap).square()
        g.masked_fill_(self.wrong(targets)[:, None], torch.nan).masked_fill_(
            (targets == ignored)[:, None], 0.0
        )
        g[:, self.used :] = 0
        return g
