"""cukern.rope's positions: ids, packed sequences, several sections; and apply_rotary_pos_emb, against
TransformerEngine's formula."""

import itertools

import pytest
import rope_oracle as oracle
import torch
from helpers import kernels, same_bits
from test_rope import PLACES, VERSIONS, B, H, S, assert_right, both, tables

import cukern
from cukern.ops.rope import autograd, gather, reference
from cukern.ops.rope.plan import Inputs, Options

INTEGERS = pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
nan = float("nan")


@INTEGERS
@PLACES
def test_position_ids(device, version, integers):
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device), tables(50, 4, device)
    for shape in ((S,), (1, S), (B, S)):
        ids = torch.randint(50, shape, dtype=integers, device=device)
        y = both(x, cos, sin, device, version, position_ids=ids)
        assert_right(y, oracle.rotated(x, cos, sin, ids.expand(B, S).tolist(), 8), str(shape))
        z = cukern.rope(x.transpose(0, 1), cos, sin, position_ids=ids, layout="sbhd", version=version)
        assert same_bits(z.transpose(0, 1), y)


@INTEGERS
@PLACES
def test_start_positions(device, version, integers):
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device), tables(50, 4, device)
    starts = [3, 45]
    y = both(
        x, cos, sin, device, version, start_positions=torch.tensor(starts, dtype=integers, device=device)
    )
    assert_right(y, oracle.rotated(x, cos, sin, oracle.te_positions("bshd", x.shape, starts), 8))


@pytest.mark.parametrize("bounds", [[0, 4, 4, 7, 9], [0, 9], [0], [0, 0, 9, 9], [2, 5, 7]], ids=str)
@INTEGERS
@PLACES
def test_packed_sequences(device, version, integers, bounds):
    """Positions restart in each sequence, also in empty ones. Tokens outside all sequences are copied, not
    multiplied by 1."""
    x, (cos, sin) = torch.randn(9, H, 8, device=device), tables(12, 4, device)
    positions = oracle.te_positions("thd", x.shape, None, bounds)
    outside = [t for t, p in enumerate(positions[0]) if p == oracle.COPY]
    cu_seqlens = torch.tensor(bounds, dtype=integers, device=device)
    y = both(x, cos, sin, device, version, cu_seqlens=cu_seqlens, layout="thd", k=x[:, :1] * 2, scale=3.0)
    for out, source in zip(y, (x, x[:, :1] * 2), strict=True):
        assert_right(out, oracle.rotated(source[None], cos, sin, positions, 8, scale=3.0)[0])
    x[outside] = nan
    assert same_bits(
        cukern.rope(x, cos, sin, cu_seqlens=cu_seqlens, layout="thd", version=version)[outside], x[outside]
    )


@PLACES
def test_packed_sequences_with_starts_or_ids(device, version):
    x, (cos, sin) = torch.randn(9, H, 8, device=device), tables(12, 4, device)
    bounds, starts = [0, 4, 4, 9], [8, 0, 3]
    positions = oracle.te_positions("thd", x.shape, starts, bounds)
    exact = oracle.rotated(x[None], cos, sin, positions, 8)[0]
    tensors = {
        "cu_seqlens": torch.tensor(bounds, device=device),
        "start_positions": torch.tensor(starts, dtype=torch.int32, device=device),
    }
    assert_right(cukern.rope(x, cos, sin, layout="thd", version=version, **tensors), exact)
    ids = torch.tensor(positions[0], device=device)
    assert_right(cukern.rope(x, cos, sin, layout="thd", version=version, position_ids=ids), exact)


@pytest.mark.parametrize("section", [(1, 2, 1), (2, 0, 2), (3, 1)], ids=str)
@PLACES
def test_sections(device, version, section):
    """Multimodal rotary: time, height and width each have their own pairs."""
    ids = torch.randint(20, (len(section), B, S), device=device)
    which = [i for i, n in enumerate(section) for _ in range(n)]
    positions = [[[ids[w, b, s].item() for w in which] for s in range(S)] for b in range(B)]
    for interleaved, width in itertools.product((False, True), (4, 8)):
        x, (cos, sin) = torch.randn(B, S, H, 10, device=device), tables(20, width, device)
        options = {"interleaved": interleaved, "rotary_dim": 8, "rotary_offset": 1}
        y = both(x, cos, sin, device, version, position_ids=ids, mrope_section=list(section), **options)
        assert_right(y, oracle.rotated(x, cos, sin, positions, 8, interleaved=interleaved, offset=1))


