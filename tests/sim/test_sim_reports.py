"""What the simulator says of wrong kernels: the kind of bug, the thread and the line; and that it says
nothing of the mended ones."""

import re

import pytest
import torch
from sim_cases import Case, ints, iota
from sim_kernels import launch, line_of, load, simulate

from cukern import LaunchError, sim

# fmt: off
BOUNDS = [
    Case("read after the end", sim.OutOfBounds, lambda x, n: torch.cat((x + 1, torch.tensor([-1]))),
         r"reads 4 bytes of global memory 0 bytes after the end of the tensor of argument 'x', which "
         r"has 400 bytes", """
__global__ void k(int* out, const int* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if ([[i > n => i >= n]]) return;
    out[i] = x[i] + 1;  // here
}
""", arguments=lambda: [ints(101), iota(101)[:100], 100], grid=2, block_index=1, thread=36),
    Case("write before the start", sim.OutOfBounds, lambda x: x,
         r"writes 4 bytes of global memory 8 bytes before the start of the tensor of argument 'out', "
         r"which has 256 bytes", """
__global__ void k(int* out, const int* x) {
    int i = threadIdx.x;
    out[i [[- 2 =>]]] = x[i];  // here
}
""", arguments=lambda: [ints(66)[2:], iota(64)]),
    Case("a null pointer", sim.OutOfBounds, lambda bias: torch.full((64,), 7), r"reads 4 bytes of global "
                                                                               r"memory through a null "
                                                                               r"pointer", """
__global__ void k(int* out, const int* bias) {
    out[threadIdx.x] = [[=> !bias ? 7 :]] bias[threadIdx.x];  // here
}
""", arguments=lambda: [ints(64), 0]),
    Case("a misaligned vector", sim.Misaligned, lambda x: x[::2] + x[1::2],
         r"reads 8 bytes of global memory, but the address 0x[0-9a-f]+ is not a multiple of 8", """
__global__ void k(int* out, const int* x) {
    int2 v = *(const int2*)(x + [[1 => 2]] * threadIdx.x);  // here
    out[threadIdx.x] = v.x + v.y;
}
""", arguments=lambda: [ints(64), iota(128)], thread=1),
    Case("a vector across the end", sim.OutOfBounds, lambda x: torch.cat((x[:-1:2] + x[1::2], x[-1:])),
         r"reads 8 bytes of global memory across the end of the tensor of argument 'x', which has 508 "
         r"bytes", """
__global__ void k(int* out, const int* x) {
    int i = threadIdx.x;
    int2 v = [[=> i == 63 ? make_int2(x[126], 0) :]] *(const int2*)(x + 2 * i);  // here
    out[i] = v.x + v.y;
}
""", arguments=lambda: [ints(64), iota(127)], thread=63),
    Case("misaligned shared memory", sim.Misaligned, lambda: torch.tensor([1, 2, 3, 4]),
         r"writes 16 bytes of shared memory, but the offset 4 is not a multiple of 16", """
__global__ void k(int* out) {
    __shared__ alignas(16) int tile[8];
    int* to = tile + [[1 => 4]];
    *(int4*)to = make_int4(1, 2, 3, 4);  // here
    for (int i = 0; i < 4; ++i) out[i] = to[i];
}
""", arguments=lambda: [ints(4)], block=1),
    Case("too little shared memory", sim.OutOfBounds, lambda x: x.flip(0),
         r"writes 4 bytes at offset 252 of shared memory, but the block has 254 bytes of it", """
extern __shared__ int tile[];
__global__ void k(int* out, const int* x) {
    tile[threadIdx.x] = x[threadIdx.x];  // here
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];
}
""", shared=(254, 256), thread=63),
    Case("constant memory has an end", sim.OutOfBounds, lambda: torch.full((64,), 0),
         r"reads 4 bytes of global memory 0 bytes after the end of the variable table, which has 256 "
         r"bytes", """
__constant__ int table[64];
__global__ void k(int* out) {
    out[threadIdx.x] = table[threadIdx.x [[+ 1 =>]]];  // here
}
""", arguments=lambda: [ints(64)], thread=63),
]
UNWRITTEN = [
    Case("unwritten shared memory", sim.Uninitialized, lambda x: x.flip(0),
         r"reads 4 bytes that nobody wrote, offset \d+ of shared memory \(tile \+ 252\)", """
    __shared__ int pad[5], tile[64];
    pad[0] = 1;
    if (threadIdx.x [[< => <=]] 63) tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x] + pad[0] - 1;  // here
"""),
    Case("an unwritten local array", sim.Uninitialized, lambda x: x % 8 * 3,
         r"reads 4 bytes that nobody wrote, offset \d+ of local memory", """
    int a[8];
    for (int i = 0; i < [[x[2] => 8]]; ++i) a[x[i] & 7] = x[i] * 3;
    out[threadIdx.x] = a[x[threadIdx.x] & 7];  // here
""", thread=2),
    Case("a shuffle from a lane that is not there", sim.Uninitialized, lambda x: x ^ 8,
         r"reads a register of lane 16 of its warp, which is not there", """
    out[threadIdx.x] = __shfl_xor_sync(~0u, x[threadIdx.x], [[16 => 8]]);  // here
""", block=16),
    Case("a shuffle from a lane outside the mask", sim.Uninitialized, lambda x: x ^ 4,
         r"reads a register of lane 8 of its warp, which is not in the mask 0x000000ff", """
    out[threadIdx.x] = __shfl_xor_sync(0xffu << threadIdx.x / 8 * 8, x[threadIdx.x], [[8 => 4]]);  // here
""", block=32),
]
RACES = [
    Case("no __syncthreads between write and read", sim.Race, lambda x: x.flip(0),
         r"reads 4 bytes, offset \d+ of shared memory \(tile \+ 252\), that thread \(63, 0, 0\) wrote at "
         r"{there}: no barrier is between",
         """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];  // there
    [[=> __syncthreads();]]
    out[threadIdx.x] = tile[63 - threadIdx.x];  // here
"""),
    Case("no __syncthreads between read and write", sim.Race, lambda x: 3 * x.flip(0) + 3,
         r"writes 4 bytes, offset \d+ of shared memory \(tile \+ 0\), that thread \(63, 0, 0\) read at "
         r"{there}: no barrier is between", """
    __shared__ int tile[64];
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        tile[threadIdx.x] = x[threadIdx.x] + i;  // here
        __syncthreads();
        sum += tile[63 - threadIdx.x];  // there
        [[=> __syncthreads();]]
    }
    out[threadIdx.x] = sum;
"""),
    Case("a write after the writer's own read, and before it another's", sim.Race, lambda x: x.flip(0) * 2,
         r"writes 4 bytes, offset \d+ of shared memory \(tile \+ \d+\), that thread \(\d+, 0, 0\) read at "
         r"{there}: no barrier is between",
         """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    int v = ((volatile int*)tile)[63 - threadIdx.x];  // there
    [[=> __syncthreads();]]
    int own = ((volatile int*)tile)[threadIdx.x];
    tile[threadIdx.x] = own + v;  // here
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x] - own + v;
"""),
    Case("a reader that does not look at the counter", sim.Race, lambda part: torch.tensor([5]),
         r"byte 0 of the tensor of argument 'part', that block \(0, 0, 0\), thread \(0, 0, 0\) wrote at "
         r"{there}: nothing orders", """
__device__ unsigned ready;
__global__ void k(int* out, int* part) {
    if (threadIdx.x) return;
    if (blockIdx.x == 0) {
        *part = 5;  // there
        __threadfence();
        atomicAdd(&ready, 1);
    } else {
        for (int i = 0; i < 3000; ++i) __nanosleep(1);
        [[=> while (atomicAdd(&ready, 0) == 0) {} __threadfence();]]
        *out = *part;  // here
    }
}
""", arguments=lambda: [ints(1), ints(1)], grid=2, block_index=1),
    Case("no __syncwarp", sim.Race, lambda x: x ^ 5,
         r"that thread \(5, 0, 0\) wrote at {there}: a __syncwarp\(\) is missing between the two "
         r"\(__syncthreads", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];  // there
    [[=> __syncwarp();]]
    out[threadIdx.x] = tile[threadIdx.x ^ 5];  // here
"""),
    Case("a __syncwarp of other lanes", sim.Race, lambda x: x ^ 16,
         r"that thread \(16, 0, 0\) wrote at {there}: a __syncwarp\(\) is missing between the two "
         r"\(__syncthreads", """
    __shared__ int tile[32];
    tile[threadIdx.x] = x[threadIdx.x];  // there
    __syncwarp([[threadIdx.x < 16 ? 0xffff : 0xffff0000 => ~0u]]);
    out[threadIdx.x] = tile[threadIdx.x ^ 16];  // here
""", block=32),
    Case("a shuffle is no __syncwarp", sim.Race, lambda x: 2 * (x ^ 1),
         r"that thread \(1, 0, 0\) wrote at {there}: a __syncwarp\(\) is missing between the two "
         r"\(__syncthreads", """
    __shared__ int tile[32];
    tile[threadIdx.x] = x[threadIdx.x];  // there
    int other = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
    [[=> __syncwarp();]]
    out[threadIdx.x] = tile[threadIdx.x ^ 1] + other;  // here
""", block=32),
    Case("volatile is no __syncwarp", sim.Race, lambda x: x.sum(dtype=torch.int32)[None],
         r"thread \(\d+, 0, 0\) (wrote|read) at .*: a __syncwarp\(\) is missing between the two "
         r"\(__syncthreads", """
__global__ void k(int* out, const int* x) {
    __shared__ volatile int tile[32];
    int v = x[threadIdx.x];
    tile[threadIdx.x] = v;
#pragma unroll 1
    for (int d = 16; d; d /= 2) {
        [[=> __syncwarp();]]
        if (threadIdx.x < d) v += tile[threadIdx.x + d];  // here
        [[=> __syncwarp();]]
        tile[threadIdx.x] = v;
    }
    if (threadIdx.x == 0) *out = v;
}
""", arguments=lambda: [ints(1), iota(32)], block=32),
    Case("two threads write two values", sim.Race, lambda x: x[:1] + 5,
         r"writes 4 bytes, byte 0 of the tensor of argument 'out', where block \(0, 0, 0\), thread "
         r"\(63, 0, 0\) writes another value", """
__global__ void k(int* out, const int* x) {
    *out = x[ [[threadIdx.x => 0]] ] + 5;  // here
}
""", arguments=lambda: [ints(1), iota(64)]),
    Case("global memory within a block", sim.Race, lambda x: x.flip(0),
         r"reads 4 bytes, byte 252 of the tensor of argument 'out', that thread \(63, 0, 0\) wrote at "
         r"{there}: no barrier", """
    out[threadIdx.x] = x[threadIdx.x];  // there
    [[=> __syncthreads();]]
    int v = out[63 - threadIdx.x];  // here
    __syncthreads();
    out[threadIdx.x] = v;
"""),
    Case("two blocks", sim.Race, lambda x: x.view(2, 64).flip(1).reshape(-1) + 1,
         r"reads 4 bytes, byte 256 of .* 'out', that block \(1, 0, 0\), thread \(0, 0, 0\) wrote at "
         r"{there}: nothing orders two blocks",
         """
__global__ void k(int* out, const int* x) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i];  // there
    __syncthreads();
    int v = out[ [[(i + 64) % 128 => blockIdx.x * 64 + 63 - threadIdx.x]] ];  // here
    __syncthreads();
    out[i] = v + 1;
}
""", arguments=lambda: [ints(128), iota(128)], grid=2),
    Case("a plain sum of several blocks", sim.Race, lambda x: x.sum(dtype=torch.int32)[None],
         r"that block \(\d, 0, 0\), thread \(0, 0, 0\) read at {there}: nothing orders two blocks", """
