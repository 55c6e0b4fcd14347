"""attention with scores in memory: for CPU tensors, for versions without a fused kernel, and for derivatives that no kernel computes."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.ops.matmul import torch_matmul
from cukern.runtime.autocast import off
from cukern.runtime.tensors import wide


class Options(NamedTuple):
    """What a call computes. `softcap` is 0 without a softcap, `window` without a window. `wgmma`: by the kernels of v4, if they can."""

    causal: bool = True
    scale: float = 1.0
    softcap: float = 0.0
    wgmma: bool = False
    window: int = 0


def hidden_keys(q: Tensor, k: Tensor, key_lengths: Tensor | None = None, causal: bool = True, window: int = 0) -> Tensor:
    """True where a query (row) does not see a key (column): under `causal` the last query sees all keys, with `window` the last of them.
    With key_lengths (batch,) there is a matrix per query head of each sequence, (batch * heads, queries or 1, keys)."""
    queries, keys = q.shape[-2], k.shape[-2]
    if key_lengths is not None:
        column, query = (torch.arange(n, device=q.device) for n in (keys, queries if causal else 1))
        ends = key_lengths.clamp(0, keys).repeat_interleave(q.shape[1])[:, None] + (query + 1 - len(query))
        return column >= ends[..., None]
    every = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    hidden = every.triu(keys - queries + 1)
    return hidden | every.tril(keys - queries - window) if window else hidden


def repeated(k: Tensor, heads: int) -> Tensor:
    """k or v, (batch, kv heads, keys, D), with each head repeated, so that there are `heads`."""
    return k if k.shape[1] == heads else k.repeat_interleave(heads // k.shape[1], 1)


def by_scores(
    softmax: Callable[[Tensor], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    return_lse: bool = True,
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """out (batch, heads, queries, E), and lse (batch, heads, queries) or None, computed in q's dtype. `softmax` is that of rows."""
    causal, scale, softcap, _, window = options
    leading, keys = q.shape[:2], repeated(k, q.shape[1]).flatten(0, 1)
    s = torch_matmul((q * scale).flatten(0, 1), keys.mT)  # scores of float16 may overflow before they are scaled
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    empty = None
    if causal or key_lengths is not None:
        hidden = hidden_keys(q, k, key_lengths, causal, window)
        if q.shape[-2] > k.shape[-2] or key_lengths is not None:
            empty = hidden.all(-1, keepdim=True)  # rows without a visible key: their weights are replaced below
            hidden = hidden & ~empty
        s = s.masked_fill(hidden, -math.inf)
    weights, lse = softmax(s), s.to(wide(s.dtype)).logsumexp(-1) if return_lse else None
    if empty is not None:
        weights, lse = weights.masked_fill(empty, 0), lse if lse is None else lse.masked_fill(empty[..., 0], -math.inf)
    out = torch_matmul(weights, repeated(v, q.shape[1]).flatten(0, 1))
    return out.unflatten(0, leading), lse if lse is None else lse.unflatten(0, leading)


def reference(q: Tensor, k: Tensor, v: Tensor, options: Options, key_lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse in torch's operations. 16-bit types are computed in float32. What lies behind key_lengths does not matter."""
    with off(q):
        x, y, z = (t.to(wide(q.dtype)) for t in (q, k, v))
        if key_lengths is not None:
            behind = torch.arange(k.shape[2], device=k.device)[:, None] >= key_lengths[:, None, None, None]
            y, z = (t.masked_fill(behind, 0) for t in (y, z))
        out, lse = by_scores(partial(torch.softmax, dim=-1), x, y, z, options, key_lengths=key_lengths)
        assert lse is not None
        return out.to(q.dtype), lse