@VERSIONS
@kernels
def test_positions_beyond_the_table_give_nan(device, version):
    """On a GPU the values are not checked beforehand. The simulator checks that nothing is read out of
    bounds."""
    x, (cos, sin) = torch.randn(2, 4, 2, 8, device=device), tables(5, 4, device)
    ids = torch.tensor([[0, 5, 4, -1], [2**31, 3, -(2**40), 1]], device=device)
    positions = gather._positions(cos, ids, None, None, 2, 4, 1, 0)
    beyond = (ids < 0) | (ids >= 5)
    for rotary_dim, offset in ((8, 0), (4, 4), (6, 1)):
        table = [t[:, : rotary_dim // 2].contiguous() for t in (cos, sin)]
        y = autograd.rotate(
            x,
            None,
            *table,
            positions,
            Options(rotary_dim, offset, False, False, 1.0, "bshd", version=version),
        )
        inside = range(offset, offset + rotary_dim)
        assert y[beyond][..., inside].isnan().all() and y[~beyond].isfinite().all()
        rest = [i for i in range(8) if i not in inside]
        assert same_bits(y[..., rest], x[..., rest])
    # with a negative start, the first positions may be outside the table, or equal the mark of tokens outside
    # all sequences
    starts = torch.tensor([-1, -(2**63), 2**63 - 1, 2], device=device)
    bounds = torch.tensor([0, 2, 3, 5, 7], device=device)
    inputs = Inputs(x.flatten(0, 1), None, cos, sin, None, bounds, starts)
    options = Options(8, 0, False, False, 1.0, "thd", version=version)
    y = autograd.rotate(inputs.x, None, *gather.rows(inputs, options), options)
    theirs = reference.rope(inputs, options)
    for out in (y, theirs):
        assert (
            out[[0, 2, 3, 4]].isnan().all()
            and out[[1, 5, 6]].isfinite().all()
            and same_bits(out[7], inputs.x[7])
        )
    assert_right(y[[1, 5, 6]], theirs[[1, 5, 6]].double())
    sectioned = gather._positions(cos, ids.clamp(max=5), None, None, 2, 4, 1, 0)
    tables_ = gather._sections(cos, sin, sectioned, 1, 4, 4, False, 2, 4)
    assert bool(
        (tables_[0][0, :, :2].isnan() == beyond[0][:, None]).all()
        and (tables_[0][0, :, 2:].isnan() == beyond[1][:, None]).all()
    )


@pytest.mark.parametrize("bounds", [[0, 7, 3, 9], [5, 4, 3, 2], [0, -3, 100, 4], [9, 0]], ids=str)
@kernels
def test_decreasing_cu_seqlens_read_nothing_out_of_bounds(device, bounds):
    x, (cos, sin) = torch.randn(9, 2, 8, device=device), tables(5, 4, device)
    positions = gather._positions(cos, None, torch.tensor(bounds, device=device), None, 1, 9, 1, 0)
    y = autograd.rotate(x[None], None, cos, sin, positions, Options(8, 0, False, False, 1.0, "bshd"))
    assert y.shape == (1, 9, 2, 8)


# ---- TransformerEngine's form

FREQS = pytest.mark.parametrize("same", [True, False], ids=["pairs alike", "each element its own angle"])


def freqs_of(rows, width, interleaved, same, device):
    """Angles of up to thousands of radians, as from large positions."""
    if not same:
        return torch.rand(rows, 1, 1, width, device=device) * 5000
    half = torch.rand(rows, 1, 1, width // 2, device=device) * 5000
    return half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)


def bshd(t, form):
    return t[None] if form == "thd" else t.transpose(0, 1) if form == "sbhd" else t


def check_te(
    t, form, freqs, interleaved, version, device, starts=None, cu_seqlens=None, cp_size=1, cp_rank=0
):
    """Result and gradient."""
    options = {"cp_size": cp_size, "cp_rank": cp_rank, "interleaved": interleaved}
    for name, values in (("start_positions", starts), ("cu_seqlens", cu_seqlens)):
        if values is not None:
            options[name] = torch.tensor(values, dtype=torch.int32, device=device)
    t = t.detach().requires_grad_()
    y = cukern.apply_rotary_pos_emb(t, freqs, tensor_format=form, version=version, **options)
    assert y.is_contiguous() or version is None
    dout = torch.randn_like(y)
    (dt,) = torch.autograd.grad(y, t, dout)
    positions = oracle.te_positions(form, t.shape, starts, cu_seqlens, cp_size, cp_rank)
    angles = freqs[:, 0, 0]
    assert_right(bshd(y.detach(), form), oracle.te(bshd(t.detach(), form), angles, positions, interleaved))
    assert_right(bshd(dt, form), oracle.te(bshd(dout, form), angles, positions, interleaved, grad=True))


@FREQS
@PLACES
def test_te_formats(device, version, same):
    for form, interleaved, dtype in itertools.product(
        ("sbhd", "bshd"), (False, True), (torch.bfloat16, torch.float32)
    ):
        for starts in (None, [0, 7]):
            t = torch.randn(4, 2, 3, 10, device=device).to(dtype)
            freqs = freqs_of(12, 8, interleaved, same, device)
            t = t if form == "sbhd" else t.transpose(0, 1)
            check_te(t, form, freqs, interleaved, version, device, starts)
            check_te(
                t.transpose(0, 1).contiguous().transpose(0, 1),
                form,
                freqs,
                interleaved,
                version,
                device,
                starts,
            )
            check_te(
                t.transpose(2, 3).contiguous().transpose(2, 3),
                form,
                freqs,
                interleaved,
                version,
                device,
                starts,
            )


@PLACES
def test_te_packed(device, version):
    for interleaved, bounds, starts in itertools.product(
        (False, True), ([0, 4, 4, 9], [0, 3, 5, 7]), (None, [1, 0, 2])
    ):
        t, freqs = torch.randn(9, 3, 10, device=device), freqs_of(12, 8, interleaved, False, device)
        check_te(t, "thd", freqs, interleaved, version, device, starts, bounds)
        check_te(
            t.transpose(1, 2).contiguous().transpose(1, 2),
            "thd",
            freqs,
            interleaved,
            version,
            device,
            starts,
            bounds,
        )


@PLACES
def test_te_context_parallel(device, version):
    """Each GPU has the positions of its two chunks. Together they are the whole sequence."""
    for cp_size in (2, 4):
        for cp_rank in range(cp_size):
            freqs = freqs_of(4 * cp_size, 8, False, True, device)
            check_te(
                torch.randn(4, 2, 2, 8, device=device),
                "sbhd",
                freqs,
                False,
                version,
                device,
                cp_size=cp_size,
                cp_rank=cp_rank,
            )
            bounds = [0, 4 * cp_size, 6 * cp_size]
            check_te(
                torch.randn(7, 2, 8, device=device),
                "thd",
                freqs,
                True,
                version,
                device,
                None,
                bounds,
                cp_size,
                cp_rank,
            )
    whole = sorted(
        p for rank in range(4) for p in oracle.te_positions("sbhd", (4, 1), cp_size=4, cp_rank=rank)[0]
    )
    assert whole == list(range(16)), "the oracle itself"


@PLACES
def test_te_gradient_that_is_one_number(device, version):
    """The gradient of a sum is an expanded tensor."""
    t = torch.randn(4, 2, 3, 8, device=device, requires_grad=True)
    freqs = freqs_of(4, 8, False, True, device)
    (dt,) = torch.autograd.grad(cukern.apply_rotary_pos_emb(t, freqs, version=version).sum(), t)
    ones = torch.ones(2, 4, 3, 8, device=device)
    assert_right(
        dt.transpose(0, 1),
        oracle.te(ones, freqs[:, 0, 0], oracle.te_positions("sbhd", t.shape), False, grad=True),
    )
