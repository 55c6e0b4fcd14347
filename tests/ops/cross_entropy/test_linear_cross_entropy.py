"""linear_cross_entropy beyond test_ops.py: every option against float64, chunks, what is wanted, memory,
second derivatives, errors."""

import itertools
import math

import pytest
import torch
from helpers import DEVICE, gpu, kernels, places, same_bits, simulated
from test_cross_entropy import expected

import cukern
from cukern.ops.cross_entropy import linear
from cukern.ops.cross_entropy.op import Options, reference

EVERY = pytest.mark.parametrize("device, version", places("linear_cross_entropy"))


def drawn(rows, classes, columns, dtype=torch.float32, device=DEVICE):
    x = torch.randn(rows, columns, device=device)
    weight = torch.randn(classes, columns, device=device) * columns**-0.5
    targets = torch.randint(classes - 3, (rows,), device=device)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def exact(x, weight, targets, scale=1.0, **options):
    """The loss, and its gradients times `scale`, in float64, from logits that are rounded to x's dtype."""
    x, weight = (t.detach().double().requires_grad_() for t in (x, weight))
    logits = x @ weight.T
    loss = expected(logits + (logits.to(torch.float32) - logits).detach(), targets, **options)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight), torch.full_like(loss, scale))


@EVERY
def test_every_option(device, version):
    x, weight, targets = drawn(11, 37, 5, device=device)
    targets[3] = targets[8] = 7
    names = "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "vocab_size"
    for i, values in enumerate(
        itertools.product((-100, 7), ("mean", "sum"), (0.0, 0.2), (0.0, 0.1), (None, 4.0), (None, 34))
    ):
        options = dict(zip(names, values, strict=True))
        of = x, weight, targets.int() if i % 2 else targets
        loss = cukern.linear_cross_entropy(*of, **options, chunk_rows=(4, 11, None)[i % 3], version=version)
        found = (loss.detach(), *torch.autograd.grad(loss, of[:2], torch.full_like(loss, 0.7)))
        correct = exact(*of, 0.7, **options)
        for a, b in zip(found, correct, strict=True):
            torch.testing.assert_close(
                a.double(), b, rtol=1e-5, atol=2e-6, msg=lambda text, options=options: f"{options}: {text}"
            )


@kernels
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit_gradients_are_as_accurate_as_torch(dtype):
    x, weight, targets = drawn(40, 67, 24, dtype)
    loss = cukern.linear_cross_entropy(x, weight, targets, chunk_rows=16)
    assert loss.dtype == torch.float32
    found, correct = torch.autograd.grad(loss, (x, weight)), exact(x, weight, targets)
    torch_loss = torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, weight), targets)
    theirs = torch.autograd.grad(torch_loss, (x, weight))
    assert abs(loss.item() - correct[0].item()) < 8 * torch.finfo(dtype).eps
    for ours, other, right in zip(found, theirs, correct[1:], strict=True):
        assert (ours.double() - right).norm() <= 1.5 * (other.double() - right).norm()


@EVERY
@pytest.mark.parametrize("reduction, rows", (("mean", 510), ("sum", 8)))
def test_the_scale_of_the_gradients_is_float32(device, version, reduction, rows):
    """65536, the scale of a GradScaler, is infinite in float16, and 1 / 510 is 1.0039 / 510 in bfloat16. The
    gradients are those of the same logits, in float32 but for the rounding of the logits' gradient."""
    for dtype, scale in ((torch.float16, 65536.0), (torch.bfloat16, 1.0)):
        x, weight, targets = drawn(rows, 24, 16, dtype, device)
        loss = cukern.linear_cross_entropy(x, weight, targets, reduction=reduction, version=version)
        logits = torch.nn.functional.linear(x, weight).detach().double().requires_grad_()
        torch.nn.functional.cross_entropy(logits, targets, reduction="sum").backward()
        dlogits = logits.grad.to(dtype).double() * scale / (rows if reduction == "mean" else 1)
        right = dlogits @ weight.detach().double(), dlogits.mT @ x.detach().double()
        for y, t in zip(torch.autograd.grad(loss * scale, (x, weight)), right, strict=True):
            y, fits = y.double(), t.abs() < 0.99 * torch.finfo(dtype).max
            assert fits.double().mean() > 0.5 and y[fits].isfinite().all()
            assert abs((y * t)[fits].sum() / (t * t)[fits].sum() - 1) < 2e-4


