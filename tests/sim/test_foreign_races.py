"""Kernels as others write them: races that only a full history of each location shows, and correct code that
must not be accused."""

import pytest
import torch
from sim_cases import Case, ints, iota
from sim_kernels import simulate

from cukern import sim

LAST_BLOCK = """
__device__ unsigned ticket;
__global__ void k(int* out, int* part, const int* x) {
    __shared__ bool last;
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    part[i] = 2 * x[i];  // there
    BEFORE
    if (threadIdx.x == 0) {
        __threadfence();
        last = atomicAdd(&ticket, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    int sum = 0;
#pragma unroll 1
    for (int b = 0; b < gridDim.x; ++b) sum += part[b * blockDim.x + threadIdx.x];  // here
    out[threadIdx.x] = sum;
}
"""
# fmt: off
RACES = [
    Case("a vector written over another warp's scalar read", sim.Race,
         lambda x: torch.cat((iota(64), iota(4) + 1)),
         r"writes 16 bytes, byte 1024 of the tensor of argument 'x', that thread \(\d+, 0, 0\) read at "
         r"{there}: no barrier", """
__global__ void k(int* s, int* x) {
    int t = threadIdx.x;
    s[t] = x[256 + t];  // there
    __syncwarp();
    [[=> __syncthreads();]]
    if (t == 32) ((int4*)x)[64] = make_int4(1, 2, 3, 4);  // here
    if (t < 4) s[64 + t] = t + 1;
}
""", arguments=lambda: [ints(68), iota(512) - 256], thread=32),
    Case("a __syncwarp instead of a barrier", sim.Race, lambda x: torch.cat((x[:128], x[128:] + 127)),
         r"writes 4 bytes, offset 0 of shared memory \(carry \+ 0\), that thread \(\d+, 0, 0\) read at "
         r"{there}: no barrier", """
__global__ void k(int* out, const int* x) {
    __shared__ int carry;
    int t = threadIdx.x;
    if (t == 0) carry = 0;
    __syncthreads();
    for (int i = 0; i < 256; i += 128) {
        int v = x[i + t] + carry;  // there
        [[__syncwarp(); => __syncthreads();]]
        if (t == 127) carry = v;  // here
        __syncthreads();
        out[i + t] = v;
    }
}
""", arguments=lambda: [ints(256), iota(256)], block=128, thread=127),
    Case("a sum of atomics without a fence", sim.Race, lambda acc, ticket: torch.tensor([8]),
         r"that block \(\d, 0, 0\), thread \(0, 0, 0\) wrote at {there}: nothing orders two blocks", """
__global__ void k(int* o, int* acc, int* ticket) {
    atomicAdd(acc, 1);  // there
    [[=> __threadfence();]]
    if (atomicAdd(ticket, 1) == gridDim.x - 1) *o = *acc;  // here
}
""", arguments=lambda: [ints(1), ints(1) + 1, ints(1) + 1], grid=8, block=1, block_index=7),
    Case("a fence of one thread for the writes of others", sim.Race,
         lambda part, x: 2 * x.view(4, 64).sum(0, dtype=torch.int32),
         r"byte \d+ of the tensor of argument 'part', that block \(0, 0, 0\), thread \(\d+, 0, 0\) wrote at "
         r"{there}: nothing orders",
         LAST_BLOCK.replace("BEFORE", "[[=> __syncthreads();]]"),
         arguments=lambda: [ints(64), ints(256), iota(256)], grid=4,
         block_index=3, thread=None),
    Case("a fence of one thread for another lane of its warp", sim.Race,
         lambda part, x: 2 * x.view(4, 32).sum(0, dtype=torch.int32),
         r"byte \d+ of the tensor of argument 'part', that block \(0, 0, 0\), thread \(\d+, 0, 0\) wrote at "
         r"{there}: nothing orders",
         LAST_BLOCK.replace("BEFORE", "[[=> __syncwarp();]]"),
         arguments=lambda: [ints(32), ints(128), iota(128)], grid=4, block=32,
         block_index=3, thread=None),
    Case("a flag that another flag's reader trusts", sim.Race, lambda a, b: torch.tensor([5]),
         r"reads 4 bytes, byte 0 of the tensor of argument 'data', that block \(0, 0, 0\), thread \(0, "
         r"0, 0\) wrote at {there}", """
__global__ void k(int* out, int* data, volatile int* flags) {
    if (blockIdx.x == 0) {
        data[0] = 5;  // there
        __threadfence();
        flags[0] = 1;
    } else if (blockIdx.x == 1) {
        flags[1] = 1;
    } else {
        while (!flags[ [[1 => 0]] ]);
        __threadfence();
        *out = *(volatile int*)data;  // here
    }
}
""".replace("*(volatile int*)data", "data[0]"), arguments=lambda: [ints(1), ints(1), ints(2) + 1], grid=3,
     block=1, block_index=2),
    Case("an atomic for its own block only", sim.Race, lambda: torch.tensor([128]),
         r"writes 4 bytes, byte 0 of .* 'sum', that block \(\d, 0, 0\), thread \(\d+, 0, 0\) wrote at "
         r".*: an atomic of .cta scope", """
__global__ void k(int* sum) { atomicAdd[[_block =>]](sum, 1); }  // here
""", arguments=lambda: [ints(1) + 1], grid=2, block_index=None, thread=None),
    Case("a read-only load of what the launch wrote", sim.Race, lambda x: 3 * x,
         r"reads 4 bytes, byte 0 of the tensor of argument 'out', through the read-only cache \(__ldg, "
         r"or const and __restrict__\)", """
    out[threadIdx.x] = 3 * x[threadIdx.x];  // there
    __syncthreads();
    int v = [[__ldg(out + threadIdx.x) => out[threadIdx.x] ]];  // here
    __syncthreads();
    out[threadIdx.x] = v;
"""),
    Case("two restricted pointers to one tensor", sim.Race, lambda x: x + 2,
         r"4 bytes, byte \d+ of the tensor of argument 'out', (that|through the read-only cache)", """
__global__ void k(int* [[__restrict__ =>]] out, const int* [[__restrict__ =>]] x) {
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        int v = x[threadIdx.x ^ i] + 1;
        __syncthreads();
        out[threadIdx.x] = v;
        __syncthreads();
    }
}
""", arguments=lambda: [x := ints(64), x], thread=None),
]
# fmt: on
CASES = [pytest.param(c, id=c.id) for c in RACES]


