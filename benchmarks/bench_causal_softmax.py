"""causal_softmax under pytest-benchmark: `pytest benchmarks/bench_causal_softmax.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("causal_softmax"))
def test_causal_softmax(run, dims, provider, backward):
    run("causal_softmax", dims, provider, backward)
