"""attention beyond test_ops.py: torch's own attention, fewer queries than keys, views of packed qkv, sizes
that overflow, versions."""

import math
import sys

import pytest
import torch
from helpers import DEVICE, FLOATS, PLACE, gpu, kernels, run_python, same_bits
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import cukern
from cukern.runtime.device import setting
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import collecting

PLACES = [pytest.param("cpu", None, id="cpu")]
PLACES += [
    pytest.param(DEVICE, version, marks=kernels, id=f"kernels-{version}")
    for version in (None, "v1", "v2", "sdpa")
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def place(request):
    marked = request.node.get_closest_marker("kernels") and PLACE == "sim"
    with cukern.backend("sim" if marked else "gpu"):
        yield


def truth(q, k, v, scale=None):
    """In float64, by a mask: the last query sees all keys."""
    queries, keys = q.shape[-2], k.shape[-2]
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    return scaled_dot_product_attention(*(x.double().cpu() for x in (q, k, v)), attn_mask=seen, scale=scale)


@pytest.mark.parametrize("device, version", PLACES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("queries, keys", [(9, 9), (3, 9), (1, 9), (1, 1)])
def test_attention_is_that_of_torch(device, version, dtype, queries, keys):
    q, k, v = (
        torch.randn(2, 3, n, d, dtype=dtype, device=device) for n, d in ((queries, 8), (keys, 8), (keys, 5))
    )
    for scale in (None, 0.3, 0.0):
        out = cukern.attention(q, k, v, scale=scale, version=version)
        assert out.dtype == dtype and out.shape == (2, 3, queries, 5)
        torch.testing.assert_close(out.double().cpu(), truth(q, k, v, scale), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device, version", PLACES)
def test_views_of_packed_qkv(device, version):
    qkv = torch.randn(2, 7, 3, 4, 8, dtype=torch.float64, device=device, requires_grad=True)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    out = cukern.attention(q, k, v, version=version)
    g = torch.randn_like(out)
    expected = truth(*(x.transpose(1, 2) for x in qkv.unbind(2)))
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=1e-12)
    (found,), (exact,) = torch.autograd.grad(out, qkv, g), torch.autograd.grad(expected, qkv, g.cpu())
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-11)


@pytest.mark.parametrize("version", ["v1", "v2", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_packed_qkv_is_one_copy(version, dtype):
    made = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    qkv = torch.randn(2, 7, 3, 4, 8, device=DEVICE).to(dtype).requires_grad_()
    out = cukern.attention_packed(qkv, version=version)
    g = torch.randn_like(out)
    with Listen(), torch.autocast(DEVICE, torch.float16):
        (found,) = torch.autograd.grad(out, qkv, g)
    assert made.count("stack") + made.count("cat") == 1
    assert not {"add", "add_", "select_backward", "zeros", "new_zeros", "zero_", "fill_"} & {*made}, made
    parts = [x.transpose(1, 2) for x in qkv.unbind(2)]
    exact = torch.autograd.grad(cukern.attention(*parts, version=version), qkv, g.transpose(1, 2))[0]
    assert same_bits(found, exact) and found.is_contiguous()


@kernels
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_gradients_have_the_layout_of_their_inputs(version):
    xs = [torch.randn(2, 6, 4, device=DEVICE, requires_grad=True) for _ in range(3)]
    grads = torch.autograd.grad(cukern.attention(*xs, version=version).sum(), xs)
    assert all(g.is_contiguous() for g in grads), "no transposed copy follows"


@pytest.mark.parametrize("device, version", PLACES)
@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 4), (0, 3), (2, 5, 0)], ids=str)
def test_empty(device, version, shape):
    x = torch.randn(shape, device=device, requires_grad=True)
    out = cukern.attention(x, x, x, version=version)
    out.sum().backward()
    assert out.shape == shape and x.grad.shape == shape


@kernels
@pytest.mark.parametrize("version", ["v1", "v2", "sdpa"])
def test_scores_of_float16_do_not_overflow_where_their_scaled_values_fit(version):
    q, k = (torch.full((1, 4, 64), n, dtype=torch.float16, device=DEVICE) for n in (60.0, 30.0))
    k[0, 1:] = -30.0
    v = torch.arange(4.0, device=DEVICE).half()[None, :, None]
    # 64 * 60 * 30 = 115200 is above 65504
    assert cukern.attention(q, k, v, version=version).flatten().tolist() == [0.0] * 4


