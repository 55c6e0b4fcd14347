"""gelu, swiglu and geglu: numbers over the whole range, biases, halves read in place, strides, extreme values
and refusals.

The tests of the registry check the outputs and gradients of random numbers.
"""

import math

import pytest
import torch
from helpers import DEVICE, FLOATS, gpu, kernels, places, same_bits
from torch.nn import functional

import cukern
from cukern.ops.gelu import _FORWARD
from cukern.runtime.registry import CASES

PLACES = pytest.mark.parametrize("device, version", places("gelu"))
VERSIONS = pytest.mark.parametrize("version", CASES["gelu"].op.versions)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=str)
FUNCTIONS = {  # of x: ours, torch's
    "gelu": (lambda x, version: cukern.gelu(x, version=version), functional.gelu),
    "gelu_tanh": (
        lambda x, version: cukern.gelu(x, approximate="tanh", version=version),
        lambda x: functional.gelu(x, approximate="tanh"),
    ),
    "silu": (lambda x, version: cukern.swiglu(x, torch.ones_like(x), version=version), functional.silu),
}
inf, nan = float("inf"), float("nan")


def gradients(function, inputs, dout):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))


@DTYPES
@PLACES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_part_of_the_range(name, device, version, dtype):
    """Outputs and gradients between -12 and 12, relative to the largest of x and 1: at most twice torch's
    error, and two roundings.

    In float64 the truth is torch's own result, whose 1 - tanh^2 has the rounding of tanh times up to 20."""
    ours, theirs = FUNCTIONS[name]
    x = torch.linspace(-12, 12, 777 if device == "cpu" else 3000, dtype=torch.float64).to(dtype).to(device)
    exact = gradients(theirs, [x.double()], torch.ones_like(x).double())
    found = gradients(lambda t: ours(t, version), [x], torch.ones_like(x))
    peer = gradients(theirs, [x], torch.ones_like(x))
    eps, scale = torch.finfo(dtype).eps, x.double().abs().clamp(min=1)
    for what, a, b, e in zip(("out", "dx"), found, peer, exact, strict=True):
        torchs = ((b.double() - e).abs() / scale).max()
        assert ((a.double() - e).abs() / scale).max() <= 2 * torchs + (
            20 if dtype == torch.float64 else 2
        ) * eps, what


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@kernels
def test_small_results_are_relatively_accurate(name, dtype):
    """16-bit kernels use approximate instructions. Where 1 + erf or 1 + tanh cancels, their results are
    closer than torch's in float32."""
    x = torch.linspace(-4, -1, 999).to(dtype).to(DEVICE)
    y, exact = FUNCTIONS[name][0](x, "v2").double(), FUNCTIONS[name][1](x.double())
    assert ((y - exact) / exact).abs().max() <= 1.01 * torch.finfo(dtype).eps


@DTYPES
@VERSIONS
@kernels
def test_extreme_values(version, dtype):
    """What is finite is right. Gradients do not become NaN where x * x overflows, as torch's with tanh do.
    NaN stays NaN."""
    info = torch.finfo(dtype)
    special = [0.0, -0.0, info.max, -info.max, info.tiny, -info.tiny, 100.0, -100.0, inf, nan, -40.5, 40.5]
    x = torch.tensor(special * 4, dtype=dtype, device=DEVICE)
    large, small = x > 40, (x < -40) & x.isfinite()
    for name, (ours, _) in FUNCTIONS.items():
        y, dx = gradients(lambda t, f=ours: f(t, version), [x], torch.ones_like(x))
        assert torch.equal(y[large], x[large]) and y[x.isnan()].isnan().all(), name
        assert (y[small].abs() <= 1e-15).all() and (y[x == 0] == 0).all(), name
        finite = x.isfinite()
        assert dx[finite].isfinite().all() and (dx[large & finite] - 1).abs().max() <= info.eps, name
        assert dx[small & finite].abs().max() <= 1e-14 and (dx[x == 0] == 0.5).all(), name


@PLACES
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bias_dtype", ("x's", torch.float32), ids=str)
@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_bias(device, version, dtype, bias_dtype, approximate):
    """Of x's dtype or float32; its gradient has its dtype. One and two thread blocks of rows, odd widths, and
    two tiles of columns."""
    for shape in ((3, 5), (2, 20, 8), (70, 24), (70, 35), (1, 264), (40,), (), (0, 8), (4, 0)):
        x = torch.randn(shape, dtype=torch.float64).to(dtype).to(device)
        bias = (
            torch.randn(shape[-1:], dtype=torch.float64)
            .to(dtype if bias_dtype == "x's" else bias_dtype)
            .to(device)
        )
        dout = torch.randn_like(x)
        found = gradients(
            lambda x, b: cukern.gelu(x, b, approximate=approximate, version=version), (x, bias), dout
        )
        exact = gradients(
            lambda x, b: functional.gelu(x + b, approximate=approximate),
            (x.double(), bias.double()),
            dout.double(),
        )
        assert [t.dtype for t in found] == [dtype, dtype, bias.dtype]
        eps = max(torch.finfo(t).eps for t in (dtype, bias.dtype))
        rows = max(1, math.prod(shape[:-1]))
        for what, a, e, scale in zip(("out", "dx", "dbias"), found, exact, (8, 4, 4 * rows), strict=True):
            assert a.shape == e.shape and ((a.double() - e).abs() <= 4 * eps * scale).all(), (what, shape)


