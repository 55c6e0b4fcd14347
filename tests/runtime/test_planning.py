"""Replayed calls: they give the bits of calls that plan anew, for other tensors, addresses and settings."""

import gc
import weakref
from math import prod

import pytest
import torch
import torch.utils.checkpoint
from helpers import DEVICE, functions, kernels
from torch.utils._python_dispatch import TorchDispatchMode

import cukern
from cukern.runtime import planning, recording
from cukern.runtime.device import forget_plans
from cukern.runtime.dispatch.autograd import Differentiable, apply_of
from cukern.runtime.registry import CASES
from cukern.runtime.replay import _reinterpret, _Writer, compiled

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
    leaves = [
        x.detach().clone().requires_grad_(grad and case.has_gradient(n, x))
        for n, x in zip(names, inputs, strict=True)
    ]
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
    return {
        p.function.__name__ for p in planning.every() if any(callable(state) for state in p.found.values())
    }


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
            assert a is None or (
                a.stride() == b.stride() and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
            )


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
    replay, others = compiled(program, 2), (torch.randn(4, 4), torch.randn(4, 4))
    (a, (b, none)), (c, (d, _)) = replay(*others), call(*others)
    assert torch.equal(a, c) and torch.equal(b, d) and none is None


def test_views_of_views_are_made_at_once():
    def call(x, y):
        a, b = x[1:].view(2, 3, 8).transpose(0, 2).chunk(2)
        with torch.no_grad():
            product = torch.mul(b[1:, :, 0], y.view(torch.int32)[0])
            return torch.add(a.mT, b.select(2, 1)[:, None]), product

    x, y = torch.randn(9, 8), torch.ones(1)
    with torch.no_grad():
        recorder, program = record(call, x[:7], y)
    assert not recorder.failed and sum(s.view for s in program.steps if isinstance(s, recording.Call)) == 10
    writer = _Writer(program, 2)
    source = writer.write()
    # b[1:, :, 0], a.mT and b.select(..)[:, None]; y.view and [0] as they are, because of the dtype
    assert sum(value is _reinterpret for value in writer.space.values()) == 3
    assert source.count(" = ") == 3 + 2 + 2 and "set_grad" not in str(writer.space)
    replay = compiled(program, 2)
    for view in x[:7], x[2:]:
        assert all(torch.equal(a, b) for a, b in zip(replay(view, y), call(view, y), strict=True))


def test_a_change_of_the_grad_mode_is_not_replayed():
    """An autograd Function computes without recording. A replay in the mode of its call would record its
    operations."""

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


class Alive(TorchDispatchMode):
    """Counts the tensors that exist at a time, of those that operations return inside of the block."""

    def __init__(self):
        super().__init__()
        self.made, self.most = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.made.append(weakref.ref(result))
        self.most = max(self.most, sum(alive() is not None for alive in self.made))
        return result


def test_recorded_and_replayed_calls_free_tensors_where_the_call_does():
    def call(x):
        z = x
        for _ in range(4):
            y = torch.empty_like(z)
            torch.mul(z, 2, out=y)
            z = y.t() @ y
            x.copy_(x)
        return z

    x = torch.randn(4, 4)
    with Alive() as plain:
        call(x)
    with Alive() as recorded:
        recorder, program = record(call, x)
    assert not recorder.failed
    replay = compiled(program, 1)
    with Alive() as replayed:
        replay(x)
    assert replayed.most <= plain.most == recorded.most


def normed(x, w, dout, **options):
    """rmsnorm and its gradients."""
    y = cukern.rmsnorm(x, w)
    return y.detach(), *torch.autograd.grad(y, (x, w), dout, **options)


def moved(t):
    """The same numbers in other memory, with other strides and another alignment."""
    return torch.empty(t.numel() * 2 + 1, dtype=t.dtype, device=t.device)[1::2].view_as(t).copy_(t)


def second_order(x, w, dout):
    y = cukern.rmsnorm(x, w)
    (dx,) = torch.autograd.grad(y, x, dout, create_graph=True)
    return torch.autograd.grad(dx.square().sum(), (x, w))


def with_hooks(x, w, dout):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), moved):
        return normed(x, w, dout)


def with_other_data(x, w, dout):
    y, before = cukern.rmsnorm(x, w), w.data
    w.data = moved(before)
    found = torch.autograd.grad(y, (x, w), dout)
    w.data = before
    return found


