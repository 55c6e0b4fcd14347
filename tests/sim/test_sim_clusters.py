"""Thread-block clusters in the simulator: what right kernels compute, and what it says of wrong ones; and
blocks that wait for each other without a cluster, over flags in global memory."""

import pytest
import torch
from sim_cases import Case, ints, iota
from sim_kernels import simulate

from cukern import sim
from cukern.sim.machine import machine

PTX = "".join(
    f'#include "common/ptx/{topic}.cuh"\n'
    for topic in ("async_copy", "barrier", "cluster", "mbarrier", "memory")
)
RELAXED = "cluster_arrive_relaxed(); cluster_wait();"


# ---- right kernels

SOFTMAX = (
    PTX
    + """template <int N, bool PUSH>
__global__ void __cluster_dims__(N, 1, 1) k(float* out, const float* x, int n) {
    __shared__ float tile[32];
    __shared__ float2 parts[N];
    // of all blocks where they push, else only the one of this block's rank is used
    unsigned rank = cluster_rank(), parts_address = shared_address(parts);
    int row = blockIdx.x / N, i = rank * 32 + threadIdx.x;
    if (PUSH) cluster_arrive_relaxed();
    float v = i < n ? x[row * n + i] : __int_as_float(0xff800000), largest = v;
    for (int d = 16; d; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
    float sum = v == __int_as_float(0xff800000) ? 0.f : expf(v - largest);
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    float2 mine = make_float2(largest, sum);
    if (PUSH) {
        cluster_wait();
        if (threadIdx.x < N) st_cluster(shared_of_rank(parts_address + 8 * rank, threadIdx.x), mine);
    } else if (threadIdx.x == 0) {
        parts[rank] = mine;
    }
    cluster_sync();
    float2 all = make_float2(__int_as_float(0xff800000), 0.f);
    for (int r = 0; r < N; ++r) {
        float2 part = PUSH ? parts[r] : ld_cluster<float2>(shared_of_rank(parts_address + 8 * r, r));
        if (part.y == 0.f) continue;
        float both = fmaxf(all.x, part.x);
        all = make_float2(both, (all.y ? all.y * expf(all.x - both) : 0.f) + part.y * expf(part.x - both));
    }
    tile[threadIdx.x] = expf(v - all.x) / all.y;
    if (i < n) out[row * n + i] = tile[threadIdx.x];
    if (!PUSH) cluster_sync();
}
"""
)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_rows_that_a_cluster_shares(size, push):
    x = torch.randn(6, 32 * size - 5)
    out = torch.full_like(x, torch.nan)
    simulate(SOFTMAX, out, x, x.shape[1], grid=6 * size, name=f"k<{size}, {str(push).lower()}>")
    torch.testing.assert_close(out, x.softmax(1))


def test_clusters_beyond_one_batch(monkeypatch):
    monkeypatch.setattr(machine, "LANES_A_BATCH", 500)  # not a multiple of a cluster's 128
    x = torch.randn(11, 123)
    out = torch.full_like(x, torch.nan)
    simulate(SOFTMAX, out, x, x.shape[1], grid=44, name="k<4, false>")
    torch.testing.assert_close(out, x.softmax(1))