@kernels
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_kernel_that_reads_logits_once(dtype):
    """Every option, rows of any alignment, several per block, ignored and wrong targets: against float64,
    from the same logits."""
    for i, values in enumerate(itertools.product((0.0, 0.2), (0.0, 0.1), (0.0, 4.0), (0, 3))):
        smoothing, z_loss, softcap, padding = values
        columns = (67, 40, 9, 1100)[i % 4]
        options = Options(columns - padding, 7, "none", smoothing, z_loss, softcap)
        logits = torch.randn(9, columns, device=DEVICE).mul(3).to(dtype)
        targets = torch.randint(options.vocab, (9,), device=DEVICE, dtype=(torch.int64, torch.int32)[i % 2])
        targets[1:4], targets[6] = torch.tensor([7, options.vocab, 0]), 7
        leaf, valid = logits.double().requires_grad_(), targets.clamp(max=options.vocab - 1)
        right = reference(leaf, valid, options)
        (gradient,) = torch.autograd.grad(right.sum(), leaf)
        with simulated(logits, targets):
            losses = linear.LOSSES["v2"](logits, targets, torch.ones((), device=DEVICE), options)
        assert (
            losses.dtype == torch.float32 and losses[2].isnan() and logits[2, : options.vocab].isnan().all()
        )
        assert not logits[:, options.vocab :].any() and losses[1] == 0 and not logits[[1, 6]].any()
        keep = [0, 1, *range(3, 9)]
        torch.testing.assert_close(losses[keep].double(), right[keep].detach(), rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(
            logits[keep].double(), gradient[keep], rtol=torch.finfo(dtype).eps, atol=2e-6
        )


@kernels
def test_versions_of_long_rows_agree():
    """More vectors than a thread copies in one group, where an SM has room for two rows."""
    x, weight, targets = drawn(3, 20_003, 8, torch.bfloat16)
    runs = []
    for version in ("v1", "v2"):
        loss = cukern.linear_cross_entropy(x, weight, targets, version=version)
        runs.append((loss.detach(), *torch.autograd.grad(loss, (x, weight))))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2 if a.ndim else 1e-6, atol=1e-5)


@EVERY
def test_what_is_not_wanted_is_not_computed(device, version):
    x, weight, targets = drawn(9, 20, 8, device=device)
    loss, dx, dweight = exact(x, weight, targets)
    for wants_x, wants_weight in itertools.product((False, True), repeat=2):
        leaves = x.detach().requires_grad_(wants_x), weight.detach().requires_grad_(wants_weight)
        found = cukern.linear_cross_entropy(*leaves, targets, version=version)
        assert found.requires_grad == (wants_x or wants_weight)
        torch.testing.assert_close(found.detach().double(), loss, rtol=1e-5, atol=1e-6)
        if found.requires_grad:
            found.backward()
        for leaf, right, wanted in zip(leaves, (dx, dweight), (wants_x, wants_weight), strict=True):
            assert (leaf.grad is not None) == wanted
            if wanted:
                torch.testing.assert_close(leaf.grad.double(), right, rtol=1e-4, atol=1e-6)


@kernels
def test_no_gradient_is_computed_without_a_tensor_that_requires_it(monkeypatch):
    (x, weight, targets), calls = drawn(5, 20, 8), []
    monkeypatch.setattr(linear, "write_gradient", lambda *_: calls.append(1))
    cukern.linear_cross_entropy(x.detach(), weight.detach(), targets, version="v1")
    assert not calls
    cukern.linear_cross_entropy(x, weight.detach(), targets, version="v1")
    assert calls


