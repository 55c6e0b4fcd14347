"""The errors of cukern.rope, rope_ and apply_rotary_pos_emb name the value and the rule."""

import numpy
import pytest
import torch
from helpers import FLOATS, same_bits
from test_rope import PLACES, B, H, K, S, tables

import cukern
from cukern.ops.rope.memory import _disjoint

COS, SIN = tables(S, 4, "cpu")
X = torch.randn(B, S, H, 8)
IDS = torch.zeros(B, S, dtype=torch.int64)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


WRONG_VALUES = {
    "layout": ({"layout": "bsdh"}, r"layout must be one of bshd, bhsd, sbhd, thd, got 'bsdh'"),
    "dimensions": ({"x": X[0]}, r"x must have 4 dimensions in layout 'bshd', its shape is \(5, 3, 8\)"),
    "thd dimensions": ({"layout": "thd", "cu_seqlens": ints(0, 5)},
                       r"x must have 3 dimensions in layout 'thd'"),
    "k's head_dim": ({"k": X[..., :4]},
                     r"k has shape \(2, 5, 3, 4\), x \(2, 5, 3, 8\): only the number of heads may differ"),
    "k's sequence": ({"k": X[:, :4]}, r"k has shape \(2, 4, 3, 8\).*only the number of heads may differ"),
    "an odd rotary_dim": ({"rotary_dim": 5}, r"rotary_dim must be even and positive, it is 5"),
    "no rotary_dim": ({"rotary_dim": 0}, r"rotary_dim must be even and positive, it is 0"),
    "an odd head_dim": ({"x": X[..., :7]}, r"rotary_dim must be even and positive, it is 7"),
    "a large rotary_dim": ({"rotary_dim": 10}, r"rotary_dim is 10, it must not be larger than head_dim, 8"),
    "rotary_offset": ({"rotary_dim": 6, "rotary_offset": 3},
                      r"rotary_offset is 3: with rotary_dim 6 it must be in 0\.\.2"),
    "a negative rotary_offset": ({"rotary_offset": -1}, r"rotary_offset is -1"),
    "the table's width": ({"rotary_dim": 6},
                          r"cos has shape \(5, 4\), it must be \(positions, rotary_dim / 2 = 3\) or"),
    "the table's length": ({"cos": COS[:4], "sin": SIN[:4]},
                           r"the sequence has 5 tokens, the table has only 4 positions"),
    "sin's shape": ({"sin": SIN[:, :2]},
                    r"sin is \(5, 2\) of torch.float32, it must be as cos, \(5, 4\) of torch.float32"),
    "sin's dtype": ({"sin": SIN.double()}, r"sin is .* of torch.float64, it must be as cos"),
    "a table for other tokens": ({"cos": COS.expand(3, S, 4), "sin": None},
                                 r"cos has shape \(3, 5, 4\): with 3 dimensions"),
    "a table for each token, and ids": ({"cos": COS[None], "sin": None, "position_ids": IDS},
                                        r"positions cannot be given too"),
    "ids' shape": ({"position_ids": IDS[:, :3]},
                   r"position_ids has shape \(2, 3\), it must be \(5,\) or \(2, 5\)"),
    "ids and starts": ({"position_ids": IDS, "start_positions": ints(0, 0)},
                       r"position_ids give all positions"),
    "sections without ids": ({"mrope_section": (1, 1, 2)},
                             r"mrope_section needs position_ids of shape \(sections, batch, sequence\)"),
    "sections' sum": (
        {"mrope_section": (1, 1, 1), "position_ids": IDS.expand(3, B, S)},
        r"mrope_section is \(1, 1, 1\).*rotary_dim / 2 = 4"),
    "ids of sections": (
        {"mrope_section": (1, 1, 2), "position_ids": IDS},
        r"position_ids has shape \(2, 5\), with mrope_section .* \(3, 2, 5\)"),
    "starts' shape": ({"start_positions": ints(0, 0, 0)},
                      r"start_positions has shape \(3,\), it must be \(2,\): one for each sequence"),
    "cu_seqlens of another layout": ({"cu_seqlens": ints(0, 5)},
                                     r"cu_seqlens has shape \(2,\): .* the layout 'thd'"),
    "thd without boundaries": ({"x": X[0], "layout": "thd"},
                               r"layout 'thd' needs cu_seqlens or position_ids"),
    "decreasing cu_seqlens": ({"x": X[0], "layout": "thd", "cu_seqlens": ints(0, 4, 2)},
                              r"must not decrease.*got \[0, 4, 2\]"),
    "a position beyond the table": ({"position_ids": IDS + 5},
                                    r"position 5 is outside of the table, which has 5 positions"),
    "a negative position": ({"position_ids": IDS - 1}, r"position -1 is outside of the table"),
    "a start beyond the table": ({"start_positions": ints(0, 3)}, r"position 5 is outside of the table"),
    "a sequence beyond the table": (
        {"x": X[0], "cos": COS[:3], "sin": SIN[:3], "layout": "thd", "cu_seqlens": ints(0, 4)},
        r"position 3 is outside of the table"),
    "a table with a gradient": ({"cos": COS.clone().requires_grad_()},
                                r"cos requires grad, but rope computes no gradient.*cos\.detach"),
    "an unknown version": ({"version": "v99"}, r"cukern\.rope has no version 'v99'; it has v1, v2"),
    "a start below 0": (
        {"x": X[0], "layout": "thd", "cu_seqlens": ints(0, 2, 5), "start_positions": ints(-1, 0)},
        r"position -1 is outside of the table"),
    "a start that overflows": ({"start_positions": torch.tensor([0, -(2**63)])},
                               r"position -9223372036854775808 is outside of the table"),
    "a version on the CPU": ({"version": "v2"},
                             r"version 'v2' of cukern\.rope is a CUDA kernel, the tensor is on cpu"),
    "another device": ({"cos": COS.to("meta")}, r"cos is on meta, x is on cpu: they must be on one device"),
    "x's negative bit": ({"x": torch._neg_view(X)}, r"x has the negative bit.*x\.resolve_neg\(\)"),
    "cos' negative bit": ({"cos": torch._neg_view(COS)}, r"cos has the negative bit.*cos\.resolve_neg\(\)"),
}  # fmt: skip
WRONG_TYPES = {
    "x's dtype": ({"x": X.int()}, r"x must be torch.float16, .*, got torch.int32"),
    "k's dtype": ({"k": X.half()}, r"k is torch.float16, x is torch.float32: they must have one dtype"),
    "cos' dtype": (
        {"cos": COS.half(), "sin": SIN.half()},
        r"cos must be torch.float32 or torch.float64, got torch.float16",
    ),
    "ids' dtype": (
        {"position_ids": IDS.float()},
        r"position_ids must be torch.int32 or torch.int64, got torch.float32",
    ),
}
FREQS = torch.rand(S, 1, 1, 8)


