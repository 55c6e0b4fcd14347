"""`cukern gpt2 train`: llm.c's flags; without -i a small model on a text that every machine has."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from cukern.bench import environment
from cukern.bench.environment import float32_products
from cukern.cli.bench import check_plot
from cukern.cli.common import console, say, torch_dtype
from cukern.gpt2 import checkpoint, parallel
from cukern.gpt2.checkpoint import Config
from cukern.gpt2.data import Tokenizer, byte_tokenizer, read_tokenizer, tokenize, write_shards
from cukern.gpt2.files import PathLike, expect
from cukern.gpt2.model import GPT2, config_of, use_kernels
from cukern.gpt2.settings import SCHEDULES, Settings, Step
from cukern.gpt2.train import Trainer
from cukern.runtime.launch.backend import simulating

TOKENIZER_FILE = "gpt2_tokenizer.bin"  # the name of the published one
HELLASWAG = Path("dev/data/hellaswag/hellaswag_val.bin")  # llm.c's
MODEL, MODEL_BF16, SMALL = "gpt2_124M.bin", "gpt2_124M_bf16.bin", "small"
# Without -i: a model for byte tokens that learns in a minute on two CPU cores; what else was tried is in
# docs/notes/gpt2.md.
SMALL_RUN: dict[str, Any] = dict(
    batch=12, seq_len=64, steps=1200, lr=4e-3, warmup=100, final_fraction=0.05, weight_decay=0.1
)
SMALL_RUN |= dict(
    val_every=600,
    val_batches=-1,
    sample_every=10**9,
    sample_tokens=512,
    temperature=0.3,
    prompt=tuple(b"The "),
)


def sizes_of(name: str, seq_len: int) -> Config:
    """What -e names, if it is no file. "small": byte tokens, seq_len positions."""
    small = Config(max_seq_len=seq_len, vocab_size=256, num_layers=2, num_heads=4, channels=96)
    return small if name == SMALL else config_of(name)


def make_model(
    name: str, seq_len: int, device: str, dtype: str | None = "f", seed: int = 42, **options: Any
) -> GPT2:
    """What -e names: a model file NAME.bin, or sizes for llm.c's random weights. "small": byte tokens,
    seq_len positions. Without a dtype that of the file. `seed`: of random weights. `options`: of GPT2."""
    expect(dtype in (None, "f", "b"), "--dtype f or b", repr(dtype))
    parameters = None
    if name.endswith(".bin"):
        config, parameters = checkpoint.read_model(name)
    else:
        config = sizes_of(name, seq_len)
    own = torch.float32 if parameters is None else parameters["wte"].dtype
    model = GPT2(config, device=device, dtype=torch_dtype(dtype) if dtype else own, **options)
    if parameters is None:
        model.initialize(seed)
    else:
        model.load_parameters(parameters)
    return model


def tokenizer_for(vocab_size: int, path: PathLike | None = None) -> Tokenizer | None:
    """The tokenizer of a model: of the file, else bytes for 256 tokens, else gpt2_tokenizer.bin in the
    current folder, if it is there."""
    if path is None and vocab_size == 256:
        return byte_tokenizer()
    if path is None and not os.path.exists(TOKENIZER_FILE):
        return None
    tokenizer = read_tokenizer(path or TOKENIZER_FILE)
    expect(
        len(tokenizer.tokens) == vocab_size,
        f"the model's {vocab_size} tokens",
        len(tokenizer.tokens),
        path or TOKENIZER_FILE,
    )
    return tokenizer


def pick_device(device: str | None) -> str:
    """The GPU if there is one, unless a device is named. Raises ValueError for a device that there is not."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not (device == "cuda" and torch.cuda.is_available()):
        raise ValueError(
            f"--device must be cpu{', or cuda' if torch.cuda.is_available() else '; torch.cuda sees no GPU'},"
            f" got {device!r}"
        )
    return device


def _published(name: str) -> str:
    """Check that the published file is there if it is the model. Raises FileNotFoundError."""
    there, advice = name != MODEL or os.path.exists(name), "`cukern gpt2 data --starter-pack` downloads it"
    expect(there, f"{MODEL} in the current folder ({advice})", "no such file", error=FileNotFoundError)
    return name


