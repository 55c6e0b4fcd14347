"""Autocast follows torch's rules: it casts the inputs of products, and on a GPU those of norms and softmax.
It changes nothing else.

Outputs, gradients and second derivatives are those of the op on inputs that were cast before, wherever
forward and backward run.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers import DEVICE, PLACE, functions, kernels, own_names, same_bits

import cukern
from cukern.bench.calls import arguments, leaves_of, outputs, wanted_inputs
from cukern.runtime import registry

PLACES = [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]
B, S, D = torch.bfloat16, torch.float32, torch.float64
# their inputs are cast to autocast's dtype
PRODUCTS = ("matmul", "kron_linear", "lokr_linear", "attention", "linear_cross_entropy")
WIDE = ("layernorm", "softmax", "causal_softmax")  # their 16-bit inputs are cast to float32, on a GPU only
CASES = [  # the casts are the same in all cases of a function
    pytest.param(name, dtype, *place.values, marks=place.marks, id=f"{name}-{dtype}-{place.id}")
    for name in functions().values()
    for dtype, place in ((S, PLACES[0]), (S, PLACES[1]), (torch.float16, PLACES[1]), (D, PLACES[1]))
]
DIMS = {"matmul": (3, 5, 40), "linear": (3, 5, 40), "kron_linear": (3, 4, 5)}


def kind_of(name):
    """The stem of an op. linear_cross_entropy, a product, has that of cross_entropy."""
    return name if name == "linear_cross_entropy" else registry.CASES[name].op.stem


def call_of(case):
    """The op as a function of its inputs. The tools round the loss of linear_cross_entropy to x's dtype."""
    return cukern.linear_cross_entropy if case.name == "linear_cross_entropy" else case.call


def rule(kind, dtype, device, autocast):
    """The dtype to which autocast casts floating-point inputs of this dtype."""
    if dtype == torch.float64:
        return dtype
    return autocast if kind in PRODUCTS else torch.float32 if kind in WIDE and device == "cuda" else dtype


def cast(inputs, kind, autocast=torch.bfloat16):
    return [
        x.to(rule(kind, x.dtype, x.device.type, autocast)) if x.is_floating_point() else x for x in inputs
    ]


def found(call, inputs, wanted, douts, regions, dtype=torch.bfloat16):
    """Outputs, gradients, and gradients of the gradients' squares; `regions`: in which of these three
    autocast is on."""
    leaves, kind = leaves_of(inputs, wanted), inputs[0].device.type
    xs = [leaves[i] for i in wanted]
    with torch.autocast(kind, dtype, enabled=regions[0]):
        outs = outputs(call(*leaves))
    if not wanted:
        return outs
    with torch.autocast(kind, dtype, enabled=regions[1]):
        grads = torch.autograd.grad(outs, xs, douts, create_graph=True)
    again = [g for g in grads if g.requires_grad]
    with torch.autocast(kind, dtype, enabled=regions[2]):
        seconds = (
            torch.autograd.grad(again, xs, [g.detach() for g in again], allow_unused=True) if again else ()
        )
    return [*outs, *grads, *(g for g in seconds if g is not None)]


def check(call, inputs, wanted, kind):
    for on in (False, True):
        exact_call = (lambda *xs: call(*cast(xs, kind))) if on else call
        with torch.no_grad():
            douts = [torch.randn_like(y) for y in outputs(exact_call(*inputs))]
        exact = found(exact_call, inputs, wanted, douts, (False,) * 3)
        assert [y.dtype for y in exact[len(douts) : len(douts) + len(wanted)]] == [
            inputs[i].dtype for i in wanted
        ]
        for regions in (
            ((True, False, False), (True, True, True)) if on else ((False, True, False), (False, False, True))
        ):
            for a, b in zip(found(call, inputs, wanted, douts, regions), exact, strict=True):
                assert_same(a, b, regions)
        for a, b in zip(found(call, inputs, [], douts, (on,) * 3), exact, strict=False):
            assert_same(a, b, "no gradient")


