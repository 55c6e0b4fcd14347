"""cukern.Muon against torch.optim.Muon, whose products are not batched, and against a float64 iteration."""

import copy

import pytest
import torch
from helpers import gpu

import cukern

if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch.optim.Muon needs torch 2.9", allow_module_level=True)

SIZES = (24, 16), (16, 24), (16, 16), (24, 16), (8, 40), (16, 24)
OPTIONS = {"lr": 0.3, "weight_decay": 0.2, "momentum": 0.8}
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])


def draw(device="cpu", dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(size, device=device, dtype=dtype)) for size in SIZES]


def steps(optimizer, params, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for i, p in enumerate(params):
            p.grad = (
                None
                if i == 2 and count > 2
                else torch.randn(p.shape, generator=generator).to(p.device, p.dtype) * 10.0 ** (i - 3)
            )
        optimizer.step()


def exact(update, count, coefficients=(3.4445, -4.775, 2.0315)):
    """The orthogonalized update in float64, by its singular values: the iteration is a polynomial of each.
    Its scale does not count."""
    u, s, v = torch.linalg.svd(update.double(), full_matrices=False)
    a, b, c = coefficients
    s = s / s.square().sum().sqrt()
    for _ in range(count):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ v


@DEVICES
@pytest.mark.parametrize("adjust", (None, "original", "match_rms_adamw"))
@pytest.mark.parametrize("nesterov", (True, False))
def test_results_are_those_of_torch(device, adjust, nesterov):
    params = draw(device)
    theirs = copy.deepcopy(params)
    ours = cukern.Muon(params, **OPTIONS, nesterov=nesterov, adjust_lr_fn=adjust)
    torchs = torch.optim.Muon(theirs, **OPTIONS, nesterov=nesterov, adjust_lr_fn=adjust)
    steps(ours, params)
    steps(torchs, theirs)
    for p, q in zip(params, theirs, strict=True):
        # bfloat16 in five iterations, lr 0.3
        torch.testing.assert_close(p, q, rtol=0, atol=0.06 if adjust != "match_rms_adamw" else 0.08)
    for p, q in zip(params[:2], theirs[:2], strict=True):
        torch.testing.assert_close(ours.state[p]["momentum_buffer"], torchs.state[q]["momentum_buffer"])


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_one_step_against_float64(dtype):
    """The error is at most twice that of torch's."""
    params = draw(dtype=dtype)
    theirs, before = copy.deepcopy(params), [p.detach().double() for p in params]
    steps(cukern.Muon(params, **OPTIONS), params, 1)
    steps(torch.optim.Muon(theirs, **OPTIONS), theirs, 1)
    for p, q, start in zip(params, theirs, before, strict=True):
        wanted = start * (1 - 0.3 * 0.2) - 0.3 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * exact(p.grad, 5)
        errors = [(t.double() - wanted).norm() for t in (p.detach(), q.detach())]
        assert errors[0] <= 2 * errors[1] + 1e-6 and errors[0] < 0.05 * wanted.norm()


def test_state_and_groups_are_exchanged_with_torch():
    params = draw()
    theirs = copy.deepcopy(params)
    ours = cukern.Muon([{"params": params[:3], "lr": 0.1}, {"params": params[3:], "momentum": 0.5}])
    torchs = torch.optim.Muon([{"params": theirs[:3], "lr": 0.1}, {"params": theirs[3:], "momentum": 0.5}])
    steps(torchs, theirs)
    ours.load_state_dict(torchs.state_dict())
    for p, q in zip(params, theirs, strict=True):
        p.data.copy_(q)
    steps(ours, params, 1, seed=2)
    steps(torchs, theirs, 1, seed=2)
    for p, q in zip(params, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.03)
    assert ours.step(lambda: torch.tensor(3.0)).item() == 3


def test_dtensors_are_those_of_whole_matrices(tmp_path):
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        params = draw()
        divided = [
            torch.nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [Shard(i % 2)]))
            for i, p in enumerate(params)
        ]
        ours, whole = cukern.Muon(divided, **OPTIONS), cukern.Muon(params, **OPTIONS)
        steps(whole, params, 1)
        for d, p in zip(divided, params, strict=True):
            d.grad = distribute_tensor(p.grad, mesh, d.placements)
        ours.step()
        for d, p in zip(divided, params, strict=True):
            torch.testing.assert_close(d.full_tensor(), p.detach(), rtol=0, atol=0)
    finally:
        distributed.destroy_process_group()


def test_what_torch_refuses_is_refused():
    with pytest.raises(ValueError, match="2D"):
        cukern.Muon([torch.nn.Parameter(torch.randn(3))])
    with pytest.raises(ValueError, match="Learning rate"):
        cukern.Muon(draw(), lr=-1)


@gpu
def test_a_captured_step_has_the_same_bits():
    params = draw("cuda")
    theirs = copy.deepcopy(params)
    ours, eager = cukern.Muon(params, **OPTIONS), cukern.Muon(theirs, **OPTIONS)
    for optimizer, those in ((ours, params), (eager, theirs)):
        steps(optimizer, those, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for _ in range(2):
        graph.replay()
        eager.step()
    assert all(torch.equal(p, q) for p, q in zip(params, theirs, strict=True))
