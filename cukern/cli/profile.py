"""`cukern profile`: profiles one version with torch's profiler or Nsight Compute."""

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from cukern.bench import environment
from cukern.bench.calls import draw_douts, results
from cukern.bench.verify import REFERENCE, candidates
from cukern.cli import common
from cukern.cli.common import console, errors, say
from cukern.runtime.compiler import SetupError
from cukern.runtime.registry import Op

_REFUSED = """\
Only administrators may read performance counters (ERR_NVGPUCTRPERM). The administrator of the machine can allow it for everyone:
    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia-profiling.conf
and reload the driver (reboot). Or run this command as root; in a container, start that with --cap-add SYS_ADMIN.
See https://developer.nvidia.com/ERR_NVGPUCTRPERM"""

_NOT_INSTALLED = """\
Nsight Compute (ncu) is not on the PATH. It comes with the CUDA toolkit, or alone from
https://developer.nvidia.com/nsight-compute; with conda: conda install -c nvidia nsight-compute"""


def profile(
    op: common.OpName,
    dims: common.Dims = None,
    dtype: common.Dtype = "f",
    version: Annotated[str | None, typer.Option("--version", "--implementation", help="The version; by default the fastest.")] = None,
    wait: Annotated[int, typer.Option(min=0, max=10**6, help="Steps before tracing starts.")] = 1,
    warmup: Annotated[int, typer.Option(min=0, max=10**6, help="Steps to trace and discard.")] = 3,
    active: Annotated[int, typer.Option(min=1, max=10**6, help="Steps to trace.")] = 10,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The trace; an existing file is kept and a numbered name used.")] = None,
    ncu: Annotated[bool, typer.Option("--ncu", help="Run Nsight Compute on this version's kernels.")] = False,
) -> None:
    """Run forward and backward, print the profiler's table by device time, and write a Chrome trace (chrome://tracing, ui.perfetto.dev)."""
    found, place = common.find_op(op), environment.device()
    kind = common.find_dtype(found, "f" if dtype is None else dtype)
    (shape,) = common.find_dims(found, dims, (found.bench_dims if place.type == "cuda" else found.check_dims)[-1:])
    functions, refused = candidates(found, place, version)
    if not functions:
        raise ValueError(f"{op} {version} {refused[str(version)]}")
    name = list(functions)[-1]
    if ncu:
        raise typer.Exit(_nsight(op, found, name, shape, kind))
    if place.type != "cuda" and name == REFERENCE:
        say("There is no GPU: this profiles the torch reference for CPU tensors, not a kernel.", "yellow")
    out = out or Path(f"{found.name}_{name}.trace.json")
    file = out if out.is_dir() else unused(out)
    common.check_target("--out", file)
    step = stepper(found, shape, kind, name, place)
    profiler = _trace(step, wait, warmup, active, place)
    console.print(_averages(profiler, "device" if place.type == "cuda" else "cpu", active))
    profiler.export_chrome_trace(str(file))
    whole = file.suffix == ".gz" or (file.is_file() and file.read_bytes().rstrip().endswith(b"}"))
    if not whole:  # torch does not raise if it cannot write
        raise ValueError(f"the trace {str(file)!r} could not be written: is the disk full?")
    say(f"trace: {file}")


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


def stepper(op: Op, dims: Sequence[int], dtype: torch.dtype, version: str, device: torch.device) -> Callable[[], object]:
    """One step: forward and backward of a version on random inputs."""
    function = candidates(op, device)[0][version]
    inputs = op.make(dims, dtype, device)
    douts = draw_douts(op, inputs)
    return lambda: results(op, function, inputs, douts)


def unused(file: Path) -> Path:
    """The file, or the first of name-2, name-3, ... that does not exist."""
    stem, dot, ending = file.name.partition(".")
    numbered = (file.with_name(f"{stem}-{number}{dot}{ending}") for number in itertools.count(2))
    return next(free for free in itertools.chain([file], numbered) if not free.exists())


def _trace(step: Callable[[], object], wait: int, warmup: int, active: int, place: torch.device) -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    step()  # compiles, which must not be in the trace
    total = wait + warmup + active
    schedule = torch.profiler.schedule(wait=wait, warmup=warmup, active=active, repeat=1)
    with common.progress() as bar, torch.profiler.profile(activities=activities, schedule=schedule, acc_events=True) as profiler:
        task = bar.add_task("profiling", total=total)
        for _ in range(total):
            step()
            if place.type == "cuda":
                torch.cuda.synchronize()
            profiler.step()
            bar.advance(task)
    return profiler


# ---- Nsight Compute

_LAUNCHES = 4  # of the version's kernels; each is replayed dozens of times to read all counters
_CHILD = """
import sys
from cukern.bench import environment
from cukern.cli import common
from cukern.cli.profile import stepper
op, version, letter, *dims = sys.argv[1:]
step = stepper(common.find_op(op), [int(d) for d in dims], common.DTYPES[letter], version, environment.device())
for _ in range(3):
    step()
"""


def kernel_names(op: Op, version: str, dtype: torch.dtype) -> list[str]:
    """The names, without template arguments, of the kernels of a version."""
    return sorted({k.name.partition("<")[0].rpartition("::")[2] for k in op.versions[version].instances(dtype)})


def _nsight(spelled: str, op: Op, version: str, dims: Sequence[int], dtype: torch.dtype) -> int:
    program = shutil.which("ncu")
    if program is None:
        raise SetupError(_NOT_INSTALLED)
    if not torch.cuda.is_available():
        raise SetupError("--ncu needs a GPU, and torch.cuda sees none")
    letter = next(k for k, v in common.DTYPES.items() if v == dtype)
    names = f"regex:^({'|'.join(kernel_names(op, version, dtype))})$"
    options = ["--clock-control", "none", "--kernel-name", names, "--launch-count", str(_LAUNCHES)]
    command = [program, *options, sys.executable, "-c", _CHILD, spelled, version, letter, *map(str, dims)]
    with errors.status("running Nsight Compute"):
        env = environment.with_cukern()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    say(done.stdout)
    refused = "ERR_NVGPUCTRPERM" in done.stdout
    if refused:
        say(_REFUSED, "red", errors)
    return 1 if refused or done.returncode else 0
