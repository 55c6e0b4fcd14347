"""kron_linear v4's launch of four factors of 16 x 16 on tensor cores."""

import pytest
import torch
from helpers import kernels, problem, same_bits, simulated
from test_kron_linear_lanes import near

from cukern.ops.kron_linear import groups, sixteen
from cukern.ops.kron_linear import v4 as kron_v4
from cukern.ops.kron_linear.plan import steps
from cukern.ops.kron_linear.sixteen import Sixteen
from cukern.ops.kron_linear.v3 import PLAIN
from cukern.ops.kron_linear.v4 import launch_group, prepare

TARGET, SMALL = problem(4), problem(4, shared=163 << 10)
SIZES = ((16, 16),) * 4


def product(x, ws):
    z = x.view(-1, *[w.shape[0] for w in ws])
    for i, w in reversed(list(enumerate(ws))):  # as the kernel does: what overflows depends on it
        z = torch.movedim(torch.movedim(z, i + 1, -1) @ w, -1, i + 1)
    return z.reshape(x.shape[0], -1)


def drawn(rows, device, dtype=torch.float32):
    ws = [torch.randn(16, 16, dtype=dtype, device=device) / 4 for _ in range(4)]
    return torch.randn(rows, 1 << 16, dtype=dtype, device=device), [w.mT.contiguous().mT if i % 2 else w for i, w in enumerate(ws)]


def run(x, ws, epilogue=PLAIN, grid=2):
    """By one cluster, or more."""
    made = prepare(next(sixteen.launches(steps(SIZES), 1 << 16, TARGET)), 1, x.dtype, x.get_device(), epilogue is not PLAIN)
    with simulated(x, *ws, *epilogue[1:]):
        return launch_group(made._replace(geometry=((grid, 1, 1), *made.geometry[1:])), x, ws, epilogue)


def test_when_this_launch_is_chosen():
    for target in (TARGET, TARGET._replace(itemsize=2, tensor=True)):
        (group,) = groups.groups(SIZES, 1024, target)
        assert isinstance(group, Sixteen)
    assert list(sixteen.launches(steps(((16, 16),) * 5)[:4], 64, TARGET)), "in a longer layer"
    others = (SIZES, 8, TARGET), (SIZES, 1024, TARGET._replace(aligned=8)), (SIZES, 1024, SMALL)
    for sizes, rows, target in (*others, (((16, 16),) * 3, 1024, TARGET), (((16, 16),) * 3 + ((16, 8),), 1024, TARGET)):
        assert not any(isinstance(g, Sixteen) for g in groups.groups(sizes, rows, target))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("added", (False, True))
def test_registers_suffice(added, dtype):
    (group,) = sixteen.launches(steps(SIZES), 1024, TARGET)
    report = kron_v4._V4[Sixteen][dtype, group.template(added)].compile("sm_90a").report
    assert not report.spill_stores and not report.spill_loads


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
def test_four_factors_of_16(device, dtype):
    x, ws = drawn(3, device, dtype)
    exact, others = product(x.double(), [w.double() for w in ws]), product(x, ws)
    bias, residual = torch.randn(x.shape[1], device=device).to(dtype), torch.randn_like(x)
    y, again, added = run(x, ws), run(x, ws, grid=4), run(x, ws, (0.5, bias, residual))
    assert same_bits(y, again)
    if dtype != torch.float32:
        near(y, exact)
        near(added, 0.5 * exact + bias + residual)
        return
    for kind in (torch.amax, torch.mean):
        assert kind((y - exact).abs(), ()) <= 2 * kind((others - exact).abs(), ())
    assert float((added - 0.5 * exact - bias - residual).abs().max()) < 4 * torch.finfo(x.dtype).eps * float(exact.abs().max())


@kernels
def test_what_is_not_finite_is_as_in_torch(device):
    """An infinity, one of each sign, a NaN, what overflows between the factors, and factors that have them."""
    for spoiled in ({9: torch.inf}, {9: torch.inf, 40000: -torch.inf}, {70: torch.nan}, {i: 3e38 for i in range(64)}, {70: 3.4e38}):
        x, ws = drawn(1, device)
        ws = [w.abs() for w in ws]
        for i, value in spoiled.items():
            x[0, i] = value
        alike(run(x, ws), product(x, ws))
    x, ws = drawn(1, device)
    ws[1][3, 5], ws[2][0, 0] = torch.inf, torch.nan
    alike(run(x, ws), product(x, ws))
    x, ws = drawn(1, device)
    ws[3][3, 5] = torch.inf
    alike(run(0 * x, ws), product(0 * x, ws))


@kernels
def test_numbers_beyond_the_limit(device):
    """In one row of three, some of it or all, or what the right factors make, is done again; the other rows are as without it."""
    x, ws = drawn(3, device)
    alone = run(x, ws)
    for numbers, factor in ((slice(None), 1), (slice(1000, 1256), 1), (slice(0), 1e10)):
        x_large, ws_large = x.clone(), [*ws[:3], ws[3] * factor]
        x_large[1, numbers] *= 1e25
        y, others = run(x_large, ws_large), product(x_large, ws_large)
        exact = product(x_large.double(), [w.double() for w in ws_large])
        assert factor > 1 or same_bits(y[[0, 2]], alone[[0, 2]])
        for row in range(3):
            assert float((y - exact)[row].abs().max()) <= 2 * float((others - exact)[row].abs().max())


@kernels
def test_overflow_keeps_the_sign(device):
    """Products of pieces are infinite before the sum is: they must not be of the other sign. One number anywhere, and all of them."""
    ws = [torch.eye(16, device=device) for _ in range(4)]
    for at, number, factor, value in (
        (0x9, 1e30, 0, 1e12),
        (0x9, 1e30, 3, 1e12),
        (0x9, 3e38, 1, 1000.7),
        (0x9009, 3e38, 2, 1024.0),
        (0x9999, -1e38, 0, 1e5),
    ):
        x = torch.zeros(1, 1 << 16, device=device)
        x[0, at] = number
        large = [w * (value if i == factor else 1.0) for i, w in enumerate(ws)]
        alike(run(x, large), product(x, large))
    x, ws = drawn(1, device)
    ws = [w.abs() * 1e11 for w in ws]
    assert bool((run(x.abs(), ws) == torch.inf).all())


def alike(y, other):
    assert torch.equal(y.isnan(), other.isnan()) and torch.equal(y.isinf(), other.isinf())
    assert torch.equal(y[y.isinf()], other[y.isinf()])
