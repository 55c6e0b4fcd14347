"""attention_varlen: sequences of different lengths against float64, one sequence at a time; wrong bounds;
derivatives."""

import itertools

import pytest
import torch
from helpers import DEVICE, PLACE, gpu, kernels, same_bits

import cukern
from cukern.ops.attention.reference import repeated

HALF, BF16 = torch.float16, torch.bfloat16
CASES = [  # lengths of queries and keys, heads, kv_heads, head_dim, dtype, causal, softcap, window
    ([1], [1], 1, 1, 8, BF16, True, None, None),
    ([5, 0, 1, 70, 0], [5, 0, 1, 70, 0], 4, 2, 64, BF16, True, None, None),
    ([33, 0, 60, 2], [20, 3, 70, 0], 2, 1, 128, BF16, True, None, None),
    ([5, 3, 131], [90, 4, 7], 1, 1, 72, HALF, False, 2.0, None),
    ([33, 66, 2], [33, 50, 4], 2, 1, 256, BF16, True, None, None),
    ([150, 40, 20], [150, 20, 90], 2, 2, 64, BF16, True, None, 30),
    ([40, 65], [40, 65], 1, 1, 64, torch.float32, True, None, None),
    ([9, 4], [3, 8], 1, 1, 8, torch.float32, True, 3.0, 2),
]


@pytest.fixture
def place():
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        yield


def bounds_of(lengths, dtype=torch.int32):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=DEVICE)


def draw(queries, keys, heads, kv_heads, d, dtype):
    shapes = (sum(queries), heads, d), (sum(keys), kv_heads, d), (sum(keys), kv_heads, d)
    return [torch.randn(shape, dtype=dtype, device=DEVICE, requires_grad=True) for shape in shapes]


def one_at_a_time(q, k, v, queries, keys, causal, softcap, window):
    """out and lse in the dtype of the inputs; the scale is 0.17."""
    found = []
    for x, y, z in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        x, y, z = (t.transpose(0, 1)[None] for t in (x, y, z))
        s = x @ repeated(y, x.shape[1]).mT * 0.17
        s = softcap * torch.tanh(s / softcap) if softcap else s
        away = (
            torch.arange(s.shape[-2], device=DEVICE)[:, None]
            + s.shape[-1]
            - s.shape[-2]
            - torch.arange(s.shape[-1], device=DEVICE)
        )
        s = s.masked_fill(away < 0, -torch.inf) if causal else s
        s = s.masked_fill(away >= window, -torch.inf) if window else s
        empty = s.isneginf().all(-1, keepdim=True)
        weights = s.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        found.append(((weights @ repeated(z, x.shape[1]))[0].transpose(0, 1), s.logsumexp(-1)[0]))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found], 1)


def results(function, inputs, dout, dlse):
    """out, lse and the gradients, with a gradient of lse where it is finite. lse is 0 elsewhere."""
    out, lse = function(*inputs)
    finite = lse.isfinite()
    grads = torch.autograd.grad((out, lse), inputs, (dout.to(out), dlse.to(lse) * finite))
    return out.detach(), lse.detach().masked_fill(~finite, 0), *grads


