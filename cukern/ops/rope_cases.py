from cukern.ops.rope import rope, reference
from cukern.ops.rope_plan import VERSIONS
from cukern.runtime import checks
from cukern.runtime.registry import Cost, Op, register
import torch


def _tables(n, w, dtype, device):
    a = torch.rand(n, w, device=device) * 6
    return a.cos(), a.sin()


def _make(dims, dtype, device):
    b, s, h, d = dims
    return torch.randn(dims, dtype=dtype, device=device), *_tables(s, d // 2, dtype, device)


register(
    Op(
        name="rope",
        stem="rope",
        function=rope,
        reference=reference,
        versions=VERSIONS,
        dtypes=checks.FLOATS,
        dims="B S H D",
        check_dims=((1, 3, 2, 4),),
        sim_dims=((1, 3, 2, 4),),
        bench_dims=((1, 3, 2, 4),),
        make=_make,
        inputs=("x", "cos", "sin"),
        cost=lambda d, i: {"fwd": Cost(1, 1), "bwd": Cost(1, 1)},
        bound="memory",
    )
)
