"""Attention and its mask for transformers' `attn_implementation="cukern"`.

transformers builds one mask per forward and passes it to each layer. `attention_mask` returns a tensor of one
of these forms:

    (0, 0, 0, keys)           causal, without padding; the number of keys to use, 0 for all
    (1, 1, 1, n + 1), int32   cu_seqlens of the flattened tokens: n padded or packed sequences
    (batch, 1, 1, 1), int32   the number of keys of each sequence, in a cache of fixed length
    (batch, 1, queries, keys) any other pattern: the model's own attention computes it
    None                      no mask (cross-attention without padding)

All have four dimensions, because transformers passes such masks on, and takes masks of two dimensions for
padding. Causal order, window, softcap and sinks are arguments of the layer.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cukern.ops.attention import attention, attention_varlen

NAME = "cukern"
_warned: set[str] = set()


def register() -> None:
    """Make `attn_implementation="cukern"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def plain(device: Any, keys: int = 0) -> Tensor:
    """The mask of causal attention without padding, to the first `keys` keys; 0: to all."""
    return torch.empty(0, 0, 0, keys, dtype=torch.bool, device=device)


# ---- the mask


def attention_mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0,
    mask_function: Any = None, attention_mask: Tensor | None = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, use_vmap: bool = False,
    device: Any = "cpu", **kwargs: Any,
) -> Tensor | None:  # fmt: skip
    """The mask in one of the module's forms. Arguments: see transformers.masking_utils.sdpa_mask."""
    if not (allow_is_bidirectional_skip or use_vmap):
        end = kv_offset + kv_length
        chunked = _chunked(kwargs.get("config"), local_size, end)
        causal = allow_is_causal_skip and not chunked
        if attention_mask is not None and (_traced(attention_mask) or not attention_mask.all()):
            whole = causal and attention_mask.shape[1] == q_length == kv_length
            found = _of_padding(attention_mask) if whole else None
        elif isinstance(q_offset, Tensor) or q_offset + q_length != end:
            rest = (q_offset, local_size, causal, device)
            found = _of_static_cache(batch_size, q_length, kv_offset, end, *rest)
        elif causal or (q_length == 1 and not chunked):
            found = plain(device)
        else:
            found = _of_packed(batch_size, q_length, q_offset, mask_function, device)
        if found is not None:
            return found
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size,
        allow_is_causal_skip=False, allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        use_vmap=use_vmap, device=device, **kwargs,
    )  # fmt: skip


def _traced(x: Tensor) -> bool:
    """True if the values of x cannot be read."""
    return (
        torch.compiler.is_compiling() or x.is_meta or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _chunked(config: Any, size: int | None, keys: int) -> bool:
    """True for Llama 4's chunks of `size` tokens, which its layers do not pass on, as others do a window."""
    return size is not None and size != getattr(config, "sliding_window", None) and keys > size


def _of_static_cache(
    batch: int, queries: int, first: int, end: int, offset: Any, window: int | None, causal: bool, device: Any
) -> Tensor | None:
    """A cache of fixed length: its keys behind offset + queries are not valid yet."""
    if first:
        return None
    if causal and (not isinstance(offset, Tensor) or (queries > 1 and not _traced(offset))):
        return plain(device, int(offset) + queries)
    if (queries > 1 and not causal) or (window is not None and end > window):
        return None
    if not isinstance(offset, Tensor):
        return torch.full((batch, 1, 1, 1), offset + queries, dtype=torch.int32, device=device)
    return (offset + queries).to(torch.int32).reshape(1, 1, 1, 1).expand(batch, 1, 1, 1).contiguous()


def _of_packed(
    batch: int, length: int, offset: int, mask_function: Callable[..., Tensor], device: Any
) -> Tensor | None:
    """cu_seqlens, if each token sees its predecessor or begins a sequence, and no token sees its
    successor."""
    rows = torch.arange(batch, dtype=torch.int64, device=device)[:, None]
    i = torch.arange(length, dtype=torch.int64, device=device)[None]
    if offset or _traced(i):
        return None
    zero = torch.zeros_like(rows)
    if mask_function(rows, zero, i[:, :-1], i[:, 1:]).any():
        return None
    begins = torch.ones(batch, length, dtype=torch.bool, device=device)
    begins[:, 1:] = ~mask_function(rows, zero, i[:, 1:], i[:, :-1])
    return _bounds(begins.flatten().nonzero()[:, 0], batch * length)


def _of_padding(padding: Tensor) -> Tensor | None:
    """cu_seqlens, if the tokens of each row are contiguous: the padding before them, the tokens, and the
    padding behind them."""
    if _traced(padding):
        return None
    rising = padding[:, 0].long() + (padding[:, 1:] & ~padding[:, :-1]).sum(1)
    if (rising > 1).any():
        return None
    batch, length = padding.shape
    begin = torch.arange(batch, dtype=torch.int64, device=padding.device) * length
    first = begin + padding.int().argmax(1)
    return _bounds(torch.stack((begin, first, first + padding.sum(1)), 1).flatten(), batch * length)


def _bounds(begins: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.pad(begins, (0, 1), value=tokens).to(torch.int32)[None, None, None]


# ---- the attention of a layer


def attention_forward(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
    sliding_window: int | None = None, softcap: float | None = None, s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """transformers' attention function: query (batch, heads, queries, head_dim), key and value (batch,
    kv_heads, keys, head_dim).

    Returns (batch, queries, heads, head_dim) and, from the model's own eager attention only, the weights.
    """
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    mask, cu_seqlens = attention_mask, kwargs.get("cu_seq_lens_q")
    bounds, lengths = _parts(mask)
    reason = _unsupported(module, query, mask, dropout, kwargs)
    if reason:
        _warn(f"{type(module).__name__}: {reason}; the model's own attention computes it")
        options = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "s_aux": s_aux, **kwargs}
        return _own(module, query, key, value, _dense(mask, query, key, causal, sliding_window), options)
    options = {
        "causal": causal,
        "scale": scaling,
        "softcap": softcap,
        "window": sliding_window,
        "sink": s_aux,
    }
    cu_seqlens = bounds if cu_seqlens is None else cu_seqlens
    if cu_seqlens is not None and query.shape[2] > 1:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        out = attention_varlen(q, k, v, cu_seqlens, kwargs.get("cu_seq_lens_k"), **options)
        return out.view(query.shape[0], query.shape[2], *out.shape[1:]), None
    if lengths is not None:
        options["key_lengths"] = lengths
    elif mask is not None and mask.shape[-1]:
        key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
    p = dropout if module.training else 0.0
    return attention(query, key, value, dropout_p=p, **options).transpose(1, 2).contiguous(), None


def _parts(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """cu_seqlens and key_lengths."""
    if mask is None or mask.dtype != torch.int32:
        return None, None
    return (None, mask.flatten()) if mask.shape[-1] == 1 else (mask.flatten(), None)


def _unsupported(
    module: torch.nn.Module, query: Tensor, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str:
    if kwargs.get("output_attentions"):
        return "output_attentions=True needs the matrix of weights"
    packed = kwargs.get("cu_seq_lens_q") is not None or (mask is not None and mask.dtype == torch.int32)
    if dropout and module.training and packed:
        return "attention dropout in padded or packed batches is not supported"
    if kwargs.get("position_bias") is not None:
        return "a position bias is not supported"
    if mask is not None and mask.shape[0] and mask.dtype != torch.int32:
        return (
            "a mask (batch, 1, queries, keys) that is not causal, padded on the sides, or packed is not "
            "supported"
        )
    return ""


def _warn(text: str) -> None:
    if not torch.compiler.is_compiling() and text not in _warned:
        _warned.add(text)
        warnings.warn(f"cukern: {text}. This warning appears once.", stacklevel=3)


def _dense(
    mask: Tensor | None, query: Tensor, key: Tensor, causal: bool, window: int | None
) -> Tensor | None:
    """The mask as (batch or 1, 1, queries, keys), bool: True where a query sees a key. None: everywhere."""
    bounds, found = _parts(mask)
    if mask is None and not causal:
        return None
    if mask is not None and mask.shape[0] and mask.dtype != torch.int32:
        return mask
    (batch, _, queries, _), keys, device = query.shape, key.shape[2], query.device
    columns = torch.arange(keys, dtype=torch.int64, device=device)
    whole = mask.shape[-1] if mask is not None and not mask.shape[0] and mask.shape[-1] else keys
    lengths = torch.full((1, 1), whole, dtype=torch.int64, device=device) if found is None else found[:, None]
    # (batch or 1, queries, 1)
    last = (torch.arange(queries, dtype=torch.int64, device=device) + lengths - queries)[:, :, None]
    keep = columns <= last
    if window is not None:
        keep = keep & (columns > last - window)
    if bounds is not None:
        tokens = torch.arange(batch * queries, dtype=torch.int32, device=device)
        sequence = torch.searchsorted(bounds, tokens, right=True).view(batch, queries)
        keep = keep & (sequence[:, :, None] == sequence[:, None, :])
    return keep[:, None]


def _own(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:
    """The eager attention of the model's file; torch's scaled_dot_product_attention if the weights are not
    needed."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    special = (
        options["softcap"] is not None or options["s_aux"] is not None or options.get("output_attentions")
    )
    if not special:
        return sdpa_attention_forward(module, query, key, value, mask, is_causal=False, **options)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, mask, **options
    )
