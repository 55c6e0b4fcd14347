"""`cukern gpt2 speedrun`: the recipe of the public speedruns; --bench times it next to torch."""

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cukern.bench import environment, record
from cukern.bench.measure import Row
from cukern.cli import common
from cukern.cli.bench import record_file
from cukern.cli.common import say
from cukern.cli.gpt2_bench import MODES, WARMUP, Key, _rows, _show, _times, _warm
from cukern.cli.gpt2_train import SMALL, Device, builtin_text, pick_device, sizes_of
from cukern.gpt2 import parallel
from cukern.gpt2.data import tokenize, write_shards
from cukern.gpt2.files import expect
from cukern.gpt2.settings import Settings
from cukern.gpt2.speedrun import TARGET, Recipe, Speedrun, SpeedrunModel

TOKENS = 2.5e9  # an assumption: between llm.c's 10e9 with plain AdamW and the public records' 0.4e9 to 0.73e9
FULL = {"batch": 64, "seq_len": 1024, "total_batch": 2**19, "val_every": 125, "val_batches": 20}
SMALL_RUN = {"batch": 12, "seq_len": 64, "steps": 300, "val_every": 100, "val_batches": -1}
BENCH = {"batch": 16, "seq_len": 1024, "steps": 20, "val_every": 0}
Flag = typer.Option
Text = str | None
Count = int | None


def speedrun(
    train_data: Annotated[Text, Flag("-i", "--train-data", help="Training shards; else own text.")] = None,
    val_data: Annotated[Text, Flag("-j", "--val-data", help="Validation shards.")] = None,
    model: Annotated[Text, Flag("-e", "--model", help="Sizes, as in train (d12; text: small).")] = None,
    out: Annotated[Path | None, Flag("-o", "--out", help="Folder of main.log and main.jsonl.")] = None,
    batch: Annotated[Count, Flag("-b", "--batch", help="Rows of a pass (64; text: 12; --bench: 16).")] = None,
    seq_len: Annotated[Count, Flag("-t", "--seq-len", help="Tokens of a row (1024; text: 64).")] = None,
    total_batch: Annotated[Count, Flag("-d", "--total-batch", help="Tokens of an update (524288).")] = None,
    steps: Annotated[Count, Flag("-x", "--steps", help="Updates (--tokens / -d; text: 300).")] = None,
    lr: Annotated[float, Flag("-l", "--lr", help="Multiplies the recipe's learning rates.")] = 1.0,
    val_every: Annotated[Count, Flag("-v", "--val-every", help="Updates between validations (125).")] = None,
    val_batches: Annotated[Count, Flag("-m", "--val-batches", help="Batches of one; -1: all (20).")] = None,
    tied: Annotated[bool, Flag("--tied", help="Use the embedding as head.")] = False,
    plain: Annotated[bool, Flag("--plain", help="Train in plain torch under torch.compile.")] = False,
    compile: Annotated[str, Flag(metavar="default|reduce-overhead|no", help="Its mode.")] = "default",
    device: Device = None,
    bench: Annotated[bool, Flag("--bench", help="Time both on random tokens instead.")] = False,
    tokens: Annotated[float, Flag("--tokens", help=f"What {TARGET} is assumed to need.")] = TOKENS,
    record_it: Annotated[bool, Flag("--record", help="Record --bench in benchmarks/results.")] = False,
) -> None:  # fmt: skip
    """Train towards a validation loss of 3.28 on FineWeb in llm.c's format: rotary embedding, QK norm,
    ReLU^2, softcapped loss, growing windows, Muon and AdamW, learning rates that end at 0. bfloat16 on
    a GPU, float32 on a CPU. Without -i: a small model on Python's help texts. The default of
    --tokens lies between llm.c's 10e9 and the 0.4e9 to 0.73e9 of the public records. In parentheses:
    defaults. Several GPUs: torchrun --nproc-per-node N -m cukern gpt2 speedrun ..."""
    expect(compile in MODES, f"--compile {', '.join(MODES)}", repr(compile))
    expect(0 < tokens < 1e15, "--tokens above 0, below 1e15", tokens)
    expect(bench or not record_it, "--bench with --record", "none")
    expect((train_data is None) == (val_data is None), "both of -i and -j, or neither", "one of them")
    expect(not (bench and (train_data or out or plain)), "--bench without -i, -j, -o, --plain", "one")
    given = {n: v for n, v in locals().items() if v is not None and n in Settings.__dataclass_fields__}
    make = partial(_made, tied=tied, place=pick_device(device), compile=compile)
    if bench:
        _bench(make, model or "d12", BENCH | given, tokens, record_file(record_it))
    else:
        _train(make, model or ("d12" if train_data else SMALL), given, plain, tokens)


