"""A kernel made ready to run: its instructions as Python functions, in stretches without a jump, and where its variables lie."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from cukern.sim.instructions import decode
from cukern.sim.instructions.decode import UNSIGNED
from cukern.sim.instructions.jumps import exit_
from cukern.sim.machine import special
from cukern.sim.memory.regions import Region
from cukern.sim.memory.spaces import variable_name
from cukern.sim.ptx import module as ptx

if TYPE_CHECKING:
    from cukern.sim.machine.machine import Group, Machine

Step = Callable[["Machine", "Group"], None]
MODULE_SPACES = ("global", "const")


class Program:
    """One kernel of a module. Its module-wide variables keep their values from launch to launch."""

    def __init__(self, module: ptx.Module, symbol: str):
        self.module, self.kernel = module, module.kernels[symbol]
        self.widths = list(self.kernel.widths)
        self.initial: dict[int, np.ndarray] = {}  # registers that hold constants
        self.specials: dict[str, int] = {}
        self._carry: int | None = None
        self.addresses: dict[str, tuple[str, int]] = {}  # of each variable: space and address
        self.params: dict[str, int] = {}
        self._lay_out_variables()
        self.stretches = self._stretches()

    # ---- variables

    def _lay_out_variables(self) -> None:
        kernel, everything = self.kernel, self.module.variables + self.kernel.variables
        at = 0
        for param in kernel.params:
            at += -at % param.align
            self.params[param.name] = at
            at += param.size
        self.shared_size, self.shared_names = self._lay_out([v for v in everything if v.space == "shared" and v.size])
        self.local_size, self.local_names = self._lay_out([v for v in everything if v.space == "local"])
        dynamic = [v for v in everything if v.space == "shared" and not v.size]
        self.dynamic_start = self.shared_size + -self.shared_size % max([16, *(v.align for v in dynamic)])
        for v in dynamic:
            self.addresses[v.name] = "shared", self.dynamic_start
            self.shared_names.append((self.dynamic_start, variable_name(v.name)))
        self._lay_out_module([v for v in everything if v.space in MODULE_SPACES])

    def _lay_out(self, variables: list[ptx.Variable]) -> tuple[int, list[tuple[int, str]]]:
        at, names = 0, []
        for v in variables:
            at += -at % v.align
            self.addresses[v.name] = v.space, at
            names.append((at, variable_name(v.name)))
            at += v.size
        return at, names

    def _lay_out_module(self, variables: list[ptx.Variable]) -> None:
        self.regions: list[Region] = []
        buffers = {}
        for v in variables:
            buffer = np.zeros(v.size + 16, np.uint8)
            start = buffer.ctypes.data + -buffer.ctypes.data % 16
            buffers[v.name] = buffer, start - buffer.ctypes.data
            self.addresses[v.name] = v.space, start
            name = f"the variable {variable_name(v.name)}"
            self.regions.append(Region(start, start + v.size, name, writable=v.space == "global"))
        for v in variables:
            buffer, at = buffers[v.name]
            buffer[at : at + len(v.data)] = np.frombuffer(v.data, np.uint8)
            for offset, symbol in v.pointers:
                address = np.uint64(self.addresses[symbol.name][1] + symbol.offset)
                buffer[at + offset : at + offset + 8] = np.array([address]).view(np.uint8)
        self._buffers = buffers

    # ---- registers

    def constant(self, value: int, width: int) -> int:
        """The number of a register that always holds `value`."""
        self.widths.append(width)
        self.initial[len(self.widths) - 1] = np.array([value], UNSIGNED[width])
        return len(self.widths) - 1

    def hidden(self, width: int) -> int:
        """The number of a new register."""
        self.widths.append(width)
        return len(self.widths) - 1

    def carry(self) -> int:
        """The number of the register that holds the carry flag."""
        if self._carry is None:
            self._carry = self.hidden(1)
        return self._carry

    def special(self, name: str) -> int:
        """The number of the register that holds a special one, such as %tid.x."""
        if name not in self.specials:
            self.specials[name] = self.hidden(special.WIDTHS.get(name, 32))
        return self.specials[name]

    def registers(self, m: "Machine") -> list[np.ndarray]:
        """All registers as a batch begins with them."""
        zeros = {width: np.zeros(1, dtype) for width, dtype in UNSIGNED.items()}
        found = [zeros[width] for width in self.widths]
        for i, value in self.initial.items():
            found[i] = value
        for name, i in self.specials.items():
            found[i] = special.value(m, name)
        return found

    # ---- code

    def _stretches(self) -> dict[int, tuple[list[Step], int, Step | None]]:
        """By the instruction with which it begins: functions to call in turn; the end; and the one there, if it sends lanes on itself."""
        kernel = self.kernel
        decoded = [decode.instruction(self, pc) for pc in range(len(kernel.code))]
        leaders = {0, *kernel.labels.values()} | {pc + 1 for pc, (_, jumps) in enumerate(decoded) if jumps}
        found: dict[int, tuple[list[Step], int, Step | None]] = {}
        retried = {pc for pc, (_, jumps) in enumerate(decoded) if jumps}  # where lanes may have to try again
        for start in leaders | retried:
            steps, pc = [], start
            while pc < len(decoded) and not decoded[pc][1] and (pc == start or pc not in leaders):
                steps.append(decoded[pc][0])
                pc += 1
            jumps = pc < len(decoded) and decoded[pc][1] and (pc == start or pc not in leaders)
            found[start] = steps, pc, decoded[pc][0] if jumps else None
        found[len(decoded)] = [], len(decoded), exit_
        return found

    def location(self, pc: int) -> str:
        code = self.kernel.code
        return self.module.location(code[min(pc, len(code) - 1)].line if code else None)
