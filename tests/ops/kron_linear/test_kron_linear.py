"""kron_linear beyond test_ops.py: torch.kron itself, layouts, samples, epilogue, higher derivatives,
refusals, the layer."""

import itertools
from functools import reduce
from math import prod

import pytest
import torch
from helpers import PLACE, kernels, places, same_bits, simulated
from torch.autograd import forward_ad
from typer.testing import CliRunner

import cukern
from cukern.cli import app
from cukern.ops.kron_linear import op as kron_op
from cukern.ops.kron_linear.forward import launch_group, prepare
from cukern.ops.kron_linear.plan import cost_order, steps
from cukern.ops.kron_linear.reference import PLAIN

EVERYWHERE = pytest.mark.parametrize("device, version", places("kron_linear"))
# torch's own, at its first dual tensor
FORWARD_MODE = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
KERNELS = [kernels, pytest.mark.parametrize("version", ("v3", "v4"))]
SHAPES = (((3, 2), (2, 5), (4, 1)), ((5, 7),), ((2, 3), (9, 4)))


def on_kernels(function):
    return reduce(lambda f, mark: mark(f), KERNELS, function)


def draw(rows, sizes, device="cpu", dtype=torch.float64, samples=()):
    """x of any leading dimensions, and factors; those in `samples` are one for each of x's first
    dimension."""
    rows = (rows,) if isinstance(rows, int) else rows
    x = torch.randn(*rows, prod(p for p, _ in sizes), dtype=dtype, device=device)
    ws = [
        torch.randn(*(rows[:1] if i in samples else ()), p, q, dtype=dtype, device=device)
        for i, (p, q) in enumerate(sizes)
    ]
    return x, ws


def dense(x, ws):
    """x times the matrix that kron_linear never forms."""
    if all(w.ndim == 2 for w in ws):
        return x @ reduce(torch.kron, [w.contiguous() for w in ws])
    return torch.stack([dense(one, [w if w.ndim == 2 else w[i] for w in ws]) for i, one in enumerate(x)])


def close(a, b):
    """Of tensors, or of as many tensors on both sides."""
    if not isinstance(b, torch.Tensor):
        for pair in zip(a, b, strict=True):
            close(*pair)
        return
    eps = torch.finfo(b.dtype).eps
    assert a.shape == b.shape and torch.allclose(
        a, b, rtol=100 * eps, atol=100 * eps * float(b.detach().abs().max() if b.numel() else 1)
    )


def close_with_gradients(y, exact, inputs, dy=None):
    """Two results are close, and so are their gradients."""
    close(y, exact)
    dy = torch.randn_like(exact) if dy is None else dy
    close(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(exact, inputs, dy))


def error(y, exact) -> float:
    return float((y.double() - exact).norm() / exact.norm())


def launch(plan, x, ws, epilogue=PLAIN):
    """The result of one launch of v4."""
    with simulated(x, *ws, *epilogue[1:]):
        return launch_group(
            prepare(plan, x.shape[0], x.dtype, x.get_device(), epilogue is not PLAIN), x, ws, epilogue
        )


# ---- the maths


@EVERYWHERE
def test_it_is_the_product_with_torch_kron(device, version):
    for rows, sizes in itertools.product((3, (2, 2), ()), SHAPES):
        x, ws = draw(rows, sizes, device)
        y = cukern.kron_linear(x, ws, version=version)
        assert y.is_contiguous() or version == "v2"
        close(y, dense(x, ws))


@EVERYWHERE
def test_every_layout(device, version):
    x, ws = draw(4, ((3, 2), (2, 5), (4, 4)), device)
    columns = [w.t().contiguous().t() for w in ws]
    apart = [
        torch.randn(2 * w.shape[0], 3 * w.shape[1], dtype=w.dtype, device=device)[1::2, ::3].copy_(w)
        for w in ws
    ]
    one_row = [w[:1].expand_as(w) for w in ws]
    for factors in (columns, apart, one_row, [ws[0], columns[1], apart[2]]):
        for rows in (x, x.t().contiguous().t(), x[:1].expand_as(x), torch.cat((x, x), 1)[:, 24:]):
            close(cukern.kron_linear(rows, factors, version=version), dense(rows, factors))


