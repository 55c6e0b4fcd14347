"""kron_linear v4 where a tile's numbers lie in registers: the plans, and every kind of launch against float64."""

from math import prod

import pytest
import torch
from helpers import kernels, problem, same_bits
from test_kron_linear import close, dense, draw, launch

from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear import planner, small_factors
from cukern.ops.kron_linear.plan import Launch, steps
from cukern.ops.kron_linear.small_factors import HELD, LANES

TARGET, SMALL = problem(4), problem(4, shared=163 << 10)
CASES = [  # sizes, first step, count, rows
    ((8, 8, 8), 0, 3, 17),  # several rows a tile, and some that do not fill the last
    ((2,) * 8, 0, 8, 40),
    ((2, 4, 8, 16, 2, 4), 0, 6, 3),
    ((2, 8, 8, 8, 32), 1, 3, 2),  # a tile of some of the numbers to the right
    ((2, 8, 4, 8, 96), 1, 3, 1),  # of a power of two no other
    ((16, 16, 2, 16), 0, 4, 3),
    ((8,) * 5, 0, 5, 2),
    ((16,) * 4, 0, 4, 3),  # a row in two blocks
    ((2, 16, 16, 16, 8), 0, 5, 2),
    ((8, 16, 16, 32), 1, 3, 2),  # as well, of some of the numbers to the right
]


def square(sizes):
    return tuple((s, s) for s in sizes)


def launches(sizes, first=0, count=None) -> list[Launch]:
    """Of many rows: the same do for few."""
    return list(small_factors.forward(steps(square(sizes))[first:][:count], 1 << 16, TARGET))


def places(group: Launch) -> list[list[int]]:
    """Which bit of a result's number each bit of a block's is: the rank's for the last pass's highest."""
    top = HELD + group.threads.bit_length() - 1
    return [list(range(top)) for _ in group.parts[:-1]] + [[top if group.slices > 1 and b == group.plan[10] else b for b in range(top)]]


@pytest.mark.parametrize("sizes, first, count, rows", CASES)
def test_plans_hold_each_number_once(sizes, first, count, rows):
    assert not list(small_factors.forward(steps(square(sizes))[first:][:count], 1, TARGET)), "one tile: nothing to overlap with"
    found = launches(sizes, first, count)
    assert found
    for group in found:
        run = list(group.steps)
        assert [s for part in group.parts for s in part.factors] == run == list(steps(square(sizes))[first:][:count])
        assert group.shared <= TARGET.shared and group.plan[9] > 0, "room for a part of the next tile"
        assert group.L * group.R * prod(s.p for s in run) == group.slices * group.threads << HELD
        bits = group.R.bit_length() - 1
        for part, names in zip(group.parts, places(group), strict=True):
            assert sorted((*part.held, *part.threads)) == list(range(len(names))) and len(part.held) == HELD
            own, size = [names[b] for b in part.held], prod(s.p for s in part.factors).bit_length() - 1
            at = part.right.bit_length() - 1
            assert own[at : at + size] == list(range(bits, bits + size)), "the pass's factors, in order"
            assert list(part.held[: part.vector.bit_length() - 1]) == list(range(part.vector.bit_length() - 1))
            bits += size
        for a, b in zip(group.parts, group.parts[1:], strict=False):
            alike = a.exchanging.bit_length() - 1
            assert a.threads[alike:] == b.threads[alike:] or (group.slices > 1 and b is group.parts[-1])


