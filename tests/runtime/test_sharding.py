"""Every op on DTensors in two gloo processes, in the simulator, against one process."""

import traceback

import pytest
import torch
from helpers import OLD_TORCH, kernels, own_names, run_two

from cukern.runtime.registry import CASES

pytestmark = [
    kernels,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed"),
]

SIZES = {
    "attention": (2, 4, 8),
    "matmul": (2, 6, 8),
    "linear": (2, 6, 8),
    "linear_cross_entropy": (2, 6, 8),
    "kron_linear": (2, 4, 6),
}
WRITTEN = {"rope_in_place"}  # writes its inputs: they must keep their placement
NAMES = [
    *(name for name in own_names() if CASES[name].differentiable),
    "rope_qk",
    "rope_in_place",
    "layernorm_residual",
    "gelu_bias",
]


def results(case, inputs, douts=None):
    """Outputs and gradients; whole tensors."""
    leaves = [
        x.detach().clone().requires_grad_(case.has_gradient(n, x))
        for n, x in zip(case.names(inputs), inputs, strict=True)
    ]
    given = [x * 1 if n in case.in_place else x for n, x in zip(case.names(inputs), leaves, strict=True)]
    outs = case.call(*given)
    outs = (outs,) if isinstance(outs, torch.Tensor) else tuple(outs)
    wanted = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(sum((o.float() ** 2).sum() for o in outs), wanted)
    return [getattr(t, "full_tensor", lambda t=t: t)().detach() for t in (*outs, *found)]


def main(rank, store):
    import torch.distributed as dist
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    import cukern

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, failed = init_device_mesh("cpu", (2,)), []
    for name in NAMES:
        case = CASES[name]
        torch.manual_seed(0)
        dims = SIZES.get(name, (2, *case.sim_dims[-1][1:]))
        inputs = case.make(dims, torch.float16 if case.op.stem == "attention" else torch.float32, "cpu")
        batch = [Shard(0) if x.ndim and x.shape[0] == inputs[0].shape[0] else Replicate() for x in inputs]
        last = [Shard(inputs[0].ndim - 1), *[Replicate()] * (len(inputs) - 1)]
        with cukern.backend("sim"):
            expected = results(case, inputs)
            for kind, placements in {
                "batch": batch,
                "replicated": [Replicate()] * len(inputs),
                "last": last,
            }.items():
                if kind == "last" and name in WRITTEN:
                    continue
                try:
                    sharded = [
                        distribute_tensor(x, mesh, [p]) for x, p in zip(inputs, placements, strict=True)
                    ]
                    for ours, theirs in zip(results(case, sharded), expected, strict=True):
                        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
                except Exception as error:
                    where = [
                        f"{f.filename.split('/')[-1]}:{f.lineno}"
                        for f in traceback.extract_tb(error.__traceback__)
                    ][:9]
                    failed.append(f"{name} {kind}: {type(error).__name__} {str(error)[:300]} {where}")
    dist.destroy_process_group()
    assert not failed, "\n".join(failed)


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 has no rules of DTensor for detach_ and for some views")
def test_every_op_in_two_processes(tmp_path):
    run_two(__file__, tmp_path, timeout=400)