def assert_same(a, b, what):
    """Bit for bit on a GPU. On a CPU the bits of torch's products depend on the alignment of the tensors'
    addresses."""
    assert a.dtype == b.dtype, what
    if a.is_cuda:
        assert same_bits(a, b), what
    else:
        torch.testing.assert_close(a, b, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("name, dtype, device", CASES)
def test_every_op(name, dtype, device):
    case = registry.CASES[name]
    inputs = case.make(DIMS.get(name) or case.sim_dims[-1], dtype, device)
    check(
        lambda *xs: call_of(case)(*arguments(case, xs)),
        inputs,
        wanted_inputs(case, "bwd", inputs),
        kind_of(name),
    )


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_lokr_linear(dtype, device):
    """One factor is a pair that torch multiplies, each sample of x has its own factors, and bias and residual
    have gradients."""
    shapes = (2, 3, 24), (2, 4, 6), (5, 2), (2, 4), (20,), (2, 3, 20)
    inputs = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def call(x, w1, a, b, bias, residual):
        return cukern.lokr_linear(x, w1, (a, b), scale=0.3, bias=bias, residual=residual)

    check(call, inputs, range(6), "lokr_linear")


TARGETS, TOKENS = torch.tensor([3, 0, 1, 2]), torch.tensor([[1, 0, 3]])
MIXED = {  # the call; the same in torch; shapes and dtypes
    "rmsnorm, residual": (
        lambda x, w, r: cukern.rmsnorm(x, w, residual=r)[0],
        lambda x, w, r: F.rms_norm(x + r, (16,), w, 1e-6),
        ((4, 16), B), ((16,), S), ((4, 16), S),
    ),
    "rmsnorm": (cukern.rmsnorm, lambda x, w: F.rms_norm(x, (16,), w.to(x.dtype), 1e-6), ((4, 16), S),
                ((16,), B)),
    "layernorm": (cukern.layernorm, lambda x, w, b: F.layer_norm(x, (16,), w, b), ((4, 16), B), ((16,), S),
                  ((16,), S)),
    "linear_cross_entropy": (
        lambda x, w: cukern.linear_cross_entropy(x, w, TARGETS.to(x.device)),
        lambda x, w: F.cross_entropy(F.linear(x, w), TARGETS.to(x.device)),
        ((4, 16), B), ((5, 16), S),
    ),
    "swiglu": (cukern.swiglu, lambda x, y: F.silu(x) * y, ((4, 16), B), ((4, 16), S)),
    "geglu": (cukern.geglu, lambda x, y: F.gelu(x) * y, ((4, 16), S), ((4, 16), B)),
    "gelu": (cukern.gelu, lambda x, y: F.gelu(x + y), ((4, 16), S), ((16,), B)),
    "embedding": (
        lambda w, p: cukern.embedding(TOKENS.to(w.device), w, p),
        lambda w, p: F.embedding(TOKENS.to(w.device), w) + p[:3],
        ((5, 8), B), ((4, 8), S),
    ),
    "attention": (
        cukern.attention,
        lambda *x: F.scaled_dot_product_attention(*x, is_causal=True),
        *(((1, 1, 4, 16), t) for t in (S, S, B)),
    ),
    "attention_varlen": (
        lambda *x: cukern.attention_varlen(*x, torch.tensor([0, 4], dtype=torch.int32, device=x[0].device)),
        lambda *x: F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in x),
                                                  is_causal=True)[0].transpose(0, 1),
        *(((4, 1, 16), t) for t in (S, B, S)),
    ),
    "kron_linear": (
        lambda x, *w: cukern.kron_linear(x, w),
        lambda x, *w: x @ torch.kron(*w).to(x.dtype),
        ((4, 12), B), ((3, 5), S), ((4, 2), S),
    ),
    "lokr_linear": (cukern.lokr_linear, lambda x, *w: F.linear(x, torch.kron(*w)), ((4, 12), S), ((5, 3), B),
                    ((2, 4), S)),
    "linear": (cukern.linear, F.linear, ((4, 16), B), ((5, 16), S), ((5,), S)),
}  # fmt: skip


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize(
    "device, compiled", [("cpu", False), pytest.param(DEVICE, True, marks=kernels)], ids=("cpu", "compiled")
)
@pytest.mark.parametrize("name", MIXED)
def test_mixed_dtypes(name, device, compiled):
    """Of the usual recipe: float32 parameters, 16-bit activations. Dtypes are torch's, and gradients have
    those of the inputs."""
    call, torchs, *inputs = MIXED[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape, device=device).to(dtype) for shape, dtype in inputs]
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    if compiled:
        torch._dynamo.reset()
        call = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast(inputs[0].device.type, torch.bfloat16):
        y, z = call(*ours), torchs(*theirs)
    assert (y.dtype, y.shape) == (z.dtype, z.shape)
    dout = torch.randn_like(y)
    for a, b, x in zip(
        (y, *torch.autograd.grad(y, ours, dout)),
        (z, *torch.autograd.grad(z, theirs, dout)),
        (y, *inputs),
        strict=True,
    ):
        assert a.dtype == x.dtype
        torch.testing.assert_close(a.float(), b.float(), rtol=3e-2, atol=5e-2)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtypes", [(S, B, B), (B, torch.float16, S), (D, S, B), (S, D, S), (B, S, B)])
