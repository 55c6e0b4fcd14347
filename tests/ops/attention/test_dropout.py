"""attention with dropout_p: the weights that are dropped, against float64 with numbers of NumPy."""

import math

import numpy as np
import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits

import cukern
from cukern.bench.verify import poisoned
from cukern.ops.attention import launch, plan, wgmma

HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = [  # heads, kv_heads, queries, keys, head_dim, dtype, options
    (2, 2, 70, 70, 64, BF16, {}),
    (4, 2, 19, 83, 128, HALF, {"causal": False}),
    (2, 1, 40, 66, 256, BF16, {"softcap": 2.0}),
    (3, 3, 130, 33, 40, HALF, {"sink": 0.5, "scale": 0.3}),
    (2, 1, 1, 70, 64, BF16, {}),  # one query: not the decoding kernel
    (2, 1, 37, 50, 72, FLOAT, {"causal": False}),
    (2, 1, 20, 37, 64, BF16, {"version": "v3"}),
    (4, 2, 70, 83, 256, HALF, {"causal": False, "version": "v3"}),
    (2, 1, 45, 150, 96, BF16, {"window": 33}),
    (4, 1, 20, 200, 64, HALF, {"window": 9, "sink": 0.5}),
    (2, 1, 20, 37, 24, BF16, {"window": 9, "softcap": 2.0}),  # the others by torch's operations
    (2, 1, 20, 37, 24, torch.float64, {"softcap": 3.0}),
]


@pytest.fixture(autouse=True)
def place(request):
    with cukern.backend("sim" if PLACE == "sim" and request.node.get_closest_marker("kernels") else "gpu"):
        yield


def philox(counter, key):
    """Philox4x32-7, as in the paper of Salmon et al. (2011)."""
    c, k = [np.uint64(x) for x in counter], [np.uint64(x) for x in key]
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        x, y = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(y >> np.uint64(32)) ^ c[1] ^ k[0], y & low, (x >> np.uint64(32)) ^ c[3] ^ k[1], x & low]
        k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
    return [int(x) for x in c]


