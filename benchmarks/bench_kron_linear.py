"""kron_linear under pytest-benchmark: `pytest benchmarks/bench_kron_linear.py`. Besides the op's own shapes: a LoKr layer and a FlatQuant
rotation in bfloat16 beside the product matrix formed by torch.kron, and factors that shrink or widen the array in the bad order."""

from collections.abc import Callable

import pytest
import torch
from conftest import cases

import cukern

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 4096 if DEVICE == "cuda" else 16  # of tokens


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("kron_linear"))
def test_kron_linear(run, dims, provider, backward):
    run("kron_linear", dims, provider, backward)


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).to(dtype).requires_grad_()


def measure(benchmark: Callable, function: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Forward and backward."""
    dy = torch.randn_like(function())

    def step() -> None:
        torch.autograd.grad(function(), inputs, dy)
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark(step)


@pytest.mark.parametrize("way", ["cukern", "materialised"])
def test_lokr(benchmark, way):
    x, w1, w2, base = draw(ROWS, 3840), draw(16, 16), draw(240, 240), draw(ROWS, 3840)
    ways = {
        "cukern": lambda: cukern.lokr_linear(x, w1, w2, scale=0.5, residual=base),
        "materialised": lambda: base + 0.5 * (x @ torch.kron(w1, w2).t()),
    }
    measure(benchmark, ways[way], [x, w1, w2, base])


@pytest.mark.parametrize("way", ["cukern", "materialised"])
@pytest.mark.parametrize("sizes", [(64, 64), (112, 128)], ids=str)
def test_flatquant_rotation(benchmark, sizes, way):
    x, ws = draw(ROWS, sizes[0] * sizes[1]), [draw(n, n) for n in sizes]
    ways = {"cukern": lambda: cukern.kron_linear(x, ws), "materialised": lambda: x @ torch.kron(*ws)}
    measure(benchmark, ways[way], [x, *ws])


@pytest.mark.parametrize("way", ["cukern", "last first"])
def test_narrow_and_wide(benchmark, way):
    """The last factor widens the array: whoever takes it first handles 16 times as much."""
    x, ws = draw(ROWS, 1024, dtype=torch.float32), [draw(128, 8, dtype=torch.float32), draw(8, 128, dtype=torch.float32)]
    measure(benchmark, lambda: cukern.kron_linear(x, ws, version=None if way == "cukern" else "v2"), [x, *ws])