@EVERYWHERE
def test_factors_of_each_sample(device, version):
    for samples in ((0,), (1,), (0, 1)):
        x, ws = draw((2, 3), ((3, 2), (2, 4)), device, samples=samples)
        inputs = [t.requires_grad_() for t in (x, *ws)]
        close_with_gradients(cukern.kron_linear(x, ws, version=version), dense(x, ws), inputs)


@EVERYWHERE
def test_scale_bias_and_residual_and_their_gradients(device, version):
    for rows in ((2, 3), (5,)):
        x, ws = draw(rows, ((3, 2), (2, 4)), device)
        bias = torch.randn(8, dtype=x.dtype, device=device)
        residual = torch.randn(8, *rows, dtype=x.dtype, device=device).movedim(0, -1)
        inputs = [t.requires_grad_() for t in (x, bias, residual, *ws)]
        y = cukern.kron_linear(x, ws, bias=bias, residual=residual, scale=0.3, version=version)
        exact = 0.3 * dense(x, ws) + bias + residual
        dy = torch.randn_like(exact).movedim(0, -1).contiguous().movedim(-1, 0)  # of other strides
        close_with_gradients(y, exact, inputs, dy)


@EVERYWHERE
@FORWARD_MODE
def test_no_rows(device, version):
    for rows, samples in itertools.product((0, (0, 4), (4, 0)), ((), (0,), (0, 1))):
        x, ws = draw(rows, ((3, 2), (2, 4)), device, samples=samples)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, torch.randn_like(t)) for t in (x, *ws)]
            assert forward_ad.unpack_dual(
                cukern.kron_linear(duals[0], duals[1:], version=version)
            ).tangent.shape == (*x.shape[:-1], 8)
        inputs = [t.requires_grad_() for t in (x, *ws)]
        y = cukern.kron_linear(x, ws, version=version)
        assert y.shape == (*x.shape[:-1], 8)
        grads = torch.autograd.grad(y.sum(), inputs, create_graph=True)
        assert all(g.shape == t.shape and not g.any() for g, t in zip(grads, inputs, strict=True))
        seconds = torch.autograd.grad([g.sum() for g in grads if g.requires_grad], inputs, allow_unused=True)
        assert all(g is None or g.shape == t.shape for g, t in zip(seconds, inputs, strict=True))


# ---- derivatives


@on_kernels
def test_only_wanted_gradients_and_only_x_and_the_factors_saved(device, version):
    sizes = ((3, 2), (2, 4), (2, 2))
    x, ws = draw(3, sizes, device)
    for wanted in itertools.product((False, True), repeat=4):
        if not any(wanted):
            continue
        inputs = [t.detach().requires_grad_(w) for t, w in zip((x, *ws), wanted, strict=True)]
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.data_ptr()) or t, lambda t: t
        ):
            y = cukern.kron_linear(inputs[0], inputs[1:], version=version)
        assert sorted(saved) == sorted(t.data_ptr() for t in inputs)
        close_with_gradients(
            y.sum(), dense(inputs[0], inputs[1:]).sum(), list(itertools.compress(inputs, wanted))
        )


def cubed(product):
    return lambda x, *ws: (product(x, ws) ** 3).sum()


@on_kernels
def test_second_derivatives_against_differences_of_first_ones(device, version):
    """A Hessian of numbers: a peer's gradgradcheck passes where whole terms are lost, because their gradients
    no longer require grad."""
    x, ws = draw(2, ((3, 2), (2, 2)), device)
    function, inputs = cubed(lambda x, ws: cukern.kron_linear(x, ws, scale=0.5, version=version)), (x, *ws)
    leaves = [t.clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(function(*leaves), leaves, create_graph=True)
    assert all(g.requires_grad for g in first)
    step = 1e-5
    for row, direction in enumerate(torch.randn_like(t) for t in inputs):
        found = torch.autograd.grad(first[row], leaves, direction, retain_graph=True)
        assert all(g is not None for g in found)
        moved = []
        for sign in (step, -step):
            at = [t + sign * direction if i == row else t for i, t in enumerate(inputs)]
            at = [t.detach().requires_grad_() for t in at]
            moved.append(torch.autograd.grad(cubed(lambda x, ws: 0.5 * dense(x, ws))(*at), at))
        for a, plus, minus in zip(found, *moved, strict=True):
            assert torch.allclose(a, (plus - minus) / (2 * step), rtol=1e-6, atol=1e-6 * float(a.abs().max()))


@kernels
@FORWARD_MODE
def test_gradients_and_tangents_by_torchs_own_check(device):
    x, ws = draw((2, 1), ((1, 2), (2, 1)), device, samples=(0,))
    inputs = [t.requires_grad_() for t in (x, torch.randn(2, dtype=x.dtype, device=device), *ws)]

    def function(x, bias, *ws):
        return cukern.kron_linear(x, ws, bias=bias, scale=0.7, version="v3")

    assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)


