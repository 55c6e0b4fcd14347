"""cross_entropy beyond test_ops.py: every option against float64, targets, layouts, in-place gradients,
extreme values, errors."""

import itertools
import math
from contextlib import nullcontext

import pytest
import torch
from helpers import DEVICE, PLACE, gpu, kernels, places, same_bits
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import cukern
from cukern.ops.cross_entropy.op import VERSIONS
from cukern.runtime.device import assumed, device_of
from cukern.runtime.launch import backend
from cukern.runtime.registry import CASES

EVERY = pytest.mark.parametrize("device, version", places("cross_entropy"))
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
inf, nan = math.inf, math.nan


def expected(
    logits, targets, ignore_index=-100, reduction="mean", label_smoothing=0.0, z_loss=0.0, softcap=None,
    vocab_size=None, **_,
):  # fmt: skip
    """In float64, without torch's cross_entropy."""
    c = logits.double()[..., :vocab_size]
    c = c if softcap is None else softcap * torch.tanh(c / softcap)
    lse, valid = c.logsumexp(-1), targets != ignore_index
    own = c.gather(-1, targets.long().clamp(0)[..., None])[..., 0]
    rows = lse - (1 - label_smoothing) * own + z_loss * lse * lse
    rows = rows - label_smoothing * c.mean(-1) if label_smoothing else rows  # the mean may be -inf
    rows = rows.masked_fill(~valid, 0.0)
    return rows if reduction == "none" else rows.sum() / valid.sum() if reduction == "mean" else rows.sum()


def check(logits, targets, tolerance, **options):
    """Loss and gradient against float64; both are float32 at worst, before the gradient is rounded to logits'
    dtype."""
    exact_leaf, leaf = logits.detach().double().requires_grad_(), logits.detach().clone().requires_grad_()
    version = options.pop("version", None)
    exact = expected(exact_leaf, targets, **options)
    ours = cukern.cross_entropy(leaf, targets, version=version, **options)
    assert (
        ours.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        and ours.shape == exact.shape
    )
    torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    g = torch.randn_like(ours)
    (dx,), (exact_dx,) = (
        torch.autograd.grad(ours, leaf, g),
        torch.autograd.grad(exact, exact_leaf, g.double()),
    )
    rounding = max(tolerance, torch.finfo(logits.dtype).eps)
    torch.testing.assert_close(dx.double(), exact_dx, rtol=rounding, atol=tolerance)
    assert dx.shape == logits.shape and dx.dtype == logits.dtype


@EVERY
def test_every_option(device, version):
    logits = 3 * torch.randn(2, 5, 37, device=device)
    targets = torch.randint(30, (2, 5), device=device)
    targets[0, 1] = targets[1, 4] = 7
    choices = itertools.product(
        (-100, 7), ("mean", "sum", "none"), (0.0, 0.2), (0.0, 0.1), (None, 4.0), (None, 30)
    )
    names = "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "vocab_size"
    for i, values in enumerate(choices):
        if PLACE == "cuda" or version is None or i % 5 == 0:
            check(
                logits,
                targets.int() if i % 2 else targets,
                2e-6,
                version=version,
                **dict(zip(names, values, strict=True)),
            )


@EVERY
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_the_loss_of_16_bit_logits_is_float32(device, version, dtype):
    logits, targets = torch.randn(7, 131, device=device).to(dtype), torch.randint(131, (7,), device=device)
    for options in ({}, {"softcap": 2.0, "reduction": "none", "z_loss": 0.1, "label_smoothing": 0.1}):
        check(logits, targets, 4e-6, version=version, **options)


