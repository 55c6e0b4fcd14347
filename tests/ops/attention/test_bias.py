"""attention with a bias and with ALiBi's slopes, against float64 in torch's operations."""

import math

import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits

import cukern
from cukern.bench.verify import poisoned
from cukern.ops.attention import launch, plan, wgmma

HALF, BF16, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
B = 2
# heads, kv_heads, queries, keys, head_dim, dtype, the bias's dtype and the dimensions that it has, options
CASES = [
    (2, 2, 70, 66, 64, BF16, BF16, "bhqk", {}),
    (2, 1, 35, 101, 64, BF16, FLOAT, "hqk", {"causal": False}),
    (2, 2, 130, 66, 128, HALF, HALF, "qk", {}),  # the first queries see no key
    (2, 1, 40, 150, 96, BF16, BF16, "bqk", {"window": 33}),
    (2, 1, 20, 270, 40, HALF, FLOAT, "bhqk", {"window": 9, "sink": 0.5}),  # tiles are skipped
    (4, 2, 1, 130, 64, BF16, BF16, "hk", {}),  # one query: not the decoding kernel
    (2, 1, 20, 90, 256, BF16, BF16, "hqk", {"causal": False, "scale": 0.1}),
    (2, 1, 20, 37, 64, HALF, HALF, "bhq", {"sink": 0.5}),
    (2, 1, 50, 66, 64, BF16, FLOAT, "bhqk", {"softcap": 2.0}),  # by v3
    (2, 1, 70, 101, 128, BF16, BF16, "hqk", {"version": "v3"}),  # here too
    (2, 2, 70, 83, 128, HALF, HALF, "bqk", {"causal": False, "version": "v3"}),
    (2, 1, 20, 66, 256, BF16, FLOAT, "qk", {"version": "v3", "sink": 0.5}),
    (2, 1, 1, 150, 64, BF16, BF16, "k", {"version": "v3"}),
    (2, 1, 20, 50, 72, FLOAT, FLOAT, "bhqk", {"causal": False}),
    (2, 1, 20, 51, 64, FLOAT, FLOAT, "hqk", {"softcap": 2.0}),
    (2, 1, 20, 37, 24, BF16, BF16, "bhqk", {"window": 9, "softcap": 2.0}),  # the others by torch's operations
    (2, 1, 20, 37, 24, DOUBLE, DOUBLE, "hqk", {"softcap": 3.0}),
    (2, 1, 20, 37, 20, HALF, FLOAT, "bhqk", {"version": "v1"}),
    (2, 2, 37, 37, 24, BF16, BF16, "qk", {"version": "v2"}),
]
ON_CPU = [
    (4, 2, 20, 37, 24, DOUBLE, DOUBLE, "bhqk", {"window": 9, "sink": 0.5}),
    (2, 1, 37, 20, 24, DOUBLE, FLOAT, "hqk", {}),
    (2, 1, 20, 37, 24, BF16, FLOAT, "bk", {"causal": False, "softcap": 3.0}),
]


@pytest.fixture(autouse=True)
def place(request):
    with cukern.backend("sim" if PLACE == "sim" and request.node.get_closest_marker("kernels") else "gpu"):
        yield


def distances(queries, keys):
    return torch.arange(queries, device=DEVICE)[:, None] + keys - queries - torch.arange(keys, device=DEVICE)


def exact(q, k, v, bias, causal=True, scale=None, softcap=None, sink=None, window=None, version=None):
    """out and lse, in the dtype of q."""
    group, (queries, keys) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    distance = distances(queries, keys).to(q.device)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden = hidden | (distance < 0) if causal else hidden
    hidden = hidden | (distance >= window) if window else hidden
    s = (s + bias.to(q.dtype)).masked_fill(hidden, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    s = torch.cat(
        (s.masked_fill(empty, 0), s.new_full((*s.shape[:-1], 1), -math.inf if sink is None else sink)), -1
    )
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], -math.inf if sink is None else sink)
    return (s.softmax(-1) * ~empty)[..., :-1] @ v, lse


def draw(heads, kv_heads, queries, keys, d, dtype, device=DEVICE, batch=B):
    return [
        torch.randn(batch, n, rows, d, device=device).to(dtype).requires_grad_()
        for n, rows in ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    ]


def drawn_bias(heads, queries, keys, dtype, dims, device=DEVICE):
    """`dims`: those of the bias; others are 1, and the first are left out. With -infinity at places, and in
    the whole last row but one if there are rows."""
    shape = [n if name in dims else 1 for name, n in zip("bhqk", (B, heads, queries, keys), strict=True)]
    bias = 2 * torch.randn(*shape[min("bhqk".index(c) for c in dims) :], device=device)
    if "k" in dims:
        bias[torch.rand_like(bias) < 0.1] = -math.inf
    if "q" in dims and queries > 1:
        bias[..., -2, :] = -math.inf
    return bias.to(dtype).requires_grad_()


