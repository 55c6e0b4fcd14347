"""Instructions that other people's kernels use: vector atomics, stmatrix, movmatrix, 8-bit floats, mbarriers
in all forms, bulk copies."""

import numpy as np
import pytest
import torch
from sim_cases import ints, iota
from sim_kernels import simulate

import cukern
from cukern import sim
from cukern.sim.numerics import fp8


def test_vector_atomics():
    text = """
__global__ void k(float4* four, float2* two, float2* old) {
    atomicAdd(four + threadIdx.x % 2, make_float4(1, 2, 3, threadIdx.x));
    old[threadIdx.x] = atomicAdd(two, make_float2(1, -1));
}
"""
    four, two, old = torch.zeros(8), torch.zeros(2), torch.zeros(64)
    simulate(text, four, two, old)
    assert four.tolist() == [16, 32, 48, 240, 16, 32, 48, 256] and two.tolist() == [32, -32]
    assert sorted(old[::2].tolist()) == list(range(32))
    with pytest.raises(sim.Misaligned, match="changes 16 bytes"):
        simulate(text, torch.zeros(9)[1:], two, old)


MATRICES = """
__global__ void k(unsigned* out, const unsigned* x) {
    __shared__ alignas(16) unsigned tile[4][8][4];
    unsigned r[4], t = threadIdx.x;
    for (int i = 0; i < 4; ++i) r[i] = x[32 * i + t];
    unsigned to = (unsigned)__cvta_generic_to_shared(&tile[t / 8][t % 8][0]);
    asm volatile("stmatrix.sync.aligned.m8n8.x4TRANS.shared.b16 [%0], {%1, %2, %3, %4};" 
                 :: "r"(to), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
    __syncwarp();
    for (int i = 0; i < 4; ++i) out[32 * i + t] = (&tile[0][0][0])[32 * i + t];
    unsigned moved;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(r[0]));
    out[128 + t] = moved;
}
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_and_movmatrix(transposed):
    x, out = torch.randint(0, 1 << 30, (128,), dtype=torch.int32), ints(160)
    simulate(MATRICES.replace("TRANS", ".trans" if transposed else ""), out, x)
    # lane l holds row l / 4, columns 2 (l % 4) and the next
    tiles = x.numpy().view(np.int16).reshape(4, 8, 8)
    stored = out[:128].numpy().view(np.int16).reshape(4, 8, 8)
    assert (stored == (tiles.swapaxes(1, 2) if transposed else tiles)).all()
    assert (out[128:].numpy().view(np.int16).reshape(8, 8) == tiles[0].T).all()


ROWS_OF_TILES = """
__global__ void k(unsigned* out, const unsigned* x) {
    __shared__ alignas(16) unsigned tile[32][4];
    unsigned r[4], t = threadIdx.x;
    for (int i = 0; i < 4; ++i) tile[t][i] = x[4 * t + i];
    __syncwarp();
    asm volatile("ldmatrix.sync.aligned.FORM.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                     : "r"((unsigned)__cvta_generic_to_shared(&tile[t][0])));
    for (int i = 0; i < 4; ++i) out[32 * i + t] = r[i];
}
"""


@pytest.mark.parametrize("form", ["m8n8.x4", "x4.m8n8", "m8n8.x4.trans", "x4.trans.m8n8"])
def test_ldmatrix_with_its_count_before_or_after_its_shape(form):
    x, out = torch.randint(0, 1 << 30, (128,), dtype=torch.int32), ints(128)
    simulate(ROWS_OF_TILES.replace("FORM", form), out, x)
    tiles = x.numpy().view(np.int16).reshape(4, 8, 8)
    assert (
        out.numpy().view(np.int16).reshape(4, 8, 8) == (tiles.swapaxes(1, 2) if "trans" in form else tiles)
    ).all()


@pytest.mark.parametrize("name, dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_8_bit_floats(name, dtype):
    text = f"""
#include <cuda_fp8.h>
__global__ void k(__nv_fp8_{name}* out, float* back, const float* x) {{
    out[threadIdx.x] = __nv_fp8_{name}(x[threadIdx.x]);
    back[threadIdx.x] = (float)out[threadIdx.x];
}}
"""
    largest = torch.finfo(dtype).max
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    finite = codes[codes.isfinite()]
    middles = (finite.sort()[0][1:] + finite.sort()[0][:-1]) / 2
    x = torch.cat(
        (
            finite,
            middles,
            middles.nextafter(torch.tensor(9.0)),
            torch.randn(200),
            torch.tensor([1e9, -1e9, torch.inf, torch.nan]),
        )
    )
    x = x[torch.arange(1024) % len(x)]
    out, back = torch.zeros(1024, dtype=dtype), torch.zeros(1024)
    simulate(text, out, back, x, block=1024)
    expected = x.clamp(-largest, largest).to(dtype)
    assert torch.equal(out.float().nan_to_num(nan=1234.0), expected.float().nan_to_num(nan=1234.0))
    assert torch.equal(back.nan_to_num(nan=1234.0), expected.float().nan_to_num(nan=1234.0))
    assert (fp8.decode(name, np.arange(256)) == codes.numpy())[codes.isfinite().numpy()].all()


RING = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void k(int* out, const int* x, int rounds) {
    __shared__ unsigned long long full, empty;
    __shared__ int tile[32];
    int t = threadIdx.x;
    if (t == 0) {
        asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(at(&full)) : "memory");
        asm volatile("mbarrier.init.shared.b64 [%0], 32;" :: "r"(at(&empty)) : "memory");
    }
    __syncthreads();
    int sum = 0;
    for (int i = 0; i < rounds; ++i) {
        if (t < 32) {
            unsigned long long state;
            tile[t] = x[32 * i + t];
            asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at(&full)) : "memory");
            unsigned done = 0;
            while (!done) asm volatile("{ .reg .pred p; mbarrier.WAIT.parity.shared.b64 p, [%1], %2; "
                                       "selp.u32 %0, 1, 0, p; }"
                                       : "=r"(done) : "r"(at(&empty)), "r"(i & 1) : "memory");
        } else {
            unsigned done = 0;
            while (!done) asm volatile("{ .reg .pred p; mbarrier.WAIT.parity.shared.b64 p, [%1], %2; "
                                       "selp.u32 %0, 1, 0, p; }"
                                       : "=r"(done) : "r"(at(&full)), "r"(i & 1) : "memory");
            sum += tile[63 - t];
            asm volatile("mbarrier.arrive.shared.b64 _, [%0], 1;" :: "r"(at(&empty)) : "memory");
        }
    }
    if (t >= 32) out[t - 32] = sum;
}
"""


@pytest.mark.parametrize("wait", ["try_wait", "test_wait"])
def test_ring_of_mbarriers(wait):
    x, out = iota(160), ints(32)
    simulate(RING.replace("WAIT", wait), out, x, 5, block=64, name="k")
    assert torch.equal(out, x.view(5, 32).sum(0, dtype=torch.int32).flip(0))


def test_ring_without_its_empty_mbarrier():
    text = RING.replace("WAIT", "try_wait").replace("while (!done) asm", "if (t >= 32) while (!done) asm", 1)
    with pytest.raises(sim.Fault):
        simulate(text, ints(32), iota(160), 5, block=64, name="k")


def test_mbarrier_wait_for_a_state():
    text = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void k(int* out, const int* x) {
    __shared__ unsigned long long bar;
    __shared__ int tile[64];
    int t = threadIdx.x;
    if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 64;" :: "r"(at(&bar)) : "memory");
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        tile[t] = x[t] + i;
        unsigned long long state;
        unsigned done = 0;
        for (int half = 0; half < 2; ++half) {
            asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(&bar))
                : "memory");
            done = 0;
            while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.shared.b64 p, [%1], %2; "
                                       "selp.u32 %0, 1, 0, p; }"
                                       : "=r"(done) : "r"(at(&bar)), "l"(state) : "memory");
            if (half == 0) out[t] = tile[63 - t];
        }
    }
    __syncthreads();
    if (t == 0) asm volatile("mbarrier.inval.shared.b64 [%0];" :: "r"(at(&bar)) : "memory");
}
"""
    out = ints(64)
    simulate(text, out, iota(64), block=64, name="k")
    assert out.tolist() == (iota(64).flip(0) + 2).tolist()


DROP = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void k(int* out) {
    __shared__ unsigned long long bar;
    __shared__ int tile[64];
    int t = threadIdx.x, sum = 0;
    if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 64;" :: "r"(at(&bar)) : "memory");
    __syncthreads();
    tile[t] = t;
    if (t >= 32) {
        asm volatile("mbarrier.DROP.shared.b64 _, [%0];" :: "r"(at(&bar)) : "memory");
        return;
    }
#pragma unroll 1
    for (int i = 0; i < 3; ++i) {
        unsigned long long state;
        unsigned done = 0;
        asm volatile("mbarrier.ARRIVE.shared.b64 %0, [%1], 1;" : "=l"(state) : "r"(at(&bar)) : "memory");
        while (!done) asm volatile("{ .reg .pred p; mbarrier.try_wait.shared.b64 p, [%1], %2; selp.u32 %0, "
                                   "1, 0, p; }"
                                   : "=r"(done) : "r"(at(&bar)), "l"(state) : "memory");
        sum += tile[63 - t];
    }
    out[t] = sum;
}
"""


