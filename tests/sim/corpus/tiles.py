"""Tiles in shared memory: transposition, products, stencils."""

import torch
from sim_corpus import Kernel, data, ints

from cukern import sim

MATMUL = """
    __shared__ int a[8][8], b[8][8];
    int tx = t % 8, ty = t / 8, row = blockIdx.x / 2 * 8 + ty, column = blockIdx.x % 2 * 8 + tx, sum = 0;
    const int *pa = x, *pb = x + n * n;
    for (int k = 0; k < n; k += 8) {
        a[ty][tx] = row < n && k + tx < n ? pa[row * n + k + tx] : 0;
        b[ty][tx] = k + ty < n && column < n ? pb[(k + ty) * n + column] : 0;
        __syncthreads();
        for (int j = 0; j < 8; ++j) sum += a[ty][j] * b[j][tx];
        __syncthreads();
    }
    if (row < n && column < n) out[row * n + column] = sum;
"""
STENCIL = """
    __shared__ int s[66];
    s[t + 1] = x[i];
    if (t == 0) s[0] = i > 0 ? x[i - 1] : 0;
    if (t == 63) s[65] = i + 1 < n ? x[i + 1] : 0;
    __syncthreads();
    out[i] = s[t] + 2 * s[t + 1] + s[t + 2];
"""


def around(x, n):
    zero = x.new_zeros(1)
    return torch.cat((zero, x[:-1])) + 2 * x + torch.cat((x[1:], zero))