def test_numbers_and_flags_of_numpy_and_a_scale_that_float64_holds():
    expected = cukern.rope(X, COS, SIN, rotary_dim=8, scale=0.5, interleaved=True)
    assert same_bits(
        cukern.rope(
            X, COS, SIN, rotary_dim=numpy.int64(8), scale=numpy.float32(0.5), interleaved=numpy.True_
        ),
        expected,
    )
    assert cukern.rope(X.double(), COS, SIN, scale=1e39).isfinite().all()


@pytest.mark.parametrize("function", [cukern.rope, cukern.rope_])
def test_meta_tensors_have_shapes_and_no_values(function):
    x, cos, sin, ids, starts, bounds = (t.to("meta") for t in (X, COS, SIN, IDS, ints(0, 0), ints(0, 5)))
    for options in ({}, {"k": x[:, :, :K]}, {"position_ids": ids}, {"start_positions": starts},
                    {"position_ids": ids.expand(3, B, S), "mrope_section": (1, 1, 2)}):  # fmt: skip
        out = function(x, cos, sin, **options)
        assert (out[0] if "k" in options else out).shape == x.shape
    assert function(x[0], cos, sin, cu_seqlens=bounds, layout="thd").is_meta
    with pytest.raises(ValueError, match="position_ids is on cpu, x is on meta"):
        function(x, cos, sin, position_ids=IDS)


