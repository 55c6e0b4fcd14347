"""Every op under torch's transforms, against the same maths in plain torch: forward mode, vmap, both
Jacobians, Hessians, checkpoints and functional_call. From the registry; float64, so that nothing but the
derivative is in question."""

from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from helpers import DEVICE, kernels, own_names, random_like
from torch.autograd import forward_ad

import cukern
from cukern.ops import causal_softmax
from cukern.runtime.registry import CASES

PLACES = [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]
SMALL = {
    "matmul": (3, 2, 4),
    "linear": (3, 2, 4),
    "square": (3, 5),
    "softmax": (3, 5),
    "log_softmax": (3, 5),
    "causal_softmax": (2, 3),
}
SMALL |= dict.fromkeys(("embedding", "embedding_tokens"), (2, 3, 4, 2))  # batch, time, vocabulary, features
SMALL |= {"attention": (2, 3, 2), "linear_cross_entropy": (3, 5, 2)}
SMALL |= dict.fromkeys(("cross_entropy", "cross_entropy_padded"), (3, 5))


# calls with options that the registry does not have, and the same in plain torch: of inputs with these shapes
OPTIONS = {
    "lokr_linear": (
        lambda x, w1, a, b, bias, residual: cukern.lokr_linear(
            x, w1, (a, b), scale=0.5, bias=bias, residual=residual
        ),
        lambda x, w1, a, b, bias, residual: residual + 0.5 * x @ torch.kron(w1, a @ b).t() + bias,
        ((3, 10), (2, 2), (3, 2), (2, 5), (6,), (3, 6)),
    ),
    "causal_softmax with a sink": (
        lambda x, sink: cukern.causal_softmax(x, scale=0.7, window=3, sink=sink),
        lambda x, sink: causal_softmax.reference(x, 0.7, 3, sink),
        ((2, 3, 4), (2,)),
    ),
    **{
        f"{name} along {dim} of scale {scale}": (
            lambda x, name=name, dim=dim, scale=scale: getattr(cukern, name)(x, dim, scale=scale),
            lambda x, name=name, dim=dim, scale=scale: getattr(torch, name)(x * scale, dim),
            ((2, 3, 3),),
        )
        for name in ("softmax", "log_softmax")
        for dim, scale in ((0, 1.0), (1, -0.5), (2, 0.0))
    },
}
# One case of a function: the others are the same derivatives at other shapes and strides.
SAME = {
    "attention_grouped",
    "cross_entropy_padded",
    "embedding_tokens",
    "kron_linear_rectangular",
    "rope",
    "rope_quarter",
    "rope_strided",
}
OPERATIONS = [
    *(
        n
        for n, case in CASES.items()
        if case.differentiable and not case.in_place and n not in SAME and torch.float64 in case.op.dtypes
    ),
    *OPTIONS,
]


def dims_of(case):
    return SMALL.get(case.name) or min(case.sim_dims, key=lambda dims: torch.Size(dims).numel())


def problem(name, device):
    """The op and the reference as functions of the inputs that have a gradient, and these inputs. The outputs
    are joined to one tensor."""
    if name in OPTIONS:
        ours, theirs, shapes = OPTIONS[name]
        return ours, theirs, tuple(torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes)
    case = CASES[name]
    inputs = case.make(dims_of(case), torch.float64, device)
    where = [
        i for i, (n, x) in enumerate(zip(case.names(inputs), inputs, strict=True)) if case.has_gradient(n, x)
    ]

    def of(function):
        def call(*some):
            every = list(inputs)
            for i, x in zip(where, some, strict=True):
                every[i] = x
            out = function(*every)
            return out if isinstance(out, torch.Tensor) else torch.cat([o.flatten() for o in out])

        return call

    return of(case.call), of(case.reference), tuple(inputs[i] for i in where)


