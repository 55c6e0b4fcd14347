"""The fused kernels of attention: every option against float64, rows without a visible key, layouts,
derivatives, refused sizes."""

from types import SimpleNamespace

import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits, untraceable_devices

import cukern
from cukern.ops.attention import fused, launch, plan, wgmma
from cukern.ops.attention.reference import Options, hidden_keys, reference, repeated
from cukern.runtime import registry
from cukern.runtime.device import KNOWN, assumed
from cukern.runtime.launch.kernel import collecting

pytestmark = kernels
HALF, BF16 = torch.float16, torch.bfloat16
CASES = [  # batch, heads, kv_heads, queries, keys, head_dim, dtype, causal, softcap
    (1, 1, 1, 1, 1, 64, BF16, True, None),
    (2, 2, 1, 70, 70, 64, BF16, True, None),
    (1, 1, 1, 33, 101, 64, HALF, True, None),
    (1, 2, 2, 75, 40, 64, HALF, True, 3.0),
    (1, 4, 2, 21, 5, 72, BF16, False, None),
    (1, 1, 1, 17, 66, 128, HALF, False, 2.0),
    (1, 2, 1, 67, 65, 128, BF16, True, None),
    (1, 1, 1, 3, 7, 8, BF16, False, None),
    (1, 2, 1, 140, 110, 40, BF16, False, None),
    (1, 2, 1, 65, 130, 96, HALF, True, None),
    (1, 2, 1, 70, 130, 256, BF16, True, None),
    (1, 1, 1, 33, 20, 136, HALF, False, 2.0),
]


VERSIONS = "v3", "v4"
every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(autouse=True)
def place():
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        yield


def draw(batch, heads, kv_heads, queries, keys, d, dtype):
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, d)
    return [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]


def eager(q, k, v, causal, scale, softcap, window=None):
    """In the operations and the dtype of the inputs. Returns out and lse, 0 and -infinity for rows without a
    visible key."""
    s = q @ repeated(k, q.shape[1]).mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s.masked_fill(hidden_keys(q, k), -torch.inf) if causal else s
    if window:
        last = torch.arange(s.shape[-2], device=DEVICE)[:, None] + s.shape[-1] - s.shape[-2]
        s = s.masked_fill(torch.arange(s.shape[-1], device=DEVICE) <= last - window, -torch.inf)
    empty = s.isneginf().all(-1, keepdim=True)
    weights = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
    return weights @ repeated(v, q.shape[1]), s.logsumexp(-1)


def results(function, inputs, dout, dlse):
    """out, lse and the gradients, with a gradient of lse where it is finite. lse is 0 elsewhere."""
    out, lse = function(*inputs)
    finite = lse.isfinite()
    return (
        out.detach(),
        lse.detach().masked_fill(~finite, 0),
        *torch.autograd.grad((out, lse), inputs, (dout.to(out), dlse.to(lse) * finite)),
    )


def assert_close(found, exact, peer):
    """The largest error is at most twice that of torch's operations in the same dtype, plus two roundings."""
    for name, x, truth, theirs in zip(
        ("out", "lse", "dq", "dk", "dv", "dsink"), found, exact, peer, strict=False
    ):
        assert x.isfinite().all(), name
        allowed = 2 * (theirs.double() - truth).abs().max() + 2 * torch.finfo(x.dtype).eps * truth.abs().max()
        assert (x.double() - truth).abs().max() <= allowed, name


@every_version
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_against_float64(case, version):
    *sizes, causal, softcap = case
    inputs, scale = draw(*sizes), 0.17
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[:3], device=DEVICE)

    def ours(q, k, v):
        return cukern.attention(
            q, k, v, causal=causal, scale=scale, softcap=softcap, return_lse=True, version=version
        )

    found = results(ours, inputs, dout, dlse)
    exact, peer = (
        results(
            lambda *x: eager(*x, causal, scale, softcap),
            [x.detach().to(dtype).requires_grad_() for x in inputs],
            dout,
            dlse,
        )
        for dtype in (torch.float64, inputs[0].dtype)
    )
    assert_close(found, exact, peer)
    again = results(ours, inputs, dout, dlse) if PLACE == "cuda" else found  # in the simulator: test_ops.py
    assert all(map(same_bits, found, again)), "two runs give the same bits"