def _train(make: Any, model: str, given: dict[str, Any], plain: bool, tokens: float) -> None:
    ranks, every = parallel.processes(make.keywords["place"]), 1 if "train_data" in given else 50
    with ranks as (rank, count), tempfile.TemporaryDirectory() as folder:
        if "train_data" in given:
            given = FULL | given
            given.setdefault("steps", max(1, round(tokens / max(1, given["total_batch"]))))
        else:
            val, train = write_shards(folder, "topics", tokenize([builtin_text()], "bytes")[0])
            given = {"train_data": train, "val_data": val} | SMALL_RUN | given
        settings = Settings(**given, sample_every=0, rank=rank, num_processes=count)
        made, speak = make(model, settings.seq_len, plain=plain), say if rank == 0 else lambda line: None
        trainer, by = Speedrun(made, settings, speak), "torch" if plain else "cukern"
        speak(f"{sum(p.numel() for p in made.parameters())} parameters, {trainer.total} updates, by {by}")
        trainer.run(lambda step: speak(str(step)) if step.number % every == 0 else None)


def _made(
    name: str, seq_len: int, tied: bool, place: str, compile: str, plain: bool, **changes: Any
) -> SpeedrunModel:  # fmt: skip
    """The model, in bfloat16 on a GPU. The plain one is compiled, unless `compile` is "no"."""
    dtype = torch.bfloat16 if place == "cuda" else torch.float32
    made = SpeedrunModel(
        sizes_of(name, seq_len), Recipe(tied=tied, **changes), plain=plain, device=place, dtype=dtype
    )
    if plain and compile != "no":
        made.compile(mode=compile)
    return made


def _bench(make: Any, name: str, given: dict[str, Any], tokens: float, file: Path | None) -> None:
    """Time updates of both in turn, with the full windows of the end of a run."""
    expect(parallel.started()[1] == 1, "--bench in one process", parallel.started()[1])
    expect(given["steps"] > 0, "-x of at least 1", given["steps"])
    place, mode, imports = make.keywords["place"], make.keywords["compile"], _process_seconds()
    updates, peaks, first = dict[Key, Callable[[], object]](), dict[Key, float](), dict[Key, float]()
    with tempfile.TemporaryDirectory() as folder:
        for key in (("cukern", ""), ("torch", "") if mode == "no" else ("torch.compile", mode)):
            begin, mine = time.perf_counter(), partial(make, plain=bool(updates), windows=(1.0,))
            trainer, peaks[key] = _warm(partial(_trainer, mine, name, given, folder), Speedrun.update)
            first[key], updates[key] = imports + trainer.first_end - begin, trainer.update
        times = _times(updates, given["steps"])
    s, dtype = trainer.settings, "bfloat16" if place == "cuda" else "float32"
    each, name = s.tokens * s.micro_steps, f"speedrun {name}" + " tied" * make.keywords["tied"]
    what = name, (each // s.seq_len, s.seq_len), dtype
    rows = _rows(times, peaks, what, trainer.flops_per_token() * each)
    _show(rows, (place == "cuda" and environment.gpu_name()) or place)
    for row, seconds in zip(rows, first.values(), strict=True):
        hours = tokens / each * row.median_us / 3.6e9
        say(f"{row.name}: first update ends {seconds:.1f} s after the start of a process that runs only this")
        say(
            f"{row.name}: {TARGET} after {hours:.2f} h, computed from an assumed {tokens:.3g} tokens, not run"
        )
    if file:
        name = f"{name} first step"
        firsts = [Row("gpt2", k[1], name, *what[1:], k[0], 1e6 * t, 0.0) for k, t in first.items()]
        record.append([*rows, *firsts], file)
        say(f"appended to {file}", to=common.errors)


def _trainer(make: Callable[..., Any], name: str, given: dict[str, Any], folder: str) -> Speedrun:
    """A trainer on random tokens of four updates."""
    made = make(name, given["seq_len"])
    options = given | {"steps": WARMUP + given["steps"], "sample_every": 0}
    empty = Settings("", "", **options)
    count = (4 * empty.micro_steps + 1) * empty.tokens + 2
    tokens = torch.randint(made.config.vocab_size, (count,), dtype=torch.int64, device="cpu").numpy()
    val, train = write_shards(folder, "random", tokens, val_first=empty.tokens + 1)
    return Speedrun(made, Settings(train, val, **options), lambda line: None)


def _process_seconds() -> float:
    """Seconds since this process began, which are those of its imports; 0 where there is no /proc."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
