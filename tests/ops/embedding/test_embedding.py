"""cukern.embedding: shapes, views, tokens outside of the vocabulary, runs of equal tokens, derivatives of
gradients, and refusals."""

import itertools

import numpy
import pytest
import torch
from helpers import DEVICE, FLOATS, kernels, places, same_bits

import cukern
from cukern.ops import embedding as module
from cukern.runtime.registry import CASES

PLACES = pytest.mark.parametrize("device, version", places("embedding"))
VERSIONS = pytest.mark.parametrize("version", CASES["embedding"].op.versions)
# as with few tokens, and as with more
SORTED = pytest.mark.parametrize("few", (module.FEW, 0), ids=("few", "sorted"))
SHAPES = [(), (0,), (1,), (3, 0), (0, 3), (5,), (2, 3, 4), (300,)]


def whole(*shape: int, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> torch.Tensor:
    """Small integers: sums of 300 of them are exact in float16."""
    return torch.randint(-3, 4, shape).to(device, dtype)


def exact(
    tokens: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None, dout: torch.Tensor
) -> list[torch.Tensor]:
    """The output and the gradients, by loops over numbers that add exactly."""
    inside = (tokens >= 0) & (tokens < len(weight))
    out, dweight = torch.full_like(dout, float("nan")), torch.zeros_like(weight)
    dpositions = None if positions is None else torch.zeros_like(positions)
    for at in itertools.product(*map(range, tokens.shape)):
        if inside[at]:
            out[at] = weight[int(tokens[at])] + (0 if positions is None else positions[at[-1]])
            dweight[int(tokens[at])] += dout[at]
        if dpositions is not None:
            dpositions[at[-1]] += dout[at]
    return [t for t in (out, dweight, dpositions) if t is not None]


def check(
    tokens: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor | None, version: str | None
) -> None:
    tables = [t.detach().requires_grad_() for t in (weight, positions) if t is not None]
    out = cukern.embedding(tokens, *tables, version=version)
    dout = whole(*out.shape, dtype=out.dtype, device=out.device.type)
    found = [out, *torch.autograd.grad(out, tables, dout)]
    for ours, right in zip(found, exact(tokens, weight, positions, dout), strict=True):
        assert ours.is_contiguous()
        torch.testing.assert_close(ours.detach(), right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_every_shape_and_dtype(device, version, dtype):
    for shape, integers, features in zip(
        SHAPES, itertools.cycle((torch.int64, torch.int32)), (8, 3, 16, 5, 0, 33, 24, 8), strict=False
    ):
        tokens = torch.randint(6, shape, device=device, dtype=integers)
        weight = whole(6, features, dtype=dtype, device=device)
        check(tokens, weight, None, version)
        if shape:
            check(
                tokens, weight, whole(shape[-1] + features % 3, features, dtype=dtype, device=device), version
            )


@PLACES
def test_empty_vocabulary_and_table(device, version):
    check(
        torch.zeros(3, 0, dtype=torch.int64, device=device),
        whole(0, 4, device=device),
        whole(0, 4, device=device),
        version,
    )
    check(
        torch.zeros(3, 0, dtype=torch.int64, device=device),
        whole(0, 4, device=device),
        whole(2, 4, device=device),
        version,
    )


@kernels
@SORTED
@VERSIONS
def test_tables_larger_than_a_block(version, few, monkeypatch):
    """More than one slice of a row, unaligned rows, and many rows without a token."""
    monkeypatch.setattr(module, "FEW", few)
    for vocabulary, features in ((3, 2048), (3, 1030), (7000, 8), (300, 72)):
        check(
            torch.randint(vocabulary, (2, 3), device=DEVICE),
            whole(vocabulary, features),
            whole(3, features),
            version,
        )


@PLACES
def test_views(device, version):
    """Strided, unaligned, expanded and negated inputs and gradients."""
    tokens = torch.randint(6, (4, 6), device=device)
    weight, positions = whole(12, 16, device=device), whole(9, 8, device=device)
    for some in (tokens.t(), tokens[::2, ::3], tokens[:1].expand(5, 6), tokens[1:, 1:]):
        for table in (
            weight[:, :8],
            weight[::2, 8:],
            weight.view(-1)[3 : 3 + 80].view(10, 8),
            weight.t()[:, :8],
        ):
            check(some, table, positions, version)
    weight.requires_grad_()
    x = whole(4, 6, 16, device=device)
    for dout in (
        x[:1, :1].expand(4, 6, 16),
        whole(16, 6, 4, device=device).permute(2, 1, 0),
        torch._neg_view(x),
    ):
        resolved = dout.resolve_neg().contiguous()
        ours, theirs = (
            torch.autograd.grad(cukern.embedding(tokens, weight, version=version), weight, d)[0]
            for d in (dout, resolved)
        )
        assert same_bits(ours + 0, theirs + 0)
    table = whole(12, 16, device=device)
    ours, theirs = (
        torch.func.jvp(lambda w: cukern.embedding(tokens, w), (table,), (t,))[1]
        for t in (torch._neg_view(table), -table)
    )
    assert torch.equal(ours, theirs)


@kernels
@pytest.mark.parametrize("integers", (torch.int32, torch.int64))
@SORTED
@VERSIONS
def test_tokens_outside_of_the_vocabulary_are_nan_and_have_no_gradient(version, few, integers, monkeypatch):
    monkeypatch.setattr(module, "FEW", few)
    bad = [-1, 5, 7, torch.iinfo(integers).max, torch.iinfo(integers).min] + (
        [2**32 + 1, 2**32 - 1] if integers == torch.int64 else []
    )
    tokens = torch.randint(5, (2, 200), dtype=integers)
    tokens[1, : len(bad)] = torch.tensor(bad, dtype=integers)
    tokens[0, 40:], tokens[1, 40:] = -3, 9  # long runs
    check(tokens.to(DEVICE), whole(5, 8), whole(200, 8), version)


def test_tokens_outside_of_the_vocabulary_on_the_cpu():
    for bad in (-1, 5, 2**40):
        with pytest.raises(ValueError, match=rf"^tokens has {bad}, it must be in the vocabulary, 0..4$"):
            cukern.embedding(torch.tensor([0, bad, 4]), torch.randn(5, 2))


@kernels
@SORTED
@VERSIONS
def test_runs_of_equal_tokens(version, few, monkeypatch):
    """Around 4, 8, 32 and 64: rows loaded at a time, tokens that a warp looks at, and a chunk of sorted
    tokens."""
    monkeypatch.setattr(module, "FEW", few)
    for counts in (
        (8,),
        (1, 7, 9),
        (16, 17),
        (15, 0, 16),
        (2, 64, 65),
        (130, 1, 20),
        (3, 600),
        (257, 5, 256, 258),
    ):
        tokens = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        tokens = tokens[torch.randperm(len(tokens))]
        check(tokens.to(DEVICE), whole(len(counts), 4), None, version)


@kernels
@SORTED
@VERSIONS
def test_the_order_of_a_sum_is_fixed(version, few, monkeypatch):
    """Equal tokens are added in the order of their rows: two runs, and both types of tokens, agree."""
    monkeypatch.setattr(module, "FEW", few)
    tokens = torch.randint(4, (3, 90), device=DEVICE)
    weight = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    dout = torch.randn(3, 90, 8, device=DEVICE) * 10.0 ** torch.randint(-6, 7, (3, 90, 1), device=DEVICE)
    grads = [
        torch.autograd.grad(cukern.embedding(t, weight, version=version), weight, dout)[0]
        for t in (tokens, tokens.int(), tokens)
    ]
    assert same_bits(grads[0], grads[1]) and same_bits(grads[0], grads[2])


@kernels
@SORTED
@pytest.mark.parametrize("dtype, exact", ((torch.float32, numpy.float64), (torch.float64, numpy.longdouble)))
def test_sums_of_equal_numbers(dtype, few, exact, monkeypatch):
    """One by one, the error of 130 equal terms is up to 16 eps of the sum."""
    monkeypatch.setattr(module, "FEW", few)
    dout = torch.randn(512, dtype=dtype, device=DEVICE).expand(130, -1)
    weight = torch.zeros(2, 512, dtype=dtype, device=DEVICE, requires_grad=True)
    cukern.embedding(torch.zeros(130, dtype=torch.int32, device=DEVICE), weight, version="v2").backward(dout)
    wanted = 130 * dout[0].cpu().numpy().astype(exact)
    assert (abs(weight.grad[0].cpu().numpy() - wanted) <= 2 * torch.finfo(dtype).eps * abs(wanted)).all()


@PLACES
def test_16_bit_gradients_are_added_in_float32(device, version):
    """In bfloat16, 256 + 1 is 256 again."""
    weight, positions = (
        torch.zeros(2, 8, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in range(2)
    )
    cukern.embedding(
        torch.zeros(600, 1, dtype=torch.int32, device=device), weight, positions, version=version
    ).sum().backward()
    assert weight.grad[0].tolist() == positions.grad[0].tolist() == [600] * 8
    assert weight.grad[1].tolist() == positions.grad[1].tolist() == [0] * 8


@PLACES
def test_gradcheck(device, version):
    tokens = torch.tensor([[0, 2, 2], [1, 2, 0]], device=device)
    tables = [torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True) for n in (4, 5)]

    def call(*tables):
        return cukern.embedding(tokens, *tables, version=version)

    assert torch.autograd.gradcheck(call, tables, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, tables, check_fwd_over_rev=True)


@PLACES
def test_only_the_gradients_that_are_needed(device, version):
    tokens = torch.zeros(2, 3, dtype=torch.int64, device=device)
    for needed in ((True, False), (False, True), (False, False)):
        tables = [torch.randn(3, 4, device=device, requires_grad=n) for n in needed]
        out = cukern.embedding(tokens, *tables, version=version)
        assert out.requires_grad == any(needed)
        if any(needed):
            out.sum().backward()
        assert [t.grad is not None for t in tables] == list(needed)


def test_numpy_arrays():
    tokens, weight = numpy.array([[1, 0]]), numpy.ones((2, 3), "f4")
    assert torch.equal(cukern.embedding(tokens, weight, weight), torch.full((1, 2, 3), 2.0))


T, W = torch.zeros(2, 5, dtype=torch.int64), torch.randn(3, 4)


@kernels
@pytest.mark.parametrize(
    "args, says",
    [
        ((T.float(), W), "tokens must be torch.int32 or torch.int64, got torch.float32"),
        ((T, W.long()), "weight must be torch.float16, .* got torch.int64"),
        ((T, W[0]), r"weight must be \(vocabulary, features\), its shape is \(4,\)"),
        ((T, W, torch.randn(5, 3)), r"positions must be \(time, 4\), .* its shape is \(5, 3\)"),
        (
            (T, W, torch.randn(4, 4)),
            r"tokens has shape \(2, 5\): its last dimension must be at most the 4 rows of positions",
        ),
        ((T[0, 0], W, torch.randn(4, 4)), r"tokens has shape \(\): its last dimension must be"),
        ((T, W, torch.randn(5, 4).half()), "positions is torch.float16, weight is torch.float32"),
        ((T.to("meta"), W), "tokens is on meta, weight is on"),
    ],
)
def test_refusals(args, says):
    tokens, *tables = args
    with pytest.raises((TypeError, ValueError), match=says):
        cukern.embedding(tokens if tokens.is_meta else tokens.to(DEVICE), *(t.to(DEVICE) for t in tables))


def test_versions_need_a_gpu():
    with pytest.raises(ValueError, match=r"version 'v1' of cukern\.embedding is a CUDA kernel"):
        cukern.embedding(T, W, version="v1")
