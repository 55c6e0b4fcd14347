"""AdamW against torch.optim.AdamW in float64: clipping, loss scaling, states, masters, random rounding,
schedules, bad input, graphs."""

import copy
import math
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, gpu, kernels, no_gpu, same_bits

import cukern
from cukern.ops.adamw import op
from cukern.ops.adamw.op import reference
from cukern.ops.adamw.table import CHUNK

PLACES = pytest.mark.parametrize(
    "device", [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]
)
SHAPES = ((5, 7), (3,), (0, 4), (257,), (2, 4, 3))
inf, nan = float("inf"), float("nan")


def parameters(device, *dtypes, shapes=SHAPES):
    """One of each shape, of the dtypes in turn."""
    return [
        torch.nn.Parameter(torch.randn(s, device=device).to(dtypes[i % len(dtypes)]))
        for i, s in enumerate(shapes)
    ]


def doubles(params):
    return [torch.nn.Parameter(p.detach().double().clone()) for p in params]


def draw_gradients(*lists, scale=1.0):
    """The same random gradients for each list of parameters, exact in the first one's dtype."""
    for same in zip(*lists, strict=True):
        grad = (torch.randn(same[0].shape, device=same[0].device) * scale).to(same[0].dtype)
        for p in same:
            p.grad = grad.to(p.dtype, copy=True)


def clip(params, max_norm):
    """clip_grad_norm_ without the 1e-6 that torch adds to the norm."""
    norm = torch.nn.utils.clip_grad_norm_(params, inf)
    if norm > max_norm:
        torch._foreach_mul_([p.grad for p in params if p.grad is not None], max_norm / norm)
    return norm


def groups(params):
    return [
        {"params": params[:2], "weight_decay": 0.3},
        {"params": params[2:], "lr": 3e-3, "betas": (0.7, 0.98), "eps": 1e-4},
    ]


def assert_close(params, exact, roundings, what="", floor=0.01):
    for p, q in zip(params, exact, strict=True):
        allowed = roundings * torch.finfo(p.dtype).eps * (q.double().abs() + floor)
        assert ((p.double() - q.double()).abs() <= allowed).all(), what


@PLACES
@pytest.mark.parametrize("version", [None, "v1", "v2"])
@pytest.mark.parametrize("max_norm", [None, 1.0, 1e4])
def test_several_steps_against_float64(device, version, max_norm):
    if version and not (torch.cuda.is_available() or cukern.runtime.launch.backend.simulating()):
        pytest.skip("versions are kernels")
    params = parameters(device, torch.float32, torch.float32 if device == "cpu" else torch.float64)
    params[0].data = params[0].data.t().contiguous().t()  # dense, not contiguous
    exact = doubles(params)
    ours = cukern.AdamW(groups(params), lr=0.01, max_norm=max_norm, version=version)
    theirs = torch.optim.AdamW(groups(exact), lr=0.01)
    for step in range(5):
        draw_gradients(params, exact)
        if step == 2:
            params[3].grad = exact[3].grad = None  # skipped, its step too
        before = [None if p.grad is None else p.grad.clone() for p in params]
        norm = None if max_norm is None else clip(exact, max_norm)
        ours.step()
        theirs.step()
        assert norm is None or abs(ours.grad_norm.item() / norm.item() - 1) < 1e-6
        if max_norm is None or cukern.runtime.launch.backend.simulating() or device == "cuda":
            assert all(g is None or same_bits(g, p.grad) for g, p in zip(before, params, strict=True)), (
                "gradients are not written"
            )
        assert_close(params, exact, 8, f"step {step}")
    assert [ours.state[p]["step"].item() for p in params] == [5, 5, 5, 4, 5]