@on_kernels
def test_third_derivatives(device, version):
    x, ws = draw(2, ((3, 2), (2, 2)), device)
    directions = [[torch.randn_like(t) for t in (x, *ws)] for _ in range(2)]
    found = []
    for product in (lambda x, ws: cukern.kron_linear(x, ws, version=version), dense):
        leaves = [t.clone().requires_grad_() for t in (x, *ws)]
        value = cubed(product)(*leaves)
        for ds in directions:
            value = sum(
                (g * d).sum()
                for g, d in zip(torch.autograd.grad(value, leaves, create_graph=True), ds, strict=True)
            )
        found.append(torch.autograd.grad(value, leaves))
    close(*found)


@on_kernels
@FORWARD_MODE
def test_tangents_of_gradients(device, version):
    x, ws = draw(2, ((3, 2), (2, 2)), device)
    tangents, found = [torch.randn_like(t) for t in (x, *ws)], []
    for product in (lambda x, ws: cukern.kron_linear(x, ws, version=version), dense):
        with forward_ad.dual_level():
            leaves = [
                forward_ad.make_dual(t.clone().requires_grad_(), d)
                for t, d in zip((x, *ws), tangents, strict=True)
            ]
            grads = torch.autograd.grad(cubed(product)(*leaves), leaves)
            found.append([forward_ad.unpack_dual(g).tangent for g in grads])
    close(*found)


@on_kernels
@FORWARD_MODE
def test_tangent_of_every_input(device, version):
    x, ws = draw(3, ((3, 2), (2, 4)), device)
    inputs = (x, *ws)
    for tangents in (
        [torch.randn_like(t) for t in inputs],
        [torch.randn_like(x), None, None],
        [None, None, torch.randn_like(ws[1])],
    ):
        with forward_ad.dual_level():
            duals = [
                t if d is None else forward_ad.make_dual(t, d) for t, d in zip(inputs, tangents, strict=True)
            ]
            ours = forward_ad.unpack_dual(cukern.kron_linear(duals[0], duals[1:], version=version)).tangent
            exact = forward_ad.unpack_dual(dense(duals[0], duals[1:])).tangent
        close(ours, exact)


def test_under_vmap_and_complex_it_is_torch():
    x, ws = draw((5, 3), ((3, 2), (2, 4)))
    with cukern.backend("sim"):
        close(torch.vmap(lambda one: cukern.kron_linear(one, ws))(x), dense(x, ws))
    z, vs = draw(3, ((3, 2), (2, 4)), dtype=torch.complex128)
    close(cukern.kron_linear(z, vs).abs(), dense(z, vs).abs())
    with (
        cukern.backend("sim"),
        pytest.raises(ValueError, match=r"version 'v3' of cukern\.kron_linear has no torch\.complex128"),
    ):
        cukern.kron_linear(z, vs, version="v3")


# ---- order


def multiply_adds(sizes, order):
    now = [p for p, _ in sizes]
    total = 0
    for i in order:
        total += prod(now) * sizes[i][1]
        now[i] = sizes[i][1]
    return total


def test_the_order_is_the_cheapest_of_all():
    for sizes in (
        ((128, 8), (8, 128)),
        ((2, 6), (6, 2), (3, 3)),
        ((4, 5), (5, 4), (7, 2), (2, 7)),
        ((3, 1), (1, 9), (2, 5)),
    ):
        costs = {order: multiply_adds(sizes, order) for order in itertools.permutations(range(len(sizes)))}
        done = sum(s.left * s.p * s.q * s.right for s in steps(sizes))
        assert costs[tuple(cost_order(sizes))] == done == min(costs.values())
    assert multiply_adds(((8, 128), (128, 8)), (0, 1)) == 16 * multiply_adds(((128, 8), (8, 128)), (0, 1))
    assert cost_order([(8, 8)] * 4) == [3, 2, 1, 0], "the fastest index first"


