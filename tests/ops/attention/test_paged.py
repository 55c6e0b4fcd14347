"""attention with block_table: keys and values in pages, against float64 and the cache without pages."""

import math

import pytest
import torch
from helpers import DEVICE, PLACE, kernels, same_bits

import cukern
from cukern.bench.verify import poisoned
from cukern.ops.attention import plan
from cukern.runtime.device import KNOWN, assumed
from cukern.runtime.launch.kernel import collecting

pytestmark = kernels
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
CASES = [  # heads, kv_heads, queries, head_dim, page size, lengths, dtype, options
    (4, 2, 1, 64, 16, (71, 144, 0, 1), BF16, {}),
    (4, 1, 3, 128, 16, (97, 64, 2), HALF, {"num_splits": 3}),
    (2, 2, 2, 72, 32, (70, 96), BF16, {"causal": False, "num_splits": 2}),
    (6, 2, 1, 64, 256, (255, 257), HALF, {"softcap": 1.5, "num_splits": 1}),
    (8, 1, 16, 64, 32, (101, 33), BF16, {"sink": 0.5}),  # eight tiles of rows
    (2, 1, 1, 128, 16, (90, 5, 112), BF16, {"window": 20}),
    (4, 2, 5, 64, 32, (131, 160, 3, 45), HALF, {"window": 37, "num_splits": 2, "sink": -1.0}),
    (2, 1, 3, 64, 16, (129, 64), BF16, {"window": 1}),
    (2, 1, 3, 128, 256, (256, 7), HALF, {"window": 64, "softcap": 2.0}),
    (4, 2, 2, 64, 16, (100, 64), FLOAT, {"window": 9}),
    (4, 2, 2, 256, 16, (100, 64), BF16, {"window": 30, "softcap": 1.5, "num_splits": 2}),
    (4, 1, 3, 128, 16, (97, 64, 2), FLOAT, {"num_splits": 3, "sink": 0.5}),
    (8, 1, 2, 72, 32, (101, 33), FLOAT, {"window": 40, "softcap": 1.5}),
    (
        4,
        2,
        17,
        64,
        16,
        (70, 20),
        BF16,
        {"window": 9, "sink": 0.5},
    ),  # torch's operations: more than 16 queries
    (2, 1, 1, 20, 16, (30, 1), torch.float64, {"softcap": 2.0}),
]


@pytest.fixture(autouse=True)
def place():
    with cukern.backend("sim" if PLACE == "sim" else "gpu"):
        yield


