"""Replayed calls: they give the bits of calls that plan anew, for other tensors, addresses and settings."""

from math import prod

import pytest
import torch
from helpers import DEVICE, functions, kernels

import cukern
from cukern.runtime import planning, recording
from cukern.runtime.device import forget_plans
from cukern.runtime.registry import CASES

# adamw has tables of its own. attention_varlen reads cu_seqlens on a CPU. In place, rope compares addresses.
NEVER_REPLAYED = {"adamw", "attention_varlen", "rope_in_place"}
PLACE = "gpu" if DEVICE == "cuda" else "sim"


@pytest.fixture(autouse=True)
def no_plans():
    forget_plans()
    yield
    forget_plans()


def run(case, inputs, grad):
    """The results of a call, and its gradients for fixed upstream gradients."""
    names = case.names(inputs)
    leaves = [x.detach().clone().requires_grad_(grad and case.has_gradient(n, x)) for n, x in zip(names, inputs, strict=True)]
    arguments = [x.clone() if n in case.in_place else x for n, x in zip(names, leaves, strict=True)]
    with torch.set_grad_enabled(grad):
        result = case.call(*arguments)
    outs = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    if not grad:
        return outs
    torch.manual_seed(1)
    douts = [torch.randn(y.shape, dtype=torch.float64).to(y) for y in outs]
    wanted = [x for x in leaves if x.requires_grad]
    return *(y.detach() for y in outs), *torch.autograd.grad(outs, wanted, douts, allow_unused=True)


def replayed():
    """The functions whose calls are replayed now."""
    return {p.function.__name__ for p in planning.every() if any(callable(state) for state in p.found.values())}


@kernels
@pytest.mark.parametrize("grad", (False, True), ids=("forward", "backward"))
@pytest.mark.parametrize("name", [*functions().values(), "rope_in_place", "gelu_bias", "attention_decode"])
def test_a_replay_gives_the_bits_of_a_call_that_plans(name, grad):
    case = CASES[name]
    if grad and not case.differentiable:
        pytest.skip("the op has no gradient")
    dtype = torch.bfloat16 if torch.bfloat16 in case.op.dtypes else case.op.dtypes[0]
    with cukern.backend(PLACE):
        dims = sorted(case.sim_dims, key=prod)[:2][-1]
        first = case.make(dims, dtype, DEVICE)
        for _ in range(6):  # addresses of CPU tensors are aligned to 64 bytes
            run(case, first, grad)
        assert name in NEVER_REPLAYED or replayed()
        other = case.make(dims, dtype, DEVICE)
        found = run(case, other, grad)
        forget_plans()
        for a, b in zip(found, run(case, other, grad), strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.stride() == b.stride() and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)))


@kernels
def test_every_use_of_a_tensor_is_told_apart():
    """Recorded with one tensor for several arguments, replayed with different ones."""
    x, w = torch.randn(4, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    q, k, v = (torch.randn(1, 2, 16, 8, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    with cukern.backend(PLACE):
        for _ in range(4):
            cukern.layernorm(x, w, w)
            cukern.attention(q, q, q)
        b = torch.randn(8, device=DEVICE)
        y, out = cukern.layernorm(x, w, b), cukern.attention(q, k, v)
        forget_plans()
        assert torch.equal(y, cukern.layernorm(x, w, b))
        assert torch.equal(out, cukern.attention(q, k, v))


@kernels
def test_options_settings_and_layouts_have_plans_of_their_own():
    x = torch.randn(6, 16, device=DEVICE)
    with cukern.backend(PLACE):
        for _ in range(4):
            cukern.softmax(x)
        assert torch.allclose(cukern.softmax(x, scale=2.0), torch.softmax(2 * x, -1))
        assert torch.allclose(cukern.softmax(x, 0), torch.softmax(x, 0))
        assert torch.allclose(cukern.softmax(x.t()), torch.softmax(x.t(), -1))
        assert torch.allclose(cukern.softmax(x[:, 1:]), torch.softmax(x[:, 1:], -1))
        with cukern.use("softmax", "v1"):
            assert torch.allclose(cukern.softmax(x), torch.softmax(x, -1))
        with pytest.raises(TypeError, match="scale"):
            cukern.softmax(x, scale=True)  # equals 1.0, the key of a plan
        with pytest.raises(ValueError, match="negative bit"):
            cukern.softmax(torch.randn(6, 16, dtype=torch.complex64, device=DEVICE).conj().imag)
        y = x.clone().requires_grad_()
        cukern.softmax(y).sum().backward()
        assert y.grad is not None


@kernels
def test_tf32_switch_is_asked_at_every_replay():
    if DEVICE == "cpu":
        pytest.skip("the simulator's products are compared elsewhere")
    a, b = torch.randn(64, 64, device=DEVICE), torch.randn(64, 64, device=DEVICE)
    strict = [cukern.matmul(a, b) for _ in range(5)][-1]
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert not torch.equal(cukern.matmul(a, b), strict)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(cukern.matmul(a, b), strict)


@kernels
def test_the_number_of_plans_is_bounded(monkeypatch):
    monkeypatch.setattr(planning, "MOST", 8)
    with cukern.backend(PLACE):
        for n in range(1, 40):
            cukern.square(torch.randn(n, device=DEVICE))
    assert all(len(plans.found) <= 8 for plans in planning.every())


def record(function, *inputs):
    recorder = recording.Recorder(inputs)
    with recorder:
        result = function(*inputs)
    return recorder, recorder.program(result)


def test_what_depends_on_values_or_addresses_is_not_replayed():
    x, y = torch.randn(3), torch.randn(3)
    for function, why in (
        (lambda x: x * 2 if x.sum() > 0 else x, "reads a tensor"),
        (lambda x: x * x[0].item(), "reads a tensor"),
        (lambda x: x + y, "from outside"),
        (lambda x: x if x.data_ptr() > 1 << 20 else -x, "compared"),
        (lambda x: x if x.data_ptr() % 4096 else -x, "modulo 4096"),
    ):
        recorder, _ = record(function, x)
        assert why in recorder.failed


def test_torch_operations_are_replayed():
    def call(x, w):
        y = torch.empty_like(x)
        y.copy_(x.t().reshape(x.shape)).mul_(2)
        return y[1:], [torch.mm(x, w), None]

    inputs = torch.randn(4, 4), torch.randn(4, 4)
    recorder, program = record(call, *inputs)
    assert not recorder.failed
    replay, others = recording.compiled(program, 2), (torch.randn(4, 4), torch.randn(4, 4))
    (a, (b, none)), (c, (d, _)) = replay(*others), call(*others)
    assert torch.equal(a, c) and torch.equal(b, d) and none is None


def test_a_change_of_the_grad_mode_is_not_replayed():
    """An autograd Function computes without recording. A replay in the mode of its call would record its operations."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty_like(x).copy_(x).mul_(2)

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    recorder, _ = record(Double.apply, torch.randn(3, requires_grad=True))
    assert "grad mode" in recorder.failed


@kernels
def test_recorded_calls_keep_no_graph_alive():
    import gc
    import weakref

    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        with cukern.backend(PLACE):
            for _ in range(4):
                inner = x * 1.0
                alive = weakref.ref(inner)
                cukern.gelu(inner).sum().backward()
                del inner
                assert alive() is None
    finally:
        gc.enable()


def test_a_hundred_thousand_layouts_of_plans_do_not_grow():
    plans = planning.Plans(lambda x: x, False)
    for n in range(100_000):
        plans._remember(n, None)
    planning.every().remove(plans)
    assert len(plans.found) == planning.MOST and 99_999 in plans.found
