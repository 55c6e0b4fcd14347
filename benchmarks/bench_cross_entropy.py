"""cross_entropy under pytest-benchmark: `pytest benchmarks/bench_cross_entropy.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("cross_entropy"))
def test_cross_entropy(run, dims, provider, backward):
    run("cross_entropy", dims, provider, backward)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("linear_cross_entropy"))
def test_linear_cross_entropy(run, dims, provider, backward):
    run("linear_cross_entropy", dims, provider, backward)
