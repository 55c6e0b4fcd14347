"""Uninitialized values are judged where they matter: at a store to a tensor, an address or a branch, and not
where they are copied."""

import pytest
import torch
from sim_cases import Case, ints, iota
from sim_kernels import simulate

from cukern import sim

# fmt: off
CASES = [
    Case("an accumulator without an initial value", sim.Uninitialized, lambda x, n: torch.tensor([496]),
         r"uses a variable that no statement has set; the value is used for a store to byte 0 of the "
         r"tensor of argument 'out' at .*:6", """
__global__ void k(int* out, const int* x, int n) {
    int a [[=> = 0]];
    for (int i = 0; i < n; ++i)
        a += x[i];  // here
    *out = a;
}
""", arguments=lambda: [ints(1), iota(32), 32], block=1),
    Case("an accumulator that travels through shared memory", sim.Uninitialized,
         lambda x, n: x.sum(dtype=torch.int32)[None],
         r"uses a variable that no statement has set; the value is used for a store to byte 0 of the "
         r"tensor of argument 'out' at .*:12", """
__global__ void k(int* out, const int* x, int n) {
    __shared__ int part[64];
    int mine [[=> = 0]];
    for (int i = threadIdx.x; i < n; i += 64) mine += x[i];  // here
    part[threadIdx.x] = mine;
    for (int half = 32; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    }
    if (threadIdx.x == 0)
        *out = part[0];
}
""", arguments=lambda: [ints(1), iota(200), 200], thread=None),
    Case("uninitialized bytes in a tensor of an earlier store", sim.Uninitialized, lambda x: x,
         r"reads 4 bytes that hold an uninitialized value, byte \d+ of the tensor of argument 'out'; "
         r"the value is used for an address", """
    int index [[=> = 0]];
#pragma unroll 1
    for (int i = 0; i < x[threadIdx.x]; ++i) index += x[1];
    out[threadIdx.x] = index;
    __syncthreads();
    int at = ((volatile int*)out)[threadIdx.x];  // here
    out[threadIdx.x] = x[at & 63];
""", thread=None),
    Case("the lanes of a shuffle beyond its mask", sim.Uninitialized, lambda x: torch.tensor([120]),
         r"reads a register of lane 16 of its warp, which is not in the mask 0x0000ffff; the value is "
         r"used for a store to byte", """
__global__ void k(int* out, const int* x) {
    int v = x[threadIdx.x];
    if (threadIdx.x < 16)
        for (int d = 8; d; d /= 2) v += __shfl_down_sync(0xffff, v, d);
    if (threadIdx.x == [[15 => 0]]) *out = v;
}
""", arguments=lambda: [ints(1), iota(32)], block=32, thread=None),
    Case("the fourth element of a vector", sim.Uninitialized, lambda x: 3 * x,
         r"reads 16 bytes that nobody wrote, offset 0 of shared memory .*; the value is used for a "
         r"store to byte 0 of", """
    __shared__ int4 tile[64];
    int* mine = (int*)(tile + threadIdx.x);
    mine[0] = mine[1] = mine[2] = x[threadIdx.x];
    int4 v = tile[threadIdx.x];
    out[threadIdx.x] = v.x + v.y + v.[[w => z]];
""", thread=0),
    Case("the padding of a struct", sim.Uninitialized, lambda x: x,
         r"that nobody wrote, offset .* of shared memory .*; the value is used for a store", """
struct Pair { char c; int i; };
__global__ void k(int* out, const int* x) {
    __shared__ Pair a[64], b[64];
    a[threadIdx.x].c = 1;
    [[if (threadIdx.x != 5) =>]] a[threadIdx.x].i = x[threadIdx.x];
    *(long long*)(b + threadIdx.x) = *(long long*)(a + threadIdx.x);
    out[threadIdx.x] = b[threadIdx.x].i;
}
""".replace("struct Pair {", "struct alignas(8) Pair {"), thread=5),
    Case("a branch on what nobody wrote", sim.Uninitialized, lambda x: x + 1,
         r"reads 4 bytes that nobody wrote, offset 0 of shared memory .*; the value is used for a "
         r"(branch|predicate)", """
    __shared__ int flag;
    if (threadIdx.x == [[x[63] + 1 => 0]]) flag = x[1];
    __syncthreads();
    if (flag) out[threadIdx.x] = x[threadIdx.x] + 1;
"""),
    Case("an index that nobody wrote", sim.Uninitialized, lambda x: x,
         r"reads 4 bytes that nobody wrote, offset 0 of shared memory .*; the value is used for an "
         r"address", """
    __shared__ int index[64];
    [[=> index[threadIdx.x] = threadIdx.x;]]
    out[threadIdx.x] = x[index[threadIdx.x] ];
"""),
    Case("a vote on what nobody wrote", sim.Uninitialized, lambda x: 0 * x + 1,
         r"reads 4 bytes that nobody wrote, offset \d+ of shared memory .*; the value is used for the "
         r"predicate of a vote", """
    __shared__ int flags[64];
    [[if (threadIdx.x < 63) =>]] flags[threadIdx.x] = 1;
    out[threadIdx.x] = __all_sync(~0u, flags[threadIdx.x]);
""", thread=63),
    Case("rows of a tile that nobody wrote", sim.Uninitialized,
         lambda x: x.view(16, 16)[:8].sum(1, dtype=torch.int32),
         r"reads 16 bytes that nobody wrote, offset \d+ of shared memory .*; the value is used for a "
         r"store", """
#include <cuda_bf16.h>
__global__ void k(int* out, const int* x) {
    __shared__ alignas(16) __nv_bfloat16 a[16][16];
    int t = threadIdx.x;
    for (int i = t; i < 8 * 16; i += 32) a[i / 16][i % 16] = __int2bfloat16_rn(x[i]);
    __syncwarp();
    unsigned r[4], b[2] = {0x3f803f80u, 0x3f803f80u};
    unsigned at = (unsigned)__cvta_generic_to_shared(&a[t % 16][t / 16 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
    float d[4] = {};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(b[0]), "r"(b[1]));
    if (t % 4 == 0) out[t / 4] = d[ [[2 => 0]] ];
}
""", arguments=lambda: [ints(8), iota(256) % 7], block=32, thread=None),
    Case("a sum of a narrow half", sim.Uninitialized, lambda x: x & 0xFF,
         r"reads 4 bytes that nobody wrote, offset \d+ of local memory .*; the value is used for a "
         r"store|that nobody wrote, offset", """
    __shared__ unsigned char bytes[256];
    bytes[4 * threadIdx.x] = x[threadIdx.x];
    unsigned word = *(unsigned*)(bytes + 4 * threadIdx.x);
    out[threadIdx.x] = word [[=> & 0xff]];
""".replace("word [[=>", "word [[+ 1 =>")),
]
# fmt: on
PARAMS = [pytest.param(c, id=c.id) for c in CASES]


