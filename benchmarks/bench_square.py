"""square under pytest-benchmark: `pytest benchmarks/bench_square.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("dims", "provider"), cases("square"))
def test_square(run, dims, provider, backward):
    run("square", dims, provider, backward)
