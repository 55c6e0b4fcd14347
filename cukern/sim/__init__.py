"""A simulator of kernels for machines without a GPU: it interprets the PTX that NVRTC makes of them, and names the bugs that it meets.

Bugs are Faults (see faults.py): accesses out of bounds, misaligned, or of memory that nobody wrote; races within a block and between
blocks; barriers that some threads never reach; copies that nobody waited for; loops that do not end. Numbers are those of a GPU, but for
the approximate functions (ex2.approx and its kind), whose last bits differ.
"""

import math
import struct
from collections.abc import Callable

from cukern.runtime.compiler import Ptx
from cukern.runtime.signature import Param, explain_misfit, packer
from cukern.sim import memory as memory
from cukern.sim.faults import BarrierFault as BarrierFault
from cukern.sim.faults import Dim
from cukern.sim.faults import Fault as Fault
from cukern.sim.faults import Misaligned as Misaligned
from cukern.sim.faults import NotSimulated as NotSimulated
from cukern.sim.faults import OutOfBounds as OutOfBounds
from cukern.sim.faults import Race as Race
from cukern.sim.faults import StepLimit as StepLimit
from cukern.sim.faults import Uninitialized as Uninitialized
from cukern.sim.machine.machine import Launched
from cukern.sim.machine.program import Program
from cukern.sim.memory.regions import Region, regions
from cukern.sim.memory.spaces import Global
from cukern.sim.ptx.module import Kernel
from cukern.sim.ptx.parser import parse

Launch = Callable[..., None]

MOST_THREADS = 1 << 22  # of a launch; more would take minutes
MOST_BLOCKS_A_CLUSTER = 16  # on sm_90
MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have on sm_90, static and dynamic


def load(name: str, ptx: Ptx, params: tuple[Param, ...]) -> Launch:
    """Make a kernel ready to be simulated. Returns `launch(grid, block, shared_bytes, *args)`, pointers as addresses of CPU memory.

    A launch raises Fault for a bug of the kernel, NotSimulated for an instruction that is not simulated, LaunchError for a geometry that a
    GPU would refuse, ValueError for one that is too large to simulate, and TypeError or ValueError for an argument that does not fit.
    """
    program = Program(parse(ptx.text), ptx.symbol)
    layout = packer(params)

    def launch(grid: Dim, block: Dim, shared: int, *args: int | float) -> None:
        try:
            packed = layout.pack(*args)
        except struct.error:
            raise explain_misfit(name, params, args) from None
        total = (program.dynamic_start if shared else program.shared_size) + shared
        _check_launch(name, grid, block, shared, total, program.kernel)
        memory_ = Global(_regions(program, params, args))
        Launched(name, program, grid, block, total, packed, memory_).run()
        memory_.finish()

    return launch


def _regions(program: Program, params: tuple[Param, ...], args: tuple) -> list[Region]:
    """What the launch may touch, by address, each region with the name of the argument that points into it."""
    found = regions()
    for region in found:
        names = [p.name for p, a in zip(params, args, strict=True) if p.pointer and region.start <= a < region.end]
        region.name = f"the tensor of argument '{names[0]}'" if names else "a tensor"
    return sorted([*found, *program.regions], key=lambda r: r.start)


def _check_launch(name: str, grid: Dim, block: Dim, shared: int, total: int, kernel: Kernel) -> None:
    from cukern.runtime.backend import LaunchError, cluster_misfit

    broken = []
    for what, dims, limits in (("grid", grid, (2**31 - 1, 65535, 65535)), ("block", block, (1024, 1024, 64))):
        for axis, n, limit in zip("xyz", dims, limits, strict=True):
            if not 1 <= n <= limit:
                broken.append(f"{what} {axis} = {n} is not in 1..{limit}")
    broken += cluster_misfit(grid, kernel.cluster)
    if math.prod(kernel.cluster) > MOST_BLOCKS_A_CLUSTER:
        broken.append(f"{math.prod(kernel.cluster)} blocks a cluster are more than {MOST_BLOCKS_A_CLUSTER}")
    if math.prod(block) > kernel.max_threads:
        broken.append(f"{math.prod(block)} threads a block are more than the {kernel.max_threads} that this kernel may have")
    if total > MOST_SHARED:
        broken.append(f"{total} bytes of shared memory, {shared} of them dynamic, are more than {MOST_SHARED}")
    if broken:
        raise LaunchError(f"{name} <<<grid {grid}, block {block}, {shared} bytes shared>>> failed: {'; '.join(broken)}")
    if math.prod(grid) * math.prod(block) > MOST_THREADS:
        raise ValueError(
            f"{name} <<<grid {grid}, block {block}>>> has {math.prod(grid) * math.prod(block)} threads, and the simulator takes at most "
            f"{MOST_THREADS}: simulate a smaller problem"
        )
