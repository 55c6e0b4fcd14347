"""attention with scores in memory: for CPU tensors, for versions without a fused kernel, and for derivatives
that no kernel computes."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.dispatch.autocast import off
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.philox import philox
from cukern.runtime.tensors import wide

# a smaller factor of scores counts as this one: 0 times -infinity, a hidden key, would be NaN
_LEAST_SCALE = 1e-30


class Options(NamedTuple):
    """What a call computes. `softcap` is 0 without a softcap, `window` without a window. `wgmma`: by the
    kernels of v4, if they can. `scale` is None in a trace, where the default depends on a head_dim that may
    be dynamic. `splits`: into how many parts the decoding kernel splits the keys; 0: the plan chooses.
    `dropout`: the probability that a weight is dropped, by numbers that belong to a seed."""

    causal: bool = True
    scale: float | None = 1.0
    softcap: float = 0.0
    wgmma: bool = False
    window: int = 0
    splits: int = 0
    dropout: float = 0.0

    def scale_of(self, q: Tensor) -> float:
        return max(q.shape[-1], 1) ** -0.5 if self.scale is None else self.scale

    def of(self, q: Tensor) -> "Options":
        """The same with the scale of q's head_dim if it is None."""
        return self._replace(scale=self.scale_of(q)) if self.scale is None else self

    @property
    def factors(self) -> tuple[float, float]:
        """tanh_factor and c of kernels_cu/attention/attention.cu."""
        assert self.scale is not None
        cap, c = self.softcap, (self.softcap or self.scale) / math.log(2)
        return (self.scale / cap, c) if cap else (1.0, max(c, _LEAST_SCALE))

    @property
    def threshold(self) -> int:
        """Weights whose random 16-bit number is below are dropped."""
        return min(round(self.dropout * 65536), 65535)

    @property
    def kept_scale(self) -> float:
        """The factor of the others."""
        return 65536 / (65536 - self.threshold)


Lengths = Tensor | tuple[Tensor, Tensor] | None  # key_lengths, or cu_seqlens of the queries and of the keys


def hidden_keys(
    q: Tensor, k: Tensor, key_lengths: Lengths = None, causal: bool = True, window: int = 0
) -> Tensor:
    """True where a query (row) does not see a key (column): under `causal` the last query sees all keys, with
    `window` the last of them. With key_lengths (batch,) there is a matrix per query head of each sequence,
    (batch * heads, queries or 1, keys)."""
    queries, keys = q.shape[-2], k.shape[-2]
    if isinstance(key_lengths, tuple):
        return _hidden_in_sequences(queries, keys, *key_lengths, causal, window)
    if key_lengths is not None:
        column, query = (
            torch.arange(n, dtype=torch.int64, device=q.device) for n in (keys, queries if causal else 1)
        )
        ends = key_lengths.clamp(0, keys).repeat_interleave(q.shape[1])[:, None] + (
            query + 1 - query.shape[0]
        )
        hidden = column >= ends[..., None]
        return hidden | (column < ends[..., None] - window) if window else hidden
    every = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
    hidden = every.triu(keys - queries + 1)
    return hidden | every.tril(keys - queries - window) if window else hidden


def _hidden_in_sequences(
    queries: int, keys: int, cu_seqlens: Tensor, cu_seqlens_k: Tensor, causal: bool, window: int
) -> Tensor:
    """hidden_keys of packed sequences, (queries, keys): a query sees keys of its own sequence only. Queries
    behind the last see none."""
    query, key = (torch.arange(n, dtype=cu_seqlens.dtype, device=cu_seqlens.device) for n in (queries, keys))
    sequence = (torch.searchsorted(cu_seqlens, query, right=True) - 1).clamp(min=0)
    ends = torch.cat((cu_seqlens, query.new_full((1,), queries)))
    key_ends = torch.cat((cu_seqlens_k, cu_seqlens_k[-1:]))
    first, last = key_ends[sequence], key_ends[sequence + 1] - 1
    if causal:
        last = last + 1 + query - ends[sequence + 1]
    if window:
        first = torch.maximum(first, last - window + 1)
    return (key < first[:, None]) | (key > last[:, None])


def _gathered(x: Tensor, block_table: Tensor, key_lengths: Tensor) -> Tensor:
    """Keys or values, (batch, kv heads, keys, D), of pages (pages, kv heads, page size, D). Entries of the
    table behind a sequence's keys are not used."""
    begins = torch.arange(block_table.shape[1], dtype=torch.int64, device=x.device) * x.shape[2]
    pages = block_table.long().masked_fill(begins >= key_lengths[:, None], 0)
    return x[pages].transpose(1, 2).flatten(2, 3)


