"""attention under pytest-benchmark: `pytest benchmarks/bench_attention.py`. Besides the op's own shapes: a Llama block,
whose compiled form should not be slower than eager calls of the same ops."""

import pytest
import torch
from conftest import DEVICE, cases

from cukern.bench import llama_block

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("attention"))
def test_attention(run, dims, provider, backward):
    run("attention", dims, provider, backward)


@pytest.mark.parametrize(("batch", "tokens"), llama_block.SHAPES)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_llama_block(benchmark, way, batch, tokens):
    """Forward and backward of a block with rope, rmsnorm, attention and swiglu. `cukern bench llama_block` measures both in alternation."""
    on_gpu = DEVICE.type == "cuda"
    step = (llama_block.steps(batch, tokens) if on_gpu else llama_block.steps(batch, 32, 4, 2, 16, 96))[way]

    def waited_for():
        step()
        if on_gpu:
            torch.cuda.synchronize()

    waited_for()  # compiles
    benchmark(waited_for)
