"""Options of the softmaxes: scales of all magnitudes in all versions, and sinks far above the keys."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from helpers import DEVICE, FLOATS, kernels
from test_softmax import EVERY_VERSION, FUNCTIONS, check, inf, nan

import cukern
from cukern.ops import causal_softmax as causal
from cukern.ops.softmax.versions import LOG_VERSIONS

SOFTMAXES = cukern.softmax, cukern.log_softmax, cukern.causal_softmax
CAUSAL_VERSIONS = pytest.mark.parametrize("version", (None, *causal.VERSIONS))
SCALES = 0.0, 1e-44, -1e-40, 2e-39, 1e-37, 2.0**-99, -7e-31, 0.4, -1.0, 8.0, 1e29, -1e38


def large(dtype: torch.dtype) -> torch.Tensor:
    most = torch.finfo(dtype).max
    return torch.tensor(
        [[most, 0, -most], [most / 3, 0, 2], [-most, -0.9 * most, -0.8 * most], [1, 2, 3]],
        dtype=torch.float64,
    ).to(dtype)


def small(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(
        [[1, 1.5, 0.75], [1e-38, 0, -1e-38], [3e-8, 0, 1e-7], [0, -0.0, 0]], dtype=torch.float64
    ).to(dtype)


def of_every_size(name: str, device: str, version: str | None, dim: int = -1) -> None:
    for dtype, scale in itertools.product(FLOATS, SCALES):
        # else the float64 truth overflows
        both = abs(scale) <= 1 or (name == "softmax" and dtype != torch.float64)
        x = torch.cat((small(dtype), large(dtype))) if both else small(dtype)
        x = (x if dim else x.t().contiguous()).to(device)
        check(name, x, version, dim, scale, g=torch.rand_like(x) - 0.5)


@kernels
@EVERY_VERSION
def test_scales_of_every_size(device, version):
    """scale * x neither underflows for small scales nor overflows for large elements."""
    for name in FUNCTIONS if version in LOG_VERSIONS else ("softmax",):
        of_every_size(name, device, version)
        for x in ([-inf, 0.0, 2.0], [inf, 0.0, 2.0], [nan, 0.0, 2.0]):
            x = torch.tensor([x, [3e38, 0.0, -3e38]], device=device)
            y = FUNCTIONS[name][0](x, scale=0.0, version=version).double().cpu()
            assert y[0].isnan().all() and torch.allclose(
                y[1], torch.full((3,), 1 / 3 if name == "softmax" else -math.log(3)).double()
            )


@pytest.mark.parametrize(
    "device, dim", [("cpu", -1), pytest.param(None, 0, marks=kernels)], ids=("reference", "inner")
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_scales_of_every_size_elsewhere(request, device, dim, name):
    of_every_size(name, device or request.getfixturevalue("device"), None, dim)


@kernels
@CAUSAL_VERSIONS
def test_scales_and_sinks_of_every_size(device, version):
    logits = torch.tensor([[-2.0, 2.0, 3.0, 1.0], [3e38, -3e38, 3.4e38, 1e38]])
    for dtype, scale in itertools.product(FLOATS, (0.0, 1e-40, 2.0**-100, 0.3, 1e31)):
        info = torch.finfo(dtype)
        x = logits.double().clamp(info.min, info.max).to(device, dtype)
        for sink in (None, -1e30, 0.0, 90.0, 1e39, 1e300):
            z = (scale * x[-1].cpu().double()).tolist()
            top = max(*z, -inf if sink is None else sink)
            exact = torch.tensor([math.exp(v - top) for v in z], dtype=torch.float64)
            exact /= exact.sum() + (0 if sink is None else math.exp(sink - top))
            y = cukern.causal_softmax(x, scale=scale, sink=sink, version=version)[-1].double().cpu()
            limit = max(2 * info.eps, 1e-13) * exact + max(info.smallest_normal * info.eps, 1e-37)
            assert ((y - exact).abs() <= limit).all(), (dtype, scale, sink)
    x = torch.zeros(1, 20_000, device=device)
    assert (
        abs(
            float(cukern.causal_softmax(x, scale=0.0, sink=57.0, version=version)[0, 0])
            * (20_000 + math.exp(57))
            - 1
        )
        < 1e-5
    )
    hidden = torch.tensor([[1.0, inf], [-inf, 5.0]], device=device)
    y = cukern.causal_softmax(hidden, scale=0.0, version=version)
    assert torch.equal(y[0].cpu(), torch.tensor([1.0, 0.0])) and y[1].isnan().all()
    for scale, dtype in itertools.product(
        (0.0, 1e-44, 1e-40, 0.5, 1e38), (torch.bfloat16, torch.float32, torch.float64)
    ):
        leaves = [
            (torch.randn(2, 3, 4) / max(1, scale)).to(device, dtype).requires_grad_(),
            logits[0, :2].to(device, dtype).requires_grad_(),
        ]
        exact, g = [t.detach().double().requires_grad_() for t in leaves], torch.rand_like(leaves[0]) / 8
        ours = torch.autograd.grad(
            cukern.causal_softmax(leaves[0], scale=scale, sink=leaves[1], version=version), leaves, g
        )
        theirs = torch.autograd.grad(causal.reference(exact[0], scale, None, exact[1]), exact, g.double())
        for a, b, size in zip(ours, theirs, (scale, 1.0), strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=8 * torch.finfo(dtype).eps * size + 1e-44)


@kernels
def test_tangents_of_hidden_keys_never_count(device):
    x, dx = torch.randn(2, 2, 3, 4, dtype=torch.float64, device=device)
    dx[:, 0, 2:] = nan  # keys that the first query does not see
    sink = torch.randn(2, dtype=torch.float64, device=device)
    assert (
        torch.func.jvp(lambda a, s: cukern.causal_softmax(a, window=3, sink=s), (x, sink), (dx, sink))[1]
        .isfinite()
        .all()
    )


@kernels
def test_tangents_have_the_dtype_of_x(device):
    for function, dtype in itertools.product(SOFTMAXES, (torch.float16, torch.bfloat16)):
        x, dx = torch.randn(2, 2, 5, dtype=dtype, device=device)
        scaled = functools.partial(function, scale=0.5)
        for f in (scaled, torch.func.grad(lambda t, scaled=scaled: scaled(t).float().square().sum())):
            y, dy = torch.func.jvp(f, (x,), (dx,))
            assert y.dtype == dy.dtype == dtype
            exact = torch.func.jvp(f, (x.double(),), (dx.double(),))[1]
            torch.testing.assert_close(dy.double(), exact, rtol=0, atol=16 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("function", SOFTMAXES)
def test_meta_tensors_and_numbers_of_numpy(function):
    x = torch.randn(3, 4)
    meta = x.to("meta")
    for y in (
        function(meta),
        function(meta, scale=0.5),
        *([function(meta, sink=meta[0, 0])] if function is cukern.causal_softmax else []),
    ):
        assert y.is_meta and y.shape == x.shape and y.dtype == x.dtype
    for half in (np.float32(0.5), np.float64(0.5), np.float16(0.5)):
        assert torch.equal(function(x, scale=half), function(x, scale=0.5))
    assert function(x.double(), scale=1e39).isfinite().all() or function is cukern.log_softmax
    assert torch.equal(cukern.causal_softmax(x, window=10**30), cukern.causal_softmax(x, window=np.int64(4)))
    assert torch.equal(cukern.softmax(x, np.int64(0)), cukern.softmax(x, 0))


@kernels
def test_hidden_keys_are_0_at_scale_0_where_a_seen_one_is_nan():
    x = torch.tensor([[[math.nan, 1.0, 2.0], [1.0, 2.0, math.nan]]], device=DEVICE)
    y = cukern.causal_softmax(x, scale=0.0)
    assert y[0, 0, 2] == 0 and y[0, 0, :2].isnan().all() and y[0, 1].isnan().all()
