"""Other rotary embeddings, called as the rows of rope in the registry are: torch as models write it, flash-attention's, Liger's and
TransformerEngine's. Each is a function of a row's inputs."""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from cukern.bench.calls import Function

Missing = str

NEEDS = {"flash_attn": "flash_attn", "liger": "liger_kernel", "transformer_engine": "transformer_engine.pytorch"}


@functools.lru_cache(maxsize=1024)
def _table(table: Tensor, dtype: torch.dtype, copies: int, interleaved: bool) -> Tensor:
    """cos or sin as a peer wants it: in x's dtype, or with each column twice. Made once for a tensor, and not a part of what is timed."""
    wide = table.repeat_interleave(copies, -1) if interleaved else table.repeat(1, copies)
    return wide.to(dtype)


def eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x cos + rotate_half(x) sin, all in x's dtype, as Hugging Face's models have it; (batch, sequence, heads, head_dim)."""
    c, s = (_table(t, x.dtype, 2, interleaved)[:, None] for t in (cos, sin))
    if interleaved:
        return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s
    a, b = x.chunk(2, -1)
    return x * c + torch.cat((-b, a), -1) * s


def eager_qk(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    return eager(q, cos, sin, interleaved), eager(k, cos, sin, interleaved)


def make(name: str, row: str, device: torch.device) -> Function | Missing:
    """The peer `name` of a row such as "rope_qk", or why it cannot run here."""
    if device.type != "cuda":
        return "there is no GPU"
    top = NEEDS[name].partition(".")[0]
    if importlib.util.find_spec(top) is None:
        return f"{top} is not installed"
    try:
        return {"flash_attn": _flash_attention, "liger": _liger, "transformer_engine": _transformer_engine}[name](row)
    except (ImportError, OSError) as error:
        return f"{top} cannot be imported: {error}"


def _flash_attention(row: str) -> Function:
    from flash_attn.layers.rotary import apply_rotary_emb

    def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c, s = _table(cos, x.dtype, 1, False), _table(sin, x.dtype, 1, False)
        return apply_rotary_emb(x, c, s, row == "rope_interleaved", row in ("rope_in_place", "rope_quarter"))

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return one(q, cos, sin), one(k, cos, sin)

    return one if row in ("rope", "rope_quarter") else both


def _liger(row: str) -> Function:
    """In place, and its backward writes over the gradient that it is given: it has to come last."""
    from liger_kernel.ops.rope import LigerRopeFunction

    def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
        c, s = _table(cos, q.dtype, 2, False)[None], _table(sin, q.dtype, 2, False)[None]
        return tuple(y.transpose(1, 2) for y in LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), c, s))

    return both


def _transformer_engine(row: str) -> Function:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    return lambda t, freqs: apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", fused=True)