BACKWARDS = {
    "the same": normed,
    "another layout": lambda x, w, dout: normed(x, w, moved(dout)),
    "an expanded gradient": lambda x, w, dout: normed(x, w, dout[:1, :1].expand_as(dout)),
    "one input": lambda x, w, dout: torch.autograd.grad(cukern.rmsnorm(x, w), w, dout),
    "no gradient of x": lambda x, w, dout: torch.autograd.grad(cukern.rmsnorm(x.detach(), w), w, dout),
    "twice": lambda x, w, dout: normed(x, w, dout, retain_graph=True),
    "create_graph": lambda x, w, dout: [t.detach() for t in normed(x, w, dout, create_graph=True)],
    "a second derivative": second_order,
    "hooks of saved tensors": with_hooks,
    "other data": with_other_data,
    "a batch of gradients": lambda x, w, dout: torch.autograd.grad(
        cukern.rmsnorm(x, w), (x, w), torch.stack((dout, 2 * dout)), is_grads_batched=True
    ),
    "a transform": lambda x, w, dout: torch.func.vjp(cukern.rmsnorm, x.detach(), w.detach())[1](dout),
    "a checkpoint": lambda x, w, dout: torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(cukern.rmsnorm, x, w, use_reentrant=False), (x, w), dout
    ),
}


@kernels
@pytest.mark.parametrize("name", BACKWARDS)
def test_a_replayed_backward_is_that_of_a_call_that_plans(name):
    with cukern.backend(PLACE):
        x, w, dout = (torch.randn(*shape, device=DEVICE) for shape in ((4, 8), (8,), (4, 8)))
        x.requires_grad_()
        w.requires_grad_()
        for _ in range(4):
            normed(x, w, dout)
        found = [BACKWARDS[name](x, w, dout) for _ in range(5)]
        with recording.off():
            expected = BACKWARDS[name](x, w, dout)
    for one in found:
        for a, b in zip(one, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@kernels
def test_the_graph_of_a_replayed_call_is_as_strict_as_that_of_another():
    with cukern.backend(PLACE):
        x = torch.randn(4, 8, device=DEVICE).requires_grad_()
        for _ in range(8):
            inner = x * 1.0
            y = cukern.square(inner)
            y.sum().backward()
        assert y.grad_fn.name() == "_SquareBackward"
        assert "_SquareBackward" in repr(y.grad_fn)
        with pytest.raises(RuntimeError, match="a second time"):
            y.sum().backward()
        y = cukern.square(inner)
        inner.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


class Counted(Differentiable):
    """The sum of x and c, whose backward tells what it depends on. Python code of a backward runs only where
    it is not replayed."""

    runs = 0

    @staticmethod
    def forward(x, c):
        return x + c

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        Counted.runs += 1
        _, c = ctx.saved_tensors
        factor = (
            1
            + (not g.is_contiguous())
            + 2 * (not c.is_contiguous())
            + 4 * (g.data_ptr() % 64 != 0)
            + 8 * torch.is_grad_enabled()
        )
        factor += 16 * torch.is_autocast_enabled("cpu") + 32 * ctx.needs_input_grad[1]
        return g * factor, None


def test_a_backward_is_planned_for_each_layout_and_setting():
    call = planning.planned("x", "c")(lambda x, c: apply(x, c))
    apply = apply_of(Counted)
    x, c, g = torch.randn(8, 8).requires_grad_(), torch.randn(8, 8), torch.ones(8, 8)
    with cukern.backend("sim"):

        def factor(c, g, **options):
            y = call(x, c)
            with torch.autocast("cpu", enabled=options.pop("autocast", False)):
                return torch.autograd.grad(y, x, g, **options)[0].detach().flatten()[0]

        for _ in range(8):
            assert factor(c, g) == 1
        Counted.runs = 0
        assert factor(c, g) == 1 and not Counted.runs
        for _ in range(8):
            assert factor(c, g.t()) == 2
            assert factor(c.t(), g) == 3
            assert factor(c, torch.ones(65)[1:].view(8, 8)) == 5
            assert factor(c, g, create_graph=True) == 9
            assert factor(c, g, autocast=True) == 17
            assert factor(c.clone().requires_grad_(), g) == 33
            assert factor(c, g) == 1


def test_a_forward_whose_context_has_tensors_is_not_inlined():
    """The tensors of attributes are those of one call."""

    class Scaled(Differentiable):
        @staticmethod
        def forward(ctx, x):
            ctx.factor = x.detach() * 2
            return x * ctx.factor

        @staticmethod
        def backward(ctx, g):
            return g * ctx.factor

    apply = apply_of(Scaled)
    for x in (torch.randn(3).requires_grad_() for _ in range(2)):
        recorder, program = record(apply, x)
        assert not recorder.failed and [step.forward for step in program.steps] == [None]
    other = torch.randn(3).requires_grad_()
    (g,) = torch.autograd.grad(compiled(program, 1)(other).sum(), other)
    assert torch.equal(g, 2 * other.detach())


def test_a_hundred_thousand_layouts_of_plans_do_not_grow():
    plans = planning.Plans(lambda x: x)
    for n in range(100_000):
        plans._remember(n, None)
    planning.every().remove(plans)
    assert len(plans.found) == planning.MOST and 99_999 in plans.found
