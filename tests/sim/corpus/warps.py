"""Warps: shuffles, votes, matches, named barriers, tensor cores."""

import torch
from sim_corpus import Kernel, data, ints, zeros

from cukern import sim

LDMATRIX = """#include <cuda_bf16.h>
__global__ void k(float* out, const __nv_bfloat16* x) {
    __shared__ alignas(16) __nv_bfloat16 a[16][24], b[8][24];
    int t = threadIdx.x;
    for (int j = t; j < 256; j += 32) a[j / 16][j % 16] = x[j];
    for (int j = t; j < 128; j += 32) b[j / 16][j % 16] = x[256 + j];
    __syncwarp();
    unsigned ra[4], rb[2];
    unsigned pa = (unsigned)__cvta_generic_to_shared(&a[t % 16][t / 16 * 8]);
    unsigned pb = (unsigned)__cvta_generic_to_shared(&b[t % 8][t / 8 % 2 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(rb[0]), "=r"(rb[1])
        : "r"(pb) : "memory");
    float d[4] = {0, 0, 0, 0};
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                 "{%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    for (int j = 0; j < 4; ++j) out[(t / 4 + j / 2 * 8) * 8 + t % 4 * 2 + j % 2] = d[j];
}
"""
NAMED = """
    __shared__ int s[2][32];
    int lane = t % 32;
    if (t < 32) {
        for (int j = 0; j < n; ++j) {
            if (j >= 2) asm volatile("bar.sync %0, 64;" :: "r"(3 + j % 2) : "memory");
            s[j % 2][lane] = x[32 * j + lane];
            asm volatile("bar.arrive %0, 64;" :: "r"(1 + j % 2) : "memory");
        }
    } else {
        int sum = 0;
        for (int j = 0; j < n; ++j) {
            asm volatile("bar.sync %0, 64;" :: "r"(1 + j % 2) : "memory");
            sum += s[j % 2][31 - lane];
            if (j + 2 < n) asm volatile("bar.arrive %0, 64;" :: "r"(3 + j % 2) : "memory");
        }
        out[lane] = sum;
    }
"""