@kernels
@EVERY_VERSION
def test_every_alignment_and_layout(version):
    memory = torch.randn(12, 3, 80, device=DEVICE)
    for dtype, start, width in itertools.product((torch.float32, torch.float16), (0, 1, 3), (1, 5, 37, 64)):
        x = memory.to(dtype)[:, 0, start : start + width]
        check(x, torch.randint(width, (12,), device=DEVICE), 4e-6, version=version, reduction="none")
    x = memory.transpose(0, 1)
    targets = torch.randint(80, (3, 12), device=DEVICE)
    check(x, targets, 4e-6, version=version)
    check(memory[..., ::2], targets.t() // 2, 4e-6, version=version)
    check(memory[:, 0].t(), torch.randint(12, (80,), device=DEVICE)[:80], 4e-6, version=version)
    check(memory[0, 0], targets[0, 0], 4e-6, version=version)
    check(memory[:1, 0].expand(12, 80), targets[0], 4e-6, version=version)


@kernels
@pytest.mark.parametrize("sms", (1, 2))
def test_warps_of_several_short_rows(sms):
    """Rows have 8, 16 or 32 lanes, which have one row or more, as the numbers of rows and SMs ask. The last
    rows of some are missing."""
    scale = 1 if PLACE == "sim" else torch.cuda.get_device_properties(0).multi_processor_count
    here = nullcontext() if PLACE == "cuda" else assumed(device_of(backend.SIMULATED)._replace(sms=sms))
    padded = {"vocab_size": 30, "label_smoothing": 0.1}
    with here:
        for rows, dtype, columns, options in (
            (70, torch.bfloat16, 24, {}), (150, torch.bfloat16, 24, {}), (150, torch.float32, 37, padded),
            (70, torch.float32, 1101, {}),
        ):  # fmt: skip
            targets = torch.randint(30 if options else columns, (rows * scale,), device=DEVICE)
            targets[::5] = -100
            check(
                torch.randn(rows * scale, columns, device=DEVICE).to(dtype),
                targets,
                4e-6,
                version="v2",
                **options,
            )


@EVERY
def test_ignored_and_empty(device, version):
    logits = torch.randn(3, 9, device=device, requires_grad=True)
    none = torch.full((3,), -100, device=device)
    loss = cukern.cross_entropy(logits, none, version=version)
    assert loss.isnan() and functional.cross_entropy(logits, none).isnan(), "as torch"
    assert not torch.autograd.grad(loss, logits)[0].any()
    assert not cukern.cross_entropy(logits, none, reduction="sum", version=version).any()
    assert not cukern.cross_entropy(logits, none, reduction="none", z_loss=1.0, version=version).any()
    empty = torch.randn(0, 9, device=device, requires_grad=True)
    assert cukern.cross_entropy(empty, none[:0], version=version).isnan()
    assert not cukern.cross_entropy(empty, none[:0], reduction="sum", version=version).any()
    loss = cukern.cross_entropy(empty, none[:0], reduction="none", version=version)
    assert loss.shape == (0,) and torch.autograd.grad(loss.sum(), empty)[0].shape == (0, 9)


@EVERY
@pytest.mark.parametrize("z_loss, softcap", ((0.0, None), (1e-3, None), (1e-3, 5.0)))
def test_logits_of_ignored_rows_do_not_matter(device, version, z_loss, softcap):
    for bad in (nan, inf, -inf):
        logits, targets = torch.randn(3, 9, device=device), torch.tensor([-100, 1, 2], device=device)
        logits[0] = bad
        leaf = logits.requires_grad_()
        loss = cukern.cross_entropy(leaf, targets, z_loss=z_loss, softcap=softcap, version=version)
        (dx,) = torch.autograd.grad(loss, leaf)
        assert loss.isfinite() and not dx[0].any() and dx[1:].isfinite().all(), bad


@EVERY
def test_layouts_that_are_ambiguous_are_refused(device, version):
    """Logits (N, C, T) of torch's layout with C == T have the shape of cukern's (N, T, C)."""
    for shape in ((2, 5, 5), (1, 5, 5), (2, 4, 4, 4)):
        logits = torch.randn(*shape, device=device)
        targets = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
        with pytest.raises(
            ValueError, match=r"may be \(\.\.\., T, V\) or torch's \(N, C, \.\.\.\): pass logits.flatten"
        ):
            cukern.cross_entropy(logits, targets, version=version)
        flat = cukern.cross_entropy(logits.flatten(0, -2), targets.flatten(), version=version)
        torch.testing.assert_close(flat, functional.cross_entropy(logits.flatten(0, -2), targets.flatten()))
    for shape in ((2, 5, 4), (5, 4, 5), (2, 1, 1), (2, 4, 5, 5)):
        logits = torch.randn(*shape, device=device)
        targets = torch.zeros(shape[:-1], dtype=torch.int64, device=device)
        right = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        torch.testing.assert_close(cukern.cross_entropy(logits, targets, version=version), right)
    with pytest.raises(ValueError, match="it must be that of logits without the last"):
        cukern.cross_entropy(
            torch.randn(2, 5, 4, device=device),
            torch.zeros(2, 4, dtype=torch.int64, device=device),
            version=version,
        )


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
def test_ambiguous_layouts_are_refused_in_graphs():
    """Where sizes are fixed. A graph for all sizes cannot refuse those that are equal."""
    logits, targets = torch.randn(3, 4, 4), torch.zeros(3, 4, dtype=torch.int64)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="may be"):  # torch wraps the ValueError
        torch.compile(cukern.cross_entropy, backend="eager", fullgraph=True)(logits, targets)
    torch._dynamo.reset()
    graph = torch.compile(cukern.cross_entropy, backend="eager", fullgraph=True, dynamic=True)
    for size in (5, 6):
        logits = torch.randn(3, 4, size)
        torch.testing.assert_close(
            graph(logits, targets), functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        )