@pytest.mark.parametrize("function", [cukern.rope, cukern.rope_])
@pytest.mark.parametrize("case", [*WRONG_VALUES, *WRONG_TYPES])
def test_wrong_arguments(function, case):
    wrong, message = (WRONG_VALUES | WRONG_TYPES)[case]
    with pytest.raises(ValueError if case in WRONG_VALUES else TypeError, match=message):
        function(**{"x": X, "cos": COS, "sin": SIN, **wrong})


@PLACES
def test_in_place_on_a_leaf_that_requires_grad(device, version):
    x, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=True), tables(S, 4, device)
    for q, k, name in ((x, None, "x"), (x * 1, x, "k")):
        with pytest.raises(
            ValueError, match=f"{name} is a leaf that requires grad: it cannot be rotated in place"
        ):
            cukern.rope_(q, cos, sin, k=k, version=version)


def refuse_in_place(message, x, cos, sin, watched, **options):
    """rope_ raises and has not written to `watched`."""
    before = watched.detach().clone()
    with pytest.raises(ValueError, match=message):
        cukern.rope_(x, cos, sin, **options)
    assert same_bits(watched.detach(), before)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "grad"])
@PLACES
def test_in_place_on_shared_memory(device, version, grad):
    leaf, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=grad), tables(S, 4, device)
    x = leaf * 1
    for expanded in (
        x[:1].expand(3, S, H, 8),
        x[:, :, :1].expand(B, S, 4, 8),
        x.view(-1).as_strided((2, 3, 2, 8), (48, 16, 4, 1)),
    ):
        for name, q, k in (
            ("x", expanded, None),
            ("k", torch.randn(expanded.shape, device=device).requires_grad_(grad) * 1, expanded),
        ):
            message = rf"{name} has shape .* strides \(.*elements share memory, so it cannot be in place"
            refuse_in_place(message, q, cos, sin, q, k=k, version=version)
    for q, k in ((x, x), (x[:, :, :2], x[:, :, 1:]), (x[:, :, :2], x[:, :, 1:2]), (x[..., :6], x[..., 2:])):
        half = q.shape[3] // 2
        refuse_in_place(
            "x and k share memory: in place", q, cos[:, :half], sin[:, :half], x, k=k, version=version
        )


@PLACES
def test_in_place_overlapping_other_inputs(device, version):
    """Also inputs of another dtype, and inputs that are never read."""
    n, (cos, sin) = B * S * H * 8, tables(S, 4, device)
    memory = torch.cat((torch.randn(2 * n, device=device), cos.flatten()))
    x, k, behind = memory[:n].view(B, S, H, 8), memory[n : 2 * n].view(B, S, H, 8), memory[2 * n :].view(S, 4)
    for name in ("x", "k"):
        inside = (x if name == "x" else k).flatten()
        ids, starts = (inside[i:j].view(torch.int32).fill_(0) for i, j in ((40, 40 + S), (1, 3)))
        overlapping = {
            "cos": inside[7:27].view(S, 4),
            "sin": inside[n - 20 :].view(S, 4),
            "position_ids": ids,
            "start_positions": starts,
        }
        for other, value in overlapping.items():
            options = {"cos": cos, "sin": sin, "version": version, "k": k, other: value}
            refuse_in_place(
                f"{other} lies in the memory of {name}, which is written in place",
                x,
                watched=memory,
                **options,
            )
    expected = cukern.rope(x, cos, sin, version=version)
    assert same_bits(cukern.rope_(x, behind, sin, k=k, version=version)[0], expected)


@PLACES
def test_in_place_on_views_that_autograd_does_not_let_write(device, version):
    """Autograd itself raises only after the write."""
    leaf, (cos, sin) = torch.randn(B, S, H, 8, device=device, requires_grad=True), tables(S, 4, device)
    y, x = leaf * 1, leaf * 2
    with torch.no_grad():
        hidden = y[:, :, :1]
    views = {
        "a view of a leaf": leaf[:, :, :1],
        "a view that autograd": y.split(1, 2)[0],
        "a view that autograd does not allow": hidden,
    }
    for what, k in views.items():
        refuse_in_place(f"k is {what}", x[:, :, 1:], cos, sin, x, k=k, version=version)