__global__ void k(int* out, const int* x) {
    if (threadIdx.x) return;
    [[*out += x[blockIdx.x] => atomicAdd(out, x[blockIdx.x])]];  // here
}
""", arguments=lambda: [torch.zeros(1, dtype=torch.int32), iota(8)], grid=8),
    Case("no fence before the counter", sim.Race, lambda part, x: 10 * x.sum(dtype=torch.int32)[None],
         r"byte 0 of the tensor of argument 'part', that block \(0, 0, 0\), thread \(0, 0, 0\) wrote at "
         r"{there}: nothing orders", """
__device__ unsigned arrived;
__global__ void k(int* out, int* part, const int* x) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        part[blockIdx.x] = x[blockIdx.x] * 10;  // there
        [[=> __threadfence();]]
        last = atomicAdd(&arrived, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        int sum = 0;
#pragma unroll 1
        for (int i = 0; i < gridDim.x; ++i) sum += part[i];  // here
        *out = sum;
    }
}
""", arguments=lambda: [ints(1), ints(8), iota(8)], grid=8, block_index=7),
    Case("no cp.async.wait", sim.Race, lambda x: x,
         r"reads 4 bytes, offset 0 of shared memory .*, into which an asynchronous copy still writes: a "
         r"cp.async.wait", """
    __shared__ int tile[64];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + threadIdx.x) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
    [[=> asm volatile("cp.async.wait_group 0;" ::: "memory");]]
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];  // here
"""),
    Case("cp.async.wait for too few groups", sim.Race, lambda x: x,
         r"reads 4 bytes, offset 4 of shared memory .*, into which an asynchronous copy still writes: a "
         r"cp.async.wait", """