@pytest.mark.parametrize("sizes", ((8,) * 5, (16,) * 4, (16,) * 3, (4,) * 7))
def test_lanes_meet_different_banks(sizes):
    for group in launches(sizes):
        for part in group.parts:
            lanes = [sum((lane >> i & 1) << b for i, b in enumerate(part.threads[:LANES])) for lane in range(32)]
            turned = [e ^ turn(turns_of(group, 2), 2, e) << 2 for e in lanes]
            for first in range(0, 32, 32 // part.vector):
                banks = [(e + i) % 32 for e in turned[first : first + 32 // part.vector] for i in range(part.vector)]
                assert len(set(banks)) == 32


def turns_of(group: Launch, unit: int) -> list[int]:
    """The arguments of Turned in the plan."""
    (text,) = [a for a in group.plan if str(a).startswith(f"Turned<{unit}, ")]
    return [int(n) for n in text[len("Turned<2, ") : -1].split(", ")]


def turn(turns, unit: int, e: int) -> int:
    """The swizzle of element e, in units of 2^unit elements."""
    found = 0
    for i, to in enumerate(turns, unit + 3):
        found ^= (e >> i & 1) * to
    return found


@pytest.mark.parametrize("sizes", ((8,) * 5, (4,) * 7))
def test_memory_bound_layers_use_one_launch(sizes):
    (group,) = planner.forward(square(sizes), 1024, TARGET)
    assert group.kernel == "small_factors"
    small = planner.forward(square(sizes), 1024, SMALL)
    assert not any(g.kernel == "small_factors" for g in small), "a GPU without clusters"
    for target in (TARGET._replace(itemsize=2, tensor=True), TARGET._replace(itemsize=8), TARGET._replace(aligned=8)):
        assert not any(g.kernel == "small_factors" for g in planner.forward(square(sizes), 1024, target))


@pytest.mark.parametrize("sizes", ((8,) * 5, (16,) * 4, (16,) * 3, (4,) * 7))
def test_registers_suffice(sizes):
    for group in launches(sizes):
        report = kron_forward.KERNELS["small_factors"][torch.float32, group.template()].compile("sm_90a").report
        assert not report.spill_stores and not report.spill_loads


@kernels
@pytest.mark.parametrize("sizes, first, count, rows", CASES)
def test_every_launch_gives_the_same(device, sizes, first, count, rows):
    def near(y, exact, largest):
        assert float((y.double() - exact).abs().max()) < 4 * torch.finfo(y.dtype).eps * largest

    check_launches(launches(sizes, first, count), device, sizes, first, count, rows, torch.float32, near)


def check_launches(found, device, sizes, first, count, rows, dtype, near):
    """`near(y, exact, largest)`: with the largest number of what is exact without bias and residual."""
    inside = {s.factor for s in steps(square(sizes))[first:][:count]}
    x, ws = draw(rows, square(sizes), device, dtype)
    ws = [w.mT.contiguous().mT if i % 2 else w for i, w in enumerate(ws)]
    exact = dense_of(x.double(), [w.double() if i in inside else None for i, w in enumerate(ws)], sizes)
    bias, residual = torch.randn(x.shape[1], device=device).to(dtype), torch.randn_like(x)
    for group in {found[0], found[-1]}:  # of the smallest tiles, and the largest
        y = launch(group, x, ws)
        assert device == "cpu" or same_bits(y, launch(group, x, ws))
        near(y, exact, exact.abs().max())
        near(launch(group, x, ws, (0.5, bias, residual)), 0.5 * exact + bias + residual, exact.abs().max())


def dense_of(x, ws, sizes):
    """Mode products by the factors that are there: their Kronecker product would not fit into memory."""
    z = x.view(-1, *sizes)
    for i, w in enumerate(ws, 1):
        z = z if w is None else torch.tensordot(z, w, ([i], [0])).movedim(-1, i)
    return z.reshape(x.shape)


@kernels
def test_nonfinite_inputs_reach_every_sum_that_contains_them(device):
    y, x, ws = spoiled(launches((8, 8, 8))[0], device, torch.float32)
    close(y[2:], dense(x[2:], ws))


def spoiled(group, device, dtype):
    """The result, where the first two rows have an infinity and a NaN; x and the factors."""
    x, ws = draw(17, square((8, 8, 8)), device, dtype)
    x[0, 100], x[1, 7] = float("inf"), float("nan")
    y = launch(group, x, ws)
    assert not y[:2].isfinite().any() and y[1].isnan().all()
    return y, x, ws
