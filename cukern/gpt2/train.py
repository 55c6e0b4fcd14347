"""Training as llm.c's train_gpt2cu: the same batches, schedules, printed lines, main.log and checkpoints, in float32 or TF32."""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from cukern import AdamW
from cukern.gpt2 import checkpoint
from cukern.gpt2.data import DataLoader
from cukern.gpt2.evaluate import hellaswag_accuracy, read_hellaswag, validation_loss
from cukern.gpt2.files import PathLike, expect, replace
from cukern.gpt2.model import GPT2
from cukern.gpt2.sample import Xorshift, generate
from cukern.gpt2.tokenizer import Tokenizer

SCHEDULES = ("cosine", "linear", "constant", "wsd")
WINDOW = 128  # steps over which z-scores are computed
RNG = 13371337  # llm.c's first state of stochastic rounding; float32 draws nothing


@dataclass(frozen=True)
class Settings:
    """The settings of a run; the letters are llm.c's flags. Raises ValueError for a value out of range."""

    train_data: PathLike  # -i, token shards: a glob pattern
    val_data: PathLike  # -j
    out: PathLike | None = None  # -o: the folder of main.log and the checkpoints
    batch: int = 4  # -b: rows in a forward pass
    seq_len: int = 1024  # -t
    total_batch: int = 0  # -d: tokens in an update; 0 means batch * seq_len
    steps: int = -1  # -x: updates; -1 means one epoch
    schedule: str = "cosine"  # -k
    lr: float = 3e-4  # -l
    warmup: int = 0  # -u: updates
    final_fraction: float = 1.0  # -q: the last learning rate as a fraction of lr
    weight_decay: float = 0.0  # -c: of matrices and embeddings
    val_every: int = 20  # -v; 0 means never
    val_batches: int = 20  # -m; -1 means all of the validation data
    sample_every: int = 20  # -s; 0 means never
    sample_tokens: int = 64  # -g
    temperature: float = 1.0  # of samples; llm.c has no other
    prompt: tuple[int, ...] = ()  # tokens with which samples begin; llm.c has none
    hellaswag: PathLike | None = None  # -h: the file
    overfit: bool = False  # -a: train on the first batch of the validation data
    master: bool = True  # -w: write the float32 weights into the optimizer state too, as llm.c expects
    checkpoint_every: int = 0  # -n; 0 means never
    keep: int = 0  # -nk: the number of checkpoints to keep; 0 means all
    major_every: int = 0  # -nm: checkpoints at multiples of this are never deleted
    resume: bool = False  # -y: go on from the newest checkpoint in `out`, if there is one
    skip_loss: float = 0.0  # -sl: skip an update if the z-score of its loss exceeds this; 0 means never
    skip_norm: float = 0.0  # -sg: the same for the norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0  # the norm to which the gradient is clipped
    graph: bool = True  # on a GPU, replay forward and backward as a CUDA graph
    peak_flops: float | None = None  # of the GPU, per second, for MFU; None: unknown

    def __post_init__(self) -> None:
        positive = ("batch", "seq_len", "sample_tokens", "max_norm")
        not_negative = ("warmup", "final_fraction", "weight_decay", "val_every", "sample_every", "checkpoint_every", "keep", "major_every")
        for name in (*positive, *not_negative, "lr", "temperature", "skip_loss", "skip_norm", "total_batch"):
            value, least = getattr(self, name), "more than 0" if name in positive else "at least 0"
            expect(math.isfinite(value) and (value > 0 or (value == 0 and name not in positive)), f"{name} {least}", value)
        for name in ("steps", "val_batches"):
            expect(getattr(self, name) > 0 or getattr(self, name) == -1, f"{name} of at least 1, or -1", getattr(self, name))
        expect(self.schedule in SCHEDULES, f"a schedule of {', '.join(SCHEDULES)}", repr(self.schedule))
        expect(self.total_batch % self.tokens == 0, f"total_batch a multiple of batch * seq_len = {self.tokens}", self.total_batch)
        needs_out = "resume" if self.resume else "checkpoint_every" if self.checkpoint_every else ""
        expect(self.out is not None or not needs_out, f"out, a folder, for {needs_out}", None)

    @property
    def tokens(self) -> int:  # of a forward pass
        return self.batch * self.seq_len

    @property
    def micro_steps(self) -> int:  # forward and backward passes of an update
        return max(1, self.total_batch // self.tokens)


@dataclass(frozen=True)
class Step:
    """What an update reports. `number` counts from 1; z-scores are NaN until WINDOW updates are done; `mfu`: None for unknown peaks."""

    number: int
    total: int
    loss: float
    loss_z: float
    norm: float
    norm_z: float
    lr: float
    ms: float
    mfu: float | None
    tokens_per_s: float

    def __str__(self) -> str:
        mfu = "n/a" if self.mfu is None else f"{100 * self.mfu:.1f}%"
        return (
            f"step {self.number:4d}/{self.total} | loss {self.loss:7.6f} ({self.loss_z:+.2f}z)| norm {self.norm:6.4f} ({self.norm_z:+.2f}z)"
            f"| lr {self.lr:.2e} | {self.ms:.2f} ms | {mfu} bf16 MFU | {self.tokens_per_s:.0f} tok/s"
        )


def learning_rate(step: int, total: int, lr: float, schedule: str = "cosine", warmup: int = 0, final_fraction: float = 1.0) -> float:
    """The learning rate of update `step`, counted from 0, of `total`, as in llm.c.
    During warmup it grows linearly to `lr`; "constant" ignores warmup. Then it falls to lr * final_fraction: with half a cosine, linearly,
    or for "wsd" from 80 % of the updates on with 1 - sqrt."""
    if schedule == "constant":
        return lr
    if step < warmup:
        return lr * (step + 1) / warmup
    start = int(0.8 * total) if schedule == "wsd" else warmup
    if step < start:
        return lr
    done = (step - start) / (total - start) if total > start else 0.0
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "wsd": 1 - math.sqrt(done)}[schedule]
    return lr * (final_fraction + left * (1 - final_fraction))


