"""linear_logprobs, and the options of linear_cross_entropy with a loss per token: against float64, chunks,
derivatives, errors."""

import math

import pytest
import torch
from helpers import DEVICE, PLACE, kernels

import cukern

EVERY = pytest.mark.parametrize(
    "device", (pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id=PLACE))
)


def drawn(dtype=torch.float32, device=DEVICE, bias=True):
    x = torch.randn(3, 5, 7, device=device)
    weight = torch.randn(19, 7, device=device)
    b = torch.randn(19, device=device)
    targets = torch.randint(17, (3, 5), device=device)
    targets[1, 2] = -100
    return [t.to(dtype).requires_grad_() for t in ((x, weight, b) if bias else (x, weight))], targets


def exact(tensors, targets, temperature=1.0, vocab=17):
    """Log-probabilities and entropies in float64, from logits rounded to the inputs' dtype."""
    x, weight, *bias = (t.detach().double().requires_grad_() for t in tensors)
    z = (x @ weight.T + (bias[0] if bias else 0)) / temperature
    z = z + (z.to(tensors[0].dtype) - z).detach()
    logs, valid = z[..., :vocab].log_softmax(-1), targets != -100
    logprobs = logs.gather(-1, targets.clamp(0)[..., None])[..., 0] * valid
    return (x, weight, *bias), logprobs, -(logs.exp() * logs).sum(-1) * valid


@EVERY
@pytest.mark.parametrize("entropy", (False, True))
@pytest.mark.parametrize("bias", (False, True))
def test_against_float64(device, entropy, bias):
    """Any gradients of the results, chunks that do not divide the rows, padded classes, int32 targets."""
    tensors, targets = drawn(device=device, bias=bias)
    options = {"bias": tensors[2] if bias else None, "vocab_size": 17, "chunk_rows": 4}
    outs = cukern.linear_logprobs(*tensors[:2], targets.int(), 0.7, entropy, **options)
    outs = outs if entropy else (outs,)
    doubles, *right = exact(tensors, targets, 0.7)
    douts = [torch.randn(3, 5, device=device) for _ in outs]
    found = *outs, *torch.autograd.grad(outs, tensors, douts)
    expected = (
        *right[: len(outs)],
        *torch.autograd.grad(right[: len(outs)], doubles, [d.double() for d in douts]),
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=4e-6)


@kernels
@pytest.mark.parametrize("entropy", (False, True))
@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
def test_16_bit(dtype, entropy):
    """Errors of the gradients of at most twice those of torch's operations."""
    tensors, targets = drawn(dtype)
    douts = torch.randn(2, 3, 5, device=DEVICE)
    outs = cukern.linear_logprobs(*tensors[:2], targets, entropy=True, bias=tensors[2], vocab_size=17)
    logs = torch.nn.functional.linear(*tensors)[..., :17].log_softmax(-1)
    theirs = (
        logs.gather(-1, targets.clamp(0)[..., None])[..., 0] * (targets != -100),
        -(logs.exp() * logs).sum(-1) * (targets != -100),
    )
    doubles, *right = exact(tensors, targets)
    take = slice(None) if entropy else slice(1)
    grads = [
        torch.autograd.grad(
            list(of[take]), inputs, [d.to(o.dtype) for d, o in zip(douts[take], of[take], strict=True)]
        )
        for of, inputs in ((outs, tensors), (theirs, tensors), (right, doubles))
    ]
    assert [o.dtype for o in outs] == [torch.float32] * 2
    for o, r in zip(outs, right, strict=True):
        torch.testing.assert_close(o.double(), r, rtol=1e-5, atol=1e-5)
    for ours, other, truth in zip(*grads, strict=True):
        assert (ours.double() - truth).norm() <= 2 * (other.double() - truth).norm() + torch.finfo(
            dtype
        ).eps * truth.norm()


@pytest.mark.parametrize("scale", (1e-3, 1.0, 100.0))
@EVERY
def test_entropies_of_many_classes(device, scale):
    """Rows of several vectors and single columns; classes whose logits are -inf count as absent."""
    torch.manual_seed(0)
    x = torch.randn(6, 8, device=device)
    weight = torch.randn(1003, 8, device=device) * scale
    x[5] = 0  # equal logits
    absent = torch.rand(1003, device=device) < 0.3
    targets = (~absent).nonzero()[torch.arange(6, device=device) * 100, 0]
    targets[2] = -100
    bias = torch.zeros(1003, device=device).masked_fill(absent, -torch.inf)
    douts = torch.randn(2, 6, device=device)
    tensors = [x.requires_grad_(), weight.requires_grad_()]
    outs = cukern.linear_logprobs(*tensors, targets, entropy=True, bias=bias)
    grads = torch.autograd.grad(outs, tensors, [*douts])
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    logs = (doubles[0] @ doubles[1][~absent].mT).log_softmax(1)
    index = ((~absent).cumsum(0)[targets.clamp(0)] - 1).clamp(0)  # that of -100 is not used
    valid = targets != -100
    truth = logs.gather(1, index[:, None])[:, 0] * valid, -(logs.exp() * logs).sum(1) * valid
    right = torch.autograd.grad(truth, doubles, [*douts.double()])
    for ours, wanted in zip((*outs, *grads), (*truth, *right), strict=True):
        assert (ours.double() - wanted).norm() <= 2e-5 * scale**0.5 * wanted.norm() + 1e-6
    assert outs[1][5].item() == pytest.approx(math.log(int((~absent).sum())))


