"""`cukern judge`: judges a submission, a Python file with kernels, against a reference in plain torch."""

import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer

from cukern.bench.judge import Worker
from cukern.bench.judge import judge as judged
from cukern.cli.common import say


def judge(
    submission: Annotated[Path, typer.Argument(metavar="SUBMISSION", help="A Python file.")],
    reference: Annotated[Path, typer.Option(metavar="FILE", help="A Python file in plain torch.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the inputs; by default random.")] = None,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds of a call.")] = 60.0,
) -> None:
    """Judge a kernel that somebody else, or a program, wrote: faults in the simulator, errors against float64
    on sizes that it has not seen, and tricks.

    The reference has Model, get_inputs and get_init_inputs, and the submission ModelNew, as in KernelBench;
    or ref_kernel and generate_input, and custom_kernel, as in GPU MODE's reference-kernels. Exits with 1 if
    the submission fails, with 2 if it cannot be judged.
    """
    with contextlib.closing(Worker(timeout)) as worker:
        found = judged(submission, reference, worker, seed)
    passed, shapes, took = found["verdict"] == "pass", found["shapes"], found["time"]
    if as_json:
        print(json.dumps(found))
        raise typer.Exit(not passed)
    for reason in found["reasons"]:
        say(f"{reason['kind']}: {reason['text']}", "red")
    say(f"{len(shapes)} calls at sizes drawn with seed {found['seed']}")
    timed = f"{took['median_us']:.2f} us at {took['sizes']} {took['note']}" if took else ""
    say(timed or "not timed: right kernels are timed on GPUs only")
    say(f"{submission.name}: {found['verdict']}", "green" if passed else "red")
    raise typer.Exit(not passed)
