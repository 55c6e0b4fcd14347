"""Liger's Triton kernels, from its wheel, forward and backward in the simulator against torch."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import TREE

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


def sparsemax(x):
    z = x.sort(-1, descending=True).values
    sums, k = z.cumsum(-1), torch.arange(1, x.shape[-1] + 1)
    support = (1 + k * z > sums).sum(-1, keepdim=True)
    return F.relu(x - (sums.gather(-1, support - 1) - 1) / support)


def norm(x):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def causal(x, value):
    return x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), value)


def multi_token(scores, w):
    return causal(F.conv2d(causal(scores, -math.inf).softmax(-1), w, padding=1), 0.0)


def neighborhood(q, k, v):
    near = (torch.arange(20)[:, None] - torch.arange(20)).abs() <= 3
    return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


def attention_residual(v, query, w):
    return ((norm(v) * w * query).sum(-1, keepdim=True).softmax(0) * v).sum(0)


def mrope(q, k):
    cos, sin = (
        torch.cat([part[i % 3] for i, part in enumerate(m.split([4, 2, 2] * 2, -1))], -1)
        for m in (MULTIMODAL.cos(), MULTIMODAL.sin())
    )
    return rope(q, k, cos, sin)


ANGLES = torch.outer(torch.arange(6.0), 1e4 ** (-torch.arange(8) / 8)).repeat(1, 2)[None]
MULTIMODAL = torch.outer(torch.arange(18.0), 1e4 ** (-torch.arange(8) / 8)).repeat(1, 2).view(3, 1, 6, 16)
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
    "fused_add_rms_norm": (
        lambda f, x, r, w: torch.cat(f(x, r, w, 1e-6), 1),
        lambda x, r, w: torch.cat((rmsnorm(x + r, w), x + r), 1),
        [(9, 80), (9, 80), (80,)],
    ),
    "modulated_rms_norm": (
        lambda f, x, w, scale, shift: f(x, w, scale, shift, 1e-6),
        lambda x, w, scale, shift: rmsnorm(x, w) * (1 + scale) + shift,
        [(9, 80), (80,), (80,), (80,)],
    ),
    "poly_norm": (
        lambda f, x, w, b: f(x, w, b, 1e-6),
        lambda x, w, b: norm(x**3) * w[0] + norm(x**2) * w[1] + norm(x) * w[2] + b,
        [(9, 80), (3,), ()],
    ),
    "group_norm": (
        lambda f, x, w, b: f(x, w, b, 6, 2, 1e-5),
        lambda x, w, b: F.group_norm(x, 2, w, b, 1e-5),
        [(3, 6, 40), (6,), (6,)],
    ),
    "geglu": (lambda f, a, b: f(a, b), lambda a, b: F.gelu(a, approximate="tanh") * b, [(9, 80), (9, 80)]),
    "relu_squared": (lambda f, x: f(x), lambda x: F.relu(x).square(), [(9, 80)]),
    "sparsemax": (lambda f, x: f(x), sparsemax, [(9, 80)]),
    "kl_div": (
        lambda f, x, y: f(x.log_softmax(-1), y.softmax(-1).detach(), reduction="batchmean"),
        lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1).detach(), reduction="batchmean"),
        [(9, 80), (9, 80)],
    ),
    "tvd": (
        lambda f, x, y: f(x.softmax(-1), y.softmax(-1).detach(), reduction="batchmean"),
        lambda x, y: (x.softmax(-1) - y.softmax(-1).detach()).abs().sum() / 18,
        [(9, 80), (9, 80)],
    ),
    "fused_linear_jsd": (
        lambda f, x, w, y, v: f(x, w, y.detach(), v.detach()),
        lambda x, w, y, v: jsd(x @ w.T, (y @ v.T).detach()),
        [(6, 32), (96, 32), (6, 24), (96, 24)],
    ),
    "fused_linear_kl_div": (
        lambda f, x, w, y: f(x, w, y.softmax(-1).detach()),
        lambda x, w, y: F.kl_div((x @ w.T).log_softmax(-1), y.softmax(-1).detach(), reduction="batchmean"),
        [(6, 32), (96, 32), (6, 96)],
    ),
    "qwen2vl_mrope": (
        lambda f, q, k: torch.cat(f(q, k, MULTIMODAL.cos(), MULTIMODAL.sin(), [4, 2, 2]), 1),
        mrope,
        [(1, 4, 6, 16), (1, 2, 6, 16)],
    ),
    "multi_token_attention": (
        lambda f, s, w: f(s, w, padding=1),
        multi_token,
        [(1, 2, 12, 12), (2, 2, 3, 3)],
    ),
    "fused_neighborhood_attention": (lambda f, q, k, v: f(q, k, v, 7), neighborhood, [(1, 2, 20, 16)] * 3),
    "attn_res": (
        lambda f, v, query, w: f(v, query, w, 1e-6),
        attention_residual,
        [(4, 2, 5, 32), (32,), (32,)],
    ),
    "mhc_pre": (lambda f, x, h: f(x, h), lambda x, h: (x * h[..., None]).sum(-2), [(2, 5, 4, 48), (2, 5, 4)]),
    "mhc_post_res": (
        lambda f, x, y, post, mix: f(x, y, post, mix),
        lambda x, y, post, mix: mix @ x + post[..., None] * y[..., None, :],
        [(2, 5, 4, 48), (2, 5, 48), (2, 5, 4), (2, 5, 4, 4)],
    ),
}


def forward_and_backward(name, arch):
    theirs, ours, shapes = CASES[name]
    torch.manual_seed(0)
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    copies = [x.detach().clone().requires_grad_() for x in inputs]
    with sim.triton(arch):
        from liger_kernel.transformers import functional

        got = theirs(getattr(functional, f"liger_{name}"), *inputs)
        gradient = torch.randn_like(got)
        got.backward(gradient.clone())  # some write over it
    want = ours(*copies)
    want.backward(gradient)
    # products of TF32: 11 bits of each factor
    tolerance = 5e-3 if name == "fused_neighborhood_attention" else 1e-5
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for x, y in zip(inputs, copies, strict=True):
        if y.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=10 * tolerance, atol=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name):
    forward_and_backward(name, "sm_80")


def test_the_table_of_the_page_has_each_kernel():
    import triton_table

    page = (TREE / "docs/guide/triton.md").read_text()
    assert re.findall(r"^\| (.*?) \|(?: right, .* s \|| NotSim.* \|| Triton .* \|){3}$", page, re.M) == list(
        triton_table.rows()
    )
