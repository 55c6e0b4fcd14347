"""A kernel laid out for execution: the addresses of its variables, and the numbers of its registers."""

import numpy as np

from cukern.runtime.compile.forks import cached_property
from cukern.runtime.compile.machine_code import source_name
from cukern.sim.memory.regions import Region
from cukern.sim.numerics.integers import UNSIGNED, Array
from cukern.sim.ptx.link import link
from cukern.sim.ptx.module import Module, Register, Variable

MODULE_SPACES = ("global", "const")
# the others have 32 bits
SPECIAL_WIDTHS = {"%clock64": 64, "%globaltimer": 64, "%gridid": 64, "%is_explicit_cluster": 1}


PARAMETER = "%param+"  # and an offset: stands for the address of a parameter


FUNCTIONS = 3 << 56  # the address of the first function


class Program:
    """One kernel of a module. Its __device__ and __constant__ variables keep their values from launch to
    launch."""

    def __init__(self, module: Module, symbol: str):
        linked = link(module, module.kernels[symbol])
        self.module, self.kernel = module, linked.kernel
        self.functions, self.slots, self.recursive = linked.functions, linked.slots, linked.recursive
        self.with_locals = {
            name for name, f in module.functions.items() if any(v.space == "local" for v in f.variables)
        }
        self.arguments_size, self.result_size = linked.arguments_size, linked.result_size
        self.function_names = {FUNCTIONS + 16 * i: name for i, name in enumerate(module.declared)}
        self.widths = list(self.kernel.widths)
        self.constants: dict[int, Array] = {}  # register number -> value
        self.specials: dict[str, int] = {}  # special register's name -> register number
        self.addresses: dict[str, tuple[str, int]] = {}  # variable's name -> space and address
        # address register and size of an access -> offsets
        self.offsets: dict[tuple[int, int], set[int]] = {}
        self.undefined: list[int] = []  # registers that the kernel may read before it writes them
        # parameter's name -> offset; name of a call's argument -> register number
        self.params: dict[str, int] = {}
        self._lay_out_variables()

    # ---- variables

    def _lay_out_variables(self) -> None:
        kernel, everything = self.kernel, self.module.variables + self.kernel.variables
        self.addresses |= {name: ("function", address) for address, name in self.function_names.items()}
        at = 0
        for param in kernel.params:
            at += -at % param.align
            self.params[param.name] = at
            at += param.size
        self.shared_size, self.shared_names = self._lay_out(
            [v for v in everything if v.space == "shared" and v.size]
        )
        self.local_size, self.local_names = self._lay_out([v for v in everything if v.space == "local"])
        dynamic = [v for v in everything if v.space == "shared" and not v.size]
        self.dynamic_start = self.shared_size + -self.shared_size % max([16, *(v.align for v in dynamic)])
        for v in dynamic:
            self.addresses[v.name] = "shared", self.dynamic_start
            self.shared_names.append((self.dynamic_start, source_name(v.name)))
        self._lay_out_module([v for v in everything if v.space in MODULE_SPACES])

    def _lay_out(self, variables: list[Variable]) -> tuple[int, list[tuple[int, str]]]:
        at, names = 0, []
        for v in variables:
            at += -at % v.align
            self.addresses[v.name] = v.space, at
            names.append((at, source_name(v.name)))
            at += v.size
        return at, names

    def _lay_out_module(self, variables: list[Variable]) -> None:
        self.regions: list[Region] = []
        self.memory: dict[str, Array] = {}  # of these variables, by name
        for v in variables:
            buffer = np.zeros(v.size + 16, np.uint8)
            start = buffer.ctypes.data + -buffer.ctypes.data % 16
            self.memory[v.name] = buffer[start - buffer.ctypes.data :][: v.size]
            self.addresses[v.name] = v.space, start
            name = f"the variable {source_name(v.name)}"
            self.regions.append(Region(start, start + v.size, name, writable=v.space == "global"))
        for v in variables:
            memory = self.memory[v.name]
            memory[: len(v.data)] = np.frombuffer(v.data, np.uint8)
            for offset, symbol in v.pointers:
                address = np.uint64(self.addresses[symbol.name][1] + symbol.offset)
                memory[offset : offset + 8] = np.array([address]).view(np.uint8)

    # ---- registers

    def hidden(self, width: int) -> int:
        """The number of a new register."""
        self.widths.append(width)
        return len(self.widths) - 1

    def constant(self, value: int, width: int) -> int:
        """The number of a register that always holds `value`."""
        number = self.hidden(width)
        self.constants[number] = np.array([value], UNSIGNED[width])
        return number

    @cached_property
    def carry(self) -> int:
        """The number of the register that holds the carry flag."""
        return self.hidden(1)

    @cached_property
    def sink(self) -> Register:
        """The register `_`, which nothing reads."""
        return Register(self.hidden(16), 16)

    def special(self, name: str) -> int:
        """The number of the register that holds a special register such as %tid.x."""
        if name not in self.specials:
            self.specials[name] = self.hidden(
                64 if name.startswith(PARAMETER) else SPECIAL_WIDTHS.get(name, 32)
            )
        return self.specials[name]

    def function_at(self, pc: int) -> str:
        """The function that an instruction belongs to; "" for the kernel."""
        return next((name for name, f in self.functions.items() if f.start <= pc < f.end), "")

    def location(self, pc: int) -> str:
        code = self.kernel.code
        return self.module.location(code[min(pc, len(code) - 1)].line if code else None)