@PLACES
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_parameters_and_masters(device, dtype):
    """With masters the error is that of float32 and one rounding, without them one rounding a step."""
    for master in (True, False):
        params = parameters(device, dtype)
        exact = doubles(params)
        ours = cukern.AdamW(params, 1e-3, master_weights=master, max_norm=0.5)
        theirs = torch.optim.AdamW(exact, 1e-3)
        for _ in range(6):
            draw_gradients(params, exact)
            clip(exact, 0.5)
            ours.step()
            theirs.step()
        state = ours.state[params[0]]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == state["step"].dtype == torch.float32
        assert_close(params, exact, 0.6 if master else 4)
        assert ("master" in state) == master
        if master:
            assert_close([ours.state[p]["master"] for p in params], exact, 8)
            assert all(same_bits(p.detach(), ours.state[p]["master"].to(dtype)) for p in params)


@PLACES
def test_misaligned_and_long_tensors(device):
    """Views that begin at odd elements take the scalar path, and long ones have several chunks."""
    for dtype in (torch.float32, torch.bfloat16):
        base = torch.randn(2 * CHUNK + 70, device=device).to(dtype)
        params = [base[1 : CHUNK + 6], base[CHUNK + 8 : CHUNK + 11], base[CHUNK + 16 :]]
        exact = doubles(params)
        ours, theirs = cukern.AdamW(params, max_norm=3.0), torch.optim.AdamW(exact)
        draw_gradients(params, exact)
        norm = clip(exact, 3.0)
        around = base[[0, CHUNK + 6, CHUNK + 7, CHUNK + 12]].clone()
        ours.step()
        theirs.step()
        assert abs(ours.grad_norm.item() / norm.item() - 1) < 1e-6
        assert_close(params, exact, 1 if dtype == torch.bfloat16 else 8)
        assert same_bits(base[[0, CHUNK + 6, CHUNK + 7, CHUNK + 12]], around)


@kernels
@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("version", ("v1", "v2"))
def test_each_tensor_may_be_misaligned(device, odd, version):
    """The function, with one list of views that begin at an odd element; the step is given."""
    tensors = [torch.rand(131, device=device)[i == odd :][:130] for i in range(4)]
    exact = [t.double() for t in tensors]
    cukern.adamw(*([t] for t in tensors), step=3, lr=0.1, version=version)
    (q,) = theirs = doubles(exact[:1])
    q.grad = exact[1]
    optimizer = torch.optim.AdamW(theirs, 0.1)
    optimizer.state[q] = {"step": torch.tensor(2.0), "exp_avg": exact[2], "exp_avg_sq": exact[3]}
    optimizer.step()
    # lr = 0.1 changes param by up to its magnitude, so the sum may cancel
    assert_close(tensors[:1], [q], 4, floor=exact[0].abs())
    assert_close(tensors[2:], exact[2:], 8)


@kernels
def test_many_tensors_of_which_some_are_empty(device):
    """More than the 32 rows that a warp reads at a time."""
    params, grads, exp_avgs, exp_avg_sqs = (
        [torch.rand(i % 4, device=device) for i in range(70)] for _ in range(4)
    )
    exact = [
        reference(*(t.double() for t in each), 2)
        for each in zip(params, grads, exp_avgs, exp_avg_sqs, strict=True)
    ]
    cukern.adamw(params, grads, exp_avgs, exp_avg_sqs, step=2)
    for ours, theirs in zip((params, exp_avgs, exp_avg_sqs), zip(*exact, strict=True), strict=True):
        assert_close(ours, theirs, 8)


def test_an_empty_array():
    """Its strides, which are 0 in NumPy, do not matter."""
    cukern.adamw([torch.zeros(0).numpy()], *([torch.zeros(0)] for _ in range(3)))


# ---- torch's protocols


@PLACES
@pytest.mark.parametrize("bad", (None, inf, nan))
def test_grad_scaler(device, bad):
    params = parameters(device, torch.float32)
    exact = doubles(params)
    ours, theirs = cukern.AdamW(params, max_norm=2.0), torch.optim.AdamW(exact)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    for step in range(3):
        draw_gradients(params, exact)
        norm = clip(exact, 2.0)
        found = step == 1 and bad is not None
        if not found:
            theirs.step()
        scaler.scale(torch.zeros(1, device=device))  # makes its tensors
        for p in params:
            p.grad.mul_(scaler.get_scale())
        if found:
            params[0].grad[1, 2] = bad
        before = [p.detach().clone() for p in params]
        scaler.step(ours)
        scaler.update()
        assert found == all(same_bits(p.detach(), b) for p, b in zip(params, before, strict=True))
        assert found or abs(ours.grad_norm.item() / norm.item() - 1) < 1e-6
        assert_close(params, exact, 8)
    assert ours.state[params[0]]["step"].item() == (3 if bad is None else 2)
    assert scaler.get_scale() == (1024.0 if bad is None else 512.0)