_SIZES = (
    "d6, d12, d24, d36, d48, d60, d72, d84, gpt3:c384 to gpt3:c12288 (2048 positions), small (byte tokens)"
)
_MODEL_HELP = f"A model file, or sizes for random weights: {_SIZES}."
ModelFile = Annotated[str, typer.Option("-e", "--model", help=_MODEL_HELP, callback=_published)]
Device = Annotated[
    str | None, typer.Option(metavar="cpu|cuda", help="Where to run; the GPU by default, if there is one.")
]
Rows = Annotated[
    int | None, typer.Option("-b", "--batch", help="B: rows of a forward pass (4; small run: 12).")
]
Length = Annotated[
    int | None, typer.Option("-t", "--seq-len", help="T: tokens of a row (1024; small run: 64).")
]
Temperature = Annotated[
    float | None,
    typer.Option(help="Divides the logits of a sample; 0: the likeliest token (1; small run: 0.3)."),
]
TokenizerFile = Annotated[
    Path | None,
    typer.Option("--tokenizer", help="Decodes samples (gpt2_tokenizer.bin here; bytes for 256 tokens)."),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="f|b", help="float32 or bfloat16; by default the model file's, or float32."
    ),
]
Attention = Annotated[
    str | None,
    typer.Option("--attention", help="A version of cukern.attention, or sdpa: torch's fused attention."),
]
FusedLoss = Annotated[
    bool | None,
    typer.Option(
        help="Compute the loss in chunks of rows: less memory; by default in bfloat16 from 8192 tokens on."
    ),
]
Recompute = Annotated[
    int,
    typer.Option("-r", "--recompute", min=0, max=2, help="1: gelu again in the backward; 2: layernorm too."),
]
SoftmaxForward = Annotated[
    str | None,
    typer.Option(
        "--softmax-forward-kernel", help="Version 1 to 5 of cukern.softmax; default: $SOFTMAX_FORWARD_KERNEL."
    ),
]
SoftmaxBackward = Annotated[
    str | None,
    typer.Option(
        "--softmax-backward-kernel", help="The same for its backward; default: $SOFTMAX_BACKWARD_KERNEL."
    ),
]
MatmulForward = Annotated[
    str | None,
    typer.Option(
        "--matmul-forward-kernel",
        help="Version 1 to 5 of cukern.linear, or cublas; default: $MATMUL_FORWARD_KERNEL.",
    ),
]
Flag = typer.Option


