"""rope under pytest-benchmark: `pytest benchmarks/bench_rope.py`."""

import pytest
from conftest import family

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("name", "dims", "provider"), family("rope"))
def test_rope(run, name, dims, provider, backward):
    run(name, dims, provider, backward)