__device__ void copy(int* to, const int* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
        :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
}
__global__ void k(int* out, const int* x) {
    __shared__ int tile[2];
    copy(tile, x);
    copy(tile + 1, x + 1);
    asm volatile("cp.async.wait_group [[1 => 0]];" ::: "memory");
    out[0] = tile[0];
    out[1] = tile[1];  // here
}
""", arguments=lambda: [ints(2), iota(2)], block=1),
    Case("cp.async.wait without a barrier", sim.Race, lambda x: x.flip(0),
         r"reads 4 bytes, offset \d+ of shared memory \(tile \+ 252\), that thread \(63, 0, 0\) wrote "
         r"at {there}: no barrier", """
    __shared__ int tile[64];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(x + threadIdx.x)  // there
                 : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    [[=> __syncthreads();]]
    out[threadIdx.x] = tile[63 - threadIdx.x];  // here
"""),
]
BARRIERS = [
    Case("a warp ends while others wait at a named barrier", sim.BarrierFault, lambda x, n: x.flip(0),
         r"waits at barrier 1 for 64 threads, but thread \(20, 0, 0\) has ended at {there}", """
__global__ void k(int* out, const int* x, int n) {
    __shared__ int tile[64];
    int i = threadIdx.x;
    [[if (i >= n) return; =>]]
    tile[i] = i < n ? x[i] : 0;
    asm volatile("bar.sync 1, 64;" ::: "memory");  // here
    if (i < n) out[i] = tile[n - 1 - i];
}  // there
""", arguments=lambda: [ints(20), iota(20), 20]),
    Case("a barrier in one branch", sim.BarrierFault, lambda x: x.flip(0),
         r"offset \d+ of shared .* wrote at {there}: thread \(32, 0, 0\) waits at the __syncthreads\(\) "
         r"at .*, which this thread has", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];  // there
    [[if (threadIdx.x >= 32) =>]]
        __syncthreads();
    int v = tile[63 - threadIdx.x];  // here
    __syncthreads();
    out[threadIdx.x] = v;
"""),
    Case("two barriers that threads take for one", sim.BarrierFault, lambda x: x.flip(0),
         r"that thread \(\d+, 0, 0\) wrote at {there}: the threads of the block have met at different "
         r"__syncthreads\(\), some at", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x >= 32) {
        [[__syncthreads(); =>]]
        tile[threadIdx.x] = x[threadIdx.x] + 0 * x[0];  // there
    }
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];  // here
""", thread=0),
    Case("two barriers for one warp", sim.BarrierFault, lambda x: x,
         r"waits at a barrier, while of its warp thread \(\d+, 0, 0\) waits at another", """