@every_version
@pytest.mark.parametrize(
    "case",
    [
        (1, 2, 1, 150, 150, 64, BF16, 40),
        (1, 1, 1, 20, 90, 128, HALF, 30),
        (1, 2, 2, 70, 20, 96, BF16, 1),
        (1, 1, 1, 90, 90, 200, BF16, 50),
    ],
    ids=str,
)
def test_window(case, version):
    *sizes, window = case
    inputs, scale = draw(*sizes), 0.17
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[:3], device=DEVICE)
    found = results(
        lambda *x: cukern.attention(*x, scale=scale, window=window, return_lse=True, version=version),
        inputs,
        dout,
        dlse,
    )
    exact, peer = (
        results(
            lambda *x: eager(*x, True, scale, None, window),
            [x.detach().to(dtype).requires_grad_() for x in inputs],
            dout,
            dlse,
        )
        for dtype in (torch.float64, inputs[0].dtype)
    )
    assert_close(found, exact, peer)


@pytest.mark.parametrize(
    "case",
    [
        (2, 1, 100, 130, 128, BF16, True, None),
        (1, 1, 150, 260, 104, HALF, False, None),
        (2, 1, 150, 200, 128, BF16, True, 60),
        (1, 1, 200, 70, 128, BF16, True, None),
    ],
    ids=str,
)
def test_backward_in_one_launch(case, monkeypatch):
    """head_dim 128: several thread blocks add to a tile of dq, one after the other."""
    *sizes, dtype, causal, window = case
    calls, real = [], wgmma._backward_ordered
    monkeypatch.setattr(wgmma, "_backward_ordered", lambda *x: calls.append(real(*x)))
    inputs = draw(1, *sizes, dtype)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(inputs[0].shape[:3], device=DEVICE)

    def ours(*x):
        return cukern.attention(*x, scale=0.17, causal=causal, window=window, return_lse=True, version="v4")

    found = results(ours, inputs, dout, dlse)
    assert calls
    exact, peer = (
        results(
            lambda *x: eager(*x, causal, 0.17, None, window),
            [x.detach().to(like).requires_grad_() for x in inputs],
            dout,
            dlse,
        )
        for like in (torch.float64, dtype)
    )
    assert_close(found, exact, peer)


def test_tiles_of_few_some_and_many_keys():
    few, some, many = plan.WGMMA_FORWARD[64]
    assert [plan.wgmma_forward(64, n, False, True) for n in (1024, 1025, 8192)] == [few, some, many]
    assert [plan.wgmma_forward(64, n, False, False) for n in (1, 8191)] == [some, some]
    assert [plan.wgmma_forward(64, n, True, True) for n in (1024, 9000)] == [few, some]


@pytest.mark.parametrize("d", [40, 64])
def test_the_tile_for_many_keys(d, monkeypatch):
    monkeypatch.setattr(plan, "MANY_KEYS", 1)
    inputs = [x.detach() for x in draw(1, 2, 1, 250, 300, d, BF16)]  # three warpgroups, two thread blocks
    exact, peer = (
        eager(*(x.to(dtype) for x in inputs), True, d**-0.5, None)[:1] for dtype in (torch.float64, BF16)
    )
    assert_close([cukern.attention(*inputs, version="v4")], exact, peer)