@pytest.mark.parametrize("case", CASES)
def test_wrong_kernel_is_reported(case):
    case.check_report()


@pytest.mark.parametrize("case", CASES)
def test_mended_kernel_is_right_and_not_accused(case):
    if case.id.startswith("two restricted"):
        x = ints(64)
        simulate(case.source(wrong=False), x, x, block=64)
        assert x.tolist() == [1] * 64
    else:
        case.check_mended()


def test_scalars_read_and_vectors_written_by_the_same_thread():
    text = """
__global__ void own(int* x, int* s) {
    int t = threadIdx.x; s[t] = x[4 * t]; int4 v = ((int4*)x)[t]; v.x += 1; ((int4*)x)[t] = v;
}
"""
    x, s = iota(128), ints(32)
    simulate(text, x, s)
    assert x[::4].tolist() == (iota(128)[::4] + 1).tolist() and s.tolist() == iota(128)[::4].tolist()


DOUBLE_ADD = """
__device__ double add(double* address, double value) {
    unsigned long long* p = (unsigned long long*)address;
    unsigned long long old = *p, assumed;
    do {
        assumed = old;
        old = atomicCAS(p, assumed, __double_as_longlong(value + __longlong_as_double(assumed)));
    } while (assumed != old);
    return __longlong_as_double(old);
}
"""


def test_plain_first_read_of_a_compare_and_swap_loop():
    out = torch.zeros(1, dtype=torch.float64)
    simulate(
        DOUBLE_ADD + "__global__ void k(double* out) { add(out, threadIdx.x); }",
        out,
        grid=3,
        block=64,
        name="k",
    )
    assert out.item() == 3 * 63 * 32


def test_plain_read_that_no_compare_and_swap_follows():
    text = (
        DOUBLE_ADD
        + "__global__ void k(double* out, double* last) { add(out, threadIdx.x); if (threadIdx.x == 40) "
        "*last = *out; }"
    )
    with pytest.raises(
        sim.Race, match=r"thread \(40, 0, 0\).*reads 8 bytes, byte 0 of the tensor of argument 'out'"
    ):
        simulate(
            text, torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64), block=64, name="k"
        )


GRID_BARRIER = """
__device__ void wait(unsigned* count, unsigned goal) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(count, 1);
        while (*(volatile unsigned*)count < goal);
        __threadfence();
    }
    __syncthreads();
}
__global__ void k(int* out, int* a, unsigned* count) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    a[i] = i;
    wait(count, gridDim.x);
    int v = a[n - 1 - i];
    wait(count, 2 * gridDim.x);
    a[i] = v;
    wait(count, 3 * gridDim.x);
    out[i] = a[n - 1 - i];
}
"""


@pytest.mark.parametrize("grid, block", [(4, 64), (40, 1024)])
def test_grid_barrier(grid, block):
    n = grid * block
    out = ints(n)
    simulate(GRID_BARRIER, out, ints(n), ints(1) + 1, grid=grid, block=block, name="k")
    assert torch.equal(out, iota(n))


def test_grid_barrier_without_its_second_barrier():
    text = GRID_BARRIER.replace("wait(count, 2 * gridDim.x);", "").replace("3 * gridDim.x", "2 * gridDim.x")
    with pytest.raises(sim.Race, match="nothing orders two blocks"):
        simulate(text, ints(256), ints(256), ints(1) + 1, grid=4, block=64, name="k")
