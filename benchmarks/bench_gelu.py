"""gelu, with a bias too, swiglu and geglu under pytest-benchmark: `pytest benchmarks/bench_gelu.py`."""

import pytest
from conftest import cases

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn
CASES = [
    pytest.param(op, *case.values, id=f"{op}-{case.id}")
    for op in ("gelu", "gelu_tanh", "gelu_bias", "swiglu", "geglu")
    for case in cases(op)
]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("op", "dims", "provider"), CASES)
def test_gelu(run, op, dims, provider, backward):
    run(op, dims, provider, backward)
