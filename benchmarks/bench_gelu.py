"""gelu, with a bias too, swiglu and geglu under pytest-benchmark: `pytest benchmarks/bench_gelu.py`."""

import pytest
from conftest import family

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "dims", "provider"), family("gelu"))
def test_gelu(run, name, dims, provider, backward):
    run(name, dims, provider, backward)
