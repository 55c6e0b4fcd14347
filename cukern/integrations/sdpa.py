"""torch's scaled_dot_product_attention by cukern's kernels: an entry in torch's registry of flash attention.

torch chooses the flash attention backend for float16 and bfloat16 tensors on a GPU without a mask. It calls
the two operators of `_Handle`. They have no autograd: torch saves what the backward needs.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention

from cukern.ops.attention import fused, op
from cukern.ops.attention.reference import Options

NAME = "cukern"


def register() -> None:
    """Make "cukern" known to torch's registry of flash attention.

        from torch.nn import attention
        from cukern.integrations import sdpa

        sdpa.register()
        attention.activate_flash_attention_impl("cukern")
        torch.backends.cuda.enable_cudnn_sdp(False)  # otherwise torch prefers cuDNN on Hopper
        q, k, v = torch.randn(3, 4, 12, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        attention.restore_flash_attention_impl()

    While it is active, cukern's kernels compute each call of scaled_dot_product_attention for which torch
    chooses flash attention: float16 and bfloat16 on a GPU without a mask, also with dropout, `enable_gqa`,
    autograd and torch.compile. Nested tensors and torch.nn.attention.varlen keep torch's kernels.

    Raises NotImplementedError if this torch has no such registry. A call raises ValueError for a negative
    scale, and for dropout_p=1.
    """
    if not hasattr(attention, "register_flash_attention_impl"):
        raise NotImplementedError(f"torch {torch.__version__} has no registry of flash attention")
    attention.register_flash_attention_impl(NAME, register_fn=_Handle)


class _Handle:
    """The operators' kernels, until `remove`."""

    def __init__(self, key: str = "CUDA") -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            self.library.impl("_scaled_dot_product_flash_attention", _forward, key)
            self.library.impl("_scaled_dot_product_flash_attention_backward", _backward, key)

    def remove(self) -> None:
        self.library = None


def _forward(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
    return_debug_mask: bool = False, *, scale: float | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The outputs of torch's operator. In place of the state of a random generator, torch saves the seed of
    the dropped weights, twice."""
    if return_debug_mask:
        raise ValueError("return_debug_mask must be False, got True")
    options, device = _options(query, dropout_p, is_causal, scale), query.device
    state = torch.empty(2, dtype=torch.uint64, device=device)
    if options.threshold:
        state.view(torch.int64).copy_(torch.randint(1 << 62, (2,), dtype=torch.int64, device=device))
    with torch.no_grad():
        out, lse = fused.fused((query, key, value, *_seed(state, options)), options)
    unused = torch.empty((), dtype=torch.uint64, device=device)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Any, cum_seq_k: Any, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    philox_seed: Tensor, philox_offset: Tensor, *, scale: float | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    options = _options(query, dropout_p, is_causal, scale)
    inputs = query, key, value, *_seed(philox_seed, options)
    return fused.backward(inputs, out, grad_out, logsumexp, options)


def _options(query: Tensor, dropout_p: float, causal: bool, scale: float | None) -> Options:
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and below 1, got {dropout_p}")
    scale = op.scale_of(query, scale)
    return Options(causal, scale, wgmma=op.chosen(None, query) == "v4", dropout=dropout_p)


def _seed(state: Tensor, options: Options) -> tuple[Tensor, ...]:
    return (state.view(torch.int64)[:1],) if options.threshold else ()
