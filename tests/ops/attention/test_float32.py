"""The fused kernels of attention in float32: strict and TF32 forms against float64, special values, layouts,
few queries."""

import contextlib

import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits
from torch.nn.functional import scaled_dot_product_attention

import cukern
from cukern.ops.attention import fused
from cukern.ops.attention.reference import Options, reference
from cukern.runtime.device import KNOWN, assumed
from cukern.runtime.launch.kernel import collecting

pytestmark = kernels
CASES = [  # batch, heads, kv_heads, queries, keys, head_dim, causal, softcap, whether TF32 is allowed
    (2, 2, 1, 70, 70, 64, True, None, False),
    (1, 2, 1, 33, 101, 64, True, None, True),
    (1, 2, 2, 75, 40, 8, True, 3.0, False),
    (1, 4, 2, 21, 5, 8, False, 3.0, True),
    (1, 1, 1, 17, 66, 128, False, 2.0, False),
    (1, 2, 1, 67, 65, 72, True, None, False),
    (1, 2, 1, 67, 65, 128, True, None, True),
]


@pytest.fixture(autouse=True)
def place():
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        yield


@contextlib.contextmanager
def tf32(allowed):
    """torch's switch. On a CPU torch has no such attribute until it is set, so pytest's monkeypatch does not
    restore it."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def draw(batch, heads, kv_heads, queries, keys, d):
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, d)
    return [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in shapes]


def results(function, inputs, dout, dlse):
    """out, lse and the gradients, with a gradient of lse where it is finite. lse is 0 elsewhere."""
    out, lse = function(*inputs)
    finite = lse.isfinite()
    grads = torch.autograd.grad((out, lse), inputs, (dout.to(out), dlse.to(lse) * finite))
    return out.detach(), lse.detach().masked_fill(~finite, 0), *grads


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_against_float64(case):
    """Strict: the largest error is at most twice that of torch's operations in float32. TF32: at most that of
    TF32's rounding, 2^-11."""
    *sizes, causal, softcap, allowed = case
    inputs, options = draw(*sizes), Options(causal, 0.17, softcap or 0.0)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[:3], device=DEVICE)

    def ours(q, k, v):
        return cukern.attention(
            q, k, v, causal=causal, scale=0.17, softcap=softcap, return_lse=True, version="v3"
        )

    with tf32(allowed):
        found = results(ours, inputs, dout, dlse)
    exact, peer = (
        results(
            lambda *x: reference(*x, options),
            [x.detach().to(dtype).requires_grad_() for x in inputs],
            dout,
            dlse,
        )
        for dtype in (torch.float64, torch.float32)
    )
    for name, x, truth, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, exact, peer, strict=True):
        largest = truth.abs().max()
        most = 2**-11 * largest if allowed else 2 * (theirs.double() - truth).abs().max() + 2**-22 * largest
        assert x.isfinite().all() and (x.double() - truth).abs().max() <= most, name


@pytest.mark.skipif(PLACE != "sim", reason="the simulator stands for another GPU")
@pytest.mark.parametrize("gpu, case", [("a100", CASES[4]), ("rtx4090", CASES[6])], ids=str)
def test_gpus_with_less_shared_memory(gpu, case):
    with assumed(KNOWN[gpu]):
        test_every_option_against_float64(case)


def test_torchs_switch_chooses_the_form():
    x = torch.randn(1, 1, 40, 16, requires_grad=True)
    for allowed, form in ((False, "3"), (True, "2")):
        with tf32(allowed), cukern.backend("sim"), collecting() as found:
            cukern.attention(x, x, x).sum().backward()
        names = [name for name in found if not name.startswith("attention_v3_preprocess")]
        assert {name.partition("<")[0] for name in names} == {
            "attention_v3",
            "attention_v3_bwd",
            "attention_v3_split",
        }
        assert all(f"__nv_bfloat16, {form}," in name for name in names)


