"""causal_softmax beyond test_ops.py: llm.c's formulas, rectangles, windows, sinks, layouts, rows that see
nothing, refusals."""

import itertools
import math

import pytest
import torch
from helpers import FLOATS, PLACE, gpu, kernels, same_bits

import cukern
from cukern.ops.causal_softmax import VERSIONS, reference

inf, nan = float("inf"), float("nan")
EVERY_VERSION = pytest.mark.parametrize("version", (*VERSIONS, None))
# Half epsilons of a result's size. 16 bits: a correctly rounded result errs by one. In float64 the truth errs
# as much.
ROUNDINGS = {torch.float16: 1.1, torch.bfloat16: 1.1, torch.float32: 6, torch.float64: 40}


def llmc_forward(x: torch.Tensor, inverse_temperature: float) -> torch.Tensor:
    """What llm.c's softmax_forward_kernel5 does to each row of (N, T, T), from its formulas: the maximum of
    the raw scores, then the scale; what lies above the diagonal is never looked at, and 0 beforehand."""
    out, T = torch.zeros_like(x, dtype=torch.float64), x.shape[-1]
    for row in range(T):
        seen = x[:, row, : row + 1].double()
        e = (inverse_temperature * (seen - seen.amax(-1, keepdim=True))).exp()
        out[:, row, : row + 1] = e / e.sum(-1, keepdim=True)
    return out


def llmc_backward(att: torch.Tensor, datt: torch.Tensor, scale: float) -> torch.Tensor:
    """Its softmax_autoregressive_backward: dpre[t3] = scale att[t3] (datt[t3] - sum over t2 <= t of att[t2]
    datt[t2])."""
    out, T = torch.zeros_like(att), att.shape[-1]
    for t in range(T):
        a, d = att[:, t, : t + 1], datt[:, t, : t + 1].double()
        out[:, t, : t + 1] = scale * a * (d - (a * d).sum(-1, keepdim=True))
    return out


def error(actual: torch.Tensor, truth: torch.Tensor, size: torch.Tensor) -> float:
    """The largest, in half epsilons of the size; NaN is infinitely wrong."""
    info = torch.finfo(actual.dtype)
    difference = (actual.detach().double() - truth).abs()
    unit = info.eps / 2 * size.clamp(min=4 * info.smallest_normal)
    return (
        float(torch.where(difference == 0, 0.0, difference / unit).nan_to_num(nan=inf).max())
        if actual.numel()
        else 0.0
    )


def check(
    x: torch.Tensor, version=None, *, sink: torch.Tensor | None = None, what: str = "", **options
) -> None:
    """Forward and backward of one input against the reference in float64."""
    leaves = [x.detach().requires_grad_()] + ([] if sink is None else [sink.detach().requires_grad_()])
    exact = [t.detach().double().requires_grad_() for t in leaves]
    g = torch.randn_like(x)
    y = cukern.causal_softmax(
        leaves[0], version=version, sink=leaves[1] if sink is not None else None, **options
    )
    truth = reference(
        exact[0], options.get("scale", 1.0), options.get("window"), exact[1] if sink is not None else None
    )
    ours, theirs = torch.autograd.grad(y, leaves, g), torch.autograd.grad(truth, exact, g.double())
    what, limit = f"{what} {tuple(x.shape)} {x.stride()} {x.dtype} {version} {options}", ROUNDINGS[x.dtype]
    assert y.shape == x.shape and y.dtype == x.dtype and y.is_contiguous()
    truth = truth.detach()
    assert error(y, truth, truth) <= limit, what
    assert not bool(y[truth == 0].any()) or x.dtype != torch.float64, what
    spread = (truth * g.double().abs()).sum(-1, keepdim=True)
    assert (
        error(ours[0], theirs[0], options.get("scale", 1.0) * truth * (g.double().abs() + spread))
        <= 2 * limit + 2
    ), what
    if sink is not None:  # a sum over rows of p times the spread, where y is rounded
        rows = spread.sum() * torch.ones_like(theirs[1])
        assert error(ours[1], theirs[1], rows) <= 2 * limit + 2, what


@kernels
@EVERY_VERSION
def test_formulas_of_llmc(device, version):
    for T, dtype in ((1, torch.float32), (5, torch.bfloat16), (67, torch.float32), (70, torch.float16)):
        x, datt = (torch.randn(2, T, T, dtype=dtype, device=device) for _ in range(2))
        scale = 1 / math.sqrt(64)
        leaf = (
            x.clone()
            .masked_fill_(torch.ones(T, T, dtype=torch.bool, device=device).triu(1), nan)
            .requires_grad_()
        )
        att = cukern.causal_softmax(leaf, scale=scale, version=version)
        datt.masked_fill_(torch.ones(T, T, dtype=torch.bool, device=device).triu(1), nan)
        (dpre,) = torch.autograd.grad(att, leaf, datt)
        truth = llmc_forward(x, scale)
        assert error(att, truth, truth) <= ROUNDINGS[dtype], "and what is above the diagonal was not read"
        expected, d = llmc_backward(truth, datt, scale), datt.nan_to_num().double().abs()
        assert (
            error(dpre, expected, scale * truth * (d + (truth * d).sum(-1, keepdim=True)))
            <= 2 * ROUNDINGS[dtype] + 2
        )
        assert not bool(dpre.triu(1).any()) and not bool(att.triu(1).any())


