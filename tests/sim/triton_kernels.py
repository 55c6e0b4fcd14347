"""Triton kernels, as its tutorials teach them, for the tests of cukern.sim.triton. A comment at the end of a
line names it for a test."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    tl.store(out + i, tl.load(x + i, mask=inside) + tl.load(y + i, mask=inside), mask=inside)


@triton.jit
def softmax(out, x, stride, rows, cols, BLOCK: tl.constexpr):
    """A persistent kernel: each program takes every num_programs-th row."""
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0), num_stages=2):
        i = tl.arange(0, BLOCK)
        v = tl.load(x + row * stride + i, mask=i < cols, other=-float("inf"))
        e = tl.exp(v - tl.max(v, axis=0))
        tl.store(out + row * stride + i, e / tl.sum(e, axis=0), mask=i < cols)


@triton.jit
def tile_of(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """The tile of a program: GROUP rows of tiles share the columns that are in the L2 cache."""
    group = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = pid % (GROUP * tiles_n)
    return group * GROUP + within % height, within // height


@triton.jit
def product(
    a, b, m, n, k, tile_m, tile_n, sam, sak, sbk, sbn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """A tile of a @ b, in float32."""
    i, j, p = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    at, bt = a + i[:, None] * sam + p[None, :] * sak, b + p[:, None] * sbk + j[None, :] * sbn
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for start in range(0, k, BK):
        x = tl.load(at, mask=(i[:, None] < m) & (p[None, :] < k - start), other=0.0)
        y = tl.load(bt, mask=(p[:, None] < k - start) & (j[None, :] < n), other=0.0)
        total = tl.dot(x, y, total)
        at += BK * sak
        bt += BK * sbk
    return total


def _configs():
    shapes = [(32, 32, 32, 2), (64, 32, 32, 3)]
    return [
        triton.Config({"BM": m, "BN": n, "BK": k, "GROUP": 2}, num_warps=4, num_stages=s)
        for m, n, k, s in shapes
    ]


@triton.autotune(configs=_configs(), key=["m", "n", "k"])
@triton.heuristics({"EVEN": lambda args: args["k"] % args["BK"] == 0})
@triton.jit
def matmul(
    a, b, c, m, n, k, sam, sak, sbk, sbn, scm, scn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    tl.static_assert(not EVEN)
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN), GROUP)
    total = product(a, b, m, n, k, tile_m, tile_n, sam, sak, sbk, sbn, BM, BN, BK)
    i, j = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    at = c + i[:, None] * scm + j[None, :] * scn
    tl.store(at, total.to(c.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))


@triton.jit
def persistent_matmul(a, b, c, m, n, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    tiles_n = tl.cdiv(n, BN)
    for tile in tl.range(tl.program_id(0), tl.cdiv(m, BM) * tiles_n, tl.num_programs(0)):
        total = product(a, b, m, n, k, tile // tiles_n, tile % tiles_n, k, 1, n, 1, BM, BN, BK)
        i, j = tile // tiles_n * BM + tl.arange(0, BM), tile % tiles_n * BN + tl.arange(0, BN)
        tl.store(
            c + i[:, None] * n + j[None, :],
            total.to(c.dtype.element_ty),
            mask=(i[:, None] < m) & (j[None, :] < n),
        )


@triton.jit
def grouped_matmul(a, b, c, sizes, groups, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """`a`, `b`, `c`: addresses of one float16 matrix of each group; `sizes`: m, n, k of each group."""
    first, tile = 0, tl.program_id(0)
    for g in range(groups):
        m, n, k = tl.load(sizes + 3 * g), tl.load(sizes + 3 * g + 1), tl.load(sizes + 3 * g + 2)
        tiles_n = tl.cdiv(n, BN)
        count = tl.cdiv(m, BM) * tiles_n
        while tile >= first and tile < first + count:
            own = tile - first
            pa = tl.load(a + g).to(tl.pointer_type(tl.float16))
            pb = tl.load(b + g).to(tl.pointer_type(tl.float16))
            total = product(pa, pb, m, n, k, own // tiles_n, own % tiles_n, k, 1, n, 1, BM, BN, BK)
            i, j = own // tiles_n * BM + tl.arange(0, BM), own % tiles_n * BN + tl.arange(0, BN)
            pc = tl.load(c + g).to(tl.pointer_type(tl.float16))
            tl.store(
                pc + i[:, None] * n + j[None, :],
                total.to(tl.float16),
                mask=(i[:, None] < m) & (j[None, :] < n),
            )
            tile += tl.num_programs(0)
        first += count


@triton.jit
def dropout(x, out, n, p, seed, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, tl.where(tl.rand(seed, i) > p, v / (1 - p), 0.0), mask=i < n)


@triton.jit
def layernorm(x, y, w, b, mean, rstd, n, eps, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    v = tl.load(x + row * n + i, mask=i < n, other=0.0).to(tl.float32)
    mu = tl.sum(v, axis=0) / n
    centered = tl.where(i < n, v - mu, 0.0)
    r = 1 / tl.sqrt(tl.sum(centered * centered, axis=0) / n + eps)
    tl.store(mean + row, mu)
    tl.store(rstd + row, r)
    scale, shift = tl.load(w + i, mask=i < n), tl.load(b + i, mask=i < n)
    tl.store(y + row * n + i, centered * r * scale + shift, mask=i < n)


@triton.jit
def layernorm_bwd(dx, dy, dw, db, x, w, mean, rstd, lock, n, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    """dx, and the sums of dw and db of every GROUPS-th row, under a lock."""
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    inside = i < n
    v, g = tl.load(x + row * n + i, mask=inside, other=0.0), tl.load(dy + row * n + i, mask=inside, other=0.0)
    r = tl.load(rstd + row)
    hat = tl.where(inside, (v - tl.load(mean + row)) * r, 0.0)
    wg = g * tl.load(w + i, mask=inside, other=0.0)
    tl.store(
        dx + row * n + i,
        (wg - (hat * (tl.sum(hat * wg, axis=0) / n) + tl.sum(wg, axis=0) / n)) * r,
        mask=inside,
    )
    group = row % GROUPS
    lock += group
    filled = lock + GROUPS
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    part_w, part_b = g * hat, g
    if tl.load(filled) == 0:
        tl.atomic_xchg(filled, 1)
    else:
        part_w += tl.load(dw + group * n + i, mask=inside)
        part_b += tl.load(db + group * n + i, mask=inside)
    tl.store(dw + group * n + i, part_w, mask=inside)
    tl.store(db + group * n + i, part_b, mask=inside)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def sum_rows(part, total, rows, n, BM: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros((BM, BLOCK), dtype=tl.float32)
    for start in range(0, rows, BM):
        r = start + tl.arange(0, BM)
        at = part + r[:, None] * n + i[None, :]
        sums += tl.load(at, mask=(r[:, None] < rows) & (i[None, :] < n), other=0.0)
    tl.store(total + i, tl.sum(sums, axis=0), mask=i < n)


@triton.jit
def attention(
    q, k, v, out, scale, T, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    """Fused attention of one head by online softmax; q, k, v, out: (heads, T, D)."""
    head = tl.program_id(1) * T * D
    i, d = tl.program_id(0) * BM + tl.arange(0, BM), tl.arange(0, D)
    qs = tl.load(q + head + i[:, None] * D + d[None, :], mask=i[:, None] < T, other=0.0)
    top, total = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    end = tl.minimum((tl.program_id(0) + 1) * BM, T) if CAUSAL else T
    for start in range(0, end, BN):
        j = start + tl.arange(0, BN)
        ks = tl.load(k + head + j[None, :] * D + d[:, None], mask=j[None, :] < T, other=0.0)
        s = tl.dot(qs, ks) * scale
        seen = (
            (j[None, :] < T) & (i[:, None] >= j[None, :]) if CAUSAL else (j[None, :] < T) & (i[:, None] >= 0)
        )
        s = tl.where(seen, s, -1e30)
        new = tl.maximum(top, tl.max(s, axis=1))
        p, shrink = tl.exp(s - new[:, None]), tl.exp(top - new)
        vs = tl.load(v + head + j[:, None] * D + d[None, :], mask=j[:, None] < T, other=0.0)
        acc = tl.dot(p.to(vs.dtype), vs, acc * shrink[:, None])
        total, top = total * shrink + tl.sum(p, axis=1), new
    to = out + head + i[:, None] * D + d[None, :]
    tl.store(to, (acc / total[:, None]).to(out.dtype.element_ty), mask=i[:, None] < T)


@triton.jit
def descriptor_add(x, out, m, n, BM: tl.constexpr, BN: tl.constexpr):
    """Descriptors made in the kernel."""
    dx = tl.make_tensor_descriptor(x, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    do = tl.make_tensor_descriptor(out, shape=[m, n], strides=[n, 1], block_shape=[BM, BN])
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    do.store([i, j], dx.load([i, j]) + 1)


@triton.jit
def host_descriptor_matmul(a, b, c, k, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    i, j = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for p in range(0, k, BK):
        total = tl.dot(a.load([i, p]), b.load([p, j]), total)
    c.store([i, j], total.to(tl.float16))


@triton.jit
def histogram(x, counts, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = tl.load(x + i, mask=i < n, other=0)
    tl.atomic_add(counts + bins, 1, mask=i < n)


@triton.jit
def cumsum(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.cumsum(tl.load(x + i, mask=i < n, other=0.0), axis=0), mask=i < n)


@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    i, j, p = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + i[:, None] * K + p[None, :]), tl.load(b + p[:, None] * N + j[None, :])
    tl.store(
        c + i[:, None] * N + j[None, :], tl.dot(x, y, input_precision=PRECISION, out_dtype=c.dtype.element_ty)
    )


@triton.jit
def math(x, out, n, BLOCK: tl.constexpr):
    """Functions of libdevice, and approximate ones."""
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1.0)
    y = (
        tl.erf(v)
        + tl.sin(v)
        + tl.cos(v)
        + tl.log(tl.abs(v) + 1)
        + tl.exp2(v)
        + tl.rsqrt(v * v + 1)
        + tl.sigmoid(v)
        + tl.floor(v)
    )
    tl.store(out + i, y, mask=i < n)


@triton.jit
def checked(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n, other=1.0)
    tl.device_assert(v > 0, "must be positive")
    tl.device_print("v", v)
    tl.store(out + i, tl.log(v), mask=i < n)


@triton.jit
def first_of_rows(x, out, pitch, BLOCK: tl.constexpr):
    """The first elements of rows whose offsets do not fit into int32."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    tl.store(out + row * BLOCK + i, tl.load(x + row * pitch + i))