@PLACES
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.bfloat16, torch.float32)], ids=str)
def test_state_dicts_exchange_with_torch(device, dtypes):
    """Three steps by one optimizer, and three by another that loads its state: torch's, ours, and a copy of
    ours."""
    makers = {
        "torch": lambda params: torch.optim.AdamW(params, 0.01),
        "ours": lambda params: cukern.AdamW(params, 0.01, master_weights=True),
    }
    for first, second in (("torch", "ours"), ("ours", "torch"), ("ours", "ours")):
        params = parameters(device, *(dtypes if first == second else dtypes[-1:]))
        exact = doubles(params)
        one, theirs = makers[first](groups(params)), torch.optim.AdamW(groups(exact), 0.01)
        for step in range(6):
            if step == 3:
                saved = pickle.loads(pickle.dumps(one.state_dict()))
                one = makers[second](groups(params))
                one.load_state_dict(saved)
            draw_gradients(params, exact)
            one.step()
            theirs.step()
        for p, q in zip(params, exact, strict=True):
            assert one.state[p]["step"].item() == 6
            assert_close(
                *([o.state[x][k] for k in ("exp_avg", "exp_avg_sq")] for o, x in ((one, p), (theirs, q))),
                4,
                floor=1,
            )
            assert_close([p], [q], 0.6 if p.dtype == torch.bfloat16 else 8)


@kernels
def test_a_resumed_run_has_the_same_bits(device):
    """State and seed are all there is; a copy of the optimizer goes on by itself."""

    def run(resume):
        torch.manual_seed(1)
        params = parameters(device, torch.bfloat16, torch.float16)
        options = {"max_norm": 1.0, "stochastic_rounding": True, "seed": 7}
        optimizer = cukern.AdamW(params, 0.01, **options)
        for step in range(4):
            if resume and step == 2:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = cukern.AdamW(params, 0.01, **options)
                optimizer.load_state_dict(saved)
                assert (
                    optimizer.state[params[0]]["exp_avg"].data_ptr()
                    != saved["state"][0]["exp_avg"].data_ptr()
                )
            draw_gradients(params)
            optimizer.step()
        return params

    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(run(False), run(True), strict=True))


def test_copies_keep_the_options():
    (p,) = parameters("cpu", torch.float32, shapes=((3,),))
    optimizer = copy.deepcopy(cukern.AdamW([p], max_norm=0.5))
    (q,) = optimizer.param_groups[0]["params"]
    q.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.grad_norm.item() == pytest.approx(math.sqrt(3)) and q.grad.eq(1).all()


@PLACES
@pytest.mark.parametrize("tensor", (False, True))
def test_a_schedule(device, tensor):
    params = parameters(device, torch.float32)
    exact = doubles(params)
    ours = cukern.AdamW(params, torch.tensor(0.1, device=device) if tensor else 0.1)
    theirs = torch.optim.AdamW(exact, 0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (ours, theirs)]
    for _ in range(4):
        draw_gradients(params, exact)
        for optimizer, schedule in zip((ours, theirs), schedules, strict=True):
            optimizer.step()
            schedule.step()
        assert_close(params, exact, 16)


@PLACES
def test_parameters_that_move_and_states_that_are_cleared(device):
    """After both the step is that of a new optimizer with the same moments, or with none."""
    for clear in (False, True):
        params = parameters(device, torch.float32, shapes=((5,), (3, 4)))
        exact = doubles(params)
        ours, theirs = cukern.AdamW(params, 0.1), torch.optim.AdamW(exact, 0.1)
        for step in range(4):
            draw_gradients(params, exact)
            if step == 2:
                for p in params:
                    p.data = p.data.clone()
                if clear:
                    ours.state.clear()
                    theirs.state.clear()
            ours.step()
            theirs.step()
        assert_close(params, exact, 16)
        assert ours.state[params[0]]["step"].item() == (2 if clear else 4)


