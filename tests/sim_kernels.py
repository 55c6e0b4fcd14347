"""Small kernels in the simulator, for the tests of its machine: compile a text, launch it on CPU tensors,
find a marked line."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers import gpu

import cukern
from cukern import sim
from cukern.runtime.compile import signature
from cukern.runtime.compile.compiler import compile_ptx
from cukern.runtime.compile.sources import Source

# the device of a launch's tensors: in the simulator, and on a GPU
PLACES = ["cpu", pytest.param("cuda", marks=gpu)]


def on(device: str) -> contextlib.AbstractContextManager[Any]:
    """Launches on tensors of this device: in the simulator for the CPU. A GPU must be of compute capability
    9.0."""
    if device == "cpu":
        return cukern.backend("sim")
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs compute capability 9.0")
    return contextlib.nullcontext()


def load(text: str, name: str | None = None) -> sim.Launch:
    source = Source.from_text(text)
    name = name or next(iter(source.kernels))
    ptx = compile_ptx(source, name)
    text = source.kernels.get(name.partition("<")[0], "")
    return sim.load(name, ptx, signature.params(name, ptx.signature, text, lambda: (ptx.text, ptx.symbol)))


def simulate(
    text: str, *args: Any, grid: Any = 1, block: Any = 32, shared: int = 0, name: str | None = None
) -> None:
    """Launch the first kernel of a text, or the one named, on tensors and numbers. It may touch the tensors,
    and nothing else."""
    with sim.memory.scope([a for a in args if isinstance(a, torch.Tensor)]):
        launch(load(text, name), *args, grid=grid, block=block, shared=shared)


def launch(kernel: sim.Launch, *args: Any, grid: Any = 1, block: Any = 32, shared: int = 0) -> None:
    kernel(
        _dims(grid), _dims(block), shared, *(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)
    )


def _dims(n: int | Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*((n,) if isinstance(n, int) else n), 1, 1)[:3]
    return x, y, z


def line_of(text: str, mark: str) -> int:
    """The number of the line with the comment `// mark`."""
    (line,) = (i for i, content in enumerate(text.split("\n"), 1) if content.rstrip().endswith(f"// {mark}"))
    return line
