"""`cukern profile`: profiles one version with torch's profiler or Nsight Compute."""

import itertools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cukern.bench import environment
from cukern.bench.calls import draw_douts, results
from cukern.bench.peers import names as peer_names
from cukern.bench.peers import peers
from cukern.bench.verify import REFERENCE, candidates
from cukern.cli import common, nsight
from cukern.cli.common import console, say
from cukern.runtime.registry import Case


def profile(
    op: common.OpName,
    dims: common.Dims = None,
    dtype: common.Dtype = "f",
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            "--implementation",
            help="A version, or a peer such as torch; by default the fastest.",
        ),
    ] = None,
    wait: Annotated[int, typer.Option(min=0, max=10**6, help="Steps before tracing starts.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, max=10**6, help="Steps to trace and discard.")] = 3,
    active: Annotated[int, typer.Option(min=1, max=10**6, help="Steps to trace.")] = 10,
    repeat: Annotated[
        int, typer.Option(min=1, max=1000, help="Repeat these steps; each time writes a trace.")
    ] = 1,
    tensorboard: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write the traces for TensorBoard's profiler plugin."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The trace; an existing file is kept and a numbered name used."),
    ] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Run Nsight Compute on this version's kernels.")] = False,
) -> None:
    """Run forward and backward, print the profiler's table by device time, and write a Chrome trace
    (chrome://tracing, ui.perfetto.dev)."""
    found, place = common.find_case(op), environment.device()
    kind = common.find_dtype(found, "f" if dtype is None else dtype)
    (shape,) = common.find_dims(
        found, dims, (found.bench_dims if place.type == "cuda" else found.check_dims)[-1:]
    )
    name = chosen(found, place, version)
    if ncu:
        raise typer.Exit(nsight.run(op, found, name, shape, kind))
    if place.type != "cuda" and name == REFERENCE:
        say("There is no GPU: this profiles the torch reference for CPU tensors, not a kernel.", "yellow")
    out = out or Path(re.sub(r"[^\w.]+", "_", f"{found.name}_{name}") + ".trace.json")
    written: list[Path] = []
    if tensorboard is None:
        common.check_target("--out", out if out.is_dir() else unused(out))
    else:
        tensorboard.mkdir(parents=True, exist_ok=True)
    step = stepper(found, shape, kind, name, place)
    profiler = _trace(step, (wait, warmup, active, repeat), place, _writer(tensorboard, out, written))
    console.print(_averages(profiler, "device" if place.type == "cuda" else "cpu", active * repeat))
    for file in written:
        say(f"trace: {file}")
    if tensorboard is not None:
        say(f"traces: {tensorboard}; pip install torch-tb-profiler; tensorboard --logdir {tensorboard}")


def chosen(case: Case, place: torch.device, version: str | None) -> str:
    """The name of the version or peer to profile. Raises ValueError for one that there is not, or that does
    not run here."""
    if version is not None and version not in case.op.versions and version in peer_names(case):
        if version not in (found := peers(case, place, [version]))[0]:
            raise ValueError(f"{case.name} {version}: {found[1][version]}")
        return version
    functions, refused = candidates(case, place, version)
    if not functions:
        raise ValueError(f"{case.name} {version} {refused[str(version)]}")
    return list(functions)[-1]


def _writer(
    tensorboard: Path | None, out: Path, written: list[Path]
) -> Callable[[torch.profiler.profile], None]:
    """What torch calls with the profiler at the end of each repetition."""
    if tensorboard is not None:
        return torch.profiler.tensorboard_trace_handler(str(tensorboard))

    def write(profiler: torch.profiler.profile) -> None:
        file = unused(out)
        profiler.export_chrome_trace(str(file))
        whole = file.suffix == ".gz" or (file.is_file() and file.read_bytes().rstrip().endswith(b"}"))
        if not whole:  # torch does not raise if it cannot write
            raise ValueError(f"the trace {str(file)!r} could not be written: is the disk full?")
        written.append(file)

    return write


def _averages(profiler: torch.profiler.profile, place: str, steps: int) -> object:
    """The events with the most time of their own, at most 20, as a table."""

    def time_of(event: Any) -> float:
        return getattr(event, f"self_{place}_time_total")

    events = [e for e in profiler.key_averages() if time_of(e) > 0 and not e.key.startswith("ProfilerStep")]
    shown = common.table(f"{place} time in {steps} steps", "name", "us", "% of all", "calls", "us a call")
    total = sum(map(time_of, events))
    for e in sorted(events, key=time_of, reverse=True)[:20]:
        us = time_of(e)
        name = common.shorten(e.key, console.width - 40)
        shown.add_row(name, f"{us:.1f}", f"{100 * us / total:.1f}", str(e.count), f"{us / e.count:.2f}")
    return shown


def stepper(
    case: Case, dims: Sequence[int], dtype: torch.dtype, version: str, device: torch.device
) -> Callable[[], object]:
    """One step: forward and backward of a version or peer on random inputs."""
    own = candidates(case, device)[0]
    function = own[version] if version in own else peers(case, device, [version])[0][version]
    inputs = case.make(dims, dtype, device)
    douts = draw_douts(case, inputs)
    return lambda: results(case, function, inputs, douts)


def unused(file: Path) -> Path:
    """The file, or the first of name-2, name-3, ... that does not exist."""
    stem, dot, ending = file.name.partition(".")
    numbered = (file.with_name(f"{stem}-{number}{dot}{ending}") for number in itertools.count(2))
    return next(free for free in itertools.chain([file], numbered) if not free.exists())


def _trace(
    step: Callable[[], object],
    counts: tuple[int, int, int, int],
    place: torch.device,
    write: Callable[[torch.profiler.profile], None],
) -> torch.profiler.profile:
    """Profile steps: (wait, warmup, active, repeat)."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # torch 2.13 logs the start and the end of each profile at level 5
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    step()  # compiles, which must not be in the trace
    wait, warmup, active, repeat = counts
    total = (wait + warmup + active) * repeat
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=repeat)
    options: dict[str, Any] = {
        "activities": activities,
        "schedule": schedule,
        "on_trace_ready": write,
        "acc_events": True,
    }
    with common.progress() as bar, torch.profiler.profile(**options) as profiler:
        task = bar.add_task("profiling", total=total)
        for _ in range(total):
            step()
            if place.type == "cuda":
                torch.cuda.synchronize()
            profiler.step()
            bar.advance(task)
    return profiler
