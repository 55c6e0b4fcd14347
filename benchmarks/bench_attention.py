"""attention under pytest-benchmark: `pytest benchmarks/bench_attention.py`. Besides the op's own shapes: a
Llama block, whose compiled form should not be slower than eager calls of the same ops."""

import pytest
from conftest import GPU, cases

from cukern.bench import llama_block

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("attention"))
def test_attention(run, dims, provider, backward):
    run("attention", dims, provider, backward)


@pytest.mark.parametrize(("batch", "tokens"), llama_block.SHAPES)
@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_llama_block(run_call, way, batch, tokens):
    """Forward and backward of a block with rope, rmsnorm, attention and swiglu. `cukern bench llama_block`
    measures both in alternation."""
    sizes = (tokens,) if GPU else (32, 4, 2, 16, 96)
    step = llama_block.steps(batch, *sizes)[way]
    results = step()  # the output, and the gradients of x and of the weights, which are as large as these
    run_call(step, 2 * sum(t.nbytes for t in results), dtype=results[0].dtype)