__global__ void k(int* out, int* x) {
    int v = threadIdx.x;
    if (threadIdx.x < [[40 => 32]]) {
        __syncthreads();
        v += x[threadIdx.x] * 3;
    } else {
        __syncthreads();
        v += x[threadIdx.x] * 5;
    }
    out[threadIdx.x] = v;
    x[threadIdx.x] = v;
}
""", thread=None),
    Case("a named barrier that counts too many", sim.BarrierFault, lambda x: x.flip(0),
         r"waits at barrier 1 for 96 threads, and the block has no more", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    asm volatile("bar.sync 1, [[96 => 64]];" ::: "memory");  // here
    out[threadIdx.x] = tile[63 - threadIdx.x];
"""),
    Case("two counts at one named barrier", sim.BarrierFault, lambda x: x.view(2, 32).flip(1).reshape(-1),
         r"meets (32|64) threads at barrier 1, but others who are there meet (32|64) threads: all must "
         r"name the same number", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    int met = threadIdx.x < 32 ? 32 : 64, warp = threadIdx.x / 32;
    asm volatile("bar.sync %0, %1;" :: "r"(1 [[=> + warp]]), "r"(met [[=> & 32 | 32]]) : "memory");  // here
    out[threadIdx.x] = tile[threadIdx.x / 32 * 32 + 31 - threadIdx.x % 32];
""".replace("& 32 | 32", "* 0 + 32"), thread=None),
    Case("part of a warp at a named barrier", sim.BarrierFault, lambda x: x.flip(0),
         r"is at barrier 1, but 40 threads are not whole warps", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    asm volatile("bar.sync 1, [[40 => 64]];" ::: "memory");  // here
    out[threadIdx.x] = tile[63 - threadIdx.x];
"""),
    Case("a 17th barrier", sim.BarrierFault, lambda x: x.flip(0), r"is at barrier 16, but the numbers are 0 "
                                                                  r"to 15", """
    __shared__ int tile[64];
    tile[threadIdx.x] = x[threadIdx.x];
    int last = x[63] - [[47 => 48]];
    asm volatile("bar.sync %0, 64;" :: "r"(last) : "memory");  // here
    out[threadIdx.x] = tile[63 - threadIdx.x];
"""),
    Case("a shuffle in one branch", sim.BarrierFault, lambda x: torch.where(x < 20, x ^ 1, x ^ 2),
         r"waits for the lanes 0xffffffff of its warp, but thread \(20, 0, 0\) waits at", """
    int v = x[threadIdx.x];
    if (threadIdx.x < 20)
        v = __shfl_xor_sync([[~0u => 0x000fffffu]], v, 1);  // here
    else
        v = __shfl_xor_sync([[~0u => 0xfff00000u]], v, 2);
    out[threadIdx.x] = v;
""", block=32),
    Case("a lane that its mask leaves out", sim.BarrierFault, lambda x: x ^ 1,
         r"names the lanes 0x0000ffff of its warp, but it is lane 16 itself", """
    out[threadIdx.x] = __shfl_xor_sync([[0x0000ffffu => ~0u]], x[threadIdx.x], 1);  // here
""", block=32, thread=16),
]
OTHERS = [
    Case("an endless loop", sim.StepLimit, lambda x: torch.full((64,), 64), r"still runs after \d+ steps", """
    int i = x[threadIdx.x];
    while (i != 64) i = (i + [[2 => 1]]) * x[1];  // here
    out[threadIdx.x] = i;
""", thread=None),
    Case("a failed assert", sim.Fault, lambda x: x, r"assertion failed: x is small \(file.cu:5\)", """
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
__global__ void k(int* out, const int* x) {
    if (!(x[threadIdx.x] < [[60 => 64]])) __assertfail("x is small", "file.cu", 5, "k", 1);  // here
    out[threadIdx.x] = x[threadIdx.x];
}
""", thread=60),
    Case("a trap", sim.Fault, lambda x: x, r"trap", """
    if (x[threadIdx.x] >= [[60 => 64]]) __trap();  // here
    out[threadIdx.x] = x[threadIdx.x];
""", thread=60),
]
# fmt: on
CASES = [pytest.param(c, id=c.id) for c in (*BOUNDS, *UNWRITTEN, *RACES, *BARRIERS, *OTHERS)]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr("cukern.sim.machine.options.MOST_STEPS", 20_000)


