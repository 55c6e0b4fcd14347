"""cukern.rope_tables, against the formula in torch."""

import numpy
import pytest
import torch
from helpers import kernels, same_bits

import cukern


def formula(positions, dim, base):
    angles = torch.outer(positions.double().flatten(), 1 / base ** (torch.arange(0, dim, 2).double() / dim))
    return (f(angles).view(*positions.shape, dim // 2) for f in (torch.cos, torch.sin))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_formula(dtype):
    places = torch.randint(1 << 20, (3, 7))
    for positions, dim, base in (
        (places, 128, 5e5),
        (places[0].int(), 6, 10000.0),
        (places / 8, 2, 7),
        (places[0].double(), 64, 10000),
    ):
        for table, exact in zip(
            cukern.rope_tables(positions, dim, base, dtype=dtype), formula(positions, dim, base), strict=True
        ):
            assert table.dtype == dtype and table.shape == (*positions.shape, dim // 2)
            assert (table.double() - exact).abs().max() <= max(torch.finfo(dtype).eps / 2, 1e-9)
    for length in (0, 5, numpy.int64(5)):
        tables = cukern.rope_tables(length, 8, dtype=dtype)
        assert all(
            same_bits(a, b)
            for a, b in zip(tables, cukern.rope_tables(torch.arange(length), 8, dtype=dtype), strict=True)
        )
    assert same_bits(cukern.rope_tables(numpy.arange(3), 8)[0], cukern.rope_tables(3, 8)[0])


@kernels
def test_rope_takes_them(device):
    """A row for each token, and rows that positions select. The tables are on the device of the positions."""
    x, ids = torch.randn(2, 5, 3, 8, device=device), torch.randint(50, (2, 5), device=device)
    cos, sin = cukern.rope_tables(50, 8, device=device)
    expected = cukern.rope(x, cos, sin, position_ids=ids)
    torch.testing.assert_close(cukern.rope(x, *cukern.rope_tables(ids, 8)), expected)
    assert all(
        t.is_meta
        for t in (*cukern.rope_tables(ids, 8, device="meta"), *cukern.rope_tables(ids.to("meta"), 8))
    )


REFUSALS = [
    (ValueError, "positions must be at least 0, got -1", {"positions": -1}),
    (TypeError, "positions must be an int, got float 2.5", {"positions": 2.5}),
    (
        TypeError,
        "positions must be torch.int32, .*, got torch.bool",
        {"positions": torch.ones(3, dtype=torch.bool)},
    ),
    (
        ValueError,
        r"positions must be \(sequence,\) or \(batch, sequence\), got \(\)",
        {"positions": torch.tensor(3)},
    ),
    (ValueError, "dim must be even, got 7", {"dim": 7}),
    (ValueError, "dim must be at least 2, got 0", {"dim": 0}),
    (ValueError, "base must be positive, got -1", {"base": -1}),
    (ValueError, "base must be finite", {"base": float("nan")}),
    (TypeError, "dtype must be torch.float16, .*, got torch.int32", {"dtype": torch.int32}),
]


@pytest.mark.parametrize("kind, message, change", REFUSALS)
def test_refusals(kind, message, change):
    with pytest.raises(kind, match=message):
        cukern.rope_tables(**{"positions": 5, "dim": 8, **change})
