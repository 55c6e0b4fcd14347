"""cukern's ops as modules, with torch's constructor arguments and state dict names.

    from cukern.layers import GeGLUMLP, LayerNorm, Linear, RMSNorm, RotaryEmbedding, SwiGLUMLP

    norm, mlp = RMSNorm(64, eps=1e-5), SwiGLUMLP(64, 192)
    x = torch.randn(2, 16, 64)
    y = x + mlp(norm(x))

Dtypes are float16, bfloat16, float32 and float64. Devices, strides, autocast and errors are those of the op
that a module names: TypeError for a dtype, ValueError for a shape, both with the value and the rule.
`kernel_mapping` gives the same forwards to Hugging Face's `kernels`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cukern.integrations import modules
from cukern.ops.cross_entropy import cross_entropy, linear_cross_entropy
from cukern.ops.gelu import geglu
from cukern.ops.layernorm import layernorm, rmsnorm
from cukern.ops.matmul import linear
from cukern.ops.rope import rope, rope_tables
from cukern.runtime import checks

__all__ = [
    "CausalLoss", "GeGLUMLP", "LayerNorm", "Linear", "RMSNorm", "RotaryEmbedding", "SwiGLUMLP",
    "kernel_mapping",
]  # fmt: skip


def _columns(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """x with the dimensions of `shape`, its last ones, as one."""
    if tuple(x.shape[-len(shape) :]) != tuple(shape):
        raise ValueError(f"x must end with normalized_shape, {tuple(shape)}, got {tuple(x.shape)}")
    return x if len(shape) == 1 else x.flatten(-len(shape))


class RMSNorm(nn.RMSNorm):
    """torch.nn.RMSNorm by `cukern.rmsnorm`: x / sqrt(mean(x^2) + eps) * weight over the last dimensions.

        y = cukern.layers.RMSNorm(64)(torch.randn(2, 16, 64))

    Args: those of torch.nn.RMSNorm: normalized_shape, eps (None: torch.finfo(x.dtype).eps),
        elementwise_affine, device, dtype. State dict: weight, of normalized_shape.

    x: (..., *normalized_shape). Returns a tensor of x's shape and dtype.
    Raises ValueError if the last dimensions of x are others. Source: Zhang and Sennrich, arXiv 1910.07467.
    """

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        weight = None if self.weight is None else self.weight.flatten()
        return rmsnorm(_columns(x, self.normalized_shape), weight, eps=eps).view(x.shape)


class LayerNorm(nn.LayerNorm):
    """torch.nn.LayerNorm by `cukern.layernorm`: (x - mean) / sqrt(variance + eps) * weight + bias.

        y = cukern.layers.LayerNorm(64)(torch.randn(2, 16, 64))

    Args: those of torch.nn.LayerNorm: normalized_shape, eps, elementwise_affine, bias, device, dtype.
        State dict: weight and bias, of normalized_shape.

    x: (..., *normalized_shape). Returns a tensor of x's shape and dtype.
    Raises ValueError if the last dimensions of x are others. Source: Ba, Kiros and Hinton, arXiv 1607.06450.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (None if t is None else t.flatten() for t in (self.weight, self.bias))
        return layernorm(_columns(x, self.normalized_shape), weight, bias, eps=self.eps).view(x.shape)


class Linear(nn.Linear):
    """torch.nn.Linear by `cukern.linear`: x @ weight.T + bias.

        y = cukern.layers.Linear(64, 192)(torch.randn(2, 16, 64))

    Args: those of torch.nn.Linear: in_features, out_features, bias, device, dtype. State dict: weight
        (out_features, in_features) and bias (out_features,).

    x: (..., in_features), of the weight's dtype. Returns (..., out_features).
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class _GatedMLP(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.up_proj = Linear(hidden_size, intermediate_size, bias, device, dtype)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, device, dtype)


class SwiGLUMLP(_GatedMLP):
    """down_proj(silu(gate_proj(x)) * up_proj(x)), by `cukern.linear` and `cukern.swiglu`: the MLP of Llama.

        y = cukern.layers.SwiGLUMLP(64, 192)(torch.randn(2, 16, 64))

    Args:
        hidden_size, intermediate_size: columns of x, and of the product in the middle.
        bias: of the three linear layers.
        device, dtype: of the parameters.

    State dict: gate_proj, up_proj and down_proj, as transformers names them.
    x: (..., hidden_size). Returns a tensor of its shape and dtype. Source: Shazeer, arXiv 2002.05202.
    """

    forward = modules.swiglu_mlp


class GeGLUMLP(_GatedMLP):
    """down_proj(gelu(gate_proj(x)) * up_proj(x)), by `cukern.linear` and `cukern.geglu`: the MLP of Gemma.

        y = cukern.layers.GeGLUMLP(64, 192)(torch.randn(2, 16, 64))

    Args:
        hidden_size, intermediate_size, bias, device, dtype: as in SwiGLUMLP, and so is the state dict.
        approximate: "tanh", as Gemma's, or "none" for the exact gelu.

    Raises ValueError for another `approximate`. Source: Shazeer, arXiv 2002.05202.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, device: Any = None,
        dtype: Any = None, *, approximate: str = "tanh",
    ) -> None:  # fmt: skip
        super().__init__(hidden_size, intermediate_size, bias, device, dtype)
        self.approximate = checks.choice("approximate", approximate, ("none", "tanh"))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x), approximate=self.approximate))


