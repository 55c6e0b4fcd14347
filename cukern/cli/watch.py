"""`cukern watch`: checks and times an op again at each save of its kernels, headers or Python file."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.bench.measure import measure, name_of, passes
from cukern.bench.verify import candidates, verify
from cukern.cli import common, own_file
from cukern.cli.common import errors, listed, say
from cukern.cli.compile import capability_of, compile_kernels
from cukern.runtime.compile.compiler import CompileError, arch_of
from cukern.runtime.launch.backend import backend
from cukern.runtime.registry import CASES, Case

_POLL_S = 0.05

Times = dict[tuple[str, str], float]  # microseconds, by version and pass
Stamps = dict[Path, tuple[int, int]]  # time of the last change in ns, and size


def watch(
    op: common.OpName,
    dims: common.Dims = None,
    dtype: common.Dtype = "f",
    seconds: Annotated[float, typer.Option(min=0.01, help="Measuring time of a pass.")] = 0.3,
    saves: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="End after N saves; by default Ctrl-C ends it.")
    ] = None,
) -> None:
    """Check and time OP now and at each save of its .cu file, a header that it includes, or its Python file.

    A change that does not compile is shown with file, line and a hint, and the kernel before it stays.
    Without a GPU the simulator checks the kernels, and nothing is timed.
    """
    name = f"{op}.py" if op not in CASES and Path(f"{op}.py").is_file() else op
    letter = "f" if dtype is None else dtype
    once = _own if own_file.is_file(name) else _shipped
    if once is _own and not Path(name.partition(":")[0]).is_file():
        raise FileNotFoundError(f"there is no file {name.partition(':')[0]!r}")
    watched, last = once(name, dims, letter, seconds, {})
    stamps = _stamps(watched)
    say(f"watching {', '.join(sorted(path.name for path in watched))}; Ctrl-C ends")
    for _ in range(sys.maxsize if saves is None else saves):
        stamps = _wait(watched, stamps)
        again, times = once(name, dims, letter, seconds, last)
        watched, last = watched | again, times or last
        stamps |= {path: stamp for path, stamp in _stamps(watched).items() if path not in stamps}


def _stamps(files: set[Path]) -> Stamps:
    """The stamp of each file that exists. Some editors save by deleting a file and creating it again."""
    found = {}
    for file in files:
        with contextlib.suppress(OSError):
            stat = file.stat()
            found[file] = stat.st_mtime_ns, stat.st_size
    return found


def _wait(files: set[Path], before: Stamps) -> Stamps:
    """Return when a file was saved and a poll finds no further change: the new stamps. Some editors empty a
    file before they write it."""
    last = before
    while True:
        time.sleep(_POLL_S)
        now = _stamps(files)
        if now == last and any(stamp != before.get(file) for file, stamp in now.items()):
            return now
        last = now


# ---- an own op: in this process, since a new one takes seconds to start


def _own(
    name: str, dims: Sequence[int] | None, letter: str, seconds: float, last: Times
) -> tuple[set[Path], Times]:
    """Define the op again, check it and time it. Returns the files that it was made of, and its times: none
    if it is broken."""
    start, before, path = time.perf_counter(), dict(CASES), Path(name.partition(":")[0]).resolve()
    files = {path, *path.parent.glob(f"{path.stem}.cu")}
    try:
        own_file.forget()
        case = common.find_case(name)
        kind = common.find_dtype(case, letter)
        files |= _files(case, kind)
        times = _check_and_time(case, kind, dims, seconds, last)
    except Exception as error:  # whatever the code of a file raises, it is watched on
        CASES.clear()
        CASES.update(before)
        say(f"{own_file.place(error)}{type(error).__name__}: {error}", "red", errors)
        known = ", ".join(
            f"{version} {pass_} {us:.2f} us" if us else version for (version, pass_), us in last.items()
        )
        stays = f"The kernels before it stay: {known}" if known else "There is no kernel before it."
        say(f"{path.name} is broken. {stays}", "red")
        return files, {}
    say(
        f"{time.strftime('%H:%M:%S')} {case.name}: {time.perf_counter() - start:.1f} s from the save to this "
        f"line"
    )
    return files, times


def _files(case: Case, kind: torch.dtype) -> set[Path]:
    return {
        path
        for kernel in case.op.kernels(dtypes=[kind]).values()
        for path in (kernel.source.path, *kernel.source.program.files)
    }


def _check_and_time(
    case: Case, kind: torch.dtype, dims: Sequence[int] | None, seconds: float, last: Times
) -> Times:
    """Print a line per version: right or wrong, and on a GPU its times. Raises CompileError and the errors of
    a launch."""
    place = environment.device()
    on_gpu = place.type == "cuda"
    arch = arch_of(torch.cuda.get_device_capability(place)) if on_gpu else "compute_90a"
    # several at a time
    for outcome in compile_kernels(case.op.kernels(capability_of(arch), [kind]).values(), arch).values():
        if isinstance(outcome, CompileError):
            raise outcome
    with backend("gpu" if on_gpu else "sim"):
        functions, refused = candidates(case, place, None)
        shapes = common.find_dims(case, dims, case.check_dims if on_gpu else case.sim_dims)
        verdicts = [verify(case, shape, kind, functions, place) for shape in shapes]
    wrong = {
        r.version: f"WRONG |{r.what}| {r.error:.1e} > {r.allowed:.1e}"
        for v in verdicts
        for r in v.results
        if not r.ok
    }
    shown = common.table(f"{case.name} {name_of(kind)}", "version", "check")
    for version in functions:
        shown.add_row(version, f"[red]{wrong[version]}[/red]" if version in wrong else "[green]right[/green]")
    common.console.print(shown)
    listed("not run:", refused)
    return _time(case, kind, dims, seconds, last) if on_gpu else {(version, ""): 0.0 for version in functions}


def _time(case: Case, kind: torch.dtype, dims: Sequence[int] | None, seconds: float, last: Times) -> Times:
    times: Times = {}
    place, (shape,) = environment.device(), common.find_dims(case, dims, case.bench_dims[-1:])
    shown = common.table(
        f"{case.name} {' x '.join(map(str, shape))}", "version", "pass", "us", "before", "of limit"
    )
    for pass_ in passes(case, shape, kind, None):
        for row in measure(case, shape, kind, pass_, place, ("cukern",), seconds).rows:
            key = (row.version or row.provider, pass_)
            times[key], was = row.median_us, last.get(key)
            limit = "" if row.of_limit is None else f"{row.of_limit:.3f}"
            shown.add_row(*key, f"{row.median_us:.2f}", f"{was:.2f}" if was else "", limit)
    common.console.print(shown)
    return times


# ---- an op of cukern: in a new process, since its plans hold loaded kernels


def _shipped(
    name: str, dims: Sequence[int] | None, letter: str, seconds: float, last: Times
) -> tuple[set[Path], Times]:
    case = common.find_case(name)
    kind = common.find_dtype(case, letter)
    options = [name, *map(str, dims or ()), "--dtype", letter]
    commands = [["check", *options]]
    if environment.device().type == "cuda":
        commands.append(["bench", *options, "--only", "cukern,copy", "--seconds", str(seconds)])
    for command in commands:
        if subprocess.run(
            [sys.executable, "-m", "cukern", *command], env=environment.with_cukern()
        ).returncode:
            break
    return _files(case, kind), {}