@pytest.mark.parametrize(
    "case",
    [
        (3, 1, 260, 200, 64, True, None),
        (2, 1, 300, 150, 128, False, None),
        (2, 1, 150, 290, 256, True, 90),
        (2, 1, 400, 270, 24, False, None),
    ],
    ids=str,
)
def test_persistent_thread_blocks(case, monkeypatch):
    """The same bits from thread blocks with one block of queries, and from persistent ones."""
    heads, kv_heads, queries, keys, d, causal, window = case
    q, k, v = (x.detach() for x in draw(1, heads, kv_heads, queries, keys, d, BF16))
    found, grids = [], []
    for persistent in (False, True):

        def grid(tile, blocks, *_, persistent=persistent):
            grids.append(tile.per_sm if persistent else blocks)  # as if the GPU had one SM
            return grids[-1]

        monkeypatch.setattr(plan.WgmmaTile, "forward_grid", grid)
        found.append(cukern.attention(q, k, v, causal=causal, window=window, return_lse=True, version="v4"))
    assert grids[1] < grids[0]
    assert all(map(same_bits, *found))
    exact = eager(*(x.double() for x in (q, k, v)), causal, d**-0.5, None, window)
    peer = eager(q, k, v, causal, d**-0.5, None, window)
    finite = exact[1].isfinite()
    assert_close(*([x[0], x[1].masked_fill(~finite, 0)] for x in (found[1], exact, peer)))


def test_blocks_are_persistent_where_that_pays():
    """Without a mask: if the sequences are short, and no SM gets many of the thread blocks that have one
    block of queries more."""
    tile = plan.WGMMA_FORWARD[64][1]
    shapes = (
        (768, False, False, 1000),
        (768, True, False, 1000),
        (768, False, True, 1000),
        (768, False, False, 4096),
        (436, False, False, 77),
    )
    assert [tile.forward_grid(*shape, 132) for shape in shapes] == [396, 768, 768, 768, 436]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "queries, keys", [(2000, 3), (1 << 30, 16), (17, 1 << 30), (70, (1 << 31) - 600), ((1 << 31) - 600, 70)]
)
@pytest.mark.parametrize("d", [8, 128])
def test_no_window_hides_no_key(monkeypatch, queries, keys, causal, d):
    """What v4 adds in 32 bits, without a window. A window of 2^30 hid keys where there were more queries and
    keys together."""
    arguments, recorder = [], SimpleNamespace(on=lambda device: lambda *given: arguments.append(given))
    for kernel in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(wgmma, kernel, lambda *_: recorder)
    monkeypatch.setattr(wgmma, "_ordered_kernels", lambda dtype: (recorder, recorder))
    q, k = (torch.empty(1, 1, n, d, dtype=BF16, device="meta") for n in (queries, keys))
    options, first, offset = Options(causal, 1.0, 0.0, True), queries - 1, keys - queries * causal
    launch.forward(q, k, k, *options)
    wgmma.backward(
        (q, k, k), q, k, k, q, torch.empty(2, 1, queries + 128, device="meta"), options, wgmma.Bounds()
    )
    assert len(arguments) == 3
    windows = (arguments[1][-5],) if d == 128 else (arguments[1][-6], arguments[2][-6])
    for window in (arguments[0][-5], *windows):
        assert first + offset - window + 1 <= 0, "the last query sees the first key"
        assert offset - window - 256 >= -(2**31), "the bounds of a tile's keys"
        assert keys - 1 - offset + window >= queries, "the last key is seen by the last query"
        assert keys + 191 - offset + window < 2**31, "the bounds of a tile's queries"


def test_very_many_queries_and_keys_are_refused():
    q, k = (torch.empty(1, 1, n, 8, dtype=BF16, device="meta") for n in (1 << 30, (1 << 30) - 512))
    with pytest.raises(
        ValueError, match="fewer than 2147483136 queries and keys together, got 1073741824 and 1073741312"
    ):
        launch.forward(q, k, k, *Options(False, 1.0))
    # a persistent kernel counts its blocks of queries in 32 bits; a grid of 2^31 is refused
    tile = plan.WGMMA_FORWARD[48][2]
    most = (1 << 31) - 133
    assert [tile.forward_grid(n, False, False, 300, 132) for n in (most, most + 1, 1 << 31)] == [
        132,
        most + 1,
        1 << 31,
    ]


def test_window_of_one_query_and_of_packed_inputs():
    q, k, v = (x.detach() for x in draw(1, 4, 2, 1, 300, 64, BF16))
    assert same_bits(
        cukern.attention(q, k, v, window=100), cukern.attention(q, k[:, :, 200:], v[:, :, 200:], causal=False)
    )
    qkv = torch.randn(1, 30, 3, 2, 64, dtype=BF16, device=DEVICE)
    parts = [x.transpose(1, 2) for x in qkv.unbind(2)]
    assert same_bits(
        cukern.attention_packed(qkv, window=9).contiguous(),
        cukern.attention(*parts, window=9).transpose(1, 2).contiguous(),
    )