class RotaryEmbedding(nn.Module):
    """Rotary position embedding by `cukern.rope`, with tables of cos and sin that are computed once.

        q, k = torch.randn(2, 16, 4, 64), torch.randn(2, 16, 2, 64)
        q, k = cukern.layers.RotaryEmbedding(64, max_positions=128)(q, k)

    Args:
        dim: the even number of elements of a head that are rotated, the first ones.
        max_positions: rows of the tables, for the positions from 0 on.
        base: pair i is rotated by position * base^(-2 i / dim).
        interleaved: pairs are (2 i, 2 i + 1) instead of (i, i + dim / 2).
        layout: of q and k: "bshd" (batch, sequence, heads, head_dim), "bhsd" or "sbhd".
        device: of the tables.

    `forward(q, k=None, position_ids=None)` returns the rotated q, or (q, k). position_ids: (sequence,) or
    (batch, sequence), int32 or int64. The state dict is empty. The tables stay float32 when the module gets
    another dtype. Raises ValueError for an odd dim, another layout, and sequences longer than the tables.
    Source: Su et al., arXiv 2104.09864.
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self, dim: int, max_positions: int, base: float = 10000.0, *, interleaved: bool = False,
        layout: str = "bshd", device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self.interleaved = checks.flag("interleaved", interleaved)
        self.layout = checks.choice("layout", layout, ("bshd", "bhsd", "sbhd"))
        cos, sin = rope_tables(max_positions, dim, base, device=device)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "RotaryEmbedding":
        """Computes the tables again: another dtype would round them, and to_empty leaves them unset."""
        super()._apply(fn, recurse)
        self.cos, self.sin = rope_tables(self.max_positions, self.dim, self.base, device=self.cos.device)
        return self

    def forward(self, q: Tensor, k: Tensor | None = None, position_ids: Tensor | None = None) -> Any:
        return rope(
            q,
            self.cos,
            self.sin,
            k=k,
            rotary_dim=self.dim,
            position_ids=position_ids,
            interleaved=self.interleaved,
            layout=self.layout,
        )


class CausalLoss(nn.Linear):
    """The head of a language model and its loss: `cukern.linear_cross_entropy`. It never holds all logits.

        head = cukern.layers.CausalLoss(64, 500, bias=False)
        tokens = torch.randint(500, (2, 16))
        head(torch.randn(2, 16, 64), tokens).backward()

    Args:
        in_features, out_features, bias, device, dtype: of torch.nn.Linear, whose state dict it has.
        shift: the logits of position i are compared with label i + 1. False: with label i.
        ignore_index, label_smoothing: as in torch.nn.CrossEntropyLoss.
        reduction: "mean" or "sum".
        z_loss, softcap: as in `cukern.cross_entropy`.

    `forward(x, labels=None)`: x is (..., sequence, in_features), labels (..., sequence), int64 or int32.
    Returns the loss in float32, or float64 for float64; without labels the logits, (..., out_features).
    Raises TypeError and ValueError as `cukern.linear_cross_entropy`, and ValueError for another reduction.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Any = None, dtype: Any = None,
        *, shift: bool = True, ignore_index: int = -100, reduction: str = "mean",
        label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, device, dtype)
        self.shift = checks.flag("shift", shift)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": checks.choice("reduction", reduction, ("mean", "sum")),
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
            "softcap": softcap,
        }

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        softcap, ignored = self.options["softcap"], self.options["ignore_index"]
        if labels is None:
            logits = linear(x, self.weight, self.bias)
            return logits if softcap is None else softcap * torch.tanh(logits / softcap)
        targets = _next(labels, ignored) if self.shift else labels
        return linear_cross_entropy(x, self.weight, targets, bias=self.bias, **self.options)


def _next(labels: Tensor, ignore_index: int) -> Tensor:
    """The label of the next position; the last one has none."""
    return nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


# ---- for Hugging Face's `kernels`, which binds the forward of a class without state to a module


def _rotary(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
    return modules.rotary_of_pairs(q, k, cos, sin, unsqueeze_dim)


def _causal_lm_loss(
    self: Any, logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None,
    ignore_index: int = -100, shift_labels: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    targets = _next(labels, ignore_index) if shift_labels is None else shift_labels
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(
        logits.view(-1, vocab_size),
        targets.to(logits.device).view(-1),
        ignore_index=ignore_index,
        reduction=reduction,
    )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


FORWARDS = {
    "RMSNorm": modules.rms_norm,
    "Linear": Linear.forward,
    "SwiGLUMLP": modules.swiglu_mlp,
    "GeGLUMLP": modules.geglu_tanh_mlp,
    "rotary_pos_emb": _rotary,
    "ForCausalLMLoss": _causal_lm_loss,
}


class _Repository(NamedTuple):
    """What `kernels` takes as the source of a layer."""

    layer: type[nn.Module]

    def load(self) -> type[nn.Module]:
        return self.layer


def stateless(name: str, forward: Any) -> type[nn.Module]:
    members = {"forward": forward, "can_torch_compile": True, "has_backward": True, "__module__": __name__}
    return type(name, (nn.Module,), members)


_MAPPING = {name: {"cuda": _Repository(stateless(name, forward))} for name, forward in FORWARDS.items()}


def kernel_mapping() -> dict[str, dict[str, Any]]:
    """The mapping for `kernelize` of Hugging Face's `kernels`, by transformers' names of layers.

    `with kernels.use_kernel_mapping(cukern.layers.kernel_mapping()):` around
    `kernels.kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="cuda")` replaces the forwards
    of RMSNorm, Linear, SwiGLUMLP, GeGLUMLP (gelu by tanh), rotary_pos_emb (pairs are half a head apart) and
    ForCausalLMLoss in a model that names its layers so. The parameters stay. `cukern.patch` also replaces
    attention.

    Returns a new dict: name -> {"cuda": an object whose load() returns a class without state}.
    """
    return {name: dict(repositories) for name, repositories in _MAPPING.items()}