def train(
    train_data: Annotated[
        str | None,
        Flag("-i", "--train-data", help="Training shards, a glob pattern. Without it: a small run."),
    ] = None,
    val_data: Annotated[str | None, Flag("-j", "--val-data", help="Validation shards.")] = None,
    model: Annotated[
        str | None,
        Flag(
            "-e",
            "--model",
            help=f"{_MODEL_HELP} ({MODEL_BF16} if it is in this folder, else d12; small run: small)",
        ),
    ] = None,
    out: Annotated[Path | None, Flag("-o", "--out", help="Folder of main.log and the checkpoints.")] = None,
    batch: Rows = None,
    seq_len: Length = None,
    total_batch: Annotated[
        int | None,
        Flag(
            "-d",
            "--total-batch",
            help="Tokens of an update, over several passes; -1: B * T * processes (-1).",
        ),
    ] = None,
    steps: Annotated[int | None, Flag("-x", "--steps", help="Updates; -1: one epoch (-1).")] = None,
    schedule: Annotated[
        str | None, Flag("-k", "--schedule", help=f"Of the learning rate: {', '.join(SCHEDULES)} (cosine).")
    ] = None,
    lr: Annotated[float | None, Flag("-l", "--lr", help="Learning rate (3e-4).")] = None,
    warmup: Annotated[int | None, Flag("-u", "--warmup", help="Updates of warmup (0).")] = None,
    final_fraction: Annotated[
        float | None, Flag("-q", "--final-fraction", help="Last learning rate / -l (1).")
    ] = None,
    weight_decay: Annotated[
        float | None, Flag("-c", "--weight-decay", help="Of matrices and embeddings (0).")
    ] = None,
    val_every: Annotated[
        int | None, Flag("-v", "--val-every", help="Updates between validations; 0: never (20).")
    ] = None,
    val_batches: Annotated[
        int | None, Flag("-m", "--val-batches", help="Batches of a validation; -1: all; 0: none (20).")
    ] = None,
    sample_every: Annotated[
        int | None, Flag("-s", "--sample-every", help="Updates between samples; 0: never (20).")
    ] = None,
    sample_tokens: Annotated[
        int | None, Flag("-g", "--sample-tokens", help="Tokens of a sample (64).")
    ] = None,
    temperature: Temperature = None,
    run_hellaswag: Annotated[
        int,
        Flag("-h", "--run-hellaswag", min=0, max=1, help="1: HellaSwag with each validation but the first."),
    ] = 0,
    hellaswag: Annotated[Path, Flag("--hellaswag", help="Its file.")] = HELLASWAG,
    overfit: Annotated[
        int, Flag("-a", "--overfit", min=0, max=1, help="1: train on the first validation batch only.")
    ] = 0,
    tf32: Annotated[int, Flag("-f", "--tf32", min=0, max=1, help="0: strict float32 matrix products.")] = 1,
    master: Annotated[
        int, Flag("-w", "--master", min=0, max=1, help="1: float32 weights in the optimizer state too.")
    ] = 1,
    checkpoint_every: Annotated[
        int | None, Flag("-n", "--checkpoint-every", help="Updates between checkpoints; 0: never (0).")
    ] = None,
    keep: Annotated[int | None, Flag("-nk", "--keep", help="Checkpoints to keep; 0: all (0).")] = None,
    major_every: Annotated[
        int | None, Flag("-nm", "--major-every", help="Multiples of this are never deleted (0).")
    ] = None,
    resume: Annotated[
        int, Flag("-y", "--resume", min=0, max=1, help="1: go on from the newest checkpoint in -o, if any.")
    ] = 0,
    skip_loss: Annotated[
        float | None,
        Flag("-sl", "--skip-loss", help="Skip updates whose loss has a z-score above; 0: never."),
    ] = None,
    skip_norm: Annotated[
        float | None, Flag("-sg", "--skip-norm", help="The same for the norm of the gradient.")
    ] = None,
    dtype: Dtype = None,
    attention: Attention = None,
    fused_loss: FusedLoss = None,
    recompute: Recompute = 0,
    zero: Annotated[
        int, Flag("-z", "--zero", min=0, max=3, help="1: divide weights and optimizer state; 2, 3: as 0.")
    ] = 0,
    gelu_fusion: Annotated[
        int,
        Flag("-ge", "--gelu-fusion", min=-1, max=2, help="No effect: gelu is not fused into the product."),
    ] = -1,
    log_gpu_every: Annotated[
        int, Flag("-lg", "--log-gpu-every", help="No effect: nvidia-smi dmon shows a GPU's state.")
    ] = -1,
    pn: Annotated[
        int | None, Flag("-pn", "--num-processes", help="Processes in all, with -pi tcp or fs (1).")
    ] = None,
    pr: Annotated[
        int | None, Flag("-pr", "--process-rank", help="The number of this one, from 0 (0).")
    ] = None,
    pg: Annotated[int | None, Flag("-pg", "--gpus-per-node", help="GPUs of a node (8).")] = None,
    pi: Annotated[
        str, Flag("-pi", "--init-method", metavar="mpi|tcp|fs", help="tcp, fs: without torchrun (mpi).")
    ] = "mpi",
    ps: Annotated[
        str | None, Flag("-ps", "--server-ip", help="The address of process 0, for -pi tcp.")
    ] = None,
    pf: Annotated[
        Path | None, Flag("-pf", "--fs-path", help="A folder that all processes see, for -pi fs (/tmp).")
    ] = None,
    seed: Annotated[int, Flag("--seed", min=0, help="Of random weights and dropout.")] = 42,
    beta1: Annotated[float, Flag("--beta1", help="AdamW's.")] = 0.9,
    beta2: Annotated[float, Flag("--beta2", help="AdamW's.")] = 0.95,
    grad_clip: Annotated[float, Flag("--grad-clip", help="Largest norm of the gradient; 0: any.")] = 1.0,
    dropout: Annotated[
        float, Flag("--dropout", help="Of the embedding and of each branch, from 0 to 1.")
    ] = 0.0,
    graph: Annotated[bool, Flag(help="On one GPU, replay an update as a CUDA graph.")] = True,
    tokenizer: TokenizerFile = None,
    device: Device = None,
    plot: Annotated[Path | None, Flag(metavar="FILE", help="Draw the losses.")] = None,
    softmax_forward_kernel: SoftmaxForward = None,
    softmax_backward_kernel: SoftmaxBackward = None,
    matmul_forward_kernel: MatmulForward = None,
) -> None:
    """Train GPT-2. Without arguments: a small model on Python's own help texts, for about a minute. In
    parentheses: defaults. With -o, main.log has llm.c's lines and main.jsonl the same numbers as JSON.
    Several GPUs: torchrun --nproc-per-node N -m cukern gpt2 train ..."""
    given = {
        name: value
        for name, value in locals().items()
        if value is not None and name in Settings.__dataclass_fields__
    }
    given |= {name: bool(given[name]) for name in ("overfit", "master", "resume")}
    place = pick_device(device)
    given |= {
        "hellaswag": hellaswag if run_hellaswag else None,
        "betas": (beta1, beta2),
        "max_norm": grad_clip,
        "zero": zero if zero == 1 else 0,
    }
    check_plot(plot)
    start = _start(pi, pn, pr, pg, ps, pf)
    speaks = parallel.started(start)[0] == 0
    if speaks:
        _say_idle({"-pn": pn, "-pr": pr, "-pg": pg, "-ps": ps, "-pf": pf}, pi)
        _say_without_effect(zero, gelu_fusion, log_gpu_every)
    chosen = kernels(
        place, softmax_forward_kernel, softmax_backward_kernel, matmul_forward_kernel, attention, speaks
    )
    ranks = parallel.processes(place, start)
    with (
        chosen,
        float32_products(bool(tf32)),
        ranks as (given["rank"], given["num_processes"]),
        _data(given) as settings,
    ):
        options = {
            "attention": attention,
            "fused_loss": fused_loss,
            "recompute": recompute,
            "dropout": dropout,
        }
        model = model or _default_model(settings, "train_data" in given, speaks)
        made = make_model(model, settings.seq_len, place, dtype, seed, **options)
        settings = replace(
            settings, peak_flops=environment.peak_flops(made.wte.device, made.wte.dtype, bool(tf32))
        )
        trainer = Trainer(
            made,
            settings,
            tokenizer_for(made.config.vocab_size, tokenizer),
            say if speaks else lambda line: None,
        )
        if speaks:
            _describe(trainer, bool(tf32))
            _run(trainer, 1 if "train_data" in given else 50)
        else:
            trainer.run(lambda step: None)
    if plot is not None and speaks:
        _plot({"training": trainer.losses, "validation": trainer.validations}, plot)
        say(f"drawn to {plot}")


