"""rope in torch's operations, differentiable. It runs where there is no GPU, and the kernels are compared
with it."""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope.plan import AXES, Inputs, Options, compute_dtype, tokens_of
from cukern.runtime.dispatch.autocast import off


def rope(inputs: Inputs, options: Options) -> Any:
    """x rotated, or the pair (x, k)."""
    x, k, cos, sin, *_ = inputs
    if sin is None:
        cos, sin = cos.double().cos(), cos.double().sin()
    positions, unrotated = positions_of(inputs, options) if inputs.has_positions else (None, None)
    sequence = tokens_of(x.shape, options.layout)[1]
    cos, sin = (_rows(t, positions, unrotated, sequence, inputs.section, options) for t in (cos, sin))
    with off(x):
        if k is None:
            return _rotated(x, cos, sin, unrotated, options)
        return _rotated(x, cos, sin, unrotated, options), _rotated(k, cos, sin, unrotated, options)


def positions_of(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor | None]:
    """The rows of the table, int64, (batch, sequence) or with sections (sections, batch, sequence); they may
    be outside the table. And for packed sequences a mask (1, sequence) of the tokens that belong to no
    sequence and are copied. See rope_positions in rope.cu."""
    batch, sequence = tokens_of(inputs.x.shape, options.layout)
    if inputs.position_ids is not None:
        return inputs.position_ids.long().expand(
            *([] if inputs.section is None else [len(inputs.section)]), batch, sequence
        ), None
    cu_seqlens = inputs.cu_seqlens
    starts = inputs.start_positions
    cp_size = inputs.cp_size
    cp_rank = inputs.cp_rank
    like = inputs.x
    s = torch.arange(sequence, dtype=torch.int64, device=like.device)
    length: Any = sequence
    which = outside = None
    if cu_seqlens is not None:
        bounds = cu_seqlens.long() // cp_size
        # + 0 * bounds: gives s the batch of bounds under vmap
        which = torch.searchsorted(bounds, s + 0 * bounds[:1], right=True) - 1
        outside = (which < 0) | (which >= bounds.shape[0] - 1)
        which = torch.where(outside, 0, which)
        if bounds.shape[0] < 2:
            return s[None], torch.ones_like(s, dtype=torch.bool)[None]
        s = s - bounds[which]
        length = (bounds[1:] - bounds[:-1])[which]
    if cp_size > 1:
        ahead, behind = cp_rank * length // 2, length * cp_size - (cp_rank + 1) * length // 2 - length // 2
        s = torch.where(s < length // 2, s + ahead, s + behind)
    if starts is not None:
        s = s + (starts.long()[:, None] if which is None else starts.long()[which])
    return s.expand(batch, sequence), None if outside is None else outside[None]


def _rows(
    table: Tensor,
    positions: Tensor | None,
    unrotated: Tensor | None,
    sequence: int,
    section: tuple[int, ...] | None,
    o: Options,
) -> Tensor:
    """(batch or 1, sequence, width): each token's row of cos or sin; NaN outside the table, any row for a
    token that is not rotated."""
    if positions is None:
        return table[..., :sequence, :] if table.ndim == 3 else table[None, :sequence]
    inside = (positions >= 0) & (positions < table.shape[0])
    # NaN in an unused row would spoil the gradient
    beyond = ~inside if unrotated is None else ~inside & ~unrotated
    rows = table[torch.where(inside, positions, 0)].masked_fill(beyond[..., None], float("nan"))
    if section is None:
        return rows
    column = torch.arange(table.shape[-1], dtype=torch.int64, device=table.device)
    pairs = o.rotary_dim // 2
    pair = column if column.shape[0] == pairs else column // 2 if o.interleaved else column % pairs
    which = torch.bucketize(
        pair, torch.tensor(section, dtype=torch.int64, device=table.device).cumsum(0), right=True
    )
    return rows.movedim(0, -1).gather(-1, which[:, None].expand(*rows.shape[1:], 1))[..., 0]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, unrotated: Tensor | None, o: Options) -> Tensor:
    """x rotated, in its layout; cos and sin are (batch or 1, sequence, width). Computed in compute_dtype,
    then rounded to x's dtype."""
    y, dtype = _bshd(x, o.layout), compute_dtype(x.dtype, cos.dtype)
    start, end = o.rotary_offset, o.rotary_offset + o.rotary_dim
    before, middle, after = y[..., :start], y[..., start:end].to(dtype), y[..., end:]
    cos, sin = (o.scale * t.to(dtype)[:, :, None] for t in (cos, sin))  # one for all heads
    if cos.shape[-1] != o.rotary_dim:
        cos, sin = (
            t.repeat_interleave(2, -1) if o.interleaved else torch.cat((t, t), -1) for t in (cos, sin)
        )
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (_pairs(t, o.interleaved) for t in (middle, cos, sin))
    if o.transpose:
        sin_a, sin_b = -sin_b, -sin_a
    a, b = a * cos_a - b * sin_a, b * cos_b + a * sin_b
    middle = torch.stack((a, b), -1).flatten(-2) if o.interleaved else torch.cat((a, b), -1)
    result = torch.cat((before, middle.to(x.dtype), after), -1)
    if unrotated is not None:
        result = torch.where(unrotated[:, :, None, None], y, result)
    return _bshd(result, o.layout, back=True)


def _pairs(t: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return t[..., 0::2], t[..., 1::2]
    half = t.shape[-1] // 2
    return t[..., :half], t[..., half:]


def _bshd(x: Tensor, layout: str, back: bool = False) -> Tensor:
    """x as (batch, sequence, heads, head_dim), or back."""
    if layout == "thd":
        return x[0] if back else x[None]
    return x.permute(AXES[layout])
