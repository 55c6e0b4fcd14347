"""matmul and linear under pytest-benchmark: `pytest benchmarks/bench_matmul.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("matmul"))
def test_matmul(run, dims, provider, backward):
    run("matmul", dims, provider, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("linear"))
def test_linear(run, dims, provider, backward):
    run("linear", dims, provider, backward)