@pytest.mark.parametrize("version", ["v1", "v4"])
def test_sink(version):
    """One more column of scores, whose weight has no value."""
    q, k, v = draw(2, 2, 1, 20, 20, 8, BF16)
    sink = torch.tensor([0.5, 1.5], device=DEVICE, requires_grad=True)
    dout, dlse = torch.randn_like(q), torch.randn(2, 2, 20, device=DEVICE)

    def with_column(q, k, v, sink):
        s = q @ repeated(k, 2).mT * 8**-0.5
        s = torch.cat(
            (s.masked_fill(hidden_keys(q, k), -torch.inf), sink.to(s)[:, None, None].expand(2, 2, 20, 1)), -1
        )
        return s.softmax(-1)[..., :-1] @ repeated(v, 2), s.logsumexp(-1)

    inputs = q, k, v, sink
    found = results(
        lambda *x: cukern.attention(*x[:3], sink=x[3], return_lse=True, version=version), inputs, dout, dlse
    )
    exact, peer = (
        results(with_column, [x.detach().to(t).requires_grad_() for x in inputs], dout, dlse)
        for t in (torch.float64, BF16)
    )
    assert_close(found, exact, peer)
    qkv = torch.randn(1, 9, 3, 2, 8, dtype=BF16, device=DEVICE)
    parts = [x.transpose(1, 2) for x in qkv.unbind(2)]
    packed = cukern.attention_packed(qkv, sink=1.0, version=version)
    assert same_bits(
        packed.contiguous(), cukern.attention(*parts, sink=1.0, version=version).transpose(1, 2).contiguous()
    )


@kernels
@pytest.mark.parametrize("version", VERSIONS)
def test_infinite_sinks(version):
    """-inf is no sink, also for the first query here, which sees no key; +inf and NaN make the result NaN."""
    q, k, v = (torch.randn(1, n, 16, device=DEVICE, requires_grad=True) for n in (3, 2, 2))
    sink = torch.tensor([-torch.inf], device=DEVICE, requires_grad=True)
    plain = cukern.attention(q, k, v, return_lse=True, version=version)
    found = cukern.attention(q, k, v, sink=sink, return_lse=True, version=version)
    assert all(map(same_bits, found, plain))
    expected = torch.autograd.grad(plain[0].sum(), (q, k, v))
    *gradients, of_sink = torch.autograd.grad(found[0].sum(), (q, k, v, sink))
    assert all(map(same_bits, gradients, expected)) and float(of_sink) == 0
    for sink in (torch.inf, torch.nan):
        assert bool(cukern.attention(q, k, v, sink=sink, version=version)[0, 1:].isnan().all())


def test_window_that_is_refused():
    q, k, v = (x.detach() for x in draw(1, 1, 1, 4, 4, 8, BF16))
    with pytest.raises(ValueError, match="window needs causal=True, got window=2"):
        cukern.attention(q, k, v, causal=False, window=2)
    with pytest.raises(ValueError, match="window must be"):
        cukern.attention(q, k, v, window=0)
    with pytest.raises(ValueError, match="exclude each other, got window=2"):
        cukern.attention(q, k, v, window=2, key_lengths=torch.ones(1, dtype=torch.int32, device=DEVICE))


@every_version
@pytest.mark.parametrize("d", [64, 128])
def test_packed(d, version):
    qkv = torch.randn(2, 19, 3, 2, d, dtype=BF16, device=DEVICE, requires_grad=True)
    g = torch.randn(2, 19, 2, d, dtype=BF16, device=DEVICE)
    out = cukern.attention_packed(qkv, version=version)
    (grad,) = torch.autograd.grad(out, qkv, g)
    parts = [x.transpose(1, 2).detach().clone().requires_grad_() for x in qkv.unbind(2)]
    expected = cukern.attention(*parts, version=version)
    grads = torch.autograd.grad(expected, parts, g.transpose(1, 2))
    assert out.is_contiguous() and grad.is_contiguous() and grad.shape == qkv.shape
    assert same_bits(out, expected.transpose(1, 2).contiguous()), (
        "packed and separate inputs give the same bits"
    )
    assert same_bits(grad, torch.stack([x.transpose(1, 2) for x in grads], 2))