@kernels
@EVERY_VERSION
def test_every_size_and_window(device, version):
    sizes = [(1, 1), (1, 9), (9, 1), (5, 33), (33, 5), (19, 19), (2, 300), (40, 65)]
    for (queries, keys), dtype in itertools.product(sizes, (torch.float32, torch.bfloat16)):
        for window in (None, 1, 7) if queries > 1 else (None, 1000):
            check(
                torch.randn(2, queries, keys, dtype=dtype, device=device), version, window=window, scale=0.3
            )


@kernels
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_row_storage(device, dtype):
    """Lanes of a warp, a block, and rows that no block holds."""
    for queries, keys in ((3, 500), (3, 1500), (2, 9000), (2, 17_000)):
        check(torch.randn(1, queries, keys, dtype=dtype, device=device))


@kernels
def test_rows_of_whole_vectors(device):
    """With NaN where the diagonal cuts a vector, above it."""
    for dtype, lengths in (
        (torch.bfloat16, (200, 528, 1024, 1040, 8208)),
        (torch.float32, (136, 264, 520, 1032, 4104)),
    ):
        for keys in lengths:
            for window in (None, 37):
                x = torch.randn(2, 11, keys, dtype=dtype, device=device)
                check(x, window=window)
                hidden = torch.ones(11, keys, dtype=torch.bool, device=device).triu(keys - 10)
                assert same_bits(
                    cukern.causal_softmax(x.masked_fill(hidden, nan), window=window),
                    cukern.causal_softmax(x, window=window),
                )
    T = 264 if PLACE == "sim" else 1040
    check(torch.randn(1, T, T, device=device))


@kernels
@EVERY_VERSION
def test_rows_of_padded_inputs(device, version):
    """Slices of padded rows, which lanes and blocks hold, with NaN beside them."""
    for keys, dtype, before in itertools.product((90, 1030), (torch.bfloat16, torch.float32), (1, 2)):
        padded = torch.full((2, 5, keys + 3), nan, dtype=dtype, device=device)
        check(padded[:, :, before : before + keys].normal_(), version, window=keys - 20)


@kernels
@EVERY_VERSION
def test_sinks(device, version):
    x = 2 * torch.randn(2, 3, 9, 12, device=device)
    for sink in (
        torch.randn(3, device=device),
        torch.randn(2, 1, device=device),
        torch.zeros((), device=device),
    ):
        check(x, version, sink=sink, scale=0.5)
    check(x, version, sink=torch.randn(3, device=device), window=4)
    check(x[:, :, :, :5], version, sink=torch.randn(3, device=device), what="rows that see nothing")
    check(x.bfloat16(), version, sink=torch.randn(3, dtype=torch.bfloat16, device=device))
    check(x.double(), version, sink=torch.tensor(30.0, dtype=torch.float64, device=device))
    check(x, version, sink=torch.tensor(-inf, device=device), what="no sink at all")
    check(x, version, sink=torch.tensor(95.0, device=device), what="nearly all of it")
    one = torch.cat((x[0, 0, -1], torch.zeros(1, device=device))).softmax(0)[:-1]
    assert torch.allclose(cukern.causal_softmax(x, sink=0, version=version)[0, 0, -1], one, rtol=1e-6)
    assert cukern.causal_softmax(x, sink=inf).isnan()[..., -1, :].all()


@kernels
def test_every_layout(device):
    x = torch.randn(2, 3, 8, 11, device=device)
    wide = torch.randn(3, 8, 40, device=device)
    views = {
        "heads second": x.transpose(0, 1), "one matrix": x[0, 0], "gaps": wide[:, :, :32],
        "misaligned": wide[:, :, 3:], "no queries": x[:, :, :0], "no keys": x[..., :0], "no matrices": x[:0],
        "columns apart": wide[:, :, ::2], "transposed": x.transpose(2, 3),
        "one for all": wide[:1].expand(3, 8, 40), "rows in disorder": wide.transpose(0, 1),
        "queries of every second": wide[:, ::2],
    }  # fmt: skip
    for what, view in views.items():
        check(view, what=what)
        check(view, what=what, sink=torch.randn((), device=device))
    leaf = x.clone().requires_grad_()
    (zero,) = torch.autograd.grad(cukern.causal_softmax(leaf).sum(), leaf)
    assert float(zero.abs().max()) < 1e-6


