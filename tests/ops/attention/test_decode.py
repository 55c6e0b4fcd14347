"""The decoding kernels of attention: every option against float64, splits, sequences without a visible key,
the choice and the plan."""

import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits

import cukern
from cukern.bench.verify import poisoned
from cukern.ops.attention import plan
from cukern.ops.attention.reference import Options, by_scores, reference
from cukern.runtime.device import KNOWN, assumed, restricted
from cukern.runtime.launch.kernel import collecting

pytestmark = kernels
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = [  # batch, heads, kv_heads, queries, keys, head_dim, dtype, causal, softcap, splits
    (1, 4, 1, 1, 64, 128, BF16, True, None, 1),
    (2, 8, 2, 1, 331, 128, BF16, True, None, 3),
    (1, 3, 3, 3, 130, 64, HALF, True, 2.0, 2),
    (1, 8, 1, 3, 203, 128, HALF, False, None, 13),  # more splits than warps, of one tile each
    (1, 4, 2, 16, 141, 64, BF16, True, None, 1),  # two tiles of rows
    (1, 8, 1, 16, 77, 128, HALF, True, 3.0, 2),  # 8 tiles of rows
    (2, 5, 1, 5, 70, 72, BF16, True, None, 7),  # splits without a tile
    (1, 1, 1, 1, 3, 8, HALF, False, None, 2),
]
WIDE = [
    (1, 4, 2, 1, 64, 256, BF16, True, None, 1),
    (2, 6, 2, 3, 331, 256, HALF, True, 2.0, 3),
    (1, 20, 1, 1, 90, 136, BF16, False, None, 13),
]
CASES += [(*case[:6], FLOAT, *case[7:]) for case in CASES] + WIDE
CASES += [(1, 12, 1, 1, 90, 64, FLOAT, True, None, 2), (1, 20, 1, 1, 90, 128, FLOAT, False, None, 2)]
both = pytest.mark.parametrize("dtype", [BF16, FLOAT])


@pytest.fixture(autouse=True)
def place():
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        yield


