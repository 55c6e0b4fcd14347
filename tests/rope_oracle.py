"""Rotary embeddings in float64, written from the formulas alone, one each for the projects that users come
from: the oracles of rope."""

import itertools

import torch

COPY = -1  # as a position: the token is not rotated


def rotate(x, cos, sin, rows, *, interleaved=False, offset=0, inverse=False, scale=1.0):
    """Differentiable, on the CPU. x (batch, sequence, heads, head_dim); cos, sin (rows, pairs), or (rows, 2
    pairs): an angle for each element; either may have the batch in front. rows (batch, sequence, pairs): a
    row of the tables, or COPY."""
    i, pairs = torch.arange(rows.shape[-1]), rows.shape[-1]
    pair = first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
    at = (torch.arange(len(cos))[:, None, None], rows) if cos.ndim == 3 else (rows.clamp(min=0),)
    columns = pair if cos.shape[-1] == 2 * pairs else (i, i)
    c1, c2, s1, s2 = (scale * t[(*at, c)][:, :, None] for t in (cos, sin) for c in columns)
    s1, s2 = (-s2, -s1) if inverse else (s1, s2)
    before, middle, after = x.split((offset, 2 * pairs, x.shape[-1] - offset - 2 * pairs), -1)
    x1, x2 = middle[..., first], middle[..., second]
    middle = torch.cat((x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), -1)[..., torch.cat(pair).argsort()]
    return torch.where(
        (rows < 0)[:, :, :1, None],
        x,
        torch.cat((before.to(middle.dtype), middle, after.to(middle.dtype)), -1),
    )


def rotated(x, cos, sin, positions, rotary_dim, **options):
    """rotate() in float64. positions[b][s]: a row, COPY, or a list of one row for each pair; of tokens that x
    lacks, too."""
    rows = torch.tensor(positions)[: x.shape[0], : x.shape[1]]
    rows = rows if rows.ndim == 3 else rows[..., None].expand(-1, -1, rotary_dim // 2)
    return rotate(*(t.cpu().double() for t in (x, cos, sin)), rows, **options).to(x.device)


def complex_rotated(x, angles):
    """Interleaved pairs as complex numbers, times e^(i angle): x (..., sequence, heads, head_dim), angles
    (sequence, head_dim / 2)."""
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    return torch.view_as_real(
        torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turn[:, None]
    ).flatten(-2)


def flash_attention(x, cos, sin, interleaved):
    """flash-attention's: x (batch, sequence, heads, head_dim), cos and sin (sequence, rotary_dim / 2); x
    cos + rotate_half(x) sin."""
    x, width = x.double(), 2 * cos.shape[-1]
    wide = [
        t.double().repeat_interleave(2, -1) if interleaved else t.double().repeat(1, 2) for t in (cos, sin)
    ]
    part = x[..., :width]
    if interleaved:
        half = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        half = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), -1)
    return torch.cat((part * wide[0][:, None] + half * wide[1][:, None], x[..., width:]), -1)


def te_position(s, length, start, cp_size, cp_rank):
    """The row of freqs of the token that is number s of the `length` of its sequence that are here."""
    p = s + start
    if cp_size > 1 and s < length // 2:
        p += cp_rank * length // 2
    elif cp_size > 1:
        p += length * cp_size - (cp_rank + 1) * length // 2 - length // 2
    return p


def te_positions(form, shape, starts=None, cu_seqlens=None, cp_size=1, cp_rank=0):
    """positions[b][s] of a tensor of TransformerEngine's formats; "thd" is one batch."""
    if form != "thd":
        batch, sequence = (shape[1], shape[0]) if form == "sbhd" else shape[:2]
        return [
            [te_position(s, sequence, starts[b] if starts else 0, cp_size, cp_rank) for s in range(sequence)]
            for b in range(batch)
        ]
    positions = [COPY] * shape[0]
    bounds = [n // cp_size for n in cu_seqlens]
    for j, (first, end) in enumerate(itertools.pairwise(bounds)):
        for t in range(first, end):
            positions[t] = te_position(t - first, end - first, starts[j] if starts else 0, cp_size, cp_rank)
    return [positions]


def te(x, freqs, positions, interleaved, grad=False):
    """TransformerEngine's fused form: each element has its own angle. x (batch, sequence, heads, head_dim),
    freqs (rows, rotary_dim); `grad`: x is the gradient of the result, and what is returned that of the
    input."""
    freqs = freqs.double()
    return rotated(
        x, freqs.cos(), freqs.sin(), positions, freqs.shape[1], interleaved=interleaved, inverse=grad
    )
