"""`cukern bench`: how fast every version is, beside its peers and the hardware's limit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cukern.bench import environment
from cukern.bench.measure import Row, Table, measure, measure_host, passes
from cukern.bench.plot import drawable
from cukern.bench.plot import plot as draw
from cukern.bench.record import append, default_file
from cukern.cli.common import Dims, Dtype, OpName, check_target, console, errors, find_dims, find_dtype, find_op, listed, progress, table

STARTUP = "startup"


def bench(
    op: OpName,
    dims: Dims = None,
    dtype: Dtype = "f",
    pass_: Annotated[str | None, typer.Option("--pass", metavar="fwd|bwd|bwd:x,...", help="Only these passes.")] = None,
    tf32: Annotated[bool, typer.Option("--tf32", help="float32 products in TF32, where an op makes such.")] = False,
    host: Annotated[bool, typer.Option("--host", help="Host time of a tiny call, instead of device time.")] = False,
    only: Annotated[str | None, typer.Option(metavar="NAME,...", help="Only these versions and peers.")] = None,
    record: Annotated[bool, typer.Option("--record", help="Append to benchmarks/results/<gpu>.jsonl.")] = False,
    record_to: Annotated[Path | None, typer.Option(metavar="FILE", help="Append to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it.")] = None,
) -> None:
    """Time every version and peer of OP; with OP `startup`, what a fresh process pays for cukern."""
    if op == STARTUP and dims:
        raise ValueError(f"{STARTUP} takes no sizes, got {' '.join(map(str, dims))}")
    if record or record_to:
        record_to = record_to or default_file()
        check_target("--record-to", record_to)
    if plot:
        drawable(plot)
        check_target("--plot", plot)
    tables = _startup() if op == STARTUP else _measure(op, dims, "f" if dtype is None else dtype, _split(pass_), tf32, host, _split(only))
    missing: dict[str, str] = {}
    for one in tables:
        _print(one)
        missing |= one.missing
    listed("missing:", missing)
    if record_to:
        append([row for one in tables for row in one.rows], record_to)
        errors.print(f"appended to {record_to}", markup=False, highlight=False, soft_wrap=True)
    if plot:
        draw(tables, plot)
        console.print(f"drawn to {plot}", markup=False, highlight=False, soft_wrap=True)


def _measure(
    name: str, dims: Sequence[int] | None, letter: str, wanted: list[str] | None, tf32: bool, host: bool, only: list[str] | None
) -> list[Table]:
    op, place = find_op(name), environment.device()
    kind = find_dtype(op, letter)
    if tf32 and (host or letter != "f"):
        raise ValueError(f"--tf32 is for device times of --dtype f, got {'--host' if host else f'--dtype {letter}'}")
    if host:
        (shape,) = find_dims(op, dims, op.check_dims[:1])
        return measure_host(op, shape, kind, place, only)
    shapes = find_dims(op, dims, op.bench_dims if place.type == "cuda" else op.check_dims)
    jobs = [(shape, p) for shape in shapes for p in passes(op, shape, kind, wanted)]
    tables = []
    with progress() as bar:
        task = bar.add_task("", total=len(jobs))
        for shape, p in jobs:
            bar.update(task, description=f"{name} {p} {' x '.join(map(str, shape))}")
            tables.append(measure(op, shape, kind, p, place, only, tf32=tf32))
            bar.advance(task)
    if op.note:
        for shape in shapes:
            console.print(op.note(shape, kind.itemsize), highlight=False, soft_wrap=True)
    return tables


def _startup() -> list[Table]:
    from cukern.bench.startup import measure_startup, steps

    with progress() as bar:
        task = bar.add_task("starting fresh processes", total=steps())
        return [measure_startup(lambda: bar.advance(task))]


def _split(text: str | None) -> list[str] | None:
    return [word.strip() for word in text.split(",")] if text is not None else None


def _print(one: Table) -> None:
    if one.rows:
        first = one.rows[0]
        where = environment.gpu_name() or "cpu"
        shape = " x ".join(map(str, first.shape))
        title = " ".join(filter(None, (first.op, "" if first.op == STARTUP else first.pass_, shape, first.dtype, f"on {where}")))
        console.print(_startup_table(title, one.rows) if first.op == STARTUP else _table(title, one.rows))
    listed("note:", one.notes)


def _startup_table(title: str, rows: Sequence[Row]) -> object:
    shown = table(title, "what", "median ms", "spread ms")
    for row in rows:
        shown.add_row(row.pass_, f"{row.median_us * 1e-3:.1f}", f"{row.iqr_us * 1e-3:.1f}")
    return shown


def _table(title: str, rows: Sequence[Row]) -> object:
    """Only the columns that say something: no limit on a CPU, no bytes for host time."""
    torch_us = next((r.median_us for r in rows if r.provider == "torch"), None)
    work = any(r.bytes for r in rows)
    limit = any(r.of_limit is not None for r in rows)
    columns = ["provider", "version", "us", "+- us"]
    columns += ["TB/s", "TFLOP/s", "flop/byte"] if work else []
    wrong = any(r.error is not None for r in rows)
    columns += (["of limit"] if limit else []) + (["torch / this"] if torch_us else []) + (["error"] if wrong else [])
    shown = table(title, *columns)
    for r in rows:
        cells = [r.provider, r.version, f"{r.median_us:.2f}", f"{r.iqr_us:.2f}"]
        if work:
            cells += [_number(r.tbps), _number(r.tflops), _number(r.flops / r.bytes if r.flops else None)]
        if limit:
            cells.append(_number(r.of_limit))
        if torch_us:
            cells.append(_number(torch_us / r.median_us))
        if wrong:
            cells.append("" if r.error is None else f"{r.error:.1e}")
        shown.add_row(*cells, style="bold" if r.provider == "cukern" else None)
    return shown


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 100 else f"{value:.0f}"