def test_arrive_drop():
    """Half of the threads leave after the first phase."""
    out, text = ints(32), DROP.replace("ARRIVE", "arrive")
    simulate(text.replace("DROP", "arrive_drop"), out, block=64, name="k")
    assert out.tolist() == [3 * (63 - t) for t in range(32)]
    with pytest.raises(sim.BarrierFault, match="waits at an mbarrier for 32 arrivals and 0 bytes"):
        simulate(text.replace("DROP", "arrive"), out, block=64, name="k")


def test_arrive_that_must_not_complete_a_phase():
    with pytest.raises(
        sim.BarrierFault,
        match=r"thread \(31, 0, 0\).* arrives with .noComplete at an mbarrier, and completes its phase",
    ):
        simulate(
            DROP.replace("DROP", "arrive_drop").replace("ARRIVE", "arrive.noComplete"),
            ints(32),
            block=64,
            name="k",
        )


def test_cache_hints():
    text = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void k(int* out, const int* x) {
    __shared__ alignas(16) int tile[128];
    int t = threadIdx.x, y;
    unsigned long long policy;
    asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], 128, %1;" :: "l"(x), "l"(policy));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
        :: "r"(at(tile + 4 * t)), "l"(x + 4 * t), "l"(policy));
    asm volatile("cp.async.wait_all;" ::: "memory");
    asm volatile("ld.global.L1::evict_first.L2::evict_first.s32 %0, [%1];" : "=r"(y) : "l"(x + t));
    for (int i = 0; i < 4; ++i) out[4 * t + i] = tile[4 * t + i] + y;
}
"""
    out, x = ints(128), iota(128)
    simulate(text, out, x)
    assert torch.equal(out.view(32, 4), x.view(32, 4) + x[:32, None])


BULK = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__global__ void k(int* out, const int* x, int bytes) {
    __shared__ alignas(16) int tile[256];
    __shared__ unsigned long long bar;
    int t = threadIdx.x;
    if (t == 0) asm volatile("mbarrier.init.shared.b64 [%0], 1;" :: "r"(at(&bar)) : "memory");
    __syncthreads();
    if (t == 0) {
        asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(at(&bar)), "r"(bytes)
            : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     :: "r"(at(tile)), "l"(x), "r"(bytes), "r"(at(&bar)) : "memory");
    }
    unsigned done = 0;
    while (WAIT) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; "
                              "selp.u32 %0, 1, 0, p; }"
                               : "=r"(done) : "r"(at(&bar)) : "memory");
    for (int i = t; i < bytes / 4; i += 64) tile[i] += 1;
    __syncthreads();
    if (t == 0) {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
            :: "l"(out), "r"(at(tile)), "r"(bytes) : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
"""


