"""The settings of a training run, what an update reports, and the schedules of the learning rate."""

import math
from dataclasses import dataclass

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
    master: bool = True  # -w: with bfloat16, keep float32 weights too; write the float32 weights into the optimizer state, as llm.c expects
    checkpoint_every: int = 0  # -n; 0 means never
    keep: int = 0  # -nk: the number of checkpoints to keep; 0 means all
    major_every: int = 0  # -nm: checkpoints at multiples of this are never deleted
    resume: bool = False  # -y: go on from the newest checkpoint in `out`, if there is one
    skip_loss: float = 0.0  # -sl: skip an update if the z-score of its loss exceeds this; 0 means never
    skip_norm: float = 0.0  # -sg: the same for the norm of the gradient
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float = 1.0  # the norm to which the gradient is clipped
    graph: bool = True  # on a GPU, with one process: replay an update as a CUDA graph
    rank: int = 0  # of this process
    num_processes: int = 1
    zero: int = 0  # -z: 1 divides parameters and the optimizer's state among the processes, as FSDP2
    peak_flops: float | None = None  # of the GPU, per second, for MFU; None: unknown

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in ("steps", "val_batches"):
                expect(value > 0 or value == -1, f"{name} of at least 1, or -1", value)
            elif name in ("batch", "seq_len", "sample_tokens", "max_norm"):
                expect(0 < value < math.inf, f"{name} more than 0", value)
            elif isinstance(value, int | float) and name not in ("rank", "num_processes", "zero"):
                expect(0 <= value < math.inf, f"{name} at least 0", value)
        expect(self.schedule in SCHEDULES, f"a schedule of {', '.join(SCHEDULES)}", repr(self.schedule))
        expect(0 <= self.rank < self.num_processes, "0 <= rank < num_processes", f"{self.rank} and {self.num_processes}")
        expect(self.zero in (0, 1), "zero 0 or 1", self.zero)
        product = "batch * seq_len" + " * num_processes" * (self.num_processes > 1)
        expect(self.total_batch % self.tokens == 0, f"total_batch a multiple of {product} = {self.tokens}", self.total_batch)
        needs_out = "resume" if self.resume else "checkpoint_every" if self.checkpoint_every else ""
        expect(self.out is not None or not needs_out, f"out, a folder, for {needs_out}", None)

    tokens = property(lambda self: self.batch * self.seq_len * self.num_processes)  # of a forward pass in all processes
    micro_steps = property(lambda self: max(1, self.total_batch // self.tokens))  # forward and backward passes of an update


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