def kept(heads, queries, keys, p, seed):
    """1 where a weight is kept, one element at a time: see kernels_cu/attention/dropout.cuh."""
    found = torch.ones(heads, queries, keys, dtype=torch.float64)
    calls = {}
    for h, i, j in np.ndindex(heads, queries, keys):
        counter = 4 * (j // 16) + j % 8 // 2, 8 * (i // 16) + i % 8, h, 0
        if counter not in calls:
            calls[counter] = philox(counter, (seed & 0xFFFFFFFF, seed >> 32))
        word = calls[counter][2 * (i // 8 % 2) + j // 8 % 2]
        found[h, i, j] = (word >> 16 * (j % 2) & 0xFFFF) >= round(p * 65536)
    return found


def exact(q, k, v, mask, p, causal=True, scale=None, softcap=None, sink=None, window=None, version=None):
    """In the dtype of q."""
    group, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    distance = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)
    hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
    hidden = (hidden | (distance >= window) if window else hidden).to(s.device)
    s = s.masked_fill(hidden, -math.inf)
    extra = s.new_full((*s.shape[:-1], 1), -math.inf if sink is None else sink)
    weights = torch.cat((s, extra), -1).softmax(-1).nan_to_num()[..., :-1]
    drop = round(p * 65536)
    return (weights * mask * (65536 / (65536 - drop))) @ v


def seed_of(torch_seed):
    torch.manual_seed(torch_seed)
    return int(torch.randint(1 << 62, (1,), dtype=torch.int64, device=DEVICE))


def draw(heads, kv_heads, queries, keys, d, dtype, batch=2):
    return [
        torch.randn(batch, n, rows, d, device=DEVICE).to(dtype).requires_grad_()
        for n, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]


def test_philox_is_that_of_the_paper():
    """The known answer of Random123 for a counter and a key of zeros."""
    assert philox((0, 0, 0, 0), (0, 0)) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


@kernels
@pytest.mark.parametrize("heads, kv_heads, queries, keys, d, dtype, options", CASES)
def test_output_and_gradients(heads, kv_heads, queries, keys, d, dtype, options):
    q, k, v = draw(heads, kv_heads, queries, keys, d, dtype)
    dout, p = torch.randn_like(q), 0.3
    mask = kept(2 * heads, queries, keys, p, seed_of(5)).view(2, heads, queries, keys).to(DEVICE)
    torch.manual_seed(5)
    with poisoned():
        y = cukern.attention(q, k, v, dropout_p=p, **options)
        found = (y, *torch.autograd.grad(y, (q, k, v), dout))
    results = []
    for kind in (torch.float64, dtype):
        wide = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        right = exact(*wide, mask.to(kind), p, **options)
        results.append((right, *torch.autograd.grad(right, wide, dout.to(kind))))
    for a, right, other in zip(found, *results, strict=True):
        scale = right.abs().max()
        error, others = ((x.double() - right).abs().max() / scale for x in (a, other))
        assert error <= 2 * others + 4 * torch.finfo(dtype).eps
    if dtype != torch.float64:  # a mask that is shifted would be seen
        wrong = exact(*(x.double() for x in (q, k, v)), mask.roll(1, -1), p, **options)
        assert (y - wrong).abs().max() > 0.05 * results[0][0].abs().max()


@kernels
@pytest.mark.parametrize("p", (0.1, 0.9))
def test_the_part_of_dropped_weights_and_the_mean(p):
    """One key with the value 1: each of the outputs is 0 or 1 / (1 - p), at every call other ones."""
    q, k = (torch.randn(1, 8, n, 8, device=DEVICE, dtype=BF16) for n in (500, 1))
    calls = [cukern.attention(q, k, torch.ones_like(k), causal=False, dropout_p=p)[..., 0] for _ in range(4)]
    assert not same_bits(calls[2], calls[3])  # of a replay, as of a call that plans
    part = torch.stack([(y == 0).double().mean() for y in calls])
    assert ((part - p).abs() < 5 * (p * (1 - p) / 4000) ** 0.5).all()
    assert (calls[0].unique() - torch.tensor([0, 1 / (1 - p)], device=DEVICE)).abs().max() < 0.04 / (1 - p)


@kernels
def test_a_seed_gives_the_same_bits_and_packed_ones_too():
    qkv = torch.randn(2, 50, 3, 2, 64, device=DEVICE, dtype=BF16, requires_grad=True)
    dout, found = torch.randn(2, 50, 2, 64, device=DEVICE).to(BF16), []
    for call in (
        lambda: cukern.attention_packed(qkv, dropout_p=0.2),
        lambda: cukern.attention(*(x.transpose(1, 2) for x in qkv.unbind(2)), dropout_p=0.2).transpose(1, 2),
    ):
        for _ in range(4):
            torch.manual_seed(3)
            y = call()
            found.append((y, torch.autograd.grad(y, qkv, dout)[0]))
    for y, grad in found[1:]:
        assert same_bits(y, found[0][0]) and same_bits(grad, found[0][1])


@kernels
def test_derivatives_of_the_gradient_use_the_same_weights():
    q, k, v = draw(2, 2, 9, 9, 8, FLOAT, batch=1)
    dout = torch.randn_like(q, requires_grad=True)
    mask = kept(2, 9, 9, 0.5, seed_of(2)).view(1, 2, 9, 9).to(DEVICE)

    def second(y, inputs, dout):
        grads = torch.autograd.grad(y, inputs, dout, create_graph=True)
        return torch.autograd.grad([g.square().sum() for g in grads], (*inputs, dout))

    torch.manual_seed(2)
    found = second(cukern.attention(q, k, v, dropout_p=0.5), (q, k, v), dout)
    wide, g = [x.detach().double().requires_grad_() for x in (q, k, v)], dout.detach().double()
    right = second(exact(*wide, mask, 0.5), wide, g.requires_grad_())
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)


@kernels
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
def test_dropout_in_a_compiled_function():
    q, k, v = draw(2, 1, 33, 33, 64, BF16)
    call = torch.compile(
        lambda q, k, v: cukern.attention(q, k, v, dropout_p=0.4), fullgraph=True, backend="aot_eager"
    )
    torch.manual_seed(1)
    y = call(q, k, v)
    torch.manual_seed(1)
    eager = cukern.attention(q, k, v, dropout_p=0.4)
    assert same_bits(y, eager) and not same_bits(call(q, k, v), y)
    pairs = zip(*(torch.autograd.grad(out, (q, k, v), torch.ones_like(y)) for out in (y, eager)), strict=True)
    assert all(same_bits(a, b) for a, b in pairs)


def test_a_cpu_drops_the_weights_of_the_kernels():
    """Without the simulator."""
    q, k, v = (x.detach().cpu() for x in draw(2, 1, 20, 37, 24, torch.float64))
    torch.manual_seed(4)
    seed = int(torch.randint(1 << 62, (1,), dtype=torch.int64))
    mask = kept(4, 20, 37, 0.3, seed).view(2, 2, 20, 37)
    torch.manual_seed(4)
    torch.testing.assert_close(cukern.attention(q, k, v, dropout_p=0.3), exact(q, k, v, mask, 0.3))
    torch.testing.assert_close(cukern.attention(q, k, v, dropout_p=1e-6), cukern.attention(q, k, v))
    assert cukern.attention(q, k, v, dropout_p=0.3, version="sdpa").isfinite().all()


@pytest.mark.parametrize(
    "p, error, text",
    (
        (1.0, ValueError, "dropout_p must be at least 0 and below 1, got 1.0"),
        (-0.1, ValueError, "below 1, got -0.1"),
        (math.nan, ValueError, "dropout_p must be finite"),
        ("0.1", TypeError, "dropout_p must be a number"),
        (True, TypeError, "dropout_p must be a number"),
    ),
)
def test_a_wrong_probability_is_refused(p, error, text):
    x = torch.randn(1, 1, 4, 8)
    with pytest.raises(error, match=text):
        cukern.attention(x, x, x, dropout_p=p)
    with pytest.raises(error, match=text):
        cukern.attention_packed(torch.randn(1, 4, 3, 1, 8), dropout_p=p)


def test_lengths_and_dropout_exclude_each_other():
    x, lengths = torch.randn(1, 1, 4, 8), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"dropout_p and key_lengths exclude each other, got dropout_p=0\.1"):
        cukern.attention(x, x, x, key_lengths=lengths, dropout_p=0.1)


@pytest.mark.parametrize("arch", ("compute_80", "compute_90", "compute_120"))
def test_the_kernels_compile(arch):
    """Those of all other options: test_compiled.py."""
    types = wgmma.extra_types(torch.zeros(1, dtype=torch.int64))
    for make in (launch._forward_kernel, launch._backward_kernel):
        kernel = make(BF16, 1, 128, False, False, extra=types)
        assert kernel.compile(arch).code
    for d, tiles in plan.WGMMA_FORWARD.items() if arch == "compute_90" else ():
        found = [wgmma._forward_kernel(BF16, d, False, False, tile, types) for tile in tiles]
        found += [wgmma._backward_kernel(keys, BF16, d, False, False, types) for keys in (True, False)]
        assert not any(kernel.compile("sm_90a").report.spill_loads for kernel in found)
