"""`cukern gpt2`: trains, evaluates, samples, checks, times and profiles GPT-2 with llm.c's files, and makes
these files."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import cukern
from cukern.bench.environment import float32_products
from cukern.cli import common
from cukern.cli.bench import check_plot
from cukern.cli.common import console, say
from cukern.cli.gpt2_bench import bench
from cukern.cli.gpt2_check import check
from cukern.cli.gpt2_data import convert, make_data
from cukern.cli.gpt2_speedrun import speedrun
from cukern.cli.gpt2_study import study
from cukern.cli.gpt2_train import (
    HELLASWAG,
    MODEL,
    TOKENIZER_FILE,
    Device,
    Dtype,
    Length,
    MatmulForward,
    ModelFile,
    Rows,
    SoftmaxBackward,
    SoftmaxForward,
    Temperature,
    TokenizerFile,
    kernels,
    make_model,
    pick_device,
    tokenizer_for,
    train,
)
from cukern.gpt2 import data, evaluate
from cukern.gpt2.evaluate import Xorshift, sample_text
from cukern.gpt2.files import expect

app = typer.Typer(no_args_is_help=True, help="GPT-2 with llm.c's file formats, on cukern's kernels.")
app.command()(train)
app.command()(bench)
app.command()(check)
app.command()(study)
app.command()(speedrun)
app.command()(convert)
app.command(name="data")(make_data)

Tf32 = Annotated[int, typer.Option("-f", "--tf32", min=0, max=1, help="0: strict float32 matrix products.")]


@app.command(name="eval")
def evaluate_model(
    val_data: Annotated[
        str | None, typer.Option("-j", "--val-data", help="Validation shards, a glob pattern.")
    ] = None,
    hellaswag: Annotated[
        Path | None, typer.Option("--hellaswag", help=f"HellaSwag's file, such as {HELLASWAG}.")
    ] = None,
    model: ModelFile = MODEL,
    batch: Rows = None,
    seq_len: Length = None,
    val_batches: Annotated[
        int, typer.Option("-m", "--val-batches", help="Batches of the validation; -1: all.")
    ] = 20,
    tf32: Tf32 = 1,
    device: Device = None,
    softmax_forward_kernel: SoftmaxForward = None,
    matmul_forward_kernel: MatmulForward = None,
) -> None:
    """The validation loss on token shards, and the accuracy on HellaSwag."""
    expect(val_data or hellaswag, "-j or --hellaswag", "neither")
    expect(val_batches > 0 or val_batches == -1, "-m of at least 1, or -1", val_batches)
    place = pick_device(device)
    B, T = 4 if batch is None else batch, 1024 if seq_len is None else seq_len
    made = make_model(model, T, place)
    with kernels(place, softmax_forward_kernel, None, matmul_forward_kernel), float32_products(bool(tf32)):
        if val_data:
            loader = data.DataLoader(val_data, B, T, vocab_size=made.config.vocab_size)
            count = val_batches if val_batches > 0 else loader.num_tokens // (B * T)
            loss = evaluate.validation_loss(made, loader, count)
            say(f"val loss {loss:f}")
            if not math.isfinite(loss):
                raise FloatingPointError(f"the validation loss of {model} is not finite")
        if hellaswag:
            right, examples = evaluate.hellaswag_accuracy(
                made, evaluate.read_hellaswag(hellaswag, made.config.vocab_size), max(4, B)
            )
            say(f"HellaSwag: {right}/{examples} = {right / examples:f}")


@app.command(name="sample")
def sample_model(
    model: ModelFile = MODEL,
    prompt: Annotated[str, typer.Option(help="The text that the samples continue; by default EOT.")] = "",
    tokens: Annotated[
        int, typer.Option("-g", "--sample-tokens", min=1, help="Tokens to generate, after the prompt or EOT.")
    ] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Texts.")] = 1,
    temperature: Temperature = None,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among the K likeliest tokens; 0: among all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Draw among the fewest tokens whose probabilities add up to P.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=1, help="Of the random numbers; llm.c's is 1337.")] = 1337,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Text from a model, by llm.c's sampler. After as many tokens as the model has positions it goes on from
    their last half."""
    made = make_model(model, 1024, pick_device(device), dtype)
    found = tokenizer_for(made.config.vocab_size, tokenizer)
    if found is None:
        raise ValueError(
            f"--tokenizer must name a tokenizer file: there is no {TOKENIZER_FILE} in this folder"
        )
    start, rng = found.encode(prompt), Xorshift(seed)
    count = tokens + len(start) if start else tokens
    options: dict[str, Any] = {
        "temperature": 1.0 if temperature is None else temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    for i in range(samples):
        if i:
            say("---")
        say(sample_text(made, found, count, rng, prompt=start, **options))


@app.command()
def profile(
    model: ModelFile = "d12", batch: Rows = None, seq_len: Length = None,
    steps: Annotated[int, typer.Option("-x", "--steps", min=1, help="Updates to trace.")] = 5, tf32: Tf32 = 1,
    device: Device = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the shares.")] = None,
    softmax_forward_kernel: SoftmaxForward = None, softmax_backward_kernel: SoftmaxBackward = None,
    matmul_forward_kernel: MatmulForward = None,
) -> None:  # fmt: skip
    """The share of each op in an update, on random tokens: device time on the GPU, else CPU time."""
    check_plot(plot)
    place, B, T = pick_device(device), 4 if batch is None else batch, 1024 if seq_len is None else seq_len
    if place == "cpu" and device is None and model != "small" and not model.endswith(".bin"):
        raise ValueError(
            f"-e {model} needs a GPU, and torch.cuda sees none: use -e small -t 64; on --device cpu it "
            f"takes minutes"
        )
    made = make_model(model, T, place)
    expect(
        B > 0 and 0 < T <= made.config.max_seq_len,
        f"-b of at least 1 and -t from 1 to {made.config.max_seq_len}",
        f"{B} and {T}",
    )
    optimizer = cukern.AdamW(made.decay_groups(0.1), lr=1e-4, max_norm=1.0)
    x, y = torch.randint(made.config.vocab_size, (2, B, T), dtype=torch.int64, device=place)

    def step() -> None:
        optimizer.zero_grad()
        made(x, y).backward()
        optimizer.step()

    with (
        kernels(place, softmax_forward_kernel, softmax_backward_kernel, matmul_forward_kernel),
        float32_products(bool(tf32)),
    ):
        shares = _shares(step, steps, place)
    title = f"GPT-2, B={B} T={T}, {'device' if place == 'cuda' else 'CPU'} time of an update"
    table = common.table(title, "op", "us", "% of all", "calls")
    total, most = sum(us for us, _ in shares.values()), dict(list(shares.items())[:20])
    for name, (us, calls) in most.items():
        table.add_row(
            common.shorten(name, console.width - 30), f"{us:.1f}", f"{100 * us / total:.1f}", f"{calls:g}"
        )
    console.print(table)
    if plot is not None:
        _plot(title, {name: 100 * us / total for name, (us, _) in most.items()}, plot)
        say(f"drawn to {plot}")


def _shares(step: Callable[[], None], steps: int, place: str) -> dict[str, tuple[float, float]]:
    """The self time of each op, or on a GPU of each kernel, the longest first: microseconds and calls per
    step."""
    activities = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if place == "cuda" else []
    )
    step()  # compiles
    with common.progress() as bar, torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in bar.track(range(steps), description="profiling"):
            step()
        if place == "cuda":
            torch.cuda.synchronize()

    def time_of(event: Any) -> float:
        return event.self_device_time_total if place == "cuda" else event.self_cpu_time_total

    # an op's device time is its kernels'
    kind = torch.autograd.DeviceType.CUDA if place == "cuda" else torch.autograd.DeviceType.CPU
    events = [event for event in profiler.key_averages() if event.device_type == kind and time_of(event) > 0]
    return {
        event.key: (time_of(event) / steps, event.count / steps)
        for event in sorted(events, key=time_of, reverse=True)
    }


def _plot(title: str, percent: dict[str, float], file: Path) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(percent)), layout="constrained")
    bars = panel.barh(
        [common.shorten(name, 40) for name in percent], list(percent.values()), color="tab:green"
    )
    panel.bar_label(bars, fmt="%.1f", padding=3)
    panel.invert_yaxis()
    panel.set(xlabel="% of the time", title=title)
    figure.savefig(file)
    pyplot.close(figure)