@kernels
def test_bias_gradient_is_summed_before_dx_is_rounded():
    """v2 adds in float32: closer than the sum of rounded numbers."""
    x, bias, dout = (torch.randn(s, device=DEVICE).bfloat16() for s in ((300, 8), (8,), (300, 8)))
    _, dx, dbias = gradients(lambda x, b: cukern.gelu(x, b.float(), version="v2"), (x, bias), dout)
    exact = gradients(lambda x, b: functional.gelu(x + b), (x.double(), bias.double()), dout.double())[2]
    assert (dbias.double() - exact).abs().max() <= 2**-8 * exact.abs().max()
    f32 = torch.ops.cukern._gelu_backward
    with cukern.backend("gpu" if DEVICE == "cuda" else "sim"):
        sums = f32(x, None, bias.float(), dout, "none", True, "v2")[2]
    assert (sums.double() - exact).abs().max() < 1e-4 < (dx.double().sum(0) - exact).abs().max()


@VERSIONS
@kernels
def test_halves_are_read_in_place(version, monkeypatch):
    """No copy is made of strided halves, whose widths give vectors or not; nor of expanded gradients."""
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("a copy"))
    for cols in (16, 24, 5):
        for dtype in FLOATS:
            gate, up = torch.randn(2, 3, 2 * cols, dtype=torch.float64, device=DEVICE).to(dtype).chunk(2, -1)
            up = up.clone() if cols == 24 else up  # rows of another stride
            dout = torch.ones(cols, dtype=dtype, device=DEVICE).expand(2, 3, cols)
            for ours, theirs in (
                (lambda g, u: cukern.swiglu(g, u, version=version), lambda g, u: functional.silu(g) * u),
                (lambda g, u: cukern.geglu(g, u, version=version), lambda g, u: functional.gelu(g) * u),
            ):
                exact = gradients(theirs, (gate.double(), up.double()), dout.double())
                for a, e in zip(gradients(ours, (gate, up), dout), exact, strict=True):
                    eps = torch.finfo(dtype).eps
                    torch.testing.assert_close(a.double(), e, rtol=2 * eps, atol=4 * eps)
                    assert a.is_contiguous()


@kernels
def test_which_kernel_runs(monkeypatch):
    """Odd widths and row strides, and views that start within a vector, are not aligned. Rows shorter than a
    vector take v1's kernel."""
    names = []
    launch = type(_FORWARD[torch.float32, torch.float32, 0, 1, True]).on
    monkeypatch.setattr(
        "cukern.runtime.launch.kernel.Kernel.on",
        lambda self, device: names.append(self.name) or launch(self, device),
    )
    x = torch.randn(6, 24, dtype=torch.float32, device=DEVICE)
    bias = torch.randn(25, device=DEVICE)
    for call, expected in (
        (lambda: cukern.gelu(x), "gelu<float, float, 0, 4, true>"),
        (lambda: cukern.gelu(x, version="v1"), "gelu<float, float, 0, 1, true>"),
        (lambda: cukern.gelu(x.flatten()[1:-3]), "gelu<float, float, 0, 4, false>"),
        (lambda: cukern.gelu(x.flatten()[:-3]), "gelu<float, float, 0, 4, false>"),
        (lambda: cukern.gelu(x[:, :20]), "gelu<float, float, 0, 4, true>"),
        (lambda: cukern.gelu(x[:, :3]), "gelu<float, float, 0, 1, true>"),
        (lambda: cukern.gelu(x[:, :21]), "gelu<float, float, 0, 4, false>"),
        (lambda: cukern.gelu(x, bias[:24], approximate="tanh"), "gelu<float, float, 1, 4, true>"),
        (lambda: cukern.gelu(x, bias[1:], approximate="tanh"), "gelu<float, float, 1, 4, false>"),
        (lambda: cukern.gelu(x.half(), bias[:24]), "gelu<__half, float, 0, 8, true>"),
        (lambda: cukern.gelu(x.half(), bias.half()[:24]), "gelu<__half, __half, 0, 8, true>"),
        (lambda: cukern.swiglu(*x.chunk(2, -1)), "gelu<float, float, 2, 4, true>"),
        (lambda: cukern.swiglu(*x[:, 2:].chunk(2, -1)), "gelu<float, float, 2, 4, false>"),
    ):
        names.clear()
        call()
        assert names == [expected]


@PLACES
def test_shapes_and_strides(device, version):
    for x in (
        torch.randn(()),
        torch.randn(0),
        torch.randn(3, 0, 5),
        torch.randn(7, 5).t(),
        torch.randn(2, 3, 4).movedim(1, 2),
        torch.randn(1).expand(4, 6),
    ):
        x = x.to(device)
        for ours, theirs in FUNCTIONS.values():
            y = ours(x, version)
            torch.testing.assert_close(y, theirs(x))
            assert y.shape == x.shape and (y.is_contiguous() or y.stride() == x.stride())


