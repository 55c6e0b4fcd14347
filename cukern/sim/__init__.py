"""A simulator for machines without a GPU: it interprets a kernel's PTX and reports the bugs that it finds.

Bugs are Faults (see faults.py): accesses that are out of bounds or misaligned; uninitialized values that
matter; races within a block and between blocks; barriers that some threads never reach; asynchronous copies
that nobody waited for; loops that do not end. Results have the bits of a GPU's, except for the approximate
functions (ex2.approx and the like), whose last bits differ.

Each package imports only those before it: ptx, numerics, memory, machine, instructions."""

import contextlib
import operator
from typing import Any

from cukern.sim import memory, tracebacks
from cukern.sim.faults import (
    BarrierFault,
    Fault,
    Misaligned,
    NotSimulated,
    OutOfBounds,
    Race,
    StepLimit,
    Uninitialized,
)
from cukern.sim.launch import Launch, load
from cukern.sim.machine.options import checks, collect, coverage

__all__ = [
    "BarrierFault", "Fault", "Launch", "Misaligned", "NotSimulated", "OutOfBounds", "Race", "StepLimit",
    "Uninitialized",
]  # fmt: skip
__all__ += ["checks", "collect", "coverage", "load", "memory", "triton"]

__tracebackhide__ = operator.methodcaller("errisinstance", tracebacks.Report)  # pytest shows the report alone


def triton(
    arch: str = "sm_90", *, configs: str = "first", debug: bool = False, torch_compile: bool = False
) -> contextlib.AbstractContextManager[Any]:
    """Run Triton kernels on CPU tensors in the simulator: `with cukern.sim.triton(): kernel[grid](x, out, n,
    BLOCK=128)`.

    Inside the block, each `@triton.jit` kernel is compiled by Triton for the target, and its PTX is executed
    and checked. Specialization, `tl.constexpr`, heuristics, `num_warps` and callable grids are Triton's own.
    Arguments are CPU tensors, NumPy arrays and numbers. A kernel may access only the tensors that it is
    given, and those created in the block whose addresses are in an int64 tensor. A read of a tensor that
    `torch.empty` made in the block, and that nothing wrote, is a fault. The block holds for the whole
    process, not for one thread.

    Args:
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120". No GPU is needed.
        configs: of autotuned kernels. "first": the first that compiles and fits the GPU's shared memory.
            "all": run each of them once, as the autotuner does, and then the first; a kernel that accumulates
            needs `reset_to_zero` or `restore_value`, as on a GPU.
        debug: compile with `tl.device_assert` and Triton's checks for integer overflow.
        torch_compile: functions of torch.compile become Triton kernels, too, instead of running uncompiled.
            At both ends of the block, torch forgets what it compiled.

    Raises ImportError without Triton, and ValueError for an unknown `arch` or `configs`. A launch raises
    Fault for a bug, which names the Python line; NotSimulated for an instruction that is not simulated;
    TypeError for a CUDA tensor.
    """
    from cukern.sim import triton_driver

    return triton_driver.block(arch, configs, debug, torch_compile)
