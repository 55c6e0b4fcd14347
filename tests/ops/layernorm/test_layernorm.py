"""layernorm and rmsnorm beyond test_ops.py: float32 weights of 16-bit rows, missing weights, every tile,
layouts, errors.

Results are compared with the formulas in float64, which autograd differentiates.
"""

import contextlib

import pytest
import torch
from helpers import DEVICE, FLOATS, PLACE, kernels, same_bits, with_sms

import cukern
from cukern.ops.layernorm import versions
from cukern.ops.layernorm.versions import VERSIONS, threads_of, tiles

EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
PLACES = [
    pytest.param("cpu", None, id="cpu"),
    *(pytest.param(DEVICE, v, marks=kernels, id=v) for v in VERSIONS),
]


def simulator():
    return cukern.backend("sim") if PLACE == "sim" else contextlib.nullcontext()


def exact(x, weight=None, bias=None, residual=None, eps=1e-5, rms=False):
    s = x if residual is None else x + residual
    c = s if rms else s - s.mean(-1, keepdim=True)
    y = c * (c.square().mean(-1, keepdim=True) + eps).rsqrt()
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, s)


def both(function, tensors, douts, **options):
    """Outputs and gradients of a call with these named tensors; douts may have None."""
    leaves = {k: v.detach().requires_grad_() for k, v in tensors.items()}
    outs = function(**leaves, **options)
    outs = outs if isinstance(outs, tuple) else (outs,)
    pairs = [(o, g) for o, g in zip(outs, douts, strict=True) if g is not None]
    used = [o for o, _ in pairs]
    grads = torch.autograd.grad(used, list(leaves.values()), [g for _, g in pairs], materialize_grads=True)
    return [o.detach() for o in outs], dict(zip(leaves, grads, strict=True))


def check(tensors, version, device, rms=False, given=(True, True), tolerance=None):
    """A call on the device against the formulas in float64."""
    x, options = tensors["x"], {} if "weight" in tensors else {"weight": None}
    count = 2 if "residual" in tensors else 1
    douts = [torch.randn(x.shape, dtype=x.dtype) if g else None for g in given[:count]]
    function = cukern.rmsnorm if rms else cukern.layernorm
    if device != "cpu" or version:
        with simulator():
            moved = {k: v.to(device) for k, v in tensors.items()}
            found = both(
                function,
                moved,
                [None if g is None else g.to(device) for g in douts],
                eps=1e-5,
                version=version,
                **options,
            )
    else:
        found = both(function, tensors, douts, eps=1e-5, **options)
    wide = {k: v.double() for k, v in tensors.items()}
    truth = both(lambda **t: exact(**t, rms=rms), wide, [None if g is None else g.double() for g in douts])
    rounding = tolerance or {2: 6 * torch.finfo(x.dtype).eps, 4: 2e-5, 8: 1e-11}[x.itemsize]
    for ours, theirs in zip([*found[0], *found[1].values()], [*truth[0], *truth[1].values()], strict=True):
        torch.testing.assert_close(
            ours.cpu().double(), theirs, rtol=rounding, atol=rounding * (1 + theirs.abs().max().item())
        )
    assert all(found[1][k].dtype == v.dtype and found[0][0].dtype == x.dtype for k, v in tensors.items())


def draw(rows, columns, *names, dtype=torch.float32, wide=None):
    """x and the named tensors."""
    matrices = dict.fromkeys(("x", "residual"), ((rows, columns), dtype))
    shapes = {name: matrices.get(name, ((columns,), wide or dtype)) for name in ("x", *names)}
    return {name: torch.randn(shape, dtype=kind) for name, (shape, kind) in shapes.items()}


