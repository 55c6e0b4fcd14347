"""attention under pytest-benchmark: `pytest benchmarks/bench_attention.py`. Besides the op's own shapes: the Llama block of examples/. Its
compiled form should not be slower than eager calls of the same ops."""

import runpy
from pathlib import Path

import pytest
import torch
from conftest import DEVICE, cases

import cukern

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("attention"))
def test_attention(run, dims, provider, backward):
    run("attention", dims, provider, backward)


@pytest.mark.parametrize("way", ["eager", "compiled", "torch compiled"])
def test_llama_block(benchmark, way):
    """Forward and backward of a block with rope, rmsnorm, attention and swiglu. "torch compiled": torch's operations only."""
    on_gpu = DEVICE.type == "cuda"
    width, tokens, dtype = (2048, 2048, torch.bfloat16) if on_gpu else (256, 32, torch.float32)
    example = runpy.run_path(str(Path(__file__).parents[1] / "examples/llama_block.py"))
    block = example["Block"](width, width // 64, width // 256, width * 11 // 4, plain=way == "torch compiled").to(DEVICE, dtype)
    call = block if way == "eager" else torch.compile(block, fullgraph=True, backend="inductor" if on_gpu else "aot_eager")
    x, dy = (torch.randn(2, tokens, width, device=DEVICE, dtype=dtype) for _ in range(2))
    tables = cukern.rope_tables(tokens, 64, device=DEVICE)

    def step():
        torch.autograd.grad(call(x, *tables), list(block.parameters()), dy)
        if on_gpu:
            torch.cuda.synchronize()

    step()  # compiles
    benchmark(step)