def test_values_above_0_in_a_long_row():
    """Tensor cores truncate when they add: over all keys the error would have one sign and grow with their
    number."""
    q, k, v = (x.detach() for x in draw(1, 1, 1, 3, 600, 8))
    q, v = q.repeat(1, 1, 8, 1), v.abs() + 1
    options = Options(False, 0.3, 0.0)
    exact = reference(q.double(), k.double(), v.double(), options)[0]
    out = cukern.attention(q, k, v, causal=False, scale=0.3, version="v3")
    peer = scaled_dot_product_attention(q, k, v, scale=0.3)
    assert (out.double() - exact).abs().max() <= 2 * (
        peer.double() - exact
    ).abs().max() + 2**-23 * exact.abs().max()


def test_rows_without_a_visible_key():
    q, k, v = draw(1, 2, 1, 70, 3, 64)
    out, lse = cukern.attention(q, k, v, return_lse=True, version="v3")
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert (out[:, :, :67] == 0).all() and lse[:, :, :67].isneginf().all() and lse[:, :, 67:].isfinite().all()
    assert (grads[0][:, :, :67] == 0).all() and all(x.isfinite().all() for x in grads)


def test_large_and_small_numbers():
    """Pieces of bfloat16 have the range of float32: factors that are powers of 2 change no bit."""
    q, k, v = (x.detach() for x in draw(1, 1, 1, 19, 19, 8))
    out = cukern.attention(q, k, v, version="v3")
    huge = cukern.attention(q * 2.0**40, k * 2.0**-40, v * 2.0**100, version="v3")
    tiny = cukern.attention(q * 2.0**-40, k * 2.0**40, v * 2.0**-60, version="v3")
    assert same_bits(huge, out * 2.0**100) and same_bits(tiny, out * 2.0**-60)


def test_infinite_and_nan_values_stay_in_their_columns():
    q, k, v = (x.detach() for x in draw(1, 1, 1, 5, 7, 8))
    v[0, 0, 2, 3], v[0, 0, 1, 5] = torch.inf, torch.nan
    out = cukern.attention(q, k, v, causal=False, version="v3")
    assert (
        out[..., 3].isposinf().all()
        and out[..., 5].isnan().all()
        and out[..., [0, 1, 2, 4, 6, 7]].isfinite().all()
    )


def test_strides_that_the_kernels_read_and_those_that_are_copied():
    q, k, v = (x.detach() for x in draw(1, 2, 2, 20, 20, 16))
    expected = cukern.attention(q, k, v, version="v3")
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    for inputs in (rows, columns, odd):
        assert same_bits(cukern.attention(*inputs, version="v3").contiguous(), expected)


def test_packed():
    qkv = torch.randn(2, 19, 3, 2, 16, device=DEVICE, requires_grad=True)
    g = torch.randn(2, 19, 2, 16, device=DEVICE)
    out = cukern.attention_packed(qkv)
    (grad,) = torch.autograd.grad(out, qkv, g)
    assert same_bits(grad, torch.autograd.grad(cukern.attention_packed(qkv), qkv, g)[0]), (
        "two runs give the same bits"
    )
    parts = [x.transpose(1, 2).detach().clone().requires_grad_() for x in qkv.unbind(2)]
    expected = cukern.attention(*parts)
    grads = torch.autograd.grad(expected, parts, g.transpose(1, 2))
    assert same_bits(out, expected.transpose(1, 2).contiguous())
    assert same_bits(grad, torch.stack([x.transpose(1, 2) for x in grads], 2))


def test_gradients_of_few_queries_of_many_keys():
    q, k, v = draw(2, 2, 1, 2, 300, 64)
    out, lse = cukern.attention(q, k, v, return_lse=True)
    expected, expected_lse = reference(q, k, v, Options(True, 0.125, 0.0))
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=1e-5, atol=1e-5)
    for x, y in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_opcheck():
    q, k, v = (x.detach() for x in draw(1, 2, 1, 5, 6, 8))
    torch.library.opcheck(torch.ops.cukern._attention.default, (q, k, v, True, 0.3, 0.0))
    out, lse = fused.fused((q, k, v), Options(True, 0.3, 0.0))
    torch.library.opcheck(
        torch.ops.cukern._attention_backward.default, (q, k, v, out, out, lse, None, True, 0.3, 0.0)
    )