def sample_text(model: GPT2, tokenizer: Tokenizer, count: int, temperature: float = 1.0, prompt: Sequence[int] = ()) -> str:
    """Text from llm.c's sampler with its first seed. `count` includes the prompt, or the EOT that replaces it. A count above max_seq_len
    gives several texts."""
    rng, most, options = Xorshift(), model.config.max_seq_len, {"temperature": temperature, "prompt": prompt or None}
    lengths = [max(len(prompt), min(most, count - start)) for start in range(0, count, most)]
    return "\n".join(tokenizer.decode([*prompt, *generate(model, tokenizer, n, rng, **options)]) for n in lengths)  # type: ignore[arg-type]


def z_score(value: float, window: deque[float]) -> float:
    """Add a value to a window of a fixed length; its z-score among them, NaN until the window is full, 0 if all are equal."""
    window.append(value)
    if len(window) != window.maxlen:
        return math.nan
    deviation = float(np.std(window))
    return (value - float(np.mean(window))) / deviation if deviation else 0.0


class Trainer:
    """One training run.

        settings = Settings("data/*_train_*.bin", "data/*_val_*.bin", batch=4, seq_len=1024, out="run", checkpoint_every=100)
        Trainer(model, settings).run()

    Args:
        model: float32, on any device. Its parameters are trained, or replaced by those of the checkpoint.
        tokenizer: decodes samples; without one there are none. say: is called with each printed line, but those of the updates.

    Runs with equal settings on one machine give the same bits, also after a stop and a resume. Exception: with skip_loss or skip_norm the
    windows of the z-scores are empty after a resume, as in llm.c. Raises ValueError for data shorter than a batch, a checkpoint of
    another shape or rank, and sequences longer than the model's; FileNotFoundError for files that are not there.
    """

    def __init__(self, model: GPT2, settings: Settings, tokenizer: Tokenizer | None = None, say: Callable[[str], object] = print) -> None:
        s, config = settings, model.config
        self.model, self.settings, self.tokenizer, self.say = model, settings, tokenizer, say
        self.step = 0  # completed updates
        self.losses, self.validations = list[tuple[int, float]](), list[tuple[int, float]]()  # step and loss of each
        expect(model.wte.dtype == torch.float32, "a float32 model", model.wte.dtype, error=TypeError)
        expect(s.seq_len <= config.max_seq_len, f"seq_len of at most the model's max_seq_len = {config.max_seq_len}", s.seq_len)
        pattern, vocabulary = s.val_data if s.overfit else s.train_data, config.vocab_size
        self.train_data = DataLoader(pattern, s.batch, s.seq_len, shuffle=not s.overfit, vocab_size=vocabulary)
        self.val_data = DataLoader(s.val_data, s.batch, s.seq_len, vocab_size=vocabulary)
        self.total = s.steps if s.steps > 0 else self.train_data.num_tokens // (s.tokens * s.micro_steps)
        expect(self.total > 0, f"at least one update's {s.tokens * s.micro_steps} tokens", self.train_data.num_tokens, pattern)
        self.val_batches = s.val_batches if s.val_batches > 0 else self.val_data.num_tokens // s.tokens
        self.examples = read_hellaswag(s.hellaswag, vocabulary) if s.hellaswag else []
        self.optimizer = AdamW(model.decay_groups(s.weight_decay), lr=s.lr, betas=s.betas, eps=1e-8, max_norm=s.max_norm)
        self.graph: tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None = None  # of a micro-step; its inputs and loss
        self.eager_batches = 0
        self._start()
        self.windows = deque[float](maxlen=WINDOW), deque[float](maxlen=WINDOW)  # of losses and norms

    def save(self) -> None:
        """Write a checkpoint, then delete the one that is too old."""
        s, config, slots, parameters = self.settings, self.model.config, self.optimizer.state, self.model.parameters_by_name()
        assert s.out is not None
        parts = self.model.parts()
        m, v = (self.model.stack({n: [slots[p][key].cpu() for p in parts[n]] for n in parts}) for key in ("exp_avg", "exp_avg_sq"))
        state = checkpoint.State(self.step, m, v, self.train_data.state(), parameters if s.master else None, RNG, RNG)
        checkpoint.save(s.out, config, parameters, state)
        old = self.step - s.keep * s.checkpoint_every
        if s.keep and old > 0 and not (s.major_every and old % s.major_every == 0):
            checkpoint.delete(s.out, old)

    def _start(self) -> None:
        """Go to the newest checkpoint, if there is one. Lines of main.log from its step on are removed, because those steps run again."""
        s = self.settings
        if s.out is None:
            return
        log, newest = Path(s.out, "main.log"), checkpoint.latest_step(s.out)
        expect(s.resume or newest is None, "a folder without checkpoints, or resume", f"a checkpoint of step {newest}", s.out)
        if newest is not None:
            self._load(*checkpoint.paths(s.out, newest)[:2], newest)
        text = log.read_text() if newest is not None and log.exists() else ""
        kept = [match[0] for match in re.finditer(r"^s:(\d+) .*\n", text, re.MULTILINE) if int(match[1]) < self.step]
        Path(s.out).mkdir(parents=True, exist_ok=True)
        with replace(log) as file:
            file.write("".join(kept).encode())

    def _load(self, weights: Path, optimizer: Path, step: int) -> None:
        config, parameters = checkpoint.read_model(weights, self.model.config)
        state = checkpoint.read_state(optimizer, config)
        expect(state.step == step, f"the state of step {step}", state.step, optimizer)
        self.train_data.resume(state.loader)
        self.model.load_parameters(state.master or parameters)
        for name, parts in self.model.parts().items():
            for p, m, v in zip(parts, state.m[name].view(len(parts), -1), state.v[name].view(len(parts), -1), strict=True):
                self.optimizer.state[p] = {"step": torch.tensor(float(step)), "exp_avg": m.view_as(p), "exp_avg_sq": v.view_as(p)}
        self.optimizer.load_state_dict(self.optimizer.state_dict())  # copies them to the device
        self.step = step

    def _log(self, text: str) -> None:
        if self.settings.out is not None:
            with open(Path(self.settings.out, "main.log"), "a") as file:
                file.write(f"s:{self.step} {text}\n")

    def run(self, report: Callable[[Step], object] = print) -> None:
        """Train to the end. `report` is called after each update; str(step) is llm.c's line. Raises FloatingPointError if the loss or the
        norm of the gradient is not finite, and OSError if a file cannot be written; the last complete checkpoint remains."""
        s, start, speed, ms_sum = self.settings, self.step, 0.0, 0.0
        while True:
            last = self.step >= self.total
            self._evaluate(last)
            if s.checkpoint_every and self.step > start and (last or self.step % s.checkpoint_every == 0):
                self.save()
            if last:
                break
            begin = time.perf_counter()
            loss, norm, lr = self._update()
            seconds = time.perf_counter() - begin
            tokens_per_s, done = s.tokens * s.micro_steps / seconds, self.step - start - 1
            mfu = None if s.peak_flops is None else self.flops_per_token() * tokens_per_s / s.peak_flops
            if done:  # the first update compiles kernels
                ms_sum += 1e3 * seconds
                speed = 0.95 * speed + 0.05 * tokens_per_s
                tokens_per_s = speed / (1 - 0.95**done)
            self.losses.append((self.step, loss[0]))
            report(Step(self.step, self.total, *loss, *norm, lr, 1e3 * seconds, mfu, tokens_per_s))
        if self.step - start > 1:
            self.say(f"total average iteration time: {ms_sum / (self.step - start - 1):f} ms")

    def flops_per_token(self) -> int:
        """llm.c's count: 6 per parameter, and 6 L C T for causal attention."""
        c = self.model.config
        return 6 * c.num_parameters + 6 * c.num_layers * c.channels * self.settings.seq_len

    def _evaluate(self, last: bool) -> None:
        """What is due before an update, or after the last one: validation, HellaSwag, a sample."""
        s = self.settings
        if s.val_every and (last or self.step % s.val_every == 0):
            loss = validation_loss(self.model, self.val_data, self.val_batches)
            self.say(f"val loss {loss:f}")
            self._log(f"tel:{loss:.4f}")
            self.validations.append((self.step, loss))
            if self.examples and (last or self.step):
                right, count = hellaswag_accuracy(self.model, self.examples, max(4, s.batch))
                self.say(f"HellaSwag: {right}/{count} = {right / count:f}")
                self._log(f"eval:{right / count:.4f}")
        if s.sample_every and self.tokenizer and (last or (self.step and self.step % s.sample_every == 0)):
            self.say(f"generating:\n---\n{sample_text(self.model, self.tokenizer, s.sample_tokens, s.temperature, s.prompt)}\n---")

    def _update(self) -> tuple[tuple[float, float], tuple[float, float], float]:
        """One update: (loss, its z-score), (norm of the gradient, its z-score), learning rate. Reads from the device once."""
        s = self.settings
        lr = learning_rate(self.step, self.total, s.lr, s.schedule, s.warmup, s.final_fraction)
        mean = self._backward()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.found_inf = (~mean.isfinite()).float()  # type: ignore[attr-defined]  # the parameters stay as they are
        decide = s.skip_loss > 0 or s.skip_norm > 0
        if not decide:
            self.optimizer.step()
        norm = get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]) if decide else self.optimizer.grad_norm
        assert norm is not None
        numbers = torch.stack([mean, norm.float()]).tolist()
        if not all(map(math.isfinite, numbers)):
            values = f"step {self.step + 1}: loss {numbers[0]}, norm of the gradient {numbers[1]}"
            raise FloatingPointError(f"{values}; the first tensor that is not finite: {self._not_finite(numbers[0])}")
        z = [z_score(value, window) for value, window in zip(numbers, self.windows, strict=True)]
        if decide:
            what = "loss" if 0 < s.skip_loss < z[0] else "grad" if 0 < s.skip_norm < z[1] else ""  # false for NaN
            if what:
                self.say(f"skipping update due to {what} z-score of {z[what == 'grad']:f}")
                for slot in self.optimizer.state.values():
                    slot["step"] += 1  # llm.c's bias correction counts skipped updates
            else:
                self.optimizer.step()
        self._log(f"trl:{numbers[0]:.4f} lr:{lr:.6f} norm:{numbers[1]:.2f}")
        self.step += 1
        return (numbers[0], z[0]), (numbers[1], z[1]), lr

    def _backward(self) -> Tensor:
        """The gradients of the next batches, and the mean loss, on the device."""
        if self.settings.overfit:
            self.train_data.reset()
        if self.graph is None or self.settings.micro_steps > 1:
            self.optimizer.zero_grad(set_to_none=self.graph is None)
        batches = [self.train_data.next_batch() for _ in range(self.settings.micro_steps)]
        return torch.stack([self._micro_step(torch.stack(batch)) for batch in batches]).sum()

    def _micro_step(self, batch: Tensor) -> Tensor:
        """Adds the gradients of one batch, (2, B, T): inputs and targets. Returns its share of the mean loss. The first
        max(2, micro_steps) batches run eagerly, which compiles kernels; then the graph is captured. With one micro-step the graph writes
        the gradients, with several it adds to them."""
        if self.graph is not None:
            graph, inputs, loss = self.graph
            inputs.copy_(batch)
            graph.replay()
            return loss.clone()
        batch = batch.to(self.model.wte.device)
        loss = self.model(*batch) / self.settings.micro_steps
        loss.backward()
        loss = loss.detach()
        self.eager_batches += 1
        if batch.is_cuda and self.settings.graph and self.eager_batches == max(2, self.settings.micro_steps):
            self._capture(batch)
        return loss

    def _capture(self, batch: Tensor) -> None:
        """Capture a micro-step. A graph that writes the gradients has its own memory for them, to which those of now are copied."""
        saved = [p.grad for p in self.model.parameters()]
        if self.settings.micro_steps == 1:
            self.optimizer.zero_grad()
        graph, inputs = torch.cuda.CUDAGraph(), torch.zeros_like(batch)
        with torch.cuda.graph(graph):
            loss = self.model(*inputs) / self.settings.micro_steps
            loss.backward()
        for p, grad in zip(self.model.parameters(), saved, strict=True):
            if p.grad is not None and grad is not None and p.grad is not grad:
                p.grad.copy_(grad)
        self.graph = graph, inputs, loss.detach()

    def _not_finite(self, loss: float) -> str:
        """The first tensor in llm.c's order that is not finite. If the loss is finite, only gradients are searched."""
        tensors = {"gradient of": self.model.gradients_by_name()}
        if not math.isfinite(loss):
            tensors = {"parameter": self.model.parameters_by_name()} | tensors
        found = (f"{kind} {name}" for kind, named in tensors.items() for name, tensor in named.items() if not tensor.isfinite().all())
        return next(found, "the loss")
