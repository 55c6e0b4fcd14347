"""cukern.square in torch: autograd modes, subclasses, tracing, fake tensors, profiler."""

import pytest
import torch
from helpers import gpu, places, same_bits
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cukern
from cukern.runtime.registry import CASES

PLACES = pytest.mark.parametrize("device, version", places("square"))
VERSIONS = list(CASES["square"].op.versions)


@PLACES
def test_autograd_modes(device, version):
    x = torch.randn(5, device=device, requires_grad=True)
    with torch.no_grad():
        assert not cukern.square(x, version=version).requires_grad
    with torch.inference_mode():
        y = cukern.square(x, version=version)
        assert not y.requires_grad and same_bits(y.clone(), torch.square(x).clone())
    y = cukern.square(x, version=version)
    assert y.requires_grad and not y.is_leaf
    assert not cukern.square(x.detach(), version=version).requires_grad


@PLACES
def test_parameter_learns(device, version):
    p = torch.nn.Parameter(torch.randn(7, device=device))
    y = cukern.square(p, version=version)
    assert type(y) is torch.Tensor
    y.sum().backward()
    assert p.grad is not None and torch.equal(p.grad, 2 * p.detach())
    cukern.square(p, version=version).sum().backward()
    assert torch.equal(p.grad, 4 * p.detach()), "gradients accumulate"


@PLACES
def test_gradient_of_a_mixed_use(device, version):
    """Only one of the two inputs of the backward needs a gradient; third derivatives are zero."""
    x = torch.randn(9, device=device, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(cukern.square(x, version=version).sum(), x, create_graph=True)
    (d2x,) = torch.autograd.grad(dx.sum(), x, create_graph=True)
    assert torch.equal(d2x.detach(), torch.full_like(x, 2.0))
    w = torch.ones_like(x, requires_grad=True)
    (dx,) = torch.autograd.grad(cukern.square(x, version=version), x, w, create_graph=True)
    assert torch.equal(torch.autograd.grad(dx.sum(), w)[0], 2 * x.detach())
    y = cukern.square(x, version=version)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@PLACES
def test_an_input_changed_before_backward_is_noticed(device, version):
    x = torch.randn(5, device=device, requires_grad=True)
    z = x * 1
    y = cukern.square(z, version=version)
    z.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


class Celsius(torch.Tensor):
    """A subclass with torch's default __torch_function__, which keeps the class."""


@PLACES
def test_subclass(device, version):
    x = torch.randn(5, device=device).as_subclass(Celsius)
    y = cukern.square(x, version=version)
    assert isinstance(y, torch.Tensor) and torch.equal(
        y.as_subclass(torch.Tensor), torch.square(x.as_subclass(torch.Tensor))
    )


def test_fake_tensors_have_the_shape_and_strides_of_the_real_ones():
    """Needs no GPU: no kernel runs."""
    with FakeTensorMode():
        for x in (
            torch.empty(3, 4, device="cuda"),
            torch.empty(4, 3, device="cuda").t(),
            torch.empty(1, 4, device="cuda").expand(3, 4),
        ):
            y = cukern.square(x.half())
            assert y.device.type == "cuda" and y.dtype == torch.float16 and y.shape == (3, 4)
            assert y.stride() == torch.empty_like(x).stride()
            with pytest.raises(TypeError, match="x must be"):
                cukern.square(x.int())
            with pytest.raises(ValueError, match="no version 'v9'"):
                cukern.square(x, version="v9")


def test_make_fx_traces_one_op():
    with FakeTensorMode():
        x = torch.empty(3, 4, device="cuda")
    graph = make_fx(lambda t: cukern.square(t, version="v2"))(x)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [
        torch.ops.cukern._square.default
    ]


@gpu
@pytest.mark.parametrize("version", VERSIONS)
def test_opcheck(version):
    for x in (
        torch.randn(5, 7, device="cuda"),
        torch.randn(7, 5, device="cuda").t(),
        torch.randn(4, device="cuda").expand(3, 4),
    ):
        torch.library.opcheck(torch.ops.cukern._square.default, (x, version))
        torch.library.opcheck(
            torch.ops.cukern._square_backward.default, (x, torch.randn(x.shape, device="cuda"), version)
        )
        torch.library.opcheck(torch.ops.cukern._square.default, (x[:0], version))


def test_raw_op_refuses_a_cpu_tensor():
    with pytest.raises(
        ValueError,
        match=r"_square runs kernels, and the tensors are on the CPU; .* cukern.backend\(\"sim\"\)",
    ):
        torch.ops.cukern._square(torch.randn(3), "v1")


@gpu
@pytest.mark.filterwarnings("default")  # the profiler emits warnings
def test_profiler_sees_the_kernel_by_its_name():
    x = torch.randn(100, device="cuda")
    cukern.square(x, version="v2")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        cukern.square(x, version="v2")
        torch.cuda.synchronize()
    assert any("square_v2" in event.key for event in profile.key_averages())
