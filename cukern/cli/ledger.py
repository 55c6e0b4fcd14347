"""`cukern ledger`: every launch of every op, planned without a GPU."""

import difflib
from pathlib import Path
from typing import Annotated

import typer

from cukern.bench.ledger import GPUS, digests
from cukern.bench.ledger import ledger as lines_of
from cukern.cli.common import find_case, say
from cukern.runtime import checks
from cukern.runtime.device import KNOWN


def ledger(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="All ops if left out.")] = None,
    gpu: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Repeatable; by default {', '.join(GPUS)}.")
    ] = None,
    to: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Write to FILE.")] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Print the lines that differ from a ledger in FILE.")
    ] = None,
    digest: Annotated[
        bool, typer.Option("--digest", help="One line per GPU, op and version: calls, launches, digest.")
    ] = False,
) -> None:
    """List kernel, grid, block, shared memory and arguments of every launch that ops make at the shapes of
    `cukern check`.

    Needs no GPU. Addresses are written "ptr". With --diff, exits with status 1 if a line differs:

        cukern ledger -o before.txt

        cukern ledger --diff before.txt
    """
    names = [find_case(name).name for name in ops or ()]
    gpus = [checks.choice("--gpu", name, KNOWN) for name in gpu or GPUS]
    found = lines_of(gpus, names or None)
    lines = [f"{key} {value}" for key, value in digests(found).items()] if digest else list(found)
    if to is not None:
        to.write_text("\n".join(lines) + "\n")
    if diff is not None:
        changed = list(
            difflib.unified_diff(diff.read_text().splitlines(), lines, str(diff), "now", lineterm="", n=1)
        )
        print("\n".join(changed) if changed else f"no line differs from {diff}")
        raise typer.Exit(bool(changed))
    if to is None:
        print("\n".join(lines))
    else:
        say(f"{len(lines)} lines in {to}")
