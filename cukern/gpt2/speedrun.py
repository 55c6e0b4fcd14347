"""The 124M speedrun: the recipe of the public records, on cukern's ops, or in plain torch to compare with.

settings = Settings("data/*_train_*.bin", "data/*_val_*.bin", batch=64, total_batch=2**19, steps=4800, lr=1.0)
Speedrun(SpeedrunModel(config_of("d12"), device="cuda", dtype=torch.bfloat16), settings).run()
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterDict
from torch.nn import functional as F
from torch.nn.utils import get_total_norm

import cukern
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.files import expect
from cukern.gpt2.settings import Settings
from cukern.gpt2.train import Trainer

TARGET = 3.28  # validation loss of the public speedrun, on FineWeb
EPS = 1e-6  # of RMSNorm
HEAD_DIM = 128


@dataclass(frozen=True)
class Recipe:
    """What the sizes do not say. Settings.lr and the schedule multiply the rates. Raises ValueError."""

    tied: bool = False  # the head is the embedding
    softcap: float = 30.0  # of the logits
    matrix_lr: float = 0.02  # Muon's
    embedding_lr: float = 0.3  # AdamW's; untied only
    head_lr: float = 0.002  # AdamW's; tied: also of the embedding
    warmdown: float = 0.3  # the last part of the updates, in which learning rates fall linearly to 0
    # of odd layers, as parts of the sequence, in equal parts of the run
    windows: tuple[float, ...] = (0.25, 0.5, 1.0)

    def __post_init__(self) -> None:
        expect(self.softcap > 0, "a softcap above 0", self.softcap)
        expect(0 < self.warmdown <= 1, "a warmdown above 0, at most 1", self.warmdown)
        expect(
            self.windows and all(0 < w <= 1 for w in self.windows), "windows above 0, at most 1", self.windows
        )


class Cukern:
    """The parts of the model, by cukern's ops."""

    embedding = staticmethod(cukern.embedding)
    linear = staticmethod(cukern.linear)
    rope = staticmethod(cukern.rope)

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return cukern.rmsnorm(x, None, eps=EPS)

    @staticmethod
    def add_norm(branch: Tensor, x: Tensor) -> Any:
        """The norm of x + branch, and x + branch."""
        return cukern.rmsnorm(branch, None, eps=EPS, residual=x)

    @staticmethod
    def relu_squared(x: Tensor) -> Tensor:
        with torch.no_grad():  # without a derivative: that of the square, 2 relu(x), is 0 where relu's is
            x.relu_()
        return cukern.square(x)

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, window: int, mask: None) -> Tensor:
        return cukern.attention(q, k, v, window=window if window < k.shape[-2] else None)

    @staticmethod
    def loss(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
        rows = max(1368, -(-targets.numel() // 40) * 8)  # a fifth, as in GPT2
        options: dict[str, Any] = {"vocab_size": vocab_size, "chunk_rows": rows}
        return cukern.linear_cross_entropy(x, head, targets, softcap=softcap, **options)


class Torch:
    """The same parts in plain torch, for torch.compile."""

    embedding = staticmethod(F.embedding)
    linear = staticmethod(F.linear)

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

    @staticmethod
    def norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=EPS)

    @staticmethod
    def add_norm(branch: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + branch
        return Torch.norm(x), x

    @staticmethod
    def relu_squared(x: Tensor) -> Tensor:
        return x.relu().square()

    @staticmethod
    def attention(q: Tensor, k: Tensor, v: Tensor, window: int, mask: Any) -> Tensor:
        """`mask`: of `band`."""
        if mask is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        if isinstance(mask, Tensor):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return torch.nn.attention.flex_attention.flex_attention(q, k, v, block_mask=mask)

    @staticmethod
    def loss(x: Tensor, head: Tensor, targets: Tensor, vocab_size: int, softcap: float) -> Tensor:
        logits = F.linear(x, head)[..., :vocab_size].float()
        return F.cross_entropy((softcap * torch.tanh(logits / softcap)).flatten(0, 1), targets.flatten())


def band(window: int, length: int, device: torch.device) -> Any:
    """A causal window: blocks for flex attention on a GPU, a matrix on a CPU; None if it has all keys."""
    if window >= length:
        return None
    if device.type == "cpu":
        every = torch.ones(length, length, dtype=torch.bool, device=device)
        return every.tril() & every.triu(1 - window)
    import torch.nn.attention.flex_attention as flex  # slow

    def sees(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (column <= row) & (column > row - window)

    return flex.create_block_mask(sees, None, None, length, length, device=device)


class SpeedrunModel(torch.nn.Module):
    """RMSNorm without weights, also of queries and keys, rotary embedding, ReLU^2, softcap.

    Args:
        config: the sizes. Heads have 128 elements if those divide the channels; else config.num_heads.
        recipe: see Recipe. plain: compute in torch's operations instead of cukern's.
        device: of the parameters, which are float32. dtype: in which the layers compute, float32 or bfloat16.
        seed: of the random weights. Those of one seed are equal on each device, also with `plain`.
    """

    dropout = 0.0

    def __init__(
        self, config: Config, recipe: Recipe | None = None, *, plain: bool = False, device: Any = None,
        dtype: torch.dtype = torch.float32, seed: int = 42,
    ) -> None:  # fmt: skip
        super().__init__()
        expect(dtype in (torch.float32, torch.bfloat16), "float32 or bfloat16", dtype, error=TypeError)
        C, self.config, self.recipe = config.channels, config, recipe or Recipe()
        self.plain, self.dtype = plain, dtype
        self.ops: Any = Torch if plain else Cukern
        self.heads = C // HEAD_DIM if C % HEAD_DIM == 0 else config.num_heads
        expect(C // self.heads % 2 == 0, "heads of an even number of elements", C // self.heads)
        rng = torch.Generator().manual_seed(seed)

        def drawn(std: float, *shape: int) -> Parameter:
            values = torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0, std, generator=rng)
            return Parameter(values.to(device))

        tied = self.recipe.tied
        self.wte = drawn(0.02 if tied else 1.0, config.padded_vocab_size, C)
        self.head = self.wte if tied else drawn(0.0, config.padded_vocab_size, C)
        rows = {"q": (C, C), "k": (C, C), "v": (C, C), "out": (C, C), "up": (4 * C, C), "down": (C, 4 * C)}
        std = dict.fromkeys(rows, 0.5 * C**-0.5) | {"out": 0.0, "down": 0.0}  # branches begin as 0
        layers = [ParameterDict({n: drawn(std[n], *rows[n]) for n in rows}) for _ in range(config.num_layers)]
        self.layers: Any = torch.nn.ModuleList(layers)
        tables = cukern.rope_tables(config.max_seq_len, C // self.heads, device=self.wte.device)
        self.cos, self.sin = (torch.nn.Buffer(table, persistent=False) for table in tables)
        self.windows, self.length = list[int](), 0
        self.set_windows(config.max_seq_len, 1.0)

    def set_windows(self, length: int, part: float) -> None:
        """Odd layers see the last length * part tokens, even layers half of that. `length`: of sequences."""
        long = max(2, round(length * part))
        windows = [long if i % 2 else long // 2 for i in range(self.config.num_layers)]
        if (windows, length) == (self.windows, self.length):
            return
        self.windows, self.length = windows, length
        masks = {w: band(w, length, self.wte.device) if self.plain else None for w in self.windows}
        self.masks = [masks[w] for w in self.windows]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, a float32 number, of tokens and targets, int64 (B, T)."""
        ops = self.ops
        x = ops.norm(ops.embedding(tokens, self.wte).to(self.dtype))
        y = ops.norm(x)
        for i, layer in enumerate(self.layers):
            y, x = ops.add_norm(self._linear(self._attend(i, y, layer), layer["out"]), x)
            hidden = ops.relu_squared(self._linear(y, layer["up"]))
            y, x = ops.add_norm(self._linear(hidden, layer["down"]), x)
        return ops.loss(y, self.head.to(self.dtype), targets, self.config.vocab_size, self.recipe.softcap)

    def _linear(self, x: Tensor, *weights: Tensor) -> Tensor:
        """The product with the rows of all weights."""
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        return self.ops.linear(x, weight.to(self.dtype))

    def _attend(self, i: int, y: Tensor, layer: Any) -> Tensor:
        B, T, C = y.shape
        qk = self._linear(y, layer["q"], layer["k"]).view(B, T, 2 * self.heads, -1)
        qk = self.ops.rope(self.ops.norm(qk), self.cos[:T], self.sin[:T])
        q, k = qk.view(B, T, 2, self.heads, -1).unbind(2)
        v = self._linear(y, layer["v"]).view(B, T, self.heads, -1)
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        attended = self.ops.attention(*heads_first, self.windows[i], self.masks[i])
        return attended.transpose(1, 2).reshape(B, T, C)

    def parameters_by_name(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.named_parameters()}

    def gradients_by_name(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.named_parameters() if p.grad is not None}

    def flops_per_token(self, length: int) -> int:
        """6 per element of a matrix, without the embedding, and 12 C for each key that a query sees."""
        keys = sum(w - w * (w - 1) / (2 * length) for w in self.windows)
        elements = sum(p.numel() for p in self.layers.parameters()) + self.head.numel()
        return 6 * elements + round(12 * self.config.channels * keys)


class Optimizers:
    """Muon for the layers, AdamW for embedding and head. `param_groups[0]["lr"]` multiplies all learning
    rates. On a GPU those of cukern's are tensors, which the CUDA graph of an update reads."""

    grad_norm: Tensor

    def __init__(self, model: SpeedrunModel, weight_decay: float) -> None:
        recipe, self.params = model.recipe, list(model.parameters())
        kinds: Any = torch.optim if model.plain else cukern
        others: list[dict[str, Any]] = [{"params": [model.head], "lr": recipe.head_lr}]
        if not recipe.tied:
            others.append({"params": [model.wte], "lr": recipe.embedding_lr})
        self.both: list[torch.optim.Optimizer] = [
            kinds.Muon(list(model.layers.parameters()), lr=recipe.matrix_lr, weight_decay=weight_decay),
            kinds.AdamW(others, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0, fused=True),
        ]
        self.groups = [group for optimizer in self.both for group in optimizer.param_groups]
        self.rates = [group["lr"] for group in self.groups]
        self.param_groups = [{"lr": 1.0}]
        if model.wte.is_cuda and not model.plain:
            for group in self.groups:
                group["lr"] = torch.tensor(group["lr"], dtype=torch.float32, device=model.wte.device)

    def update_groups(self) -> None:
        """Write the learning rates where the next step, or replay, reads them."""
        for group, rate in zip(self.groups, self.rates, strict=True):
            now = rate * self.param_groups[0]["lr"]
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(now)
            else:
                group["lr"] = now

    def zero_grad(self) -> None:
        for optimizer in self.both:
            optimizer.zero_grad()

    def step(self) -> None:
        if not (self.params[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self.update_groups()
        self.grad_norm = get_total_norm([p.grad for p in self.params if p.grad is not None])
        for optimizer in self.both:
            optimizer.step()


class Speedrun(Trainer):
    """A Trainer of a SpeedrunModel. Settings.lr multiplies the recipe's rates; schedule and warmup have no
    effect, and there are no checkpoints. Other windows capture a new CUDA graph; `plain` has none."""

    model: Any

    def __init__(self, model: SpeedrunModel, settings: Settings, say: Callable[..., Any] = print) -> None:
        saves = settings.checkpoint_every or settings.resume or settings.zero
        expect(not saves, "no checkpoints, resume or zero", settings)
        super().__init__(model, settings, say=say)  # type: ignore[arg-type]
        self.begin, self.first_end, self.reached = time.perf_counter(), 0.0, False
        self._choose_windows()

    def _optimizer(self) -> Optimizers:
        return Optimizers(self.model, self.settings.weight_decay)

    def _rate(self) -> float:
        left = (self.total - self.step) / (self.model.recipe.warmdown * self.total)
        return self.settings.lr * min(1.0, left)

    def _replays(self) -> bool:
        return super()._replays() and not self.model.plain

    def _choose_windows(self) -> None:
        windows, old = self.model.recipe.windows, self.model.windows
        part = windows[min(len(windows) - 1, len(windows) * self.step // max(1, self.total))]
        self.model.set_windows(self.settings.seq_len, part)
        if self.model.windows != old:
            self.optimizer.zero_grad()  # gradients in the memory of the graph
            self.graph, self.eager_updates = None, 0

    def update(self) -> tuple[tuple[float, float], tuple[float, float], float]:
        self._choose_windows()
        result = super().update()
        self.first_end = self.first_end or time.perf_counter()
        return result

    def flops_per_token(self) -> int:
        return self.model.flops_per_token(self.settings.seq_len)

    def _evaluate(self, last: bool) -> None:
        super()._evaluate(last)
        if self.validations and self.validations[-1][1] <= TARGET and not self.reached:
            self.reached = True
            seconds = time.perf_counter() - self.begin
            self.say(f"val loss of at most {TARGET} after {self.step} updates, {seconds:.1f} s")
