"""adamw under pytest-benchmark: `pytest benchmarks/bench_adamw.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize(("dims", "provider"), cases("adamw"))
def test_adamw(run, dims, provider):
    run("adamw", dims, provider, backward=False)
