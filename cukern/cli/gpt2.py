"""`cukern gpt2`: trains, evaluates, samples, checks, times and profiles GPT-2 with llm.c's files, and makes these files."""

import hashlib
import importlib.util
import os
import tempfile
import urllib.error
import urllib.request
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
    make_model,
    pick_device,
    tokenizer_for,
    train,
)
from cukern.gpt2 import data, evaluate
from cukern.gpt2.data import read_tokenizer, write_tokenizer
from cukern.gpt2.evaluate import sample_text
from cukern.gpt2.files import expect, replace
from cukern.gpt2.model import use_kernels

app = typer.Typer(no_args_is_help=True, help="GPT-2 with llm.c's file formats, on cukern's kernels.")
app.command()(train)
app.command()(bench)
app.command()(check)

Tf32 = Annotated[int, typer.Option("-f", "--tf32", min=0, max=1, help="0: strict float32 matrix products.")]


@app.command(name="eval")
def evaluate_model(
    val_data: Annotated[str | None, typer.Option("-j", "--val-data", help="Validation shards, a glob pattern.")] = None,
    hellaswag: Annotated[Path | None, typer.Option("--hellaswag", help=f"HellaSwag's file, such as {HELLASWAG}.")] = None,
    model: ModelFile = MODEL,
    batch: Rows = None,
    seq_len: Length = None,
    val_batches: Annotated[int, typer.Option("-m", "--val-batches", help="Batches of the validation; -1: all.")] = 20,
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
    with use_kernels(softmax_forward_kernel, None, matmul_forward_kernel), float32_products(bool(tf32)):
        if val_data:
            loader = data.DataLoader(val_data, B, T, vocab_size=made.config.vocab_size)
            count = val_batches if val_batches > 0 else loader.num_tokens // (B * T)
            say(f"val loss {evaluate.validation_loss(made, loader, count):f}")
        if hellaswag:
            right, examples = evaluate.hellaswag_accuracy(made, evaluate.read_hellaswag(hellaswag, made.config.vocab_size), max(4, B))
            say(f"HellaSwag: {right}/{examples} = {right / examples:f}")


@app.command(name="sample")
def sample_model(
    model: ModelFile = MODEL,
    tokens: Annotated[int, typer.Option("-g", "--sample-tokens", min=1, help="Tokens to generate.")] = 64,
    temperature: Temperature = None,
    tokenizer: TokenizerFile = None,
    dtype: Dtype = None,
    device: Device = None,
) -> None:
    """Text from a model, by llm.c's sampler."""
    made = make_model(model, 1024, pick_device(device), dtype)
    found = tokenizer_for(made.config.vocab_size, tokenizer)
    if found is None:
        raise ValueError(f"--tokenizer must name a tokenizer file: there is no {TOKENIZER_FILE} in this folder")
    say(sample_text(made, found, tokens, 1.0 if temperature is None else temperature))


@app.command()
def profile(
    model: ModelFile = "d12",
    batch: Rows = None,
    seq_len: Length = None,
    steps: Annotated[int, typer.Option("-x", "--steps", min=1, help="Updates to trace.")] = 5,
    tf32: Tf32 = 1,
    device: Device = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the shares.")] = None,
    softmax_forward_kernel: SoftmaxForward = None,
    softmax_backward_kernel: SoftmaxBackward = None,
    matmul_forward_kernel: MatmulForward = None,
) -> None:
    """The share of each op in an update, on random tokens: device time on the GPU, else CPU time."""
    check_plot(plot)
    place, B, T = pick_device(device), 4 if batch is None else batch, 1024 if seq_len is None else seq_len
    if place == "cpu" and model != "small":
        say(f"There is no GPU in use: an update of {model} takes minutes on a CPU. -e small -t 64 takes seconds.", "yellow", common.errors)
    made = make_model(model, T, place)
    expect(B > 0 and 0 < T <= made.config.max_seq_len, f"-b of at least 1 and -t from 1 to {made.config.max_seq_len}", f"{B} and {T}")
    optimizer = cukern.AdamW(made.decay_groups(0.1), lr=1e-4, max_norm=1.0)
    x, y = torch.randint(made.config.vocab_size, (2, B, T), dtype=torch.int64, device=place)

    def step() -> None:
        optimizer.zero_grad()
        made(x, y).backward()
        optimizer.step()

    with use_kernels(softmax_forward_kernel, softmax_backward_kernel, matmul_forward_kernel), float32_products(bool(tf32)):
        shares = _shares(step, steps, place)
    title = f"GPT-2, B={B} T={T}, {'device' if place == 'cuda' else 'CPU'} time of an update"
    table = common.table(title, "op", "us", "% of all", "calls")
    total, most = sum(us for us, _ in shares.values()), dict(list(shares.items())[:20])
    for name, (us, calls) in most.items():
        table.add_row(common.shorten(name, console.width - 30), f"{us:.1f}", f"{100 * us / total:.1f}", f"{calls:g}")
    console.print(table)
    if plot is not None:
        _plot(title, {name: 100 * us / total for name, (us, _) in most.items()}, plot)
        say(f"drawn to {plot}")


def _shares(step: Callable[[], None], steps: int, place: str) -> dict[str, tuple[float, float]]:
    """The self time of each op, or on a GPU of each kernel, the longest first: microseconds and calls per step."""
    activities = [torch.profiler.ProfilerActivity.CPU] + ([torch.profiler.ProfilerActivity.CUDA] if place == "cuda" else [])
    step()  # compiles
    with common.progress() as bar, torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in bar.track(range(steps), description="profiling"):
            step()
        if place == "cuda":
            torch.cuda.synchronize()

    def time_of(event: Any) -> float:
        return event.self_device_time_total if place == "cuda" else event.self_cpu_time_total

    kind = torch.autograd.DeviceType.CUDA if place == "cuda" else torch.autograd.DeviceType.CPU  # an op's device time is its kernels'
    events = [event for event in profiler.key_averages() if event.device_type == kind and time_of(event) > 0]
    return {event.key: (time_of(event) / steps, event.count / steps) for event in sorted(events, key=time_of, reverse=True)}


def _plot(title: str, percent: dict[str, float], file: Path) -> None:
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 0.8 + 0.3 * len(percent)), layout="constrained")
    bars = panel.barh([common.shorten(name, 40) for name in percent], list(percent.values()), color="tab:green")
    panel.bar_label(bars, fmt="%.1f", padding=3)
    panel.invert_yaxis()
    panel.set(xlabel="% of the time", title=title)
    figure.savefig(file)
    pyplot.close(figure)


