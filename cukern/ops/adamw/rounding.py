"""Stochastic rounding of moments on the CPU, with the random numbers of adamw.cu."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.adamw.table import Row
from cukern.runtime.philox import WORD, philox
from cukern.runtime.tensors import wide

_MOMENTS = 1 << 31  # in the second word of the counter, which keeps the random numbers of parameters apart


def wide_moments(rows: Sequence[Row]) -> tuple[list[Tensor], list[Tensor]]:
    """exp_avg and exp_avg_sq in the dtype of the computation; those of the row if they have it."""
    dtypes = [wide(row.param.dtype) for row in rows]
    both = [
        (row.exp_avg.to(dtype), row.exp_avg_sq.to(dtype)) for row, dtype in zip(rows, dtypes, strict=True)
    ]
    return [m for m, _ in both], [v for _, v in both]


def round_moments(
    rows: Sequence[Row], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], seed: int
) -> None:
    """Write what `wide_moments` returned, updated, into the rows."""
    for row, exp_avg, exp_avg_sq in zip(rows, exp_avgs, exp_avg_sqs, strict=True):
        if exp_avg is not row.exp_avg:
            _round(row, exp_avg, exp_avg_sq, seed)


def _round(row: Row, exp_avg: Tensor, exp_avg_sq: Tensor, seed: int) -> None:
    """Write the float32 moments into those of the row, in bfloat16.

    A value becomes one of its neighbours, the upper one with the probability of the discarded bits / 2^16.
    """
    n = exp_avg.numel()
    i = torch.arange(-(-n // 4), dtype=torch.int64, device="cpu")
    counter = i & WORD, i >> 32 | _MOMENTS, row.number, int(row.step)
    words = torch.stack(philox(counter, seed), -1).flatten()[:n].to(exp_avg.device)
    for to, value, random in (
        (row.exp_avg, exp_avg, words & 0xFFFF),
        (row.exp_avg_sq, exp_avg_sq, words >> 16),
    ):
        flat = value.as_strided((n,), (1,))  # in the order of memory, in which the kernels count elements
        rounded = (flat.view(torch.int32).long() + random >> 16).short().view(torch.bfloat16)
        to.as_strided((n,), (1,)).copy_(torch.where(flat.isfinite(), rounded, flat.bfloat16()))
