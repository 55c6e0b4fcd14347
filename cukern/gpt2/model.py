"""GPT-2 of any size on cukern's public ops, with the layout of llm.c's weights. `use_kernels` chooses
teaching versions of the kernels.

model = GPT2(config_of("d12"), device="cuda")
model.initialize()  # 124M random weights
loss = model(tokens, targets)  # (B, T) each
loss.backward()
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList

import cukern
from cukern.gpt2.checkpoint import PARAMETERS, Config
from cukern.gpt2.files import expect
from cukern.gpt2.parallel import full

# the matrices: drawn at random, and decayed by AdamW
DECAYED = ("wte", "wpe", "qkvw", "attprojw", "fcw", "fcprojw")
MATMULS = ("cublas", "v1", "v2", "v3", "v4", "v5")
# Layers, heads, channels of llm.c's descriptors
GPT2_SIZES = (
    (6, 6, 384),
    (12, 12, 768),
    (24, 16, 1024),
    (36, 20, 1280),
    (48, 25, 1600),
    (60, 30, 1920),
    (72, 30, 2880),
    (84, 36, 3456),
)
GPT3_SIZES = (
    (6, 6, 384),
    (12, 12, 768),
    (24, 16, 1024),
    (24, 16, 1536),
    (24, 16, 2048),
    (32, 32, 2560),
    (32, 32, 4096),
    (96, 96, 12288),
)
CONFIGS = {
    f"{prefix}d{sizes[0]}": Config(1024, 50257, *sizes) for prefix in ("", "gpt2:") for sizes in GPT2_SIZES
}
CONFIGS |= {f"gpt3:c{sizes[2]}": Config(2048, 50257, *sizes) for sizes in GPT3_SIZES}


def config_of(descriptor: str) -> Config:
    """The sizes of llm.c's descriptors: "d12" or "gpt2:d12" by layers, "gpt3:c768" by channels. Raises
    ValueError for another one."""
    expect(descriptor in CONFIGS, f"one of {', '.join(CONFIGS)}", repr(descriptor))
    return CONFIGS[descriptor]


@dataclass
class Cache:
    """The keys and values of `length` tokens so far, for sampling: (layers, 2, batch, heads, max_seq_len,
    head_dim)."""

    keys_values: Tensor
    length: int = 0


class GPT2(torch.nn.Module):
    """GPT-2. Its parameters have llm.c's names, as lists over the layers, such as `model.qkvw[3]`. They are 0
    until `initialize` or `load_parameters`.

    Args:
        config: the sizes.
        attention: a version of cukern.attention: "v1" (cukern.softmax), "v2" (cukern.causal_softmax), "v3",
            "v4" (fused) or "sdpa" (torch's fused attention). None: the default of cukern.attention, or v1
            under `use_kernels`.
        matmul: "cublas" (torch), or "v1" to "v5" of cukern.linear, for float32. None: that of `use_kernels`;
            else in float32 without TF32 on a GPU the fastest of cukern.linear, and "cublas" otherwise.
        fused_loss: compute the loss by cukern.linear_cross_entropy, for a fifth of the tokens at a time, but
            at least 1368. None: in bfloat16, for at least 8192 tokens: a fifth to a quarter less memory, 2 %
            less to 2 % more time (docs/notes/gpt2.md).
        recompute: llm.c's -r. 1: the backward computes the results of gelu again instead of keeping them, 4
            of the 16 tensors (B, T, C) that a layer keeps; 2: those of layernorm too, 2 more. The bits are
            the same. No effect inside torch.compile, which decides.
        dropout: the probability with which an element of the embedding and of each branch becomes 0, where
            autograd records; the others are divided by 1 - dropout. The probabilities of the attention are
            kept: the fused kernels have no dropout.
        device, dtype: of the parameters; float32, bfloat16 or float16.
    The versions of the other ops are those of `cukern.use`. Raises ValueError for an unknown choice.
    """

    if TYPE_CHECKING:  # the parameters: wte, wpe, lnfw, lnfb; a list each of ln1w, qkvw and so on

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self, config: Config, *, attention: str | None = None, matmul: str | None = None,
        fused_loss: bool | None = None, recompute: int = 0, dropout: float = 0.0, device: Any = None,
        dtype: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        expect(isinstance(config, Config), "a Config", type(config).__name__, error=TypeError)
        expect(
            attention in (None, "v1", "v2", "v3", "v4", "sdpa"),
            "attention v1, v2, v3, v4, sdpa or None",
            repr(attention),
        )
        expect(matmul is None or matmul in MATMULS, f"matmul {', '.join(MATMULS)} or None", repr(matmul))
        expect(fused_loss in (None, False, True), "fused_loss True, False or None", repr(fused_loss))
        expect(recompute in (0, 1, 2), "recompute 0, 1 or 2", recompute)
        expect(0 <= dropout <= 1, "dropout from 0 to 1", dropout)
        self.config, self.attention, self.matmul, self.fused_loss, self.recompute = (
            config,
            attention,
            matmul,
            fused_loss,
            recompute,
        )
        self.dropout = dropout
        for name, shape in config.shapes.items():
            stacked = PARAMETERS[name][0].startswith("L")
            parts = [
                Parameter(torch.zeros(shape[stacked:], device=device, dtype=dtype))
                for _ in range(shape[0] if stacked else 1)
            ]
            setattr(self, name, ParameterList(parts) if stacked else parts[0])

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """The logits (B, T, padded_vocab_size) of tokens (B, T), int32 or int64; with targets (B, T), the
        mean loss, a float32 number.

        With a cache, and torch.no_grad(), the tokens follow those before, and only they are computed. Logits
        from vocab_size on are padding. Without fused_loss, the loss overwrites the logits by their gradient:
        its backward can run once. Raises ValueError for more than max_seq_len tokens. On the CPU also for
        tokens outside the vocabulary; on the GPU, where that would need a synchronization, they make the
        result NaN: see cukern.embedding and cukern.cross_entropy.
        """
        expect(tokens.ndim == 2, "tokens of shape (B, T)", tuple(tokens.shape))
        c, start = self.config, cache.length if cache else 0
        end = start + tokens.shape[1]
        expect(end <= c.max_seq_len, f"at most max_seq_len = {c.max_seq_len} tokens", end)
        rows = cache.keys_values.shape[2] if cache else tokens.shape[0]
        expect(rows == tokens.shape[0], "a cache for as many rows as tokens has", rows)
        if tokens.is_cuda:
            # cukern.embedding would accept the padding
            tokens = tokens.masked_fill(tokens >= c.vocab_size, -1)
        elif tokens.numel() and not torch.compiler.is_compiling():
            low, high = tokens.min().item(), tokens.max().item()
            expect(
                low >= 0 and high < c.vocab_size,
                f"tokens from 0 to {c.vocab_size - 1}",
                low if low < 0 else high,
            )
        x = self._dropped(cukern.embedding(tokens, self.wte, self.wpe[start:] if start else self.wpe))
        # of each layer's attention, and of the head
        norms = [*zip(self.ln1w, self.ln1b, strict=True), (self.lnfw, self.lnfb)]
        y = cukern.layernorm(x, *norms[0])
        for i in range(c.num_layers):
            with self._kept(y, 2, cukern.layernorm, x, *norms[i]):
                qkv = self._linear(y, self.qkvw[i], self.qkvb[i])
            attended = self._attend(i, qkv, cache)
            norm = self.ln2w[i], self.ln2b[i]
            y, x = cukern.layernorm(
                self._dropped(self._linear(attended, self.attprojw[i], self.attprojb[i])), *norm, residual=x
            )
            with self._kept(y, 2, cukern.layernorm, x, *norm):
                hidden = self._linear(y, self.fcw[i])
            y = cukern.gelu(hidden, self.fcb[i], approximate="tanh")
            with self._kept(y, 1, cukern.gelu, hidden, self.fcb[i], approximate="tanh"):
                y = self._linear(y, self.fcprojw[i], self.fcprojb[i])
            y, x = cukern.layernorm(self._dropped(y), *norms[i + 1], residual=x)
        if cache:
            cache.length = end
        return self._linear(y, self.wte) if targets is None else self._loss(y, targets)

    def _dropped(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, self.dropout) if self.dropout and torch.is_grad_enabled() else x

    def _loss(self, y: Tensor, targets: Tensor) -> Tensor:
        tokens, vocab = targets.numel(), self.config.vocab_size
        if self.fused_loss or (self.fused_loss is None and y.dtype == torch.bfloat16 and tokens >= 8192):
            rows = max(1368, -(-tokens // 40) * 8)
            return cukern.linear_cross_entropy(y, self.wte, targets, vocab_size=vocab, chunk_rows=rows)
        return cukern.cross_entropy(
            self._linear(y, self.wte), targets, vocab_size=vocab, inplace_backward=True
        )

    def _kept(
        self, y: Tensor, level: int, op: Callable[..., Tensor], *inputs: Tensor, **options: Any
    ) -> contextlib.AbstractContextManager:
        """Inside the block, autograd keeps the inputs of op(*inputs) = y in place of y, if self.recompute is
        at least `level`."""
        if self.recompute < level or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return contextlib.nullcontext()
        inputs, place = tuple(x.detach() for x in inputs), y.data_ptr()

        def pack(saved: Tensor) -> Tensor | torch.Size:
            return saved.shape if saved.data_ptr() == place and saved.numel() else saved

        def unpack(packed: Any) -> Tensor:
            return packed if isinstance(packed, Tensor) else op(*inputs, **options).view(packed)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _attend(self, layer: int, qkv: Tensor, cache: Cache | None) -> Tensor:
        T, start = qkv.shape[1], cache.length if cache else 0
        qkv = qkv.unflatten(2, (3, self.config.num_heads, -1))
        if not cache:
            return cukern.attention_packed(qkv, version=self.attention).flatten(2)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))  # (B, heads, T, head_dim)
        kept = cache.keys_values[layer, ..., : start + T, :]
        kept[0, ..., start:, :], kept[1, ..., start:, :] = k, v
        return cukern.attention(q, *kept, version=self.attention).transpose(1, 2).flatten(2)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        is_strict = x.is_cuda and x.dtype == torch.float32 and not _allows_tf32()
        # cukern.linear is faster: docs/notes/gpt2.md
        matmul = self.matmul or _matmul[-1] or ("cukern" if is_strict else "cublas")
        return cukern.linear(x, weight, bias, version=None if matmul == "cukern" else matmul)

    def make_cache(self, batch: int) -> Cache:
        """An empty cache for `batch` rows of at most max_seq_len tokens."""
        c = self.config
        expect(isinstance(batch, int) and batch > 0, "a batch of at least 1", batch)
        shape = c.num_layers, 2, batch, c.num_heads, c.max_seq_len, c.channels // c.num_heads
        return Cache(torch.zeros(shape, dtype=self.wte.dtype, device=self.wte.device))

    def parts(self) -> dict[str, list[Parameter]]:
        """The parameters with llm.c's names, one per layer."""
        return {
            name: list(p) if isinstance(p := getattr(self, name), ParameterList) else [p]
            for name in PARAMETERS
        }

    def by_name(self, tensor_of: Callable[[Parameter], Tensor]) -> dict[str, Tensor]:
        """Copies of a tensor for each parameter, with llm.c's names, stacked over the layers as in llm.c's
        files."""
        stacked = {
            name: torch.stack([full(tensor_of(p)) for p in parts]) for name, parts in self.parts().items()
        }
        return {name: x if PARAMETERS[name][0].startswith("L") else x[0] for name, x in stacked.items()}

    def parameters_by_name(self) -> dict[str, Tensor]:
        return self.by_name(lambda p: p.detach())

    def gradients_by_name(self) -> dict[str, Tensor]:
        """The gradients with llm.c's names, stacked over the layers; missing ones are 0."""
        return self.by_name(lambda p: torch.zeros_like(p) if p.grad is None else p.grad)

    @torch.no_grad()
    def load_parameters(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy parameters with llm.c's names, of any dtype and device. Raises ValueError for other names or
        shapes and changes nothing."""
        self.config.check(parameters)
        for name, parts in self.parts().items():
            for part, tensor in zip(parts, parameters[name].view(len(parts), *parts[0].shape), strict=True):
                part.copy_(tensor)

    @torch.no_grad()
    def initialize(self, seed: int = 42) -> None:
        """llm.c's random weights, the same bits on each device: matrices from N(0, 0.02^2), those that end a
        branch divided by sqrt(2 layers), drawn as torch's normal_ draws in float32 on the CPU. Biases and the
        padding are 0, layernorm's weights 1."""
        c, rng, std = self.config, torch.Generator().manual_seed(seed), np.float32(0.02)
        branch_std = std * (np.float32(1) / np.sqrt(np.float32(2 * c.num_layers)))
        for name, parts in self.parts().items():
            for p in parts:
                p.fill_(name in ("ln1w", "ln2w", "lnfw"))
        draws = [(self.wte[: c.vocab_size], std), (self.wpe, std)]
        for i in range(c.num_layers):
            draws += [
                (getattr(self, name)[i], branch_std if name.endswith("projw") else std)
                for name in DECAYED[2:]
            ]
        for p, one in draws:
            p.copy_(
                torch.empty(p.shape, dtype=torch.float32, device="cpu").normal_(0, float(one), generator=rng)
            )

    def decay_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Groups of parameters for an optimizer: weight decay on the matrices only, as llm.c."""
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": decay} for decay in (weight_decay, 0.0)
        ]
        for name, parts in self.parts().items():
            groups[name not in DECAYED]["params"] += parts
        return groups


# ---- the choice of kernels, with the numbers and variables of DD2360-LLM, a fork of llm.c for a course

# a stack; the last entry applies to models whose matmul is None. "": the faster one; "cukern": cukern.use
# decides
_matmul = [""]


def _allows_tf32() -> bool:
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # torch 2.9 or newer
    return precision == "tf32" if precision else torch.backends.cuda.matmul.allow_tf32


# as torch.compiler.assume_constant_result, which imports dynamo
_allows_tf32._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def use_kernels(
    softmax_forward: int | str | None = None,
    softmax_backward: int | str | None = None,
    matmul_forward: int | str | None = None,
) -> Iterator[None]:
    """Inside the block, models run numbered kernels: 1 to 5 are v1 to v5 of cukern.softmax and cukern.linear.
    matmul_forward may also be "cublas". An argument that is None is read from SOFTMAX_FORWARD_KERNEL,
    SOFTMAX_BACKWARD_KERNEL or MATMUL_FORWARD_KERNEL; without the variable the default kernel runs.

        with use_kernels(softmax_forward=5, softmax_backward=5):
            model(tokens, targets).backward()

    A model's own arguments `attention` and `matmul` take precedence. Raises ValueError for another number.
    """
    forward = _version("softmax_forward", softmax_forward)
    backward = _version("softmax_backward", softmax_backward)
    matmul = _version("matmul_forward", matmul_forward)
    with contextlib.ExitStack() as stack:
        if forward or backward:
            stack.enter_context(cukern.use("attention", "v1"))
            stack.enter_context(cukern.use("softmax", forward or "default", backward=backward or "default"))
        if matmul.startswith("v"):
            stack.enter_context(cukern.use("matmul", matmul))
        _matmul.append("cukern" if matmul.startswith("v") else matmul or _matmul[-1])
        stack.callback(_matmul.pop)
        yield


def _version(name: str, value: int | str | None) -> str:
    """The version with this number, "" for the default."""
    text = os.environ.get(f"{name.upper()}_KERNEL", "") if value is None else str(value)
    numbers = ["1", "2", "3", "4", "5"] + ["cublas"] * (name == "matmul_forward")
    expect(
        text in ["", *numbers],
        f"{name}, or the variable {name.upper()}_KERNEL, to be one of {', '.join(numbers)}",
        repr(text),
    )
    return f"v{text}" if text.isdigit() else text
