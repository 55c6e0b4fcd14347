"""`cukern compile`: every kernel for every architecture, with no GPU: what each uses, and a full cache."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import torch
import typer

from cukern.bench import environment
from cukern.cli.common import console, errors, find_op, listed, progress, table
from cukern.runtime.cache import target
from cukern.runtime.compiler import CompileError, Report, arch_of
from cukern.runtime.kernel import Kernel
from cukern.runtime.registry import OPS, Op

WITHOUT_GPU = "sm_80,sm_90a"

Outcome = Report | CompileError


def compile(
    op: Annotated[str | None, typer.Argument(metavar="OP", help="One op; all if left out.")] = None,
    arch: Annotated[
        str | None, typer.Option(metavar="sm_90a,...", help=f"Architectures; by default this GPU's, else {WITHOUT_GPU}.")
    ] = None,
) -> None:
    """Compile every kernel, with no GPU; print registers, spills and shared memory; fill the cache."""
    ops = [find_op(op)] if op is not None else list(OPS.values())
    failed = 0
    for one in _architectures(arch):
        kernels: dict[str, Kernel] = {}
        for each in ops:
            kernels |= each.kernels(_number(one))
        failed += print_reports(compile_kernels(kernels.values(), one), one)
        listed("not for " + one + ":", _too_new(ops, one))
    console.print(f"cache: {target() or 'none can be written'}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def compile_kernels(kernels: Iterable[Kernel], arch: str) -> dict[str, Outcome]:
    """The report of each kernel, by name, or the error of one that does not compile. Raises SetupError where there is no compiler."""
    kernels = list(kernels)
    with progress() as bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NVRTC releases the GIL
        task = bar.add_task(f"compiling for {arch}", total=len(kernels))
        outcomes = {}
        for kernel, outcome in zip(kernels, pool.map(_outcome_for(arch), kernels), strict=True):
            outcomes[kernel.name] = outcome
            bar.advance(task)
    return outcomes


def print_reports(outcomes: dict[str, Outcome], arch: str) -> int:
    """Print what each kernel uses, and the compiler's words for those that failed. Returns how many failed."""
    shown = table(f"{len(outcomes)} kernels for {arch}", "kernel", "registers", "spill stores", "spill loads", "stack", "shared (bytes)")
    broken = [outcome for outcome in outcomes.values() if isinstance(outcome, CompileError)]
    for name, outcome in outcomes.items():
        if isinstance(outcome, Report):
            numbers = (outcome.registers, outcome.spill_stores, outcome.spill_loads, outcome.stack, outcome.shared)
            shown.add_row(name, *map(str, numbers), style="yellow" if outcome.spill_stores or outcome.spill_loads else None)
        else:
            shown.add_row(name, "does not compile", style="red")
    console.print(shown)
    for error in broken:
        errors.print(str(error), style="red", markup=False, highlight=False, soft_wrap=True)
    return len(broken)


def _outcome_for(arch: str) -> Callable[[Kernel], Outcome]:
    def outcome(kernel: Kernel) -> Outcome:
        try:
            return kernel.compile(arch).report
        except CompileError as error:
            return error

    return outcome


def _architectures(text: str | None) -> list[str]:
    if text is None:
        place = environment.device()
        return [arch_of(torch.cuda.get_device_capability(place))] if place.type == "cuda" else WITHOUT_GPU.split(",")
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if not re.fullmatch(r"sm_[0-9]{2,3}[af]?", name) or _number(name) < 75:
            raise ValueError(f"--arch must be names such as sm_80 or sm_90a, sm_75 at least, separated by commas, got {name!r}")
    return names


def _number(arch: str) -> int:
    return int(re.sub(r"\D", "", arch))


def _too_new(ops: Sequence[Op], arch: str) -> dict[str, str]:
    return {
        f"{op.name} {name}": f"needs compute capability {version.requires / 10}"
        for op in ops
        for name, version in op.versions.items()
        if version.requires > _number(arch)
    }
