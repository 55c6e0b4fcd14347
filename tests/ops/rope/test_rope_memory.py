"""cukern.rope and rope_ in all memory layouts: the four layouts, views, slices of packed tensors, and which
of these take the fast path."""

import itertools

import pytest
import rope_oracle as oracle
import torch
from helpers import Guarded, kernels, same_bits
from test_rope import AXES, PLACES, PLAIN, VERSIONS, B, H, K, S, assert_right, both, tables

import cukern
from cukern.ops.rope import plan, versions
from cukern.ops.rope import versions as rope_versions


def views(device, dtype):
    """x (2, 5, 3, 8) in several memory layouts."""
    qkv = torch.randn(2, 5, 9, 8, device=device).to(dtype)
    return {
        "a slice of packed heads": qkv[:, :, 3:6],
        "a slice of packed rows": torch.randn(2, 5, 72, device=device)
        .to(dtype)[..., 8:32]
        .unflatten(-1, (3, 8)),
        "transposed heads": qkv.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :3],
        "sequence first": torch.randn(5, 2, 3, 8, device=device).to(dtype).transpose(0, 1),
        "a strided last dimension": torch.randn(2, 5, 3, 16, device=device).to(dtype)[..., ::2],
        "head_dim not last in memory": torch.randn(2, 5, 8, 3, device=device).to(dtype).transpose(2, 3),
        "every second token": torch.randn(2, 10, 3, 8, device=device).to(dtype)[:, ::2],
        "misaligned": torch.randn(2 * 5 * 3 * 8 + 1, device=device).to(dtype)[1:].view(2, 5, 3, 8),
        "heads that lie apart by an odd step": torch.randn(2, 5, 3, 9, device=device).to(dtype)[..., :8],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@PLACES
def test_views_are_not_copied(device, version, dtype):
    for interleaved, (name, x) in itertools.product((False, True), views(device, dtype).items()):
        cos, sin = tables(S, 4, device)
        exact = oracle.rotated(x, cos, sin, PLAIN, 8, interleaved=interleaved)
        y = cukern.rope(x, cos, sin, interleaved=interleaved, version=version)
        assert_right(y, exact, name)
        base = x._base if x._base is not None else x
        before, address = base.clone(), x.data_ptr()
        assert (
            cukern.rope_(x, cos, sin, interleaved=interleaved, version=version) is x
            and x.data_ptr() == address
        )
        assert same_bits(x, y), name
        changed = (
            torch.zeros_like(base, dtype=torch.bool)
            .as_strided(x.shape, x.stride(), x.storage_offset())
            .fill_(True)
            ._base
        )
        assert same_bits(base[~changed], before[~changed]), f"{name}: what is beside the view is left alone"