def check(q, k, v, bias, options):
    """out, lse and all gradients."""
    inputs, dout = (q, k, v, bias), torch.randn_like(q)
    with poisoned():
        y, lse = cukern.attention(q, k, v, return_lse=True, bias=bias, **options)
        dlse = torch.randn_like(lse)
        found = (y, lse, *torch.autograd.grad((y, lse), inputs, (dout, dlse)))
    results = []
    for kind in (DOUBLE, q.dtype):
        wide = [x.detach().to(kind).requires_grad_() for x in inputs]
        right = exact(*wide, **options)
        results.append((*right, *torch.autograd.grad(right, wide, (dout.to(kind), dlse.to(kind)))))
    for a, x, right, other in zip(found, (q, lse, *inputs), *results, strict=True):
        assert a.dtype == x.dtype and a.shape == right.shape
        finite = right.isfinite()
        assert same_bits(a[~finite].double(), right[~finite].double())
        scale = right[finite].abs().max()
        error, others = (((t.double() - right)[finite]).abs().max() / scale for t in (a, other))
        assert error <= 2 * others + (32 if a.dtype == DOUBLE else 4) * torch.finfo(a.dtype).eps
    return found, results[0]


@kernels
@pytest.mark.parametrize("heads, kv_heads, queries, keys, d, dtype, of_bias, dims, options", CASES, ids=str)
def test_output_and_gradients(heads, kv_heads, queries, keys, d, dtype, of_bias, dims, options):
    q, k, v = draw(heads, kv_heads, queries, keys, d, dtype)
    bias = drawn_bias(heads, queries, keys, of_bias, dims)
    found, right = check(q, k, v, bias, options)
    if dims != "bhq":  # which only changes lse: a bias that is shifted would be seen
        shifted = bias.detach().roll(1, -1).double()
        wrong = exact(*(x.double() for x in (q, k, v)), shifted, **options)[0]
        assert (found[0] - wrong).abs().max() > 0.05 * right[0].abs().max()


@pytest.mark.parametrize("heads, kv_heads, queries, keys, d, dtype, of_bias, dims, options", ON_CPU, ids=str)
def test_on_a_cpu(heads, kv_heads, queries, keys, d, dtype, of_bias, dims, options):
    """Without the simulator."""
    bias = drawn_bias(heads, queries, keys, of_bias, dims, "cpu")
    check(*draw(heads, kv_heads, queries, keys, d, dtype, "cpu"), bias, options)


@kernels
@pytest.mark.parametrize(
    "layout, version",
    (
        ("transposed", "v3"),
        ("odd rows", "v4"),
        ("odd address", "v3"),
        ("odd address", "v4"),
        ("expanded", "v3"),
        ("heads last", "v4"),
    ),
)
def test_layouts(layout, version):
    q, k, v = draw(2, 2, 36, 70, 64, BF16, batch=1)
    whole = {
        "transposed": torch.randn(2, 70, 36),
        "odd rows": torch.randn(2, 36, 71),
        "odd address": torch.randn(2, 36, 72),
        "expanded": torch.randn(2, 1, 70),
        "heads last": torch.randn(36, 70, 2),
    }[layout]
    view = {
        "transposed": lambda x: x.mT,
        "odd rows": lambda x: x[..., :70],
        "odd address": lambda x: x[..., 1:71],
        "expanded": lambda x: x.expand(2, 36, 70),
        "heads last": lambda x: x.permute(2, 0, 1),
    }[layout]
    leaf = whole.to(DEVICE, BF16).requires_grad_()
    dout, options = torch.randn_like(q), {"version": version}
    with poisoned():
        y = cukern.attention(q, k, v, bias=view(leaf), **options)
        found = (y, *torch.autograd.grad(y, (q, leaf), dout))
        same = cukern.attention(q, k, v, bias=view(leaf).contiguous(), **options)
        right = (same, *torch.autograd.grad(same, (q, leaf), dout))
    assert all(same_bits(a, b) for a, b in zip(found, right, strict=True))


@kernels
@pytest.mark.parametrize(
    "options, of_batch",
    (
        ({"version": "v3"}, True),
        ({"version": "v3", "causal": False, "softcap": 2.0}, False),
        ({"version": "v4"}, False),
        ({"version": "v4", "causal": False}, True),
        ({"window": 20}, False),
    ),
    ids=str,
)
def test_alibi(options, of_batch):
    q, k, v = draw(4, 2, 35, 101, 64, BF16)
    slopes = torch.rand(*((B, 4) if of_batch else (4,)), device=DEVICE)
    bias = -slopes[..., None, None] * distances(35, 101).abs()
    y, lse = cukern.attention(q, k, v, alibi_slopes=slopes, return_lse=True, **options)
    found = (y, lse, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y)))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = exact(*wide, bias.double(), **options)
    grads = torch.autograd.grad(right[0], wide, torch.ones_like(right[0]))
    for a, b in zip(found, (*right, *grads), strict=True):
        assert (a - b).abs().max() < 0.01 * b.abs().max()