def _start(
    method: str,
    count: int | None,
    rank: int | None,
    per_node: int | None,
    ip: str | None,
    folder: Path | None,
) -> parallel.Start | None:
    """What -pi tcp and fs say; None for mpi, whose place torchrun takes."""
    expect(method in ("mpi", "tcp", "fs"), "-pi mpi, tcp or fs", repr(method))
    expect(method != "tcp" or ip, "-ps, the address of process 0, for -pi tcp", ip)
    if method == "mpi":
        return None
    where = (
        f"tcp://{ip}:12345"
        if method == "tcp"
        else f"file://{os.path.abspath(folder or '/tmp')}/cukern_gpt2_processes"
    )
    return parallel.Start(where, rank or 0, 1 if count is None else count, (rank or 0) % (per_node or 8))


def _say_idle(flags: dict[str, object], method: str) -> None:
    """A line for each flag about processes that was given and has no effect with this -pi."""
    used = {"tcp": ("-pn", "-pr", "-pg", "-ps"), "fs": ("-pn", "-pr", "-pg", "-pf"), "mpi": ()}[method]
    rank, count = parallel.started()
    known = {"-pn": count, "-pr": rank} if method == "mpi" else {}  # torchrun says the same
    for flag, value in flags.items():
        if value is not None and flag not in used and value != known.get(flag):
            say(
                f"{flag} {value} has no effect with -pi "
                f"{method}{': torchrun starts the processes' if method == 'mpi' else ''}"
            )


def _say_without_effect(zero: int, gelu_fusion: int, log_gpu_every: int) -> None:
    """A line for each other flag that is accepted and has no effect."""
    if zero > 1:
        say("| Disabling Zero Optimization, Zero Stage2 and Stage3 are not yet supported  |")
    if gelu_fusion > 0:
        say(f"-ge {gelu_fusion} has no effect: gelu is not fused into the product")
    if log_gpu_every > 0:
        say(f"-lg {log_gpu_every} has no effect: nvidia-smi dmon shows the state of a GPU")


def kernels(
    place: str,
    forward: str | None,
    backward: str | None,
    matmul: str | None,
    attention: str | None = None,
    speaks: bool = True,
) -> contextlib.AbstractContextManager:
    """`use_kernels`, after a line about those flags and variables that have no effect."""
    given = {"softmax forward": forward, "softmax backward": backward, "matmul forward": matmul}
    idle = [
        name
        for name, value in given.items()
        if value or os.environ.get(f"{name.replace(' ', '_').upper()}_KERNEL")
    ]
    why = "torch computes on a CPU without the simulator (CUKERN_BACKEND=sim)"
    if place != "cpu" or simulating():
        idle = [name for name in idle if name != "matmul forward" and attention not in (None, "v1")]
        why = f"--attention {attention} comes first"
    if idle and speaks:
        say(f"no effect of the choice of {', '.join(idle)}: {why}")
    return use_kernels(forward, backward, matmul)


