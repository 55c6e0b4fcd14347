"""attention under pytest-benchmark: `pytest benchmarks/bench_attention.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("attention"))
def test_attention(run, dims, provider, backward):
    run("attention", dims, provider, backward)
