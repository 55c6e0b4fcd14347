"""`sim.coverage`: the source lines and branches that launches did not execute."""

import torch
from sim_cases import ints, iota
from sim_kernels import line_of, load, simulate

from cukern import sim

TAIL = """
__device__ __noinline__ int far_away(int v) {
    return v * 7 + 1;  // function
}
__global__ void k(int* out, const int* x, int n) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 < n) {  // whole
        *(int4*)(out + i) = *(const int4*)(x + i);  // vector
    } else {
        for (int j = i; j < n; ++j)
            out[j] = far_away(x[j]);  // tail
    }
}
"""


def numbers(found: list[str]) -> list[int]:
    return [int(line.rpartition(":")[2]) for line in found]


def test_lines_that_no_thread_executed():
    lines = {mark: line_of(TAIL, mark) for mark in ("whole", "vector", "tail", "function")}
    with sim.coverage() as covered:
        simulate(TAIL, ints(128), iota(128), 128)
    assert {lines["tail"], lines["function"]} <= set(numbers(covered.missed)) and lines[
        "vector"
    ] not in numbers(covered.missed)
    assert lines["whole"] in numbers(covered.one_way) and set(covered.missed) < set(covered.lines)
    with sim.coverage() as covered:
        simulate(TAIL, ints(2), iota(2), 2)
    assert lines["vector"] in numbers(covered.missed) and lines["tail"] not in numbers(covered.missed)


def test_launches_of_one_block_add_up():
    launch = load(TAIL)
    with sim.coverage() as covered:
        for n in (128, 127):
            out, x = ints(n), iota(n)
            with sim.memory.scope([out, x]):
                launch((1, 1, 1), (32, 1, 1), 0, out.data_ptr(), x.data_ptr(), n)
    assert covered.missed == [] and line_of(TAIL, "whole") not in numbers(covered.one_way)


def test_a_branch_around_one_line():
    text = (
        "\n__global__ void k(int* out, int n) {\n    if (threadIdx.x < n)\n        out[threadIdx.x] = 1;\n}\n"
    )
    for n, missed in ((0, [4]), (5, [])):
        with sim.coverage() as covered:
            simulate(text, ints(32), n)
        assert [line for line in numbers(covered.missed) if line == 4] == missed


def test_coverage_with_faults_and_equal_results():
    x, plain, out = iota(100), ints(100), ints(100)
    simulate(TAIL, plain, x, 100)
    with sim.coverage() as covered, sim.collect() as faults:
        simulate(TAIL, out, x, 100)
        simulate(TAIL, out[:40], x, 100)
    assert torch.equal(out, plain) and [type(fault) for fault in faults] == [sim.OutOfBounds]
    assert line_of(TAIL, "vector") not in numbers(covered.missed)