@triton.jit
def reverse(x, out, scratch, n, BLOCK: tl.constexpr):
    """Threads exchange values through global memory."""
    i = tl.arange(0, BLOCK)
    tl.store(scratch + i, tl.load(x + i, mask=i < n), mask=i < n)
    tl.debug_barrier()
    tl.store(out + i, tl.load(scratch + n - 1 - i, mask=i < n), mask=i < n)


@triton.jit
def largest(x, table, out, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """table[argmax of a row]."""
    r, i = tl.arange(0, ROWS), tl.arange(0, COLS)
    at = x + r[:, None] * cols + i[None, :]
    v = tl.load(at, mask=(r[:, None] < rows) & (i[None, :] < cols), other=-float("inf"))
    best = tl.argmax(v, axis=1)
    tl.store(out + r, tl.load(table + best, mask=r < rows), mask=r < rows)


@triton.jit
def prefix_sum(x, out, sums, flags, n, BLOCK: tl.constexpr):
    """Each program waits for the sum of the one before it."""
    pid = tl.program_id(0)
    i = pid * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(x + i, mask=i < n, other=0.0)
    before = 0.0
    if pid > 0:
        while tl.atomic_add(flags + pid - 1, 0, sem="acquire") == 0:
            pass
        before = tl.load(sums + pid - 1)
    tl.store(sums + pid, before + tl.sum(own, axis=0))
    tl.debug_barrier()
    tl.atomic_xchg(flags + pid, 1, sem="release")
    tl.store(out + i, before + tl.cumsum(own, axis=0), mask=i < n)


@gluon.jit
def gluon_copy(x, out, n, BLOCK: gl.constexpr):
    """A tile through shared memory, by asynchronous copies."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    tile = gl.allocate_shared_memory(gl.float32, [BLOCK], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    async_copy.async_load(tile, x + i, mask=i < n)
    async_copy.commit_group()
    async_copy.wait_group(0)
    gl.store(out + i, tile.load(layout), mask=i < n)