@pytest.mark.parametrize("case", CASES)
def test_wrong_kernel_is_reported(case):
    case.check_report()


@pytest.mark.parametrize("case", CASES)
def test_mended_kernel_is_right_and_not_accused(case):
    case.check_mended()


def test_instruction_that_is_not_simulated_is_named_where_it_is_executed():
    text = """
__global__ void k(int* out, int go) {
    if (go) asm volatile("discard.global.L2 [%0], 128;" :: "l"(out));  // here
    *out = 1;
}
"""
    out = ints(1)
    simulate(text, out, 0, block=1)
    assert out.item() == 1
    with pytest.raises(
        sim.NotSimulated, match=rf"discard\.global\.L2, in k, <cukern.compile \w+>:{line_of(text, 'here')}"
    ):
        simulate(text, out, 1, block=1)


def test_the_line_of_the_kernel_comes_before_that_of_a_header():
    text = """#include <cuda_pipeline.h>
__global__ void k(int* out, const int* x) {
    __shared__ int tile[32];
    __pipeline_memcpy_async(tile + threadIdx.x, x + threadIdx.x, 4);  // copy
    __pipeline_commit();
    out[threadIdx.x] = tile[threadIdx.x];  // here
}
"""
    copy = rf"<cukern.compile \w+>:{line_of(text, 'copy')} \(in cuda_pipeline_helpers.h:\d+\)"
    with pytest.raises(
        sim.Race, match=rf":{line_of(text, 'here')}: reads 4 bytes.* is missing after the copy at {copy}"
    ):
        simulate(text, ints(32), iota(32))
    with pytest.raises(
        sim.OutOfBounds,
        match=rf"thread \(31, 0, 0\), {copy}: reads 4 bytes of global memory 0 bytes after the end",
    ):
        simulate(text, ints(32), iota(31))


