"""`cukern bench`: times every version next to its peers and the hardware limit."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from cukern.bench import environment
from cukern.bench import plot as pictures
from cukern.bench.measure import Row, Table, measure, measure_host, passes
from cukern.bench.models import DECODE, MODELS
from cukern.bench.record import append, default_file
from cukern.cli import common
from cukern.cli.common import console, errors, listed, say
from cukern.runtime.device import restricted
from cukern.runtime.registry import Case

CPU_BYTES, CPU_FLOPS = 1 << 26, 10**9  # of a call that is timed without a GPU
STARTUP, OWN_KERNEL, LLAMA_BLOCK, OPTIMIZERS = "startup", "own_kernel", "llama_block", "optimizers"
LOKR, FUSED_LOSS, ATTENTION_SHAPES = "lokr_layer", "fused_loss", "attention_shapes"
OTHERS = (  # benchmarks in place of an op
    STARTUP, OWN_KERNEL, LLAMA_BLOCK, OPTIMIZERS, LOKR, FUSED_LOSS, ATTENTION_SHAPES, *MODELS,
)  # fmt: skip


def bench(
    op: common.OpName,
    dims: common.Dims = None,
    dtype: common.Dtype = "f",
    pass_: Annotated[
        str | None,
        typer.Option(
            "--pass",
            metavar="fwd|bwd|bwd:x,...",
            help="Only these passes; fwd+bwd times both together. Of a model: update, decode.",
        ),
    ] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="float32 matrix products in TF32.")] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Host time of a small call, instead of device time.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these versions and peers.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time of a table.")] = 3.0,
    kernel: Annotated[
        str | None, typer.Option(metavar="NAME", help="Force this candidate of the plans where it fits.")
    ] = None,
    without: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Exclude these candidates of the plans.")
    ] = None,
    record: Annotated[
        bool, typer.Option("--record", help="Append to benchmarks/results/<gpu>.jsonl.")
    ] = False,
    record_to: Annotated[Path | None, typer.Option(metavar="FILE", help="Append to this file.")] = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=N,...", help="Measure over these values of a size, such as S=512,1024,2048."
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the result: lines over three sizes or more. A folder gets OP_fw.png, OP_bw.png.",
        ),
    ] = None,
) -> None:
    """Time every version and peer of OP.

    OP `startup` times the import and first calls in fresh processes, and the compilation of attention's
    kernels. OP `own_kernel` times the compilation and the launch of a user's own kernel, next to torch's
    load_inline and _compile_kernel. OP `llama_block` times a block with rope, rmsnorm, attention and swiglu,
    eager and under torch.compile. OP `optimizers` times a step of AdamW and of Muon, next to torch's. OP
    `lokr_layer` times LoKr layers of LyCORIS, next to LyCORIS's kernels and torch.compile. OP `fused_loss`
    times linear_cross_entropy and linear_logprobs, and their peak memory, next to torch.compile and Liger.
    OP `attention_shapes` times attention over 24 shapes of training and 8 caches of decoding, next to cuDNN
    and FlashAttention-4. OP `llama`, `qwen3` and `gemma2` time updates and decoded tokens of transformers'
    models with random weights, next to torch.compile and Liger.
    """
    if op in OTHERS:
        _refuse(
            op, dims, {"--pass": op not in MODELS and pass_, "--tf32": tf32, "--host": host, "--over": over}
        )
    record_to = record_file(record, record_to)
    check_plot(plot, folder=True)
    rows, missing = list[Row](), dict[str, str]()
    if op in OTHERS:
        found = _without_op(op, _split(only), seconds, _split(pass_))
    else:
        found = _measure(
            op, dims, "f" if dtype is None else dtype, _split(pass_), tf32, host, _split(only), seconds, over
        )
    mark = "".join(
        f" {option} {name}" for option, name in (("--kernel", kernel), ("--without", without)) if name
    )
    with restricted(*_candidates(op, kernel, _split(without))):
        for one in found:
            # The options that changed the plans become part of the version in tables and records.
            table = [replace(r, version=r.version + mark) if r.provider == "cukern" else r for r in one.rows]
            rows += table
            if record_to:  # at once, so that an interrupted run keeps its rows
                append(table, record_to)
            missing |= one.missing
            if table:
                console.print(_table(table))
            listed("note:", one.notes)
    listed("missing:", missing)
    if record_to:
        say(f"appended to {record_to}", to=errors)
    if plot:
        _draw(rows, plot)


def _candidates(op: str, kernel: str | None, without: list[str] | None) -> tuple[str, list[str]]:
    """Checked arguments of `restricted`."""
    known = () if op in OTHERS else common.find_case(op).candidates
    for name in filter(None, (kernel, *(without or ()))):
        if name not in known:
            raise ValueError(
                f"{op} has no candidate {name!r}; it has "
                f"{', '.join(known) or 'only its versions: use --only'}"
            )
    return kernel or "", without or []


def record_file(record: bool, record_to: Path | None = None) -> Path | None:
    """The file to append to, if any. Raises ValueError for a file that cannot be written, and for --record
    with uncommitted changes."""
    if record:
        if environment.facts()["dirty"]:
            raise ValueError(
                "--record needs a clean tree: commit your changes first, so that the record names the code "
                "that it measured"
            )
        record_to = default_file()
    if record_to:
        common.check_target("--record-to", record_to)
    return record_to


def check_plot(plot: Path | None, folder: bool = False) -> None:
    """Check that a picture can be drawn to this file, if there is one. Raises ValueError, and SetupError
    without matplotlib."""
    if plot is not None and not (folder and plot.is_dir() and plot != Path()):
        pictures.drawable(plot)
        common.check_target("--plot", plot)


def _draw(rows: Sequence[Row], target: Path) -> None:
    """Draw to a file, or one picture per op and pass to a folder."""

    def file_of(row: Row) -> Path:
        return target / f"{row.op}_{row.pass_.replace('wd', 'w').replace(':', '_').replace(' ', '_')}.png"

    for file, part in pictures.grouped(rows, file_of) if target.is_dir() else [(target, rows)]:
        pictures.save(pictures.drawn(part), file)
        say(f"drawn to {file}")


def _measure(
    name: str, dims: Sequence[int] | None, letter: str, wanted: list[str] | None, tf32: bool, host: bool,
    only: list[str] | None, seconds: float, over: str | None = None,
) -> Iterator[Table]:  # fmt: skip
    """Yield each table as soon as it is measured."""
    case, place = common.find_case(name), environment.device()
    kind = common.find_dtype(case, letter)
    if tf32 and (host or letter != "f"):
        raise ValueError(
            f"--tf32 is for device times of --dtype f, got {'--host' if host else f'--dtype {letter}'}"
        )
    if host:
        if over is not None:
            raise ValueError("--over is for device times, leave out --host")
        (shape,) = common.find_dims(case, dims, case.check_dims[:1])
        yield from measure_host(case, shape, kind, place, only)
        return
    if place.type != "cuda":
        say("No GPU: these are times of torch on the CPU. Kernels are timed on GPUs.", "yellow")
    shapes = _over(
        case,
        common.find_dims(
            case, dims, case.bench_dims if place.type == "cuda" else _cpu_dims(case, kind.itemsize)
        ),
        over,
    )
    jobs = [(shape, p) for shape in shapes for p in passes(case, shape, kind, wanted)]
    for i, (shape, p) in enumerate(jobs):
        if case.note and shape not in [s for s, _ in jobs[:i]]:
            say(case.note(shape, kind.itemsize))
        with common.progress() as bar:
            bar.add_task(f"{name} {p} {' x '.join(map(str, shape))}", total=len(jobs), completed=i)
            one = measure(case, shape, kind, p, place, only, seconds, tf32)
        yield one


def _cpu_dims(case: Case, itemsize: int) -> list[tuple[int, ...]]:
    """A size that a CPU computes in milliseconds: the first for GPUs with fewer rows, or else the last for
    checks."""
    first, *rest = case.bench_dims[0]
    while first > 1 and not _is_small(case, (first, *rest), itemsize):
        first //= 2
    return [(first, *rest) if _is_small(case, (first, *rest), itemsize) else case.check_dims[-1]]


def _is_small(case: Case, dims: tuple[int, ...], itemsize: int) -> bool:
    cost = case.cost(dims, itemsize)["fwd"]
    return cost.bytes <= CPU_BYTES and cost.flops <= CPU_FLOPS


def _over(case: Case, shapes: list[tuple[int, ...]], text: str | None) -> list[tuple[int, ...]]:
    """The first shape with each of the values of one size."""
    if text is None:
        return shapes
    name, _, values = text.partition("=")
    names = [word.removesuffix("...") for word in case.dims.split()]
    sizes = values.replace(" ", "").split(",")
    if name not in names or not all(size.isdecimal() for size in sizes):
        raise ValueError(
            f"--over must be one of {', '.join(names)} with its values, such as {names[0]}=512,1024,2048, "
            f"got {text!r}"
        )
    before, after = shapes[0][: names.index(name)], shapes[0][names.index(name) + 1 :]
    return [shape for size in sizes for shape in common.find_dims(case, [*before, int(size), *after], ())]


def _refuse(op: str, dims: list[int] | None, options: dict[str, object]) -> None:
    """Raise ValueError for sizes and options that this benchmark would ignore."""
    if dims:
        raise ValueError(f"{op} takes no sizes, got {' '.join(map(str, dims))}")
    for name, value in options.items():
        if value not in (None, False):
            raise ValueError(f"{op} takes no {name}{'' if value is True else f', got {value!r}'}")


def _without_op(op: str, only: list[str] | None, seconds: float, passes: list[str] | None) -> Iterator[Table]:
    from cukern.bench import (
        attention_shapes,
        fused_loss,
        llama_block,
        lokr,
        models,
        optimizers,
        own_kernel,
        startup,
    )

    measures: dict[str, Callable[[], Iterator[Table]]] = {
        **{model: partial(models.measure_model, model, only, passes=passes) for model in MODELS},
        LOKR: partial(lokr.measure_lokr, only),
        FUSED_LOSS: partial(fused_loss.measure_fused_loss, only),
        ATTENTION_SHAPES: partial(attention_shapes.measure_attention_shapes, only, seconds),
        LLAMA_BLOCK: partial(llama_block.measure_llama_block, seconds),
        OPTIMIZERS: partial(optimizers.measure_optimizers, seconds),
    }
    if op in measures:
        yield from measures[op]()
        return
    with errors.status("starting fresh processes"):
        yield from own_kernel.measure_own_kernel(only) if op == OWN_KERNEL else startup.measure_startup(only)


def _split(text: str | None) -> list[str] | None:
    return [word.strip() for word in text.split(",")] if text is not None else None


def _columns(rows: Sequence[Row]) -> dict[str, Callable[[Row], str]]:
    """Only the columns that apply: no limit on a CPU, no bytes for host time."""
    if rows[0].op == STARTUP or rows[0].pass_.endswith(" run"):
        return {
            "median ms": lambda r: f"{r.median_us * 1e-3:.1f}",
            "+- ms": lambda r: f"{r.iqr_us * 1e-3:.1f}",
        }
    torch_us = next((r.median_us for r in rows if r.provider == "torch"), None)
    columns: dict[str, Callable[[Row], str]] = {
        "us": lambda r: f"{r.median_us:.2f}",
        "+- us": lambda r: f"{r.iqr_us:.2f}",
        "TB/s": lambda r: _number(r.tbps),
        "TFLOP/s": lambda r: _number(r.tflops),
        "of limit": lambda r: _number(r.of_limit),
        "x torch": lambda r: _number(torch_us / r.median_us if torch_us else None),
        "tokens/s": lambda r: f"{_tokens(r) / r.median_us * 1e6:.0f}" if r.op in MODELS else "",
        "peak MiB": lambda r: f"{r.peak_mib:.0f}" if r.peak_mib else "",
        "error": lambda r: "" if r.error is None else f"{r.error:.1e}",
    }
    return {name: cell for name, cell in columns.items() if any(cell(r) for r in rows)}


def _tokens(row: Row) -> int:
    """Tokens of an update, or decoded tokens."""
    sequences, length = row.shape[-2:]
    return sequences if row.pass_ == DECODE else sequences * length


def _table(rows: Sequence[Row]) -> object:
    first, startup, used = rows[0], rows[0].op == STARTUP, _columns(rows)
    sizes, where = " x ".join(map(str, first.shape)), environment.gpu_name() or "cpu"
    title = " ".join(
        filter(None, (first.op, "" if startup else first.pass_, sizes, first.dtype, f"on {where}"))
    )
    intensity = next((f", {r.flops / r.bytes:.3g} flop/byte" for r in rows if r.bytes and r.flops), "")
    shown = common.table(title + intensity, "what" if startup else "provider", *used)
    for r in rows:
        shown.add_row(
            r.pass_ if startup else r.name,
            *[cell(r) for cell in used.values()],
            style="bold" if r.version else None,
        )
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"