def _default_model(settings: Settings, has_data: bool, speaks: bool) -> str:
    """The model without -e, after a line that says which and why."""
    name, why = _found_model(settings, has_data)
    if speaks and why:
        say(f"model: {name}, {why}")
    return name


def _found_model(settings: Settings, has_data: bool) -> tuple[str, str]:
    newest = checkpoint.latest_step(settings.out) if settings.resume and settings.out else None
    if newest is not None and settings.out:
        return str(checkpoint.paths(settings.out, newest)[0]), "the newest checkpoint"
    if not has_data:
        return SMALL, ""
    if os.path.exists(MODEL_BF16):
        return MODEL_BF16, "which is in this folder"
    return "d12", f"random weights, because {MODEL_BF16} is not in this folder"


@contextlib.contextmanager
def _data(given: dict[str, Any]) -> Iterator[Settings]:
    """The settings; of the small run if no data are given, whose shards are written to a folder of their
    own."""
    if ("train_data" in given) != ("val_data" in given):
        raise ValueError(
            f"-i and -j go together: give both or neither, got only {'-i' if 'train_data' in given else '-j'}"
        )
    with tempfile.TemporaryDirectory() as folder:
        if "train_data" not in given:
            val, train = write_shards(folder, "topics", tokenize([builtin_text()], "bytes")[0])
            given = SMALL_RUN | {"train_data": train, "val_data": val} | given
        yield Settings(**given)


def builtin_text() -> str:
    """About 460 KB of English that is on every machine: the topics of Python's own help()."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def _describe(trainer: Trainer, tf32: bool) -> None:
    """What llm.c prints before the first step."""
    s, c, loader = trainer.settings, trainer.model.config, trainer.train_data
    place = (
        torch.cuda.get_device_name()
        if trainer.model.wte.is_cuda
        else f"CPU, {torch.get_num_threads()} threads"
    )
    kind = (
        "bfloat16"
        if trainer.model.wte.dtype == torch.bfloat16
        else "TF32"
        if tf32 and trainer.model.wte.is_cuda
        else "float32"
    )
    rate = "unknown: MFU is not shown" if s.peak_flops is None else f"{s.peak_flops / 1e12:.1f}"
    say(f"train data: {loader.num_tokens} tokens in {len(loader.paths)} shards, {trainer.total} steps")
    say(f"val data: {trainer.val_data.num_tokens} tokens, {trainer.val_batches} batches")
    say(f"device: {place}, {kind} | peak TFlops: {rate}")
    names = {
        "max_sequence_length": "max_seq_len",
        "vocab_size": "vocab_size",
        "padded_vocab_size": "padded_vocab_size",
    }
    names |= {name: name for name in ("num_layers", "num_heads", "channels", "num_parameters")}
    say(" | ".join(f"{shown} {getattr(c, name)}" for shown, name in names.items()))
    say(
        f"batch_size B={s.batch} * seq_len T={s.seq_len} * num_processes={s.num_processes} and "
        f"total_batch_size={s.tokens * s.micro_steps}"
    )
    say(f"=> setting grad_accum_steps={s.micro_steps}")
    if trainer.tokenizer is None and s.sample_every:
        say(f"no samples: {TOKENIZER_FILE} is not in this folder, and --tokenizer names no other one")


def _run(trainer: Trainer, print_every: int) -> None:
    """Train, with a progress bar if stdout is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=trainer.total, completed=trainer.step)

        def report(step: Step) -> None:
            if step.number % print_every == 0:
                say(str(step))
            mfu = "" if step.mfu is None else f" MFU {100 * step.mfu:.1f}%"
            bar.update(
                task,
                completed=step.number,
                description=f"loss {step.loss:.3f} {step.tokens_per_s:.0f} tok/s{mfu}",
            )

        trainer.run(report)


def _plot(curves: dict[str, list[tuple[int, float]]], file: Path) -> None:
    """Losses over the number of updates."""
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for (label, points), style in zip(curves.items(), ("-", "o-"), strict=True):
        if points:
            panel.plot(*zip(*points, strict=True), style, label=label)
    panel.set(xlabel="updates", ylabel="loss")
    panel.legend()
    figure.savefig(file)
    pyplot.close(figure)