@pytest.mark.parametrize(
    "version", [None, pytest.param("v3", marks=kernels), pytest.param("v4", marks=kernels)]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case, version, request):
    """The largest error is at most twice that of torch's operations in the same dtype, plus two roundings.
    version None: CPU tensors in torch's operations, or the default of a GPU."""
    if version:
        request.getfixturevalue("place")
    queries, keys, heads, kv_heads, d, dtype, causal, softcap, window = case
    inputs = draw(queries, keys, heads, kv_heads, d, dtype)
    dout, dlse = torch.randn_like(inputs[0]), torch.randn(heads, sum(queries), device=DEVICE)
    bounds = bounds_of(queries), bounds_of(keys, torch.int64)

    def ours(*x):
        options = {"causal": causal, "softcap": softcap, "window": window, "version": version}
        return cukern.attention_varlen(*x, *bounds, scale=0.17, return_lse=True, **options)

    found = results(ours, inputs, dout, dlse)
    of = queries, keys, causal, softcap, window
    exact, peer = (
        results(
            lambda *x: one_at_a_time(*x, *of), [x.detach().to(t).requires_grad_() for x in inputs], dout, dlse
        )
        for t in (torch.float64, dtype)
    )
    for name, x, truth, theirs in zip(("out", "lse", "dq", "dk", "dv"), found, exact, peer, strict=True):
        assert x.isfinite().all() and x.shape == truth.shape, name
        allowed = 2 * (theirs.double() - truth).abs().max() + 2 * torch.finfo(x.dtype).eps * truth.abs().max()
        assert (x.double() - truth).abs().max() <= allowed, name
    if PLACE == "cuda":  # in the simulator: test_ops.py
        assert all(map(same_bits, found, results(ours, inputs, dout, dlse))), "two runs give the same bits"


@kernels
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("version", ["v3", "v4"])
def test_sequences_do_not_touch_one_another(version):
    """A sequence gives the bits of its own call, whatever is in the others: NaN in the middle one."""
    lengths = [70, 20, 45]
    q, k, v = (x.detach() for x in draw(lengths, lengths, 2, 2, 64, BF16))
    for x in (q, k, v):
        x[70:90] = torch.nan
    g, cu_seqlens = torch.randn_like(q), bounds_of(lengths)

    def run(first, end, cu_seqlens):
        inputs = [x[first:end].clone().requires_grad_() for x in (q, k, v)]
        out = cukern.attention_varlen(*inputs, cu_seqlens, version=version)
        return out, *torch.autograd.grad(out, inputs, g[first:end])

    every = run(0, 135, cu_seqlens)
    for first, end in ((0, 70), (90, 135)):
        alone = run(first, end, bounds_of([end - first]))
        assert all(
            same_bits(x[first:end].contiguous(), y.contiguous()) and y.isfinite().all()
            for x, y in zip(every, alone, strict=True)
        )


@kernels
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("version", ["v3", "v4"])
@pytest.mark.parametrize(
    "bounds", [[7, 1000], [-5, 20, 20, 40], [0], pytest.param([50, 70, 30, -1], marks=gpu)], ids=str
)
def test_bounds_that_a_gpu_does_not_check(bounds, version):
    """Nothing is read or written out of bounds, which the simulator would report. Tokens behind the last
    sequence give 0. Bounds that decrease give overlapping sequences, whose blocks write the same rows."""
    q, k, v = (x.detach().transpose(0, 1)[None] for x in draw([60], [60], 1, 1, 64, BF16))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=DEVICE)
    scalars = (True, 0.3, 0.0, version == "v4")
    out, lse = torch.ops.cukern._attention_varlen(q, k, v, cu_seqlens, cu_seqlens, *scalars)
    grads = torch.ops.cukern._attention_varlen_backward(
        q, k, v, cu_seqlens, cu_seqlens, out, q, lse, None, *scalars
    )
    if bounds == sorted(bounds):
        behind = bounds[-1]
        assert lse[:, :, behind:].isneginf().all()
        assert all((x[:, :, behind:] == 0).all() and x.isfinite().all() for x in (out, *grads))