KERNELS = [
    Kernel(
        "transposition within a warp",
        """
    __shared__ int s[2][33];
    int w = t / 32, lane = t % 32;
    s[w][lane] = x[i];
    __syncwarp();
    out[i] = s[w][lane % 4 * 8 + lane / 4];
""",
        lambda x, n: x.view(-1, 4, 8).transpose(1, 2).reshape(-1),
        [
            ("    __syncwarp();\n", "", sim.Race, "a __syncwarp"),
            ("    __syncwarp();\n", "    __syncwarp(0xffffu << lane / 16 * 16);\n", sim.Race, "a __syncwarp"),
            ("out[i] = s[w]", "out[i] = s[1 - w]", sim.Race, "no barrier"),
        ],
        grid=2,
    ),
    Kernel(
        "rotation by shuffle",
        """
    out[i] = __shfl_sync(~0u, x[i], (t + 5) % 32);
""",
        lambda x, n: x.view(-1, 32).roll(-5, 1).reshape(-1),
        [("~0u", "0x00ffffffu", sim.BarrierFault, "names the lanes 0x00ffffff")],
    ),
    Kernel(
        "tiles of eight lanes",
        """
    int v = x[i];
    unsigned mask = 0xffu << t % 32 / 8 * 8;
    if (x[i / 8 * 8] % 2) {
        for (int d = 4; d; d /= 2) v += __shfl_xor_sync(mask, v, d, 8);
    }
    out[i] = v;
""",
        lambda x, n: torch.where(
            x.view(-1, 8)[:, :1] % 2 == 1, x.view(-1, 8).sum(1, keepdim=True), x.view(-1, 8)
        ).reshape(-1),
        [
            ("x[i / 8 * 8] % 2", "x[i] % 2", sim.Uninitialized, "not there"),
            ("0xffu <<", "0x7fu <<", sim.BarrierFault),
        ],
        grid=2,
    ),
    Kernel(
        "one atomic for equal keys",
        """
    int key = x[i] % 5;
    unsigned peers = __match_any_sync(~0u, key);
    int leader = __ffs(peers) - 1, old;
    if (t % 32 == leader) old = atomicAdd(out + key, __popc(peers));
    old = __shfl_sync(peers, old, leader);
    out[5 + i] = old + __popc(peers & (1u << t % 32) - 1) < 64;
""",
        lambda x, n: torch.cat((torch.bincount(x % 5, minlength=5), torch.ones(64, dtype=torch.long))),
        [
            ("    old = __shfl_sync(peers, old, leader);\n", "", sim.Uninitialized),
            ("__shfl_sync(peers, old, leader)", "__shfl_sync(peers, old, 0)", sim.Uninitialized),
            (
                "old = atomicAdd(out + key, __popc(peers))",
                "old = out[key], out[key] += __popc(peers)",
                sim.Race,
            ),
        ],
        lambda: [zeros(69), data(64), 64],
    ),
    Kernel(
        "a producer warp and named barriers",
        NAMED,
        lambda x, n: x.view(5, 32).sum(0).flip(0),
        [
            ('            asm volatile("bar.sync %0, 64;" :: "r"(1 + j % 2) : "memory");\n', "", sim.Race),
            (
                'if (j >= 2) asm volatile("bar.sync %0, 64;" :: "r"(3 + j % 2) : "memory");',
                "",
                sim.BarrierFault,
            ),
            ("if (j + 2 < n) asm", "if (j + 3 < n) asm", sim.BarrierFault, "waits at barrier"),
            ('"bar.sync %0, 64;" :: "r"(1', '"bar.sync %0, 96;" :: "r"(1', sim.BarrierFault),
            (
                '"bar.sync %0, 64;" :: "r"(1 + j % 2)',
                '"bar.sync %0, 64;" :: "r"(2 - j % 2)',
                sim.BarrierFault,
            ),
        ],
        lambda: [ints(32), data(160), 5],
    ),
    Kernel(
        "ldmatrix and mma",
        LDMATRIX,
        lambda x: (x[:256].view(16, 16).float() @ x[256:].view(8, 16).float().t()).view(-1),
        [
            ("    __syncwarp();\n", "", sim.Race, "__syncwarp"),
            ("j < 256; j", "j < 240; j", sim.Uninitialized, "a "),
            ("[16][24], b", "[16][20], b", sim.Misaligned),
            ("float d[4] = {0, 0, 0, 0}", "float d[4]", sim.Uninitialized, "no statement has set"),
            ("t / 4 + j / 2 * 8) * 8", "t / 4 + j / 2 * 8) * 16", sim.OutOfBounds),
            ("    unsigned ra", "    if (t == 9) return;\n    unsigned ra", sim.BarrierFault, "all 32 lanes"),
        ],
        lambda: [torch.zeros(128), torch.randint(-8, 9, (384,)).bfloat16()],
        block=32,
    ),
    Kernel(
        "all and any",
        """
    bool all = __all_sync(~0u, x[i] < 95), any = __any_sync(~0u, x[i] == 7);
    out[i] = 2 * all + any;
""",
        lambda x, n: (2 * (x.view(-1, 32) < 95).all(1) + (x.view(-1, 32) == 7).any(1)).repeat_interleave(32),
        [("x[i] < 95", "x[i + 1] < 95", sim.OutOfBounds)],
        grid=3,
    ),
    Kernel(
        "first lane loads, all use",
        """
    int v;
    if (t % 32 == 0) v = x[i];
    v = __shfl_sync(~0u, v, 0);
    out[i] = v;
""",
        lambda x, n: x.view(-1, 32)[:, :1].expand(-1, 32).reshape(-1),
        [("    v = __shfl_sync(~0u, v, 0);\n", "", sim.Uninitialized), ("v, 0)", "v, 1)", sim.Uninitialized)],
        grid=2,
    ),
]