# ---- the numbers that the command line is compared with


def test_check_reproduces_the_numbers_of_the_seed():
    """v1 and v2 as they were first written: factor 0 acts on the fastest index; layer after layer; a random
    linear loss."""
    rows, sizes = 3, (2, 3)
    torch.manual_seed(0)
    x = torch.randn(rows * prod(sizes), dtype=torch.float64).view(rows, -1).requires_grad_()
    flats = [
        torch.randn(sum(f * f for f in sizes), dtype=torch.float64).split([f * f for f in sizes])
        for _ in range(2)
    ]
    layers = [[w.view(f, f) * f**-0.5 for w, f in zip(flat, sizes, strict=True)] for flat in flats]
    loss, y = torch.randn(rows * prod(sizes), dtype=torch.float64), x
    for ws in layers:
        y = y.reshape(rows, *reversed(sizes))
        for w in ws:
            y = (y @ w).movedim(-1, 1)
    (y.flatten() @ loss).backward()
    found = CliRunner().invoke(
        app, ["check", "kron_linear", "--dtype", "d", "--sim", *map(str, (rows, *sizes))]
    )
    lines = [line.split() for line in found.stdout.splitlines() if line.strip()]
    for version in ("v1", "v2", "v3", "v4"):
        norms = {words[1]: words[2] for words in lines if words[0] == version and "right" in words}
        assert norms["|out|"] == f"{y.norm():.6g}" and norms["|dx|"] == f"{x.grad.norm():.6g}"
    assert found.exit_code == 0 and "v1 and v4" in found.stdout and "DIFFER" not in found.stdout


# ---- the layer


def test_layer():
    torch.manual_seed(1)
    layer = cukern.KronLinear((32, 16), (16, 32), dtype=torch.float64)
    assert [tuple(p.shape) for p in layer.parameters()] == [
        (512,),
        (32, 16),
        (16, 32),
    ] and not layer.bias.any()
    x = torch.randn(2, 3, 512, dtype=torch.float64)
    y = layer(x)
    close(y, dense(x, list(layer.factors)) + layer.bias)
    assert 0.8 < float(y.detach().std()) < 1.25, "outputs vary as the inputs do"
    y.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    other = cukern.KronLinear((32, 16), (16, 32), dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert same_bits(other(x), y) and "(32, 16) -> (16, 32)" in repr(layer)
    assert cukern.KronLinear([4], [2], bias=False).bias is None
    with pytest.raises(ValueError, match=r"in_factors \(4, 2\) and out_factors \(3,\) must be equally many"):
        cukern.KronLinear((4, 2), (3,))


@EVERYWHERE
def test_lokr(device, version):
    def new(*shape):
        return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)

    w1, a, b, base, x = new(4, 2), new(3, 2), new(2, 5), new(6, 12), new(6, 10)
    y = cukern.lokr_linear(x, w1, (a, b), scale=0.5, residual=base, version=version)
    close_with_gradients(y, base + 0.5 * x @ torch.kron(w1, a @ b).t(), (x, w1, a, b, base))
    close(cukern.lokr_linear(x, w1, a @ b, version=version), x @ torch.kron(w1, a @ b).t())


@pytest.mark.parametrize("device, version", places("kron_linear")[:: len(kron_op.VERSIONS)])
@pytest.mark.parametrize("low_rank, small", (("w1", "w1"), ("w2", "w2"), ("w1 w2", "w2")))
def test_float16_products_of_small_factors(low_rank, small, device, version):
    """Elements of a @ b near 1e-6 are subnormal in float16: formed, gradients would be off by 2 %."""

    def draw(name, q, p):
        std = 1e-3 if name == small else 1.0
        shapes = ((q, 2), (2, p)) if name in low_rank else ((q, p),)
        return [(torch.randn(s) * std).half().to(device).requires_grad_() for s in shapes]

    (x,), w1, w2 = draw("x", 32, 32), draw("w1", 6, 4), draw("w2", 12, 8)
    inputs = [x, *w1, *w2]
    pairs = [w if len(w) == 2 else w[0] for w in (w1, w2)]
    y = cukern.lokr_linear(x, *pairs, scale=1024.0, version=version)
    g = torch.randn_like(y)
    product = torch.kron(*(reduce(torch.matmul, [t.double() for t in w]) for w in (w1, w2)))
    exact = 1024 * x.double() @ product.t()
    found = y, *torch.autograd.grad(y, inputs, g)
    truth = exact, *torch.autograd.grad(exact, [x, *w1, *w2], g.double())
    for ours, right in zip(found, truth, strict=True):  # the exact gradients are rounded once, to float16
        assert (ours.double() - right.double()).norm() <= 2e-3 * right.double().norm()


