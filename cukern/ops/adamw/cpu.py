"""A step on the CPU: torch's fused AdamW, clipping, and stochastic rounding."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from cukern.ops.adamw.launch import Row


def step(
    rows: Sequence[Row], grads: Sequence[Tensor], numbers: Sequence[Any], max_norm: float | None, seed: int, randomly: bool,
    grad_scale: Tensor | None, found_inf: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Update the rows. Returns the norm of the gradients if there is a max_norm."""
    grads = [g.to(row.exp_avg.dtype) for g, row in zip(grads, rows, strict=True)]
    factor = 1.0 if grad_scale is None else 1 / grad_scale.item()
    norm = None
    if max_norm is not None:
        norm = (torch.nn.utils.get_total_norm(grads) * abs(factor)).float()
        factor *= max_norm / norm.item() if norm > max_norm else 1.0
    if found_inf is not None and found_inf.item():
        return norm
    if factor != 1:
        grads = torch._foreach_mul(grads, factor)
    targets = [row.param.to(row.exp_avg.dtype) if row.master is None else row.master for row in rows]
    for group, (lr, beta1, beta2, eps, weight_decay) in enumerate(numbers):
        mine = [i for i, row in enumerate(rows) if row.group == group]
        lists = [[x[i] for i in mine] for x in (targets, grads, *([row[k] for row in rows] for k in (1, 2)))]
        steps = [rows[i].step for i in mine]
        adamw(
            *lists, [], steps, fused=True, amsgrad=False, maximize=False, beta1=beta1, beta2=beta2, lr=float(lr), eps=eps,
            weight_decay=weight_decay,
        )  # fmt: skip
    for row, target in zip(rows, targets, strict=True):
        if randomly and row.param.dtype == torch.bfloat16:
            row.param.copy_(round_randomly(target, seed, row.index, int(row.step)))
        elif target is not row.param:
            row.param.copy_(target)
    return norm


def round_randomly(x: Tensor, seed: int, index: int, step: int) -> Tensor:
    """float32 to bfloat16 as in adamw.cu: of the two neighbours the upper with the probability of the discarded bits / 2^16."""
    flat = torch.as_strided(x, (x.numel(),), (1,))  # the order in memory
    words = philox(torch.arange(-(-len(flat) // 4)), index, step, seed).view(-1)[: len(flat)]
    bits = flat.view(torch.int32).long() + (words & 0xFFFF)
    rounded = torch.where(flat.isfinite(), (bits & 0xFFFF0000).int().view(torch.float32), flat).bfloat16()
    return torch.empty_like(x, dtype=torch.bfloat16).as_strided_((len(flat),), (1,)).copy_(rounded).as_strided_(x.shape, x.stride())


def philox(counter: Tensor, index: int, step: int, seed: int) -> Tensor:
    """Philox4x32-10 (Salmon et al., 2011) of (counter, index, step): four words for each."""
    mask = 0xFFFFFFFF
    c0, c1, c2, c3 = counter & mask, counter >> 32 & mask, torch.full_like(counter, index), torch.full_like(counter, step)
    key0, key1 = seed & mask, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32 & mask) ^ c1 ^ key0, product1 & mask
        c2, c3 = (product0 >> 32 & mask) ^ c3 ^ key1, product0 & mask
        key0, key1 = key0 + 0x9E3779B9 & mask, key1 + 0xBB67AE85 & mask
    return torch.stack((c0, c1, c2, c3), -1)