def test_a_norm_takes_weights_of_another_dtype(dtypes, device):
    """Without autocast. As if weight and bias were converted to the dtype of computation; x is not
    converted."""
    x, w, b = (
        torch.randn(s, device=device).to(d).requires_grad_()
        for s, d in zip(((3, 16), (16,), (16,)), dtypes, strict=True)
    )
    wide = torch.promote_types(dtypes[0], S)
    leaves = [t.detach().to(t.dtype if t is x else wide).requires_grad_() for t in (x, w, b)]
    for count, call in ((3, cukern.layernorm), (2, cukern.rmsnorm), (2, lambda x, w: cukern.gelu(x, w))):
        y, z = call(*(x, w, b)[:count]), call(*leaves[:count])
        assert y.dtype == x.dtype and same_bits(y, z)
        dout = torch.randn_like(y)
        ours, theirs = (
            torch.autograd.grad(out, inputs[:count], dout) for out, inputs in ((y, (x, w, b)), (z, leaves))
        )
        for a, e, t in zip(ours, theirs, (x, w, b), strict=False):
            assert a.dtype == t.dtype and same_bits(a, e.to(t.dtype))


def test_mixed_dtypes_are_refused_without_autocast():
    x, y = torch.randn(4, 16), torch.randn(4, 16).bfloat16()
    for call in (
        lambda: cukern.swiglu(x, y),
        lambda: cukern.linear(x, y),
        lambda: cukern.rmsnorm(x, None, residual=y),
    ):
        with pytest.raises(TypeError, match="one dtype"):
            call()


def test_the_rules_are_torchs():
    """Which ops torch casts to float32, on which device."""
    for name in ("layer_norm", "softmax.int", "log_softmax.int"):
        listed = [
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{kind}")
            for kind in ("CUDA", "CPU")
        ]
        assert listed == [True, False]


def test_a_gpu_widens_norms_and_softmax(monkeypatch):
    """The rule of a GPU without one: tensors say that they are on a GPU, and the raw ops are not called."""
    if PLACE == "cuda":
        pytest.skip("test_every_op runs on the GPU")
    seen = []

    class Stop(Exception):
        pass

    def stop(x, *_):
        seen.append(x.dtype)
        raise Stop

    for module in ("layernorm", "softmax", "causal_softmax"):
        monkeypatch.setattr(f"cukern.ops.{module}{'' if module[0] == 'c' else '.op'}.{NEXT[module]}", stop)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: True)
    for module in ("softmax.op", "causal_softmax"):
        monkeypatch.setattr(f"cukern.ops.{module}._autocast", lambda: True)
    x, w = torch.randn(4, 16).half(), torch.ones(16).half()
    calls = (
        cukern.softmax,
        cukern.log_softmax,
        cukern.causal_softmax,
        lambda x: cukern.rmsnorm(x, w),
        lambda x: cukern.layernorm(x, w, w),
    )
    for call in calls:
        for dtype in (torch.float16, torch.float64):
            with pytest.raises(Stop):
                call(x.to(dtype))
            assert seen.pop() == torch.promote_types(dtype, torch.float32)


# called with x after the cast
NEXT = {"layernorm": "unit_column_stride", "softmax": "checked_scale", "causal_softmax": "checked_scale"}


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@kernels
@pytest.mark.parametrize("name", [name for name in own_names() if registry.CASES[name].differentiable])
def test_in_a_compiled_graph(name, device):
    case = registry.CASES[name]
    inputs = case.make(DIMS.get(name) or case.sim_dims[-1], torch.float32, device)
    wanted = wanted_inputs(case, "bwd", inputs)
    torch._dynamo.reset()
    for inside in (False, True):

        def call(*xs, inside=inside):
            if not inside:
                return call_of(case)(*arguments(case, xs))
            with torch.autocast(xs[0].device.type, torch.bfloat16):
                return call_of(case)(*arguments(case, xs))

        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for on in (False, True):
            changed = cast if inside or on else lambda xs, _: xs

            def exact_call(*xs, changed=changed):
                return call_of(case)(*arguments(case, changed(xs, kind_of(name))))

            with torch.no_grad():
                douts = [torch.randn_like(y) for y in outputs(exact_call(*inputs))]
            leaves, exact = leaves_of(inputs, wanted), leaves_of(inputs, wanted)
            with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=on):
                ys = outputs(compiled(*leaves))
                grads = torch.autograd.grad(ys, [leaves[i] for i in wanted], douts)
            zs = outputs(exact_call(*exact))
            expected = *zs, *torch.autograd.grad(zs, [exact[i] for i in wanted], douts)
            bound = 4e-2 if kind_of(name) in PRODUCTS and (inside or on) else 1e-5
            torch.testing.assert_close((*ys, *grads), expected, rtol=bound, atol=bound)


def test_transforms_of_the_reference():
    name = "kron_linear"
    case = registry.CASES[name]
    inputs = case.make(DIMS[name], torch.float32, "cpu")
    tangents, many = [torch.randn_like(x) for x in inputs], [torch.randn(3, *x.shape) for x in inputs]

    def every(call):
        jacobians = torch.func.jacrev(call, tuple(range(len(inputs))))(*inputs)
        return *torch.func.jvp(call, tuple(inputs), tuple(tangents)), *jacobians, torch.func.vmap(call)(*many)

    exact = every(lambda *xs: case.call(*cast(xs, kind_of(name))))
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(every(case.call), exact, strict=True):
            assert_same(a, b, name)
