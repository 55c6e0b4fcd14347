"""Which source lines and branches the launches of a kernel execute; see `coverage` in options.py."""

from dataclasses import dataclass, field

import numpy as np

from cukern.sim.machine.program import Program

HELD, FAILED = 1, 2  # some lane came to the instruction with a true guard, or without a guard; some lane with a false one


@dataclass
class Coverage:
    """What launches executed. Lines are "file:line", as in a fault, in the order of the file; a line of an inlined function is its own."""

    _lines: dict[tuple[str, int], bool] = field(default_factory=dict)
    _branches: dict[tuple[str, int, int], int] = field(default_factory=dict)  # file, line and column -> HELD | FAILED

    def add(self, program: Program, seen: np.ndarray) -> None:
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
