"""softmax and log_softmax under pytest-benchmark: `pytest benchmarks/bench_softmax.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("softmax"))
def test_softmax(run, dims, provider, backward):
    run("softmax", dims, provider, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("log_softmax"))
def test_log_softmax(run, dims, provider, backward):
    run("log_softmax", dims, provider, backward)