def test_bulk_copies():
    out = ints(256)
    simulate(BULK.replace("WAIT", "!done"), out, iota(256), 800, block=64, name="k")
    assert out.tolist() == [*range(1, 201), *[-1] * 56]


def test_bulk_copy_that_nobody_waits_for():
    with pytest.raises(
        sim.Race,
        match=r"reads 4 bytes, offset 128 of shared memory .*, that the asynchronous copy of thread \(0, 0, "
        r"0\) wrote",
    ):
        simulate(BULK.replace("WAIT", "bytes < 0"), ints(256), iota(256), 800, block=64, name="k")


@pytest.mark.parametrize(
    "change, bytes_, words",
    [
        (
            ("[%0], [%1], %2, [%3]", "[%0], [%1], %2, [%3]"),
            808,
            "the size of a cp.async.bulk is 808, which is not a multiple of 16",
        ),
        (('"l"(x)', '"l"(x + 1)'), 800, "the source of a cp.async.bulk is .*, which is not a multiple of 16"),
        (('"l"(x)', '"l"(x + 200)'), 800, "0 bytes after the end of the tensor of argument 'x'"),
    ],
)
def test_wrong_bulk_copies(change, bytes_, words):
    with pytest.raises(sim.Fault, match=words):
        simulate(
            BULK.replace("WAIT", "!done").replace(*change), ints(256), iota(256), bytes_, block=64, name="k"
        )


