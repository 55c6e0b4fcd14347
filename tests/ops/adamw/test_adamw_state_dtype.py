"""AdamW with moments in bfloat16: unbiased rounding, its random numbers, long runs, checkpoints, options."""

import copy
import math

import pytest
import torch
from helpers import DEVICE, kernels, same_bits
from test_adamw import PLACES, doubles, draw_gradients, inf, mesh, parameters, philox  # noqa: F401

import cukern

BF16 = torch.bfloat16
MOMENTS = "exp_avg", "exp_avg_sq"


def moments(optimizer, p):
    return [optimizer.state[p][name] for name in MOMENTS]


@PLACES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_rounding_is_unbiased_and_independent(device, dtype):
    """The moments, 1, grow by 0.3125 and 0.625 of the distance to the next bfloat16, exactly in float32."""
    n, on_kernels = 8192 + 5, cukern.runtime.launch.backend.simulating() or device == "cuda"
    randomly = dtype == BF16 and on_kernels
    p = torch.ones(n, device=device, dtype=dtype)
    p.grad = torch.full_like(p, 1.5)
    first = torch.ones(3, device=device)
    first.grad = torch.ones_like(first)
    lr, betas, seed = 1.5e-4, (1 - 5 / 1024, 1 - 1 / 256), (5 << 32) + 3
    options = {"stochastic_rounding": randomly, "state_dtype": BF16, "seed": seed}
    optimizer = cukern.AdamW([first, p], lr, betas, 0.0, 0.0, **options)
    ones = {name: torch.ones(n, device=device, dtype=BF16) for name in MOMENTS}
    optimizer.state[p] = {"step": torch.zeros((), device=device), **ones}
    optimizer.step()
    ups = [t > 1 for t in moments(optimizer, p)] + ([p < 1] if randomly else [])
    for up, chance in zip(ups, (0.3125, 0.625), strict=False):
        assert abs(up.double().mean().item() - chance) < 4 * math.sqrt(0.25 / n)
    for i, a in enumerate(ups):
        assert 0.2 < a.double().mean().item() < 0.8
        for b in ups[:i]:
            assert abs(torch.corrcoef(torch.stack([a, b]).double())[0, 1].item()) < 4 / math.sqrt(n)
    counters = torch.arange(-(-n // 4)) - 2**63  # with the highest bit
    words = philox(counters, 1, 1, seed).view(-1)[:n]
    bits = [word + (part << 12) >> 16 for word, part in ((words & 0xFFFF, 5), (words >> 16, 10))]
    assert all(torch.equal(up.cpu(), bit == 1) for up, bit in zip(ups, bits, strict=False))


@PLACES
def test_small_changes_are_not_lost(device):
    """beta2 = 0.999 adds an eighth of the distance of two bfloat16 to v. Nearest rounding never changes
    it."""
    n, steps = 4096, 30
    p = torch.zeros(n, device=device)
    p.grad = torch.ones(n, device=device)
    optimizer = cukern.AdamW([p], state_dtype=BF16)
    half = torch.full((n,), 0.5, device=device, dtype=BF16)
    optimizer.state[p] = {"step": torch.zeros((), device=device), "exp_avg": half.clone(), "exp_avg_sq": half}
    for _ in range(steps):
        optimizer.step()
    found = optimizer.state[p]["exp_avg_sq"].double()
    deviation = 2**-8 / 2 * math.sqrt(steps)  # at most
    assert abs(found.mean().item() - (1 - 0.5 * 0.999**steps)) < 4 * deviation / math.sqrt(n)
    assert found.std().item() < deviation


@PLACES
@pytest.mark.parametrize("dtype, master", [(torch.float32, False), (BF16, True)])
def test_a_run_of_30_steps(device, dtype, master):
    """The error is at most 1 % of the longest way, 30 steps of lr: moments err by a few parts of 2^-8."""
    params, lr = parameters(device, dtype, shapes=((15, 17), (0, 4), (3,))), 2**-7
    params[0].data = params[0].data.t().contiguous().t()
    exact = doubles(params)
    ours = cukern.AdamW(params, lr, max_norm=3.0, master_weights=master, state_dtype=BF16)
    theirs = torch.optim.AdamW(exact, lr)
    for _ in range(30):
        draw_gradients(params, exact)
        torch.nn.utils.clip_grad_norm_(exact, 3.0)
        ours.step()
        theirs.step()
    for p, q in zip(params, exact, strict=True):
        assert [t.dtype for t in moments(ours, p)] == [BF16, BF16]
        assert all(t.stride() == p.stride() for t in moments(ours, p))
        found = ours.state[p]["master"] if master else p.detach()
        error = (found.double() - q).abs()
        assert (error <= 0.01 * 30 * lr).all()  # seen: 0.0045
        assert error.square().sum() <= p.numel() * (0.002 * 30 * lr) ** 2  # seen: 0.0009
        assert same_bits(p.detach(), found.to(dtype))


@PLACES
def test_a_resumed_run_has_the_same_bits(device):
    """Also after a step that is skipped. The state dict has the moments in bfloat16."""

    def run(resume):
        torch.manual_seed(1)
        params = parameters(device, BF16, torch.float16, torch.float32)
        options = {"max_norm": 1.0, "seed": 7, "state_dtype": BF16, "master_weights": True}
        optimizer = cukern.AdamW(params, 0.01, **options)
        for step in range(4):
            if resume and step == 2:
                before = [t.clone() for p in params for t in moments(optimizer, p)]
                optimizer.found_inf = torch.ones((), device=device)
                optimizer.step()
                assert all(map(same_bits, before, [t for p in params for t in moments(optimizer, p)]))
                saved = copy.deepcopy(optimizer.state_dict())
                assert saved["state"][0]["exp_avg"].dtype == BF16
                optimizer = cukern.AdamW(params, 0.01, **options)
                optimizer.load_state_dict(saved)
            draw_gradients(params)
            optimizer.step()
        return [t.detach() for p in params for t in (p, *moments(optimizer, p))]

    assert all(same_bits(a, b) for a, b in zip(run(False), run(True), strict=True))


@PLACES
def test_states_are_converted_when_they_are_loaded(device):
    """From torch's optimizer, rounded once; and exactly back to float32."""
    params = parameters(device, torch.float32)
    one = torch.optim.AdamW(params)
    draw_gradients(params)
    one.step()
    two, three = cukern.AdamW(params, state_dtype=BF16), cukern.AdamW(params)
    two.load_state_dict(one.state_dict())
    three.load_state_dict(two.state_dict())
    for p in params:
        for a, b, c in zip(moments(one, p), moments(two, p), moments(three, p), strict=True):
            assert same_bits(b, a.to(BF16)) and same_bits(c, b.float())


@kernels
def test_versions_and_places_have_the_same_bits(device):
    """v1 and v2, and views that begin at odd elements."""

    def run(version, offset):
        torch.manual_seed(2)
        memory = torch.empty(4, 2104, device=device, dtype=BF16)[:, offset : offset + 2100]
        p, m, v, grad = memory.copy_(torch.rand(4, 2100, device=device)).unbind()
        optimizer = cukern.AdamW([p], 0.1, state_dtype=BF16, version=version)
        optimizer.state[p] = {"step": torch.zeros((), device=device), "exp_avg": m, "exp_avg_sq": v}
        p.grad = grad
        optimizer.step()
        return [p, m, v]

    expected = run("v2", 0)
    for version, offset in (("v1", 0), ("v2", 1), ("v2", 4)):
        assert all(map(same_bits, run(version, offset), expected)), (version, offset)


@kernels
def test_divided_parameters(mesh):  # noqa: F811
    from torch.distributed.tensor import DTensor, Shard

    plain = parameters(DEVICE, BF16, shapes=((5, 7), (257,)))
    divided = [torch.nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    both = [cukern.AdamW(params, state_dtype=BF16) for params in (plain, divided)]
    for _ in range(2):
        draw_gradients(plain)
        for p, d in zip(plain, divided, strict=True):
            d.grad = DTensor.from_local(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in both:
            optimizer.step()
    for p, d in zip(plain, divided, strict=True):
        parts = [d, *moments(both[1], d)]
        assert all(map(same_bits, [p.detach(), *moments(both[0], p)], [t.to_local().detach() for t in parts]))


@PLACES
def test_moments_that_are_not_finite(device):
    p = torch.zeros(3, device=device)
    p.grad = torch.tensor([inf, -inf, 1.0], device=device)
    p.grad.view(torch.int32)[2] = 2**31 - 1  # a NaN to whose bits nothing can be added
    optimizer = cukern.AdamW([p], state_dtype=BF16)
    optimizer.step()
    assert optimizer.state[p]["exp_avg"][:2].tolist() == [inf, -inf]
    assert optimizer.state[p]["exp_avg_sq"][:2].tolist() == [inf, inf]
    assert all(t[2].isnan() for t in moments(optimizer, p))


def test_float64_keeps_its_moments():
    p = torch.ones(3, dtype=torch.float64)
    p.grad = p.clone()
    optimizer = cukern.AdamW([p], state_dtype=BF16)
    optimizer.step()
    assert [t.dtype for t in moments(optimizer, p)] == [torch.float64] * 2


def test_refused():
    p = torch.ones(3)
    p.grad = p.clone()
    for wrong in (torch.float16, "bfloat16", None):
        with pytest.raises(TypeError, match=f"state_dtype must be .*, got {wrong}"):
            cukern.AdamW([p], state_dtype=wrong)
    message = "state_dtype must be torch.float32 with amsgrad, got torch.bfloat16"
    with pytest.raises(ValueError, match=message):
        cukern.AdamW([p], state_dtype=BF16, amsgrad=True)
    optimizer = cukern.AdamW([p], state_dtype=BF16)
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert p.eq(1).all() and not optimizer.state