def test_derivatives():
    x, weight = (
        torch.randn(5, 4, dtype=torch.float64, requires_grad=True),
        torch.randn(6, 4, dtype=torch.float64, requires_grad=True),
    )
    targets = torch.tensor([0, 1, -100, 3, 5])

    def function(x, weight):
        return cukern.linear_logprobs(x, weight, targets, 0.7, True, chunk_rows=2)

    assert torch.autograd.gradcheck(function, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(function, (x, weight))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("backend", ("gpu", pytest.param("sim", marks=kernels)))
def test_compiled(backend):
    device = "cpu" if backend == "sim" else DEVICE
    tensors, targets = drawn(device=device)

    def function(x, weight, bias):
        return torch.stack(cukern.linear_logprobs(x, weight, targets, 0.7, True, bias=bias, chunk_rows=4))

    with cukern.backend(backend):
        found = function(*tensors)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")(*tensors)
        torch.testing.assert_close(compiled, found)
        for a, b in zip(*(torch.autograd.grad(out.sum(), tensors) for out in (found, compiled)), strict=True):
            torch.testing.assert_close(a, b)


def test_frozen_weights_and_no_rows():
    (x, weight), targets = drawn(bias=False)
    cukern.linear_logprobs(x, weight.detach(), targets).sum().backward()
    assert x.grad is not None and weight.grad is None
    logprobs, entropies = cukern.linear_logprobs(x[:0], weight, targets[:0], entropy=True)
    assert logprobs.shape == entropies.shape == (0, 5)
    assert torch.autograd.grad(logprobs.sum(), weight)[0].eq(0).all()


@EVERY
@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("softcap", (None, 2.0))
def test_losses_with_weights_as_torch(device, reduction, softcap):
    tensors, targets = drawn(device=device)
    doubles = [t.detach().double().requires_grad_() for t in tensors]
    classes, tokens = torch.rand(19, device=device), torch.rand(3, 5, device=device)
    logits = torch.nn.functional.linear(*doubles).flatten(0, 1)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    flat = targets.flatten()

    def torchs(class_weights, reduction=reduction):
        return torch.nn.functional.cross_entropy(logits, flat, weight=class_weights, reduction=reduction)

    both = tokens.double() * torchs(classes.double(), "none").view(3, 5)
    scale = (tokens * classes[targets.clamp(0)] * (targets != -100)).sum().double()
    both = both if reduction == "none" else both.sum() / (scale if reduction == "mean" else 1)
    for options, expected in (
        ({}, torchs(None)),
        ({"class_weights": classes}, torchs(classes.double())),
        ({"class_weights": classes, "token_weights": tokens}, both),
    ):
        loss = cukern.linear_cross_entropy(
            *tensors[:2],
            targets,
            bias=tensors[2],
            reduction=reduction,
            softcap=softcap,
            chunk_rows=4,
            **options,
        )
        dloss, expected = torch.randn_like(loss), expected.view(loss.shape)
        found = loss, *torch.autograd.grad(loss, tensors, dloss)
        for a, b in zip(
            found,
            (expected, *torch.autograd.grad(expected, doubles, dloss.double(), retain_graph=True)),
            strict=True,
        ):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


def test_weights_have_gradients():
    tensors, targets = drawn(torch.float64)
    classes, tokens = (
        torch.rand(s, dtype=torch.float64, device=DEVICE).requires_grad_() for s in ((19,), (3, 5))
    )
    of = *tensors[:2], targets
    assert torch.autograd.gradcheck(
        lambda c, t: cukern.linear_cross_entropy(*of, class_weights=c, token_weights=t), (classes, tokens)
    )


@pytest.mark.parametrize(
    "error, text, change",
    (
        (ValueError, "temperature must be positive.*got 0", {"temperature": 0.0}),
        (ValueError, "temperature must be finite", {"temperature": float("nan")}),
        (TypeError, "temperature must be a number, got str", {"temperature": "1"}),
        (TypeError, "entropy must be", {"entropy": 1}),
        (ValueError, r"bias.*\(18,\)", {"bias": torch.zeros(18, device=DEVICE)}),
        (TypeError, "bias", {"bias": torch.zeros(19, device=DEVICE, dtype=torch.float16)}),
        (ValueError, "chunk_rows", {"chunk_rows": 0}),
        (ValueError, "vocab_size", {"vocab_size": 20}),
    ),
)
def test_refused(error, text, change):
    (x, weight), targets = drawn(bias=False)
    with pytest.raises(error, match=text):
        cukern.linear_logprobs(x, weight, targets, **change)


def test_refused_losses():
    (x, weight), targets = drawn(bias=False)
    for text, options in (
        (
            "class_weights must be None with label_smoothing, which is 0.1",
            {"class_weights": weight[:, 0], "label_smoothing": 0.1},
        ),
        ("one weight for each class", {"class_weights": weight[:4, 0]}),
        ("the shape of targets", {"token_weights": weight[:, 0]}),
    ):
        with pytest.raises(ValueError, match=text):
            cukern.linear_cross_entropy(x, weight, targets, **options)
    with pytest.raises(TypeError, match="token_weights"):
        cukern.linear_cross_entropy(x, weight, targets, token_weights=targets)
    if not x.is_cuda:
        with pytest.raises(ValueError, match=r"targets must be in 0\.\.18"):
            cukern.linear_logprobs(x, weight, targets + 40)
