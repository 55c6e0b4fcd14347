"""embedding under pytest-benchmark: `pytest benchmarks/bench_embedding.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("embedding"))
def test_embedding(run, dims, provider, backward):
    run("embedding", dims, provider, backward)
