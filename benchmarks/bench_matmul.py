"""matmul and linear under pytest-benchmark: `pytest benchmarks/bench_matmul.py`. Besides the ops' own shapes:
products of transformers in bfloat16 by v7 and by cuBLAS, in the layouts of the forward (NT) and of the
gradients of the input (NN) and of the weight (TN)."""

import itertools

import pytest
import torch
from conftest import cases

import cukern

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
# M is a number of tokens; (N, K): query, key and value, up and down of GPT-2, and a projection, up and down
# of a model of width 4096.
ROWS = 512, 2048, 8192, 32768
WEIGHTS = (2304, 768), (3072, 768), (768, 3072), (4096, 4096), (16384, 4096), (4096, 16384)
SHAPES = [(M, N, K) for M, (N, K) in itertools.product(ROWS, WEIGHTS)] if GPU else [(16, 64, 32)]
# whether A and B are contiguous along K
LAYOUTS = {"NT": (True, True), "NN": (True, False), "TN": (False, False)}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("matmul"))
def test_matmul(run, dims, provider, backward):
    run("matmul", dims, provider, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("linear"))
def test_linear(run, dims, provider, backward):
    run("linear", dims, provider, backward)


def draw(rows: int, K: int, along_k: bool) -> torch.Tensor:
    x = torch.randn(*((rows, K) if along_k else (K, rows)), device=DEVICE).bfloat16()
    return x if along_k else x.t()


@pytest.mark.parametrize("version", ["v7", "cublas"] if GPU else [None])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
def test_transformers(run_call, benchmark, shape, layout, version):
    M, N, K = shape
    a, b = draw(M, K, LAYOUTS[layout][0]), draw(N, K, LAYOUTS[layout][1]).t()
    benchmark.group = f"{M}x{N}x{K} {layout} bfloat16"
    run_call(lambda: cukern.matmul(a, b, version=version), 2 * (M * K + K * N + M * N), 2 * M * N * K)