def test_indices_of_clusters_in_three_dimensions():
    names = [
        f"%%{name}.{axis}"
        for name in ("cluster_ctaid", "cluster_nctaid", "clusterid", "nclusterid")
        for axis in "xyz"
    ]
    names += ["%%cluster_ctarank", "%%cluster_nctarank"]
    reads = "\n".join(
        f'    asm volatile("mov.u32 %0, {name};" : "=r"(o[{i}]));' for i, name in enumerate(names)
    )
    text = f"""
__global__ void __cluster_dims__(2, 1, 3) k(int* out) {{
    int* o = out + 15 * (blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z));
{reads}
    asm volatile("{{ .reg .pred p; mov.pred p, %%is_explicit_cluster; selp.u32 %0, 1, 0, p; }}"
        : "=r"(o[14]));
}}
"""
    out = torch.full((6, 2, 4, 15), -1, dtype=torch.int32)
    simulate(text, out, grid=(4, 2, 6), block=1)
    for z in range(6):
        for y in range(2):
            for x in range(4):
                at = [x % 2, 0, z % 3, 2, 1, 3, x // 2, y, z // 3, 2, 2, 2, x % 2 + 2 * (z % 3), 6, 1]
                assert out[z, y, x].tolist() == at
    plain = torch.full((1, 1, 2, 15), -1, dtype=torch.int32)
    simulate(text.replace("__cluster_dims__(2, 1, 3)", ""), plain, grid=2, block=1)
    assert plain.view(2, 15).tolist() == [[0, 0, 0, 1, 1, 1, x, 0, 0, 2, 1, 1, 0, 1, 0] for x in range(2)]


def test_a_ring_of_blocks_over_several_rounds():
    """A value goes round: each block writes into its neighbour's other buffer, with one barrier a round, in
    two halves."""
    text = (
        PTX
        + """__global__ void __cluster_dims__(4, 1, 1) k(int* out, int rounds) {
    __shared__ int buffer[2][64];
    unsigned next = shared_of_rank(shared_address(&buffer[0][threadIdx.x]), (cluster_rank() + 1) % 4);
    int own = 0;
    buffer[0][threadIdx.x] = blockIdx.x * 64 + threadIdx.x;
    cluster_sync();
    for (int i = 0; i < rounds; ++i) {
        asm volatile("st.shared::cluster.u32 [%0], %1;"
            :: "r"(next + (1 - i % 2) * 256), "r"(buffer[i % 2][threadIdx.x] + 1) : "memory");
        cluster_arrive();
        own += i;
        cluster_wait();
    }
    out[blockIdx.x * 64 + threadIdx.x] = buffer[rounds % 2][63 - threadIdx.x] + own;
}
"""
    )
    out = torch.full((3, 4, 64), -1, dtype=torch.int32)
    simulate(text, out, 5, grid=12, block=64)
    start = iota(3 * 256).view(3, 4, 64)
    assert torch.equal(out, start.roll(5, 1).flip(2) + 15)


def test_generic_addresses_of_another_block():
    text = """
__global__ void __cluster_dims__(2, 2, 1) k(int* out) {
    __shared__ int tile[32];
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    tile[threadIdx.x] = 100 * rank + threadIdx.x;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    int* o = out + 6 * (32 * (blockIdx.x + 2 * blockIdx.y) + threadIdx.x);
    int* there = (int*)__cluster_map_shared_rank(tile, threadIdx.x % 4);
    int* mixed = threadIdx.x % 8 < 4 ? there : o;
    if (mixed == o) *o = 7;
    int own, anyones;
    asm("{ .reg .pred p; isspacep.shared::cta p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(own) : "l"(there));
    asm("{ .reg .pred p; isspacep.shared::cluster p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(anyones)
        : "l"(mixed));
    o[1] = mixed[0];
    o[2] = there[5];
    o[3] = __cluster_query_shared_rank(there) * 10 + __cluster_query_shared_rank(tile);
    o[4] = own;
    o[5] = anyones;
    if (mixed != o) o[0] = 0;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}
"""
    out = torch.full((4, 32, 6), -1, dtype=torch.int32)
    simulate(text, out, grid=(2, 2))
    for rank in range(4):
        for i in range(32):
            r, shared = i % 4, i % 8 < 4
            assert out[rank, i].tolist() == [
                0 if shared else 7,
                100 * r if shared else 7,
                100 * r + 5,
                10 * r + rank,
                r == rank,
                shared,
            ]


@pytest.mark.parametrize(
    "ctype, lanes, suffix",
    [("char", 1, "u8"), ("short", 1, "u16"), ("int", 4, "v4.u32"), ("double", 2, "v2.f64")],
)
def test_loads_and_stores_of_every_width(ctype, lanes, suffix):
    register = {"char": "h", "short": "h", "int": "r", "double": "d"}[ctype]
    names = [f"v[{i}]" for i in range(lanes)]
    held = {"char": "short"}.get(ctype, ctype)

    def access(opcode: str, mark: str, first: int) -> tuple[str, str]:
        values = ", ".join(f"%{first + i}" for i in range(lanes))
        return f"{opcode}.shared::cluster.{suffix}", f"{{{values}}}" if lanes > 1 else values

    load, loaded = access("ld", "=", 0)
    store, stored = access("st", "", 1)
    outputs, inputs = (", ".join(f'"{mark}{register}"({n})' for n in names) for mark in ("=", ""))
    text = (
        PTX
        + f"""__global__ void __cluster_dims__(2, 1, 1) k({ctype}* out, const {ctype}* x) {{
    __shared__ alignas(16) {ctype} from[32 * {lanes}], to[32 * {lanes}];
    int first = threadIdx.x * {lanes}, at = blockIdx.x * 32 * {lanes} + first;
    for (int i = 0; i < {lanes}; ++i) from[first + i] = x[at + i];
    cluster_sync();
    {held} v[{lanes}];
    unsigned a = shared_of_rank(shared_address(from + first), cluster_rank() ^ 1);
    unsigned b = shared_of_rank(shared_address(to + first), cluster_rank() ^ 1);
    asm volatile("{load} {loaded}, [%{lanes}];" : {outputs} : "r"(a) : "memory");
    asm volatile("{store} [%0], {stored};" :: "r"(b), {inputs} : "memory");
    cluster_sync();
    for (int i = 0; i < {lanes}; ++i) out[at + i] = to[first + i];
    // what this block had, by way of the other
}}
"""
    )
    dtype = {"char": torch.int8, "short": torch.int16, "int": torch.int32, "double": torch.float64}[ctype]
    x = torch.randint(-100, 100, (64 * lanes,)).to(dtype)
    out = torch.zeros_like(x)
    simulate(text, out, x, grid=2)
    assert torch.equal(out, x)


def test_atomics_on_another_blocks_memory():
    text = (
        PTX
        + """__global__ void __cluster_dims__(4, 1, 1) k(int* out, const int* x) {
    __shared__ int counts[4], old[1];
    if (threadIdx.x < 4) counts[threadIdx.x] = 0;
    if (threadIdx.x == 4) old[0] = 0;
    cluster_sync();
    int v = x[blockIdx.x * 64 + threadIdx.x];
    unsigned to = shared_of_rank(shared_address(counts + v % 4), v / 4 % 4);
    asm volatile("red.shared::cluster.add.u32 [%0], 1;" :: "r"(to) : "memory");
    atomicMax((int*)__cluster_map_shared_rank(old, v / 4 % 4), v);
    cluster_sync();
    if (threadIdx.x < 4) out[blockIdx.x * 5 + threadIdx.x] = counts[threadIdx.x];
    if (threadIdx.x == 4) out[blockIdx.x * 5 + 4] = old[0];
}
"""
    )
    x, out = torch.randint(0, 1000, (256,), dtype=torch.int32), torch.zeros(4, 5, dtype=torch.int32)
    simulate(text, out, x, grid=4, block=64)
    for rank in range(4):
        mine = x[x // 4 % 4 == rank]
        assert out[rank].tolist() == [*(int((mine % 4 == i).sum()) for i in range(4)), int(mine.max())]


def test_a_barrier_of_the_block_tells_what_one_warp_has_learned():
    """Warp 1 has not waited yet when it reads what another block wrote, but warp 0 has, and they have met
    since."""
    text = (
        PTX
        + """__global__ void __cluster_dims__(2, 1, 1) k(int* out) {
    __shared__ float tile;
    if (threadIdx.x == 0) tile = 10 + blockIdx.x;
    cluster_arrive();
    if (threadIdx.x < 32) cluster_wait();
    BARRIER
    unsigned there = shared_of_rank(shared_address(&tile), cluster_rank() ^ 1);
    float v = threadIdx.x >= 32 ? ld_cluster<float>(there) : 0.f;
    if (threadIdx.x >= 32) cluster_wait();
    if (threadIdx.x == 32) out[blockIdx.x] = v;
    cluster_sync();
}
"""
    )
    out = ints(2)
    simulate(text.replace("BARRIER", "__syncthreads();"), out, grid=2, block=64)
    assert out.tolist() == [11, 10]
    with pytest.raises(sim.Race):
        simulate(text.replace("BARRIER", ""), out, grid=2, block=64)


# Each block adds up what all tell it, in words of its shared memory for which it waits.
WORDS = """
__global__ void __cluster_dims__(4, 1, 1) k(float* out) {
    __shared__ unsigned long long words[4];
    if (threadIdx.x < 4) {
        words[threadIdx.x] = 0;
        FENCE
    }
    __syncwarp();
    cluster_arrive_relaxed();
    unsigned to = shared_of_rank(shared_address(words + cluster_rank()), threadIdx.x % 4);
    cluster_wait();
    if (threadIdx.x < 4) post_cluster(to, 1 + blockIdx.x);
    unsigned long long word = threadIdx.x < HEARD ? wait_for_shared(shared_address(words + threadIdx.x)) : 0;
    out[blockIdx.x * 32 + threadIdx.x] = __reduce_add_sync(~0u, unsigned(word));
}
"""
# Block 0 writes a word of block 1's, which may have left.
TOLD = """
__global__ void __cluster_dims__(2, 1, 1) k(int* out) {
    __shared__ unsigned long long words[2];
    if (threadIdx.x < 2) words[threadIdx.x] = 0;
    cluster_fence();
    cluster_arrive_relaxed();
    unsigned there = shared_of_rank(shared_address(words), 1);
    cluster_wait();
    if (cluster_rank() == 0 && threadIdx.x == 0) {
        post_cluster(there, 1);
        unsigned long long word;
        asm volatile("ld.relaxed.cluster.shared::cluster.u64 %0, [%1];" : "=l"(word) : "r"(there) : "memory");
        out[0] = word;
    }
}
"""
RIGHT_WORDS = WORDS.replace("FENCE", "cluster_fence();").replace("HEARD", "4")
# Two clusters, each with words of its own: they tell nothing of global memory to one another.
APART = (
    RIGHT_WORDS.replace("float* out", "float* out, float* data")
    .replace(
        "    unsigned to =",
        "    if (blockIdx.x == 0 && threadIdx.x == 0) data[0] = 42;\n    cluster_fence();\n    unsigned to =",
    )
    .replace(
        "    out[",
        "    cluster_fence();\n    if (blockIdx.x == 4 && threadIdx.x == 0) word += unsigned(data[0]);\n    "
        "out[",
    )
)


def test_words_for_which_the_blocks_of_a_cluster_wait():
    out = torch.zeros(2, 4, 32)
    simulate(PTX + RIGHT_WORDS, out, grid=8)
    assert out.unique(dim=1).flatten().unique().tolist() == [10, 26]


@pytest.mark.parametrize(
    "text, grid, says",
    [
        (
            WORDS.replace("FENCE", "").replace("HEARD", "4"),
            8,
            "writes 8 bytes, .* no cluster barrier is between the two",
        ),
        (
            WORDS.replace("FENCE", "cluster_fence();").replace("HEARD", "3"),
            8,
            "which has exited, or may have, by then",
        ),
        (APART, 8, None),
        (TOLD, 2, None),
    ],
    ids=[
        "cleared without a fence",
        "not heard by an exiting block",
        "of another cluster",
        "read back by its writer alone",
    ],
)
def test_words_that_nothing_orders(text, grid, says):
    with pytest.raises(sim.Race, match=says):
        simulate(PTX + text, torch.zeros(2, 4, 32), *([torch.zeros(1)] if text == APART else []), grid=grid)


def test_a_kernel_without_clusters_is_a_cluster_of_one_block():
    text = (
        PTX
        + """__global__ void k(float* out) {
    __shared__ float tile[32];
    tile[threadIdx.x] = threadIdx.x + cluster_rank();
    cluster_sync();
    unsigned mapped = shared_of_rank(shared_address(tile + 31 - threadIdx.x), 0),
        plain = shared_address(tile);
    out[threadIdx.x] = ld_cluster<float>(mapped) + ld_cluster<float>(plain);
}
"""
    )
    out = torch.zeros(32)
    simulate(text, out)
    assert torch.equal(out, torch.arange(32).flip(0).float())


# ---- wrong ones

HEAD = """
__global__ void __cluster_dims__(2, 1, 1) k(int* out, const int* x) {
    __shared__ float tile[64];
    unsigned rank = cluster_rank(), there = shared_of_rank(shared_address(tile), rank ^ 1);
    int t = threadIdx.x;
"""
KEEP = "    if (t < 2) out[rank * 2 + t] = sum;"


def pair(id: str, fault: type, expected: list[int], says: str, body: str, **options) -> Case:
    """Two blocks, each of which writes two numbers to `out`: of its `sum`, if the body does not write.
    `there` is the address of the other block's `tile`."""
    body += "" if KEEP in body or "int sum" not in body else f"cluster_sync();\n{KEEP}"
    text = f"{PTX}{HEAD}{body}\n}}\n"
    return Case(
        id, fault, lambda x: torch.tensor(expected), says, text, lambda: [ints(4), ints(64) + 1], 2, **options
    )


# fmt: off
RACES = [
    pair("no cluster barrier between write and read", sim.Race, [163, 162, 63, 62],
        r"reads 4 bytes, offset \d+ of shared memory \(tile \+ 252\) of block \(1, 0, 0\), that block \(1, "
        r"0, 0\), thread \(63, 0, 0\) "
        r"wrote at {there}: no cluster barrier is between", """
    cluster_sync();
    tile[t] = t + 100 * rank;  // there
    [[__syncthreads(); => cluster_sync();]]
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // here
    """),
    pair("no cluster barrier between read and write", sim.Race, [327, 325, 127, 125],
        r"writes 4 bytes, offset \d+ of shared memory \(tile \+ 0\), that block \(1, 0, 0\), thread "
        r"\(63, 0, 0\) read at {there}: no", """
    int sum = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        tile[t] = t + 100 * rank + i;  // here
        cluster_sync();
        sum += ld_cluster<float>(there + 4 * (63 - t));  // there
        [[__syncthreads(); => cluster_sync();]]
    }
    if (t < 2) out[rank * 2 + t] = sum;
    """),
    pair("the block reads itself between the neighbour's read and its own write", sim.Race,
         [163, 162, 63, 62],
        r"writes 4 bytes, .* that block \(1, 0, 0\), thread \(\d+, 0, 0\) read at {there}: no cluster", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // there
    __syncthreads();
    for (int i = 0; i < 64; ++i) sum += ((volatile float*)tile)[i] < 0;
    [[__syncthreads(); => cluster_sync();]]
    tile[t] = sum;  // here
    """),
    pair("a store into the neighbour that it reads at once", sim.Race, [100, 101, 0, 1],
        r"reads 4 bytes, offset \d+ of shared memory \(tile \+ 0\), that block \(1, 0, 0\), thread \(0, "
        r"0, 0\) wrote at {there}: no", """
    cluster_sync();
    st_cluster(there + 4 * t, float(t + 100 * rank));  // there
    [[__syncthreads(); => cluster_sync();]]
    int sum = tile[t];  // here
    """),
    pair("two blocks store two values", sim.Race, [7, 7, 7, 7],
        r"writes 4 bytes, offset \d+ of shared memory \(tile \+ 0\) of block \(1, 0, 0\), that block \(1, 0, "
        r"0\), thread \(0, 0, 0\) "
        r"wrote at {there}: no cluster", """
    cluster_sync();
    tile[t] = t;  // there
    [[=> cluster_sync();]]
    st_cluster(there + 4 * t, 7.f);  // here
    cluster_sync();
    int sum = tile[t];
    """),
    pair("a relaxed arrive", sim.Race, [163, 162, 63, 62],
        r"that block \(1, 0, 0\), thread \(63, 0, 0\) wrote at {there}: no cluster barrier is between the "
        r"two, or its arrive is .relaxed",
        f"""
    tile[t] = t + 100 * rank;  // there
    [[{RELAXED} => cluster_sync();]]
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // here
    """),
    pair("a relaxed arrive without a fence", sim.Race, [163, 162, 63, 62],
        r"that block \(1, 0, 0\), thread \(63, 0, 0\) wrote at {there}: no cluster barrier is between the "
        r"two, or its arrive is .relaxed",
        f"""
    tile[t] = t + 100 * rank;  // there
    [[=> asm volatile("fence.acq_rel.cluster;" ::: "memory");]]
    {RELAXED}
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // here
    """),
    pair("a relaxed arrive of the writers", sim.Race, [131, 130, 31, 30],
        r"thread \(31, 0, 0\) wrote at {there}: no cluster barrier is between the two, or its arrive is "
        r".relaxed", """
    if (t < 32) tile[t] = t + 100 * rank;  // there
    [[=> __syncthreads();  // the other warp knows then, and releases it]]
    if (t < 32) cluster_arrive_relaxed();
    else cluster_arrive();
    cluster_wait();
    int sum = ld_cluster<float>(there + 4 * (31 - t % 32));  // here
    """),
    pair("strong accesses are no barrier", sim.Race, [0, 1, 0, 1],
        r"that block \(1, 0, 0\), thread \(0, 0, 0\) wrote at {there}: no cluster barrier", """
    float v = t;
    cluster_sync();
    asm volatile("st.relaxed.cluster.shared::cluster.f32 [%0], %1;" :: "r"(there + 4 * t), "f"(v)  // there
                 : "memory");
    [[__syncthreads(); => cluster_sync();]]
    int sum = ld_cluster<float>(shared_address(tile + t));  // here
    """),
    pair("a write after the arrive", sim.Race, [163, 162, 63, 62],
        r"that block \(1, 0, 0\), thread \(63, 0, 0\) wrote at {there}: no cluster barrier", """
    [[cluster_arrive(); =>]]
    tile[t] = t + 100 * rank;  // there
    [[=> cluster_arrive();]]
    cluster_wait();
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // here
    """),
    pair("global memory", sim.Race, [10, 11, 0, 1],
        r"reads 4 bytes, byte 8 of the tensor of argument 'out', that block \(1, 0, 0\), thread \(0, 0, 0\) "
        r"wrote at {there}: no cluster",
        """
    if (t < 2) out[rank * 2 + t] = t + 10 * rank;  // there
    [[=> cluster_sync();]]
    int sum = t < 2 ? out[(rank ^ 1) * 2 + t] : 0;  // here
    """),
    pair("a neighbour that has not started", sim.Race, [0, 1, 0, 1],
        r"writes 4 bytes of the shared memory of block \(1, 0, 0\), which may not have started yet: no "
        r"cluster barrier is before", """
    [[=> cluster_sync();]]
    st_cluster(there + 4 * t, float(t));  // here
    cluster_sync();
    int sum = tile[t];
    """),
    pair("a neighbour that may have exited", sim.Race, [100, 101, 0, 1],
        r"reads offset \d+ of shared memory \(tile \+ 0\) of block \(0, 0, 0\), which has exited, or "
        r"may have, by then: no cluster", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    int sum = ld_cluster<float>(there + 4 * t);  // here
    if (t < 2) out[rank * 2 + t] = sum;
    [[=> cluster_sync();]]
    """, block_index=1, thread=0),
    pair("a neighbour that has exited", sim.Race, [100, 101, 0, 1],
        r"reads 4 bytes of the shared memory of block \(1, 0, 0\), which has exited: no cluster barrier "
        r"after the access", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    [[if (rank) return; =>]]
#pragma unroll 1
    for (int i = 0; i < 600; ++i) t += x[i % 64];  // meanwhile the other ends
    int sum = ld_cluster<float>(there + 4 * t);  // here
    if (t < 2) out[rank * 2 + t] = sum;
    [[=> cluster_sync();]]
    """),
    pair("a store into a neighbour that does not wait for it", sim.Race, [100, 101, 0, 1],
        r"writes offset \d+ of shared memory \(tile \+ 0\) of block \(0, 0, 0\), which has exited, or "
        r"may have, by then: no cluster", """
    cluster_sync();
    st_cluster(there + 4 * t, float(t + 100 * rank));  // here
    [[=> cluster_sync();]]
    if (t < 2) out[rank * 2 + t] = [[t + 5 => int(tile[t])]];
    """, block_index=1),
]
BOUNDS = [
    pair("beyond the neighbour's memory", sim.OutOfBounds, [163, 162, 63, 62],
        r"reads 4 bytes at offset 256 of the shared memory of block \(1, 0, 0\), which has 256 bytes", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    int sum = ld_cluster<float>(there + 4 * ([[64 => 63]] - t));  // here
    """),
    pair("before the neighbour's memory", sim.OutOfBounds, [0, 0, 0, 0],
        r"writes 8 bytes at offset -8 of the shared memory of block \(1, 0, 0\), which has 256 bytes", """
    cluster_sync();
    if (t < 32) st_cluster(there + 8 * (t [[- 1 =>]]), make_float2(t, t));  // here
    cluster_sync();
    int sum = tile[t] + tile[t ^ 1];
    """),
    pair("a rank that there is not", sim.OutOfBounds, [100, 101, 0, 1],
        r"reads 4 bytes of the shared memory of a block rank that is not in 0\.\.1, the cluster's", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    unsigned at = shared_address(tile + t);
    int sum = ld_cluster<float>(shared_of_rank(at, [[rank + 1 => (rank + 1) % 2]]));  // here
    """, block_index=1),
    pair("a rank below 0", sim.OutOfBounds, [100, 101, 0, 1],
        r"reads 4 bytes of the shared memory of a block rank that is not in 0\.\.1, the cluster's", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    unsigned at = shared_address(tile + t);
    int sum = ld_cluster<float>(shared_of_rank(at, [[rank - 1 => (rank - 1) % 2]]));  // here
    """),
    pair("a neighbour's address in an ordinary load", sim.OutOfBounds, [100, 101, 0, 1],
        r"reads 4 bytes at offset \d+ of shared memory, but the block has 256 bytes of it: that is an "
        r"address of shared::cluster", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    float v;
    asm volatile("ld.[[shared => shared::cluster]].f32 %0, [%1];" : "=f"(v) : "r"(there + 4 * t)  // here
                 : "memory");
    int sum = v;
    """),
    pair("misaligned", sim.Misaligned, [100, 102, 0, 2],
        r"reads 8 bytes of shared memory, but the offset 4 is not a multiple of 8", """
    tile[t] = t + 100 * rank;
    cluster_sync();
    int sum = ld_cluster<float2>(there + [[4 => 8]] * (t % 2)).x;  // here
    """, thread=1),
    pair("what the neighbour did not write", sim.Uninitialized, [163, 162, 63, 62],
        r"reads 4 bytes that nobody wrote, offset \d+ of shared memory \(tile \+ 252\) of block \(1, 0, "
        r"0\)", """
    if (t [[< => <=]] 63) tile[t] = t + 100 * rank;
    cluster_sync();
    int sum = ld_cluster<float>(there + 4 * (63 - t));  // here
    """),
]
BARRIERS = [
    pair("a thread of the neighbour ends while others wait", sim.BarrierFault, [0, 1, 0, 1],
        r"waits at the cluster barrier for all threads of the cluster, but block \(1, 0, 0\), thread \(40, "
        r"0, 0\) has ended at {there}",
        """
    [[if (rank && t >= 40) return; =>]]
    tile[t] = t;
    cluster_sync();  // here
    if (t < 2) out[rank * 2 + t] = tile[t];
}  // there
__device__ void nothing() {
    """),
    pair("half of the cluster comes", sim.BarrierFault, [0, 1, 0, 1],
        r"waits at the cluster barrier for all threads of the cluster, but block \(1, 0, 0\), thread "
        r"\(0, 0, 0\) has ended at", """
    tile[t] = t;
    __syncthreads();
    [[if (rank == 0) =>]] cluster_sync();  // here
    if (t < 2) out[rank * 2 + t] = tile[t];
    """),
    pair("a warp that waits for its block while the block waits for the cluster", sim.BarrierFault,
         [0, 1, 0, 1],
        r"waits at barrier 0 for all threads of the block, but thread \(0, 0, 0\) waits at", """
    tile[t] = t;
    if (t < 32) {
        [[cluster_sync(); =>]]
        __syncthreads();
    } else {
        __syncthreads();  // here
        [[cluster_sync(); =>]]
    }
    if (t < 2) out[rank * 2 + t] = tile[t];
    """, thread=32),
    pair("a wait without an arrive", sim.BarrierFault, [0, 1, 0, 1],
        r"waits at the cluster barrier, at which it has not arrived", """
    [[=> cluster_arrive();]]
    cluster_wait();  // here
    if (t < 2) out[rank * 2 + t] = t;
    """),
    pair("two arrives and one wait", sim.BarrierFault, [0, 1, 0, 1],
        r"arrives at the cluster barrier again, and has not waited since it arrived there", """
    cluster_arrive();
    [[=> cluster_wait();]]
    cluster_arrive();  // here
    cluster_wait();
    if (t < 2) out[rank * 2 + t] = t;
    """),
    pair("an aligned arrive in two branches", sim.BarrierFault, [0, 1, 0, 1],
        r"arrives at an .aligned cluster barrier, while of its warp thread \(0, 0, 0\) arrives at .*:\d+", """
    int v = t;
    if (t < [[20 => 32]]) {
        cluster_arrive();
        v += x[t];
    } else {
        cluster_arrive();  // here
        v -= x[t] + 1;
    }
    cluster_wait();
    if (t < 2) out[rank * 2 + t] = v;
    """, thread=20),
]
# fmt: on
CASES = [pytest.param(c, id=c.id) for c in (*RACES, *BOUNDS, *BARRIERS)]


@pytest.mark.parametrize("case", CASES)
def test_wrong_kernel_is_reported(case):
    case.check_report()


@pytest.mark.parametrize("case", CASES)
def test_mended_kernel_is_right_and_not_accused(case):
    case.check_mended()


@pytest.mark.parametrize("opcode", ["cp.async.bulk.tensor.1d.global.shared::cta.bulk_group [%0], [%0];"])
def test_what_is_not_simulated_of_bulk_copies_by_name(opcode):
    operand = '"r"((unsigned)__cvta_generic_to_shared(&b))'
    text = f'__global__ void k(int* out) {{ __shared__ long long b; asm volatile("{opcode}" :: {operand}); }}'
    with pytest.raises(sim.NotSimulated, match=opcode.split()[0].rstrip(";")):
        simulate(text, ints(1))


# ---- blocks that wait for those before them, over flags in global memory

LOOK = {
    "volatile": "while (*(volatile unsigned*)flag == 0) {} __threadfence();",
    "acquire": 'do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory"); '
    "while (seen == 0);",
    "atomic": "while (atomicAdd(flag, 0) == 0) {} __threadfence();",
    "atomic without a fence": "while (atomicAdd(flag, 0) == 0) {}",
    "compare-and-swap": "while (atomicCAS(flag, 1u, 2u) != 1) {}",
    "volatile without a fence": "while (*(volatile unsigned*)flag == 0) {}",
    "no look": "",
}
SIGNAL = {
    "exchange": "__threadfence(); atomicExch(flags + ticket, 1u);",
    "release": 'asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(flags + ticket), "r"(1) : '
    '"memory");',
    "volatile": "__threadfence(); *(volatile unsigned*)(flags + ticket) = 1;",
    "exchange without a fence": "atomicExch(flags + ticket, 1u);",
    "relaxed": 'asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(flags + ticket), "r"(1) : '
    '"memory");',
}


def chain(look: str, signal: str, blocks: int = 12, n: int = 320) -> tuple[list[int], list[int]]:
    """Each block adds to the sum of the one before, for which it waits; with what is expected. `n`: how long
    each takes."""
    text = f"""
__device__ unsigned tickets;
__global__ void k(int* out, int* sums, unsigned* flags, int n) {{
    __shared__ unsigned ticket;
    __shared__ int before;
    if (threadIdx.x == 0) {{
        ticket = atomicAdd(&tickets, 1);
        before = 0;
        if (ticket) {{
            unsigned seen, *flag = flags + ticket - 1;
            {LOOK[look]}
            before = sums[ticket - 1];
        }}
    }}
    __syncthreads();
    int sum = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < n; i += 32) sum += (i * 3 + before) % 5;
    sum = __reduce_add_sync(~0u, sum);
    if (threadIdx.x == 0) {{
        sums[ticket] = before + sum;
        {SIGNAL[signal]}
        out[blockIdx.x] = before + sum;
    }}
}}
"""
    out, flags = ints(blocks), torch.zeros(blocks, dtype=torch.int32)
    simulate(text, out, ints(blocks), flags, n, grid=blocks)
    expected = [0]
    for _ in range(blocks):
        expected.append(expected[-1] + sum((i * 3 + expected[-1]) % 5 for i in range(n)))
    return out.tolist(), expected[1:]


@pytest.mark.parametrize("signal", ["exchange", "release", "volatile"])
@pytest.mark.parametrize("look", ["volatile", "acquire", "atomic", "compare-and-swap"])
def test_blocks_that_wait_for_the_flag_of_the_one_before(look, signal):
    out, expected = chain(look, signal)
    assert out == expected


@pytest.mark.parametrize("blocks", [24, 200], ids=["one batch", "several batches"])
def test_blocks_that_spin_let_the_others_go_on(blocks, monkeypatch):
    monkeypatch.setattr("cukern.sim.machine.options.MOST_STEPS", 500_000)
    monkeypatch.setattr(machine, "LANES_A_BATCH", 1024)
    out, expected = chain("volatile", "exchange", blocks, 960)
    assert out == expected


@pytest.mark.parametrize(
    "look, signal",
    [
        *(
            ("volatile without a fence", "exchange"),
            ("atomic without a fence", "exchange"),
            ("no look", "exchange"),
        ),
        *(("acquire", "exchange without a fence"), ("acquire", "relaxed")),
    ],
)
def test_a_flag_without_its_fences_orders_nothing(look, signal):
    with pytest.raises(
        sim.Race, match=r"of the tensor of argument 'sums', .* nothing orders two blocks of one launch"
    ):
        chain(look, signal)
