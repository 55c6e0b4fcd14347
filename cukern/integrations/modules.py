"""Forwards for modules of transformers' models. Each replaces a module's forward; the parameters and
submodules stay."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cukern.ops.gelu import geglu, gelu, swiglu
from cukern.ops.layernorm import layernorm, rmsnorm
from cukern.ops.rope import rope
from cukern.runtime import checks

# Measured with 1 and 32 tokens of Qwen3, H200: the model's code takes 0.56 of the time of cukern's ops.
FEW_TOKENS = 64


def or_own(
    forward: Callable[..., Any], own: Callable[..., Any], tokens_of: Callable[..., int]
) -> Callable[..., Any]:
    """`forward`; in inference of a few tokens under torch.compile `own`, the model's code. There the launches
    take longer than the kernels, and the compiler fuses the model's code into fewer of them. `tokens_of`
    takes the same arguments and returns the number of tokens."""

    @functools.wraps(forward)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        inference = torch.compiler.is_compiling() and not torch.is_grad_enabled()
        few = inference and checks.known(tokens_of(*args, **kwargs) <= FEW_TOKENS)
        return (own if few else forward)(*args, **kwargs)

    return chosen


def tokens_of_module(module: nn.Module, *args: Any, **kwargs: Any) -> int:
    """The input is (batch, tokens, ...)."""
    return math.prod((*args, *kwargs.values())[0].shape[:2])


def tokens_of_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> int:
    """The heads are in q's dimension `unsqueeze_dim`, 1 or 2."""
    return q.shape[0] * q.shape[3 - unsqueeze_dim]


def rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """eps is variance_epsilon in transformers' classes, eps in others."""
    eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
    return rmsnorm(hidden_states, self.weight, eps=eps)


def gemma_norm(self: Any, x: Tensor) -> Tensor:
    """With 1 + weight, added in float32 for 16-bit types."""
    weight = self.weight.float() if self.weight.dtype.itemsize == 2 else self.weight
    return rmsnorm(x, 1.0 + weight, eps=self.eps)


def layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    return layernorm(x, self.weight, self.bias, eps=self.eps)


def swiglu_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def geglu_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


def geglu_tanh_mlp(self: Any, x: Tensor) -> Tensor:
    return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate="tanh"))


def packed_swiglu_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    return self.down_proj(swiglu(*self.gate_up_proj(hidden_states).chunk(2, -1)))


def gelu_tanh_mlp(self: Any, hidden_states: Tensor) -> Tensor:
    """GPT-2's."""
    return self.dropout(self.c_proj(gelu(self.c_fc(hidden_states), approximate="tanh")))


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """apply_rotary_pos_emb with one column of the tables per rotated element. Columns behind the table's
    width are copied."""
    return rope(q, cos, sin, k=k, rotary_dim=cos.shape[-1], layout=_LAYOUT[unsqueeze_dim])


def rotary_of_pairs(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    """The same with one column per pair."""
    return rope(q, cos, sin, k=k, layout=_LAYOUT[unsqueeze_dim])


_LAYOUT = {1: "bhsd", 2: "bshd"}