def draw(heads, kv_heads, queries, d, size, lengths, dtype=BF16):
    """q, k, v, block_table and key_lengths. Pages are in random order, all sequences share their first page,
    and what is behind a length is NaN, or a page number outside of the pool."""
    width = -(-max(lengths) // size)
    q = torch.randn(len(lengths), heads, queries, d, dtype=dtype, device=DEVICE)
    k, v = (torch.full((len(lengths) * width + 2, size, kv_heads, d), math.nan, dtype=dtype, device=DEVICE)
            for _ in range(2))  # fmt: skip
    table = torch.full((len(lengths), width), 1 << 30, dtype=torch.int32)
    order = torch.randperm(len(k)).tolist()
    for i, length in enumerate(lengths):
        for first in range(0, length, size):
            page = order.pop() if first or i == 0 or not lengths[0] else int(table[0, 0])
            table[i, first // size] = page
            filled = max(min(size, length - first), 0 if first else min(size, lengths[0]))
            k[page, :filled], v[page, :filled] = torch.randn(2, filled, kv_heads, d, device=DEVICE).to(dtype)
    return q, k, v, table.to(DEVICE), torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def exact(q, k, v, table, lengths, causal=True, softcap=None, window=None, sink=None, num_splits=None):
    """In the dtype of q, one query at a time."""
    out = torch.zeros_like(q)
    lse = torch.full(q.shape[:3], -math.inf, dtype=q.dtype, device=q.device)
    batch, heads, queries, d = q.shape
    for b in range(batch):
        n = int(lengths[b])
        places = [(int(table[b, i // k.shape[1]]), i % k.shape[1]) for i in range(n)]
        for h in range(heads):
            head = h // (heads // k.shape[2])
            keys, values = ([x[page, row, head] for page, row in places] for x in (k, v))
            for i in range(queries):
                end = min(n, n - queries + i + 1) if causal else n
                begin = max(0, end - window) if window else 0
                if end <= begin:
                    continue
                scores = torch.stack(keys[begin:end]) @ q[b, h, i] / math.sqrt(d)
                scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
                all_scores = scores if sink is None else torch.cat((scores, scores.new_tensor([sink])))
                lse[b, h, i] = all_scores.logsumexp(0)
                out[b, h, i] = all_scores.softmax(0)[: end - begin] @ torch.stack(values[begin:end])
    return out, lse


def dense(q, k, v, table, lengths):
    """q, and the keys and values of all pages in their order."""
    pages = table.long().clamp(max=len(k) - 1)
    return q, *(x[pages].flatten(1, 2).transpose(1, 2) for x in (k, v))


def ours(q, k, v, table, lengths, **options):
    with poisoned():
        return cukern.attention(q, k, v, block_table=table, key_lengths=lengths, return_lse=True, **options)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_option_against_float64(case):
    *sizes, options = case
    inputs = draw(*sizes)
    q, k, v, table, lengths = inputs
    by_kernel = q.dtype != torch.float64 and q.shape[2] <= 16
    assert any("attention_decode" in name for name in launched(inputs, **options)) == by_kernel
    out, lse = ours(*inputs, **options)
    expected, expected_lse = exact(q.double(), k.double(), v.double(), table, lengths, **options)
    if options.get("sink") is not None:  # without a visible key the sink is all
        expected_lse = expected_lse.masked_fill(expected_lse == -math.inf, options["sink"])
    # as in test_decode.py: twice torch's error, and a rounding
    peer = exact(q, k, v, table, lengths, **options)[0].double()
    allowed = 2 * (peer - expected).abs().max() + 2 * torch.finfo(out.dtype).eps * expected.abs().max()
    assert (out.double() - expected).abs().max() <= allowed
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-5)
    assert all(map(same_bits, (out, lse), ours(*inputs, **options))), "two runs give the same bits"


@pytest.mark.parametrize("size", [16, 32, 256])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("splits, dtype", [(1, HALF), (2, HALF), (None, HALF), (2, FLOAT)])
def test_the_bits_are_those_of_the_cache_without_pages(size, d, splits, dtype):
    inputs = draw(4, 2, 2, d, size, (150, 129), dtype)
    for options in ({}, {"causal": False, "softcap": 2.0}):
        found = ours(*inputs, num_splits=splits, **options)
        expected = cukern.attention(
            *dense(*inputs), key_lengths=inputs[4], return_lse=True, num_splits=splits, **options
        )
        assert all(map(same_bits, found, expected))


def test_other_layouts_leading_dimensions_and_the_versions():
    q, k, v, table, lengths = inputs = draw(4, 2, 2, 64, 16, (75, 141, 66, 3), HALF)
    expected = ours(*inputs)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    wide = torch.nn.functional.pad(table, (0, 3))[:, :-3]  # rows of the table with a stride
    for version in (None, "v3"):
        assert all(map(same_bits, ours(q, *heads_first, wide, lengths, version=version), expected))
    with cukern.use("attention", "v3"):
        assert all(map(same_bits, ours(*inputs), expected))
    found = ours(q.unflatten(0, (2, 2)), k, v, table.view(2, 2, -1), lengths.view(2, 2))
    assert same_bits(found[0].flatten(0, 1), expected[0])
    found = ours(q[1], k, v, table[1], lengths[1])
    torch.testing.assert_close(found[0], expected[0][1], rtol=2**-7, atol=1e-3)
    many = torch.cat((table, table.new_full((4, 40), 1 << 30)), 1)  # more pages than are used
    torch.testing.assert_close(ours(q, k, v, many, lengths)[0], expected[0], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float64, BF16])
@pytest.mark.parametrize("options", [{}, {"window": 7}])
def test_gradients_are_those_of_torch(options, dtype):
    q, k, v, table, lengths = draw(4, 2, 2, 8, 16, (17, 31), dtype)
    k, v = k.nan_to_num(), v.nan_to_num()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = torch.autograd.grad(ours(*inputs, table, lengths, **options)[0].square().sum(), inputs)
    exactly = exact(*(x.double() for x in inputs), table, lengths, **options)[0]
    expected = torch.autograd.grad(exactly.square().sum(), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.02, atol=(0.02 if dtype == BF16 else 1e-9) * y.abs().max())


def test_the_raw_op_and_torch_compile():
    q, k, v, table, lengths = inputs = draw(4, 2, 1, 64, 16, (75, 130), HALF)
    args = q, k.transpose(1, 2), v.transpose(1, 2), table, lengths, True, 0.125, 0.0, False, 33, 2
    torch.library.opcheck(torch.ops.cukern._attention_paged.default, args)
    graphs = []
    from torch._dynamo.backends.debugging import aot_eager

    call = torch.compile(
        lambda *x: ours_plain(*x, window=33), fullgraph=True,
        backend=lambda graph, examples: graphs.append(graph) or aot_eager(graph, examples),
    )  # fmt: skip
    for lengths in ((75, 180), (3, 100, 161)):
        inputs = draw(4, 2, 1, 64, 16, lengths, HALF)
        for x, dims in zip(inputs, (0, 0, 0, (0, 1), 0), strict=True):
            torch._dynamo.mark_dynamic(x, dims)
        assert same_bits(call(*inputs), ours_plain(*inputs, window=33))
    assert len(graphs) == 1


def ours_plain(q, k, v, table, lengths, **options):
    return cukern.attention(q, k, v, block_table=table, key_lengths=lengths, **options)


def launched(inputs, **options):
    with cukern.backend("sim"), assumed(KNOWN["h200"]), collecting() as found:
        ours_plain(*(x.cpu() for x in inputs), **options)
    return set(found)


def test_which_kernels_run_and_num_splits(monkeypatch):
    inputs = draw(4, 2, 1, 128, 16, (4000, 3), HALF)
    paged = "attention_decode<__half, 128, 8, 3, 1, false, const int*, int, int>"
    assert launched(inputs) == {paged, "attention_decode_sum<__half, 128, 4>"}
    assert launched(inputs, num_splits=1) == {paged}
    seen = []
    monkeypatch.setattr(plan, "decode", lambda *args: seen.append(args) or (1, 1))
    launched(inputs, window=100)
    assert seen[0][2] == plan.key_tiles(101, 128), "only the keys in the window count"
    q, k, v = dense(*inputs)
    with cukern.backend("sim"), assumed(KNOWN["h200"]), collecting() as found:
        cukern.attention(q.cpu(), k.cpu(), v.cpu(), num_splits=10**9)
    assert "attention_decode_sum<__half, 128, 4>" in found


@pytest.mark.skipif(PLACE != "sim", reason="on a GPU page numbers are not checked")
@pytest.mark.parametrize("page", [1 << 20, -1])
def test_the_simulator_finds_a_page_outside_of_the_pool(page):
    inputs = draw(2, 1, 1, 64, 16, (100, 128), HALF)
    inputs[3][1, 5] = page
    with pytest.raises(cukern.sim.OutOfBounds):
        ours(*inputs)


def test_bad_input():
    q, k, v, table, lengths = draw(4, 2, 1, 64, 16, (75, 80), HALF)

    def fails(error, message, k=k, v=v, table=table, lengths=lengths, **options):
        with pytest.raises(error, match=message):
            cukern.attention(q, k, v, block_table=table, key_lengths=lengths, **options)

    fails(TypeError, r"block_table must be torch\.int32, got torch\.int64", table=table.long())
    fails(ValueError, r"block_table has shape \(1, 5\), it must be \(2, 5\)", table=table[:1])
    fails(ValueError, r"block_table must be \(\.\.\., pages\)", table=table[0, 0])
    fails(ValueError, "block_table is on meta", table=table.to("meta"))
    fails(ValueError, "block_table needs key_lengths", lengths=None)
    fails(ValueError, "power of two from 16 to 65536, got .* and 8", k=k[:, :8], v=v[:, :8])
    fails(ValueError, "power of two from 16 to 65536, got .* and 24", k=k.new_empty(3, 24, 2, 64),
          v=k.new_empty(3, 24, 2, 64))  # fmt: skip
    fails(ValueError, r"\(pages, page_size, kv_heads, D\)", k=k[0])
    fails(ValueError, "q has 4 heads, which must be a multiple of the 3", k=k.new_empty(3, 16, 3, 64),
          v=k.new_empty(3, 16, 3, 64))  # fmt: skip
    fails(ValueError, "version 'v2' has no key_lengths", version="v2")
    fails(ValueError, "num_splits must be", num_splits=0)
    fails(TypeError, "num_splits must be", num_splits=1.5)
    if DEVICE == "cpu":
        message = "key_lengths must be at most 64, the 4 pages of block_table times the page size 16"
        fails(ValueError, message, table=table[:, :4])