@kernels
def test_layouts_of_models_take_the_fast_path(device, monkeypatch):
    """16-byte vectors: no copy beforehand, and not v1."""
    monkeypatch.setattr(rope_versions, "_vectors", lambda dtype, table: [16 // dtype.itemsize])
    monkeypatch.setattr(rope_versions, "_v1", None)
    versions.plan.cache_clear()
    for dtype, table in [(d, t) for d in (torch.bfloat16, torch.float32) for t in plan.table_dtypes(d)]:
        qkv, hf = torch.randn(2, 3, 5, 32, device=device).to(dtype), tables(3, 32, device, table)
        for interleaved, (cos, sin) in itertools.product(
            (False, True), (tables(3, 16, device, table), hf, [t[None] for t in hf])
        ):
            options = {"interleaved": interleaved}
            cukern.rope(qkv[:, :, :3], cos, sin, k=qkv[:, :, 3:4], **options)
            cukern.rope_(qkv[:, :, :3], cos, sin, k=qkv[:, :, 3:4], **options)
            cukern.rope(qkv.transpose(1, 2), cos, sin, layout="bhsd", **options)
            cukern.rope(qkv.transpose(0, 1), cos, sin, layout="sbhd", **options)
        cukern.rope(qkv, *tables(3, 8, device, table), rotary_dim=16)
        cukern.rope(qkv, *tables(3, 8, device, table), rotary_dim=16, rotary_offset=16)
        cukern.apply_rotary_pos_emb(qkv, torch.rand(3, 1, 1, 32, device=device), "bshd")
    versions.plan.cache_clear()


@PLACES
def test_q_and_k_with_different_strides(device, version):
    cos, sin = tables(S, 4, device)
    every = list(views(device, torch.bfloat16).values())
    for q, k in zip(every, every[1:] + every[:1], strict=True):
        for x, y in zip((q, k), cukern.rope(q, cos, sin, k=k, version=version), strict=True):
            assert_right(y, oracle.rotated(x, cos, sin, PLAIN, 8))


@PLACES
def test_odd_head_dim_with_even_strides(device, version):
    cos, sin = tables(S, 8, device)
    for x in (torch.randn(B, S, 3, 32, device=device)[..., :17], torch.randn(1, 1, 1, 17, device=device)):
        y = cukern.rope(x, cos, sin, rotary_dim=16, version=version)
        assert_right(y, oracle.rotated(x, cos, sin, PLAIN, 16))
        assert same_bits(cukern.rope_(x, cos, sin, rotary_dim=16, version=version), y)


@PLACES
def test_an_expanded_view_is_read(device, version):
    x, (cos, sin) = torch.randn(1, 1, 3, 8, device=device).expand(2, 5, 3, 8), tables(S, 4, device)
    assert_right(cukern.rope(x, cos, sin, version=version), oracle.rotated(x, cos, sin, PLAIN, 8))


@pytest.mark.parametrize("layout", AXES)
@PLACES
def test_layouts(device, version, layout):
    q, k = torch.randn(B, S, H, 8, device=device), torch.randn(B, S, K, 8, device=device)
    cos, sin = tables(S, 4, device)
    there = [x.permute(AXES[layout]) for x in (q, k)]  # each of the permutations is its own inverse
    for contiguous in (False, True):
        xs = [x.contiguous() if contiguous else x for x in there]
        outs = both(xs[0], cos, sin, device, version, k=xs[1], layout=layout)
        for x, y, z in zip((q, k), outs, xs, strict=True):
            assert_right(y.permute(AXES[layout]), oracle.rotated(x, cos, sin, PLAIN, 8))
            assert version is None or y.stride() == z.stride(), "dense strides are kept"


@PLACES
def test_q_and_k_of_one_packed_tensor_in_place(device, version):
    """Their elements are interleaved in memory, and no element is in both."""
    qkv, (cos, sin) = torch.randn(B, S, H + 2 * K, 8, device=device), tables(S, 4, device)
    before = qkv.clone()
    cukern.rope_(qkv[:, :, :H], cos, sin, k=qkv[:, :, H : H + K], version=version)
    assert_right(qkv[:, :, : H + K], oracle.rotated(before[:, :, : H + K], cos, sin, PLAIN, 8))
    assert same_bits(qkv[:, :, H + K :], before[:, :, H + K :])


@VERSIONS
@kernels
def test_only_the_output_is_written(device, version):
    """In place only the rotated slice, out of place only the output, between guard regions."""
    for dtype, shape in itertools.product(
        (torch.bfloat16, torch.float64), ((1, 1, 1, 2), (1, 3, 5, 24), (2, 7, 3, 40))
    ):
        x = Guarded(shape, dtype, device)
        x.tensor.copy_(torch.randn(shape))
        before, (cos, sin) = x.tensor.clone(), tables(shape[1], 1, device)
        cukern.rope_(x.tensor, cos, sin, rotary_dim=2, version=version)
        x.check(str(shape))
        assert same_bits(x.tensor[..., 2:], before[..., 2:])
        assert cukern.rope(x.tensor, cos, sin, rotary_dim=2, version=version).isfinite().all()
        x.check(str(shape))


@PLACES
def test_empty_tensors(device, version):
    for shape in ((0, S, H, 8), (B, 0, H, 8), (B, S, 0, 8)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = cukern.rope(x, *tables(S, 4, device), version=version)
        assert y.shape == shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == shape
