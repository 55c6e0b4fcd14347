"""How the simulator runs kernels: divergence, memory spaces, atomics, barriers and what warps do together,
against plain Python."""

import struct

import numpy as np
import pytest
import torch
from sim_kernels import launch, load, simulate

from cukern import sim
from cukern.ops.matmul import plan
from cukern.runtime.compile import signature
from cukern.runtime.compile.compiler import compile_ptx
from cukern.runtime.compile.sources import Source, kernels_dir
from cukern.sim.machine import machine


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def iota(n: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.int32)


def random(n: int, high: int = 1000) -> torch.Tensor:
    return torch.randint(-high, high, (n,), dtype=torch.int32)


def oracle(function, n: int = 64) -> list[int]:
    """What `function(thread)` gives for each thread."""
    return [function(i) for i in range(n)]


# ---- geometry


def test_indices_of_a_3d_launch():
    text = """
__global__ void k(int* out) {
    int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int* o = out + 10 * (block * 30 + thread);
    o[0] = blockIdx.x, o[1] = blockIdx.y, o[2] = blockIdx.z, o[3] = threadIdx.x, o[4] = threadIdx.y,
        o[5] = threadIdx.z;
    asm("mov.u32 %0, %%laneid;" : "=r"(o[6]));
    asm("mov.u32 %0, %%warpid;" : "=r"(o[7]));
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(o[8]));
    asm("mov.u32 %0, %%lanemask_ge;" : "=r"(o[9]));
}
"""
    out = ints(4 * 3 * 2, 5 * 3 * 2, 10)
    simulate(text, out, grid=(4, 3, 2), block=(5, 3, 2))
    for b in range(24):
        for t in range(30):
            mask = (1 << t) - 1
            ge = (~mask & 0xFFFFFFFF) - (1 << 32) if ~mask & 0x80000000 else ~mask
            expected = [b % 4, b // 4 % 3, b // 12, t % 5, t // 5 % 3, t // 15, t, 0, mask, ge]
            assert out[b, t].tolist() == expected


def test_blocks_beyond_one_batch():
    blocks = machine.LANES_A_BATCH // 96 * 2 + 5
    text = """
__device__ int count;
__global__ void k(int* out) {
    __shared__ int tile[70];
    tile[threadIdx.x] = blockIdx.x * 70 + threadIdx.x;
    __syncthreads();
    out[blockIdx.x * 70 + threadIdx.x] = tile[69 - threadIdx.x];
    if (threadIdx.x == 0) atomicAdd(&count, 1);
    if (threadIdx.x == 0 && blockIdx.x == gridDim.x - 1) out[0] = *(volatile int*)&count;
}
"""
    out = ints(blocks * 70)
    with pytest.raises(sim.Race, match="block \\(0, 0, 0\\), thread \\(0, 0, 0\\) wrote"):
        simulate(text, out, grid=blocks, block=70)
    simulate(text.replace("out[0] = ", ""), out, grid=blocks, block=70)
    assert torch.equal(out.view(-1, 70).flip(1).reshape(-1), iota(blocks * 70))


def test_module_variables_live_as_long_as_the_kernel():
    text = """
__device__ int total = 5;
__device__ const char* text = "abc";
__constant__ double table[3] = {1.5, 2.5, 3.5};
__global__ void k(int* out, double* d) {
    atomicAdd(&total, 1);
    __syncthreads();
    out[threadIdx.x] = *(volatile int*)&total;
    d[threadIdx.x] = table[threadIdx.x % 3] + text[threadIdx.x % 3];
}
"""
    kernel, out, d = load(text), ints(32), torch.zeros(32, dtype=torch.float64)
    with sim.memory.scope([out, d]):
        launch(kernel, out, d)
        assert out.tolist() == [37] * 32 and d.tolist() == oracle(lambda i: [98.5, 100.5, 102.5][i % 3], 32)
        launch(kernel, out, d)
    assert out.tolist() == [69] * 32


# ---- divergence


def collatz(n: int) -> int:
    steps = 0
    while n != 1:
        n, steps = (3 * n + 1 if n % 2 else n // 2), steps + 1
        if steps > 100:
            break
    return steps


def test_loops_of_different_lengths_with_break():
    text = """
__global__ void k(int* out) {
    int n = threadIdx.x + 1, steps = 0;
    while (n != 1) {
        n = n % 2 ? 3 * n + 1 : n / 2;
        if (++steps > 100) break;
    }
    out[threadIdx.x] = steps;
}
"""
    out = ints(64)
    simulate(text, out, block=64)
    assert out.tolist() == oracle(lambda i: collatz(i + 1))


def test_nested_ifs_switch_and_early_return():
    text = """
__global__ void k(int* out, const int* x) {
    int i = threadIdx.x, v = x[i];
    if (v < 0) {
        if (v < -500) { out[i] = 1; return; }
        v = -v;
    } else if (v % 3 == 0) {
        int n = v % 7;
        for (int j = 0; j < n; ++j) { if (j == 4) continue; v += j * x[j]; }
    }
    switch (v & 7) {
        case 0: v = v * 2 + 1; break;
        case 1: v ^= 0x55;
        case 2: v -= 9; break;
        case 3: case 4: v = v / 3; break;
        case 5: out[i] = v; return;
        default: v = ~v;
    }
    out[i] = v + 1000;
}
"""
    x = random(256)

    def expected(i: int) -> int:
        v = int(x[i])
        if v < 0:
            if v < -500:
                return 1
            v = -v
        elif v % 3 == 0:
            for j in range(v % 7):
                v += 0 if j == 4 else j * int(x[j])
        kind = v & 7
        if kind == 5:
            return v
        if kind == 0:
            v = v * 2 + 1
        elif kind in (1, 2):
            v = (v ^ 0x55 if kind == 1 else v) - 9
        elif kind in (3, 4):
            v = int(v / 3)
        else:
            v = ~v
        return v + 1000

    out = ints(256)
    simulate(text, out, x, block=256)
    assert out.tolist() == oracle(expected, 256)


def test_lanes_meet_again_after_a_branch():
    text = """
__global__ void k(unsigned* out, int n) {
    unsigned before = __activemask(), inside = 0;
    if (threadIdx.x % 3 == 0) { inside = __activemask(); out[96 + threadIdx.x] = n; }
    out[threadIdx.x] = before, out[32 + threadIdx.x] = inside, out[64 + threadIdx.x] = __activemask();
}
"""
    out = torch.zeros(128, dtype=torch.int32)
    simulate(text, out, 3)
    thirds = sum(1 << i for i in range(0, 32, 3))
    assert out[:32].tolist() == [-1] * 32 and out[64:96].tolist() == [-1] * 32
    assert out[32:64].tolist() == oracle(lambda i: thirds if i % 3 == 0 else 0, 32)


def test_predicated_instructions_leave_other_lanes_alone():
    text = """
__global__ void k(int* out, const int* x) {
    int v = x[threadIdx.x], w = 7;
    asm("{.reg .pred p; setp.gt.s32 p, %2, 10; @p add.s32 %0, %0, 100; @!p mov.s32 %1, 3; "
        "@!p st.global.s32 [%3], 9;}"
        : "+r"(v), "+r"(w) : "r"(x[threadIdx.x]), "l"(out + 32 + threadIdx.x) : "memory");
    out[threadIdx.x] = v * 10 + w;
}
"""
    out = ints(64)
    simulate(text, out, iota(32))
    assert out[:32].tolist() == oracle(lambda i: (i + 100) * 10 + 7 if i > 10 else i * 10 + 3, 32)
    assert out[32:].tolist() == oracle(lambda i: -1 if i > 10 else 9, 32)


def test_negated_branches_and_results_narrower_than_their_register():
    text = """
__global__ void k(int* out, const int* x) {
    int v = x[threadIdx.x], w;
    asm("{.reg .pred p; setp.gt.s32 p, %1, 10; mov.s32 %0, 5; @!p bra over; mov.s32 %0, 6; over: }" : "=r"(w)
        : "r"(v));
    out[threadIdx.x] = w;
    asm volatile("{.reg .pred p; setp.gt.s32 p, %1, 20; @p bra over; add.s32 %0, %0, 10; over: }" : "+r"(w)
        : "r"(v));
    out[32 + threadIdx.x] = w;
    asm("cvt.s16.s32 %0, %1;" : "=r"(w) : "r"(v * 3000));
    out[64 + threadIdx.x] = w;
    asm("cvt.u8.u32 %0, %1;" : "=r"(w) : "r"(v * 3000));
    out[96 + threadIdx.x] = w;
}
"""
    out = ints(128)
    simulate(text, out, iota(32))
    assert out[:32].tolist() == oracle(lambda i: 6 if i > 10 else 5, 32)
    assert out[32:64].tolist() == oracle(lambda i: (6 if i > 10 else 5) + (0 if i > 20 else 10), 32)
    assert out[64:96].tolist() == oracle(lambda i: (i * 3000 + 32768) % 65536 - 32768, 32)
    assert out[96:].tolist() == oracle(lambda i: i * 3000 % 256, 32)


def test_a_lock_that_lanes_of_several_blocks_take():
    text = """
__device__ int lock;
__global__ void k(int* out) {
    if (threadIdx.x) return;
    while (atomicCAS(&lock, 0, 1)) {}
    __threadfence();
    *(volatile int*)out += blockIdx.x;
    __threadfence();
    atomicExch(&lock, 0);
}
"""
    out = torch.zeros(1, dtype=torch.int32)
    simulate(text, out, grid=20)
    assert out.item() == sum(range(20))


def test_a_lane_that_waits_for_a_later_one():
    text = """
__global__ void k(int* out, int n) {
    volatile int* flag = out;
    if (threadIdx.x == 0) {
        while (*flag == 0) {}
        out[1] = *flag + 1;
    } else {
        int v = n;
        for (int i = 0; i < 5; ++i) v = v * 3 + 1;
        *flag = v;
    }
}
"""
    out = torch.zeros(2, dtype=torch.int32)
    simulate(text, out, 1, block=2)
    assert out[1] == out[0] + 1 > 1


# ---- memory


def test_vectors_of_every_width():
    text = """
__global__ void k(double2* a, float4* b, int2* c, short4* d, char4* e, const double2* x) {
    int i = threadIdx.x;
    double2 v = x[i];
    a[i] = make_double2(v.y, v.x);
    b[i] = make_float4(v.x, v.y, v.x + 1, v.y + 1);
    c[i] = make_int2(v.x, -v.y);
    d[i] = make_short4(v.x, -v.y, v.x + 1, -5);
    e[i] = make_char4(i, -i, i + 1, -128);
}
"""
    x = torch.randint(-100, 100, (32, 2)).double()
    a, b = torch.zeros(32, 2, dtype=torch.float64), torch.zeros(32, 4)
    c, d, e = ints(32, 2), torch.zeros(32, 4, dtype=torch.int16), torch.zeros(32, 4, dtype=torch.int8)
    simulate(text, a, b, c, d, e, x)
    assert torch.equal(a, x.flip(1)) and torch.equal(b.double(), torch.cat((x, x + 1), 1))
    assert torch.equal(c, torch.stack((x[:, 0], -x[:, 1]), 1).int())
    assert d.tolist() == [[int(p), int(-q), int(p) + 1, -5] for p, q in x.tolist()]
    assert e.tolist() == oracle(lambda i: [i, -i, i + 1, -128], 32)


def test_narrow_loads_extend():
    text = """
__global__ void k(int* out, const signed char* a, const unsigned char* b, const short* c, long long* wide) {
    int i = threadIdx.x;
    out[i] = a[i] + 1000 * b[i] + 1000000 * (c[i] < 0);
    wide[i] = (long long)a[i] * c[i];
}
"""
    a, b = torch.randint(-128, 128, (32,), dtype=torch.int8), torch.randint(0, 256, (32,), dtype=torch.uint8)
    c, out, wide = random(32).short(), ints(32), torch.zeros(32, dtype=torch.int64)
    simulate(text, out, a, b, c, wide)
    assert torch.equal(out, a.int() + 1000 * b.int() + 1000000 * (c < 0).int()) and torch.equal(
        wide, a.long() * c.long()
    )


def test_static_and_dynamic_shared_memory_and_generic_pointers():
    text = """
extern __shared__ float dynamic[];
__global__ void k(float* out, const float* x, int n) {
    __shared__ float a[64];
    __shared__ short b[64];
    int i = threadIdx.x;
    float local[4] = {1, 2, 3, 4};
    local[n & 3] = 10;
    const float* places[4] = {a, dynamic, x, local};
    a[i] = x[i], b[i] = i, dynamic[i] = 2 * x[i];
    __syncthreads();
    out[i] = places[i % 4][(i + n) & 3] + b[63 - i];
}
"""
    x, n = torch.randn(64), 2
    out = torch.zeros(64)
    simulate(text, out, x, n, block=64, shared=256)
    local = [1, 2, 10, 4]
    at = oracle(lambda i: (i + n) & 3)
    expected = [[x[j], 2 * x[j], x[j], local[j]][i % 4] + (63 - i) for i, j in enumerate(at)]
    assert out.tolist() == torch.stack([torch.as_tensor(v, dtype=torch.float32) for v in expected]).tolist()


def test_uniform_values_and_lanes_that_left():
    """Registers with one element for all lanes, written by some lanes only, and read after others are
    gone."""
    text = """
__global__ void k(int* out, const int* x, int n) {
    int i = threadIdx.x, v = n * 3;
    if (i >= 50) return;
    if (i & 1) v = n + 1;
    int w = x[n];
    if (i & 2) w = v;
    out[i] = v * 1000 + w;
}
"""
    out = ints(64)
    simulate(text, out, iota(64), 7, block=64)

    def expected(i: int) -> int:
        v = 8 if i & 1 else 21
        return -1 if i >= 50 else v * 1000 + (v if i & 2 else 7)

    assert out.tolist() == oracle(expected)


# ---- atomics

INTEGER_ATOMICS = {
    "atomicAdd": lambda old, v: old + v,
    "atomicSub": lambda old, v: old - v,
    "atomicMin": min,
    "atomicMax": max,
    "atomicAnd": lambda old, v: old & v,
    "atomicOr": lambda old, v: old | v,
    "atomicXor": lambda old, v: old ^ v,
    "atomicExch": lambda old, v: v,
}


def wrapped(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize("name", INTEGER_ATOMICS)
def test_integer_atomics(name, space):
    text = f"""
__global__ void k(int* out, int* cells, const int* x) {{
    __shared__ int s[8];
    int* to = {"s" if space == "shared" else "cells"};
    if (threadIdx.x < 8) s[threadIdx.x] = cells[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = {name}(to + (x[threadIdx.x] & 7), x[threadIdx.x] * 3000000);
    __syncthreads();
    if (threadIdx.x < 8) cells[threadIdx.x] = to[threadIdx.x];
}}
"""
    x, cells, out = random(64), random(8), ints(64)
    expected, olds = cells.tolist(), []
    for v in x.tolist():
        olds.append(expected[v & 7])
        expected[v & 7] = wrapped(INTEGER_ATOMICS[name](olds[-1], wrapped(v * 3000000)))
    simulate(text, out, cells, x, block=64)
    assert out.tolist() == olds and cells.tolist() == expected


def test_atomic_inc_dec_cas_and_64_bits():
    text = """
__global__ void k(unsigned* out, unsigned* cells, unsigned long long* wide) {
    int i = threadIdx.x;
    out[i] = atomicInc(cells, 5), out[32 + i] = atomicDec(cells + 1, 3), out[64 + i] = atomicCAS(cells + 2, i,
        i + 1);
    atomicAdd(wide, 1ull << 40 | i);
    atomicMax(wide + 1, (unsigned long long)i << 35);
    atomicCAS((unsigned short*)cells + 6 + (i & 1), (unsigned short)0, (unsigned short)(i + 1));
}
"""
    out = ints(96)
    cells = torch.tensor([0, 2, 0, 0], dtype=torch.int32)
    wide = torch.zeros(2, dtype=torch.int64)
    simulate(text, out, cells, wide)
    assert out[:32].tolist() == oracle(lambda i: i % 6, 32)
    assert out[32:64].tolist() == [2, 1, 0, *[(3 - i) % 4 for i in range(29)]]
    assert out[64:].tolist() == list(range(32)) and cells[2] == 32
    assert cells[3] == 1 | 2 << 16
    assert wide.tolist() == [32 * (1 << 40) + sum(range(32)), 31 << 35]


@pytest.mark.parametrize(
    "ctype, dtype",
    [
        ("float", torch.float32),
        ("double", torch.float64),
        ("__half2", torch.float16),
        ("__half", torch.float16),
    ],
)
def test_float_atomics_add_in_the_order_of_lanes(ctype, dtype):
    text = f"""
#include <cuda_fp16.h>
__global__ void k({ctype}* sum, const {ctype}* x) {{ atomicAdd(sum, x[threadIdx.x]); }}
"""
    width = 2 if ctype == "__half2" else 1
    x, total = torch.randn(32, width, dtype=dtype), torch.zeros(1, width, dtype=dtype)
    expected = torch.zeros(1, width, dtype=dtype)
    for row in x:
        expected += row
    simulate(text, total, x)
    assert torch.equal(total, expected)


# ---- barriers


@pytest.mark.parametrize(
    "operation, expected", [("or", lambda h: int(any(h))), ("and", lambda h: int(all(h))), ("count", sum)]
)
@pytest.mark.parametrize("limit", [0, 37, 64])
def test_barriers_that_reduce(operation, expected, limit):
    text = f"""
__global__ void k(int* out, const int* x, int n) {{
    out[threadIdx.x] = __syncthreads_{operation}(x[threadIdx.x] < n); }}
"""
    out = ints(64)
    simulate(text, out, iota(64), limit, block=64)
    assert out.tolist() == [expected([i < limit for i in range(64)])] * 64


def test_barriers_in_a_loop_that_blocks_leave_at_different_times():
    text = """
__global__ void k(int* out) {
    __shared__ int tile[64];
    int v = threadIdx.x;
    for (int i = 0; i <= blockIdx.x; ++i) {
        tile[threadIdx.x] = v;
        __syncthreads();
        v = tile[(threadIdx.x + 1) % 64];
        __syncthreads();
    }
    out[blockIdx.x * 64 + threadIdx.x] = v;
}
"""
    out = ints(5, 64)
    simulate(text, out, grid=5, block=64)
    assert out.tolist() == [[(i + b + 1) % 64 for i in range(64)] for b in range(5)]


PIPELINE = """
__global__ void k(int* out, const int* x, int rounds) {
    __shared__ int buffer[2][32];
    int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {  // produces
        for (int i = 0; i < rounds; ++i) {
            if (i % 2) asm volatile("bar.sync 4, 64;" ::: "memory"); else asm volatile("bar.sync 3, 64;"
                ::: "memory");
            buffer[i % 2][lane] = x[i * 32 + lane];
            if (i % 2) asm volatile("bar.arrive 2, 64;" ::: "memory"); else asm volatile("bar.arrive 1, 64;"
                ::: "memory");
        }
    } else {  // consumes
        int sum = 0;
        asm volatile("bar.arrive 3, 64;" ::: "memory");
        asm volatile("bar.arrive 4, 64;" ::: "memory");
        for (int i = 0; i < rounds; ++i) {
            if (i % 2) asm volatile("bar.sync 2, 64;" ::: "memory"); else asm volatile("bar.sync 1, 64;"
                ::: "memory");
            sum += buffer[i % 2][31 - lane] * (i + 1);
            if (i + 2 < rounds) FREE
        }
        out[lane] = sum;
    }
}
"""
FREE = (
    '{ if (i % 2) asm volatile("bar.arrive 4, 64;" ::: "memory"); else asm volatile("bar.arrive 3, 64;" ::: '
    '"memory"); }'
)


def test_producer_and_consumer_over_named_barriers():
    x, out = random(160), ints(32)
    simulate(PIPELINE.replace("FREE", FREE), out, x, 5, block=64)
    expected = (x.view(5, 32).flip(1) * torch.arange(1, 6, dtype=torch.int32)[:, None]).sum(0)
    assert out.tolist() == expected.tolist()


def test_producer_that_does_not_wait_for_its_consumer_races():
    early = PIPELINE.replace("FREE", ";").replace(
        'if (i % 2) asm volatile("bar.sync 4, 64;" ::: "memory"); else asm volatile("bar.sync 3, 64;" ::: '
        '"memory");',
        "",
    )
    early = early.replace(
        'asm volatile("bar.arrive 3, 64;" ::: "memory");\n        asm volatile("bar.arrive 4, 64;" ::: '
        '"memory");',
        "",
    )
    with pytest.raises((sim.Race, sim.BarrierFault)):
        simulate(early, ints(32), random(160), 5, block=64)


def test_two_halves_of_a_block_with_a_barrier_each():
    text = """
__global__ void k(int* out, const int* x) {
    __shared__ int tile[128];
    int half = threadIdx.x / 64, i = threadIdx.x;
    tile[i] = x[i];
    asm volatile("bar.sync %0, 64;" :: "r"(half + 1) : "memory");
    out[i] = tile[half * 64 + 63 - i % 64];
}
"""
    x, out = random(128), ints(128)
    simulate(text, out, x, block=128)
    assert torch.equal(out, x.view(2, 64).flip(1).reshape(-1))
    with pytest.raises(sim.Race, match="no barrier is between"):
        simulate(text.replace("half * 64 + 63 - i % 64", "127 - i"), out, x, block=128)


def test_partial_warp_syncs_order_their_lanes():
    text = """
__global__ void k(int* out, const int* x) {
    __shared__ int tile[32];
    unsigned mask = threadIdx.x < 12 ? 0xfff : 0xfffff000;
    tile[threadIdx.x] = x[threadIdx.x];
    if (threadIdx.x < 12) { __syncwarp(mask); out[threadIdx.x] = tile[11 - threadIdx.x]; }
    else { __syncwarp(mask); out[threadIdx.x] = tile[43 - threadIdx.x] + 1; }
}
"""
    x, out = random(32), ints(32)
    simulate(text, out, x)
    assert torch.equal(out, torch.cat((x[:12].flip(0), x[12:].flip(0) + 1)))


def test_a_lane_knows_what_its_partners_learned_before():
    text = """
__global__ void k(int* out, const int* x) {
    __shared__ int tile[32], late[32];
    int i = threadIdx.x;
    tile[i] = x[i];
    __syncwarp(3u << (i & ~1));
    __syncwarp(15u << (i & ~3));
    out[i] = tile[i ^ 3];
    if (i == 0) {
        late[0] = 100;
        __syncwarp(3u);
    } else if (i == 1) {
        __syncwarp(3u);
        __syncwarp(6u);
    } else if (i == 2) {
        __syncwarp(6u);
        out[2] = late[0];
    }
}
"""
    x, out = random(32), ints(32)
    simulate(text, out, x)
    assert out.tolist() == oracle(lambda i: 100 if i == 2 else int(x[i ^ 3]), 32)


# ---- warps


def shuffled(mode: str, values: list[int], distance: int, width: int) -> list[int]:
    """CUDA's Programming Guide, "Warp Shuffle Functions"."""
    result = []
    for lane in range(32):
        base = lane // width * width
        source = {
            "idx": base + distance % width,
            "up": lane - distance,
            "down": lane + distance,
            "xor": lane ^ distance,
        }[mode]
        outside = source < base if mode == "up" else source >= base + width
        result.append(values[lane if outside else source])
    return result


@pytest.mark.parametrize("width", [32, 16, 8, 2])
@pytest.mark.parametrize("mode", ["idx", "up", "down", "xor"])
def test_shuffles(mode, width):
    name = "__shfl_sync" if mode == "idx" else f"__shfl_{mode}_sync"
    text = (
        f"__global__ void k(int* out, const int* x, int d) {{ out[threadIdx.x] = {name}(~0u, "
        f"x[threadIdx.x], d, {width}); }}"
    )
    x, out = random(32), ints(32)
    for distance in (0, 1, 3, 7, 15, 16, 31):
        simulate(text, out, x, distance)
        assert out.tolist() == shuffled(mode, x.tolist(), distance, width)


def test_shuffle_of_each_lanes_own_source_and_its_predicate():
    text = """
__global__ void k(int* out, const int* x, const int* from) {
    int v, valid;
    asm volatile("{.reg .pred p; shfl.sync.down.b32 %0|p, %2, %3, 31, -1; selp.s32 %1, 1, 0, p;}"
                 : "=r"(v), "=r"(valid) : "r"(x[threadIdx.x]), "r"(from[threadIdx.x]));
    out[threadIdx.x] = v, out[32 + threadIdx.x] = valid;
}
"""
    x, source, out = random(32), torch.randint(0, 32, (32,), dtype=torch.int32), ints(64)
    simulate(text, out, x, source)
    valid = [i + s < 32 for i, s in enumerate(source.tolist())]
    assert out[32:].tolist() == [int(v) for v in valid]
    assert out[:32].tolist() == [
        int(x[i + s if ok else i]) for i, (s, ok) in enumerate(zip(source.tolist(), valid, strict=True))
    ]


def test_votes_and_matches_of_two_halves_of_a_warp():
    text = """
__global__ void k(unsigned* out, const int* x) {
    int i = threadIdx.x, v = x[i];
    unsigned mask = i < 12 ? 0xfff : 0xfffff000;
    out[i] = __ballot_sync(mask, v > 0);
    out[32 + i] = __any_sync(mask, v > 900) * 4 + __all_sync(mask, v > -900) * 2 + __uni_sync(mask,
        v > -2000);
    out[64 + i] = __match_any_sync(mask, v & 3);
    int all;
    out[96 + i] = __match_all_sync(mask, i < 12 ? 5 : v, &all);
    out[128 + i] = all;
}
"""
    x, out = random(32), ints(160)
    simulate(text, out, x)
    v = x.tolist()
    for i in range(32):
        group = range(12) if i < 12 else range(12, 32)
        mask = sum(1 << j for j in group)

        def which(test, group=group):
            return wrapped(sum(1 << j for j in group if test(v[j])))

        assert out[i] == which(lambda a: a > 0)
        assert out[32 + i] == any(v[j] > 900 for j in group) * 4 + all(v[j] > -900 for j in group) * 2 + 1
        assert out[64 + i] == which(lambda a, i=i: a & 3 == v[i] & 3)
        assert out[96 + i] == (mask if i < 12 else 0) and out[128 + i] == (i < 12)


@pytest.mark.parametrize("name, function", [("add", sum), ("min", min), ("max", max)])
def test_reductions_of_a_warp(name, function):
    text = f"""
__global__ void k(int* out, const int* x) {{
    int i = threadIdx.x;
    unsigned mask = i % 32 < 20 ? 0xfffff : 0xfff00000;
    out[i] = i % 32 < 20 ? __reduce_{name}_sync(mask, x[i]) : __reduce_{name}_sync(mask, x[i]) + 1;
}}
"""
    x, out = random(64), ints(64)
    simulate(text, out, x, block=64)
    v = x.tolist()
    parts = [function(v[a:b]) + more for a, b, more in ((0, 20, 0), (20, 32, 1), (32, 52, 0), (52, 64, 1))]
    assert out.tolist() == [parts[0]] * 20 + [parts[1]] * 12 + [parts[2]] * 20 + [parts[3]] * 12


@pytest.mark.parametrize(
    "name, function", [("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)]
)
def test_bitwise_reductions_of_a_warp(name, function):
    text = (
        f"__global__ void k(unsigned* out, const unsigned* x) {{ out[threadIdx.x] = "
        f"__reduce_{name}_sync(~0u, x[threadIdx.x]); }}"
    )
    x = torch.randint(0, 1 << 32, (32,)).to(torch.uint32)
    out = torch.zeros(32, dtype=torch.uint32)
    simulate(text, out, x)
    assert out.tolist() == [int(function.reduce(x.numpy()))] * 32


def test_lanes_that_left_are_not_waited_for():
    text = """
__global__ void k(int* out, const int* x, int n) {
    if (threadIdx.x >= n) return;
    out[threadIdx.x] = __reduce_add_sync(~0u, x[threadIdx.x]);
    __syncwarp();
    out[32 + threadIdx.x] = __popc(__ballot_sync(~0u, 1));
}
"""
    out = ints(64)
    simulate(text, out, iota(32), 20)
    assert out[:20].tolist() == [sum(range(20))] * 20 and out[32:52].tolist() == [20] * 20


def test_elect_names_the_first_lane():
    text = """
__global__ void k(int* out) {
    int leader, is;
    unsigned mask = threadIdx.x < 5 ? 0x1f : 0xffffffe0;
    if (threadIdx.x < 5)
        asm volatile("{.reg .pred p; elect.sync %0|p, %2; selp.s32 %1, 1, 0, p;}" : "=r"(leader), "=r"(is)
            : "r"(mask));
    else
        asm volatile("{.reg .pred p; elect.sync %0|p, %2; selp.s32 %1, 1, 0, p;}" : "=r"(leader), "=r"(is)
            : "r"(mask));
    out[threadIdx.x] = leader * 2 + is;
}
"""
    out = ints(32)
    simulate(text, out)
    assert out.tolist() == oracle(lambda i: (0 if i < 5 else 10) + (i in (0, 5)), 32)


# ---- copies in the background


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copies_of_every_size_fill_up_with_zeros(size):
    cache = "cg" if size == 16 else "ca"
    text = f"""
__global__ void k(int* out, const int* x, int n) {{
    __shared__ alignas(16) int tile[{size // 4 * 32}];
    int first = threadIdx.x * {size // 4};
    int left = n - first, bytes = left <= 0 ? 0 : left * 4 >= {size} ? {size} : left * 4;
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + first);
    asm volatile("cp.async.{cache}.shared.global.L2::128B [%0], [%1], {size}, %2;"
        :: "r"(to), "l"(x + first), "r"(bytes) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    for (int i = threadIdx.x; i < {size // 4 * 32}; i += 32) out[i] = tile[i];
}}
"""
    n = size // 4 * 20 + size // 4 - 1
    x, out = random(n), ints(size // 4 * 32)
    simulate(text, out, x, n)
    assert torch.equal(out, torch.cat((x, torch.zeros(len(out) - n, dtype=torch.int32))))


# ---- the shipped kernels (all of them run through the ops' own tests)


@pytest.mark.parametrize(
    "tile, shared_blocks, shared_tiles", [("Tile128x128", 0, 0), ("Tile64x64", 3, 4), ("Tile32x128", 2, 1)]
)
def test_matmul_v5(tile, shared_blocks, shared_tiles):
    """With sums that start again after two k tiles of eight."""
    M, N, K = 70, 90, 50
    source, sizes = (
        Source.read(kernels_dir() / "matmul/ladder.cu"),
        struct.pack("@6i4q", M, N, K, 1, 1, 0, K, N, 0, 0),
    )
    shape = next(t for t in plan.FMA_TILES[4] if t.name == tile)
    grid = shared_blocks or -(-M // shape.rows) * -(-N // shape.columns)

    def kernel(name: str) -> sim.Launch:
        ptx = compile_ptx(source, name)
        return sim.load(name, ptx, signature.params(name, ptx.signature, ptx=lambda: (ptx.text, ptx.symbol)))

    a, b, bias = torch.randn(M, K), torch.randn(K, N), torch.randn(N)
    product = kernel(f"matmul_v5<float, ALONG_K, ALONG_MN, {tile}>")
    fixup = kernel(f"matmul_v5_fixup<float, {tile}>")
    with sim.memory.scope([a, b, bias]):
        out = torch.empty(M, N)
        partials = torch.empty((2 * shared_blocks + grid) * shape.rows * shape.columns)
        launch(
            product, out, partials, a, b, bias, sizes, shared_blocks, shared_tiles, 2, grid=grid, block=128
        )
        if shared_blocks:
            pieces = shape.rows * shape.columns // 128 // 16
            launch(
                fixup,
                out,
                partials,
                bias,
                sizes,
                shared_blocks,
                shared_tiles,
                grid=shared_tiles * pieces,
                block=128,
            )
    torch.testing.assert_close(out, a @ b + bias, rtol=1e-5, atol=2e-5)


def test_float_arguments_are_packed_as_declared():
    text = """
__global__ void k(double* out, char c, double d, bool b, float f, short s, unsigned long long u) {
    out[0] = c, out[1] = d, out[2] = b, out[3] = f, out[4] = s, out[5] = u;
}
"""
    out = torch.zeros(6, dtype=torch.float64)
    simulate(text, out, -3, 0.1, True, 0.1, -300, 1 << 63, block=1)
    (single,) = struct.unpack("f", struct.pack("f", 0.1))
    assert out.tolist() == [-3, 0.1, 1, single, -300, float(1 << 63)]