# ---- what only shows from one launch to the next, or beside a kernel

ADD = (
    "__global__ void add(int* out, const int* x, int n) { int i = threadIdx.x; if (i < n) out[i] = x[i] + "
    "1; }\n"
)


def test_workspace_is_known_by_what_an_earlier_kernel_wrote():
    kernel, x = load(ADD), iota(32)
    with sim.memory.scope([x]):
        work, out = torch.empty(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
        launch(kernel, work, x, 20)
        launch(kernel, out, work, 20)
        assert torch.equal(out[:20], x[:20] + 2)
        with pytest.raises(sim.Uninitialized, match="byte 80 of the tensor of argument 'x'"):
            launch(kernel, out, work, 21)


def test_what_a_launch_writes_does_not_hide_what_it_leaves_out():
    """Some of the workspace is from an earlier launch, some from this one, some from nobody."""
    text = """
__global__ void k(int* out, int* work, int from) {
    work[20 + threadIdx.x % 4] = 7;
    __syncthreads();
    out[threadIdx.x] = work[from + threadIdx.x];
}
"""
    add, kernel, x = load(ADD), load(text), iota(32)
    with sim.memory.scope([x]):
        work, out = torch.empty(40, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
        launch(add, work, x, 20)
        launch(kernel, out, work, 10, block=14)
        assert out[:14].tolist() == [*range(11, 21), 7, 7, 7, 7]
        with pytest.raises(
            sim.Uninitialized, match=r"thread \(14, 0, 0\).* byte 96 of the tensor of argument 'work'"
        ):
            launch(kernel, out, work, 10, block=15)


@pytest.mark.parametrize(
    "fill",
    [
        lambda x: x.fill_(3),
        lambda x: x.copy_(iota(32)),
        lambda x: x[:].zero_(),
        lambda x: torch.add(x, 0, out=x),
    ],
)
def test_in_place_ops_write(fill):
    kernel = load(ADD)
    with sim.memory.scope():
        x, out = torch.empty(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
        with pytest.raises(sim.Uninitialized):
            launch(kernel, out, x, 32)
        fill(x)
        launch(kernel, out, x, 32)
    assert torch.equal(out, x + 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(32),
        lambda x: torch.empty_strided((32,), (1,), dtype=torch.int32),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_empty_tensors_are_unwritten_even_where_torch_fills_them(make, deterministic):
    kernel, x, before = load(ADD), iota(32), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        with sim.memory.scope([x]):
            y, out = make(x), x * 2
            with pytest.raises(sim.Uninitialized):
                launch(kernel, out, y, 32)
            launch(kernel, out, out * 2, 32)
    finally:
        torch.use_deterministic_algorithms(before)


def test_neighbours_of_a_view_are_out_of_bounds():
    x, out = iota(96), ints(32)
    simulate(ADD, out, x[32:64], 32)
    assert torch.equal(out, x[32:64] + 1)
    with pytest.raises(
        sim.OutOfBounds, match="0 bytes after the end of the tensor of argument 'x', which has 124 bytes"
    ):
        simulate(ADD, out, x[32:63], 32)
    with pytest.raises(
        sim.OutOfBounds, match=r"at 0x[0-9a-f]+, which belongs to no argument|of argument 'out'"
    ):
        kernel = load(ADD)
        with sim.memory.scope([out]):
            launch(kernel, out, x, 32)


@pytest.mark.parametrize(
    "view, index, ok",
    [
        ((slice(None), slice(0, 20)), 32, True),
        ((slice(None), slice(0, 20)), 20, False),
        ((slice(None), slice(0, 20, 2)), 1, False),
        ((slice(None), slice(5, 20)), 28, False),
    ],
)
def test_memory_between_the_rows_of_a_view_is_out_of_bounds(view, index, ok):
    text = "__global__ void k(int* out, const int* x, int i) { out[0] = x[i]; }"
    x, out = iota(128).view(4, 32), ints(1)
    if ok:
        simulate(text, out, x[view], index, block=1)
        assert out.item() == x[view].as_strided((1,), (1,), x[view].storage_offset() + index).item()
    else:
        with pytest.raises(
            sim.OutOfBounds,
            match="of the tensor of argument 'x', which is between the rows or columns of a view",
        ):
            simulate(text, out, x[view], index, block=1)
    with sim.memory.scope([x]):
        simulate(text, out, x[view], index, block=1)


TENSORS = {  # which tensor an instruction accesses changes with time, or from lane to lane
    "in turn": "for (int i = 0; i < 6; ++i) v += (i % 2 ? x : y)[threadIdx.x];",
    "by lane": "v = (threadIdx.x % 2 ? x : y)[threadIdx.x];",
}


@pytest.mark.parametrize("name", TENSORS)
def test_one_instruction_that_accesses_several_tensors(name):
    text = (
        f"__global__ void k(int* out, const int* x, const int* y) {{ int v = 0; {TENSORS[name]} "
        f"out[threadIdx.x] = v; }}"
    )
    x, y, out = iota(64), iota(64) * 5, ints(64)
    simulate(text, out, x, y, block=64)
    assert torch.equal(out, 3 * (x + y) if name == "in turn" else torch.where(iota(64) % 2 == 1, x, y))
    with pytest.raises(
        sim.OutOfBounds,
        match=r"thread .63, .* 0 bytes after the end of the tensor of argument 'x', which has 252 bytes",
    ):
        simulate(text, out, x[:63], y, block=64)


@pytest.mark.parametrize("index, offset", [("(int)threadIdx.x - 1", -4), ("threadIdx.x + 64", 256)])
def test_offsets_outside_of_shared_memory(index, offset):
    text = f"""
__global__ void k(int* out) {{
    __shared__ int s[64];
    s[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = s[{index}];
}}
"""
    with pytest.raises(
        sim.OutOfBounds,
        match=f"reads 4 bytes at offset {offset} of shared memory, but the block has 256 bytes of it$",
    ):
        simulate(text, ints(64), block=64)


def test_scopes_nest():
    kernel, x = load(ADD), iota(32)
    with sim.memory.scope([x]):
        with sim.memory.scope([x]):
            out = torch.empty(32, dtype=torch.int32)
            launch(kernel, out, x, 20)
        launch(kernel, x, out, 20)
        with pytest.raises(sim.Uninitialized):
            launch(kernel, x, out, 21)
    with pytest.raises(sim.OutOfBounds):
        launch(kernel, x, x, 1)


def test_output_of_a_raw_op_is_known_by_what_it_wrote():
    kernel, x = load(ADD), iota(32)

    def first_20(x: torch.Tensor) -> torch.Tensor:
        with sim.memory.scope([x]):
            out = torch.empty(32, dtype=torch.int32)
            launch(kernel, out, x, 20)
        return out

    library = torch.library.Library("cukern_sim_test", "FRAGMENT")
    library.define("first_20(Tensor x) -> Tensor")
    library.impl("first_20", first_20, "CPU")
    with sim.memory.scope([x]):
        out = torch.ops.cukern_sim_test.first_20(x)
        launch(kernel, x, out, 20)
        with pytest.raises(sim.Uninitialized):
            launch(kernel, x, out, 21)


def test_a_launch_orders_all_before_it():
    kernel, x = load("__global__ void k(int* x) { x[threadIdx.x ^ 33] += 1; }"), iota(64)
    with sim.memory.scope([x]):
        for _ in range(3):
            launch(kernel, x, block=64)
    assert torch.equal(x, iota(64) + 3)


# ---- the launch itself


@pytest.mark.parametrize(
    "attribute, geometry, words",
    [
        ("", {"block": 1025}, "block x = 1025 is not in 1..1024"),
        ("", {"block": (1, 1, 65)}, "block z = 65 is not in 1..64"),
        ("", {"block": (32, 33)}, "1056 threads per block exceed this kernel's limit of 1024"),
        ("", {"grid": (1, 65536)}, "grid y = 65536 is not in 1..65535"),
        ("", {"grid": 0}, "grid x = 0"),
        (
            "",
            {"shared": (227 << 10) + 1},
            "232449 bytes of shared memory per block, 232449 of them dynamic, exceed the limit of 232448",
        ),
        ("__launch_bounds__(64)", {"block": 96}, "96 threads per block exceed this kernel's limit of 64"),
        (
            "__cluster_dims__(2, 1, 1)",
            {"grid": 5},
            "grid x = 5 is not a multiple of the cluster size along x, 2",
        ),
        (
            "__cluster_dims__(1, 4, 1)",
            {"grid": (4, 6)},
            "grid y = 6 is not a multiple of the cluster size along y, 4",
        ),
        ("__cluster_dims__(32, 1, 1)", {"grid": 32}, "32 blocks per cluster exceed the limit of 16"),
        ("", {"grid": 8192, "block": 1024}, "has 8388608 threads, and the simulator takes at most 4194304"),
    ],
)
def test_launches_that_are_refused(attribute, geometry, words):
    with pytest.raises(ValueError if "simulator" in words else LaunchError, match=re.escape(words)):
        simulate(f"__global__ void {attribute} k() {{}}", **geometry)


def test_a_block_as_large_as_its_bound():
    simulate(
        "__global__ void __launch_bounds__(64) k(int* out) { out[threadIdx.x] = 1; }", ints(64), block=64
    )


def test_argument_that_does_not_fit():
    with pytest.raises(TypeError, match="does not fit the parameter int n"):
        simulate("__global__ void k(int n) {}", 1.5)