@kernels
@EVERY_VERSION
def test_targets_outside(version):
    """NaN in the row's loss and gradient; an ignored row may have any target, and its logits are not used."""
    logits = torch.randn(5, 70, device=DEVICE)
    logits[4] = nan
    targets = torch.tensor([3, 60, -1, 1 << 40, -2], device=DEVICE)
    leaf = logits.requires_grad_()
    loss = cukern.cross_entropy(
        leaf, targets, reduction="none", ignore_index=-2, vocab_size=60, version=version
    )
    assert loss.isnan().tolist() == [False, True, True, True, False] and float(loss[4].detach()) == 0
    (dx,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    assert dx.isnan()[:, :60].all(1).tolist() == [False, True, True, True, False] and not dx[4].any()
    assert not dx[:, 60:].any(), "padding"


def test_targets_outside_on_the_cpu():
    for targets, options in (
        (torch.tensor([0, 6]), {}),
        (torch.tensor([0, -1]), {}),
        (torch.tensor([5, 0]), {"vocab_size": 5}),
    ):
        with pytest.raises(ValueError, match=r"targets must be in 0\.\.\d or ignore_index -100, got"):
            cukern.cross_entropy(torch.randn(2, 6), targets, **options)


@EVERY
def test_extreme_logits(device, version):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.randn(7, 40, dtype=dtype, device=device)
        x[0] += 1e4
        x[1] -= 1e4
        x[2, 5] = 1e30
        x[3, 1:] = -inf
        x[4] *= 100
        x[5] -= 1e9
        x[5, 7] = x[5, 20] = 3e8
        x[6] = x[6] * 4 + 1.5e8
        check(
            x,
            torch.tensor([1, 2, 5, 0, 7, 7, 9], device=device),
            1e-6 if version else 2e-3,
            version=version,
            reduction="none",
        )
    bad = torch.randn(4, 40, device=device)
    bad[0, 3], bad[1, 3], bad[2], bad[3, 3] = inf, nan, -inf, -inf
    loss = cukern.cross_entropy(bad, torch.full((4,), 3, device=device), reduction="none", version=version)
    assert loss[:3].isnan().all() and float(loss[3]) == inf
    padded = torch.full((2, 40), nan, device=device)
    padded[:, :30] = torch.randn(2, 30)
    assert cukern.cross_entropy(
        padded, torch.tensor([0, 29], device=device), vocab_size=30, version=version
    ).isfinite()


@kernels
@EVERY_VERSION
def test_inplace_backward(version):
    logits = torch.randn(5, 67, device=DEVICE, requires_grad=True)
    targets = torch.randint(60, (5,), device=DEVICE)
    options = {"vocab_size": 60, "softcap": 3.0, "version": version}
    (expected_dx,) = torch.autograd.grad(cukern.cross_entropy(logits * 2, targets, **options), logits)
    hidden = logits * 2
    other = hidden.square()  # saves the logits
    loss = cukern.cross_entropy(hidden, targets, inplace_backward=True, **options)
    before = hidden._version
    (dhidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert dhidden.data_ptr() == hidden.data_ptr() and not dhidden.requires_grad and hidden._version > before
    assert same_bits(2 * dhidden, expected_dx)
    for again in (loss, other.sum()):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(again, logits, retain_graph=True)
    wide = torch.randn(5, 80, device=DEVICE, requires_grad=True)
    part = (wide * 1)[:, 3:70]
    (dpart,) = torch.autograd.grad(
        cukern.cross_entropy(part, targets, inplace_backward=True, **options), part
    )
    (same,) = torch.autograd.grad(
        cukern.cross_entropy(part.detach().requires_grad_(), targets), part, allow_unused=True
    )
    assert same is None and dpart.data_ptr() == part.data_ptr()
    for leaf in (logits, logits.view(*logits.shape)):
        with pytest.raises(ValueError, match="must not be a leaf"):
            cukern.cross_entropy(leaf, targets, inplace_backward=True, **options)
    with pytest.raises(ValueError, match="must not overlap"):
        cukern.cross_entropy((logits[:1] * 2).expand(logits.shape), targets, inplace_backward=True, **options)
    with pytest.raises(NotImplementedError, match="cannot be differentiated"):
        torch.autograd.grad(
            cukern.cross_entropy(logits * 2, targets, inplace_backward=True), logits, create_graph=True
        )
    with pytest.raises(NotImplementedError, match=r"no rule for torch\.func"):
        torch.func.grad(lambda x: cukern.cross_entropy(x * 2, targets, inplace_backward=True))(
            logits.detach()
        )
    assert cukern.cross_entropy(
        logits.detach(), targets, inplace_backward=True, version=version
    ).isfinite(), "no gradient"


@kernels
def test_derivatives_of_every_order():
    x = torch.randn(3, 7, dtype=torch.float64, device=DEVICE, requires_grad=True)
    targets = torch.tensor([2, -1, 4], device=DEVICE)
    for reduction in ("mean", "none"):
        options = {
            "ignore_index": -1,
            "reduction": reduction,
            "z_loss": 0.3,
            "softcap": 2.0,
            "label_smoothing": 0.1,
            "vocab_size": 5,
        }
        for numeric_check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert numeric_check(
                lambda t, o=options: cukern.cross_entropy(t, targets, **o), (x,), fast_mode=PLACE == "sim"
            )


@kernels
def test_the_backward_is_one_launch():
    """autograd fills zeros for the gradients of the outputs without one unless told otherwise: a launch of 8
    bytes per row."""
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    x, dloss = torch.randn(4, 8, device=DEVICE, requires_grad=True), torch.ones((), device=DEVICE)
    loss = cukern.cross_entropy(x, torch.arange(4, device=DEVICE))
    with Listen():
        torch.autograd.grad(loss, x, dloss)
    assert seen == [torch.ops.cukern._cross_entropy_backward.default]


@kernels
def test_an_undefined_gradient_of_the_loss_gives_none():
    class Dropped(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, d):
            return None

    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    loss = Dropped.apply(cukern.cross_entropy(x, torch.arange(4, device=DEVICE)))
    assert torch.autograd.grad(loss, x, allow_unused=True) == (None,)


@kernels
def test_many_rows_are_reduced_in_a_fixed_order():
    rows = 2500  # more than two for each thread of the reduction
    logits, targets = torch.randn(rows, 3, device=DEVICE), torch.randint(-1, 3, (rows,), device=DEVICE)
    for reduction in ("mean", "sum"):
        first, again = (
            cukern.cross_entropy(logits, targets, ignore_index=-1, reduction=reduction) for _ in range(2)
        )
        assert same_bits(first, again)
        exact = expected(logits, targets, ignore_index=-1, reduction=reduction)
        torch.testing.assert_close(first.double(), exact, rtol=1e-6, atol=0)


@gpu
@EVERY_VERSION
def test_opcheck(version, device="cuda"):
    x, targets = torch.randn(5, 7, device=device), torch.randint(7, (5,), device=device)
    for reduction in ("mean", "none"):
        options = 7, -100, reduction, 0.1, 0.1, 2.0, version
        torch.library.opcheck(torch.ops.cukern._cross_entropy.default, (x, targets, *options))
        loss, stats = torch.ops.cukern._cross_entropy(x, targets, *options)
        torch.library.opcheck(
            torch.ops.cukern._cross_entropy_backward.default, (x, targets, stats, loss, *options)
        )
        torch.library.opcheck(
            torch.ops.cukern._cross_entropy_backward_.default, (x.clone(), targets, stats, loss, *options)
        )


@kernels
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
def test_torch_compile_ignores_inplace_backward():
    logits, targets = (
        torch.randn(5, 9, device=DEVICE, requires_grad=True),
        torch.randint(9, (5,), device=DEVICE),
    )

    def function(x):
        return cukern.cross_entropy(x * 2, targets, inplace_backward=True)

    torch._dynamo.reset()
    loss = torch.compile(function, fullgraph=True, backend="aot_eager")(logits)
    assert torch.equal(loss, function(logits))
    assert torch.equal(*(torch.autograd.grad(y, logits)[0] for y in (loss, function(logits))))


def test_on_the_cpu_it_is_torchs():
    x, targets = torch.randn(4, 6), torch.tensor([0, 5, -100, 2])
    for reduction, smoothing in itertools.product(("mean", "sum", "none"), (0.0, 0.3)):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        assert torch.equal(
            cukern.cross_entropy(x, targets, **options), functional.cross_entropy(x, targets, **options)
        )
    with pytest.raises(ValueError, match="the tensor is on cpu"):
        cukern.cross_entropy(x, targets, version="v1")
    with pytest.raises(
        ValueError, match=r"the number of classes, logits.shape\[-1\], must be in 1..1073741824, got 0"
    ):
        cukern.cross_entropy(x[:, :0], targets)
    assert CASES["cross_entropy"].call is cukern.cross_entropy
