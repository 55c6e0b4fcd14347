"""Calls of functions that are not inlined, and recursion.

The code of all functions follows that of the kernel, with registers of its own. Arguments pass through bytes
per lane: the caller's variables are laid out one after the other, as the parameters of the function are. A
recursive function's registers are saved at a call and restored at the return. Local arrays of a recursive
function, and uninitialized arguments, are not simulated so: the first raise NotSimulated, and the second
count as initialized."""

import numpy as np

from cukern.sim.faults import Fault
from cukern.sim.machine.batch import Array, Batch, Group
from cukern.sim.machine.program import Program

_DEEPEST = 200  # calls inside of calls


class Calls:
    """The calls that the lanes of a batch are in."""

    def __init__(self, m: Batch):
        self.m = m
        self.program: Program = m.program
        self.depth = np.zeros(m.lanes, np.int64)
        self.returns: list[Array] = []  # by depth: the instruction at which a lane continues
        self.saved: dict[tuple[int, int], Array] = {}  # depth and register -> values
        self.saved_memory: dict[tuple[int, str], Array] = {}  # depth and function -> its parameters
        self.arguments = np.zeros((m.lanes, self.program.arguments_size), np.uint8)
        self.result = np.zeros((m.lanes, self.program.result_size), np.uint8)
        self.parameters = {
            name: np.zeros((m.lanes, f.params_size), np.uint8) for name, f in self.program.functions.items()
        }

    def area(self, name: str) -> Array:
        """The bytes in which a variable of a call lives: "" for the arguments of the next call, "return" for
        a result, or a function."""
        return self.arguments if name == "" else self.result if name == "return" else self.parameters[name]

    def call(self, group: Group, caller: str, name: str) -> None:
        """These lanes call a function."""
        m, function, lanes = self.m, self.program.functions[name], group.lanes
        for depth in np.unique(self.depth[lanes]).tolist():
            some = lanes[self.depth[lanes] == depth]
            if depth >= _DEEPEST:
                raise m.not_simulated(f"calls nested more than {_DEEPEST} deep")
            if depth == len(self.returns):
                self.returns.append(np.zeros(m.lanes, np.int64))
            self.returns[depth][some] = m.pc
            if caller in self.program.recursive:
                if caller in self.program.with_locals:
                    raise m.not_simulated("recursion of a function with a local array")
                self._save(some, depth, caller)
        self.depth[lanes] += 1
        self.parameters[name][lanes, : function.params_size] = self.arguments[lanes, : function.params_size]
        m.go(function.start, group)

    def _save(self, lanes: Array, depth: int, caller: str) -> None:
        m = self.m
        for register in self.program.functions[caller].registers:
            values = m.regs[register]
            kept = self.saved.setdefault((depth, register), np.zeros(m.lanes, values.dtype))
            kept[lanes] = values if len(values) == 1 else values[lanes]
        memory = self.saved_memory.setdefault((depth, caller), np.zeros_like(self.parameters[caller]))
        memory[lanes] = self.parameters[caller][lanes]

    def leave(self, group: Group) -> Group | None:
        """These lanes return. Returns those that are in no call: they exit."""
        m, lanes = self.m, group.lanes
        depths = self.depth[lanes] - 1
        for depth in np.unique(depths[depths >= 0]).tolist():
            some = lanes[depths == depth]
            self.depth[some] = depth
            for pc, back in m.groups(some, self.returns[depth][some]):
                caller = self.program.function_at(pc)
                if caller in self.program.recursive:
                    for register in self.program.functions[caller].registers:
                        m.put(back, register, self.saved[depth, register][back.index])
                    self.parameters[caller][back.lanes] = self.saved_memory[depth, caller][back.lanes]
                m.go(pc + 1, back)
        return None if (depths >= 0).all() else m.group(lanes[depths < 0])

    def target(self, group: Group, addresses: Array) -> list[tuple[str, Group]]:
        """The functions that these addresses point to, with their lanes."""
        m = self.m
        found = []
        for address in np.unique(addresses).tolist():
            lanes = group.lanes[np.broadcast_to(addresses, group.lanes.shape) == address]
            name = self.program.function_names.get(int(address))
            if name is None:
                raise m.fault(Fault, lanes[0], f"calls the address {address:#x}, which is no function")
            if name not in self.program.functions:
                raise m.not_simulated(f"call of {name}")
            found.append((name, m.group(lanes)))
        return found