MMA = """
__global__ void k(int* d, const int* a, const int* b, const int* c) {
    unsigned t = threadIdx.x, r[4];
    asm volatile("mma.sync.aligned.m16n8k32.row.col.TYPES {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a[t / 4 * 8 + t % 4]), "r"(a[(t / 4 + 8) * 8 + t % 4]), "r"(a[t / 4 * 8 + t % 4 + 4]),
                   "r"(a[(t / 4 + 8) * 8 + t % 4 + 4]), "r"(b[t / 4 * 8 + t % 4]),
                       "r"(b[t / 4 * 8 + t % 4 + 4]),
                   "r"(c[t / 4 * 8 + t % 4 * 2]), "r"(c[t / 4 * 8 + t % 4 * 2 + 1]),
                       "r"(c[(t / 4 + 8) * 8 + t % 4 * 2]),
                   "r"(c[(t / 4 + 8) * 8 + t % 4 * 2 + 1]));
    for (int i = 0; i < 4; ++i) d[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = r[i];
}
"""


@pytest.mark.parametrize(
    "types, dtypes",
    [("s32.s8.s8.s32", (torch.int8, torch.int8)), ("s32.u8.s8.s32", (torch.uint8, torch.int8))],
)
def test_mma_of_8_bit_integers(types, dtypes):
    a, b = (
        torch.randint(0, 256, shape).to(torch.uint8).view(dtype)
        for shape, dtype in (((16, 32), dtypes[0]), ((8, 32), dtypes[1]))
    )
    c, d = torch.randint(-1000, 1000, (16, 8), dtype=torch.int32), ints(128)
    simulate(MMA.replace("TYPES", types), d, a, b, c)
    assert torch.equal(d.view(16, 8), a.int() @ b.int().T + c)


def test_mma_of_8_bit_floats():
    a, b = torch.randn(16, 32).to(torch.float8_e4m3fn), torch.randn(8, 32).to(torch.float8_e5m2)
    c, d = torch.randn(16, 8), torch.zeros(16, 8)
    simulate(MMA.replace("TYPES", "f32.e4m3.e5m2.f32"), d, a, b, c)
    torch.testing.assert_close(d, (a.double() @ b.double().T + c).float(), rtol=1e-6, atol=1e-6)


def test_mma_whose_c_and_d_have_different_types():
    text = """
__global__ void k(float* d, const unsigned* a, const unsigned* b, const unsigned* c) {
    unsigned t = threadIdx.x, zero = 0;
    float r[4];
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f16 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, "
                 "%8};"
                 : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
                 : "r"(a[t]), "r"(a[t + 32]), "r"(b[t]), "r"(c[t]), "r"(c[t + 32]));
    for (int i = 0; i < 4; ++i) d[(t / 4 + i / 2 * 8) * 8 + t % 4 * 2 + i % 2] = r[i];
}
"""
    (a, b, c), d = (torch.randn(shape, 8).half() for shape in (16, 8, 16)), torch.zeros(16, 8)
    simulate(text, d, a, b, c)
    torch.testing.assert_close(d, (a.double() @ b.double().T + c).float(), rtol=1e-6, atol=1e-6)