@every_version
def test_rows_without_a_visible_key(version):
    q, k, v = draw(1, 2, 1, 70, 3, 64, HALF)
    out, lse = cukern.attention(q, k, v, return_lse=True, version=version)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert (out[:, :, :67] == 0).all() and lse[:, :, :67].isneginf().all() and lse[:, :, 67:].isfinite().all()
    assert (grads[0][:, :, :67] == 0).all() and all(x.isfinite().all() for x in grads)


@every_version
def test_no_keys_and_no_queries(version):
    for queries, keys in ((3, 0), (0, 3)):
        q, k, v = draw(1, 2, 2, queries, keys, 64, BF16)
        out, lse = cukern.attention(q, k, v, return_lse=True, version=version)
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert (out == 0).all() and lse.isneginf().all() and all((x == 0).all() for x in grads)


@every_version
def test_hidden_keys_do_not_matter(version):
    q, k, v = (x.detach() for x in draw(1, 1, 1, 40, 40, 64, BF16))
    before = cukern.attention(q, k, v, version=version)
    k[:, :, 30:], v[:, :, 30:] = 7.0, -7.0
    after = cukern.attention(q, k, v, version=version)
    assert same_bits(before[:, :, :30], after[:, :, :30]) and not torch.equal(before, after)


@every_version
def test_strides_that_the_kernels_read_and_those_that_are_copied(version):
    q, k, v = draw(1, 2, 2, 20, 20, 64, HALF)
    expected = cukern.attention(q, k, v, version=version)
    rows = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    columns = [x.mT.contiguous().mT for x in (q, k, v)]
    odd = [torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, k, v)]
    for inputs in (rows, columns, odd):
        assert same_bits(cukern.attention(*inputs, version=version).contiguous(), expected)


@every_version
def test_large_scores_and_scale_0(version):
    q, k, v = (x.detach() for x in draw(1, 1, 1, 5, 9, 64, BF16))
    out = cukern.attention(q * 100, k * 100, v, causal=False, version=version)
    best = (q.double() @ k.double().mT).argmax(-1)
    torch.testing.assert_close(out, v[:, :, best[0, 0]], rtol=2**-7, atol=0)  # the largest score takes all
    mean = cukern.attention(q, k, v, causal=False, scale=0.0, version=version).double()
    torch.testing.assert_close(mean, v.double().mean(2, keepdim=True).expand_as(mean), rtol=2**-7, atol=1e-3)


def test_higher_and_forward_mode_derivatives_and_vmap():
    q, k, v = draw(2, 2, 1, 5, 5, 8, BF16)
    options = Options(True, 8**-0.5, 0.0)

    def ours(*x):
        return cukern.attention(*x, version="v3")

    def theirs(*x):
        return reference(*x, options)[0]

    found, expected = ([], [])
    for function, into in ((ours, found), (theirs, expected)):
        dq = torch.autograd.grad(function(q, k, v).float().square().sum(), q, create_graph=True)[0]
        into.extend(torch.autograd.grad(dq.float().square().sum(), (q, k, v)))
        into.append(
            torch.func.jvp(
                function,
                (q.detach(), k.detach(), v.detach()),
                (v.repeat(1, 2, 1, 1).detach(), k.detach(), k.detach()),
            )[1]
        )
        into.append(torch.func.vmap(function)(q.detach()[:, None], k.detach()[:, None], v.detach()[:, None]))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05 * y.abs().max().item())


