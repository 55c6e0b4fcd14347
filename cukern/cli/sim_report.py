"""Runs a kernel for `cukern sim`, and prints what its launch did."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import typer

from cukern.cli.common import say
from cukern.cli.sim_arguments import argument, fill_of
from cukern.runtime.compile.signature import Param
from cukern.sim import collect, coverage, memory
from cukern.sim.faults import Fault
from cukern.sim.machine.options import Coverage

Dims = tuple[tuple[int, ...], ...]  # of the grid, and of a block


def run_kernel(
    name: str, params: Sequence[Param], words: Sequence[str], launch: Callable[[list[Any]], None], dims: Dims,
    seed: int, own: Sequence[Path],
) -> None:  # fmt: skip
    """Make the arguments and launch the kernel. Print its outputs, the lines of the files `own` that were not
    executed, and its faults. An output is a tensor whose pointer is not to const, or that the launch has
    changed."""
    random = torch.Generator().manual_seed(seed)
    values = [argument(p, word, random) for p, word in zip(params, words, strict=True)]
    tensors = [
        (p, word, v) for p, word, v in zip(params, words, values, strict=True) if isinstance(v, torch.Tensor)
    ]
    with memory.scope() as scope:
        for param, word, tensor in tensors:
            scope.add(tensor, written=fill_of(param, word) != "empty")
        before = [tensor.clone() for _, _, tensor in tensors]
        with collect() as faults, coverage() as record:
            launch(values)
    for (param, _, tensor), old in zip(tensors, before, strict=True):
        if not param.const or not torch.equal(tensor, old):
            print_output(param.name, tensor, scope.unwritten(tensor))
    if own:
        print_coverage({path.name: path for path in own}, record)
    print_faults(name, dims, faults)


def print_output(name: str, tensor: torch.Tensor, unwritten: int) -> None:
    """What a launch left in a tensor that it may write."""
    shape = "x".join(map(str, tensor.shape))
    left = f", {unwritten} of {tensor.nbytes} bytes not written" if unwritten else ""
    values = (
        tensor.double()
        if tensor.dtype.is_floating_point or tensor.dtype == torch.bool
        else tensor.to(torch.int64)
    )
    numbers = values[~values.isnan()]
    extremes = f"{numbers.min().item():g} to {numbers.max().item():g}" if len(numbers) else "no numbers"
    say(
        f"{name}  {str(tensor.dtype).removeprefix('torch.')} {shape}: {extremes}, "
        f"{values.isnan().sum().item()} NaN{left}"
    )


def print_coverage(own: dict[str, Path], record: Coverage) -> None:
    """The lines of the files `own` that were not executed. By name: compiled code may come from a copy of a
    file."""
    texts = {name: path.read_text(errors="replace").split("\n") for name, path in own.items()}
    for title, places in (("not executed", record.missed), ("a branch went one way", record.one_way)):
        for file, line in (place.rsplit(":", 1) for place in places):
            if (name := Path(file).name) in own:
                say(f"{title}: {own[name]}:{line}  {texts[name][int(line) - 1].strip()}", "yellow")
    counted, missed = (
        [p for p in places if Path(p.rsplit(":", 1)[0]).name in own]
        for places in (record.lines, record.missed)
    )
    say(f"{len(counted) - len(missed)} of {len(counted)} lines executed")


def print_faults(name: str, dims: Sequence[tuple[int, ...]], faults: Sequence[Fault]) -> None:
    distinct: dict[tuple[type[Fault], str], list[Fault]] = {}
    for fault in faults:
        distinct.setdefault((type(fault), fault.where.location), []).append(fault)
    for kind, same in distinct.items():
        more = f" ({len(same) - 1} more at this line)" if len(same) > 1 else ""
        say(f"{kind[0].__name__}: {same[0]}{more}", "red")
    count = f"{len(distinct)} fault{'s' * (len(distinct) > 1)}" if faults else "no faults"
    geometry = ", ".join(
        f"{what} {' x '.join(map(str, d))}" for what, d in zip(("grid", "block"), dims, strict=False)
    )
    say(f"{name} <<<{geometry}>>>: {count}", "red" if faults else "green")
    if faults:
        raise typer.Exit(1)
