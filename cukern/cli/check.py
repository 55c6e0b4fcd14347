"""`cukern check`: compares all versions of an op, forward and backward, with float64 and with each other."""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.bench.calls import Function
from cukern.bench.measure import name_of
from cukern.bench.verify import Pair, Result, Verdict, candidates, verify
from cukern.cli.common import (
    Dims,
    Dtype,
    OpName,
    console,
    errors,
    find_case,
    find_dims,
    find_dtype,
    listed,
    progress,
    say,
    table,
)
from cukern.runtime.launch.backend import backend
from cukern.runtime.registry import Case
from cukern.sim.faults import Fault


def check(
    op: OpName,
    dims: Dims = None,
    dtype: Dtype = None,
    version: Annotated[
        str | None, typer.Option("--version", "--implementation", help="Only this version.")
    ] = None,
    sim: Annotated[
        bool, typer.Option("--sim", help="Run the kernels in the simulator, even if there is a GPU.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print every comparison, not only the worst ones and what is wrong."
        ),
    ] = False,
) -> None:
    """Run forward and backward of every version on the same random inputs. Compare the results with float64
    and with each other.

    Prints the worst error of each version; with one size and dtype, or -v, every comparison.
    Without a GPU the kernels run in the simulator, on smaller shapes. Exits with 1 if anything is wrong.
    """
    found = find_case(op).as_checked or find_case(op)
    place = torch.device("cpu") if sim else environment.device()
    simulated = place.type != "cuda"
    shapes = find_dims(found, dims, found.sim_dims if simulated else found.check_dims)
    dtypes = [find_dtype(found, dtype)] if dtype is not None else list(found.op.dtypes)
    if simulated:
        why = "" if sim else "There is no GPU. "
        say(f"{why}The simulator runs the kernels, from the PTX that NVRTC generates.", "yellow")
    with backend("sim") if simulated else contextlib.nullcontext():
        functions, skipped = candidates(found, place, version)
        if not functions:
            raise ValueError(
                "there is nothing to check: "
                + "; ".join(f"{op} {name} {why}" for name, why in skipped.items())
            )
        verdicts = _verify(found, list(itertools.product(dtypes, shapes)), functions, place)
    _print_all(found, verdicts, functions, verbose or len(verdicts) == 1)
    listed("version", {name: found.op.versions[name].idea for name in functions})
    listed("not run:", skipped)
    _sum_up(found.name, verdicts, "the simulator" if simulated else environment.gpu_name())


def _sum_up(op: str, verdicts: list[Verdict], where: str | None) -> None:
    """Print how many comparisons failed. Exits with 1 if any did."""
    wrong = sum(v.wrong for v in verdicts)
    total = sum(len(v.results) + len(v.pairs) for v in verdicts)
    say(f"{op}: {total} comparisons on {where}, {wrong or 'nothing'} wrong", "red" if wrong else "green")
    if wrong:
        raise typer.Exit(1)


def _verify(
    case: Case,
    jobs: list[tuple[torch.dtype, tuple[int, ...]]],
    functions: dict[str, Function],
    place: torch.device,
) -> list[Verdict]:
    verdicts = []
    with progress() as bar:
        task = bar.add_task(f"checking {case.name}", total=len(jobs))
        for kind, shape in jobs:
            try:
                verdicts.append(verify(case, shape, kind, functions, place))
            except Fault as fault:
                say(f"{case.name}: {type(fault).__name__}: {fault}", "red", errors)
                raise typer.Exit(1) from None
            bar.advance(task)
    return verdicts


def _print(case: Case, verdict: Verdict) -> None:
    """A table of the versions, with a row per output or gradient, and a table of the pairs of versions."""
    title = f"{case.name} {' x '.join(map(str, verdict.dims))} {name_of(verdict.dtype)}"
    shown = table(title, "version", "", "norm", "error", "allowed", "")
    for r in verdict.results:
        shown.add_row(r.version, f"|{r.what}|", f"{r.norm:.6g}", *_marked(r, "right", "WRONG"))
    console.print(shown)
    shown = table("", "pair", "", "difference", "allowed", "")
    for p in verdict.pairs:
        shown.add_row(f"{p.first} and {p.second}", p.what, *_marked(p, "agree", "DIFFER"))
    if verdict.pairs:
        console.print(shown)


def _print_all(case: Case, verdicts: list[Verdict], versions: Iterable[str], verbose: bool) -> None:
    for verdict in verdicts:
        if verbose or verdict.wrong:
            _print(case, verdict)
    if not verbose:
        _print_worst(case, verdicts, versions)


def _print_worst(case: Case, verdicts: list[Verdict], versions: Iterable[str]) -> None:
    """A table with the worst comparison of each version, and of the pairs of versions."""
    sizes, dtypes = {v.dims for v in verdicts}, dict.fromkeys(name_of(v.dtype) for v in verdicts)
    shown = table(
        f"{case.name}, {len(sizes)} sizes, {', '.join(dtypes)}",
        "version",
        "compared",
        "worst",
        "at",
        "error",
        "allowed",
        "",
    )
    results: dict[str, list[tuple[Verdict, Result | Pair]]] = {}
    for version in versions:
        results[version] = [(v, r) for v in verdicts for r in v.results if r.version == version]
    results["pairs of versions"] = [(v, p) for v in verdicts for p in v.pairs]
    for name, compared in results.items():
        if compared:
            verdict, worst = max(
                compared, key=lambda one: (not one[1].ok, one[1].error / (one[1].allowed or 1))
            )
            place = f"{'x'.join(map(str, verdict.dims))} {name_of(verdict.dtype)}"
            shown.add_row(name, str(len(compared)), worst.what, place, *_marked(worst, "right", "WRONG"))
    console.print(shown)


def _marked(compared: Result | Pair, good: str, bad: str) -> tuple[str, str, str]:
    """The cells of the error, the allowed error and the verdict."""
    error, allowed = f"{compared.error:.2e}", f"{compared.allowed:.2e}"
    return (
        (error, allowed, f"[green]{good}[/green]")
        if compared.ok
        else (f"[red]{error}[/red]", allowed, f"[red]{bad}[/red]")
    )
