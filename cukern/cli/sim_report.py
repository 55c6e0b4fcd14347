"""What `cukern sim` prints of a launch."""

from collections.abc import Sequence
from pathlib import Path

import torch
import typer

from cukern.cli.common import say
from cukern.sim.faults import Fault
from cukern.sim.machine.options import Coverage


def print_output(name: str, tensor: torch.Tensor, unwritten: int) -> None:
    """What a launch left in a tensor that it may write."""
    shape = "x".join(map(str, tensor.shape))
    left = f", {unwritten} of {tensor.nbytes} bytes not written" if unwritten else ""
    values = tensor.double() if tensor.dtype.is_floating_point or tensor.dtype == torch.bool else tensor.to(torch.int64)
    numbers = values[~values.isnan()]
    extremes = f"{numbers.min().item():g} to {numbers.max().item():g}" if len(numbers) else "no numbers"
    say(f"{name}  {str(tensor.dtype).removeprefix('torch.')} {shape}: {extremes}, {values.isnan().sum().item()} NaN{left}")


def print_coverage(own: dict[str, Path], record: Coverage) -> None:
    """The lines of the files `own` that were not executed. By name: compiled code may come from a copy of a file."""
    texts = {name: path.read_text(errors="replace").split("\n") for name, path in own.items()}
    for title, places in (("not executed", record.missed), ("a branch went one way", record.one_way)):
        for file, line in (place.rsplit(":", 1) for place in places):
            if (name := Path(file).name) in own:
                say(f"{title}: {own[name]}:{line}  {texts[name][int(line) - 1].strip()}", "yellow")
    counted, missed = ([p for p in places if Path(p.rsplit(":", 1)[0]).name in own] for places in (record.lines, record.missed))
    say(f"{len(counted) - len(missed)} of {len(counted)} lines executed")


def print_faults(name: str, dims: Sequence[tuple[int, ...]], faults: Sequence[Fault]) -> None:
    distinct: dict[tuple[type[Fault], str], list[Fault]] = {}
    for fault in faults:
        distinct.setdefault((type(fault), fault.where.location), []).append(fault)
    for kind, same in distinct.items():
        more = f" ({len(same) - 1} more at this line)" if len(same) > 1 else ""
        say(f"{kind[0].__name__}: {same[0]}{more}", "red")
    count = f"{len(distinct)} fault{'s' * (len(distinct) > 1)}" if faults else "no faults"
    geometry = ", ".join(f"{what} {' x '.join(map(str, d))}" for what, d in zip(("grid", "block"), dims, strict=False))
    say(f"{name} <<<{geometry}>>>: {count}", "red" if faults else "green")
    if faults:
        raise typer.Exit(1)
