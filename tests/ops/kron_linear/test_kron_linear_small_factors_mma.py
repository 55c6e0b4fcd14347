"""kron_linear v4 of 16-bit numbers and small factors, on tensor cores: the plans, and every kind of launch against float64."""

from math import prod

import pytest
import torch
from helpers import kernels, problem, same_bits, simulated
from test_kron_linear import draw
from test_kron_linear_small_factors import check_launches, dense_of, spoiled, square, turn, turns_of

from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear import planner, small_factors_mma
from cukern.ops.kron_linear.plan import Launch, steps
from cukern.ops.kron_linear.reference import PLAIN

TARGET, SMALL = problem(2, tensor=True), problem(2, shared=163 << 10, tensor=True)
HALVES = (torch.bfloat16, torch.float16)
CASES = [  # sizes, first step, count, rows
    ((8, 8, 8), 0, 3, 17),  # one pass; several rows a tile, and some that do not fill the last
    ((8, 16, 8), 0, 3, 3),
    ((4, 4, 4, 4), 0, 4, 40),  # merged; stores of 8 bytes
    ((16, 16, 16), 0, 3, 3),  # two passes
    ((2, 2, 4, 4, 2, 2, 4, 4), 0, 8, 5),  # merged
    ((2, 4, 8, 16, 2, 4), 0, 6, 3),
    ((4, 8, 16, 16, 4), 0, 5, 2),  # three steps in a pass, of which the first and the last have bits in common
    ((8,) * 5, 0, 5, 2),
    ((16, 16, 16, 8), 0, 4, 2),  # three passes
    ((16,) * 4, 0, 4, 3),  # a row in two blocks
    ((8,) * 7, 5, 2, 1),  # a tile of some of the numbers to the right
    ((4, 16, 16, 64), 1, 2, 1),
]


def launches(sizes, first=0, count=None) -> list[Launch]:
    """Of many rows: the same do for few."""
    return list(small_factors_mma.forward(steps(square(sizes))[first:][:count], 1 << 16, TARGET))


@pytest.mark.parametrize("sizes, first, count, rows", CASES)
def test_plans_hold_each_number_once(sizes, first, count, rows):
    found = launches(sizes, first, count)
    assert found
    for group in found:
        run, top = list(group.steps), small_factors_mma.EACH + group.threads.bit_length() - 1
        assert [s for part in group.parts for step in part.steps for s in step.factors] == [s.p for s in run]
        assert group.shared <= TARGET.shared and group.L * group.R * prod(s.p for s in run) == group.slices << top
        low = within = group.R.bit_length() - 1
        within += prod(s.p for s in run).bit_length() - 1
        for part in group.parts:
            assert sorted((*part.registers, *part.lanes)) == sorted((*part.registers_after, *part.lanes_after))
            bits = part.registers + part.lanes
            assert len(set(bits)) == len(bits) == small_factors_mma.PIECE and len(part.lanes) == small_factors_mma.LANES
            registers, lanes = list(part.registers), list(part.lanes)
            for step in part.steps:
                a, b = step.at
                own = [registers[a], *lanes[:2], registers[b]]
                factor = list(range(low, low + prod(step.factors).bit_length() - 1))
                low += len(factor)
                if group.slices > 1:  # the rank's bit before the first exchange has the place of the rank's bit after it
                    assert (group.plan[8] in part.registers_after) if part is group.parts[0] else (group.plan[8] < low - len(factor))
                    factor = [group.plan[8] if b == top else b for b in factor]
                named = dict(zip(step.rows, own, strict=True))
                assert sorted(named) == [0, 1, 2, 3] and [named[i] for i in range(len(factor))] == factor, "the factors, in order"
                assert all(bit < within for bit in own), "zeros stay in a row"
                new = [named[i] for i in step.columns]
                registers[a], registers[b], lanes = lanes[2], new[3], [*lanes[3:], *new[:3]]
            assert (tuple(registers), tuple(lanes)) == (part.registers_after, part.lanes_after)
        assert group.parts[-1].run > 0, "whole sectors"


@pytest.mark.parametrize("sizes", ((8,) * 5, (16,) * 4, (16,) * 3, (4,) * 7, (8, 8, 8), (4, 8, 16, 16, 4)))
def test_lanes_meet_different_banks(sizes):
    for group in launches(sizes):
        accesses = [(p.lanes, 4, 2) for p in group.parts[1:]] + [(p.lanes_after, 4, 2) for p in group.parts[:-1]]
        for lanes, vector, unit in (*accesses, (group.parts[0].lanes, group.parts[0].before, 3)):
            at_once = 8 if vector * (4 if unit == 2 else 2) == 16 else 16
            places = [sum((lane >> i & 1) << b for i, b in enumerate(lanes)) for lane in range(at_once)]
            turned = [e ^ turn(turns_of(group, unit), unit, e) << unit for e in places]
            assert len({e % (8 << unit) // vector for e in turned}) == at_once, (lanes, unit)


@pytest.mark.parametrize("sizes", ((8,) * 5, (4,) * 7, (16,) * 3, (16,) * 4))
def test_memory_bound_layers_use_one_launch(sizes):
    (group,) = planner.forward(square(sizes), 1024, TARGET)
    assert group.kernel == "small_factors_mma"
    for target in (TARGET._replace(itemsize=4, tensor=False), TARGET._replace(aligned=8), SMALL):
        assert planner.forward(square(sizes), 1024, target)[0].kernel != "small_factors_mma"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sizes", ((8,) * 5, (4,) * 7, (8, 8, 8), (16,) * 4))
def test_registers_suffice(sizes, dtype):
    report = kron_forward.KERNELS["small_factors_mma"][dtype, launches(sizes)[-1].template()].compile("sm_90a").report
    assert not report.spill_stores and not report.spill_loads


@kernels
@pytest.mark.parametrize(
    "sizes, first, count, rows, dtype",
    [
        *((*case, torch.bfloat16) for case in CASES),
        *(pytest.param(*case, torch.float16, marks=pytest.mark.gpu if i > 3 else ()) for i, case in enumerate(CASES)),
    ],
)
def test_every_launch_gives_the_same(device, sizes, first, count, rows, dtype):
    check_launches(launches(sizes, first, count), device, sizes, first, count, rows, dtype, near)


@kernels
@pytest.mark.parametrize("dtype", HALVES)
def test_a_cluster_takes_one_row_after_another(device, dtype):
    x, ws = draw(3, square((16,) * 4), device, dtype)
    (group,) = launches((16,) * 4)
    made = kron_forward.prepare(group, 3, dtype, x.get_device())
    with simulated(x, *ws):
        y, again = (kron_forward.launch_group(made._replace(geometry=((grid, 1, 1), *made.geometry[1:])), x, ws, PLAIN) for grid in (2, 4))
    assert group.slices == 2 and same_bits(y, again)
    near(y, dense_of(x.double(), [w.double() for w in ws], (16,) * 4))


def near(y, exact, _=None):
    """Rounded once, but for errors as those of 16 bits."""
    error, eps = (y.double() - exact).abs(), torch.finfo(y.dtype).eps
    assert not bool((error > 0.51 * eps * exact.abs() + 2.0**-14 * exact.abs().max()).any())


@kernels
def test_nonfinite_inputs_reach_every_sum_that_contains_them(device):
    y, x, ws = spoiled(launches((8, 8, 8))[0], device, torch.bfloat16)
    near(y[2:], dense_of(x[2:].double(), [w.double() for w in ws], (8, 8, 8)))