def repeated(k: Tensor, heads: int) -> Tensor:
    """k or v, (batch, kv heads, keys, D), with each head repeated, so that there are `heads`."""
    if checks.known(k.shape[1] == heads):
        return k
    # a graph for any number of repeats, also one
    if torch.compiler.is_compiling() and k.device.type == "cpu":
        return k.index_select(
            1, torch.arange(heads, dtype=torch.int64, device=k.device) // (heads // k.shape[1])
        )
    return k.repeat_interleave(heads // k.shape[1], 1)


def _dropped(weights: Tensor, threshold: int, seed: Tensor) -> Tensor:
    """True where a weight is dropped, of (heads, queries, keys). Math: kernels_cu/attention/dropout.cuh."""
    head, i, j = (torch.arange(n, dtype=torch.int64, device=seed.device) for n in weights.shape)
    i, head = i[:, None], head[:, None, None]
    words = philox((4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, head, 0), seed, rounds=7)
    low, high = (torch.where(j // 8 % 2 == 0, words[n], words[n + 1]) for n in (0, 2))
    word = torch.where(i // 8 % 2 == 0, low, high)
    return (word >> 16 * (j % 2) & 0xFFFF) < threshold


def bias_of(extra: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The bias of the scores in q's dtype, which broadcasts to (batch, heads, queries, keys), or None.
    `extra`: as in `reference`."""
    if extra is None or extra.ndim == 1:
        return None
    if extra.ndim == 4:
        return extra.to(q.dtype)
    query, key = (torch.arange(x.shape[2], dtype=torch.int64, device=q.device) for x in (q, k))
    distance = query[:, None] + k.shape[2] - q.shape[2] - key
    return (-extra[..., None, None] * distance.abs()).to(q.dtype)


def _visible(
    s: Tensor, q: Tensor, k: Tensor, options: Options, lengths: Lengths, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The scores (heads, queries, keys) with their bias, -infinity for hidden keys. And where rows have no
    visible key, if there may be such rows: these have other scores."""
    if not options.causal and lengths is None and bias is None and k.shape[-2]:
        return s, None
    if bias is None or options.causal:
        hidden = hidden_keys(q, k, lengths, options.causal, options.window)
    else:
        hidden = s.new_zeros((), dtype=torch.bool)
    if bias is not None:
        heads, without = s.unflatten(0, q.shape[:2]), bias == -math.inf
        s = (heads + bias.masked_fill(without, 0)).flatten(0, 1)
        hidden = (hidden | without).expand_as(heads).flatten(0, 1)
    empty = None
    if lengths is not None or bias is not None or not checks.known(q.shape[-2] <= k.shape[-2]):
        # their weights are replaced later
        empty = hidden.all(-1, keepdim=True)
        hidden = hidden & ~empty
    return s.masked_fill(hidden, -math.inf), empty


def by_scores(
    softmax: Callable[[Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, options: Options,
    return_lse: bool = True, lengths: Lengths = None, extra: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """out (batch, heads, queries, E), and lse (batch, heads, queries) or None, computed in q's dtype.
    `softmax` is that of rows. `extra`: as in `reference`."""
    softcap, leading, keys = options.softcap, q.shape[:2], repeated(k, q.shape[1]).flatten(0, 1)
    # scores of float16 may overflow before they are scaled
    s = torch_matmul((q * options.scale_of(q)).flatten(0, 1), keys.mT)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    bias = bias_of(extra, q, k)
    s, empty = _visible(s, q, k, options, lengths, bias)
    weights, lse = softmax(s), s.to(wide(s.dtype)).logsumexp(-1) if return_lse else None
    if empty is not None:
        weights, lse = (
            weights.masked_fill(empty, 0),
            lse if lse is None else lse.masked_fill(empty[..., 0], -math.inf),
        )
    if extra is not None and bias is None:
        weights = weights.masked_fill(_dropped(weights, options.threshold, extra), 0)
        weights = weights * options.kept_scale
    out = torch_matmul(weights, repeated(v, q.shape[1]).flatten(0, 1))
    return out.unflatten(0, leading), lse if lse is None else lse.unflatten(0, leading)


def reference(
    q: Tensor, k: Tensor, v: Tensor, options: Options, key_lengths: Lengths = None,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and lse in torch's operations. 16-bit types are computed in float32. Keys at and after key_lengths
    are not used. `extra`: the seed of the dropout, (1,), ALiBi's slopes, (batch or 1, heads), or a bias of
    4 dimensions that broadcasts to (batch, heads, queries, keys)."""
    with off(q):
        x, y, z = (t.to(wide(q.dtype)) for t in (q, k, v))
        if isinstance(key_lengths, Tensor):
            behind = (
                torch.arange(k.shape[2], dtype=torch.int64, device=k.device)[:, None]
                >= key_lengths[:, None, None, None]
            )
            y, z = (t.masked_fill(behind, 0) for t in (y, z))
        out, lse = by_scores(partial(torch.softmax, dim=-1), x, y, z, options, True, key_lengths, extra)
        assert lse is not None
        return out.to(q.dtype), lse


def reference_of_pages(
    q: Tensor, k: Tensor, v: Tensor, options: Options, block_table: Tensor, key_lengths: Tensor
) -> tuple[Tensor, Tensor]:
    """`reference` for k and v in pages. It first copies the pages of the table to one array per sequence."""
    k, v = (_gathered(x, block_table, key_lengths) for x in (k, v))
    return reference(q, k, v, options, key_lengths)
