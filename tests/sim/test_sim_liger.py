"""Liger's Triton kernels, from its wheel, forward and backward in the simulator against torch."""

import pytest
import torch
import torch.nn.functional as F

from cukern import sim

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
pytest.importorskip("liger_kernel", reason="Liger is not installed: pip install liger-kernel")
pytestmark = pytest.mark.filterwarnings(
    "ignore:TRITON_DEFAULT_FP_FUSION", "ignore:cukern.sim.triton is tested with Triton"
)


def rmsnorm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def rope(q, k, cos, sin):
    def turned(x):
        a, b = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]

    return torch.cat((turned(q), turned(k)), 1)


def jsd(x, y):
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    mean = (p.exp() + q.exp()) / 2
    return (p.exp() * (p - mean.log()) + q.exp() * (q - mean.log())).sum() / 2 / len(x)


ANGLES = torch.outer(torch.arange(6.0), 1e4 ** (-torch.arange(8) / 8)).repeat(1, 2)[None]
TARGETS = torch.tensor([5, 90, -100, 0, 17, 33])
CASES = {  # name: Liger's, torch's, the shapes of the inputs
    "cross_entropy": (
        lambda f, x: f(x, TARGETS, label_smoothing=0.1),
        lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1),
        [(6, 96)],
    ),
    "fused_linear_cross_entropy": (
        lambda f, x, w: f(x, w, TARGETS),
        lambda x, w: F.cross_entropy(x @ w.T, TARGETS),
        [(6, 32), (96, 32)],
    ),
    "rms_norm": (lambda f, x, w: f(x, w, 1e-6), rmsnorm, [(9, 80), (80,)]),
    "layer_norm": (
        lambda f, x, w, b: f(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, (80,), w, b),
        [(9, 80), (80,), (80,)],
    ),
    "rope": (
        lambda f, q, k: torch.cat(f(q, k, ANGLES.cos(), ANGLES.sin()), 1),
        lambda q, k: rope(q, k, ANGLES.cos(), ANGLES.sin()),
        [(1, 4, 6, 16), (1, 2, 6, 16)],
    ),
    "swiglu": (lambda f, a, b: f(a, b), lambda a, b: F.silu(a) * b, [(9, 80), (9, 80)]),
    "softmax": (lambda f, x: f(x), lambda x: x.softmax(-1), [(9, 80)]),
    "jsd": (
        lambda f, x, y: f(x.log_softmax(-1), y.log_softmax(-1).detach()),
        lambda x, y: jsd(x, y.detach()),
        [(9, 80), (9, 80)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name):
    theirs, ours, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    with sim.triton("sm_80"):
        from liger_kernel.transformers import functional

        got = theirs(getattr(functional, f"liger_{name}"), *inputs)
        gradient = torch.randn_like(got)
        got.backward(gradient.clone())  # some write over it
    want = ours(*copies)
    want.backward(gradient)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for x, y in zip(inputs, copies, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5) if y.grad is not None else None
