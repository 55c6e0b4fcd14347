"""Rotary embeddings in float64, written from the formulas alone, one each for the projects that users come from: the oracles of rope."""

import itertools

import torch

COPY = -1  # as a position: the token is not rotated


def rotated(x, cos, sin, positions, rotary_dim, *, interleaved=False, offset=0, inverse=False, scale=1.0):
    """Element by element. x (batch, sequence, heads, head_dim); cos, sin (rows, pairs), or (rows, 2 pairs): an angle for each element.
    positions[b][s]: a row, COPY, or a list of one row for each pair."""
    device, (x, cos, sin) = x.device, (t.double().cpu().numpy() for t in (x, cos, sin))
    out, pairs = x.copy(), rotary_dim // 2
    for b, s, i in itertools.product(range(x.shape[0]), range(x.shape[1]), range(pairs)):
        row = positions[b][s]
        if row == COPY:
            continue
        row = row[i] if isinstance(row, list) else row
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
        a, c = (first, second) if cos.shape[1] == rotary_dim else (i, i)
        x_1, x_2 = x[b, s, :, offset + first], x[b, s, :, offset + second]
        if inverse:
            y_1, y_2 = x_1 * cos[row, a] + x_2 * sin[row, c], x_2 * cos[row, c] - x_1 * sin[row, a]
        else:
            y_1, y_2 = x_1 * cos[row, a] - x_2 * sin[row, a], x_2 * cos[row, c] + x_1 * sin[row, c]
        out[b, s, :, offset + first], out[b, s, :, offset + second] = scale * y_1, scale * y_2
    return torch.from_numpy(out).to(device)


def complex_rotated(x, angles):
    """Interleaved pairs as complex numbers, times e^(i angle): x (..., sequence, heads, head_dim), angles (sequence, head_dim / 2)."""
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())
    return torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * turn[:, None]).flatten(-2)


def flash_attention(x, cos, sin, interleaved):
    """flash-attention's: x (batch, sequence, heads, head_dim), cos and sin (sequence, rotary_dim / 2); x cos + rotate_half(x) sin."""
    x, width = x.double(), 2 * cos.shape[-1]
    wide = [t.double().repeat_interleave(2, -1) if interleaved else t.double().repeat(1, 2) for t in (cos, sin)]
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
        return [[te_position(s, sequence, starts[b] if starts else 0, cp_size, cp_rank) for s in range(sequence)] for b in range(batch)]
    positions = [COPY] * shape[0]
    bounds = [n // cp_size for n in cu_seqlens]
    for j, (first, end) in enumerate(itertools.pairwise(bounds)):
        for t in range(first, end):
            positions[t] = te_position(t - first, end - first, starts[j] if starts else 0, cp_size, cp_rank)
    return [positions]


def te(x, freqs, positions, interleaved, grad=False):
    """TransformerEngine's fused form, element by element: each has its own angle. x (batch, sequence, heads, head_dim), freqs (rows,
    rotary_dim); `grad`: x is the gradient of the result, and what is returned that of the input."""
    device, freqs = x.device, freqs.double()
    x, cos, sin = (t.cpu().numpy() for t in (x.double(), freqs.cos(), freqs.sin()))
    out, width = x.copy(), freqs.shape[1]
    for b, s, i in itertools.product(range(x.shape[0]), range(x.shape[1]), range(width)):
        p = positions[b][s]
        if p == COPY:
            continue
        first = i % 2 == 0 if interleaved else i < width // 2
        j = (i + 1 if first else i - 1) if interleaved else (i + width // 2) % width
        sign = (-1 if first else 1) * (-1 if grad else 1)
        out[b, s, :, i] = x[b, s, :, i] * cos[p, i] + sign * x[b, s, :, j] * sin[p, j if grad else i]
    return torch.from_numpy(out).to(device)
