"""Prepares one kernel for simulation, and launches it."""

import math
import operator
import struct
from collections.abc import Callable

import numpy as np
import torch

from cukern.runtime import recording
from cukern.runtime.compile.compiler import Ptx
from cukern.runtime.compile.signature import Param, explain_misfit, packer
from cukern.runtime.device import SIMULATED, device_of
from cukern.runtime.launch.limits import Dim, exceeded, launch_error
from cukern.sim import tracebacks
from cukern.sim.faults import Fault, NotSimulated
from cukern.sim.instructions.decode import stretches
from cukern.sim.instructions.tables import INSTRUCTIONS
from cukern.sim.machine.batch import Launched
from cukern.sim.machine.machine import run
from cukern.sim.machine.options import current
from cukern.sim.machine.program import Program
from cukern.sim.memory.regions import Region, regions
from cukern.sim.memory.spaces import Global
from cukern.sim.ptx.parser import parse

Launch = Callable[..., None]
__tracebackhide__ = operator.methodcaller("errisinstance", tracebacks.Report)  # pytest shows the report alone

MOST_THREADS = 1 << 22  # of a launch; more would take minutes


def load(
    name: str, ptx: Ptx, params: tuple[Param, ...], cluster: Dim | None = None, replicated: bool = False
) -> Launch:
    """Prepare a kernel for simulation. Returns `launch(grid, block, shared_bytes, *args)`; pointers are
    addresses of CPU memory. `launch.variable(symbol)` is the memory of a variable. `cluster`: the shape of a
    cluster that the launch asks for. `replicated`: several threads of a block may hold copies of one value,
    and the race of a copy's read with a write of its block is no fault: so Triton compiles an in-place kernel
    with more threads than elements.

    A launch raises Fault for a bug of the kernel, except in `collect` or `checks`; NotSimulated for an
    instruction that is not simulated; LaunchError for a geometry that a GPU would refuse, ValueError for one
    that is too large to simulate, and TypeError or ValueError for an argument that does not fit."""
    program = Program(parse(ptx.text), ptx.symbol)
    if cluster:
        program.kernel.cluster, program.kernel.explicit_cluster = cluster, True
    code = stretches(program, INSTRUCTIONS)
    layout = packer(params)

    def launch(grid: Dim, block: Dim, shared: int, *args: int | float) -> None:
        try:
            packed = layout.pack(*args)
        except struct.error:
            raise explain_misfit(name, params, args) from None
        static = program.dynamic_start if shared else program.shared_size
        _check_launch(name, grid, block, shared, static, program)
        # an aligned load may reach beyond the last parameter
        own = np.frombuffer(packed + bytes(16), np.uint8)
        start = own.ctypes.data
        values = Region(start, start + len(own), "the kernel's parameters", writable=False)
        # what grid.sync() counts in: every launch counts as a cooperative one
        of_grid = np.zeros(2, np.uint64)
        counter = Region(of_grid.ctypes.data, of_grid.ctypes.data + of_grid.nbytes, "the barrier of the grid")
        more = [values, counter] if "%envreg2" in program.specials else [values]
        memory_ = Global(sorted([*_regions(program, params, args), *more], key=lambda r: r.start), replicated)
        try:
            run(
                Launched(
                    name,
                    program,
                    grid,
                    block,
                    static + shared,
                    own,
                    memory_,
                    current(),
                    counter.start,
                    replicated,
                ),
                code,
            )
        except (Fault, NotSimulated) as error:
            if tracebacks.whole():
                raise
            tracebacks.install()
            raise error.with_traceback(None) from None
        memory_.finish()

    noted = recording.noted(launch, params)
    noted.variable = lambda symbol: torch.from_numpy(program.memory[symbol])  # type: ignore[attr-defined]
    return noted


def _regions(program: Program, params: tuple[Param, ...], args: tuple) -> list[Region]:
    """What the launch may access, sorted by address. Each region is named after the argument that points into
    it."""
    found = regions()
    for region in found:
        names = [
            p.name for p, a in zip(params, args, strict=True) if p.pointer and region.start <= a < region.end
        ]
        region.name = f"the tensor of argument '{names[0]}'" if names else "a tensor"
    return sorted([*found, *program.regions], key=lambda r: r.start)


def _check_launch(name: str, grid: Dim, block: Dim, shared: int, static: int, program: Program) -> None:
    most_shared = device_of(SIMULATED).shared_bytes
    broken = exceeded(
        grid, block, shared, program.kernel.max_threads, most_shared, program.kernel.cluster, static
    )
    if broken:
        raise launch_error(name, grid, block, shared, broken)
    if math.prod(grid) * math.prod(block) > MOST_THREADS:
        threads = math.prod(grid) * math.prod(block)
        what = (
            f"{name} <<<grid {grid}, block {block}>>> has {threads} threads, and the simulator takes at "
            f"most {MOST_THREADS}"
        )
        raise ValueError(f"{what}: simulate a smaller problem")