def close(ours, theirs, what=""):
    """Nested tensors of the same shapes and dtypes are close."""
    leaves = torch.utils._pytree.tree_leaves
    torch.testing.assert_close(
        leaves(ours), leaves(theirs), rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_forward_mode(name, device):
    ours, theirs, inputs = problem(name, device)
    tangents = random_like(inputs)
    for some in [
        tangents,
        *[
            tuple(t if i == j else torch.zeros_like(t) for j, t in enumerate(tangents))
            for i in range(len(tangents))
        ],
    ]:
        out = torch.func.jvp(ours, inputs, some)
        assert out[1].any() or name.endswith("0.0")
        close(out, torch.func.jvp(theirs, inputs, some), "jvp")
    for count in (1, len(inputs)):
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, t) for x, t in zip(inputs[:count], tangents, strict=False)]
            out = tuple(forward_ad.unpack_dual(ours(*duals, *inputs[count:])))
        exact = torch.func.jvp(
            lambda *xs, n=count: theirs(*xs, *inputs[n:]), inputs[:count], tangents[:count]
        )
        close(out, exact, f"{count} dual inputs")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_batched_gradients(name, device):
    """is_grads_batched uses torch's older vmap, which has no rule for raw ops with lists of tensors."""
    ours, theirs, inputs = problem(name, device)
    leaves = [x.clone().requires_grad_() for x in inputs]
    y, exact = ours(*leaves), theirs(*leaves)
    gs = torch.randn(2, *y.shape, dtype=y.dtype, device=y.device)
    expected = [
        torch.stack(parts)
        for parts in zip(*(torch.autograd.grad(exact, leaves, g, retain_graph=True) for g in gs), strict=True)
    ]
    close(torch.autograd.grad(y, leaves, gs, is_grads_batched=True), expected)
    y = ours(*leaves)
    # the backward of CUDA tensors runs in a thread of its own
    with ThreadPoolExecutor(1) as pool:
        one = torch._vmap_internals._vmap(
            lambda g: pool.submit(copy_context().run, torch.autograd.grad, y, leaves, g).result()
        )
        close(one(gs), expected)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_reverse_mode_and_jacobians(name, device):
    ours, theirs, inputs = problem(name, device)
    every = tuple(range(len(inputs)))
    out, pull = torch.func.vjp(ours, *inputs)
    exact, pull_exact = torch.func.vjp(theirs, *inputs)
    g = torch.randn_like(out)
    close((out, pull(g)), (exact, pull_exact(g)), "vjp")
    gs = torch.stack((g, -2 * g))
    for function, gradients in ((ours, found := []), (theirs, expected := [])):
        leaves = [x.clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        gradients += torch.func.vmap(
            lambda g, y=y, xs=leaves: torch.autograd.grad(y, xs, g, retain_graph=True)
        )(gs)
    close(found, expected, "gradients of many")
    jacobian = torch.func.jacrev(theirs, every)(*inputs)
    close(torch.func.jacrev(ours, every)(*inputs), jacobian, "jacrev")
    close(torch.func.jacfwd(ours, every)(*inputs), jacobian, "jacfwd")
    weight = torch.randn_like(out)  # of a sum, whose Hessian is not zero

    def of(f):
        return lambda *xs: (f(*xs) * weight).sum()

    hessian = torch.func.hessian(of(theirs), every)(*inputs)
    close(torch.func.hessian(of(ours), every)(*inputs), hessian, "hessian")
    close(torch.func.jacrev(torch.func.jacrev(of(ours), every), every)(*inputs), hessian, "jacrev of jacrev")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap(name, device):
    ours, theirs, inputs = problem(name, device)
    # the batch is the last dimension, so elements are strided
    many = tuple(torch.stack(random_like([x] * 3), -1) for x in inputs)
    for i, x in enumerate(inputs):
        for at in range(x.ndim + 1):
            args = tuple(
                torch.stack(random_like([x] * 3), at) if i == j else other for j, other in enumerate(inputs)
            )
            dims = tuple(at if i == j else None for j in range(len(inputs)))
            out = min(at, theirs(*inputs).ndim)
            close(
                torch.func.vmap(ours, dims, out)(*args),
                torch.func.vmap(theirs, dims, out)(*args),
                f"vmap over input {i} at {at}",
            )
    close(torch.func.vmap(ours, -1)(*many), torch.func.vmap(theirs, -1)(*many), "vmap over all")
    weight = torch.randn_like(ours(*inputs))

    def gradients(f):
        return torch.func.vmap(
            torch.func.grad(lambda *xs: (f(*xs) * weight).sum(), tuple(range(len(inputs)))), -1
        )

    close(gradients(ours)(*many), gradients(theirs)(*many), "gradients of each sample")
    nested = torch.func.vmap(torch.func.vmap(ours, -1), 0)
    twice = tuple(torch.stack((m, 2 * m)) for m in many)
    close(nested(*twice), torch.func.vmap(torch.func.vmap(theirs, -1), 0)(*twice), "vmap of vmap")


@kernels
@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_over_an_empty_batch(name):
    """The shapes are those of a batch of one. Some of torch's operations, such as its cross_entropy, fail
    without elements."""
    ours, theirs, inputs = problem(name, DEVICE)
    one = tuple(torch.stack(random_like([x]), -1) for x in inputs)
    transforms = (
        lambda f: f,
        lambda f: lambda *xs: torch.func.jvp(f, xs, xs)[1],
        lambda f: torch.func.grad(lambda *xs: f(*xs).sum()),
    )
    for transform in transforms[: 1 if "cross_entropy" in name else 3]:
        expected = torch.func.vmap(transform(theirs), -1)(*one)[:0]
        close(torch.func.vmap(transform(ours), -1)(*(x[..., :0] for x in one)), expected)


@kernels
@pytest.mark.parametrize("name", ("layernorm", "gelu_bias", "swiglu", "cross_entropy"))
def test_second_derivatives_inside_of_saved_tensor_hooks(name):
    """torch.func.vjp, which computes derivatives under transforms, refuses to run inside of the hooks."""
    ours, theirs, inputs = problem(name, DEVICE)
    leaves = [x.clone().requires_grad_() for x in inputs]
    found = []
    for function in (ours, theirs):
        with torch.autograd.graph.save_on_cpu():
            firsts = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
            found.append(torch.autograd.grad(sum(first.square().sum() for first in firsts), leaves))
    close(*found)


class Layer(torch.nn.Module):
    def __init__(self, function, inputs):
        super().__init__()
        self.function, self.weights = (
            function,
            torch.nn.ParameterList([torch.nn.Parameter(x.clone()) for x in inputs[1:]]),
        )

    def forward(self, x):
        return self.function(x, *self.weights)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_checkpoint_and_functional_call(name, device):
    ours, theirs, inputs = problem(name, device)
    layer, exact = Layer(ours, inputs), Layer(theirs, inputs)
    g = torch.randn_like(theirs(*inputs))

    def gradients(call, module):
        x = inputs[0].clone().requires_grad_()
        module.zero_grad()
        out = call(module, x)
        out.backward(g)
        return out.detach(), x.grad, *(p.grad for p in module.parameters())

    expected = gradients(lambda m, x: m(x), exact)
    for reentrant in (False, True):
        close(
            gradients(
                lambda m, x, r=reentrant: torch.utils.checkpoint.checkpoint(m, x, use_reentrant=r), layer
            ),
            expected,
            "checkpoint",
        )
    weights = {k: 2 * v.detach() for k, v in layer.named_parameters()}
    close(
        torch.func.functional_call(layer, weights, inputs[0]),
        torch.func.functional_call(exact, weights, inputs[0]),
        "functional_call",
    )


@kernels
@pytest.mark.parametrize("name", [name for name in own_names() if name in OPERATIONS])
def test_transforms_inside_of_torch_compile(name):
    """A compiled graph would silently lose the derivative. So there is a graph break, and an error with
    fullgraph."""
    ours, theirs, inputs = problem(name, DEVICE)
    tangents = random_like(inputs)

    def jvp(*xs):
        return torch.func.jvp(ours, xs, tangents)[1]

    def grad(*xs):
        return torch.func.grad(lambda *ys: ours(*ys).square().sum())(*xs)

    torch._dynamo.reset()
    close(
        torch.compile(jvp, backend="aot_eager")(*inputs), torch.func.jvp(theirs, inputs, tangents)[1], "jvp"
    )
    close(
        torch.compile(grad, backend="aot_eager")(*inputs),
        torch.func.grad(lambda *ys: theirs(*ys).square().sum())(*inputs),
        "grad",
    )
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"_\w+\.transform"):
        torch.compile(jvp, backend="aot_eager", fullgraph=True)(*inputs)


@kernels
def test_dual_numbers_go_through_a_compiled_function():
    x = torch.randn(5, dtype=torch.float64, device=DEVICE)
    t = torch.randn(5, dtype=torch.float64, device=DEVICE)
    torch._dynamo.reset()
    compiled = torch.compile(lambda y: 3 * CASES["square"].call(y), backend="aot_eager")
    close(compiled(x), 3 * x * x, "without a tangent")
    with forward_ad.dual_level():
        close(
            tuple(forward_ad.unpack_dual(compiled(forward_ad.make_dual(x, t)))),
            (3 * x * x, 6 * x * t),
            "dual",
        )
