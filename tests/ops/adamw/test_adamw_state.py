"""AdamW's state follows its parameters, groups, dtypes and checkpoints, whatever changes between two
steps."""

import copy
import random

import pytest
import torch
from helpers import DEVICE, gpu, kernels
from test_adamw import PLACES, assert_close, doubles, draw_gradients, mesh, parameters  # noqa: F401

import cukern

FLOAT32_ULP = torch.finfo(torch.float32).eps


def pair(device, shapes, **options):
    """Parameters of two groups and AdamW on them, and float64 copies and torch's AdamW on those."""
    ours = [torch.nn.Parameter(torch.randn(s, device=device)) for s in shapes]
    exact = [torch.nn.Parameter(p.detach().double()) for p in ours]

    def groups(ps):
        return [{"params": ps[:2], "lr": 1e-3}, {"params": ps[2:], "lr": 0.5, "weight_decay": 0.1}]

    return ours, exact, cukern.AdamW(groups(ours), **options), torch.optim.AdamW(groups(exact), **options)


def step(ours, exact, one, other):
    for p, q in zip(ours, exact, strict=True):
        q.grad = torch.randn(q.shape, device=q.device).bfloat16().double().contiguous()
        p.grad = q.grad.to(p.dtype)
    one.step()
    other.step()


@PLACES
def test_groups_dtypes_formats_and_state_change_between_steps(device):
    draw = random.Random(3)
    ours, exact, one, other = pair(device, [(3,), (2, 3, 4, 5), (6,), (1, 2, 3, 4)])
    coarsest = FLOAT32_ULP

    def move():
        for o in (one, other):
            o.param_groups[1]["params"].insert(0, o.param_groups[0]["params"].pop())
        one.param_groups.reverse()
        other.param_groups.reverse()

    def change_dtype():
        nonlocal coarsest
        i = draw.randrange(4)
        dtype = draw.choice((torch.float64, torch.float32, torch.float16, torch.bfloat16))
        ours[i].data = ours[i].data.to(dtype)
        ours[i].grad = None
        coarsest = max(coarsest, torch.finfo(dtype).eps)

    def change_format():
        for ps in (ours, exact):
            ps[1].data = ps[1].data.contiguous(
                memory_format=draw.choice((torch.channels_last, torch.contiguous_format))
            )

    def replace_state():
        for ps, o in ((ours, one), (exact, other)):
            state = o.state[ps[2]]
            state["exp_avg"] = state["exp_avg"] * 2
            state["step"] = state["step"] + 5

    step(ours, exact, one, other)
    for _ in range(12):
        change = draw.choice((move, change_dtype, change_format, replace_state))
        change()
        if sum(len(g["params"]) == 0 for g in one.param_groups):
            move()
        step(ours, exact, one, other)
        for p, q in zip(ours, exact, strict=True):
            assert ((p.double() - q).abs() <= 40 * coarsest * (1 + q.abs())).all(), change.__name__
            assert one.state[p]["exp_avg"].dtype == (
                torch.float64 if p.dtype == torch.float64 else torch.float32
            )


def test_a_step_after_equal_steps_follows_every_change():
    """The second of two equal steps keeps what the third one compares with."""
    (p, other), exact, one, torch_one = pair("cpu", [(4, 4), (3,)])
    state, exact_state = one.state[p], torch_one.state[exact[0]]

    def transposed():  # the same address
        for t in (p, exact[0]):
            t.data, t.grad = t.data.t(), None
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = state[name].t()
            exact_state[name] = exact_state[name].t()

    def other_memory():
        state["exp_avg"].data = state["exp_avg"] * 2
        exact_state["exp_avg"] *= 2

    def replaced():
        for each in (state, exact_state):
            each["step"] = each["step"] + 5

    def moved():  # to another group, in the same order
        for o in (one, torch_one):
            o.param_groups[1]["params"].append(o.param_groups[0]["params"].pop())

    def equal_steps(grad=lambda g: g, count=1):
        for _ in range(count):
            for t, e in zip((p, other), exact, strict=True):
                e.grad = torch.randn_like(e).bfloat16().double()
                t.grad = grad(e.grad.to(t.dtype))
            one.step()
            torch_one.step()
            assert torch.allclose(p.double(), exact[0], rtol=1e-5, atol=1e-5)
            assert torch.allclose(other.double(), exact[1], rtol=1e-5, atol=1e-5)

    with cukern.backend("sim"):
        for change in (transposed, other_memory, replaced, moved):
            equal_steps(count=3)
            assert one._known is not None
            change()
            equal_steps()
        # other strides than those of the parameter
        equal_steps(lambda g: torch.stack((g, g), -1)[..., 0], count=2)
        equal_steps(count=3)
        with pytest.raises(ValueError, match="negative bit"):
            equal_steps(lambda g: torch.complex(g, -g).conj().imag)
        one.param_groups[0]["amsgrad"] = True
        p.grad, other.grad = torch.ones_like(p), None
        one.step()
        assert "max_exp_avg_sq" in state


