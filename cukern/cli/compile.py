"""`cukern compile`: compiles kernels without a GPU, prints what each uses, and fills the cache."""

import os
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.cli.common import console, errors, find_case, find_dims, listed, progress, say, shorten, table
from cukern.cli.own_file import is_source, kernels_of
from cukern.runtime import checks
from cukern.runtime.compile.cache import target
from cukern.runtime.compile.compiler import CompileError, Report, arch_of
from cukern.runtime.device import KNOWN, Device, device_of, representative
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.registry import CASES, Case
from cukern.runtime.warmup import kernels_for

WITHOUT_GPU = "sm_80,sm_90a"

Outcome = Report | CompileError


def compile(
    op: Annotated[
        str | None,
        typer.Argument(metavar="OP", help="One op, or a file: my_op.py, my.cu. All ops if left out."),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(metavar="sm_90a,...", help=f"Architectures; by default this GPU's, else {WITHOUT_GPU}."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIMS",
            help="Only what calls of OP with these sizes need, such as 1024,32,32; repeatable.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"The GPU that plans are made for: {', '.join(KNOWN)}.")
    ] = None,
    kernel: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A kernel of the .cu file, such as 'scale<float>'; repeatable."),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help="List the host functions that were taken out of the .cu file."),
    ] = False,
) -> None:
    """Compile kernels, with no GPU; print registers, spills and shared memory; fill the cache."""
    if op is not None and is_source(op):
        if shape or gpu:
            raise ValueError(f"--shape and --gpu are of ops; {op} takes --arch and --kernel")
        own = kernels_of(op, kernel or ()).values()
        return _end(sum(_compile_file(own, one, verbose) for one, _ in targets(arch, None)))
    if kernel:
        raise ValueError(
            "--kernel names a kernel of a .cu file: cukern compile my.cu --kernel 'scale<float>'"
        )
    cases = [find_case(op)] if op is not None else list(CASES.values())
    if shape and op is None:
        raise ValueError("--shape needs an OP: the sizes are those of one op")
    if gpu is not None and arch is not None:
        raise ValueError("--gpu names an architecture: leave out --arch")
    _end(sum(_compile_ops(cases, one, device, shape or ()) for one, device in targets(arch, gpu)))


def _compile_ops(cases: Sequence[Case], arch: str, device: Device, shape: Sequence[str]) -> int:
    """Print the resources of the ops' kernels: all, or those of the first case's calls with these sizes.
    Returns the number of failures."""
    dims = [find_dims(cases[0], _sizes(text), ())[0] for text in shape]
    if dims:
        listed("plans for", {device.name: f"{device.sms} SMs"})
        kernels = kernels_for(cases[0], dims, None, device)
    else:
        kernels = {
            name: kernel for case in cases for name, kernel in case.op.kernels(capability_of(arch)).items()
        }
    failed = print_reports(compile_kernels(kernels.values(), arch), arch)
    listed(f"not for {arch}:", _too_new(cases, capability_of(arch)))
    return failed


def _compile_file(kernels: Collection[Kernel], arch: str, verbose: bool) -> int:
    """Print the resources of a file's kernels and, if `verbose`, the host functions that were taken out.
    Returns the number of failures."""
    outcomes = compile_kernels(kernels, arch)
    if verbose:
        removed = {
            name for k in kernels if isinstance(outcomes[k.name], Report) for name in k.compile(arch).removed
        }
        say(f"taken out as host code: {', '.join(sorted(removed)) or 'nothing'}")
    return print_reports(outcomes, arch)


def _end(failed: int) -> None:
    say(f"cache: {target() or 'none can be written'}")
    if failed:
        raise typer.Exit(1)


def compile_kernels(kernels: Iterable[Kernel], arch: str) -> dict[str, Outcome]:
    """The report or compile error of each kernel, by name. Raises SetupError without a compiler."""

    def outcome_of(kernel: Kernel) -> Outcome:
        try:
            return kernel.compile(arch).report
        except CompileError as error:
            return error

    kernels, outcomes = list(kernels), {}
    with progress() as bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NVRTC releases the GIL
        task = bar.add_task(f"compiling for {arch}", total=len(kernels))
        for kernel, outcome in zip(kernels, pool.map(outcome_of, kernels), strict=True):
            outcomes[kernel.name] = outcome
            bar.advance(task)
    return outcomes


def print_reports(outcomes: dict[str, Outcome], arch: str) -> int:
    """Print the resources of each kernel, and the log of each that does not compile. Returns the number of
    failures."""
    columns = ("registers", "stored", "loaded", "stack", "shared")
    title = (
        f"{len(outcomes)} kernel{'s' * (len(outcomes) != 1)} for {arch}; spills, stack and shared memory in "
        f"bytes"
    )
    shown = table(title, "kernel", *columns)
    width = console.width - 2 * len(columns) - sum(map(len, columns)) - 2
    for name, outcome in outcomes.items():
        if isinstance(outcome, Report):
            style = "yellow" if outcome.spill_stores or outcome.spill_loads else None
            shown.add_row(shorten(name, width), *map(str, astuple(outcome)), style=style)
        else:
            shown.add_row(shorten(name, width), "failed", style="red")
    console.print(shown)
    failed = [str(outcome) for outcome in outcomes.values() if isinstance(outcome, CompileError)]
    for message in failed:
        say(message, "red", errors)
    return len(failed)


def _sizes(text: str) -> list[int]:
    try:
        return [int(n) for n in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--shape must be sizes separated by commas, such as 1024,32,32, got {text!r}"
        ) from None


def targets(arch: str | None, gpu: str | None) -> list[tuple[str, Device]]:
    """The architectures to compile for. For each, the GPU that plans assume: the one named, this one, or a
    known one."""
    if gpu is not None:
        device = KNOWN[checks.choice("--gpu", gpu, KNOWN)]
        return [(arch_of(divmod(device.capability, 10)), device)]
    place, here = environment.device(), dict[str, Device]()
    if place.type == "cuda":
        here[arch_of(torch.cuda.get_device_capability(place))] = device_of(torch.cuda.current_device())
    names = (
        list(here) or WITHOUT_GPU.split(",") if arch is None else [name.strip() for name in arch.split(",")]
    )
    for name in names:
        if arch is not None and (not re.fullmatch(r"sm_[0-9]{2,3}[af]?", name) or capability_of(name) < 75):
            raise ValueError(
                f"--arch must be names such as sm_80 or sm_90a, sm_75 at least, separated by commas, got "
                f"{name!r}"
            )
    return [(name, here.get(name) or representative(capability_of(name))) for name in names]


def capability_of(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _too_new(cases: Sequence[Case], capability: int) -> dict[str, str]:
    """The versions that need a newer GPU, and why."""
    versions = {
        f"{case.op.name} {name}": version.requires
        for case in cases
        for name, version in case.op.versions.items()
    }
    return {
        name: f"needs compute capability {least / 10}"
        for name, least in versions.items()
        if least > capability
    }