@pytest.mark.parametrize("causal", (False, True))
def test_alibi_on_a_cpu(causal):
    q, k, v = draw(4, 2, 20, 37, 24, DOUBLE, "cpu")
    slopes = torch.rand(B, 4)
    bias = -slopes[..., None, None].double() * distances(20, 37).abs().cpu()
    right = exact(q, k, v, bias, causal)[0]
    torch.testing.assert_close(cukern.attention(q, k, v, causal=causal, alibi_slopes=slopes), right)
    sdpa = cukern.attention(q, k, v, causal=causal, bias=bias, version="sdpa")
    torch.testing.assert_close(sdpa, right)
    three = [x.unflatten(0, (2, 1)) for x in (q, k, v)]  # with two dimensions before the heads
    for given in (
        {"alibi_slopes": slopes[:, None]},
        {"bias": bias[:, None]},
        {"bias": bias[:, None].float()},
    ):
        torch.testing.assert_close(cukern.attention(*three, causal=causal, **given)[:, 0], right)


@kernels
def test_no_heads_and_many_dimensions():
    q, k, v = draw(2, 2, 20, 37, 64, BF16)
    bias = drawn_bias(2, 20, 37, BF16, "hqk").detach()
    right = cukern.attention(q, k, v, bias=bias)
    one = cukern.attention(*(x[0, 0] for x in (q, k, v)), bias=bias[0])
    many = cukern.attention(
        *(x.view(1, B, 1, *x.shape[1:]) for x in (q, k, v)), bias=bias[None].expand(B, 1, -1, -1, -1)
    )
    assert same_bits(one, right[0, 0]) and same_bits(many[0, :, 0], right)


@kernels
def test_replays_read_the_bias_of_the_call():
    q, k, v = draw(2, 1, 9, 40, 64, BF16)
    for _ in range(5):
        check(q, k, v, drawn_bias(2, 9, 40, BF16, "hqk"), {})


@kernels
def test_only_a_bias_that_needs_one_gets_a_gradient():
    q, k, v = draw(2, 1, 33, 40, 64, BF16)
    bias = drawn_bias(2, 33, 40, BF16, "hqk")
    dout = torch.randn_like(q)
    of_q = torch.autograd.grad(cukern.attention(q, k, v, bias=bias), q, dout)[0]
    assert same_bits(of_q, torch.autograd.grad(cukern.attention(q, k, v, bias=bias.detach()), q, dout)[0])
    q, k, v = (x.detach() for x in (q, k, v))
    torch.autograd.grad(cukern.attention(q, k, v, bias=bias), bias, dout)


@kernels
def test_derivatives_of_the_gradient_and_transforms():
    q, k, v = draw(2, 2, 9, 9, 8, FLOAT, batch=1)
    bias = torch.randn(2, 9, 9, device=DEVICE, requires_grad=True)
    dout = torch.randn_like(q, requires_grad=True)

    def second(y, inputs, dout):
        grads = torch.autograd.grad(y, inputs, dout, create_graph=True)
        return torch.autograd.grad([g.square().sum() for g in grads], (*inputs, dout))

    found = second(cukern.attention(q, k, v, bias=bias), (q, k, v, bias), dout)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, bias, dout)]
    right = second(exact(*wide[:4])[0], wide[:4], wide[4])
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    x, along = bias.detach(), torch.randn_like(bias)
    q, k, v = (x.detach() for x in (q, k, v))
    _, found = torch.func.jvp(lambda bias: cukern.attention(q, k, v, bias=bias), (x,), (along,))
    wide = [x.double() for x in (q, k, v)]
    _, right = torch.func.jvp(lambda b: exact(*wide, b)[0], (x.double(),), (along.double(),))
    torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-4)
    several = torch.stack((x, along))
    found = torch.func.vmap(lambda bias: cukern.attention(q, k, v, bias=bias))(several)
    assert same_bits(found[1], cukern.attention(q, k, v, bias=along))


@kernels
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("name", ("bias", "alibi_slopes"))
def test_a_compiled_function(name):
    q, k, v = draw(2, 1, 33, 33, 64, BF16)
    x = torch.rand(*((2, 33, 33) if name == "bias" else (2,)), device=DEVICE, requires_grad=name == "bias")
    inputs = (q, k, v, x) if name == "bias" else (q, k, v)

    def call(q, k, v, x):
        return cukern.attention(q, k, v, **{name: x})

    found = []
    for function in (torch.compile(call, fullgraph=True, backend="aot_eager"), call):
        y = function(q, k, v, x)
        found.append((y, *torch.autograd.grad(y, inputs, torch.ones_like(y))))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@kernels