@kernels
def test_later_keys_do_not_matter():
    q, k, v = (torch.randn(2, 6, 4, device=DEVICE) for _ in range(3))
    for version in ("v1", "v2"):
        before = cukern.attention(q, k, v, version=version)
        changed_k, changed_v = k.clone(), v.clone()
        changed_k[:, 4:] = 3.0
        changed_v[:, 4:] = -2.0
        after = cukern.attention(q, changed_k, changed_v, version=version)
        assert same_bits(before[:, :4], after[:, :4]) and not torch.equal(before, after)


@pytest.fixture
def blocks(monkeypatch):
    """v2 takes 4 to 7 queries at a time. Returns a list of the calls that it takes in blocks."""
    module, calls = sys.modules["cukern.ops.attention.materialised"], []
    monkeypatch.setattr(module, "BLOCK", 4)
    apply = module._InBlocks.apply
    monkeypatch.setattr(module._InBlocks, "apply", lambda *args: calls.append(args) or apply(*args))
    return calls


@kernels
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("queries", "keys"), [(8, 8), (19, 19), (9, 21)])
def test_blocks_of_queries(dtype, queries, keys, blocks):
    q, k, v = (
        torch.randn(3, n, d, dtype=dtype, device=DEVICE, requires_grad=True)
        for n, d in ((queries, 8), (keys, 8), (keys, 5))
    )
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v)]
    expected = truth(*exact, scale=0.3)
    g = torch.randn_like(expected)
    y = cukern.attention(q, k, v, scale=0.3)
    gradients = torch.autograd.grad(y, (q, k, v), g.to(y))
    assert blocks and y.shape == expected.shape and y.dtype == dtype
    right = torch.autograd.grad(expected, exact, g.to(dtype).double())
    for found, true in zip((y, *gradients), (expected, *right), strict=True):
        torch.testing.assert_close(found.double().cpu(), true, rtol=0, atol=4 * TOLERANCE[dtype])
    again = cukern.attention(q, k, v, scale=0.3)
    assert same_bits(again, y) and all(
        map(same_bits, torch.autograd.grad(again, (q, k, v), g.to(y)), gradients)
    )


@kernels
def test_higher_derivatives_and_transforms_in_blocks(blocks):
    q, k, v = (torch.randn(1, 8, 2, dtype=torch.float64, device=DEVICE, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(cukern.attention, (q, k, v)) and torch.autograd.gradgradcheck(
        cukern.attention, (q, k, v)
    )
    for i in range(3):  # the others need no gradient
        inputs = [x.detach().requires_grad_(i == j) for j, x in enumerate((q, k, v))]
        assert torch.autograd.gradgradcheck(lambda *x: cukern.attention(*x).square(), inputs)
    assert blocks
    blocks.clear()
    torch.func.jacfwd(cukern.attention)(q.detach(), k.detach(), v.detach())
    cukern.attention(q[:, :7], k, v)
    assert not blocks


def launched(**options):
    x = torch.randn(1, 4, 4, requires_grad=True)
    with setting(), backend.backend("sim"), collecting() as found:
        cukern.attention(x, x, x, **options).sum().backward()
    return {name.partition("<")[0] for name in found}


def test_versions():
    assert (
        all(name.startswith("causal_softmax_v2") for name in launched())
        and launched() == launched(version="v2") != set()
    )
    assert launched(version="sdpa") == set()
    with cukern.use("softmax", "v3", backward="v4"):
        assert launched(version="v1") == {"softmax_v3", "softmax_v4_bwd"}
        assert launched() == launched(version="v2")
        with cukern.use("attention", "v1"):
            assert launched() == {"softmax_v3", "softmax_v4_bwd"} and launched(version="sdpa") == set()
    with cukern.use("causal_softmax", "v1"):
        assert launched() == {"causal_softmax_v1", "causal_softmax_v1_bwd"}


def test_a_variable_chooses_the_version():
    code = """
import torch, cukern
from cukern.runtime.launch.kernel import collecting
x = torch.randn(1, 4, 4)
with cukern.backend("sim"), collecting() as found:
    cukern.attention(x, x, x)
print(*found)
"""
    assert run_python(code, CUKERN_ATTENTION="v1", CUKERN_SOFTMAX="v2").stdout == "softmax_v2<float>\n"


@gpu
def test_products_follow_tf32():
    q, k, v = (torch.randn(2, 256, 64, device="cuda") for _ in range(3))
    exact, errors, before = truth(q, k, v), {}, torch.get_float32_matmul_precision()
    for precision in ("highest", "high"):
        torch.set_float32_matmul_precision(precision)
        errors[precision] = (
            (cukern.attention(q, k, v, version="v2").double().cpu() - exact).abs().max().item()
        )
    torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-5 < errors["high"] and not math.isnan(errors["high"])
