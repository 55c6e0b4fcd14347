"""kron_linear v4: its plans cover every factor and fit a block, and whatever tiling a plan may choose, the numbers are the same."""

import contextlib
import itertools
from math import prod

import pytest
import torch
from helpers import kernels
from test_kron_linear import close, dense, draw

import cukern
from cukern.ops import kron_groups, kron_versions
from cukern.ops.kron_groups import CONFIGS, MOST, MOST_WARPS, Group
from cukern.ops.kron_plan import steps
from cukern.ops.kron_versions import PLAIN, launch_group, prepare
from cukern.runtime import backend

LAYERS = (
    ((128, 128),) * 2,
    ((8, 8),) * 5,
    ((8, 8),) * 7,
    ((64, 64),) * 3,
    ((2, 2),) * 16,
    ((16, 16), (240, 240)),
    ((128, 8), (8, 128)),
    ((3, 5), (7, 2), (1, 1), (12, 28)),
    ((600, 600), (4, 4)),
)


@pytest.mark.parametrize("limit", (226 << 10, 63 << 10))
@pytest.mark.parametrize("itemsize", (2, 4, 8))
def test_plans_cover_every_step_and_fit_a_block(itemsize, limit):
    for sizes, rows in itertools.product(LAYERS, (1, 33, 4096)):
        plan = kron_groups.groups(sizes, rows, itemsize, 132, limit)
        assert [s for g in plan for s in g.steps] == list(steps(sizes))
        for group in plan:
            if not group.configs:
                assert len(group.steps) == 1, "v3 takes one factor"
                continue
            assert len(group.steps) == len(group.configs) == len(group.padded) <= MOST
            assert all(a.factor == b.factor + 1 and a.left == b.left * b.p for a, b in itertools.pairwise(group.steps))
            assert group.shared <= limit and 32 <= group.threads <= 32 * MOST_WARPS and group.blocks >= 1
            assert (group.L == 1 or group.steps[0].right == 1) and (group.R == 1 or group.steps[0].right > 1)
            assert (group.slices - 1) * group.columns < group.steps[0].q <= group.slices * group.columns
            numbers = group.L * group.R * prod(s.p for s in group.steps)
            for n, (s, config, padded) in enumerate(zip(group.steps, group.configs, group.padded, strict=True)):
                fibers, columns = CONFIGS[config]
                fibers = fibers if itemsize < 8 else max(fibers // 2, 1)
                q = s.q if n else group.columns
                assert q <= padded < q + columns and padded % columns == 0
                assert -(-numbers // s.p // (32 * fibers)) * (padded // columns) * 32 <= group.threads, "each warp has one piece of work"
                numbers = numbers // s.p * q
    last = kron_groups.groups(((2000, 2000), (4, 4)), 8, itemsize, 132, limit)[-1]
    assert last.steps[0].p == 2000 and not last.configs, "a factor that no block can hold is v3's"


def test_rows_in_parts_stay_in_the_cache():
    plan = kron_groups.groups(((16, 16),) * 4, 1024, 4, 132, 226 << 10)
    part = kron_groups.rows_at_once(plan, 1024, 4)
    assert len(plan) > 1 and 0 < part < 1024 and part * 4 * 16**4 <= kron_groups.IN_CACHE
    assert kron_groups.rows_at_once(plan, 10, 4) == 10 and kron_groups.rows_at_once(plan[:1], 1 << 20, 4) == 1 << 20


def forget_plans() -> None:
    kron_groups.groups.cache_clear()
    kron_versions._plan.cache_clear()


def tilings(sizes, first, count, rows, itemsize) -> list[Group]:
    """All tilings of `count` steps from `first` on."""
    run = steps(sizes)[first : first + count]
    assert kron_groups._end_of_run(steps(sizes), first) >= first + count
    return list(kron_groups._tilings(run, rows, itemsize, 132, 226 << 10))


CASES = [
    (((3, 5), (16, 18)), 0, 2, 5),  # slices of 18, 9 and 5 columns; rows that do not fill the last tile
    (((2, 2), (5, 4), (21, 40)), 0, 2, 3),  # an array [..][21]: R of 1 to 32, also more than there are
    (((2, 2), (2, 2), (2, 2), (8, 8)), 0, 4, 3),
    (((40, 36),), 0, 1, 9),
    (((3, 3), (33, 17), (5, 5)), 1, 1, 2),  # one factor in the middle
]


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("sizes, first, count, rows", CASES)
def test_every_tiling_gives_the_same(device, sizes, first, count, rows, dtype):
    order = steps(sizes)
    before = {s.factor for s in order[:first]}
    now = [q if i in before else p for i, (p, q) in enumerate(sizes)]
    x = torch.randn(rows, prod(now), dtype=dtype, device=device)
    ws = [torch.randn(p, q, dtype=dtype, device=device) for p, q in sizes]
    inside = {s.factor for s in order[first : first + count]}
    exact = dense(x, [w if i in inside else torch.eye(n, dtype=dtype, device=device) for i, (w, n) in enumerate(zip(ws, now, strict=True))])
    found = tilings(sizes, first, count, rows, dtype.itemsize)
    assert len({(g.L, g.R) for g in found}) > 1 and (len({g.slices for g in found}) > 1 or sizes[order[first].factor][1] < 16)
    with backend.simulated_memory([x, *ws]) if device == "cpu" else contextlib.nullcontext():
        results = [launch_group(prepare(group, rows, dtype, x.get_device()), x, ws, PLAIN) for group in found]
    for y in results:
        close(y, exact)


@kernels
@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
def test_parts_of_the_rows_and_several_launches(device, dtype, monkeypatch):
    monkeypatch.setattr(kron_groups, "_end_of_run", lambda order, first: min(first + 2, len(order)))
    monkeypatch.setattr(kron_groups, "IN_CACHE", 2 * 81 * dtype.itemsize)
    forget_plans()
    x, ws = draw(5, ((3, 3),) * 4, device, dtype)
    bias, residual = torch.randn(81, dtype=dtype, device=device), torch.randn(5, 81, dtype=dtype, device=device)
    y = cukern.kron_linear(x, ws, bias=bias, residual=residual, scale=0.5, version="v4")
    exact = 0.5 * dense(x.double(), [w.double() for w in ws]) + bias + residual
    assert torch.allclose(y.double(), exact, rtol=0, atol=float(20 * torch.finfo(dtype).eps * exact.abs().max()))
    forget_plans()


@kernels
def test_a_factor_that_no_block_holds(device, monkeypatch):
    monkeypatch.setattr(backend, "shared_memory", lambda device: 2024)
    forget_plans()
    x, ws = draw(3, ((2, 3), (17, 19), (2, 2)), device)
    assert any(not g.configs for g in kron_groups.groups(((2, 3), (17, 19), (2, 2)), 3, 8, backend.multiprocessors(-1), 1000))
    close(cukern.kron_linear(x, ws, version="v4"), dense(x, ws))
    forget_plans()
