"""What the simulator says of a kernel: each class is one kind of bug, and each message says where it is."""

from typing import NamedTuple

Dim = tuple[int, int, int]


class Where(NamedTuple):
    """One thread of a launch, at one line of the source."""

    kernel: str
    block: Dim
    thread: Dim
    location: str  # file:line, and where that was inlined

    def __str__(self) -> str:
        return f"{self.kernel}, block {self.block}, thread {self.thread}, {self.location}"


class Fault(RuntimeError):
    """A bug of a kernel, with the thread that met it. `where` holds what the message says of it."""

    def __init__(self, what: str, where: Where):
        super().__init__(f"{where}: {what}")
        self.where = where


class OutOfBounds(Fault):
    """An access outside the tensors, the shared memory or the variables that the kernel may touch."""


class Misaligned(Fault):
    """An access whose address is not a multiple of its size."""


class Uninitialized(Fault):
    """A read of memory, or of another lane's register, to which nobody has written."""


class Race(Fault):
    """Two accesses of one address by threads that nothing orders, one of them a write."""


class BarrierFault(Fault):
    """A barrier, or a warp-wide instruction, that some of the threads that it waits for never reach."""


class StepLimit(Fault):
    """The kernel ran for so long that it probably never ends."""


class NotSimulated(NotImplementedError):
    """The kernel executes an instruction that the simulator does not know."""
