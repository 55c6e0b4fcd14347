"""`cukern check`: are all versions of an op right, forward and backward, and do they agree?"""

import contextlib
from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.bench.calls import Function
from cukern.bench.verify import Pair, Result, Verdict, candidates, verify
from cukern.cli.common import Dims, Dtype, OpName, console, describe, errors, find_dims, find_dtype, find_op, listed, progress, table
from cukern.runtime.backend import backend
from cukern.runtime.registry import Op
from cukern.sim.faults import Fault


def check(
    op: OpName,
    dims: Dims = None,
    dtype: Dtype = None,
    version: Annotated[str | None, typer.Option(help="Only this version.")] = None,
    sim: Annotated[bool, typer.Option("--sim", help="Run the kernels in the simulator, also where there is a GPU.")] = False,
) -> None:
    """Run forward and backward of every version on the same random inputs, and compare them with float64 and with one another.

    Without a GPU the kernels run in the simulator, on smaller shapes. Exits with 1 if anything is wrong.
    """
    found = find_op(op)
    found = found.as_checked or found
    place = torch.device("cpu") if sim else environment.device()
    simulated = place.type != "cuda"
    shapes = find_dims(found, dims, found.sim_dims if simulated else found.check_dims)
    dtypes = [find_dtype(found, dtype)] if dtype is not None else list(found.dtypes)
    if simulated:
        why = "" if sim else "There is no GPU. "
        console.print(f"{why}The kernels run in the simulator, from the PTX that NVRTC makes of them.", style="yellow")
    with backend("sim") if simulated else contextlib.nullcontext():
        functions, skipped = candidates(found, place, version)
        if not functions:
            raise ValueError(f"there is nothing to check: {'; '.join(f'{op} {name} {why}' for name, why in skipped.items())}")
        try:
            verdicts = _verify(found, shapes, dtypes, functions, place)
        except Fault as fault:
            errors.print(f"{op}: {type(fault).__name__}: {fault}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
    for verdict in verdicts:
        _print(found, verdict)
    listed("version", {name: found.versions[name].idea for name in functions})
    listed("not run:", skipped)
    wrong = sum(v.wrong for v in verdicts)
    total = sum(len(v.results) + len(v.pairs) for v in verdicts)
    where = "the simulator" if simulated else environment.gpu_name()
    console.print(f"{op}: {total} comparisons on {where}, {wrong or 'nothing'} wrong", style="red" if wrong else "green", highlight=False)
    if wrong:
        raise typer.Exit(1)


def _verify(
    op: Op, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], functions: dict[str, Function], place: torch.device
) -> list[Verdict]:
    verdicts: list[Verdict] = []
    with progress() as bar:
        task = bar.add_task(f"checking {op.name}", total=len(shapes) * len(dtypes))
        for kind in dtypes:
            for shape in shapes:
                verdicts.append(verify(op, shape, kind, functions, place))
                bar.advance(task)
    return verdicts


_MOST_COLUMNS = 4  # outputs and gradients that stand side by side


def _print(op: Op, verdict: Verdict) -> None:
    """One table of the versions, one of their pairs; what is allowed is the same in every row, and stands in the last."""
    whats = list(dict.fromkeys(r.what for r in verdict.results))
    if len(whats) > _MOST_COLUMNS:
        return _print_in_rows(op, verdict)
    columns = [column for what in whats for column in (f"|{what}|", "error")]
    shown = table(describe(op, verdict.dims, verdict.dtype), "version", *columns, "")
    for version in dict.fromkeys(r.version for r in verdict.results):
        own = [r for r in verdict.results if r.version == version]
        shown.add_row(version, *(cell for r in own for cell in (f"{r.norm:.6g}", _error(r.error, r.ok))), _mark(own, "right", "WRONG"))
    shown.add_row("allowed", *(cell for r in verdict.results[: len(whats)] for cell in ("", _error(r.allowed))), style="dim")
    console.print(shown)
    if not verdict.pairs:
        return
    shown = table("", "pair", *(f"difference of {what}" for what in whats), "")
    for pair in dict.fromkeys((p.first, p.second) for p in verdict.pairs):
        both = [p for p in verdict.pairs if (p.first, p.second) == pair]
        shown.add_row(" and ".join(pair), *(_error(p.difference, p.ok) for p in both), _mark(both, "agree", "DIFFER"))
    shown.add_row("allowed", *(_error(p.allowed) for p in verdict.pairs[: len(whats)]), style="dim")
    console.print(shown)


def _print_in_rows(op: Op, verdict: Verdict) -> None:
    """The same, with a row for each output or gradient."""
    shown = table(describe(op, verdict.dims, verdict.dtype), "version", "", "norm", "error", "allowed", "")
    for r in verdict.results:
        shown.add_row(r.version, f"|{r.what}|", f"{r.norm:.6g}", _error(r.error, r.ok), _error(r.allowed), _mark([r], "right", "WRONG"))
    console.print(shown)
    shown = table("", "pair", "", "difference", "allowed", "")
    for p in verdict.pairs:
        pair = f"{p.first} and {p.second}"
        shown.add_row(pair, p.what, _error(p.difference, p.ok), _error(p.allowed), _mark([p], "agree", "DIFFER"))
    if verdict.pairs:
        console.print(shown)


def _error(value: float, ok: bool = True) -> str:
    return f"{value:.2e}" if ok else f"[red]{value:.2e}[/red]"


def _mark(items: Sequence[Result | Pair], good: str, bad: str) -> str:
    return f"[green]{good}[/green]" if all(i.ok for i in items) else f"[red]{bad}[/red]"