@EVERY
def test_ignored_empty_and_leading_dimensions(device, version):
    x, weight, targets = drawn(6, 20, 8, device=device)
    none = torch.full_like(targets, -100)
    loss = cukern.linear_cross_entropy(x, weight, none, version=version)
    assert loss.isnan() and not any(g.any() for g in torch.autograd.grad(loss, (x, weight)))
    assert cukern.linear_cross_entropy(x[:0], weight, none[:0], version=version).isnan()
    empty = cukern.linear_cross_entropy(x[:0], weight, none[:0], reduction="sum", version=version)
    assert empty.item() == 0 and not torch.autograd.grad(empty, weight)[0].any()
    whole = cukern.linear_cross_entropy(x, weight, targets, version=version)
    assert torch.equal(
        whole, cukern.linear_cross_entropy(x.view(2, 3, 8), weight, targets.view(2, 3), version=version)
    )
    by_columns = x.detach().t().contiguous().t(), torch.randn(8, 20, device=device).t()
    torch.testing.assert_close(
        cukern.linear_cross_entropy(*by_columns, targets, version=version),
        cukern.linear_cross_entropy(*(t.contiguous() for t in by_columns), targets, version=version),
    )


@kernels
def test_two_calls_and_two_backwards_give_the_same_bits():
    x, weight, targets = drawn(33, 40, 16)
    runs = []
    for _ in range(2):
        loss = cukern.linear_cross_entropy(x, weight, targets, chunk_rows=8)
        runs += [(loss, *torch.autograd.grad(loss, (x, weight), retain_graph=True)) for _ in range(2)]
    assert all(same_bits(a, b) for other in runs[1:] for a, b in zip(runs[0], other, strict=True))


def test_second_derivatives():
    x, weight = (torch.randn(n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    targets = torch.tensor([0, 4, -100, 2])
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1, "softcap": 3.0, "reduction": "sum"}):

        def function(*leaves, options=options):
            return cukern.linear_cross_entropy(*leaves, targets, **options)

        assert torch.autograd.gradcheck(function, (x, weight)) and torch.autograd.gradgradcheck(
            function, (x, weight)
        )


@gpu
def test_memory():
    """Beyond the gradients and one float32 gradient of the weight: an eighth of the logits."""
    x, weight, targets = drawn(8192, 50304, 768, torch.bfloat16)
    for _ in range(2):
        x.grad = weight.grad = None
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cukern.linear_cross_entropy(x, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before - 2 * (x.numel() + weight.numel()) - 4 * weight.numel()
    assert peak <= 8192 * 50304 * 2 / 8


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (
            {"x": torch.randn(4, 5)},
            ValueError,
            r"x must be \(..., C\) and weight \(V, C\), got \(4, 5\) and \(7, 6\)",
        ),
        ({"weight": torch.randn(6)}, ValueError, r"weight \(V, C\), got \(4, 6\) and \(6,\)"),
        ({"weight": torch.randn(7, 6).half()}, TypeError, "dtype"),
        ({"targets": torch.zeros(5, dtype=torch.long)}, ValueError, r"targets .*\(5,\)"),
        ({"targets": torch.zeros(4)}, TypeError, "targets .*float32"),
        ({"targets": torch.full((4,), 7)}, ValueError, r"targets must be in 0\.\.6"),
        ({"reduction": "max"}, ValueError, "reduction .*'max'"),
        ({"chunk_rows": 0}, ValueError, "chunk_rows .*0"),
        ({"vocab_size": 8}, ValueError, "vocab_size .*8"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing"),
        ({"version": "v9"}, ValueError, "v9"),
    ],
)
def test_refused(change, error, says):
    arguments = {
        "x": torch.randn(4, 6),
        "weight": torch.randn(7, 6),
        "targets": torch.zeros(4, dtype=torch.long),
    } | change
    with pytest.raises(error, match=says):
        cukern.linear_cross_entropy(**arguments)
