"""Correct kernels of the simulator's corpus, each with small edits that plant a bug. The kernels are in
tests/sim/corpus/."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import cukern
from cukern import sim

# what is replaced, by what, the fault, its message
Bug = tuple[str, str, type[sim.Fault]] | tuple[str, str, type[sim.Fault], str]


@dataclass
class Kernel:
    """A kernel `k`. If `text` is only a body, it is that of `void k(int* out, const int* x, int n)`, with t
    and i as thread and element."""

    id: str
    text: str
    expected: Callable[..., torch.Tensor]  # the first argument after the launch, from the others before
    bugs: Sequence[Bug] = ()
    # if not given: out and x have an element for each thread, n is their number
    arguments: Callable[[], list[Any]] | None = None
    grid: Any = 1
    block: Any = 64
    shared: int = 0
    close: bool = False  # floats: not the same bits

    def source(self, bug: Bug | None = None) -> str:
        text = self.text
        if "__global__" not in text:
            start = "int t = threadIdx.x, i = blockIdx.x * blockDim.x + t;"
            text = f"\n__global__ void k(int* out, const int* x, int n) {{\n    {start}{text}}}\n"
        if bug is not None:
            assert bug[0] in text, f"{self.id}: no {bug[0]!r}"
            text = text.replace(bug[0], bug[1], 1)
        return text

    def run(self, text: str) -> tuple[torch.Tensor, list[Any]]:
        """The first argument after a launch, and the others before."""
        n = self.grid * self.block if self.arguments is None else 0
        arguments = [ints(n), data(n), n] if self.arguments is None else self.arguments()
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments[1:]]
        with cukern.backend("sim"):
            cukern.compile(text, "k")(*arguments, grid=self.grid, block=self.block, shared=self.shared)
        first = arguments[0].tensor if hasattr(arguments[0], "tensor") else arguments[0]
        return first, before


def ints(n: int) -> torch.Tensor:
    return torch.full((n,), -1, dtype=torch.int32)


def zeros(n: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(n, dtype=dtype)


def data(n: int) -> torch.Tensor:
    """Integers in 0..100, in no order."""
    return (torch.arange(n) * 37 % 101).to(torch.int32)


def total(x: torch.Tensor) -> torch.Tensor:
    return x.sum(dtype=torch.int32)[None]