WGMMA = """
__device__ unsigned at(void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ unsigned long long describe(void* p) { return at(p) >> 4 | 8ull << 16 | 16ull << 32; }
__global__ void __launch_bounds__(128) k(unsigned* d, const uint4* a, const uint4* b) {
    __shared__ alignas(128) uint4 tile_a[128], tile_b[48];  // eight rows by 16 bytes follow one another
    int t = threadIdx.x;
    tile_a[t / 16 * 16 + t % 2 * 8 + t / 2 % 8] = a[t];
    if (t < 48) tile_b[t / 16 * 16 + t % 2 * 8 + t / 2 % 8] = b[t];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    unsigned r[12];
    asm volatile("{ .reg .pred p; setp.ne.b32 p, 0, 0; wgmma.fence.sync.aligned;"
                 "wgmma.mma_async.sync.aligned.m64n24k32.TYPES RESULTS, %12, %13, pSIGNS;"
                 "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; }"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]),
                     "=r"(r[7]), "=r"(r[8]),
                   "=r"(r[9]), "=r"(r[10]), "=r"(r[11])
                 : "l"(describe(tile_a)), "l"(describe(tile_b)) : "memory");
    for (int i = 0; i < COUNT; ++i) d[i * 128 + t] = r[i];
}
"""


@pytest.mark.parametrize(
    "types, a_type, b_type, out",
    [
        ("f32.e4m3.e5m2", torch.float8_e4m3fn, torch.float8_e5m2, torch.float32),
        ("f16.e4m3.e4m3", torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float16),
        ("s32.s8.u8", torch.int8, torch.uint8, torch.int32),
    ],
)
def test_wgmma_of_8_bit_elements_and_24_columns(types, a_type, b_type, out):
    count = 12 if out.itemsize == 4 else 6
    a, b = (
        torch.randint(-8 if t.is_signed else 0, 9, (rows, 32)).float().to(t)
        for rows, t in ((64, a_type), (24, b_type))
    )
    d = torch.zeros(count * 128, dtype=torch.int32)
    text = WGMMA.replace("TYPES", types).replace(
        "RESULTS", "{" + ", ".join(f"%{i}" for i in range(count)) + "}"
    )
    simulate(
        text.replace("SIGNS", "" if "s32" in types else ", 1, 1").replace("COUNT", str(count)),
        d,
        a,
        b,
        block=128,
        name="k",
    )
    # [8 columns][half of 16 rows][warp][row][quad][2 columns]; two f16 share a register
    found = d.view(3, 2, 2, 4, 8, 4).movedim(2, 5) if count == 12 else d.view(3, 2, 4, 8, 4, 1)
    found = found.contiguous().view(out).view(3, 2, 4, 8, 4, 2).permute(2, 1, 3, 0, 4, 5).reshape(64, 24)
    assert torch.equal(found.double(), a.double() @ b.double().T)


def test_integers_in_parts_and_the_nth_bit():
    text = """
__global__ void k(unsigned* out, const unsigned* x) {
    unsigned a = x[threadIdx.x], b = x[threadIdx.x + 32], c;
    out[threadIdx.x] = __vabsdiffu4(a, b);
    out[threadIdx.x + 32] = __vsadu4(a, b);
    asm("vadd2.s32.s32.s32.sat %0, %1, %2, 0;" : "=r"(c) : "r"(a), "r"(b));
    out[threadIdx.x + 64] = c;
    asm("vmax4.u32.u32.u32 %0, %1, %2, 0;" : "=r"(c) : "r"(a), "r"(b));
    out[threadIdx.x + 96] = c;
    out[threadIdx.x + 128] = __fns(a, threadIdx.x, threadIdx.x % 5 - 2);
}
"""
    x, out = torch.randint(-(1 << 31), 1 << 31, (64,), dtype=torch.int32), ints(160)
    simulate(text, out, x)
    bytes_, halves = (x.numpy().view(t).reshape(2, -1).astype(int) for t in (np.uint8, np.int16))
    far = abs(bytes_[0] - bytes_[1])
    assert (out[:32].numpy().view(np.uint8) == far).all() and (
        out[32:64].numpy() == far.reshape(32, 4).sum(axis=1)
    ).all()
    assert (out[64:96].numpy().view(np.int16) == np.clip(halves.sum(axis=0), -32768, 32767)).all()
    assert (out[96:128].numpy().view(np.uint8) == bytes_.max(axis=0)).all()
    for t, (mask, found) in enumerate(zip(x[:32].tolist(), out[128:].tolist(), strict=True)):
        n = t % 5 - 2
        ones = [i for i in (range(t, 32) if n > 0 else range(t, -1, -1) if n else (t,)) if mask >> i & 1]
        assert found == (ones[max(abs(n), 1) - 1] if len(ones) >= abs(n) and ones else -1)


