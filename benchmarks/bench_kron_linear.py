"""kron_linear under pytest-benchmark: `pytest benchmarks/bench_kron_linear.py`. Besides the op's own shapes:
a LoKr layer and a FlatQuant rotation in bfloat16 beside the product matrix formed by torch.kron."""

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


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("kron_linear_rectangular"))
def test_factors_that_widen_and_shrink(run, dims, provider, backward):
    run("kron_linear_rectangular", dims, provider, backward)


def draw(*shape: int) -> torch.Tensor:
    return (torch.randn(*shape, device=DEVICE) * shape[-1] ** -0.5).to(torch.bfloat16).requires_grad_()


def measure(run_call: Callable, function: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """Forward and backward. Bytes: each input, the output and their gradients once."""
    y = function()
    dy = torch.randn_like(y)
    run_call(lambda: torch.autograd.grad(function(), inputs, dy), 2 * sum(t.nbytes for t in (y, *inputs)))


@pytest.mark.parametrize("way", ["cukern", "materialised"])
def test_lokr(run_call, way):
    x, w1, w2, base = draw(ROWS, 3840), draw(16, 16), draw(240, 240), draw(ROWS, 3840)
    ways = {
        "cukern": lambda: cukern.lokr_linear(x, w1, w2, scale=0.5, residual=base),
        "materialised": lambda: base + 0.5 * (x @ torch.kron(w1, w2).t()),
    }
    measure(run_call, ways[way], [x, w1, w2, base])


@pytest.mark.parametrize("way", ["cukern", "materialised"])
@pytest.mark.parametrize("sizes", [(64, 64), (112, 128)], ids=str)
def test_flatquant_rotation(run_call, sizes, way):
    x, ws = draw(ROWS, sizes[0] * sizes[1]), [draw(n, n) for n in sizes]
    ways = {"cukern": lambda: cukern.kron_linear(x, ws), "materialised": lambda: x @ torch.kron(*ws)}
    measure(run_call, ways[way], [x, *ws])
