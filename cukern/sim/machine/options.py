"""What a launch checks and records, and whether its first fault ends it: `checks`, `collect` and
`coverage`."""

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from cukern.sim.faults import Fault, Misaligned, OutOfBounds, Race, Uninitialized
from cukern.sim.machine.program import Program
from cukern.sim.numerics.integers import Array

# instructions of a batch, each counted once for every 8192 lanes that execute it together: about ten seconds
MOST_STEPS = 1_400_000

# some lane came to the instruction with a true guard, or without a guard; some lane with a false one
HELD, FAILED = 1, 2


@dataclass
class Coverage:
    """What launches executed. Lines are "file:line", as in a fault, in the order of the file; a line of an
    inlined function is its own."""

    _lines: dict[tuple[str, int], bool] = field(default_factory=dict)
    # file, line and column -> HELD | FAILED
    _branches: dict[tuple[str, int, int], int] = field(default_factory=dict)

    def add(self, program: Program, seen: Array) -> None:
        """A launch has ended; `seen` has HELD and FAILED for each instruction."""
        for instruction, bits in zip(program.kernel.code, seen.tolist(), strict=True):
            line = instruction.line
            if line is None:
                continue
            file, _, number = program.module.place(line).rpartition(":")
            self._lines[file, int(number)] = self._lines.get((file, int(number)), False) or bool(bits)
            if instruction.opcode.startswith("bra") and instruction.guard is not None:
                place = file, int(number), line.column
                self._branches[place] = self._branches.get(place, 0) | bits

    @property
    def lines(self) -> list[str]:
        """The lines that have instructions."""
        return [f"{file}:{line}" for file, line in sorted(self._lines)]

    @property
    def missed(self) -> list[str]:
        """The lines of which no thread executed an instruction."""
        return [f"{file}:{line}" for (file, line), executed in sorted(self._lines.items()) if not executed]

    @property
    def one_way(self) -> list[str]:
        """The lines with a branch that was executed, and went the same way for all threads."""
        found = sorted({place[:2] for place, bits in self._branches.items() if bits in (HELD, FAILED)})
        return [f"{file}:{line}" for file, line in found]


@dataclass(frozen=True)
class Options:
    """`off`: kinds of faults that are not reported. `collected`: the list to which faults go that do not end
    the launch, or None."""

    off: frozenset[type[Fault]] = frozenset()
    collected: list[Fault] | None = None
    steps: int | None = None  # None: MOST_STEPS
    coverage: Coverage | None = None


_START = Options()  # frozen
_current: contextvars.ContextVar[Options] = contextvars.ContextVar("cukern.sim.options", default=_START)


def current() -> Options:
    return _current.get()


@contextlib.contextmanager
def _using(options: Options) -> Iterator[None]:
    token = _current.set(options)
    try:
        yield
    finally:
        _current.reset(token)


@contextlib.contextmanager
def collect() -> Iterator[list[Fault]]:
    """Launches inside the block do not end at their first fault. Yields the list of the distinct faults,
    which grows as they are found.

    One fault is listed for each kind and instruction. After it, an access out of bounds is left out (a load
    gives zeros), a race is ignored, and an uninitialized value counts as initialized. A barrier that not all
    threads reach, a failed assert and an endless loop end the launch. A fault may be the consequence of an
    earlier one. Errors other than Fault are raised as usual. Example:

        with cukern.backend("sim"), sim.collect() as faults:
            kernel(out, x, n, grid=4, block=256)
        for fault in faults:
            print(type(fault).__name__, fault)"""
    found: list[Fault] = []
    with _using(replace(current(), collected=found)):
        yield found


@contextlib.contextmanager
def coverage() -> Iterator[Coverage]:
    """Record which source lines the launches inside the block execute. Yields the record, which is complete
    after a launch has ended: `missed`, the lines that have code and that no thread executed, and `one_way`,
    the lines with a branch that always went the same way.

    The lines are those of the optimized code: a short `if` may have become a selection, which always
    executes. Example:

        with cukern.backend("sim"), sim.coverage() as covered:
            kernel(out, x, 1024, grid=4, block=256)
        print(covered.missed)  # ["scale.cu:9"]: no size had a tail"""
    record = Coverage()
    with _using(replace(current(), coverage=record)):
        yield record


@contextlib.contextmanager
def checks(
    *, races: bool = True, bounds: bool = True, uninitialized: bool = True, steps: int | None = None
) -> Iterator[None]:
    """Switch off single checks of the launches inside the block: `with sim.checks(races=False): kernel(...)`.

    Args:
        races: False: no Race is reported.
        bounds: False: no OutOfBounds and no Misaligned. Such a store is left out, and such a load gives
            zeros.
        uninitialized: False: no Uninitialized. What nobody wrote reads as the bits that are there, zeros in
            shared memory.
        steps: instructions after which a loop is taken as endless (StepLimit); by default 1.4 million for
            each batch of thread blocks.

    Raises TypeError or ValueError for a switch that is not a bool, and for `steps` that is not a positive
    int."""
    for name, value in (("races", races), ("bounds", bounds), ("uninitialized", uninitialized)):
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool)):
        raise TypeError(f"steps must be an int or None, got {steps!r}")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    off = set(current().off)
    for kinds, wanted in (
        ({Race}, races),
        ({OutOfBounds, Misaligned}, bounds),
        ({Uninitialized}, uninitialized),
    ):
        off = off - kinds if wanted else off | kinds
    with _using(replace(current(), off=frozenset(off), steps=steps)):
        yield