# ---- data

STARTER_PACK = "https://huggingface.co/datasets/karpathy/llmc-starter-pack/resolve/main/"
PACK: dict[str, tuple[str, int | Callable[[str], object]]] = {  # file -> folder, and its size or a function that reads and checks it
    "gpt2_124M.bin": (".", 497_904_640),
    "gpt2_124M_bf16.bin": (".", 248_952_832),
    "gpt2_124M_debug_state.bin": (".", 549_369_860),
    "gpt2_tokenizer.bin": (".", read_tokenizer),
    "tiny_shakespeare_train.bin": ("dev/data/tinyshakespeare", 611_544),
    "tiny_shakespeare_val.bin": ("dev/data/tinyshakespeare", 66_560),
    "hellaswag_val.bin": ("dev/data/hellaswag", evaluate.read_hellaswag),
}


@app.command(name="data")
def make_data(
    texts: Annotated[list[Path] | None, typer.Argument(metavar="TEXT...", help="Text files, UTF-8.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", help="The folder to write to.")] = Path("."),
    name: Annotated[str, typer.Option(help="The shards are NAME_val_000000.bin, NAME_train_000001.bin, ...")] = "text",
    encoding: Annotated[
        str, typer.Option(metavar="auto|gpt2|bytes", help="auto: gpt2 if tiktoken has its vocabulary, else bytes.")
    ] = "auto",
    split: Annotated[bool, typer.Option("--sections", help="A new document after each blank line, as in llm.c's tinyshakespeare.")] = False,
    val_tokens: Annotated[int | None, typer.Option(help="Validate on the first tokens; by default on the last 10 %.")] = None,
    shard_tokens: Annotated[int, typer.Option(help="Tokens of a training shard.")] = 10**8,
    starter_pack: Annotated[bool, typer.Option("--starter-pack", help="Download llm.c's published files: 1.3 GB.")] = False,
) -> None:
    """Write token shards and a tokenizer from text files, or download llm.c's published files."""
    expect(bool(texts) != starter_pack, "text files or --starter-pack", "both" if texts else "neither")
    if starter_pack:
        for file, (folder, size) in PACK.items():
            _download(file, out / folder / file, size)
        return
    expect(encoding in ("auto", "gpt2", "bytes"), "the encoding 'auto', 'gpt2' or 'bytes'", repr(encoding))
    encoding = encoding if encoding != "auto" else "gpt2" if _tiktoken_at_hand() else "bytes"
    documents = [_read(path) for path in texts or ()]
    try:
        tokens, tokenizer = data.tokenize([part for text in documents for part in (_sections(text) if split else [text])], encoding)
    except ImportError as error:
        raise ValueError(str(error)) from None
    for path in data.write_shards(out, name, tokens, val_first=val_tokens, shard_tokens=shard_tokens):
        say(f"{path}: {data.shard_length(path)} tokens")
    write_tokenizer(out / f"{name}_tokenizer.bin", tokenizer)
    say(f"{out / name}_tokenizer.bin: {len(tokenizer.tokens)} tokens")


def _sections(text: str) -> list[str]:
    """The parts of a text between blank lines, as llm.c cuts tiny_shakespeare: all but the last keep the blank line."""
    *parts, last = text.split("\n\n")
    return [part + "\n\n" for part in parts] + [last]


def _tiktoken_at_hand() -> bool:
    """True if tiktoken is installed and has GPT-2's vocabulary in its cache, so that it downloads nothing."""
    if importlib.util.find_spec("tiktoken") is None:
        return False
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    folder = os.environ.get("TIKTOKEN_CACHE_DIR", default)
    url = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
    names = (hashlib.sha1((url + name).encode()).hexdigest() for name in ("vocab.bpe", "encoder.json"))
    return all(os.path.isfile(os.path.join(folder, name)) for name in names)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8; found the byte {error.object[error.start]:#x} at {error.start}") from None


def _download(name: str, path: Path, size: int | Callable[[str], object]) -> None:
    """Download a file of the starter pack, unless it is there. Raises OSError without a network, ValueError for another size or content."""
    if path.exists():
        say(f"{path}: is there")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(STARTER_PACK + name, timeout=30) as source, replace(path) as file, common.progress() as bar:
            task = bar.add_task(name, total=int(source.headers.get("Content-Length") or 0) or None)
            while block := source.read(1 << 20):
                file.write(block)
                bar.advance(task, len(block))
            file.flush()
            if callable(size):
                size(file.name)
            else:
                expect(file.tell() == size, f"{size} bytes", f"{file.tell()} bytes", STARTER_PACK + name)
    except OSError as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise OSError(f"{STARTER_PACK}{name} cannot be downloaded: {error}") from None
    say(f"{path}: {path.stat().st_size} bytes")
