"""What the options of the softmaxes mean and refuse: scales of any size, in every version; sinks far above the keys; nonsense; and
transforms with other options than test_transforms.py has."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import DEVICE, FLOATS, kernels
from test_softmax import EVERY_VERSION, FUNCTIONS, check, inf, nan

import cukern
from cukern.ops import causal_softmax as causal
from cukern.ops.softmax.op import reference_log_softmax, reference_softmax
from cukern.ops.softmax.versions import LOG_VERSIONS

SOFTMAXES = cukern.softmax, cukern.log_softmax, cukern.causal_softmax
CAUSAL_VERSIONS = pytest.mark.parametrize("version", (None, *causal.VERSIONS))
SCALES = 0.0, 1e-44, -1e-40, 2e-39, 1e-37, 2.0**-99, -7e-31, 0.4, -1.0, 8.0, 1e29, -1e38


def large(dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return torch.tensor([[most, 0, -most], [most / 3, 0, 2], [-most, -0.9 * most, -0.8 * most], [1, 2, 3]], dtype=torch.float64).to(dtype)


def small(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[1, 1.5, 0.75], [1e-38, 0, -1e-38], [3e-8, 0, 1e-7], [0, -0.0, 0]], dtype=torch.float64).to(dtype)


def of_every_size(name: str, device: str, version: str | None, dim: int = -1) -> None:
    for dtype, scale in itertools.product(FLOATS, SCALES):
        both = abs(scale) <= 1 or (name == "softmax" and dtype != torch.float64)  # else the truth overflows, which is made in float64
        for x in (small(dtype), large(dtype)) if both else (small(dtype),):
            x = (x if dim else x.t().contiguous()).to(device)
            check(name, x, version, dim, scale, g=torch.rand_like(x) - 0.5)


@kernels
@EVERY_VERSION
def test_scales_of_every_size(device, version):
    """The products are those of real numbers: small scales are not lost, and large elements do not overflow."""
    for name in FUNCTIONS if version in LOG_VERSIONS else ("softmax",):
        of_every_size(name, device, version)
        for x in ([-inf, 0.0, 2.0], [inf, 0.0, 2.0], [nan, 0.0, 2.0]):
            x = torch.tensor([x, [3e38, 0.0, -3e38]], device=device)
            y = FUNCTIONS[name][0](x, scale=0.0, version=version).double().cpu()
            assert y[0].isnan().all() and torch.allclose(y[1], torch.full((3,), 1 / 3 if name == "softmax" else -math.log(3)).double())


@pytest.mark.parametrize("device, dim", [("cpu", -1), pytest.param(None, 0, marks=kernels)], ids=("reference", "inner"))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scales_of_every_size_elsewhere(request, device, dim, name):
    of_every_size(name, device or request.getfixturevalue("device"), None, dim)


@kernels
@CAUSAL_VERSIONS
def test_scales_and_sinks_of_every_size(device, version):
    logits = torch.tensor([[-2.0, 2.0, 3.0, 1.0], [3e38, -3e38, 3.4e38, 1e38]])
    for dtype, scale in itertools.product(FLOATS, (0.0, 1e-40, 1e-37, 2.0**-100, 0.3, 5.0, 1e31)):
        info = torch.finfo(dtype)
        x = logits.double().clamp(info.min, info.max).to(device, dtype)
        for sink in (None, -1e30, 0.0, 57.0, 90.0, 1e10, 1e39, 1e300):
            z = (scale * x[-1].cpu().double()).tolist()
            top = max(*z, -inf if sink is None else sink)
            exact = torch.tensor([math.exp(v - top) for v in z], dtype=torch.float64)
            exact /= exact.sum() + (0 if sink is None else math.exp(sink - top))
            y = cukern.causal_softmax(x, scale=scale, sink=sink, version=version)[-1].double().cpu()
            limit = max(2 * info.eps, 1e-13) * exact + max(info.smallest_normal * info.eps, 1e-37)
            assert ((y - exact).abs() <= limit).all(), (dtype, scale, sink)
    x = torch.zeros(1, 20_000, device=device)
    assert abs(float(cukern.causal_softmax(x, scale=0.0, sink=57.0, version=version)[0, 0]) * (20_000 + math.exp(57)) - 1) < 1e-5
    hidden = torch.tensor([[1.0, inf], [-inf, 5.0]], device=device)
    y = cukern.causal_softmax(hidden, scale=0.0, version=version)
    assert torch.equal(y[0].cpu(), torch.tensor([1.0, 0.0])) and y[1].isnan().all()
    for scale, dtype in itertools.product((0.0, 1e-44, 1e-40, 0.5, 1e38), (torch.bfloat16, torch.float32, torch.float64)):
        leaves = [
            (torch.randn(2, 3, 4) / max(1, scale)).to(device, dtype).requires_grad_(),
            logits[0, :2].to(device, dtype).requires_grad_(),
        ]
        exact, g = [t.detach().double().requires_grad_() for t in leaves], torch.rand_like(leaves[0]) / 8
        ours = torch.autograd.grad(cukern.causal_softmax(leaves[0], scale=scale, sink=leaves[1], version=version), leaves, g)
        theirs = torch.autograd.grad(causal.reference(exact[0], scale, None, exact[1]), exact, g.double())
        for a, b, size in zip(ours, theirs, (scale, 1.0), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=8 * torch.finfo(dtype).eps * size + 1e-44)


@kernels
def test_transforms_of_scores_with_a_sink(device):
    x, sink = torch.randn(2, 3, 4, dtype=torch.float64, device=device), torch.randn(2, dtype=torch.float64, device=device)
    dx, ds, weight = torch.randn_like(x), torch.randn_like(sink), torch.randn_like(x)

    def ours(a, s):
        return cukern.causal_softmax(a, scale=0.7, window=3, sink=s)

    def theirs(a, s):
        return causal.reference(a, 0.7, 3, s)

    def results(f):
        def loss(*xs):
            return (f(*xs) * weight).sum()

        yield torch.func.jvp(f, (x, sink), (dx, ds))
        yield torch.func.jvp(lambda a: f(a, sink), (x,), (dx,)), torch.func.jvp(lambda s: f(x, s), (sink,), (ds,))
        yield torch.func.jacrev(f, (0, 1))(x, sink), torch.func.jacfwd(f, (0, 1))(x, sink)
        yield torch.func.hessian(loss, (0, 1))(x, sink), torch.func.jacrev(torch.func.jacrev(loss, (0, 1)), (0, 1))(x, sink)
        many = torch.stack((x, 2 * x, -x), -1), torch.stack((sink, -sink, 3 * sink))
        for dims in ((-1, 0), (-1, None), (None, 0)):
            args = [m if d is not None else one for m, one, d in zip(many, (x, sink), dims, strict=True)]
            yield torch.func.vmap(f, dims)(*args), torch.func.vmap(torch.func.grad(loss, (0, 1)), dims)(*args)

    torch.testing.assert_close(list(results(ours)), list(results(theirs)), rtol=1e-9, atol=1e-9)
    dx[:, 0, 2:] = nan  # of keys that the first query does not see
    assert torch.func.jvp(ours, (x, sink), (dx, ds))[1].isfinite().all(), "they never count"


@kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_transforms_along_any_dimension(device, name):
    exact = reference_softmax if name == "softmax" else reference_log_softmax
    x, dx, weight = torch.randn(3, 2, 4, 3, dtype=torch.float64, device=device)
    for dim, scale in ((0, 1.0), (1, -0.5), (2, 0.0)):

        def results(function, dim=dim, scale=scale):
            def f(t):
                return function(t, dim, scale=scale)

            yield torch.func.jvp(f, (x,), (dx,))
            yield torch.func.hessian(lambda t: (f(t) * weight).sum())(x)
            yield [torch.func.vmap(f, i, i)(torch.stack((x, dx, weight), i)) for i in range(4)]

        torch.testing.assert_close(list(results(FUNCTIONS[name][0])), list(results(exact)), rtol=1e-9, atol=1e-9)


@kernels
def test_tangents_have_the_dtype_of_x(device):
    for function, dtype in itertools.product(SOFTMAXES, (torch.float16, torch.bfloat16)):
        x, dx = torch.randn(2, 2, 5, dtype=dtype, device=device)
        for f in (lambda t: function(t, scale=0.5), torch.func.grad(lambda t: function(t, scale=0.5).float().square().sum())):  # noqa: B023
            y, dy = torch.func.jvp(f, (x,), (dx,))
            assert y.dtype == dy.dtype == dtype
            exact = torch.func.jvp(f, (x.double(),), (dx.double(),))[1]
            torch.testing.assert_close(dy.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)


NO_NUMBERS = torch.ones(()), "1", True, np.bool_(True), None, 1j, [1]
NO_INTEGERS = 1.0, True, "a", [1], torch.tensor(1), np.float32(1)
WRONG = [
    *((SOFTMAXES, "scale", v, TypeError, "scale must be a number, got") for v in NO_NUMBERS),
    *((SOFTMAXES, "scale", v, ValueError, "scale must be finite") for v in (inf, -inf, nan, 10**400)),
    *((SOFTMAXES, "scale", v, ValueError, "its magnitude must be at most 3.40282e") for v in (1e39, -1e39, 10**40)),
    *((SOFTMAXES[:2], "dim", v, TypeError, "dim must be an int, got") for v in (None, *NO_INTEGERS)),
    *((SOFTMAXES[:2], "dim", v, ValueError, "dim must be one of x's 2 dimensions, got") for v in (2, -3, 10**30)),
    *((SOFTMAXES, "version", v, TypeError, "must be a str or None, got") for v in (["v5"], 5, b"v5", True, {"v5"}, (["v5"], None))),
    *((SOFTMAXES, "version", v, ValueError, "version must be one, or two") for v in ((), ("v5",), ("v5",) * 3)),
    *((SOFTMAXES, "version", v, ValueError, "has no version") for v in ("", "V5", "v99", (None, "v0"))),
    *((SOFTMAXES[2:], "window", v, TypeError, "window must be an int, got") for v in NO_INTEGERS),
    *((SOFTMAXES[2:], "window", v, ValueError, "window must be at least 1, got") for v in (0, -3)),
    *((SOFTMAXES[2:], "sink", v, TypeError, "sink must be") for v in ("1", [1.0], True, 1j, torch.ones((), dtype=torch.int64))),
    (SOFTMAXES[2:], "sink", 10**400, ValueError, "sink must be finite"),
    (SOFTMAXES[2:], "scale", -1, ValueError, "scale must not be negative"),
]  # fmt: skip


def test_nonsense_is_refused():
    for (functions, option, value, error, text), place in itertools.product(WRONG, ("gpu", "sim")):
        for function in functions:
            with cukern.backend(place), pytest.raises(error, match=text):
                function(torch.randn(3, 4), **{option: value})


@pytest.mark.parametrize("function", SOFTMAXES)
@pytest.mark.filterwarnings("ignore")  # of nested and quantized tensors
def test_odd_tensors(function):
    x = torch.randn(3, 4)
    odd = x.to_sparse(), x.to_sparse_csr(), torch.nested.nested_tensor([x, x]), torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
    for place, t in itertools.product(("gpu", "sim"), odd):
        with cukern.backend(place):
            with pytest.raises(TypeError, match="x must be"):
                function(t)
            if function is cukern.causal_softmax:
                with pytest.raises(TypeError, match="sink must be"):
                    function(x, sink=t)
    meta = x.to("meta")
    for y in (function(meta), function(meta, scale=0.5), *([function(meta, sink=meta[0, 0])] if function is cukern.causal_softmax else [])):
        assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype
    expected = function(x, scale=0.5)
    for half in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert torch.equal(function(x, scale=half), expected)
    assert function(x.double(), scale=1e39).isfinite().all() or function is cukern.log_softmax
    assert torch.equal(cukern.causal_softmax(x, window=10**30), cukern.causal_softmax(x, window=np.int64(4)))
    assert torch.equal(cukern.softmax(x, np.int64(0)), cukern.softmax(x, 0))


@kernels
def test_hidden_keys_are_0_at_scale_0_where_a_seen_one_is_nan():
    x = torch.tensor([[[math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]]], device=DEVICE)
    y = cukern.causal_softmax(x, scale=0.0)
    assert y[0, 0, 2] == 0 and y[0, 0, :2].isnan().all() and y[0, 1].isnan().all()
