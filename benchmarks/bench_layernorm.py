"""layernorm, with and without a residual, and rmsnorm under pytest-benchmark: `pytest benchmarks/bench_layernorm.py`."""

import pytest
from conftest import cases

from cukern.runtime.registry import OPS

pytestmark = pytest.mark.filterwarnings("default")  # peers may warn
WAYS = [name for name, op in OPS.items() if op.stem == "layernorm"]


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    ("name", "dims", "provider"), [pytest.param(n, *c.values, marks=c.marks, id=f"{n}-{c.id}") for n in WAYS for c in cases(n)]
)
def test_layernorm(run, name, dims, provider, backward):
    run(name, dims, provider, backward)
