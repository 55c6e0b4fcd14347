"""cukern.rope and rope_: the results for all pairings, slices, tables and dtypes.

See test_rope_memory.py for layouts and views, test_rope_positions.py for positions and TransformerEngine's
form, test_rope_in_torch.py for autograd and compilation, test_rope_refusals.py for errors.
"""

import contextlib
import itertools

import pytest
import rope_oracle as oracle
import torch
from helpers import DEVICE, FLOATS, gpu, kernels, places, same_bits

import cukern
from cukern.ops.rope.cases import angles
from cukern.ops.rope.plan import compute_dtype
from cukern.runtime.registry import CASES

PLACES = pytest.mark.parametrize("device, version", places("rope"))
VERSIONS = pytest.mark.parametrize("version", CASES["rope"].op.versions)
AXES = {"bshd": (0, 1, 2, 3), "bhsd": (0, 2, 1, 3), "sbhd": (1, 0, 2, 3)}
B, S, H, K = 2, 5, 3, 2
PLAIN = [list(range(S))] * B  # positions


def tables(rows, width, device, dtype=torch.float32):
    a = torch.rand(rows, width, device=device) * 6.2
    return a.cos().to(dtype), a.sin().to(dtype)


def assert_right(actual, exact, what=""):
    """The error is at most one epsilon of each element, plus the rounding of the terms whose difference it
    is."""
    finest = torch.finfo(compute_dtype(actual.dtype)).eps
    allowed = torch.finfo(actual.dtype).eps * exact.abs() + finest * exact.abs().max()
    wrong = ~((actual.double() - exact).abs() <= allowed)  # negated, so that NaN is wrong
    assert not wrong.any(), (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at "
        f"{wrong.nonzero()[0].tolist()}"
    )


