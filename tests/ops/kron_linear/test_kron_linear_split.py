"""kron_linear v4 by warpgroups: the plans, and every kind of launch against float64."""

import pytest
import torch
from helpers import kernels, problem, same_bits
from test_kron_linear import error, launch
from test_kron_linear_backward import check

from cukern.ops.kron_linear import wgmma
from cukern.ops.kron_linear.plan import steps

TARGET = problem(4, 4, 226 << 10, wgmma=True)
TF32 = 2**-14  # error of floats in two pieces, at most: in TF32 itself it is 2**-11
CASES = [  # sizes, first step, count, rows
    (((64, 64), (64, 64)), 0, 2, 29),  # two factors, and more tiles a block than places for them
    (((2, 2), (64, 64), (64, 64)), 0, 2, 3),
    (((2, 2), (64, 128)), 1, 1, 176),  # one factor, the rightmost, and more tiles than places for them
    (((2, 2), (128, 64)), 0, 1, 416),
    (((64, 64), (64, 64)), 1, 1, 25),  # one factor, with an array to the right
    (((64, 128), (8, 8), (8, 16)), 1, 1, 3),
    (((128, 128), (8, 8), (8, 8)), 2, 1, 13),
]


@kernels
@pytest.mark.parametrize(
    "sizes, first, count, rows, tf32", [(*case, i % 2 == 1) for i, case in enumerate(CASES)]
)
def test_backward(device, sizes, first, count, rows, tf32):
    run = steps(sizes)[first : first + count]
    found = list(wgmma.backward(run, rows, TARGET._replace(tensor=tf32)))
    check(found, device, sizes, first, count, rows, torch.float32, TF32 if tf32 else 0.0)


@kernels
@pytest.mark.parametrize("views, tf32", ((False, False), (True, True)))
# rows that do not fill the last tile
@pytest.mark.parametrize("sizes, first, count, rows", [*CASES, (((128, 128),), 0, 1, 70)])
def test_forward(device, sizes, first, count, rows, views, tf32):
    run = steps(sizes)[first : first + count]
    (group,) = wgmma.forward(run, rows, TARGET._replace(tensor=tf32))
    left, right = run[-1].left, run[0].right
    x = torch.randn(rows, left, *[s.p for s in reversed(run)], right, device=device)
    residual = torch.randn(rows, left, *[s.q for s in reversed(run)], right, device=device)
    bias = torch.randn(residual[0].numel(), device=device)
    ws = [
        torch.randn(2 * p, 3 * q, device=device)[1::2, ::3] if views else torch.randn(p, q, device=device)
        for p, q in sizes
    ]
    results = []
    for dtype in (torch.float64, torch.float32):
        y = x.to(dtype)
        for dim, s in zip(range(len(run) + 1, 1, -1), run, strict=True):
            y = torch.tensordot(y, ws[s.factor].to(dtype), ([dim], [0])).movedim(-1, dim)
        results.append(y * 0.5 + bias.to(dtype).view(residual.shape[1:]) + residual.to(dtype))
    found = [
        launch(group, x.view(rows, -1), ws, (0.5, bias, residual)) for _ in range(1 if device == "cpu" else 2)
    ]
    assert same_bits(found[0], found[-1])
    exact, plain = results
    assert error(found[0].view_as(exact), exact) <= 2 * error(plain, exact) + (TF32 if tf32 else 0.0)


def test_only_what_fits_is_planned():
    order = steps(((64, 64), (64, 64)))
    for other in ({"wgmma": False}, {"itemsize": 2}, {"aligned": 8}):
        target = problem(**{"itemsize": 4, "wgmma": True} | other)
        assert not [*wgmma.forward(order, 8, target), *wgmma.backward(order, 8, target)]
    assert not list(wgmma.backward(steps(((64, 64),)), 65, TARGET._replace(whole=False))), "tiles of 32 rows"
    assert not list(wgmma.forward(steps(((64, 64), (8, 4)))[1:], 8, TARGET)), "tiles of 64 columns"
