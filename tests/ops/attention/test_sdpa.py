"""cukern in torch's registry of flash attention: scaled_dot_product_attention on a GPU, and the operator that
torch calls in the simulator."""

import contextlib

import pytest
import torch
import torch.nn.attention as door
from helpers import DEVICE, PLACE, kernels

import cukern
from cukern.integrations import sdpa

pytestmark = [
    kernels,
    pytest.mark.skipif(
        not hasattr(door, "register_flash_attention_impl"), reason="this torch has no registry"
    ),
]


@pytest.fixture
def attend():
    """scaled_dot_product_attention by cukern's kernels."""
    if PLACE == "sim":  # torch has no flash attention there, but calls a kernel that is registered
        handle = sdpa._Handle("CPU")

        def call(q, k, v, dropout_p=0.0, is_causal=False, scale=None, **_):
            operator = torch.ops.aten._scaled_dot_product_flash_attention
            return operator(q, k, v, dropout_p, is_causal, scale=scale)[0]

        with cukern.backend("sim"):
            yield call
        handle.remove()
        return
    sdpa.register()
    door.activate_flash_attention_impl("cukern")
    try:
        with door.sdpa_kernel(door.SDPBackend.FLASH_ATTENTION):
            yield torch.nn.functional.scaled_dot_product_attention
    finally:
        door.restore_flash_attention_impl()


def made(heads, kv_heads, queries, keys, head_dim, dtype, transposed=False):
    sizes = (heads, queries), (kv_heads, keys), (kv_heads, keys)
    tensors = [torch.randn(2, h, n, head_dim, dtype=dtype, device=DEVICE) for h, n in sizes]
    if transposed:  # (batch, rows, heads, head_dim) in memory
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    return [x.detach().requires_grad_() for x in tensors]


def expected(q, k, v, grad, causal, scale=None):
    """out and the gradients in float64, by the math of softmax(scale q k^T) v."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(group, 1)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad.double())


@pytest.mark.parametrize("transposed", (False, True))
@pytest.mark.parametrize(
    "heads, kv_heads, queries, keys, head_dim, dtype, options",
    (
        (4, 4, 33, 33, 64, torch.bfloat16, {"is_causal": True}),
        (4, 2, 37, 37, 128, torch.float16, {"is_causal": True, "scale": 0.3}),
        (2, 2, 17, 130, 40, torch.bfloat16, {}),
    ),
)
def test_derivatives(attend, heads, kv_heads, queries, keys, head_dim, dtype, options, transposed):
    """Against float64, and bit for bit those of cukern.attention."""
    q, k, v = made(heads, kv_heads, queries, keys, head_dim, dtype, transposed)
    grad = torch.randn_like(q)
    out = attend(q, k, v, enable_gqa=heads != kv_heads, **options)
    assert out.stride() == torch.empty_like(q).stride()  # as torch.compile expects
    found = out.detach(), *torch.autograd.grad(out, (q, k, v), grad)
    causal, scale = options.get("is_causal", False), options.get("scale")
    truth = expected(q, k, v, grad, causal, scale)
    for a, t in zip(found, truth, strict=True):
        assert (a - t).abs().max() <= 0.02 * t.abs().max()
    ours = cukern.attention(q, k, v, causal=causal, scale=scale)
    for a, b in zip(found, (ours, *torch.autograd.grad(ours, (q, k, v), grad)), strict=True):
        assert torch.equal(a, b)


def test_dropout(attend):
    """The forward drops what the backward drops: with ones for v, out is the sum of the kept weights, and so
    is the sum over dv. Two calls drop different weights; one seed gives the same bits."""
    q, k, v = made(2, 2, 64, 64, 64, torch.float16)
    ones = torch.ones_like(v).requires_grad_()
    torch.manual_seed(5)
    first = attend(q, k, ones, dropout_p=0.5)
    (dv,) = torch.autograd.grad(first[..., 0].sum(), ones)
    assert (first[..., 0].double().sum() - dv[..., 0].double().sum()).abs() < 0.3
    assert not torch.equal(first, attend(q, k, ones, dropout_p=0.5))
    torch.manual_seed(5)
    assert torch.equal(first, attend(q, k, ones, dropout_p=0.5))
    kept = first.double().mean()
    assert 0.8 < kept < 1.2  # kept weights are doubled


def test_refused(attend):
    q, k, v = made(2, 2, 32, 32, 64, torch.float16)
    with pytest.raises(ValueError, match="scale must not be negative, got -1"):
        attend(q, k, v, scale=-1.0)
    with pytest.raises(ValueError, match="return_debug_mask must be False"):
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, True)


def test_restored():
    """After `restore`, torch's own kernels compute it, or none on a CPU."""
    handle = sdpa._Handle("CPU" if PLACE == "sim" else "CUDA")
    handle.remove()
    q, k, v = made(2, 2, 32, 32, 64, torch.float16)
    refused = pytest.raises(NotImplementedError) if PLACE == "sim" else contextlib.nullcontext()
    with refused:
        torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)


def test_torch_without_a_registry(monkeypatch):
    monkeypatch.delattr(door, "register_flash_attention_impl")
    with pytest.raises(NotImplementedError, match="has no registry of flash attention"):
        sdpa.register()


@pytest.mark.gpu
def test_compiled_by_torch(attend):
    q, k, v = made(4, 2, 256, 256, 64, torch.bfloat16)

    def step(q, k, v):
        return attend(q, k, v, is_causal=True, enable_gqa=True).square().sum()

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True
    ) as profile:
        found = torch.autograd.grad(torch.compile(step, fullgraph=True)(q, k, v), (q, k, v))
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages()]
    assert any("attention_v" in name for name in names), names
    for a, b in zip(found, torch.autograd.grad(step(q, k, v), (q, k, v)), strict=True):
        assert torch.equal(a, b)