@VERSIONS
@kernels
def test_gradients_in_torch_are_those_of_the_kernels(version):
    """create_graph computes the gradients in torch's operations."""
    x, up, bias, dout = (
        torch.randn(s, dtype=torch.float64, device=DEVICE) for s in ((6, 8), (6, 8), (8,), (6, 8))
    )
    for function, inputs in (
        (lambda x, b: cukern.gelu(x, b, version=version), (x, bias)),
        (lambda x, b: cukern.gelu(x, b, approximate="tanh", version=version), (x, bias)),
        (lambda x, u: cukern.swiglu(x, u, version=version), (x, up)),
    ):
        leaves = [t.clone().requires_grad_() for t in inputs]
        by_torch = torch.autograd.grad(function(*leaves), leaves, dout, create_graph=True)
        for a, b in zip(by_torch, gradients(function, inputs, dout)[1:], strict=True):
            torch.testing.assert_close(a.detach(), b)
        assert torch.autograd.gradgradcheck(function, leaves)


@VERSIONS
@kernels
def test_only_the_wanted_gradients(version):
    x, bias = torch.randn(40, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    both = gradients(lambda x, b: cukern.gelu(x, b, version=version), (x, bias), torch.ones_like(x))
    for i, leaf in enumerate((x.clone(), bias.clone())):
        leaf.requires_grad_()
        inputs = (leaf, bias) if i == 0 else (x, leaf)
        cukern.gelu(*inputs, version=version).sum().backward()
        torch.testing.assert_close(leaf.grad, both[1 + i])


@gpu
@VERSIONS
def test_more_than_2_to_31_elements(version, most_memory):
    rows, cols = 2**20 + 1, 2**11 + 8
    free, _ = torch.cuda.mem_get_info()
    if free < 9 * rows * cols:
        pytest.skip(
            f"needs {9 * rows * cols / 2**30:.0f} GiB of free GPU memory, there are {free / 2**30:.0f}"
        )
    x, bias = torch.randn(rows, cols, dtype=torch.float16, device="cuda"), torch.randn(cols, device="cuda")
    y = cukern.gelu(x, bias, version=version)
    dx, _, dbias = torch.ops.cukern._gelu_backward(x, None, bias, x, "none", True, version)
    for part in (slice(0, 5), slice(rows - 5, rows)):
        assert same_bits(y[part], cukern.gelu(x[part].clone(), bias, version=version))
        assert same_bits(
            dx[part],
            torch.ops.cukern._gelu_backward(
                x[part].clone(), None, bias, x[part].clone(), "none", False, version
            )[0],
        )
    assert dbias.isfinite().all()


# ---- what it refuses


def test_refusals():
    x = torch.randn(2, 6)
    with pytest.raises(TypeError, match=r"bias must be torch\.float.*, got torch\.int64"):
        cukern.gelu(x.half(), x[0].long())
    with pytest.raises(
        ValueError, match=r"bias has shape \(5,\), it must be \(6,\): one value for each column of x"
    ):
        cukern.gelu(x, x[0, :5])
    with pytest.raises(ValueError, match=r"bias has shape \(6,\), it must be \(\): one value"):
        cukern.gelu(x[0, 0], x[0])
    with pytest.raises(ValueError, match=r"up has shape \(6,\), it must be \(2, 6\): the shape of gate"):
        cukern.geglu(x, x[0])
    with pytest.raises(
        TypeError, match=r"up is torch\.float16, gate is torch\.float32: they must have one dtype"
    ):
        cukern.swiglu(x, x.half())
    with pytest.raises(ValueError, match=r"approximate must be one of none, tanh, got 'erf'"):
        cukern.gelu(x, approximate="erf")
    for function, inputs in ((cukern.gelu, (x,)), (cukern.swiglu, (x, x)), (cukern.geglu, (x, x))):
        with pytest.raises(ValueError, match=rf"{function.__name__} has no version 'v99'; it has v1, v2"):
            function(*inputs, version="v99")
        with pytest.raises(
            ValueError,
            match=rf"version 'v2' of cukern\.{function.__name__} is a CUDA kernel, the tensor is on cpu",
        ):
            function(*inputs, version="v2")


@PLACES
def test_dense_strides_are_kept(device, version):
    image = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    for x in (
        image,
        torch.randn(4, 6, device=device).t(),
        torch.randn(2, 3, 4, device=device).permute(1, 2, 0),
    ):
        for ours, theirs in (
            (lambda x: cukern.gelu(x, version=version), functional.gelu),
            (lambda x: cukern.swiglu(x, x + 1, version=version), lambda x: functional.silu(x) * (x + 1)),
        ):
            found, right = (gradients(f, [x], x.cos()) for f in (ours, theirs))
            for a, b in zip(found, right, strict=True):
                assert a.stride() == x.stride()
                torch.testing.assert_close(a, b)