@PLACES
@pytest.mark.parametrize("dtype", (torch.float64, torch.bfloat16), ids=str)
def test_the_default_dtype_does_not_matter(device, dtype):
    torch.set_default_dtype(dtype)
    try:
        p = torch.nn.Parameter(torch.zeros(5, dtype=torch.float32, device=device))
        optimizer = cukern.AdamW([p])
        for _ in range(300):
            p.grad = torch.ones_like(p)
            optimizer.step()
            if (
                device == "cpu"
                and optimizer.state[p]["step"] >= 3
                and cukern.runtime.launch.backend.simulating()
            ):
                break
        assert optimizer.state[p]["step"].dtype == torch.float32
        assert optimizer.state[p]["step"].item() in (3, 300)
    finally:
        torch.set_default_dtype(torch.float32)


@PLACES
def test_a_step_is_visible_to_autograd(device):
    p = torch.randn(4, 4, device=device, requires_grad=True)
    optimizer = cukern.AdamW([p])
    for _ in range(2):
        p.grad = torch.ones_like(p)
        y = p.square().sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@PLACES
def test_masters_follow_weights_that_are_written(device):
    model = torch.nn.Linear(8, 1, bias=False, dtype=torch.bfloat16, device=device)
    optimizer = cukern.AdamW(model.parameters(), lr=0.1, weight_decay=0.0, master_weights=True)

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model.weight.detach().float()

    step()
    loaded = {"weight": torch.full_like(model.weight, 5.0)}
    model.load_state_dict(loaded)
    assert torch.allclose(step(), torch.tensor(4.9, device=device), atol=0.02)
    model.float()  # a float32 parameter has no master
    assert (
        torch.allclose(step(), torch.tensor(4.8, device=device), atol=0.02)
        and "master" not in optimizer.state[model.weight]
    )
    model.bfloat16()
    assert torch.allclose(step(), torch.tensor(4.7, device=device), atol=0.02)


@PLACES
@pytest.mark.parametrize(
    "flags", ({"amsgrad": True}, {"maximize": True}, {"amsgrad": True, "maximize": True}), ids=str
)
def test_amsgrad_and_maximize(device, flags):
    ours, exact, one, other = pair(device, [(3,), (2, 3), (6,), (4,)], **flags)
    for _ in range(4):
        step(ours, exact, one, other)
    for p, q in zip(ours, exact, strict=True):
        assert (p.double() - q).abs().max() < 1e-5
    again = torch.optim.AdamW(ours, **flags)
    again.load_state_dict(
        one.state_dict() | {"param_groups": [{**again.param_groups[0], "params": [0, 1, 2, 3]}]}
    )
    assert ("max_exp_avg_sq" in again.state[ours[0]]) == ("amsgrad" in flags)


def test_recipes_of_torch_run_unchanged():
    p = torch.nn.Parameter(torch.ones(3))
    beta1 = torch.tensor(0.9)
    for options in (
        {"fused": True}, {"foreach": False}, {"capturable": True},
        {"amsgrad": False, "maximize": False, "differentiable": False},
        {"lr": torch.tensor(1e-3, dtype=torch.float64)}, {"lr": torch.tensor([1e-3])},
        {"betas": (beta1, torch.tensor(0.99))},
    ):  # fmt: skip
        optimizer = cukern.AdamW([p], **options)
        p.grad = torch.ones_like(p)
        optimizer.step()
    with pytest.raises(ValueError, match="differentiable must be False"):
        cukern.AdamW([p], differentiable=True)
    with pytest.raises(TypeError, match="fused must be a bool"):
        cukern.AdamW([p], fused="yes")


@pytest.mark.parametrize(
    "dtype, scale, most",
    ((torch.float64, 1e60, 1.0), (torch.float32, 1e34, 1e-6), (torch.float32, 1e37, 1e-3)),
)
@PLACES
def test_clipping_of_large_gradients(device, dtype, scale, most):
    p, q = (torch.nn.Parameter(torch.ones(50, dtype=d, device=device)) for d in (dtype, torch.float64))
    one, other = cukern.AdamW([p], lr=0.01, max_norm=most), torch.optim.AdamW([q], lr=0.01)
    for _ in range(5):
        grad = torch.randn(50, dtype=torch.float64, device=device) * scale
        p.grad = grad.to(dtype)
        q.grad = p.grad.double() * (most / p.grad.double().norm())
        one.step()
        other.step()
    assert (p.double() - q).abs().max() < 20 * torch.finfo(dtype).eps


