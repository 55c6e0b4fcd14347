"""CompiledKernel: one entry of PTX or of a cubin."""

from cukern.runtime.compile.compiler import Cubin, Ptx, Report, SetupError
from cukern.runtime.compile.machine_code import MachineCode, sized_params
from cukern.runtime.compile.signature import Param
from cukern.runtime.launch import backend, driver
from cukern.runtime.launch.kernel import Kernel


class CompiledKernel(Kernel):
    """A Kernel of code that is compiled already. A GPU's driver compiles PTX for the GPU."""

    source: MachineCode  # type: ignore[assignment]

    def _text(self) -> str:
        return "" if self.source.is_cubin else ", ".join(map(str, self.source.params(self.name)))

    def _compiled(self, device: int) -> Cubin | Ptx:
        if device != backend.SIMULATED:
            return self.compile(self.source.target)
        if self.source.is_cubin:
            raise SetupError(
                f"{self.source.path} is machine code, which only a GPU runs; the simulator takes .ptx"
            )
        return Ptx(self.source.text, self.name)

    def compile(self, arch: str) -> Cubin:
        """The code as it was given. Raises ValueError for another architecture than its target."""
        if arch != self.source.target:
            raise ValueError(f"{self.source.path} is compiled for {self.source.target}, not for {arch}")
        return Cubin(self.source.code, self.name, arch, Report(0, 0, 0, 0, 0))

    def params_on(self, device: int) -> tuple[Param, ...]:
        if device not in self._params:
            code = self._compiled(device)
            self._params[device] = (
                sized_params(driver.layout_of(self.name, code, device))
                if isinstance(code, Cubin) and self.source.is_cubin
                else self.source.params(self.name)
            )
        return self._params[device]