@pytest.fixture
def split(monkeypatch):
    """split(n): calls decode with n splits, whatever their sizes."""

    def choose(splits):
        monkeypatch.setattr(plan, "decodes", lambda *_: splits > 0)
        monkeypatch.setattr(plan, "decode", lambda heads, rows, *_: (-(-rows // 16), splits))

    return choose


def draw(batch, heads, kv_heads, queries, keys, d, dtype):
    shapes = (batch, heads, queries, d), (batch, kv_heads, keys, d), (batch, kv_heads, keys, d)
    return [torch.randn(shape, dtype=dtype, device=DEVICE) for shape in shapes]


def ours(q, k, v, **options):
    """Memory that is not initialized is NaN."""
    with poisoned():
        return cukern.attention(q, k, v, return_lse=True, version="v3", **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_against_float64(case, split):
    *sizes, causal, softcap, splits = case
    inputs, options = draw(*sizes), Options(causal, 0.17, softcap or 0.0)
    split(splits)
    out, lse = ours(*inputs, causal=causal, scale=0.17, softcap=softcap)
    exact, exact_lse = reference(*(x.double() for x in inputs), options)
    peer = by_scores(lambda s: s.softmax(-1), *inputs, options)[0].double()
    allowed = 2 * (peer - exact).abs().max() + 2 * torch.finfo(out.dtype).eps * exact.abs().max()
    assert (out.double() - exact).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=4e-6 if softcap is None else 2e-5)
    assert all(map(same_bits, (out, lse), ours(*inputs, causal=causal, scale=0.17, softcap=softcap))), (
        "two runs give the same bits"
    )


@both
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_without_a_visible_key_and_empty_inputs(splits, dtype, split):
    split(splits)
    out, lse = ours(*draw(1, 2, 1, 9, 5, 64, dtype))
    assert (out[:, :, :4] == 0).all() and lse[:, :, :4].isneginf().all() and lse[:, :, 4:].isfinite().all()
    out, lse = ours(*draw(1, 2, 1, 3, 0, 64, dtype))
    assert (out == 0).all() and lse.isneginf().all()
    assert ours(*draw(1, 2, 1, 0, 70, 64, dtype))[0].numel() == 0


@both
@pytest.mark.parametrize("splits", [1, 3])
def test_large_scores(splits, dtype, split):
    """One key takes all. The rounding of the largest score must not matter."""
    q, k, v = draw(1, 2, 1, 2, 150, 128, dtype)
    split(splits)
    out, _ = ours(q * 100, k * 100, v, causal=False)
    best = (q.double() @ k.double().mT).argmax(-1)
    torch.testing.assert_close(out[0], v[0, 0][best[0]], rtol=2**-7, atol=0)


@both
def test_hidden_keys_do_not_matter(dtype, split):
    q, k, v = draw(1, 2, 1, 5, 100, 64, dtype)
    split(2)
    before = ours(q, k, v)[0]
    k[:, :, 97:], v[:, :, 97:] = 7.0, -7.0
    after = ours(q, k, v)[0]
    assert same_bits(before[:, :, :2], after[:, :, :2]) and not torch.equal(before[:, :, 2], after[:, :, 2])


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_a_part_of_a_cache_is_not_copied(dtype, split):
    """The keys so far of a longer cache, (batch, heads, time, head_dim) or (batch, time, heads, head_dim).
    Behind them is NaN."""
    q, k, v = draw(2, 4, 2, 1, 90, 64, dtype)
    split(2)
    expected = ours(q, k, v)[0]
    cache = torch.full((2, 2, 2, 128, 64), torch.nan, dtype=dtype, device=DEVICE)
    cache[0, ..., :90, :], cache[1, ..., :90, :] = k, v
    other = cache.transpose(2, 3).contiguous().transpose(2, 3)
    for kept in (cache[..., :90, :], other[..., :90, :]):
        assert same_bits(ours(q, *kept)[0], expected)


@pytest.mark.parametrize("dtype, d", [(BF16, 64), (BF16, 256), (FLOAT, 64)])
@pytest.mark.parametrize("splits, causal", [(0, True), (1, True), (3, True), (3, False)])
def test_each_sequence_has_its_own_number_of_keys(splits, causal, dtype, d, split):
    """As calls with one sequence each. 0 splits: torch's operations. Behind the keys is NaN."""
    q, k, v = draw(5, 4, 2, 3, 100, d, dtype)
    lengths = torch.tensor([100, 61, 1, 0, 7], dtype=torch.int32, device=DEVICE)
    options = {"causal": causal, "softcap": 2.0}
    split(splits)
    for i, n in enumerate(lengths.tolist()):
        k[i, :, n:], v[i, :, n:] = torch.nan, torch.nan
    found, lse = ours(q, k, v, key_lengths=lengths, **options)
    for i, n in enumerate(lengths.tolist()):
        one, its_lse = ours(q[i], k[i, :, :n], v[i, :, :n], **options)
        if splits:
            assert same_bits(found[i], one) and same_bits(lse[i], its_lse)
        torch.testing.assert_close(found[i], one, rtol=2**-7, atol=1e-2)
        torch.testing.assert_close(lse[i], its_lse, rtol=0, atol=1e-4)


def test_lengths_with_leading_dimensions_gradients_and_other_dtypes(split):
    split(2)
    q, k, v = (x.double().requires_grad_() for x in draw(6, 2, 1, 2, 20, 8, HALF))
    lengths = torch.arange(15, 21, dtype=torch.int32, device=DEVICE)
    found = cukern.attention(
        *(x.unflatten(0, (2, 3)) for x in (q, k, v)), key_lengths=lengths.view(2, 3)
    ).flatten(0, 1)
    expected = torch.stack(
        [cukern.attention(q[i], k[i, :, :n], v[i, :, :n]) for i, n in enumerate(lengths.tolist())]
    )
    torch.testing.assert_close(found, expected)
    for x, y in zip(
        torch.autograd.grad(found.sum(), (q, k, v)),
        torch.autograd.grad(expected.sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)
    half = [x.detach().half().requires_grad_() for x in (q, k, v)]
    plain = [x.detach() for x in half]
    torch.testing.assert_close(
        cukern.attention(*half, key_lengths=lengths),
        cukern.attention(*plain, key_lengths=lengths),
        rtol=0.01,
        atol=1e-3,
    )
    torch.library.opcheck(torch.ops.cukern._attention_with_lengths.default, (*plain, lengths, True, 0.3, 0.0))


def test_bad_lengths():
    q, k, v = draw(2, 2, 1, 1, 70, 64, HALF)
    lengths = torch.tensor([70, 3], dtype=torch.int32, device=DEVICE)
    with pytest.raises(TypeError, match=r"key_lengths must be torch\.int32, got torch\.int64"):
        cukern.attention(q, k, v, key_lengths=lengths.long())
    with pytest.raises(ValueError, match=r"key_lengths has shape \(1,\), it must be \(2,\)"):
        cukern.attention(q, k, v, key_lengths=lengths[:1])
    with pytest.raises(ValueError, match="version 'v2' has no key_lengths; version None, 'v3' and 'v4' have"):
        cukern.attention(q, k, v, key_lengths=lengths, version="v2")


def test_gradients_follow(split):
    inputs = [x.requires_grad_() for x in draw(1, 2, 1, 3, 70, 64, BF16)]
    found = []
    for splits in (0, 2):  # 0: the other forward
        split(splits)
        found.append(
            torch.autograd.grad(cukern.attention(*inputs, version="v3").float().square().sum(), inputs)
        )
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02 * y.abs().max().item())


def launched(queries, keys, d=64, dtype=BF16, batch=1, **options):
    q, k, v = (x.cpu() for x in draw(batch, 8, 2, queries, keys, d, dtype))
    with cukern.backend("sim"), assumed(KNOWN["h200"]), collecting() as found:
        cukern.attention(q, k, v, **options)
    return {name.partition("<")[0] for name in found}


def test_the_default_decodes_few_queries_of_many_keys():
    assert launched(1, 4000) == launched(16, 500, 128, HALF) == {"attention_decode", "attention_decode_sum"}
    assert launched(1, 128) == {"attention_decode"}
    for other in (launched(17, 4000), launched(1, 96), launched(4, 48, 128), launched(1, 40, 128)):
        assert other == {"attention_v4"}
    assert launched(1, 4000, dtype=FLOAT) == {"attention_decode", "attention_decode_sum"}
    assert launched(1, 96, dtype=FLOAT) == {"attention_v3", "attention_v3_split"}
    assert launched(1, 200, 136) == {"attention_decode", "attention_decode_sum"}
    assert launched(1, 24, 256) == {"attention_v4"}
    assert not any("attention" in name for name in launched(1, 200, 264))


@pytest.mark.parametrize(
    "gpu, warps, d, dtype",
    [
        ("h200", 8, 64, FLOAT), ("a100", 6, 64, FLOAT), ("rtx4090", 4, 64, FLOAT),
        ("h200", 4, 256, BF16), ("a100", 3, 256, BF16), ("rtx4090", 2, 256, BF16),
    ],
)  # fmt: skip
def test_tiles_fit_into_the_shared_memory_of_every_gpu(gpu, warps, d, dtype, split):
    q, k, v = draw(1, 2, 1, 3, 150, d, dtype)
    split(2)
    expected = ours(q, k, v)[0]
    with assumed(KNOWN[gpu]):
        tile = plan.decode_tile(-1, d)
        assert tile.warps == warps and tile.bytes + 128 * warps <= KNOWN[gpu].shared_bytes
        if PLACE == "sim":
            close = {"rtol": 2**-7, "atol": 2**-9} if dtype == BF16 else {}
            torch.testing.assert_close(ours(q, k, v)[0], expected, **close)


def test_the_candidate_can_be_excluded():
    with restricted(without=["decode"]):
        assert launched(1, 4000) == {"attention_v4"}
    with restricted(kernel="fused"):
        assert launched(1, 4000) == {"attention_v4"}
    with restricted(kernel="decode"):
        assert "attention_decode" in launched(1, 4000)


@pytest.mark.parametrize("batch", [1, 3, 4, 16, 64])
@pytest.mark.parametrize("keys", [64, 1000, 1 << 14, 1 << 16])
def test_the_plan_fills_the_gpu(batch, keys):
    """32 + 8 heads, head_dim 128: nearly all thread blocks that an H200 can run, unless the warps would have
    less than one tile each."""
    with assumed(KNOWN["h200"]):
        tiles = plan.key_tiles(keys, 128)
        row_tiles, splits = plan.decode(8 * batch, 4, tiles, -1)
    blocks, slots = 8 * batch * splits, 132
    waves = -(-blocks // slots)
    assert row_tiles == 1 and 1 <= splits <= max(1, tiles // 8)
    assert blocks / (waves * slots) > 0.9 or splits == max(1, tiles // 8)
