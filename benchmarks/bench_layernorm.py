"""layernorm, with and without a residual, and rmsnorm under pytest-benchmark: `pytest
benchmarks/bench_layernorm.py`."""

import pytest
from conftest import family

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "dims", "provider"), family("layernorm"))
def test_layernorm(run, name, dims, provider, backward):
    run(name, dims, provider, backward)