# ---- refusals


def t(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


REFUSED = [
    (
        (t(2, 7), [t(2, 2), t(3, 3)]),
        {},
        ValueError,
        r"the last dimension of x, 7, must equal the product of the factors' rows, 2 x 3 = 6",
    ),
    ((t(2, 6), []), {}, ValueError, "factors is empty: the layer needs at least one matrix"),
    (
        (t(2, 6), t(6, 6)),
        {},
        TypeError,
        r"factors must be a list or a tuple of matrices, got a tensor of shape \(6, 6\)",
    ),
    ((t(), [t(1, 1)]), {}, ValueError, "x must have at least one dimension"),
    (
        (t(2, 6), [t(6)]),
        {},
        ValueError,
        r"factors\[0\] must be \(p, q\), or \(samples, p, q\), with p and q at least 1, got \(6,\)",
    ),
    ((t(2, 0), [t(0, 3)]), {}, ValueError, r"with p and q at least 1, got \(0, 3\)"),
    (
        (t(2, 6), [t(3, 6, 6)]),
        {},
        ValueError,
        r"factors\[0\] has 3 samples, one for each of x's first dimension, but x has shape \(2, 6\)",
    ),
    (
        (t(2, 6), [t(6, 6, dtype=torch.float64)]),
        {},
        TypeError,
        r"factors\[0\] is torch.float64, x is torch.float32",
    ),
    ((t(2, 6), [t(6, 6, device="meta")]), {}, ValueError, r"factors\[0\] is on meta, x is on cpu"),
    ((t(2, 6, dtype=torch.int64), [t(6, 6)]), {}, TypeError, "x must be torch.float16, .*, got torch.int64"),
    (([1.0], [t(1, 1)]), {}, TypeError, "x must be a torch.Tensor or an array with __dlpack__, got list"),
    ((t(2, 6), [t(6, 3)]), {"bias": t(6)}, ValueError, r"bias has shape \(6,\), it must be \(3,\)"),
    (
        (t(2, 6), [t(6, 3)]),
        {"residual": t(2, 6)},
        ValueError,
        r"residual has shape \(2, 6\), it must be \(2, 3\)",
    ),
    (
        (t(2, 6), [t(6, 3)]),
        {"version": "v9"},
        ValueError,
        "cukern.kron_linear has no version 'v9'; it has v1, v2, v3, v4",
    ),
]


@pytest.mark.parametrize("args, keywords, error, says", REFUSED, ids=[says[:30] for *_, says in REFUSED])
def test_refusals(args, keywords, error, says):
    with pytest.raises(error, match=says):
        cukern.kron_linear(*args, **keywords)


@pytest.mark.skipif(PLACE == "cuda", reason="looks at the CPU alone")
def test_kernels_need_a_gpu_or_the_simulator():
    with pytest.raises(
        ValueError, match=r"version 'v3' of cukern\.kron_linear is a CUDA kernel, the tensor is on cpu"
    ):
        cukern.kron_linear(t(2, 6), [t(6, 3)], version="v3")
    assert cukern.kron_linear(t(2, 6), [t(6, 3)], version="v2").shape == (2, 3), (
        "torch's own operations run anywhere"
    )


@on_kernels
def test_no_graph_no_function(device, version, monkeypatch):
    monkeypatch.setattr(kron_op, "_apply", None)
    x, ws = draw(2, ((2, 2), (3, 3)), device)
    close(cukern.kron_linear(x, ws, version=version), dense(x, ws))