def test_disjoint_recognizes_interleaved_slices():
    """Compared with the addresses, for all pairs of slices of a small tensor."""
    base = torch.arange(2 * 3 * 5 * 2).view(2, 3, 5, 2)
    slices = [base[:, :, i:j] for i in range(5) for j in range(i + 1, 6)]
    for x in slices:
        for k in slices:
            apart = not set(x.flatten().tolist()) & set(k.flatten().tolist())
            assert (
                _disjoint(k.data_ptr() - x.data_ptr(), 8, x.shape, x.stride(), k.shape, k.stride()) == apart
            )


def test_numpy_arrays_come_in_by_dlpack():
    x, k, cos, sin, ids = (t.numpy() for t in (X, X[:, :, :K], COS, SIN, IDS + 2))
    y, z = cukern.rope(x, cos, sin, k=k, position_ids=ids)
    expected = cukern.rope(X, COS, SIN, k=X[:, :, :K], position_ids=IDS + 2)
    assert same_bits(y, expected[0]) and same_bits(z, expected[1])
    mine = X.numpy().copy()
    cukern.rope_(mine, cos, sin)
    assert numpy.array_equal(mine, cukern.rope(X, COS, SIN).numpy())


# ---- TransformerEngine's form

TE_WRONG = {
    "format": ({"tensor_format": "bhsd"}, r"tensor_format must be one of sbhd, bshd, thd, got 'bhsd'"),
    "t's dimensions": (
        {"tensor_format": "thd"},
        r"t must have 3 dimensions in 'thd', its shape is \(5, 2, 3, 8\)",
    ),
    "freqs' dimensions": (
        {"freqs": FREQS[:, 0]},
        r"freqs has shape \(5, 1, 8\), it must be \(positions, 1, 1, at most head_dim = 8\)",
    ),
    "wide freqs": ({"freqs": torch.rand(S, 1, 1, 10)}, r"freqs has shape \(5, 1, 1, 10\)"),
    "odd freqs": ({"freqs": FREQS[..., :5]}, r"rotary_dim must be even and positive, it is 5"),
    "short freqs": ({"freqs": FREQS[:4]}, r"the sequence has 5 tokens, the table has only 4 positions"),
    "freqs with a gradient": (
        {"freqs": FREQS.clone().requires_grad_()},
        r"freqs requires grad, but apply_rotary_pos_emb computes no",
    ),
    "cp_rank": (
        {"cp_size": 2, "cp_rank": 2},
        r"cp_rank is 2, it must be in 0\.\.cp_size - 1, and cp_size is 2",
    ),
    "an odd part": ({"cp_size": 2}, r"with cp_size 2 the sequence here, 5, must be even"),
    "freqs too short for all": ({"t": torch.randn(4, 2, 3, 8), "cp_size": 2}, r"and 2 times it at most 5"),
    "thd without boundaries": ({"t": X[0], "tensor_format": "thd"}, r"'thd' needs cu_seqlens"),
    "a start beyond freqs": ({"start_positions": ints(0, 1)}, r"position 5 is outside of the table"),
}


@pytest.mark.parametrize("case", TE_WRONG)
def test_te_values(case):
    wrong, message = TE_WRONG[case]
    with pytest.raises(ValueError, match=message):
        cukern.apply_rotary_pos_emb(**{"t": X.transpose(0, 1), "freqs": FREQS, **wrong})


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn], ids=str)
def test_te_types(dtype):
    with pytest.raises(TypeError, match=f"t must be .*, got {dtype}"):
        cukern.apply_rotary_pos_emb(X.to(dtype), FREQS)
    assert all(cukern.apply_rotary_pos_emb(X.to(d), FREQS, "bshd").dtype == d for d in FLOATS)