def test_derivatives_of_packed_inputs():
    qkv, t = (torch.randn(1, 4, 3, 2, 8, dtype=BF16, device=DEVICE) for _ in range(2))
    separate = [x.transpose(1, 2) for x in qkv.unbind(2)]
    tangent = torch.func.jvp(cukern.attention_packed, (qkv,), (t,))[1]
    expected = torch.func.jvp(
        cukern.attention, tuple(separate), tuple(x.transpose(1, 2) for x in t.unbind(2))
    )[1]
    assert same_bits(tangent, expected.transpose(1, 2).contiguous())
    many = torch.func.vmap(cukern.attention_packed)(torch.stack([qkv, t]))
    assert same_bits(many[1], cukern.attention_packed(t))
    qkv.requires_grad_()
    (first,) = torch.autograd.grad(
        cukern.attention_packed(qkv).float().square().sum(), qkv, create_graph=True
    )
    (second,) = torch.autograd.grad(first.float().square().sum(), qkv)
    assert second.shape == qkv.shape and second.isfinite().all() and second.any()


def test_opcheck():
    q, k, v = (x.detach() for x in draw(1, 2, 1, 5, 6, 8, BF16))
    torch.library.opcheck(torch.ops.cukern._attention.default, (q, k, v, True, 0.3, 0.0, True))
    out, lse = fused.fused((q, k, v), Options(True, 0.3, 0.0))
    torch.library.opcheck(
        torch.ops.cukern._attention_backward.default, (q, k, v, out, out, lse, None, True, 0.3, 0.0, True)
    )


def launched(*tensors, version=None):
    with cukern.backend("sim"), collecting() as found:
        cukern.attention(*tensors, version=version)
    return {name.partition("<")[0] for name in found}


def test_default():
    def chosen(dtype, d, version=None):
        return launched(*[torch.randn(1, 1, 8, d, dtype=dtype)] * 3, version=version)

    assert chosen(BF16, 64) == chosen(HALF, 8) == chosen(BF16, 64, "v4") == {"attention_v4"}
    assert chosen(BF16, 64, "v3") == {"attention_v3"}
    assert chosen(torch.float32, 64) == {"attention_v3", "attention_v3_split"}
    for dtype, d in ((torch.float64, 64), (torch.float32, 9), (torch.float32, 136), (BF16, 9), (BF16, 264)):
        assert all("causal_softmax" in name for name in chosen(dtype, d))


def test_without_wgmma_and_strides_that_tma_does_not_read():
    x = torch.randn(1, 2, 8, 64, dtype=BF16)
    assert launched(x, x, x[:, :1, :1].expand(1, 2, 8, 64)) == {"attention_v3"}
    for name, expected in (("a100", "attention_v3"), ("b200", "attention_v3"), ("h100", "attention_v4")):
        with assumed(KNOWN[name]):
            assert launched(x, x, x) == {expected}, name


@pytest.mark.parametrize("d", [4, 60, 264])
def test_head_dim_that_is_not_supported(d):
    x = torch.randn(1, 1, 3, d, dtype=BF16, device=DEVICE)
    with pytest.raises(
        ValueError,
        match=f"a multiple of 8, from 8 to 256 for torch.bfloat16, and the same for q, k and v, got {d}",
    ):
        cukern.attention(x, x, x, version="v3")


def test_lengths_compile_nothing():
    """The kernels of a call depend on the dtype, torch's TF32 switch, the head_dim, the softcap, packed
    sequences and pages only."""
    for find, count in ((launch.instances, 42), (launch.wgmma_instances, 110)):
        assert len(find(BF16)) == count and len(find(torch.float32)) == 50 and find(torch.float64) == []
        assert {k.name for dtype in (BF16, torch.float32) for k in find(dtype)} <= set(
            registry.CASES["attention"].op.kernels()
        )


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("options", ({"window": 9}, {"softcap": 2.0}, {"dropout_p": 0.2}), ids=str)
def test_options_in_a_compiled_graph(options, monkeypatch):
    untraceable_devices(monkeypatch)
    q, k, v = torch.randn(3, 1, 2, 40, 64, device=DEVICE, dtype=BF16).requires_grad_().unbind()
    compiled = torch.compile(
        lambda *x: cukern.attention(*x, **options), fullgraph=True, dynamic=False, backend="aot_eager"
    )
    found = []
    for call in (compiled, lambda *x: cukern.attention(*x, **options)):
        torch.manual_seed(0)
        y = call(q, k, v)
        found.append((y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
