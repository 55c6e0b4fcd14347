"""`cukern check`: are all versions of an op right, forward and backward, and do they agree?"""

from collections.abc import Sequence
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.bench.verify import Pair, Result, Verdict, candidates, verify
from cukern.cli.common import Dims, Dtype, OpName, console, describe, find_dims, find_dtype, find_op, listed, progress, table
from cukern.cli.compile import compile_kernels, print_reports
from cukern.runtime.compiler import SetupError
from cukern.runtime.registry import Op

ARCH_WITHOUT_GPU = "sm_90a"


def check(
    op: OpName,
    dims: Dims = None,
    dtype: Dtype = None,
    version: Annotated[str | None, typer.Option(help="Only this version.")] = None,
) -> None:
    """Run forward and backward of every version on the same random inputs, and compare them with float64 and with one another.

    Without a GPU the plain torch path is compared, and the kernels are only compiled. Exits with 1 if anything is wrong.
    """
    found = find_op(op)
    shapes = find_dims(found, dims, found.check_dims)
    dtypes = [find_dtype(found, dtype)] if dtype else list(found.dtypes)
    place = environment.device()
    functions, skipped = candidates(found, place, version)
    if not functions:
        raise ValueError(f"there is nothing to check: {'; '.join(f'{op} {name} {why}' for name, why in skipped.items())}")
    verdicts: list[Verdict] = []
    with progress() as bar:
        task = bar.add_task(f"checking {op}", total=len(shapes) * len(dtypes))
        for kind in dtypes:
            for shape in shapes:
                verdicts.append(verify(found, shape, kind, functions, place))
                bar.advance(task)
    for verdict in verdicts:
        _print(found, verdict)
    listed("version", {name: found.versions[name].idea for name in functions if name in found.versions})
    listed("not run:", skipped)
    wrong = sum(v.wrong for v in verdicts)
    total = sum(len(v.results) + len(v.pairs) for v in verdicts)
    if place.type != "cuda":
        console.print("There is no GPU: the kernels were NOT run. What was checked is the torch path of CPU tensors.", style="yellow")
        wrong += _compile(found, dtypes, version)
    where = environment.gpu_name() or "the CPU"
    console.print(f"{op}: {total} comparisons on {where}, {wrong or 'nothing'} wrong", style="red" if wrong else "green", highlight=False)
    if wrong:
        raise typer.Exit(1)


def _print(op: Op, verdict: Verdict) -> None:
    """One table of the versions, one of their pairs; what is allowed is the same in every row, and stands in the last."""
    whats = list(dict.fromkeys(r.what for r in verdict.results))
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


def _error(value: float, ok: bool = True) -> str:
    return f"{value:.2e}" if ok else f"[red]{value:.2e}[/red]"


def _mark(items: Sequence[Result | Pair], good: str, bad: str) -> str:
    return f"[green]{good}[/green]" if all(i.ok for i in items) else f"[red]{bad}[/red]"


def _compile(op: Op, dtypes: Sequence[torch.dtype], version: str | None) -> int:
    """Compile the kernels that were not run. Returns how many do not compile; a machine without a compiler is told so, and passes."""
    versions = [op.versions[version]] if version else list(op.versions.values())
    kernels = {k.name: k for v in versions for d in dtypes for k in v.instances(d)}
    try:
        return print_reports(compile_kernels(kernels.values(), ARCH_WITHOUT_GPU), ARCH_WITHOUT_GPU)
    except SetupError as error:
        console.print(f"The kernels were not compiled either: {error}", style="yellow", markup=False, soft_wrap=True)
        return 0
