"""attention's errors beside those of torch's math backend, both against float64, and equal bits of 1,000
repeats."""

import pytest
import torch
from helpers import DEVICE, PLACE, gpu, kernels
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cukern

BF16 = torch.bfloat16
HEAD_DIMS = (64, 96, 128, 256) if PLACE == "cuda" else (64, 256)
SHAPE = (2, 4, 2048) if PLACE == "cuda" else (1, 1, 70)  # batch, heads, tokens
every_version = pytest.mark.parametrize("version", ["v3", "v4"])


def draw(d):
    return [torch.randn(*SHAPE, d, dtype=BF16, device=DEVICE) for _ in range(4)]  # q, k, v, dout


def results(function, inputs, dout):
    """out, dq, dk and dv."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, dout.to(out))


def math_backend(q, k, v):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


@kernels
@every_version
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_error_is_at_most_twice_that_of_the_math_backend(d, version):
    """In the root of the mean square, and the largest one, which is allowed one rounding more."""
    *inputs, dout = draw(d)
    exact = results(math_backend, [x.double() for x in inputs], dout)
    theirs = results(math_backend, inputs, dout)
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        ours = results(lambda *x: cukern.attention(*x, version=version), inputs, dout)
    for name, x, y, truth in zip(("out", "dq", "dk", "dv"), ours, theirs, exact, strict=True):
        mine, other = x.double() - truth, y.double() - truth
        assert mine.norm() <= 2 * other.norm(), name
        assert mine.abs().max() <= 2 * other.abs().max() + torch.finfo(BF16).eps * truth.abs().max(), name


@gpu
@pytest.mark.slow
@every_version
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_a_thousand_repeats_give_equal_bits(d, version):
    *inputs, dout = draw(d)
    # (tokens, heads, d), for packed sequences
    inputs, tokens = [x.flatten(0, 1).transpose(0, 1) for x in inputs], SHAPE[2]
    cu_seqlens = torch.tensor([0, 700, 700, 1000, tokens], dtype=torch.int32, device=DEVICE)
    for call in (
        lambda *x: cukern.attention(*(y.transpose(0, 1) for y in x), version=version).transpose(0, 1),
        lambda *x: cukern.attention_varlen(*x, cu_seqlens, version=version),
    ):
        g = dout.flatten(0, 1).transpose(0, 1)
        first, differ = results(call, inputs, g), torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(1000):
            for x, y in zip(results(call, inputs, g), first, strict=True):
                differ += (x.view(torch.int16) != y.view(torch.int16)).sum()
        assert differ == 0
