"""All faults of a launch at once, and checks that are switched off."""

import pytest
import torch
from sim_cases import ints, iota
from sim_kernels import line_of, simulate

from cukern import sim

MANY = """
__global__ void k(int* out, const int* x, int n) {
    __shared__ int tile[64], other[64];
    int i = threadIdx.x;
    tile[i] = x[i];  // bounds
    int v = tile[63 - i];  // race
    __syncthreads();
    if (i < 60) other[i] = v;
    __syncthreads();
    out[i] = other[i];  // unwritten
    if (i < 4) out[i] = *(const int*)((const char*)x + i);  // misaligned
}
"""
KINDS = {
    "bounds": sim.OutOfBounds,
    "race": sim.Race,
    "misaligned": sim.Misaligned,
    "unwritten": sim.Uninitialized,
}


def test_collect_lists_each_fault_once():
    with sim.collect() as faults:
        simulate(MANY, ints(64), iota(50), 0, block=64)
    found = [(type(fault), int(fault.where.location.rpartition(":")[2])) for fault in faults]
    assert found == [(kind, line_of(MANY, mark)) for mark, kind in KINDS.items()]
    with pytest.raises(sim.OutOfBounds):
        simulate(MANY, ints(64), iota(50), 0, block=64)


def test_collect_of_a_launch_without_faults():
    x, out = iota(64), ints(64)
    with sim.collect() as faults:
        simulate(
            "__global__ void k(int* out, const int* x) { out[threadIdx.x] = x[threadIdx.x] + 1; }",
            out,
            x,
            block=64,
        )
    assert faults == [] and torch.equal(out, x + 1)


def test_what_is_left_out_is_the_access_alone():
    x, out = iota(40), ints(64)
    with sim.collect() as faults:
        simulate(
            "__global__ void k(int* out, const int* x) { out[threadIdx.x] = x[threadIdx.x] + 1; }",
            out,
            x,
            block=64,
        )
    assert len(faults) == 1 and out.tolist() == [*range(1, 41), *[1] * 24]


@pytest.mark.parametrize(
    "mark, switch", [("bounds", "bounds"), ("race", "races"), ("unwritten", "uninitialized")]
)
def test_checks_are_switched_off_one_by_one(mark, switch):
    left = [
        kind
        for kind in KINDS.values()
        if kind is not KINDS[mark] and not (mark == "bounds" and kind is sim.Misaligned)
    ]
    with sim.checks(**{switch: False}), sim.collect() as faults:
        simulate(MANY, ints(64), iota(50), 0, block=64)
    assert [type(fault) for fault in faults] == left
    with sim.checks(races=False, bounds=False, uninitialized=False):
        simulate(MANY, ints(64), iota(50), 0, block=64)


def test_deadlocks_and_endless_loops_end_a_launch_that_collects():
    text = "__global__ void k(volatile int* x) { int v = x[1]; while (x[0]) v = x[v]; }"
    with sim.collect() as faults, sim.checks(steps=3000):
        simulate(text, iota(4) * 0 + 1)
    assert [type(fault) for fault in faults] == [sim.StepLimit]


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"races": 1}, TypeError, "races must be a bool, got 1"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"steps": 1.5}, TypeError, "steps must be an int or None, got 1.5"),
    ],
)
def test_wrong_switches(options, error, words):
    with pytest.raises(error, match=words), sim.checks(**options):
        pass