@pytest.mark.parametrize(
    "body, words",
    [
        ('asm volatile("{ .reg .b128 v; mov.b128 v, {%0, %0}; }" :: "l"(p));', "mov.b128"),
        ('unsigned r; asm volatile("mov.u32 %0, %%pm0;" : "=r"(r)); *p = r;', "the special register %pm0"),
        ("int* q = (int*)malloc(16); *p = q[0];", "call of malloc"),
        ("*p = tex1Dfetch<int>(*p, 3);", "tex.1d.v4.s32.s32"),
    ],
)
def test_what_is_not_simulated_is_named_with_its_line(body, words):
    with pytest.raises(sim.NotSimulated, match=f"^{words}, in k, .*:3"):
        simulate(
            "__global__ void k(unsigned long long* p) {\n    if (*p == 99) return;\n    " + body + "\n}",
            torch.ones(4, dtype=torch.int64),
        )


# Each row of the table in docs/guide/debugging.md. x: 64-bit, r: 32-bit, h: 16-bit, f: float
OF_SM_100 = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 x) {
    .reg .b32 %r<4>; .reg .f32 %f<9>; .reg .b64 %d<9>;
    ld.param.u64 %d1, [out]; ld.param.u64 %d2, [x];
    mov.u32 %r1, %tid.x;
    mad.wide.u32 %d1, %r1, 16, %d1; mad.wide.u32 %d2, %r1, 12, %d2;
    ld.global.f32 %f1, [%d2]; ld.global.f32 %f2, [%d2+4]; ld.global.f32 %f3, [%d2+8];
    max.f32 %f4, %f1, %f2, %f3;
    redux.sync.min.abs.f32 %f5, %f1, -1;
    redux.sync.max.NaN.f32 %f6, %f3, -1;
    mov.b64 %d3, {%f1, %f2};
    fma.rn.f32x2 %d4, %d3, %d3, %d3;
    mov.b64 {%f7, %f8}, %d4;
    add.f32 %f8, %f7, %f8;
    st.global.v4.f32 [%d1], {%f4, %f5, %f6, %f8};
    ret;
}
"""


def test_instructions_of_sm_100():
    x, out = torch.randn(32, 3), torch.empty(32, 4)
    x[3, 1] = x[5, 0] = torch.nan
    with cukern.backend("sim"):
        cukern.compile(OF_SM_100)[1, 32](out, x)
        assert torch.equal(out[:, 0], x.nan_to_num(-100).amax(1))
        assert (out[:, 1] == x[:, 0].abs().nan_to_num(100).min()).all()
        assert (out[:, 2] == x[:, 2].max()).all()
        y = x[:, :2].double()
        torch.testing.assert_close(
            out[:, 3].double(), (y * y + y).sum(1), equal_nan=True, atol=1e-6, rtol=1e-6
        )
        x[7, 2] = torch.nan
        cukern.compile(OF_SM_100)[1, 32](out, x)
        assert out[:, 2].isnan().all()


HALF_INITIALIZED = """
.version 8.8
.target sm_100a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 x) {
    .reg .b32 %f<4>; .reg .b64 %d<9>;
    .shared .align 8 .b8 tile[8];
    ld.param.u64 %d1, [out]; ld.param.u64 %d2, [x];
    ld.global.b32 %f1, [%d2];
    st.shared.b32 [tile], %f1;
    ld.shared.b64 %d3, [tile];
    add.rn.f32x2 %d4, %d3, %d3;
    mov.b64 {%f2, %f3}, %d4;
    st.global.b32 [%d1], USED;
    ret;
}
"""


def test_each_half_of_two_floats_is_initialized_by_itself():
    x, out = torch.randn(1), torch.empty(1)
    with cukern.backend("sim"):
        cukern.compile(HALF_INITIALIZED.replace("USED", "%f2"))[1, 1](out, x)
        assert torch.equal(out, x + x)
        with pytest.raises(sim.Uninitialized):
            cukern.compile(HALF_INITIALIZED.replace("USED", "%f3"))[1, 1](out, x)


NOT_SIMULATED = """
ld.global.b128 v, [x]
st.bulk.weak.shared::cta [r], 64, 0
multimem.red.relaxed.sys.global.add.u32 [x], r
discard.global.L2 [x], 128
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [r], r, [r]
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r], [r], 64, [r]
cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [r], [r], 64, [r]
mbarrier.pending_count.b64 r, x
fence.proxy.alias
cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [r], [x, {r, r, r}], [r], \
{h}
cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [r], [x, {r, r, r, r, \
r}], [r]
tensormap.replace.tile.swizzle_atomicity.shared::cta.b1024.b32 [r], 0
mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {f, f, f, f, f, f, f, f}, {r, r}, {r, r}, {f, f, f, f, f, f, \
f, f}
mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {r, r}, {r}, {r}, {r, r}
mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {r, r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}
mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc {r, r, r, r}, {r, r, r, r}, {r, r}, {r, r, r, r}
mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {f, f, f, f}, {r, r, r, r}, {r, r, r, \
r}, {f, f, f, f}, r, 0
wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 {f, f, f, f}, x, x, r, 0, 1, 1, 1, 0, 0
wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc {r, r, r, r}, x, x, 1
wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {f, f, f, f}, x, x, 1, -1, 1, 0, 0
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [r], 32
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [r], [r]
ld.global.v8.b32 {r, r, r, r, r, r, r, r}, [x]
cvt.rn.satfinite.e2m1x2.f32 h, f, f
add.f32.bf16 f, h, f
max.abs.f32 f, f, f, f
mul24.lo.u32 r, r, r
bmsk.clamp.b32 r, r, r
szext.clamp.s32 r, r, r
cvt.pack.sat.u16.s32 r, r, r
vadd.u32.u32.u32.sat r, r, r
vavrg4.u32.u32.u32 r, r, r, r
alloca.u64 x, 16
shfl.idx.b32 r, r, 0, 31
vote.ballot.b32 r, 1
"""


@pytest.mark.parametrize("line", NOT_SIMULATED.strip().split("\n"))
def test_the_table_of_what_is_not_simulated_is_true(line):
    opcode, _, operands = line.partition(" ")
    asm = (
        ".reg .b128 v; .reg .b64 x; .reg .b32 r; .reg .b16 h; .reg .f32 f; mov.b64 x, 0; mov.b32 r, 0; "
        "mov.b16 h, 0; mov.f32 f, 0f00000000;"
    )
    with pytest.raises(sim.NotSimulated, match=f"^{opcode}, in k, .*:2$"):
        simulate(f'__global__ void k() {{\n    asm volatile("{{ {asm} {opcode} {operands}; }}");\n}}')


def test_mma_of_doubles():
    text = """
__global__ void k(double* d, const double* a, const double* b, const double* c) {
    int t = threadIdx.x;
    double x, y;
    asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %5};"
                 : "=d"(x), "=d"(y) : "d"(a[t]), "d"(b[t]), "d"(c[2 * t]), "d"(c[2 * t + 1]));
    d[2 * t] = x;
    d[2 * t + 1] = y;
}
"""
    a, b, c, d = (torch.randn(shape, dtype=torch.float64) for shape in ((8, 4), (8, 4), (8, 8), (8, 8)))
    simulate(text, d, a, b, c)
    torch.testing.assert_close(d, a @ b.T + c, rtol=1e-14, atol=1e-14)
