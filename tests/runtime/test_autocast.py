"""Autocast changes nothing: outputs, gradients and second derivatives keep their dtypes and values, wherever forward and backward run.

Except for matmul and linear, which follow torch's rules: their inputs are cast.
"""

import pytest
import torch
from helpers import DEVICE, kernels, same_bits

import cukern
from cukern.bench.calls import arguments, draw_douts, leaves_of, outputs, wanted_inputs
from cukern.runtime.registry import OPS

PLACES = [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]
CAST = ("matmul", "linear")
CASES = [(n, dtype) for n, op in OPS.items() for dtype in (torch.float32, torch.float16) if dtype in op.dtypes and op.stem not in CAST]
DIMS = {"matmul": (3, 5, 40), "linear": (3, 5, 40), "kron_linear": (3, 4, 5)}


def found(call, inputs, wanted, douts, regions, dtype=torch.bfloat16):
    """Outputs, gradients, and gradients of the gradients' squares; `regions`: in which of these three autocast is on."""
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
        seconds = torch.autograd.grad(again, xs, [g.detach() for g in again], allow_unused=True) if again else ()
    return [*outs, *grads, *(g for g in seconds if g is not None)]


def check(call, inputs, wanted, douts, loss=False):
    exact = found(call, inputs, wanted, douts, (False,) * 3)
    assert [y.dtype for y in exact[: len(douts)]] == [dout.dtype for dout in douts]
    assert exact[0].dtype == (torch.float32 if loss else inputs[0].dtype)
    assert [y.dtype for y in exact[len(douts) : len(douts) + len(wanted)]] == [inputs[i].dtype for i in wanted]
    for regions in ((True, False, False), (False, True, False), (False, False, True), (True, True, True)):
        for a, b in zip(found(call, inputs, wanted, douts, regions), exact, strict=True):
            assert_same(a, b, regions)
    for a, b in zip(found(call, inputs, [], douts, (True,) * 3), exact, strict=False):
        assert_same(a, b, "no gradient")


def assert_same(a, b, what):
    """Bit for bit on a GPU. On a CPU the bits of torch's products depend on the alignment of the tensors' addresses."""
    assert a.dtype == b.dtype, what
    if a.is_cuda:
        assert same_bits(a, b), what
    else:
        torch.testing.assert_close(a, b, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name, dtype", CASES)
def test_every_op(name, dtype, device):
    op = OPS[name]
    inputs = op.make(DIMS.get(name) or op.sim_dims[-1], dtype, device)
    loss = name in ("cross_entropy", "cross_entropy_padded")  # float32 for 16-bit logits
    check(lambda *xs: op.call(*arguments(op, xs)), inputs, wanted_inputs(op, "bwd", inputs), draw_douts(op, inputs), loss)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_lokr_linear(dtype, device):
    """One factor is a pair that torch multiplies, each sample of x has its own factors, and bias and residual have gradients."""
    shapes = (2, 3, 24), (2, 4, 6), (5, 2), (2, 4), (20,), (2, 3, 20)
    inputs = [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]

    def call(x, w1, a, b, bias, residual):
        return cukern.lokr_linear(x, w1, (a, b), scale=0.3, bias=bias, residual=residual)

    check(call, inputs, range(6), [torch.randn(2, 3, 20, dtype=dtype, device=device)])


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", CAST)
def test_products_are_cast(name, device):
    """As torch's: inputs of any dtype but float64 are cast, and gradients have the inputs' dtypes."""
    op = OPS[name]
    for dtype in (torch.float32, torch.float16, torch.float64):
        inputs = op.make(DIMS[name], dtype, device)
        leaves, cast = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
        with torch.autocast(inputs[0].device.type, torch.bfloat16):
            out = op.call(*leaves)
        expected = op.call(*(x if dtype == torch.float64 else x.to(torch.bfloat16) for x in cast))
        dout = torch.randn_like(out)
        assert out.dtype == (dtype if dtype == torch.float64 else torch.bfloat16)
        with torch.autocast(inputs[0].device.type, torch.float16):
            ours = torch.autograd.grad(out, leaves, dout)
        theirs = torch.autograd.grad(expected, cast, dout)
        for a, b in zip((out, *ours), (expected, *theirs), strict=True):
            assert_same(a, b, (name, dtype))


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("name", ("kron_linear",))
@pytest.mark.parametrize("inside", (False, True))
def test_in_a_compiled_graph(name, inside):
    op = OPS[name]
    inputs = op.make(DIMS[name], torch.float32, "cpu")
    wanted, douts = range(len(inputs)), draw_douts(op, inputs)

    def call(*xs):
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            return op.call(*xs)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for on in (False, True):
        leaves, exact = leaves_of(inputs, wanted), leaves_of(inputs, wanted)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            y = compiled(*leaves)
            grads = torch.autograd.grad(y, leaves, douts)
        z = op.call(*exact)
        torch.testing.assert_close((y, *grads), (z, *torch.autograd.grad(z, exact, douts)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ("kron_linear",))
def test_transforms_of_the_reference(name):
    op = OPS[name]
    inputs = op.make(DIMS[name], torch.float32, "cpu")
    tangents, many = [torch.randn_like(x) for x in inputs], [torch.randn(3, *x.shape) for x in inputs]

    def every():
        jacobians = torch.func.jacrev(op.call, tuple(range(len(inputs))))(*inputs)
        return *torch.func.jvp(op.call, tuple(inputs), tuple(tangents)), *jacobians, torch.func.vmap(op.call)(*many)

    exact = every()
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(every(), exact, strict=True):
            assert_same(a, b, name)
