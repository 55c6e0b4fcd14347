"""`cukern.tune`: measures the configurations of a user's own op, and records the fastest one that is
right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cukern.bench import environment
from cukern.bench.measure import measure
from cukern.bench.verify import candidates, verify
from cukern.runtime import checks
from cukern.runtime.dispatch.own_kernels import Config
from cukern.runtime.launch.backend import simulating
from cukern.runtime.launch.driver import current_device, require_gpu
from cukern.runtime.registry import CASES, Case


@dataclass(frozen=True)
class Tried:
    """One configuration: the time of forward plus backward over all sizes, None in the simulator, or why it
    cannot be used."""

    config: Config
    us: float | None = None
    problem: str = ""


def tune(
    function: Callable[..., Any], sizes: tuple[int, ...], dtype: torch.dtype | None, seconds: float
) -> list[Tried]:
    case = _case_of(function)
    configs = function.own.kernels  # type: ignore[attr-defined]
    if sizes:
        case.check_count(sizes)
    kind = dtype or case.op.dtypes[0]
    checks.one_of("dtype", kind, case.op.dtypes)
    place = torch.device("cpu") if simulating() else environment.device()
    if not simulating():
        require_gpu()
    *_, version = candidates(case, place)[0]
    shapes = [sizes] if sizes else case.bench_dims
    tried = []
    for index in range(len(configs.all)):
        with configs.forced(index):
            tried.append(_tried(case, configs.all[index].config, version, shapes, kind, place, seconds))
    right = [i for i, one in enumerate(tried) if not one.problem]
    if not right:
        raise ValueError(
            f"no configuration of {case.name} is right: "
            f"{'; '.join(f'{dict(one.config)} {one.problem}' for one in tried)}"
        )
    if not simulating():
        configs.record(current_device(), min(right, key=lambda i: tried[i].us or 0.0))
    return tried


def _case_of(function: Callable[..., Any]) -> Case:
    """Raises TypeError and ValueError for a function without configurations."""
    own = getattr(function, "own", None)
    if own is None or CASES[own.name].call is not function:
        raise TypeError(
            f"cukern.tune takes a function that cukern.op returned, and its last definition, got "
            f"{checks.brief(function)}"
        )
    if len(own.kernels.all) < 2:
        raise ValueError(f"{own.name} has nothing to tune: cukern.op got no configs=[...]")
    return CASES[own.name]


def _tried(
    case: Case, config: Config, version: str, shapes: Sequence[tuple[int, ...]], kind: torch.dtype,
    place: torch.device, seconds: float,
) -> Tried:  # fmt: skip
    """Check the configuration in force, and time it if it is right."""
    try:
        verdicts = [
            verify(case, dims, kind, {version: partial(case.call, version=version)}, place)
            for dims in case.check_dims
        ]
        wrong = [
            f"{r.what} is wrong at {' x '.join(map(str, v.dims))}"
            for v in verdicts
            for r in v.results
            if not r.ok
        ]
        us = (
            None
            if wrong or simulating()
            else sum(_us(case, dims, kind, version, place, seconds) for dims in shapes)
        )
        return Tried(config, us, ", ".join(wrong[:1]))
    except RuntimeError as error:
        # CompileError, LaunchError, or a fault that the simulator found
        if not type(error).__module__.startswith("cukern."):
            raise
        return Tried(config, None, f"{type(error).__name__}: {error}")


def _us(
    case: Case, dims: tuple[int, ...], kind: torch.dtype, version: str, place: torch.device, seconds: float
) -> float:
    """The time of the forward and, if there is one, of the backward."""
    passes = ["fwd", "bwd"] if case.differentiable else ["fwd"]
    tables = [measure(case, dims, kind, one, place, [version], seconds) for one in passes]
    return sum(row.median_us for table in tables for row in table.rows if row.provider == "cukern")
