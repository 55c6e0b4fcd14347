"""How CPU tensors are processed: by torch's operations, or by kernels in the simulator, if the user chose
it."""

import contextlib
import contextvars
import os
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from cukern.runtime import checks
from cukern.runtime.compile.compiler import Ptx
from cukern.runtime.compile.signature import Param
from cukern.runtime.device import SIMULATED as SIMULATED
from cukern.runtime.launch.driver import Launch
from cukern.runtime.launch.limits import Dim

BACKENDS = ("gpu", "sim")
# checked at first use, so that the command line can report an error
_START = [os.environ.get("CUKERN_BACKEND") or "gpu"]
_blocks: contextvars.ContextVar[tuple[list[str], ...]] = contextvars.ContextVar(
    "cukern.backend", default=(_START,)
)


class _Traced(types.ModuleType):
    """The backend for torch.compile, which cannot trace a context variable. It reads an attribute of a module
    instead of tracing it, and its guard reads the attribute again, in the context of the call."""

    name = property(lambda self: _blocks.get()[-1][0])


_traced = _Traced("cukern.traced")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose how CPU tensors are processed: `with cukern.backend("sim"): cukern.square(torch.randn(1000))`.

    Args:
        name: "sim": the simulator runs the CUDA kernels. It raises cukern.sim.Fault for races, out-of-bounds
            accesses and similar bugs. "gpu": CPU tensors use the plain torch reference. Tensors on a GPU
            always run on the GPU.

    The setting is a context variable. It holds for the thread or asyncio task that opened the block and for
    tasks started inside it. A thread started inside the block does not inherit it, unless it runs in
    `contextvars.copy_context()`. The backward pass of a simulated forward pass is simulated, wherever it is
    called. The environment variable CUKERN_BACKEND sets the default.

    Raises TypeError for a name that is not a str and ValueError for an unknown name. A wrong CUKERN_BACKEND
    raises at the first CPU tensor.
    """
    _check("", name)
    mine = [name]  # a list has an identity: blocks in generators may end in any order
    _blocks.set((*_blocks.get(), mine))
    try:
        yield
    finally:
        _blocks.set(tuple(block for block in _blocks.get() if block is not mine))


def _check(where: str, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a backend must be a str, got {checks.brief(name)}")
    if name not in BACKENDS:
        raise ValueError(f"{where}there is no backend {name!r}; there are {', '.join(BACKENDS)}")


def simulates(x: torch.Tensor) -> bool:
    """True if kernels on this tensor run in the simulator."""
    return simulating() and x.device.type == "cpu"


def uses_torch(op: str, version: str | None, x: torch.Tensor) -> bool:
    """True if a call uses torch's operations: x is on the CPU and not simulated. Raises ValueError if the
    call names a version."""
    if x.is_cuda or simulates(x):
        return False
    if version is not None:
        checks.needs_gpu(op, version, x.device)
    return True


def simulating() -> bool:
    """True if CPU tensors go to the simulator. Raises ValueError for a wrong CUKERN_BACKEND."""
    name = _traced.name if torch.compiler.is_dynamo_compiling() else _blocks.get()[-1][0]
    if name not in BACKENDS:
        _check("CUKERN_BACKEND: ", name)
    return name == "sim"


def load_simulated(name: str, ptx: Ptx, params: tuple[Param, ...], cluster: Dim | None = None) -> Launch:
    """The launch function of a kernel in the simulator; see `driver.load`."""
    from cukern import sim

    return sim.load(name, ptx, params, cluster)


def simulated_triton() -> contextlib.AbstractContextManager:
    """In which kernels of Triton take CPU tensors."""
    from cukern import sim

    return sim.triton()


def simulated_memory(tensors: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Inside the block, simulated kernels may access these tensors and new ones. Items that are not tensors
    are ignored."""
    from cukern import sim

    return sim.memory.scope([t for t in tensors if isinstance(t, torch.Tensor)])