def test_autocast():
    """It casts q, k and v."""
    q, k, v = draw(2, 1, 20, 37, 64, FLOAT)
    bias = drawn_bias(2, 20, 37, FLOAT, "hqk")
    with torch.autocast(DEVICE, BF16):
        y = cukern.attention(q, k, v, bias=bias)
        assert y.dtype == BF16 and torch.autograd.grad(y, bias, torch.ones_like(y))[0].dtype == FLOAT
    assert same_bits(y, cukern.attention(*(x.bfloat16() for x in (q, k, v)), bias=bias))


X = torch.randn(2, 3, 4, 8)
BIAS, SLOPES = torch.zeros(3, 4, 4), torch.zeros(3)


@pytest.mark.parametrize(
    "options, error, text",
    (
        (
            {"bias": BIAS, "alibi_slopes": SLOPES},
            ValueError,
            r"bias and alibi_slopes exclude each other, got alibi_",
        ),
        (
            {"bias": BIAS, "dropout_p": 0.1},
            ValueError,
            r"bias and dropout_p exclude each other, got dropout_p=.*0\.1",
        ),
        (
            {"alibi_slopes": SLOPES, "dropout_p": 0.1},
            ValueError,
            "alibi_slopes and dropout_p exclude each other",
        ),
        (
            {"bias": BIAS, "key_lengths": torch.ones(2).int()},
            ValueError,
            "bias and key_lengths exclude each other",
        ),
        (
            {"alibi_slopes": SLOPES, "key_lengths": torch.ones(2).int()},
            ValueError,
            "slopes and key_lengths exclude",
        ),
        (
            {"bias": torch.zeros(2, 4, 4)},
            ValueError,
            r"bias has shape \(2, 4, 4\), it must broadcast to \(2, 3, 4, 4\)",
        ),
        ({"bias": torch.zeros(5)}, ValueError, r"bias has shape \(5,\), it must broadcast"),
        ({"bias": torch.zeros(1, 2, 3, 4, 4)}, ValueError, "bias has shape .* it must broadcast"),
        ({"bias": BIAS.double()}, TypeError, "bias must be torch.float32, got torch.float64"),
        ({"bias": BIAS.bool()}, TypeError, "bias must be torch.float32, got torch.bool"),
        ({"bias": 1.0}, TypeError, "bias must be a torch.Tensor"),
        ({"bias": BIAS.to("meta")}, ValueError, "bias is on meta, q is on cpu"),
        (
            {"alibi_slopes": torch.zeros(2)},
            ValueError,
            r"alibi_slopes has shape \(2,\), it must be \(heads,\) or \(2, 3\)",
        ),
        ({"alibi_slopes": SLOPES.double()}, TypeError, "alibi_slopes must be torch.float32"),
    ),
)
def test_what_is_refused(options, error, text):
    with pytest.raises(error, match=text):
        cukern.attention(X, X, X, **options)


def test_pages_and_a_bias_exclude_each_other():
    pages, table, lengths = torch.randn(3, 16, 3, 8), torch.zeros(2, 1).int(), torch.ones(2).int()
    with pytest.raises(ValueError, match="bias and key_lengths exclude each other"):
        cukern.attention(X, pages, pages, key_lengths=lengths, block_table=table, bias=BIAS)


OF_BIAS = pytest.mark.parametrize("of_bias", (BF16, FLOAT, None))  # None: slopes


def types(of_bias):
    return wgmma.extra_types(torch.zeros(1, 1) if of_bias is None else torch.zeros(1, 1, 1, 1, dtype=of_bias))


@OF_BIAS
@pytest.mark.parametrize("arch", ("compute_80", "compute_120"))
def test_the_kernels_compile(arch, of_bias):
    """Those of all other options: test_compiled.py."""
    for make in (launch._forward_kernel, launch._backward_kernel):
        assert make(BF16, 1, 128, False, False, extra=types(of_bias)).compile(arch).code


@pytest.mark.slow
@OF_BIAS
@pytest.mark.parametrize("d", plan.WGMMA_FORWARD)
def test_v4_does_not_spill(d, of_bias):
    found = [wgmma._forward_kernel(BF16, d, False, False, plan.WGMMA_FORWARD[d][0], types(of_bias))]
    found += [wgmma._backward_kernel(keys, BF16, d, False, False, types(of_bias)) for keys in (True, False)]
    most = 24 if (d, of_bias) == (64, FLOAT) else 0
    assert all(kernel.compile("sm_90a").report.spill_loads <= most for kernel in found)