@PLACES
def test_a_hook_of_load_state_dict_changes_what_is_loaded(device):
    def made(order):
        tensors = {name: torch.nn.Parameter(torch.zeros(3, device=device)) for name in "ab"}
        return tensors, cukern.AdamW([(name, tensors[name]) for name in order], lr=0.01)

    tensors, first = made("ab")
    tensors["a"].grad, tensors["b"].grad = torch.ones(3, device=device), torch.full((3,), -7.0, device=device)
    first.step()
    saved = copy.deepcopy(first.state_dict())
    others, second = made("ba")

    def by_name(_, state):
        group = state["param_groups"][0]
        numbers = dict(zip(group["param_names"], group["params"], strict=True))
        states = {i: state["state"][numbers[name]] for i, name in enumerate("ba")}
        return {"state": states, "param_groups": [{**group, "param_names": ["b", "a"], "params": [0, 1]}]}

    second.register_load_state_dict_pre_hook(by_name)
    second.load_state_dict(saved)
    assert torch.allclose(second.state[others["a"]]["exp_avg"], torch.tensor(0.1, device=device))
    assert torch.allclose(second.state[others["b"]]["exp_avg"], torch.tensor(-0.7, device=device))
    assert len(second._optimizer_load_state_dict_pre_hooks) == 1


def write(p):
    with torch.no_grad():
        p.copy_(torch.full_like(p, 5.0))


WAYS = {
    "in place": lambda p, optimizer, step: write(p),
    "data": lambda p, optimizer, step: p.data.copy_(torch.full_like(p, 5.0)),
    "before a step without a gradient": lambda p, optimizer, step: (write(p), step(False)),
    "after a step without a gradient": lambda p, optimizer, step: (step(False), write(p)),
    "after the state was loaded": lambda p, optimizer, step: (
        optimizer.load_state_dict(optimizer.state_dict()),
        write(p),
    ),
    "after it moved to another group": lambda p, optimizer, step: (
        optimizer.param_groups.reverse(),
        write(p),
    ),
}


@PLACES
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_masters_follow_however_the_weights_are_written(device, way, dtype):
    p, q = (torch.nn.Parameter(torch.zeros(9, dtype=dtype, device=device)) for _ in range(2))
    optimizer = cukern.AdamW(
        [{"params": [p]}, {"params": [q]}], lr=0.1, weight_decay=0.0, master_weights=True
    )

    def step(both=True):
        p.grad, q.grad = torch.ones_like(p) if both else None, torch.ones_like(q)
        optimizer.step()

    step()
    WAYS[way](p, optimizer, step)
    step()
    assert (optimizer.state[p]["master"] - 4.9).abs().max() < 2e-3 and (p - 4.9).abs().max() < 0.02
    assert (optimizer.state[q]["master"] + (0.3 if "without" in way else 0.2)).abs().max() < 1e-6, (
        "an unchanged master stays"
    )


@kernels
def test_masters_follow_with_stochastic_rounding(device):
    """Either neighbour of a master is what a step wrote; another value is followed."""
    p = torch.nn.Parameter(torch.ones(4097, dtype=torch.bfloat16, device=device))
    optimizer = cukern.AdamW(
        [p], 0.3 * 2**-7, (0.0, 0.0), 0.0, 0.0, master_weights=True, stochastic_rounding=True
    )
    for _ in range(2):
        p.grad = -torch.ones_like(p)
        optimizer.step()
    assert p.unique().numel() > 1
    assert (optimizer.state[p]["master"] - (1 + 0.6 * 2**-7)).abs().max() < 1e-6, (
        "random rounding changes no master"
    )
    p.data[7] = -3.0
    optimizer.step()
    assert abs(optimizer.state[p]["master"][7] + 3 - 0.3 * 2**-7) < 1e-6


@PLACES
def test_views_of_the_state_at_the_same_address(device):
    p = torch.nn.Parameter(torch.randn(3, 3, device=device))
    q = torch.nn.Parameter(p.detach().double())
    ours, theirs = cukern.AdamW([p], 0.1), torch.optim.AdamW([q], 0.1)
    for i in range(3):
        draw_gradients([p], [q])
        for o, x in ((ours, p), (theirs, q)):
            if i == 2:
                o.state[x].update({name: o.state[x][name].mT for name in ("exp_avg", "exp_avg_sq")})
            o.step()
    assert_close([p], [q], 16, floor=1)
    ours.state[p]["exp_avg"] = ours.state[p]["exp_avg"][:1]
    with pytest.raises(ValueError, match=r"exp_avg of parameter 0 has shape \(1, 3\)"):
        ours.step()


