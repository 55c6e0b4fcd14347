"""Other rotary embeddings, as functions of the inputs of rope's ops in the registry: torch as models write it, flash-attention, Liger and
TransformerEngine."""

import functools
from typing import Any

import torch
from torch import Tensor

from cukern.bench.calls import Function
from cukern.runtime.registry import Op


@functools.lru_cache(maxsize=1024)
def _table(table: Tensor, dtype: torch.dtype, copies: int, interleaved: bool) -> Tensor:
    """cos or sin as a peer expects it: in x's dtype, each column `copies` times. Cached per tensor, so it is not timed."""
    wide = table.repeat_interleave(copies, -1) if interleaved else table.repeat(1, copies)
    return wide.to(dtype)


def eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin in x's dtype, as in Hugging Face's models. x is (batch, sequence, heads, head_dim)."""
    c, s = (_table(t, x.dtype, 2, interleaved)[:, None] for t in (cos, sin))
    if interleaved:
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def eager_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return eager(q, cos, sin, interleaved), eager(k, cos, sin, interleaved)


def flash_attention(op: Op) -> Function:
    from flash_attn.layers.rotary import apply_rotary_emb

    interleaved, in_place = op.name == "rope_interleaved", op.name in ("rope_in_place", "rope_quarter")

    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = _table(cos, x.dtype, 1, False), _table(sin, x.dtype, 1, False)
        return apply_rotary_emb(x, c, s, interleaved, in_place)

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return one(q, cos, sin), one(k, cos, sin)

    return one if op.name in ("rope", "rope_quarter") else both


def liger(op: Op) -> Function:
    """Works in place. Its backward overwrites the incoming gradients, so it must be the last peer of its op."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
        c, s = _table(cos, q.dtype, 2, False)[None], _table(sin, q.dtype, 2, False)[None]
        return tuple(y.transpose(1, 2) for y in LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), c, s))

    return both


def transformer_engine(op: Op) -> Function:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return lambda t, freqs: apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", fused=True)
