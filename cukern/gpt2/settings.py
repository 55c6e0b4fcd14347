"""The settings of a training run, what an update reports, the schedules of the learning rate, and
z-scores."""

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from cukern.gpt2.files import PathLike, expect

SCHEDULES = ("cosine", "linear", "constant", "wsd")


@dataclass(frozen=True)
class Settings:
    """The settings of a run; the letters are llm.c's flags. Raises ValueError for a value out of range."""

    train_data: PathLike  # -i, token shards: a glob pattern
    val_data: PathLike  # -j
    out: PathLike | None = None  # -o: the folder of main.log and the checkpoints
    batch: int = 4  # -b: rows in a forward pass
    seq_len: int = 1024  # -t
    total_batch: int = -1  # -d: tokens in an update; -1 or 0 means those of one forward pass in all processes
    steps: int = -1  # -x: updates; -1 means one epoch
    schedule: str = "cosine"  # -k
    lr: float = 3e-4  # -l
    warmup: int = 0  # -u: updates
    final_fraction: float = 1.0  # -q: the last learning rate as a fraction of lr
    weight_decay: float = 0.0  # -c: of matrices and embeddings
    val_every: int = 20  # -v; 0 means never
    val_batches: int = 20  # -m; -1 means all of the validation data; 0 gives a loss of nan, as in llm.c
    sample_every: int = 20  # -s; 0 means never
    sample_tokens: int = 64  # -g
    temperature: float = 1.0  # of samples; llm.c has no other
    prompt: tuple[int, ...] = ()  # tokens with which samples begin; llm.c has none
    hellaswag: PathLike | None = None  # -h: the file
    overfit: bool = False  # -a: train on the first batch of the validation data
    # -w: with bfloat16, keep float32 weights too; write the float32 weights into the optimizer state, as
    # llm.c expects
    master: bool = True
    checkpoint_every: int = 0  # -n; 0 means never
    keep: int = 0  # -nk: the number of checkpoints to keep; 0 means all
    major_every: int = 0  # -nm: checkpoints at multiples of this are never deleted
    resume: bool = False  # -y: go on from the newest checkpoint in `out`, if there is one
    skip_loss: float = 0.0  # -sl: skip an update if the z-score of its loss exceeds this; 0 means never
    skip_norm: float = 0.0  # -sg: the same for the norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0  # the norm to which the gradient is clipped; 0: it is not
    graph: bool = True  # on a GPU: replay an update as a CUDA graph
    rank: int = 0  # of this process
    num_processes: int = 1
    zero: int = 0  # -z: 1 divides parameters and the optimizer's state among the processes, as FSDP2
    seed: int = 42  # of dropout
    peak_flops: float | None = None  # of the GPU, per second, for MFU; None: unknown

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("steps", "val_batches", "total_batch"):
                expect(value >= 0 or value == -1, f"{name} at least 0, or -1", value)
            elif name in ("batch", "seq_len", "sample_tokens"):
                expect(0 < value < math.inf, f"{name} more than 0", value)
            elif isinstance(value, int | float) and name not in ("rank", "num_processes", "zero"):
                expect(0 <= value < math.inf, f"{name} at least 0", value)
        expect(self.schedule in SCHEDULES, f"a schedule of {', '.join(SCHEDULES)}", repr(self.schedule))
        expect(
            0 <= self.rank < self.num_processes,
            "0 <= rank < num_processes",
            f"{self.rank} and {self.num_processes}",
        )
        expect(self.zero in (0, 1), "zero 0 or 1", self.zero)
        product = "batch * seq_len" + " * num_processes" * (self.num_processes > 1)
        whole = self.total_batch < 0 or self.total_batch % self.tokens == 0
        expect(whole, f"total_batch a multiple of {product} = {self.tokens}", self.total_batch)
        needs_out = "resume" if self.resume else "checkpoint_every" if self.checkpoint_every else ""
        expect(self.out is not None or not needs_out, f"out, a folder, for {needs_out}", None)

    # of a forward pass in all processes
    tokens = property(lambda self: self.batch * self.seq_len * self.num_processes)
    # forward and backward passes of an update
    micro_steps = property(lambda self: max(1, self.total_batch // self.tokens))


@dataclass(frozen=True)
class Step:
    """What an update reports. `number` counts from 1; z-scores are NaN for the first 128 updates; `mfu`: None
    for unknown peaks."""

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
            f"step {self.number:4d}/{self.total} | loss {self.loss:7.6f} ({self.loss_z:+.2f}z)| norm "
            f"{self.norm:6.4f} ({self.norm_z:+.2f}z)"
            f"| lr {self.lr:.2e} | {self.ms:.2f} ms | {mfu} bf16 MFU | {self.tokens_per_s:.0f} tok/s"
        )


def learning_rate(
    step: int, total: int, lr: float, schedule: str = "cosine", warmup: int = 0, final_fraction: float = 1.0
) -> float:
    """The learning rate of update `step`, counted from 0, of `total`, as in llm.c.
    During warmup it grows linearly to `lr`; "constant" ignores warmup. Then it falls to lr * final_fraction:
    with half a cosine, linearly, or for "wsd" from 80 % of the updates on with 1 - sqrt. Each operation is
    rounded to float32, in llm.c's order."""
    number = np.float32
    top, one = number(lr), number(1)
    start = int(number(0.8) * number(total)) if schedule == "wsd" else warmup
    if schedule == "constant" or warmup <= step < start:
        return float(top)
    if step < warmup:
        up, whole = number(step + 1), number(warmup)
        return float(top * (up / whole) if schedule == "wsd" else top * up / whole)
    done = number(step - start) / number(total - start) if total > start else number(0)
    low = top * number(final_fraction)
    if schedule == "linear":
        return float(top - done * (top - low))
    cosine = number(math.cos(number(math.pi * float(done))))  # rounded once, as cosf
    left = one - np.sqrt(done) if schedule == "wsd" else number(0.5) * (one + cosine)
    return float(low + left * (top - low))


class Outliers:
    """llm.c's outlier detector: the z-score of a value among the last `window` values, itself included. NaN
    for the first `window` values; 0 if all are equal. Sums are updated instead of computed anew, so that the
    digits are llm.c's."""

    def __init__(self, window: int = 128) -> None:
        self.window, self.values, self.sum, self.squares = window, deque[float](), 0.0, 0.0

    def z_score(self, value: float) -> float:
        full = len(self.values) == self.window
        if full:
            old = self.values.popleft()
            self.sum -= old
            self.squares -= old * old
        self.values.append(value)
        self.sum += value
        self.squares += value * value
        mean = self.sum / self.window
        variance = self.squares / self.window - mean * mean
        if not full or variance < 0:  # below 0 by rounding only: sqrt is NaN in C
            return math.nan
        return (value - mean) / math.sqrt(variance) if variance else 0.0
