"""kron_linear v4's chain_wgmma: two 16-bit factors on tensor cores. Every kind of plan gives the same."""

from itertools import product
from math import prod

import pytest
import torch
from helpers import kernels, problem, same_bits
from test_kron_linear import dense, draw, error, launch

import cukern
from cukern.ops.kron_linear import chain_wgmma, planner
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear.forward import launch_group
from cukern.ops.kron_linear.plan import steps
from cukern.runtime.device import device_of
from cukern.runtime.launch import backend

SHARED = 226 << 10
BF16, F16 = torch.bfloat16, torch.float16
LIMIT = {BF16: 2.2e-3, F16: 4.5e-4}  # of the relative error of a result that is rounded once


def hopper(device):
    return device_of(backend.SIMULATED if device == "cpu" else 0).capability == 90


def plans(sizes, rows, dtype, device):
    """Plans of each kind: what a kernel does differently for them."""
    if not hopper(device):
        pytest.skip("needs warpgroups")
    target = problem(dtype.itemsize, 132, SHARED, True, 16, True)._replace(bfloat=dtype is BF16)
    right, left = steps(sizes, (1, 0))
    chain = next(chain_wgmma.forward((right, left), rows, target))
    return [
        chain,
        *[
            chain_wgmma.launch_of(right, left, rows, *kind, target)
            for kind in ((1, 3), (chain.threads // 128, 1))
        ],
    ]


CASES = [  # sizes, rows, dtype
    (((32, 32), (32, 32)), 19, BF16),  # two matrices at a time
    (((48, 32), (16, 64)), 5, BF16),  # of one group of columns
    (((240, 240), (16, 16)), 3, BF16),  # one group of columns of z
    (((32, 80), (64, 64)), 3, BF16),  # where x has more rows than y
    (((48, 64), (32, 96)), 5, BF16),
    # x of two panels, the second one not full; more matrices for each warpgroup than it has room for
    (((16, 48), (80, 32)), 13, BF16),
    (((48, 64), (64, 48)), 11, F16),
    (((16, 112), (112, 80)), 3, F16),
    (((16, 48), (64, 16)), 5, BF16),  # rows of y that do not fill a warp's tiles; neighbours of 8 bytes
    (((48, 32), (32, 48)), 3, F16),
]


@kernels
@pytest.mark.parametrize("sizes, rows, dtype", CASES)
def test_every_kind_of_plan_gives_the_same(device, sizes, rows, dtype):
    x, ws = draw(rows, sizes, device, dtype)
    ws[0] = ws[0].t().contiguous().t()
    exact = dense(x.double(), [w.double() for w in ws])
    for plan in plans(sizes, rows, dtype, device):
        y = launch(plan, x, ws)
        assert error(y, exact) < LIMIT[dtype], plan
        assert device == "cpu" or same_bits(y, launch(plan, x, ws))


@kernels
@pytest.mark.parametrize(
    "sizes, dtype",
    (
        (((54, 50), (64, 64)), BF16),
        (((21, 70), (32, 32)), F16),
        (((40, 56), (64, 48)), BF16),
        (((32, 50), (38, 86)), BF16),  # copies of 4 bytes
        (((20, 64), (36, 33)), F16),  # of 8; stores of numbers one at a time
        (((33, 49), (34, 35)), BF16),  # rows of x and y that are not aligned
        (((40, 32), (22, 86)), BF16),  # two matrices at a time
        (((32, 134), (132, 52)), BF16),  # x of three panels, the left factor fetched for each of three parts
        (((150, 48), (48, 134)), BF16),  # a right factor of three
    ),
)
def test_factors_of_any_size(device, sizes, dtype):
    """Rows and columns of x that are not there count for nothing, whatever lay in memory, and those of y are
    not stored."""
    if not hopper(device):
        pytest.skip("needs warpgroups")
    x, ws = draw(7, sizes, device, dtype)
    x[2, 5], x[3, 6], x[4, -1] = float("inf"), float("-inf"), float("nan")
    exact = dense(x.double(), [w.double() for w in ws])
    (plan,) = planner.forward(
        sizes, 7, problem(2, 132, SHARED, True, 16, True)._replace(bfloat=dtype is BF16)
    )
    assert plan.kernel == "chain_wgmma"
    for turned in (False, True):
        y = launch(plan, x, [w.t().contiguous().t() if turned else w for w in ws])
        finite = [0, 1, 5, 6]
        assert error(y[finite], exact[finite]) < LIMIT[dtype]
        assert torch.equal(y[2:4].double(), exact[2:4]) and y[4].isnan().all()


@kernels
def test_an_infinite_factor_stays_infinite_next_to_the_padding(device):
    """Columns of z beyond the last one are infinity times zero."""
    sizes = ((20, 64), (36, 33))
    x, ws = draw(3, sizes, device, F16)
    x, ws = x.abs(), [w.abs() for w in ws]
    ws[0][3, 7] = float("inf")
    y = launch(plans(sizes, 3, F16, device)[0], x, ws).view(3, 64, 33)
    assert y[:, 7].isinf().all() and y[:, :7].isfinite().all() and y[:, 8:].isfinite().all()


ADDED = (((64, 64), (32, 32)), BF16), (((32, 48), (32, 16)), F16)


@kernels
@pytest.mark.parametrize("sizes, dtype", ADDED)
def test_epilogue_and_factors_of_any_strides(device, sizes, dtype):
    rows, features = 3, prod(q for _, q in sizes)
    x, ws = draw(rows, sizes, device, dtype)
    apart = [
        torch.randn(2 * p, 3 * q, dtype=dtype, device=device)[1::2, ::3].copy_(w)
        for (p, q), w in zip(sizes, ws, strict=True)
    ]
    bias = torch.randn(features, dtype=dtype, device=device)
    residual = torch.randn(rows, features, dtype=dtype, device=device)
    exact = 0.5 * dense(x.double(), [w.double() for w in ws])
    plan = plans(sizes, rows, dtype, device)[0]
    for added in ((bias, None), (None, residual), (bias, residual)):
        expected = exact + sum(t.double() for t in added if t is not None)
        assert error(launch(plan, x, apart, (0.5, *added)), expected) < LIMIT[dtype]


@kernels
@pytest.mark.parametrize("sizes", (((32, 32), (32, 32)), ((16, 48), (32, 16))))
def test_what_is_not_finite_stays_where_torch_has_it(device, sizes):
    x, ws = draw(6, sizes, device, BF16)
    ws = [w.abs() / w.abs().sum(0) for w in ws]  # so that the largest stay finite
    for row, value in enumerate((3e38, float("inf"), float("-inf"), float("nan"))):
        x[row] = x[row].abs()
        x[row, 5 * row] = value
    expected = dense(x.float(), [w.float() for w in ws]).to(BF16)
    for plan in plans(sizes, 6, BF16, device)[::2]:
        y = launch(plan, x, ws)
        assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isinf(), expected.isinf())
        finite = expected.isfinite()
        assert torch.allclose(y[finite].double(), expected[finite].double(), rtol=2**-6, atol=0.1)


@kernels
@pytest.mark.parametrize("sizes", (((32, 32), (32, 32)), ((16, 48), (32, 16))))
@pytest.mark.parametrize("dtype", (BF16, F16))
def test_infinities_keep_their_sign(device, sizes, dtype):
    """Also where factors are larger than 1, and of both signs; of several in a row too."""
    x, ws = draw(4, sizes, device, dtype)
    ws = [4 * w for w in ws]
    x[0, 7], x[1, 7], x[2, :40] = float("inf"), float("-inf"), float("-inf")
    ones = [torch.full_like(w, 2.0) for w in ws]
    for factors, rows in ((ws, slice(0, 2)), (ones, slice(0, 4))):
        expected = dense(x.float(), [w.float() for w in factors])[rows]
        for plan in plans(sizes, 4, dtype, device)[::2]:
            y = launch(plan, x, factors)[rows]
            assert torch.equal(y.isnan(), expected.isnan()), plan
            assert torch.equal(y[y.isinf()].float(), expected[y.isinf()].float()) and torch.equal(
                y.isinf(), expected.isinf()
            ), plan


def test_when_these_launches_are_chosen():
    target = problem(2, 132, SHARED, True, wgmma=True)

    def kernels_of(sizes, **other):
        return [launch.kernel for launch in planner.forward(sizes, 1024, target._replace(**other))]

    odd = (
        ((128, 128), (86, 86)),
        ((148, 148), (128, 128)),
        ((100, 100), (100, 100)),
        ((66, 66), (130, 130)),
        ((240, 240), (16, 16)),
    )
    for sizes, bfloat in product(
        (((32, 32),) * 2, ((64, 64),) * 2, ((112, 112), (128, 128)), ((128, 128),) * 2, *odd), (True, False)
    ):
        assert kernels_of(sizes, bfloat=bfloat) == ["chain_wgmma"], sizes
    assert kernels_of(((64, 64),) * 3)[0] == "chain_wgmma", "of two of three factors"
    for size in (8, 64), (176, 64), (85, 64), (64, 256):
        assert "chain_wgmma" not in kernels_of(((64, 64), size))
    device = target.device._replace(capability=80)
    for other in ({"aligned": 8}, {"itemsize": 4}, {"device": device}):
        assert "chain_wgmma" not in kernels_of(((64, 64),) * 2, **other)


@kernels
@pytest.mark.parametrize("sizes", (((16, 16), (64, 64), (64, 64)), ((3, 3), (48, 32), (32, 48))))
def test_two_of_three_factors(device, sizes):
    if not hopper(device):
        pytest.skip("needs warpgroups")
    x, ws = draw(3, sizes, device, BF16)
    run = steps(sizes, tuple(range(len(sizes)))[::-1])[:2]
    (plan, *_) = chain_wgmma.forward(run, 3, problem(2, 132, SHARED, True, 16, True)._replace(bfloat=True))
    p0 = sizes[0][0]
    exact = dense(x.double().view(3 * p0, -1), [w.double() for w in ws[1:]]).view(3, -1)
    assert error(launch(plan, x, ws), exact) < LIMIT[BF16]
    bias = torch.randn(exact.shape[1], device=device).to(BF16)
    residual = torch.randn(exact.shape, device=device).to(BF16)
    assert error(launch(plan, x, ws, (0.5, bias, residual)), 0.5 * exact + bias + residual) < LIMIT[BF16], (
        "a bias of all matrices of a row"
    )


@kernels
def test_the_public_function_uses_these_launches(device, monkeypatch):
    if not hopper(device):
        pytest.skip("needs warpgroups")
    taken = []
    monkeypatch.setattr(
        kron_forward,
        "launch_group",
        lambda made, *args: taken.append(made.group.kernel) or launch_group(made, *args),
    )
    for sizes in (((64, 64),) * 2, ((32, 32), (64, 64))):
        x, ws = draw(2 * device_of(-1 if device == "cpu" else 0).sms + 3, sizes, device, BF16)
        residual = torch.randn(x.shape[0], prod(q for _, q in sizes), dtype=BF16, device=device)
        y = cukern.kron_linear(x, ws, residual=residual, version="v4")
        exact = dense(x.double(), [w.double() for w in ws]) + residual.double()
        assert error(y, exact) < LIMIT[BF16], "each launch rounds once"
        assert taken == ["chain_wgmma"]
        taken.clear()
