"""Kernels with a bug, for the tests of what the simulator says of them, each with its mended twin."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from sim_kernels import line_of, simulate

from cukern import sim


@dataclass
class Case:
    """A kernel with a bug: `[[wrong => right]]` in its text. The line where it shows ends in `// here`, the
    other side's in `// there`."""

    id: str
    fault: type[sim.Fault]
    expected: Callable[..., torch.Tensor]  # the first argument, after the mended kernel
    says: str  # a pattern of the message; {there} is that line
    text: str  # of the file, or of the body of `void k(int* out, const int* x)`
    # if not given, `out` and `x` have an element for each thread of a block
    arguments: Callable[[], list] | None = None
    grid: int = 1
    block: int = 64
    shared: tuple[int, int] = (0, 0)  # wrong and right
    block_index: int | None = 0
    thread: int | None = 0

    def source(self, wrong: bool) -> str:
        text = (
            self.text
            if "__global__" in self.text
            else f"\n__global__ void k(int* out, const int* x) {{{self.text}}}\n"
        )
        return re.sub(r"\[\[(.*?) ?=> ?(.*?)\]\]", r"\1" if wrong else r"\2", text)

    def run(self, wrong: bool) -> list:
        arguments = self.arguments() if self.arguments else [ints(self.block), iota(self.block)]
        simulate(
            self.source(wrong), *arguments, grid=self.grid, block=self.block, shared=self.shared[not wrong]
        )
        return arguments

    def check_report(self) -> None:
        """The wrong kernel meets the fault, and its message says where."""
        text = self.source(wrong=True)
        with pytest.raises(sim.Fault) as caught:
            self.run(wrong=True)
        fault = caught.value
        assert type(fault) is self.fault, fault
        there = _place(text, "there") if "// there" in text else r"<cukern.compile \w+>:\d+"
        assert re.search(self.says.replace("{there}", there), str(fault)), fault
        if "// here" in text:
            assert re.fullmatch(_place(text, "here"), fault.where.location), fault
        assert str(fault).startswith(
            f"k, block {fault.where.block}, thread {fault.where.thread}, {fault.where.location}: "
        )
        assert fault.where.kernel == "k"
        assert self.block_index is None or fault.where.block == (self.block_index, 0, 0), fault
        assert self.thread is None or fault.where.thread == (self.thread, 0, 0), fault

    def check_mended(self) -> None:
        """The right one computes what it should, and meets none."""
        out, *inputs = self.run(wrong=False)
        assert out.tolist() == self.expected(*inputs).tolist()


def _place(text: str, mark: str) -> str:
    """A pattern of the location of a marked line, which may call a helper of a header there."""
    return rf"<cukern.compile \w+>:{line_of(text, mark)}(?: \(in \w+\.cuh:\d+\))?"


def ints(n: int) -> torch.Tensor:
    return torch.full((n,), -1, dtype=torch.int32)


def iota(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)