KERNELS = [
    Kernel(
        "transposition",
        """
__global__ void k(int* out, const int* x, int rows, int columns) {
    __shared__ int tile[16][17];
    int tx = threadIdx.x, ty = threadIdx.y, c = blockIdx.x * 16, r = blockIdx.y * 16;
    for (int j = ty; j < 16; j += 8)
        if (r + j < rows && c + tx < columns) tile[j][tx] = x[(r + j) * columns + c + tx];
    __syncthreads();
    for (int j = ty; j < 16; j += 8)
        if (c + j < columns && r + tx < rows) out[(c + j) * rows + r + tx] = tile[tx][j];
}
""",
        lambda x, rows, columns: x.view(rows, columns).t().reshape(-1),
        [
            ("    __syncthreads();\n", "", sim.Race),
            ("r + j < rows && ", "", sim.OutOfBounds),
            ("j += 8)\n        if (r", "j += 9)\n        if (r", sim.Uninitialized, "tile"),
        ],
        lambda: [ints(20 * 37), data(20 * 37), 20, 37],
        grid=(3, 2),
        block=(16, 8),
    ),
    Kernel(
        "product of 13 x 13",
        MATMUL,
        lambda x, n: (x[:169].view(13, 13).double() @ x[169:].view(13, 13).double()).view(-1),
        [
            ("        __syncthreads();\n        for", "        for", sim.Race),
            ("        __syncthreads();\n    }", "    }", sim.Race),
            (
                "k + ty < n && column < n ? pb[(k + ty) * n + column] : 0",
                "pb[(k + ty) * n + column]",
                sim.OutOfBounds,
            ),
            ("if (row < n && column < n)", "if (row < n)", sim.OutOfBounds, "'out'|another value"),
            ("sum = 0;", "sum;", sim.Uninitialized, "no statement has set"),
        ],
        lambda: [ints(169), data(338), 13],
        grid=4,
    ),
    Kernel(
        "product with two buffers and one barrier",
        """
    __shared__ int a[2][64], b[2][64];
    int sum = 0, at = 0;
    a[0][t] = x[t], b[0][t] = x[n + t];
    __syncthreads();
    for (int k = 0; k < n; k += 64) {
        int next = k + 64;
        if (next < n) a[1 - at][t] = x[next + t], b[1 - at][t] = x[n + next + t];
        for (int j = 0; j < 64; ++j) sum += a[at][j] * b[at][j ^ t];
        __syncthreads();
        at = 1 - at;
    }
    out[t] = sum;
""",
        lambda x, n: torch.stack(
            [
                sum((x[:n].view(-1, 64) * x[n:].view(-1, 64)[:, torch.arange(64) ^ t]).flatten())
                for t in range(64)
            ]
        ),
        [
            ("        __syncthreads();\n        at", "        at", sim.Race),
            ("if (next < n) a[1 - at][t] =", "if (next < n) a[at][t] =", sim.Race),
            ("if (next < n) ", "", sim.OutOfBounds),
        ],
        lambda: [ints(64), data(384), 192],
    ),
    Kernel(
        "register tiles of 4 x 4",
        """
__global__ void k(float* out, const float4* x, int n) {
    __shared__ float4 a[8][4], b[8][4];
    int t = threadIdx.x, ty = t / 4, tx = t % 4;
    float sum[4][4] = {};
    for (int k = 0; k < n; k += 8) {
        for (int j = t; j < 32; j += 16) a[j / 4][j % 4] = x[k * 4 + j], b[j / 4][j % 4] = x[(n + k) * 4 + j];
        __syncwarp(0xffff);
        for (int kk = 0; kk < 8; ++kk) {
            float4 u = a[kk][ty], v = b[kk][tx];
            float us[4] = {u.x, u.y, u.z, u.w}, vs[4] = {v.x, v.y, v.z, v.w};
            for (int r = 0; r < 4; ++r)
                for (int c = 0; c < 4; ++c) sum[r][c] += us[r] * vs[c];
        }
        __syncwarp(0xffff);
    }
    for (int r = 0; r < 4; ++r) *(float4*)(out + (ty * 4 + r) * 16 + tx * 4) = make_float4(sum[r][0],
        sum[r][1], sum[r][2], sum[r][3]);
}
""",
        lambda x, n: (x[: n * 16].view(n, 16).t() @ x[n * 16 :].view(n, 16)).reshape(-1),
        [
            ("        __syncwarp(0xffff);\n        for", "        for", sim.Race, "__syncwarp"),
            ("        __syncwarp(0xffff);\n    }", "    }", sim.Race),
            ("j < 32; j += 16", "j < 32; j += 32", sim.Uninitialized),
            ("__syncwarp(0xffff)", "__syncwarp(0x0fff)", sim.BarrierFault, "names the lanes 0x00000fff"),
            ("tx * 4) =", "tx * 4 + 1) =", sim.Misaligned),
            ("sum[4][4] = {}", "sum[4][4]", sim.Uninitialized),
        ],
        lambda: [torch.zeros(256), torch.randint(-8, 9, (2 * 24 * 16,)).float(), 24],
        block=16,
    ),
    Kernel(
        "stencil with a halo",
        STENCIL,
        around,
        [
            ("    __syncthreads();\n", "", sim.Race),
            ("    if (t == 63) s[65] = i + 1 < n ? x[i + 1] : 0;\n", "", sim.Uninitialized, "s "),
            ("i + 1 < n ? x[i + 1] : 0", "x[i + 1]", sim.OutOfBounds, "after the end"),
            ("i > 0 ? x[i - 1] : 0", "x[i - 1]", sim.OutOfBounds, "before the start"),
            ("s[66]", "s[65]", sim.OutOfBounds),
        ],
        grid=3,
    ),
    Kernel(
        "stencil in place, step by step",
        """
    for (int step = 0; step < 3; ++step) {
        int v = (t ? out[t - 1] : 0) + out[t] + (t < 63 ? out[t + 1] : 0);
        __syncthreads();
        out[t] = v;
        __syncthreads();
    }
""",
        lambda x, n: _thrice(data(64)),
        [
            ("        __syncthreads();\n        out", "        out", sim.Race),
            ("        __syncthreads();\n    }", "    }", sim.Race),
            ("t < 63 ? out[t + 1] : 0", "out[t + 1]", sim.OutOfBounds),
        ],
        lambda: [data(64), data(1), 64],
    ),
    Kernel(
        "dynamic shared memory in two parts",
        """
    extern __shared__ char raw[];
    int* ints = (int*)raw;
    short* shorts = (short*)(ints + blockDim.x);
    ints[t] = x[i], shorts[t] = t;
    __syncthreads();
    out[i] = ints[63 - t] * 100 + shorts[t ^ 1];
""",
        lambda x, n: x.view(2, 64).flip(1).reshape(-1) * 100 + (torch.arange(128) % 64 ^ 1),
        [
            ("ints + blockDim.x", "ints + blockDim.x - 1", sim.Race),
            ("ints + blockDim.x", "ints + blockDim.x + 1", sim.OutOfBounds, "384 bytes"),
            ("(short*)(ints + blockDim.x)", "(short*)(raw + 4 * blockDim.x - 1)", sim.Misaligned),
        ],
        grid=2,
        shared=384,
    ),
    Kernel(
        "rows reversed in place",
        """
    __shared__ int s[64];
    int v = out[i];
    s[63 - t] = v;
    __syncthreads();
    out[i] = s[t];
""",
        lambda x, n: data(128).view(2, 64).flip(1).reshape(-1),
        [
            ("    __syncthreads();\n", "", sim.Race),
            ("    out[i] = s[t];", "    out[i] = out[i - t + 63 - t];", sim.Race, "'out'"),
        ],
        lambda: [data(128), data(1), 128],
        grid=2,
    ),
    Kernel(
        "swizzled tile",
        """
    __shared__ int s[16 * 16];
    for (int j = t; j < 256; j += 64) s[j / 16 * 16 + (j % 16 ^ j / 16)] = x[j];
    __syncthreads();
    for (int j = t; j < 256; j += 64) out[j] = s[j % 16 * 16 + (j / 16 ^ j % 16)];
""",
        lambda x, n: x.view(16, 16).t().reshape(-1),
        [
            ("    __syncthreads();\n", "", sim.Race),
            ("(j % 16 ^ j / 16)] = x[j]", "(j % 16 | j / 16)] = x[j]", sim.Race, "another value"),
        ],
        lambda: [ints(256), data(256), 256],
    ),
    Kernel(
        "a small matrix for each warp",
        """
    __shared__ int s[2][32];
    int w = t / 32, lane = t % 32;
    s[w][lane] = x[i];
    __syncwarp();
    int sum = 0;
    for (int j = 0; j < 4; ++j) sum += s[w][lane / 4 % 4 * 4 + j] * s[w][16 + j * 4 + lane % 4];
    __syncwarp();
    s[w][lane] = sum;
    __syncwarp();
    out[i] = lane < 16 ? s[w][lane] : s[w][lane - 16];
""",
        lambda x, n: _small(x),
        [
            ("    __syncwarp();\n    int", "    int", sim.Race, "__syncwarp"),
            ("    __syncwarp();\n    s", "    s", sim.Race, "__syncwarp"),
            ("s[w][lane] = x[i]", "s[0][lane] = x[i]", sim.Race, "another value|no barrier"),
            ("t / 32, lane", "t / 16, lane", sim.OutOfBounds),
        ],
        grid=2,
    ),
]


def _thrice(x):
    for _ in range(3):
        x = around(x, 0) - x
    return x


def _small(x):
    tiles = x.view(-1, 2, 4, 4)
    return (tiles[:, 0].double() @ tiles[:, 1].double()).view(-1, 1, 16).expand(-1, 2, 16).reshape(-1)