def test_bounds_that_are_refused():
    q, k, v = (x.detach() for x in draw([5], [5], 1, 1, 8, BF16))
    good = torch.tensor([0, 2, 5], device=DEVICE)

    def refused(error, message, cu_seqlens, *others, **options):
        with pytest.raises(error, match=message):
            cukern.attention_varlen(q, k, v, cu_seqlens, *others, **options)

    refused(TypeError, "cu_seqlens must be torch.int32 or torch.int64, got torch.float32", good.float())
    refused(ValueError, r"cu_seqlens has shape \(1, 3\), it must be \(sequences \+ 1,\)", good[None])
    refused(ValueError, r"cu_seqlens_k has shape \(0,\)", good, good[:0])
    refused(ValueError, "must have the same shape", good, torch.tensor([0, 5], device=DEVICE))
    refused(ValueError, "cu_seqlens is on meta", good.to("meta"))
    refused(ValueError, "version 'sdpa' has no cu_seqlens", good, version="sdpa")
    refused(ValueError, "window needs causal=True", good, window=2, causal=False)
    with pytest.raises(ValueError, match=r"q, k and v must be \(tokens, heads, D\)"):
        cukern.attention_varlen(q[None], k[None], v[None], good)
    if DEVICE == "cpu":
        for wrong in ([1, 5], [0, 4], [0, 6], [0, 3, 2, 5]):
            refused(
                ValueError,
                "cu_seqlens must begin at 0, not decrease, and end at the number of tokens, 5",
                torch.tensor(wrong),
            )


@kernels
@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("version", [None, "v3"])
def test_sink_layouts_and_no_tokens(version):
    lengths = [12, 7]
    q, k, v = (x.detach() for x in draw(lengths, lengths, 2, 1, 8, BF16))
    cu_seqlens, sink = bounds_of(lengths), torch.tensor([0.5, 1.5], device=DEVICE)
    out, lse = cukern.attention_varlen(q, k, v, cu_seqlens, sink=sink, return_lse=True, version=version)
    for first, end in ((0, 12), (12, 19)):
        alone = cukern.attention(
            *(x[first:end].transpose(0, 1) for x in (q, k, v)), sink=sink, return_lse=True, version=version
        )
        torch.testing.assert_close(out[first:end], alone[0].transpose(0, 1), rtol=2**-7, atol=2**-7)
        torch.testing.assert_close(lse[:, first:end], alone[1], rtol=1e-5, atol=1e-5)
    packed = torch.cat((q, k, v), 1)  # heads of one tensor, whose rows are not copied
    assert same_bits(
        cukern.attention_varlen(
            packed[:, :2], packed[:, 2:3], packed[:, 3:], cu_seqlens, sink=sink, version=version
        ),
        out,
    )
    none = cukern.attention_varlen(q[:0], k, v, bounds_of([0, 0]), cu_seqlens, version=version)
    assert none.shape == (0, 2, 8)
    assert (
        cukern.attention_varlen(q, k[:0], v[:0], cu_seqlens, bounds_of([0, 0]), version=version) == 0
    ).all()


@kernels
@pytest.mark.usefixtures("place")
def test_derivatives_and_the_raw_ops():
    lengths = [4, 0, 3]
    q, k, v = draw(lengths, lengths, 1, 1, 8, BF16)
    cu_seqlens = bounds_of(lengths)
    tangents = torch.randn_like(q), torch.randn_like(k), torch.randn_like(v)

    def found(function):
        (dq,) = torch.autograd.grad(function(q, k, v).float().square().sum(), q, create_graph=True)
        second = torch.autograd.grad(dq.float().square().sum(), (q, k, v))
        return *second, torch.func.jvp(function, (q.detach(), k.detach(), v.detach()), tangents)[1]

    ours = found(lambda *inputs: cukern.attention_varlen(*inputs, cu_seqlens, scale=0.17))
    theirs = found(lambda *inputs: one_at_a_time(*inputs, lengths, lengths, True, None, None)[0])
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=0.05, atol=0.05 * y.abs().max().item())
    inputs = *(x.detach().transpose(0, 1)[None] for x in (q, k, v)), cu_seqlens, cu_seqlens
    torch.library.opcheck(torch.ops.cukern._attention_varlen.default, (*inputs, True, 0.3, 0.0, True))
    out, lse = torch.ops.cukern._attention_varlen(*inputs, True, 0.3, 0.0, True)
    torch.library.opcheck(
        torch.ops.cukern._attention_varlen_backward.default,
        (*inputs, out, out, lse, None, True, 0.3, 0.0, True),
    )