def both(x, cos, sin, device, version, **options):
    """The result of rope, which must equal that of rope_ bit for bit."""
    out = cukern.rope(x, cos, sin, version=version, **options)
    copies = {**options, "k": options["k"].clone()} if "k" in options else options
    mine = x.clone()
    there = cukern.rope_(mine, cos, sin, version=version, **copies)
    for a, b in zip(out, there, strict=True) if "k" in options else ((out, there),):
        assert same_bits(a, b)
    assert (there[0] if "k" in options else there) is mine
    return out


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@PLACES
def test_pairings_slices_and_tables(device, version, dtype):
    """All combinations, with odd sizes, of queries and keys."""
    D = 11
    slices = ((6, 0), (6, 5), (10, 1), (2, 9))
    for interleaved, full, inverse, (rotary_dim, offset) in itertools.product(
        (False, True), (False, True), (False, True), slices
    ):
        q = torch.randn(B, S, H, D, device=device).to(dtype)
        k = torch.randn(B, S, K, D, device=device).to(dtype)
        cos, sin = tables(S + 2, rotary_dim if full else rotary_dim // 2, device)
        options = {
            "interleaved": interleaved,
            "rotary_dim": rotary_dim,
            "rotary_offset": offset,
            "inverse": inverse,
            "scale": 1.25,
        }
        outs = both(q, cos, sin, device, version, k=k, **options)
        for x, y in zip((q, k), outs, strict=True):
            angles = {"interleaved": interleaved, "offset": offset, "inverse": inverse, "scale": 1.25}
            assert_right(y, oracle.rotated(x, cos, sin, PLAIN, rotary_dim, **angles), str(options))
            rest = [i for i in range(D) if not offset <= i < offset + rotary_dim]
            assert same_bits(y[..., rest], x[..., rest]), "the rest is copied"


@PLACES
def test_slices_of_whole_vectors(device, version):
    """Slices that the fast versions process in vectors, with odd and even numbers of vectors to copy before
    and behind."""
    for dtype, interleaved, (rotary_dim, offset) in itertools.product(
        (torch.bfloat16, torch.float32),
        (False, True),
        ((16, 0), (16, 8), (16, 32), (32, 16), (48, 0), (8, 4)),
    ):
        x, (cos, sin) = torch.randn(1, 3, 2, 48, device=device).to(dtype), tables(3, rotary_dim // 2, device)
        y = both(
            x, cos, sin, device, version, interleaved=interleaved, rotary_dim=rotary_dim, rotary_offset=offset
        )
        assert_right(
            y, oracle.rotated(x, cos, sin, [[0, 1, 2]], rotary_dim, interleaved=interleaved, offset=offset)
        )


@pytest.mark.parametrize("head_dim", [2, 32, 64, 72, 96, 128, 256, 512])
@PLACES
def test_head_dims(device, version, head_dim):
    """Sizes with and without vectors for the fast versions: bfloat16 and float32, both pairings."""
    for dtype, interleaved in itertools.product((torch.bfloat16, torch.float32), (False, True)):
        q, k = (torch.randn(1, 3, heads, head_dim, device=device).to(dtype) for heads in (2, 1))
        cos, sin = tables(3, head_dim // 2, device)
        for x, y in zip(
            (q, k), both(q, cos, sin, device, version, k=k, interleaved=interleaved), strict=True
        ):
            assert_right(y, oracle.rotated(x, cos, sin, [[0, 1, 2]], head_dim, interleaved=interleaved))


@PLACES
def test_neighbouring_heads(device, version):
    """Pairs of heads, as in v3, with all kinds of tables, tokens that are not rotated, and partly filled
    blocks."""
    bounds = torch.tensor([2, 5, 9], dtype=torch.int32, device=device)
    where = [[-1, -1, 0, 1, 2, 0, 1, 2, 3, -1, -1]]
    other = {torch.float32: torch.float64}  # the dtype of the tables; else that of x
    kinds = itertools.product(FLOATS[:3], (16, 64, 128), *[(False, True)] * 3)
    for dtype, width, full, inverse, interleaved in kinds:
        q, k = (torch.randn(11, heads, 136, device=device).to(dtype)[..., 8 : 8 + width] for heads in (4, 2))
        cos, sin = tables(
            6, width if full else width // 2, device, other.get(dtype, dtype) if inverse else torch.float32
        )
        options = {
            "layout": "thd",
            "cu_seqlens": bounds,
            "inverse": inverse,
            "scale": 1.25,
            "interleaved": interleaved,
        }
        for x, y in zip((q, k), both(q, cos, sin, device, version, k=k, **options), strict=True):
            exact = oracle.rotated(
                x[None], cos, sin, where, width, inverse=inverse, scale=1.25, interleaved=interleaved
            )
            assert_right(y[None], exact, f"{dtype} {width} {full} {inverse} {interleaved}")


@PLACES
def test_flash_attentions_and_the_complex_formula(device, version):
    x = torch.randn(2, 7, 3, 32, device=device)
    a = angles(7, 16, device)
    assert_right(
        cukern.rope(x, a.cos(), a.sin(), interleaved=True, version=version), oracle.complex_rotated(x, a)
    )
    for interleaved, width in itertools.product((False, True), (16, 8, 4)):
        cos, sin = a[:, :width].cos(), a[:, :width].sin()
        y = cukern.rope(x, cos, sin, rotary_dim=2 * width, interleaved=interleaved, version=version)
        assert_right(y, oracle.flash_attention(x, cos, sin, interleaved))


@PLACES
def test_proportional_partial_rotary_is_a_table(device, version):
    """As in Gemma: half pairing over all of head_dim. The last pairs have the angle 0, which leaves them
    unchanged."""
    x = torch.randn(1, S, 2, 32, device=device)
    a = angles(S, 16, device)
    a[:, 4:] = 0
    y = cukern.rope(x, a.cos(), a.sin(), version=version)
    still = [*range(4, 16), *range(20, 32)]
    assert same_bits(y[..., still], x[..., still])
    assert_right(y, oracle.rotated(x, a.cos(), a.sin(), [list(range(S))], 32))


@PLACES
def test_dtypes_of_tables(device, version):
    """The result is exact for the table's own numbers, also for bfloat16 tables."""
    for dtype, table in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16),
                         (torch.bfloat16, torch.float64),
                         (torch.float64, torch.float32), (torch.float64, torch.float64),
                         (torch.float32, torch.float64)):  # fmt: skip
        x, (cos, sin) = torch.randn(B, S, H, 8, device=device).to(dtype), tables(S, 4, device, table)
        exact = oracle.rotated(x, cos, sin, PLAIN, 8)
        assert_right(cukern.rope(x, cos, sin, version=version), exact)
        assert_right(
            cukern.rope(x, cos.t().contiguous().t(), torch.cat((sin, sin), 1)[:, :4], version=version),
            exact,
            "strided tables",
        )


@PLACES
def test_a_table_for_each_token(device, version):
    """Hugging Face's (batch, sequence, head_dim)."""
    x = torch.randn(B, S, H, 8, device=device)
    for shared in (1, B):
        a = torch.rand(shared, S, 4, device=device).repeat(1, 1, 2) * 6
        rows = a.flatten(0, 1)
        positions = [[(b % shared) * S + s for s in range(S)] for b in range(B)]
        y = cukern.rope(x, a.cos(), a.sin(), version=version)
        assert_right(y, oracle.rotated(x, rows.cos(), rows.sin(), positions, 8))


POSITIONS = (0, 1, 77, 8191, 105_615, 131_071, 2**20 - 1, 2**20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@PLACES
def test_angles_up_to_2_to_20(device, version, dtype):
    """sin=None, with angles of positions up to 2^20. The largest error is at most twice that of the rounded
    exact result. Tables rounded to float32 fail this for most draws of a float32 x, so there are several
    draws."""
    a = torch.tensor(POSITIONS, device=device)[:, None] * 10000.0 ** (-torch.arange(32, device=device) / 32)
    for draw, interleaved, angle in itertools.product(range(4), (False, True), (a, a.double() / 3)):
        x = torch.randn(1, len(POSITIONS), 32, 64, device=device).to(dtype)
        exact = oracle.rotated(
            x,
            angle.double().cos(),
            angle.double().sin(),
            [list(range(len(POSITIONS)))],
            64,
            interleaved=interleaved,
        )
        y = cukern.rope(x, angle, None, interleaved=interleaved, version=version)
        error, best = (y.double() - exact).abs().max(), (exact.to(dtype).double() - exact).abs().max()
        assert error <= 2 * best, (
            f"{draw}, interleaved {interleaved}, {angle.dtype}: {error}, of the rounded result {best}"
        )


@kernels
@VERSIONS
def test_float32_errs_by_two_roundings_at_most(version):
    """Compared with the exact rotation by the table's numbers, even where the terms cancel. The rounding of
    one product alone would be hundreds of times larger."""
    for interleaved, inverse, table, width in itertools.product(
        (False, True), (False, True), (torch.float32, torch.float64), (32, 64)
    ):
        x, (cos, sin) = torch.randn(1, 8, 32, 64, device=DEVICE), tables(8, width, DEVICE, table)
        exact = oracle.rotated(x, cos, sin, [list(range(8))], 64, interleaved=interleaved, inverse=inverse)
        y = cukern.rope(x, cos, sin, interleaved=interleaved, inverse=inverse, version=version)
        ratio = ((y.double() - exact) / exact).abs().max() / torch.finfo(torch.float32).eps
        assert ratio <= 1, (
            f"interleaved {interleaved}, inverse {inverse}, {width} columns of {table}: {ratio}"
        )


@PLACES
def test_nan_and_infinity_stay_in_their_pair(device, version):
    x = torch.randn(1, 3, 2, 8, device=device)
    x[0, 1, 0, 1], x[0, 2, 1, 6] = float("nan"), float("inf")
    y = cukern.rope(x, *tables(3, 4, device), version=version)
    bad = torch.zeros_like(x, dtype=torch.bool)
    bad[0, 1, 0, [1, 5]] = bad[0, 2, 1, [2, 6]] = True
    assert bool((y.isfinite() == ~bad).all())
    assert bool(y[0, 2, 1, [2, 6]].isinf().all())


@kernels
def test_more_than_65535_sequences(device):
    n = 70_000
    x, (cos, sin) = torch.randn(n, 1, 4, device=device), tables(2, 2, device)
    # sequences of two tokens, and empty ones
    cu_seqlens = torch.arange(0, n + 1, 2, device=device).repeat_interleave(2)[: n + 1]
    y = cukern.rope(x, cos, sin, cu_seqlens=cu_seqlens, layout="thd")
    position = torch.arange(n, device=device) % 2
    position[cu_seqlens[-1] :] = 0
    exact = cukern.rope(
        x.double()[:, None], cos[position][:, None].double(), sin[position][:, None].double()
    )[:, 0]
    assert_right(y[: cu_seqlens[-1]], exact[: cu_seqlens[-1]])


@gpu
@pytest.mark.parametrize("captured", (False, True), ids=("stream", "graph"))
@pytest.mark.parametrize("heads, head_dim", ((8, 64), (32, 128), (31, 128)))
def test_overlapping_launches(heads, head_dim, captured):
    """Each launch reads in place what the launch before it writes. It must not read too early."""
    x = torch.randn(2, 2048, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    mine, (cos, sin) = torch.empty_like(x), tables(2048, head_dim // 2, "cuda")

    def run(between):
        mine.copy_(x)
        for _ in range(8):
            cukern.rope_(mine, cos, sin)
            between()

    run(torch.cuda.synchronize)
    expected, graph = mine.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph) if captured else contextlib.nullcontext():
        run(lambda: None)
    if captured:
        graph.replay()
    assert same_bits(mine, expected)


@gpu
@VERSIONS
def test_more_than_2_to_31_elements(version, most_memory):
    heads, head_dim = 32, 128
    sequence = 2**31 // (heads * head_dim) + 3
    if torch.cuda.mem_get_info()[0] < 5 * 2**31:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.randn(1, sequence, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    a = angles(sequence, head_dim // 2, "cuda")
    y = cukern.rope(x, a.cos(), a.sin(), version=version)
    last = slice(sequence - 5, sequence)
    exact = oracle.rotated(x[:, last], a[last].cos(), a[last].sin(), [list(range(5))], head_dim)
    assert_right(y[:, last], exact)
    assert same_bits(cukern.rope_(x, a.cos(), a.sin(), version=version), y)