@gpu
def test_the_state_follows_to_another_device():
    p = torch.nn.Parameter(torch.randn(5))
    q = torch.nn.Parameter(p.detach().double())
    ours, theirs = cukern.AdamW([p], 0.1, max_norm=1e9), torch.optim.AdamW([q], 0.1)
    for device in ("cpu", "cuda", "cpu", "cuda"):
        p.data, grad = p.data.to(device), torch.randn(5)
        p.grad, q.grad = grad.to(device), grad.double()
        ours.step()
        theirs.step()
    assert_close([p.cpu()], [q], 16, floor=1)


@PLACES
@pytest.mark.parametrize("version", (None, "v1"))
def test_amsgrad_and_maximize_by_group(device, version):
    """Groups with and without them, in 16 and 32 bits; the maxima are torch's, and a hook's gradient that
    shrinks keeps them."""
    if version and device == "cpu" and not cukern.runtime.launch.backend.simulating():
        pytest.skip("versions are kernels")
    params = parameters(device, torch.bfloat16, torch.float32)
    exact = doubles(params)

    def flags(ps):
        return [
            {"params": ps[:2], "amsgrad": True},
            {"params": ps[2:3], "maximize": True},
            {"params": ps[3:], "amsgrad": True, "maximize": True},
        ]

    ours = cukern.AdamW(flags(params), 0.01, master_weights=True, version=version)
    theirs = torch.optim.AdamW(flags(exact), 0.01)
    for i in range(6):
        draw_gradients(params, exact, scale=0.1**i)
        ours.step()
        theirs.step()
    for p, q in zip(params, exact, strict=True):
        assert_close([p], [q], 0.6 if p.dtype == torch.bfloat16 else 8)
        assert ("max_exp_avg_sq" in ours.state[p]) == ("max_exp_avg_sq" in theirs.state[q])
        if "max_exp_avg_sq" in ours.state[p]:
            assert_close([ours.state[p]["max_exp_avg_sq"]], [theirs.state[q]["max_exp_avg_sq"]], 8)
    again = cukern.AdamW(flags(params), 0.01)
    again.load_state_dict(theirs.state_dict())
    assert again.state[params[0]]["max_exp_avg_sq"].dtype == torch.float32


@PLACES
def test_a_learning_rate_in_float64(device):
    p = torch.nn.Parameter(torch.zeros(3, device=device))
    lr = torch.tensor([0.5], dtype=torch.float64, device=device)
    optimizer = cukern.AdamW([p], lr, weight_decay=0.0)
    for expected in (-0.5, -0.75):
        p.grad = torch.ones_like(p)
        optimizer.step()
        lr /= 2
        assert torch.allclose(p, torch.full_like(p, expected))


def test_a_hook_after_load_state_dict_has_the_last_word():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = cukern.AdamW([p])
    p.grad = torch.ones(3)
    optimizer.step()
    optimizer.register_load_state_dict_post_hook(lambda o: o.state[p].update(exp_avg=torch.full((3,), 9.0)))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert (
        optimizer.state[p]["exp_avg"].eq(9).all()
        and len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    )


@kernels
@pytest.mark.parametrize("scale, dtype", ((1.0, torch.bfloat16), (1e60, torch.float64)))
def test_kernels_update_divided_parameters(mesh, device, scale, dtype):  # noqa: F811
    """FSDP2's: made by fully_shard, clipped by the norm of all parts."""
    from torch.distributed.fsdp import fully_shard

    model, plain = (torch.nn.Linear(5, 3, bias=False, dtype=dtype, device=DEVICE) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    fully_shard(model, mesh=mesh)
    optimizers = [
        cukern.AdamW(m.parameters(), 0.1, max_norm=1.0, master_weights=True, amsgrad=True)
        for m in (model, plain)
    ]
    for i in range(3):
        plain.weight.grad = torch.randn_like(plain.weight) * scale
        model.weight.grad = torch.distributed.tensor.distribute_tensor(
            plain.weight.grad.clone(), mesh, [torch.distributed.tensor.Shard(0)]
        )
        before = model.weight._version
        for optimizer in optimizers:
            optimizer.step()
        assert (
            model.weight._version > before
            and (plain.weight - model.weight.full_tensor()).abs().max() <= torch.finfo(dtype).eps
        ), i
        torch.testing.assert_close(*(o.grad_norm for o in optimizers))
