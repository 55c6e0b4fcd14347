"""The bugs that the simulator reports: one class for each kind, with the place in every message."""

from typing import Any, NamedTuple

from cukern.runtime.launch.limits import Dim
from cukern.sim.tracebacks import Report


class Where(NamedTuple):
    """One thread of a launch, at one line of the source."""

    kernel: str
    block: Dim
    thread: Dim
    location: str  # file:line, and where that was inlined

    def __str__(self) -> str:
        return f"{self.kernel}, block {self.block}, thread {self.thread}, {self.location}"


class Fault(Report, RuntimeError):
    """A bug of a kernel. `where` is the thread that ran into it, and the source line."""

    def __init__(self, what: str, where: Where, lanes: Any = ()):
        super().__init__(f"{where}: {what}")
        self.where = where
        # of the simulator's batch: all that run into it at this instruction, if that is known
        self.lanes = lanes


class OutOfBounds(Fault):
    """An access outside the tensors, the shared memory or the variables that the kernel may touch."""


class Misaligned(Fault):
    """An access whose address is not a multiple of its size."""


class Uninitialized(Fault):
    """A read of memory, or of another lane's register, that was never written."""


class Race(Fault):
    """Two unordered accesses to one address by different threads, at least one of them a write."""


class BarrierFault(Fault):
    """A barrier or warp-wide instruction that is not reached by all threads that it waits for."""


class StepLimit(Fault):
    """The kernel executed so many steps that it probably never ends."""


class NotSimulated(Report, NotImplementedError):
    """The kernel executes an instruction that the simulator does not know."""
