"""Triton kernels of flash-linear-attention (FLA) in the simulator, against float64 formulas of torch."""

import functools
import importlib.util
import warnings

import pytest
import torch
import torch.nn.functional as F

from cukern import sim

INSTALLED = all(map(importlib.util.find_spec, ("triton", "fla", "einops")))
pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="FLA is not installed: pip install triton einops fla-core"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT", "ignore:cukern.sim.triton", "ignore:ChunkDelta"),
]
TIME, HEADS, DIM = 70, 2, 32  # a chunk of 64 steps, and a part of one
QKV, GATE = (1, TIME, HEADS, DIM), (1, TIME, HEADS)
ANGLES = torch.outer(torch.arange(float(TIME)), 1e4 ** (-torch.arange(DIM / 2) / DIM * 2))
TARGETS = torch.tensor([5, 90, -100, 0, 17, 33])
DECAYS = (1 - 2.0 ** (-5 - torch.arange(HEADS))).log().expand(GATE)


def recurrence(q, g, k, v, a=None, b=None, u=None):
    """S = (diag(exp(g)) + b a^T) S + k v^T and o = S^T q. With u: o = (previous S + diag(u) k v^T)^T q."""
    state, out = q.new_zeros(1, HEADS, DIM, DIM), []
    for t in range(TIME):
        new, previous = k[:, t, :, :, None] * v[:, t, :, None], state
        if g is not None:
            state = state * g[:, t].reshape(1, HEADS, -1, 1).exp()
        if a is not None:
            state = state + b[:, t, :, :, None] * (a[:, t, :, None] @ previous)
        state = state + new
        out.append(q[:, t, :, None] @ (state if u is None else previous + u[..., None] * new))
    return torch.cat(out, 2).transpose(1, 2)


def linear(q, k, v, g=None, **more):
    return recurrence(q * DIM**-0.5, g, k, v, **more)


def delta(q, k, v, g, beta):
    return linear(q, k, v * beta[..., None], g, a=-k * g[..., None].exp(), b=k * beta[..., None])


def norm_gated(x, g, w, b):
    return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w + b) * F.silu(g)


def rotary(x):
    (a, b), cos, sin = x.chunk(2, -1), ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


KINDS = {"x": lambda x: x, "g": F.logsigmoid, "s": torch.sigmoid, "1": functools.partial(F.normalize, dim=-1)}
CASES = {  # name: its module, the kinds of its inputs, their shapes, the formula
    "chunk_simple_gla": ("ops.simple_gla", "xxxg", [QKV] * 3 + [GATE], linear),
    "fused_recurrent_gla": ("ops.gla", "xxxg", [QKV] * 4, linear),
    "chunk_gla": ("ops.gla", "xxxg", [QKV] * 4, linear),
    "fused_recurrent_retention": ("ops.retention", "xxx", [QKV] * 3, lambda q, k, v: linear(q, k, v, DECAYS)),
    "fused_chunk_linear_attn": ("ops.linear_attn", "xxx", [QKV] * 3, linear),
    "fused_recurrent_delta_rule": (
        "ops.delta_rule", "x1xs", [QKV] * 3 + [GATE], lambda q, k, v, s: delta(q, k, v, 0 * s, s)
    ),
    "chunk_gated_delta_rule": ("ops.gated_delta_rule", "x1xgs", [QKV] * 3 + [GATE] * 2, delta),
    "fused_recurrent_rwkv6": (
        "ops.rwkv6", "xxxgx", [QKV] * 4 + [(HEADS, DIM)], lambda r, k, v, w, u: linear(r, k, v, w, u=u)
    ),
    "chunk_rwkv7": ("ops.rwkv7", "xgxx11", [QKV] * 6, recurrence),
    "rms_norm_gated": ("modules.norm.fused_norm_gate", "xxxx", [(9, 80)] * 2 + [(80,)] * 2, norm_gated),
    "rotary_embedding": ("modules.rotary", "x", [QKV], rotary),
    "cross_entropy_loss": (
        "modules.fused_cross_entropy", "x", [(6, 96)], lambda x: F.cross_entropy(x, TARGETS, reduction="none")
    ),
    "causal_conv1d": (
        "modules.causal_conv1d", "xx", [(2, TIME, 48), (48, 4)],
        lambda x, w: F.conv1d(F.pad(x.mT, (3, 0)), w[:, None], groups=48).mT,
    ),
}  # fmt: skip
OPTIONS = {
    "fused_chunk_linear_attn": {"normalize": False},
    "rotary_embedding": {"cos": ANGLES.cos(), "sin": ANGLES.sin()},
    "cross_entropy_loss": {"target": TARGETS},
}


def forward_and_backward(name, arch):
    module, kinds, shapes, formula = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA asks Triton for a GPU; in the block, it would ask torch as well
        function = getattr(importlib.import_module(f"fla.{module}"), name)
    torch.manual_seed(0)
    inputs = [torch.randn(shape).requires_grad_() for shape in shapes]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    with sim.triton(arch):
        got = function(*(KINDS[k](x) for k, x in zip(kinds, inputs, strict=True)), **OPTIONS.get(name, {}))
        got = got[0] if isinstance(got, tuple) else got
        gradient = torch.randn_like(got)
        got.backward(gradient)
    want = formula(*(KINDS[k](x) for k, x in zip(kinds, exact, strict=True)))
    want.backward(gradient)
    # products of TF32: 11 bits of each factor
    tolerance = 5e-3 if "chunk" in name else 3e-6
    for x, y in [(got, want), *((x.grad, y.grad) for x, y in zip(inputs, exact, strict=True))]:
        assert (x - y).abs().max() <= tolerance * y.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name):
    forward_and_backward(name, "sm_90" if "chunk" in name else "sm_80")