@kernels
@EVERY_VERSION
def test_rows_that_see_nothing_or_what_is_not_finite(device, version):
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.zeros(7, 12, dtype=dtype, device=device)
        for i, bad in enumerate((nan, inf, -inf)):
            x[i + 1, i] = bad
        x[4] = -inf
        x[5, :11] = torch.tensor(-inf)
        x[6, 0] = torch.finfo(dtype).max
        y = cukern.causal_softmax(x, version=version)
        assert (
            y[1, :7].isnan().all()
            and y[2, :8].isnan().all()
            and float(y[3, 2]) == 0
            and torch.equal(y[3, :9].isnan(), y[3, :9] > 2)
        )
        assert not y[4].any() and float(y[6, 0]) == 1 and not y[6, 1:].any()
        assert not y.triu(6).any(), "0 above the diagonal, whatever the row holds"
    tall = torch.randn(5, 3, device=device, requires_grad=True)
    y = cukern.causal_softmax(tall, version=version)
    assert not y[:2].any() and float(y[2, 0].detach()) == 1
    (dx,) = torch.autograd.grad(y, tall, torch.full_like(y, 3.0))
    assert not dx[:2].any() and dx.isfinite().all()


@kernels
def test_derivatives_of_every_order(device):
    fast = PLACE == "sim"
    x = torch.randn(2, 3, 4, dtype=torch.float64, device=device, requires_grad=True)
    sink = torch.randn(2, dtype=torch.float64, device=device, requires_grad=True)
    for options in ({}, {"window": 2, "scale": 0.7}):
        for inputs, numeric_check in itertools.product(
            ((x,), (x, sink)), (torch.autograd.gradcheck, torch.autograd.gradgradcheck)
        ):
            assert numeric_check(
                lambda t, s=None, o=options: cukern.causal_softmax(t, sink=s, **o), inputs, fast_mode=fast
            )
    (alone,) = torch.autograd.grad(cukern.causal_softmax(x.detach(), sink=sink).square().sum(), sink)
    assert bool(alone.any()), "the sink's gradient where x has none"


@gpu
@pytest.mark.parametrize("version", VERSIONS)
def test_opcheck(version, device="cuda"):
    y = torch.randn(2, 5, 7, device=device).softmax(-1)
    sinks = torch.randn(2, dtype=torch.float64, device=device)
    share = torch.rand(2, 5, dtype=torch.float64, device=device)
    for one in (None, sinks):
        torch.library.opcheck(torch.ops.cukern._causal_softmax.default, (y, one, 0.5, 3, version))
    for p, h in ((None, None), (share, None), (share, share)):
        torch.library.opcheck(
            torch.ops.cukern._causal_softmax_backward.default, (y, torch.randn_like(y), p, h, 0.5, 3, version)
        )


@kernels
def test_equal_bits_with_a_sink(device):
    x = torch.randn(3, 40, 40, device=device, requires_grad=True)
    sink = torch.randn((), device=device, requires_grad=True)
    g = torch.randn_like(x)
    first, *rest = [torch.autograd.grad(cukern.causal_softmax(x, sink=sink), (x, sink), g) for _ in range(3)]
    assert all(same_bits(a, b) for other in rest for a, b in zip(first, other, strict=True))


def test_refusals():
    x = torch.randn(2, 3, 4)
    with pytest.raises(TypeError, match=r"x must be .* got torch.int64"):
        cukern.causal_softmax(torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"x must be \(..., queries, keys\), got \(4,\)"):
        cukern.causal_softmax(x[0, 0])
    with pytest.raises(
        ValueError, match=r"sink has shape \(3,\), it must broadcast to x's leading dimensions, \(2,\)"
    ):
        cukern.causal_softmax(x, sink=torch.zeros(3))
    with pytest.raises(ValueError, match=r"sink has shape \(1, 2\), it must broadcast"):
        cukern.causal_softmax(x, sink=torch.zeros(1, 2))
    with pytest.raises(ValueError, match="sink is on meta, x is on cpu"):
        cukern.causal_softmax(x, sink=torch.zeros(2, device="meta"))
    with (
        cukern.backend("sim"),
        pytest.raises(ValueError, match="causal_softmax has no version 'v0'; it has v1"),
    ):
        cukern.causal_softmax(x, version="v0")
    with pytest.raises(ValueError, match="the tensor is on cpu"):
        cukern.causal_softmax(x, version="v1")


def test_on_the_cpu_it_is_the_reference():
    x = torch.randn(2, 4, 6)
    hidden = torch.ones(4, 6, dtype=torch.bool).triu(3)
    assert torch.allclose(cukern.causal_softmax(x), x.masked_fill(hidden, -inf).softmax(-1))
    assert torch.equal(cukern.causal_softmax(x, window=100), cukern.causal_softmax(x))