def test_a_closure():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = cukern.AdamW([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3 and (p < 1).all() and cukern.AdamW([p]).step() is None


# ---- stochastic rounding


def round_randomly(x, seed, index, step):
    """float32 to bfloat16 as in adamw.cu: of the two neighbours the upper with the probability of the
    discarded bits / 2^16."""
    words = philox(torch.arange(-(-len(x) // 4)), index, step, seed).view(-1)[: len(x)]
    return ((x.view(torch.int32).long() + (words & 0xFFFF)) >> 16).short().view(torch.bfloat16)


def philox(counter, index, step, seed):
    """Philox4x32-10 (Salmon et al., 2011) of (counter, index, step): four words for each."""
    mask = 0xFFFFFFFF
    c0 = counter & mask
    c1 = counter >> 32 & mask
    c2 = torch.full_like(counter, index)
    c3 = torch.full_like(counter, step)
    key0, key1 = seed & mask, seed >> 32
    for _ in range(10):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32 & mask) ^ c1 ^ key0, product1 & mask
        c2, c3 = (product0 >> 32 & mask) ^ c3 ^ key1, product0 & mask
        key0, key1 = key0 + 0x9E3779B9 & mask, key1 + 0xBB67AE85 & mask
    return torch.stack((c0, c1, c2, c3), -1)


def test_philox_has_the_words_of_its_authors():
    """The known answers of Random123's Philox4x32-10."""
    ones = 0xFFFFFFFF
    assert [hex(w) for w in philox(torch.tensor([0]), 0, 0, 0)[0].tolist()] == [
        "0x6627e8d5",
        "0xe169c58d",
        "0xbc57ac4c",
        "0x9b00dbd8",
    ]
    found = philox(torch.tensor([-1]), ones, ones, (ones << 32) + ones)[0].tolist()
    assert [hex(w) for w in found] == ["0x408f276d", "0x41c83b0e", "0xa20bc7c6", "0x6d5451fd"]


@kernels
def test_stochastic_rounding_is_unbiased_and_reproducible(device):
    """A change of 0.3 of the distance of two neighbours goes up in 0.3 of the elements, and the same in the
    next run and any tensor."""
    n = 3 * 8192 + 5
    p0 = torch.full((n,), 1.0, device=device, dtype=torch.bfloat16)
    lr = 0.3 * 2**-7  # with betas 0 and eps 0 each element grows by lr

    def run(seed, offset=0, others=0):
        base = torch.empty(n + offset, device=device, dtype=torch.bfloat16)
        p = base[offset:].copy_(p0)
        p.grad = torch.full((n + others,), -1.0, device=device).bfloat16()[others:]
        first = torch.ones(3, device=device)
        first.grad = torch.ones_like(first)
        optimizer = cukern.AdamW([first, p], lr, (0.0, 0.0), 0.0, 0.0, stochastic_rounding=True, seed=seed)
        optimizer.state[p] = {"step": torch.zeros((), device=device)}
        for name in "exp_avg", "exp_avg_sq":
            optimizer.state[p][name] = torch.zeros(n + others, device=device)[others:]
        optimizer.step()
        return p, optimizer

    p, optimizer = run(3)
    assert set(p.unique().tolist()) == {1.0, 1 + 2**-7}
    assert abs((p > 1).float().mean().item() - 0.3) < 4 * math.sqrt(0.21 / n)
    for offset, others in ((0, 0), (1, 0), (1, 1)):
        assert same_bits(run(3, offset, others)[0], p), "wherever its tensors begin"
    assert not same_bits(run(4)[0], p)
    exact = torch.full((n,), 1 + lr).float()
    assert same_bits(p.cpu(), round_randomly(exact, 3, 1, 1)), "the numbers of Philox"
    up = p > 1
    p.copy_(p0)
    optimizer.step()
    assert 0.4 < ((p > 1) == up).float().mean().item() < 0.75, "each step has its own"


@no_gpu
def test_stochastic_rounding_needs_kernels():
    p = torch.ones(3).bfloat16()
    p.grad = p.clone()
    with pytest.raises(ValueError, match="stochastic_rounding needs a GPU"):
        cukern.AdamW([p], stochastic_rounding=True).step()
    assert p.eq(1).all()


@kernels
def test_stochastic_rounding_leaves_what_is_not_finite(device):
    p = torch.tensor([inf, -inf, nan, 3.0, -3.0e38], device=device).bfloat16()
    p.grad = torch.zeros_like(p)
    cukern.AdamW([p], weight_decay=0.0, stochastic_rounding=True).step()
    assert p.isnan().tolist() == [False, False, True, False, False]
    assert p[:2].tolist() == [inf, -inf] and p[3].item() == 3


@PLACES
@pytest.mark.parametrize("value", (inf, nan))
def test_a_norm_that_is_not_finite(device, value):
    """inf: finite gradients become 0, infinite ones NaN. NaN: no clipping."""
    params = [torch.ones(3, device=device), torch.ones(2, device=device)]
    params[0].grad, params[1].grad = (
        torch.tensor([1.0, value, 2.0], device=device),
        torch.ones(2, device=device),
    )
    optimizer = cukern.AdamW(params, weight_decay=0.0, max_norm=1.0)
    optimizer.step()
    assert str(optimizer.grad_norm.item()) == str(value)
    assert params[0].isnan().tolist() == [False, True, False]
    assert params[1].tolist() == ([1.0, 1.0] if value == inf else pytest.approx([0.999, 0.999]))


# ---- bad input


@pytest.mark.parametrize(
    "options, says",
    [
        ({"lr": -1.0}, "lr must be at least 0, got -1.0"),
        ({"lr": "1"}, "lr must be a number"),
        ({"lr": torch.zeros(2)}, "lr must be a number, or a float32 or float64 tensor of one element"),
        ({"betas": 0.9}, "betas must be a pair"),
        ({"betas": (0.9, 1.0)}, "betas[1] must be at least 0 and less than 1, got 1.0"),
        ({"eps": nan}, "eps must be finite"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0, got -0.1"),
        ({"max_norm": 0.0}, "max_norm must be positive, got 0.0"),
        ({"max_norm": "1"}, "max_norm must be a number"),
        ({"master_weights": 1}, "master_weights must be a bool"),
        ({"stochastic_rounding": None}, "stochastic_rounding must be a bool"),
        ({"seed": -1}, "seed must be in 0..18446744073709551615, got -1"),
        ({"seed": 1.0}, "seed must be an int"),
        ({"version": "v9"}, "cukern.adamw has no version 'v9'"),
        ({"params": [torch.zeros(3, dtype=torch.complex64)]}, "parameter 0 of group 0 must be torch.float16"),
        (
            {"params": [torch.zeros(3), torch.zeros(4)[::2]]},
            "parameter 1 of group 0 has shape (2,) and strides (2,)",
        ),
        ({"params": [torch.zeros(3), torch.zeros(3, device="meta")]}, "parameter 1 of group 0 is on meta"),
        ({"params": [{"params": [torch.zeros(3)], "lr": -2}]}, "lr must be at least 0, got -2"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        cukern.AdamW(**{"params": [torch.zeros(3)], **options})


@PLACES
def test_bad_gradients_and_groups_are_refused_before_anything_is_written(device):
    p = torch.zeros(3, device=device)
    p.grad = torch.ones(3, device=device)
    q = torch.nn.Parameter(torch.zeros(4, 4, device=device))
    optimizer = cukern.AdamW([p, q], 0.1)
    q.grad = torch.ones(4, 4, device=device).to_sparse()
    with pytest.raises(TypeError, match="the gradient of parameter 1 must be a strided tensor"):
        optimizer.step()
    q.grad = torch.ones(4, 4, device=device)
    for name, value, says in (
        ("lr", "x", "lr must be a number"),
        ("betas", (1, 2), "less than 1"),
        ("eps", -1, "eps must be at least 0"),
    ):
        good = optimizer.param_groups[0][name]
        optimizer.param_groups[0][name] = value
        with pytest.raises((TypeError, ValueError), match=says):
            optimizer.step()
        optimizer.param_groups[0][name] = good
    with pytest.raises(ValueError, match="lr must be at least 0"):
        optimizer.add_param_group({"params": [torch.zeros(2, device=device)], "lr": -1})
    assert not p.any() and not optimizer.state and len(optimizer.param_groups) == 1
    optimizer.step()
    assert p.all()


def lists(n=2, **others):
    """Good arguments of cukern.adamw, but for some."""
    names = "params", "grads", "exp_avgs", "exp_avg_sqs"
    return {**{name: [torch.ones(3) for _ in range(n)] for name in names}, **others}


@pytest.mark.parametrize(
    "arguments, says",
    [
        ({"params": torch.ones(3)}, "params must be a list of tensors"),
        ({"params": [torch.ones(3), 1]}, r"params\[1\] must be a torch.Tensor"),
        ({"grads": [torch.ones(3)]}, "grads has 1 tensors, params has 2"),
        (
            {"grads": [torch.ones(3), torch.ones(3).half()]},
            r"grads\[1\] must be torch.float32, got torch.float16",
        ),
        ({"exp_avgs": [torch.ones(3), torch.ones(4)]}, r"exp_avgs\[1\] has shape \(4,\)"),
        ({"exp_avg_sqs": [torch.ones(3), torch.ones(3, device="meta")]}, r"exp_avg_sqs\[1\] is on meta"),
        ({"step": 0}, "step must be in 1..16777216, got 0"),
        ({"version": "v0"}, "has no version 'v0'"),
    ],
    ids=str,
)
def test_the_function_refuses_bad_lists(arguments, says):
    good = lists(**arguments)
    with pytest.raises((TypeError, ValueError), match=says):
        cukern.adamw(**good)
    assert all(
        t.is_meta or (t == 1).all()
        for ts in good.values()
        if isinstance(ts, list)
        for t in ts
        if isinstance(t, torch.Tensor)
    )


@no_gpu
def test_a_version_needs_a_gpu():
    with pytest.raises(ValueError, match=r"version 'v1' of cukern\.adamw is a CUDA kernel"):
        cukern.adamw(**lists(), version="v1")
    assert cukern.adamw([], [], [], []) is None


@PLACES
def test_the_state_may_be_replaced(device):
    """Tensors of the state in other memory, other strides and other shapes, between two steps."""
    p, exact = (
        torch.randn(3, 4, device=device, dtype=dtype).requires_grad_()
        for dtype in (torch.float32, torch.float64)
    )
    with torch.no_grad():
        exact.copy_(p)
    ours, theirs = cukern.AdamW([p], 0.1), torch.optim.AdamW([exact], 0.1)
    for change in (lambda t: t, lambda t: t.clone(), lambda t: t.mT.contiguous().mT):
        p.grad = torch.randn_like(p)
        exact.grad = p.grad.double()
        for name in ("exp_avg", "exp_avg_sq"):
            if name in ours.state[p]:
                old = ours.state[p][name]
                ours.state[p][name] = change(old)
                old.fill_(7.0) if change(old).data_ptr() != old.data_ptr() else None
        ours.step()
        theirs.step()
        torch.testing.assert_close(p.double(), exact, rtol=0, atol=1e-5)
    saved = ours.state_dict()
    saved["state"][0]["exp_avg"] = torch.zeros(4, 3)
    with pytest.raises(
        ValueError,
        match=r"exp_avg of parameter 0 has shape \(4, 3\), it must be that of the parameter, \(3, 4\)",
    ):
        ours.load_state_dict(saved)


# ---- CUDA graphs


@gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # that of the refused capture
@pytest.mark.parametrize("tensor", (False, True))
def test_a_captured_step_follows_the_schedule(tensor):
    """Replays with new gradients, in memory that the graph owns, and a step outside of the graph between two
    of them."""
    params = parameters("cuda", torch.float32, torch.bfloat16)
    exact = doubles(params)
    ours = cukern.AdamW(
        params, torch.tensor(0.1, device="cuda") if tensor else 0.1, max_norm=1.0, master_weights=True
    )
    theirs = torch.optim.AdamW(exact, 0.1)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (ours, theirs)]
    draw_gradients(params)
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        ours.step()
    fresh = [torch.zeros_like(p) for p in params]
    graph = None
    for step in range(6):
        draw_gradients(params, exact)
        clip(exact, 1.0)
        if step in (0, 3):
            ours.step()
        else:
            for f, p in zip(fresh, params, strict=True):
                f.copy_(p.grad)
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for f, p in zip(fresh, params, strict=True):
                        p.grad = f + 0
                    ours.step()
            graph.replay()
        theirs.step()
        for schedule in schedules:
            schedule.step()
        ours.update_groups()
        assert_close(params, exact, 16)
    assert all(ours.state[p]["step"].item() == 6 for p in params)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_synchronization():
    params = parameters("cuda", torch.float32, torch.float16)
    optimizer = cukern.AdamW(params, max_norm=1.0)
    draw_gradients(params)
    optimizer.step()
    draw_gradients(params)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- DTensors; two processes are in tests/gpt2/test_parallel.py


@pytest.fixture
def mesh():
    """One process."""
    distributed = (
        pytest.importorskip("torch.distributed.tensor", reason="this torch has no torch.distributed")
        and torch.distributed
    )
    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    yield distributed.init_device_mesh(DEVICE, (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("max_norm", (None, 1.0, 1e4))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_parameters_that_are_divided(mesh, dtype, max_norm):
    from torch.distributed.tensor import DTensor, Shard

    plain = parameters(DEVICE, dtype, shapes=((5, 7), (3,), (257,), (2, 4, 3)))
    divided = [torch.nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, [Shard(0)])) for p in plain]
    optimizers = [
        cukern.AdamW(groups(params), max_norm=max_norm, master_weights=True) for params in (plain, divided)
    ]
    for _ in range(3):
        draw_gradients(plain)
        for p, d in zip(plain, divided, strict=True):
            d.grad = DTensor.from_local(p.grad.clone(), mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
        if max_norm is not None:
            torch.testing.assert_close(optimizers[0].grad_norm, optimizers[1].grad_norm)
    assert_close([d.to_local() for d in divided], plain, 4)
    assert {type(slot[name]) for slot in optimizers[1].state.values() for name in slot if name != "step"} == {
        DTensor
    }


def test_parameters_that_are_copied_to_each_process_are_refused(mesh):
    from torch.distributed.tensor import DTensor, Replicate

    copied = torch.nn.Parameter(DTensor.from_local(torch.randn(4, device=DEVICE), mesh, [Replicate()]))
    with pytest.raises(TypeError, match=r"parameter 0 of group 0 must be a plain tensor, .* got .*Replicate"):
        cukern.AdamW([copied])


def test_a_table_of_the_function_belongs_to_a_gpu_and_a_stream(monkeypatch):
    """Freed memory of one GPU may return at the same addresses on another one. Default streams of all GPUs
    have the number 0."""
    made, place = [], {"device": 0, "stream": 0}
    table = type("Table", (), {"write_places": lambda *_: 0, "update": lambda *_: None})
    monkeypatch.setattr(op, "Table", lambda rows: made.append(dict(place)) or table())
    monkeypatch.setattr(op, "_tables", {})
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: place["device"], raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=place["stream"])
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensors = [[torch.randn(3)] for _ in range(4)]
    for device, stream in ((0, 0), (0, 0), (1, 0), (1, 7), (0, 0), (1, 0)):
        place.update(device=device, stream=stream)
        op._launch(*tensors, 1, [0.1, 0.9, 0.99, 1e-8, 0.0], "")
    assert made == [{"device": 0, "stream": 0}, {"device": 1, "stream": 0}, {"device": 1, "stream": 7}]