@pytest.mark.parametrize("case", PARAMS)
def test_wrong_kernel_is_reported(case):
    case.check_report()


@pytest.mark.parametrize("case", PARAMS)
def test_mended_kernel_is_right_and_not_accused(case):
    case.check_mended()


def test_cp_async_of_uninitialized_memory_that_nobody_uses():
    text = """
__global__ void k(int* out, const int* x, const int* empty) {
    __shared__ int tile[64];
    unsigned to = (unsigned)__cvta_generic_to_shared(tile + threadIdx.x);
    const int* from = threadIdx.x < 32 ? x + threadIdx.x : empty + threadIdx.x - 32;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" :: "r"(to), "l"(from) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (threadIdx.x < LAST) out[threadIdx.x] = tile[threadIdx.x];
}
"""
    with sim.memory.scope():
        empty = torch.empty(32, dtype=torch.int32)
        out = ints(64)
        simulate(text.replace("LAST", "32"), out, iota(32), empty, block=64)
        assert out[:32].tolist() == iota(32).tolist()
        with pytest.raises(
            sim.Uninitialized,
            match=r"thread \(32, 0, 0\).*nobody wrote, byte 0 of .*'empty'.*store to byte 128",
        ):
            simulate(text.replace("LAST", "33"), out, iota(32), empty, block=64)