@pytest.mark.parametrize("rms", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize("device, version", PLACES)
def test_float32_weights_of_16_bit_rows(device, version, dtype, rms):
    """The residual is small, so that the rounding of s, which the truth does not have, is too."""
    names = ("weight",) if rms else ("weight", "bias")
    for columns in (64, 67):
        check(draw(5, columns, *names, dtype=dtype, wide=torch.float32), version, device, rms)
    x = draw(5, 64, *names, dtype=dtype, wide=torch.float32)
    check(
        {**x, "residual": (x["x"] * 0.5).to(dtype)},
        version,
        device,
        rms,
        tolerance=20 * torch.finfo(dtype).eps,
    )


@pytest.mark.parametrize("device, version", PLACES)
def test_without_weight_or_bias(device, version):
    check(draw(5, 67), version, device)
    check(draw(5, 67), version, device, rms=True)
    check(draw(5, 68, "residual", "weight"), version, device)


@pytest.mark.parametrize("given", ((True, False), (False, True)))
@pytest.mark.parametrize("device, version", PLACES)
def test_gradient_of_one_output(device, version, given):
    check(draw(3, 40, "residual", "weight", "bias"), version, device, given=given)


@kernels
def test_higher_derivatives_with_a_residual():
    """Of both outputs, by both summands: a gradient of gradients, forward mode, and second derivatives of
    torch.func."""
    tensors = [
        torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in ((3, 6), (3, 6), (6,), (6,))
    ]

    def derivatives(function):
        leaves = [t.clone().requires_grad_() for t in tensors]
        outs = function(*leaves)
        first = torch.autograd.grad(sum(out.sin().sum() for out in outs), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves, create_graph=True)
        third = torch.autograd.grad(sum(g.square().sum() for g in second), leaves)
        _, forward = torch.func.jvp(function, tuple(tensors), tuple(t.cos() for t in tensors))
        hessian = torch.func.hessian(lambda x, r: function(x, r, *tensors[2:])[0].sin().sum(), (0, 1))(
            *tensors[:2]
        )
        return [*first, *second, *third, *forward, *hessian[0], *hessian[1]]

    with simulator():
        found = derivatives(
            lambda x, residual, weight, bias: cukern.layernorm(x, weight, bias, residual=residual)
        )
        for ours, right in zip(found, derivatives(lambda x, r, w, b: exact(x, w, b, r)), strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-6, atol=1e-7 * right.abs().max().item())


@kernels
@pytest.mark.parametrize("dtype", FLOATS)
def test_every_tile(dtype):
    """The longest row of each tile, and longer ones, of whole vectors and not. One row: the simulator is
    slow."""
    for backward in (False, True):
        for aligned in (False, True):
            *shape, _ = tiles(dtype.itemsize, aligned, backward)
            longest = [t.width * t.vectors * t.most_threads for t in shape]
            assert longest == sorted(longest), "from the shortest rows to the longest"
            for tile, columns in zip(shape, longest, strict=True):
                assert (
                    threads_of(columns, tile) == tile.most_threads
                    and threads_of(columns + tile.width, tile) > tile.most_threads
                )
    for columns in {
        torch.float32: (128, 132, 3072, 3076, 8196, 16388),
        torch.bfloat16: (256, 264, 3080, 8200, 9001),
    }.get(dtype, (130,)):
        check(draw(1, columns, "weight", "bias", dtype=dtype), "v2", DEVICE)


@kernels
@pytest.mark.parametrize("rms", (False, True))
def test_long_rows(monkeypatch, rms):
    """Several parts of several rows, with a residual, whose last part is short. With 40 SMs the rows have
    several blocks."""
    for columns, sms in ((8196, 1), (8197, 40), (16388, 3)):
        monkeypatch.setattr(versions, "device_of", with_sms(sms))
        versions._plan.cache_clear()
        check(draw(3, columns, "residual", "weight", *(() if rms else ("bias",))), "v2", DEVICE, rms)
    versions._plan.cache_clear()


@kernels
def test_rows_that_share_a_block_and_blocks_that_have_many_rows(monkeypatch):
    """The backward's blocks loop over rows and add those of their threads; odd numbers of rows leave some
    idle."""
    for rows, columns in ((1, 8), (37, 8), (131, 20), (9, 200), (700, 3)):
        for sms in (1, 3):
            monkeypatch.setattr(versions, "device_of", with_sms(sms))
            versions._plan.cache_clear()
            check(draw(rows, columns, "weight", "bias", "residual"), "v2", DEVICE)
    versions._plan.cache_clear()


@kernels
@EVERY_VERSION
def test_layouts_and_alignments(version):
    with simulator():
        weight, bias = (torch.randn(64, device=DEVICE) for _ in range(2))
        memory = torch.randn(2, 7, 70, device=DEVICE)
        views = (
            memory[:, :, :64],
            memory[:, :, 1:65],
            memory[:, 1:, 4:68],
            memory[:, ::2, :64].transpose(0, 1),
        )
        for x in (
            *views,
            memory.mT.contiguous().mT[..., :64],
            memory[:, :, 0].unsqueeze(-1).expand(2, 7, 64),
        ):
            residual = torch.randn(*x.shape[:2], 66, device=DEVICE)[..., :64]
            truth, truth_s = exact(x.double(), weight.double(), bias.double(), residual.double())
            y, s = cukern.layernorm(x, weight, bias, residual=residual, version=version)
            torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(s.double(), truth_s, rtol=1e-6, atol=1e-6)
            assert y.is_contiguous() and s.is_contiguous() and y.shape == x.shape
        odd = torch.randn(65, device=DEVICE)[1:]
        torch.testing.assert_close(
            cukern.rmsnorm(views[0], odd), exact(views[0], odd, rms=True, eps=1e-6), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("shape", ((0, 5), (3, 0), (2, 0, 4), (5,)))
@pytest.mark.parametrize("device, version", PLACES)
def test_empty_and_one_dimensional(device, version, shape):
    with simulator() if version else contextlib.nullcontext():
        x, residual = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
        weight, bias = (torch.randn(shape[-1:], device=device, requires_grad=True) for _ in range(2))
        y, s = cukern.layernorm(x, weight, bias, residual=residual, version=version)
        grads = torch.autograd.grad(
            (y, s), (x, residual, weight, bias), (torch.ones_like(y), torch.ones_like(s))
        )
        assert y.shape == s.shape == x.shape and [g.shape for g in grads] == [
            t.shape for t in (x, residual, weight, bias)
        ]
        assert x.numel() or not any(g.any() for g in grads)


@kernels
@EVERY_VERSION
def test_extreme_rows(version):
    """A constant row is exactly the bias; a row far from 0 loses nothing but the rounding of its mean; NaN
    stays in its row."""
    with simulator():
        bias = torch.randn(100, device=DEVICE)
        x = torch.stack(
            (
                torch.full((100,), 3.0),
                torch.randn(100) + 1000,
                torch.full((100,), torch.nan),
                torch.randn(100),
            )
        ).to(DEVICE)
        y = cukern.layernorm(x, torch.ones_like(bias), bias, version=version)
        assert same_bits(y[0], bias) and y[2].isnan().all()
        torch.testing.assert_close(
            y[1::2].double(), exact(x.double())[1::2] + bias.double(), rtol=1e-3, atol=1e-3
        )
        assert (
            cukern.rmsnorm(torch.zeros(2, 100, device=DEVICE), None, eps=0.0, version=version).isnan().all()
        ), "0 / 0"


@pytest.mark.parametrize("device, version", PLACES)
@pytest.mark.parametrize("rms", (False, True))
def test_every_magnitude_of_bfloat16(device, version, rms):
    """Gradients are as large as 1e18 / eps^0.5 and as small as 1e-18. float32 holds the square of a sum of
    such numbers."""
    for size in (1e-30, 1e-15, 1e-8, 1e8, 1e15, 1e18):
        tensors = draw(5, 67, "weight", dtype=torch.bfloat16)
        tensors["x"] = (tensors["x"].double() * size).bfloat16()
        with simulator() if version else contextlib.nullcontext():
            function = cukern.rmsnorm if rms else cukern.layernorm
            outs, grads = both(
                function,
                {k: v.to(device) for k, v in tensors.items()},
                [tensors["x"].new_ones(5, 67).to(device)],
                eps=1e-5,
            )
        truth = both(
            lambda **t: exact(**t, rms=rms),
            {k: v.double() for k, v in tensors.items()},
            [torch.ones(5, 67).double()],
        )
        for ours, right in zip((*outs, *grads.values()), (*truth[0], *truth[1].values()), strict=True):
            assert (ours.cpu().double() - right).abs().max() <= 0.02 * right.abs().max(), size


@pytest.mark.parametrize(
    "place", [pytest.param("gpu", id="cpu"), pytest.param("sim", marks=kernels, id="kernels")]
)
def test_refusals(place):
    x, w = torch.randn(2, 6), torch.randn(6)
    with cukern.backend(place):
        for error, says, arguments in (
            (TypeError, "weight must be torch.float.*, got torch.int64", {"weight": w.long()}),
            (TypeError, "bias must be torch.float.*, got torch.bool", {"bias": w > 0}),
            (ValueError, r"weight has shape \(5,\), it must be \(6,\)", {"weight": w[:5]}),
            (ValueError, r"residual has shape \(1, 6\), it must be \(2, 6\)", {"residual": x[:1]}),
            (TypeError, "residual is torch.float64, x is torch.float32", {"residual": x.double()}),
            (ValueError, "bias must be None if weight is None", {"weight": None, "bias": w}),
            (ValueError, "eps must be at least 0, got -1.0", {"eps": -1}),
            (ValueError, "x must have at least one dimension", {"x": torch.tensor(1.0)}),
        ):
            with pytest.raises(error, match=says):
                cukern.layernorm(**{"x": x, "weight": w, **arguments})
