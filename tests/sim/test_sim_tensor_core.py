"""The simulator's tensor cores: lane layouts written out element by element as in the PTX ISA, and products
against exact sums."""

from fractions import Fraction

import numpy as np
import pytest
from sim_oracle import decode, encode

from cukern.sim.faults import NotSimulated
from cukern.sim.numerics.tensor_core import by_rows, described, ldmatrix, mma, rows_of_a, wgmma

CASES = [
    ("m16n8k16", "f16", "f32"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f16", "f32"),
    ("m16n8k8", "f16", "f16"),
    ("m16n8k8", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k4", "tf32", "f32"),
]


def opcode(shape: str, factor: str, total: str) -> str:
    return f"mma.sync.aligned.{shape}.row.col.{total}.{factor}.{factor}.{total}"


def row_col_a(i: int, lane: int, factor: str) -> tuple[int, int]:
    """Where element a_i of a lane lies."""
    group, quad = lane >> 2, lane % 4
    if factor == "tf32":
        return (group if i % 2 == 0 else group + 8), (quad if i < 2 else quad + 4)
    return (group if i in (0, 1, 4, 5) else group + 8), quad * 2 + (i & 1) + (8 if i >= 4 else 0)


def row_col_b(i: int, lane: int, factor: str) -> tuple[int, int]:
    group, quad = lane >> 2, lane % 4
    if factor == "tf32":
        return quad + 4 * i, group
    return quad * 2 + (i & 1) + (8 if i >= 2 else 0), group


def row_col_c(i: int, lane: int) -> tuple[int, int]:
    return (lane >> 2) + (0 if i < 2 else 8), (lane % 4) * 2 + (i & 1)


def pack(tile: np.ndarray, place, elements: int, narrow: bool) -> list[np.ndarray]:
    """A tile of bits to one warp's registers, each (32,)."""
    lanes = np.array([[int(tile[place(i, lane)]) for lane in range(32)] for i in range(elements)], np.uint32)
    return list(lanes[::2] | lanes[1::2] << 16) if narrow else list(lanes)


def exact_bits(type_: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Small integers over 8: their products and sums are exact in float32, and nearly so in float16."""
    return np.vectorize(lambda n: encode(type_, Fraction(int(n), 8)) if n else 0)(
        rng.integers(-16, 17, shape)
    )


@pytest.mark.parametrize(("shape", "factor", "total"), CASES)
def test_mma(shape, factor, total):
    k, warps, rng = int(shape[6:]), 3, np.random.default_rng(0)
    narrow = factor != "tf32"
    registers, expected = [], []
    for _ in range(warps):
        a, b, c = (exact_bits(t, s, rng) for t, s in ((factor, (16, k)), (factor, (k, 8)), (total, (16, 8))))

        def value(t, m):
            return np.vectorize(lambda x: Fraction(decode(t, int(x))), otypes=[object])(m)

        product = value(factor, a) @ value(factor, b) + value(total, c)
        d = np.vectorize(lambda x, t=total: encode(t, x) if x else 0)(product)
        registers.append([pack(a, lambda i, lane: row_col_a(i, lane, factor), k // 2, narrow),
                          pack(b, lambda i, lane: row_col_b(i, lane, factor), k // 4, narrow),
                          pack(c, row_col_c, 4, total == "f16")])  # fmt: skip
        expected.append(pack(d, row_col_c, 4, total == "f16"))
    stacked = [[np.stack(r) for r in zip(*operand, strict=True)] for operand in zip(*registers, strict=True)]
    result = mma(opcode(shape, factor, total))(*stacked)
    wanted = [np.stack(r) for r in zip(*expected, strict=True)]
    assert len(result) == len(wanted)
    for got, want in zip(result, wanted, strict=True):
        assert got.dtype == np.uint32
        assert np.array_equal(got, want)


def test_mma_rounds_once():
    one, eps = 0x3C00, 0x1000  # 1 and 2^-11 in float16
    a, b = ([np.zeros((1, 32), np.uint32) for _ in range(n)] for n in (4, 2))
    a[0][:], b[0][:] = eps | one << 16, eps | eps << 16  # eight terms along k: 2^-22 and 2^-11, four of each
    c = [np.full((1, 32), 0x3F800000, np.uint32) for _ in range(4)]
    exact = 1 + 4 * Fraction(1, 2**22) + 4 * Fraction(1, 2**11)
    got = mma(opcode("m16n8k16", "f16", "f32"))(a, b, c)
    assert set(np.unique(got[0]).tolist()) == {encode("f32", exact)}
    assert set(np.unique(got[2]).tolist()) == {0x3F800000}  # the lower rows of A are zero


def test_tf32_drops_the_bits_that_tensor_cores_do_not_see():
    full, cut = np.full((1, 32), 0x3F801FFF, np.uint32), np.full((1, 32), 0x3F800000, np.uint32)
    zero = [np.zeros((1, 32), np.uint32)] * 4
    function = mma(opcode("m16n8k4", "tf32", "f32"))
    assert all(
        np.array_equal(x, y)
        for x, y in zip(function([full] * 2, [cut], zero), function([cut] * 2, [cut], zero), strict=True)
    )


def test_nan_and_infinity():
    a, b = [np.full((1, 32), 0x7C007C00, np.uint32)] * 4, [np.full((1, 32), 0x00003C00, np.uint32)] * 2
    with np.errstate(invalid="ignore"):  # as the machine does around a launch
        result = mma(opcode("m16n8k16", "f16", "f32"))(a, b, [np.zeros((1, 32), np.uint32)] * 4)
    assert set(np.unique(np.stack(result)).tolist()) == {0x7FFFFFFF}  # infinity times 0


UNKNOWN = [
    "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32",
    "mma.sync.aligned.m8n8k8.row.col.f64.f64.f64.f64",
    "mma.sync.aligned.m16n8k16.col.row.f32.f16.f16.f32",
    "mma.sync.aligned.m16n8k16.row.col.bf16.bf16.bf16.bf16",
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.bf16.f32",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
]


@pytest.mark.parametrize("rows, k", [(8, 4), (16, 4), (16, 8), (16, 16)])
def test_mma_of_f64(rows, k):
    """PTX ISA: a register has one element; A's go down the rows, then along k."""
    rng = np.random.default_rng(4)
    a, b, c = rng.standard_normal((rows, k)), rng.standard_normal((k, 8)), rng.standard_normal((rows, 8))
    group, quad = np.arange(32) // 4, np.arange(32) % 4
    registers_a = [a[group + row, quad + part][None] for part in range(0, k, 4) for row in range(0, rows, 8)]
    registers_b = [b[quad + part, group][None] for part in range(0, k, 4)]
    places_c = [(group + row, 2 * quad + i) for row in range(0, rows, 8) for i in (0, 1)]
    bits = [
        [x.copy().view(np.uint64) for x in xs]
        for xs in (registers_a, registers_b, [c[place][None] for place in places_c])
    ]
    d = mma(f"mma.sync.aligned.m{rows}n8k{k}.row.col.f64.f64.f64.f64")(*bits)
    assert len(d) == len(places_c)
    for register, place in zip(d, places_c, strict=True):
        assert np.allclose(register.view(np.float64)[0], (a @ b + c)[place], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_there_says_so(name):
    with pytest.raises(NotSimulated, match=name.replace(".", r"\.")):
        mma(name)


@pytest.mark.parametrize("tiles", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(tiles, transposed):
    memory = np.random.default_rng(0).integers(0, 1 << 16, (3, 8 * tiles, 8), dtype=np.uint16)
    registers = ldmatrix(memory.view(np.uint8), transposed)
    assert len(registers) == tiles
    for tile, register in enumerate(registers):
        assert register.shape == (3, 32)
        for warp in range(3):
            rows = memory[warp, 8 * tile : 8 * tile + 8]
            rows = rows.T if transposed else rows
            for lane in range(32):
                low, high = rows[lane // 4, 2 * (lane % 4)], rows[lane // 4, 2 * (lane % 4) + 1]
                assert register[warp, lane] == int(low) | int(high) << 16


def test_ldmatrix_feeds_mma():
    """The usual pair: A by ldmatrix.x4, B (stored by rows of k) by ldmatrix.x2.trans."""
    rng = np.random.default_rng(1)
    a, b = rng.integers(-4, 5, (16, 16)).astype(np.float16), rng.integers(-4, 5, (16, 8)).astype(np.float16)
    rows_a = np.concatenate((a[:8, :8], a[8:, :8], a[:8, 8:], a[8:, 8:]))[None]
    d = mma(opcode("m16n8k16", "f16", "f32"))(
        ldmatrix(np.ascontiguousarray(rows_a).view(np.uint8)),
        ldmatrix(np.ascontiguousarray(b[None]).view(np.uint8), True),
        [np.zeros((1, 32), np.uint32)] * 4,
    )
    product = a.astype(np.float32) @ b.astype(np.float32)
    for i, register in enumerate(d):
        for lane in range(32):
            assert register[0, lane : lane + 1].view(np.float32)[0] == product[row_col_c(i, lane)]


@pytest.mark.parametrize("kept", (False, True))
@pytest.mark.parametrize("dtype, k", (("bf16", 16), ("f16", 16), ("tf32", 8)))
def test_wgmma_is_mma_of_each_warps_rows(dtype, k, kept):
    rng, warps, columns = np.random.default_rng(2), 4, 32
    a, b, c = (np.stack([np.stack([exact_bits(t, s, rng) for _ in range(n)]) for _ in range(warps)])
               for t, s, n in ((dtype, (16, k), 1), (dtype, (k, 8), 4), ("f32", (16, 8), 4)))  # fmt: skip
    pairs = k == 16
    width, function = wgmma(f"wgmma.mma_async.sync.aligned.m64n32k{k}.f32.{dtype}.{dtype}")
    assert width == columns
    place = {"a": lambda i, lane: row_col_a(i, lane, dtype), "b": lambda i, lane: row_col_b(i, lane, dtype)}
    registers_a = [
        np.stack(r)
        for r in zip(*(pack(a[w, 0], place["a"], k // 2, pairs) for w in range(warps)), strict=True)
    ]
    rows_b = b.transpose(0, 1, 3, 2).reshape(warps, columns, k).astype(np.uint16 if pairs else np.uint32)
    wanted, registers_c = [], []
    for n in range(4):
        tile = [
            np.stack(r)
            for r in zip(*(pack(b[w, n], place["b"], k // 4, pairs) for w in range(warps)), strict=True)
        ]
        own = [
            np.stack(r) for r in zip(*(pack(c[w, n], row_col_c, 4, False) for w in range(warps)), strict=True)
        ]
        registers_c += own
        wanted += mma(opcode(f"m16n8k{k}", dtype, "f32"))(
            registers_a, tile, own if kept else [np.zeros_like(r) for r in own]
        )
    got = function(registers_a, rows_b, registers_c, np.full((warps, 1), kept))
    assert len(got) == len(wanted) and all(np.array_equal(x, y) for x, y in zip(got, wanted, strict=True))


def test_wgmmas_descriptor():
    """Eights of numbers along k and of columns in pieces of 128 bytes, the next along k 256 bytes away, the
    next columns 1024."""
    word = np.uint64(4096 >> 4 | 256 >> 4 << 16 | 1024 >> 4 << 32)
    found = described(np.full(64, word), np.arange(64), False)
    assert found.tolist() == [
        4096 + n // 8 * 1024 + n % 8 * 16 + half * 256 for n in range(32) for half in (0, 1)
    ]
    found = described(np.full(64, word), np.arange(64), True)
    assert found.tolist() == [
        4096 + n * 1024 + k // 8 * 256 + k % 8 * 16 for n in range(4) for k in range(16)
    ]
    with pytest.raises(NotSimulated, match="several swizzles"):
        described(np.array([word, word | np.uint64(1) << np.uint64(62)]), np.arange(2), False)
    with pytest.raises(NotSimulated, match="base offset"):
        described(np.full(1, word | np.uint64(1) << np.uint64(49)), np.arange(1), False)
    with pytest.raises(NotSimulated, match="m64n32k16"):
        wgmma("wgmma.mma_async.sync.aligned.m64n32k16.f32.tf32.tf32")


def test_a_swizzled_descriptor_and_the_columns_that_it_gives():
    """Of a matrix [k = 16][128], rows of 64 columns are 128 bytes, whose units are swizzled, and the other 64
    columns 4096 bytes away; the columns from 32 on."""
    word = np.uint64(8192 + 64 >> 4 | 4096 >> 4 << 16 | 1024 >> 4 << 32 | 1 << 62)
    found = described(np.full(64, word), np.arange(64), True)
    assert found.tolist() == [8192 + k * 128 + (4 + n ^ k % 8) * 16 for n in range(4) for k in range(16)]
    whole = described(np.full(256, word - np.uint64(64 >> 4)), np.arange(256), True)
    assert whole.tolist() == [
        8192 + n // 8 * 4096 + k * 128 + (n % 8 ^ k % 8) * 16 for n in range(16) for k in range(16)
    ]
    matrix = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32)
    parts = np.stack([matrix[k, n * 8 : n * 8 + 8] for n in range(4) for k in range(16)])[None]
    assert np.array_equal(by_rows(parts, True)[0], matrix.T)


def test_wgmmas_operands_from_shared_memory():
    """Either order of a matrix's eights is the same matrix, and a's rows are where mma.sync has them."""
    rng = np.random.default_rng(3)
    rows = rng.integers(0, 1 << 16, (2, 16, 16), dtype=np.uint16)
    along = rows.reshape(2, 32, 8)
    down = np.stack([rows[:, eight * 8 : eight * 8 + 8, k] for eight in (0, 1) for k in range(16)], axis=1)
    assert np.array_equal(by_rows(along, False), rows) and np.array_equal(by_rows(down, True), rows)
    for warp in range(2):
        wanted = pack(rows[warp], lambda i, lane: row_col_a(i, lane, "bf16"), 8, True)
        assert all(np.array_equal(r[warp], w) for r, w in zip(rows_of_a(rows), wanted, strict=True))
