"""wgmma, simulated and on a GPU: swizzles and layouts of operands as TMA writes them, every shape, and
results read too early."""

import pytest
import torch
from sim_kernels import PLACES, on

import cukern
from cukern import sim

# One warpgroup multiplies a (64 x K) by b (K x N). ACROSS: an operand is stored [K][M] or [K][N] instead of
# [M][K] or [N][K].
PRODUCT = """#include "common/math.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
CONSTANTS
typedef TYPE T;
constexpr int S = ROW_BYTES, SPAN = S / sizeof(T), KIND = S == 128 ? 1 : S == 64 ? 2 : S == 32 ? 3 : 0;

// Load a matrix of K by COUNT elements in boxes with rows of S bytes.
template <bool ACROSS, int COUNT>
__device__ void load(unsigned to, const CUtensorMap* map, unsigned full) {
    for (int i = 0; i < (ACROSS ? COUNT : K) / SPAN; ++i, to += (ACROSS ? K : COUNT) * S) tma_load(to, map,
        full, {i * SPAN, 0});
}
template <bool ACROSS, int COUNT>
__device__ unsigned long long at(unsigned tile, int k) {
    if (ACROSS && KIND) return describe(tile + k * S, K * S, 8 * S) | (unsigned long long)KIND << 62;
    if (ACROSS) return describe(tile + k * S, 8 * S, K * S);
    unsigned start = tile + k / SPAN * COUNT * S + k % SPAN * (int)sizeof(T);
    return KIND ? describe(start, 0, 8 * S) | (unsigned long long)KIND << 62 : describe(start, COUNT * S,
        8 * S);
}

__global__ void __launch_bounds__(128) product(float* out, const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b) {
    __shared__ alignas(1024) T tile_a[64 * K], tile_b[N * K];
    __shared__ unsigned long long full;
    unsigned barrier = shared_address(&full), in_a = shared_address(tile_a), in_b = shared_address(tile_b);
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarriers_made();
        mbarrier_arrive(barrier, sizeof(tile_a) + sizeof(tile_b));
        load<ACROSS_A, 64>(in_a, &a, barrier);
        load<ACROSS_B, N>(in_b, &b, barrier);
    }
    __syncthreads();
    mbarrier_wait_in_block(barrier, 0);
    float d[N / 8][4];
    wgmma_fence();
    for (int k = 0; k < K; k += 32 / sizeof(T)) wgmma<ACROSS_A, ACROSS_B, T>(d, at<ACROSS_A, 64>(in_a, k),
        at<ACROSS_B, N>(in_b, k), k > 0);
    wgmma_commit();
    wgmma_wait<0>(d);
    int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int j = 0; j < N / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * N + j * 8 + column + i % 2] = d[j][i];
}
"""
NAMES = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}


def product(dtype, swizzle, columns=64, across=(False, False), k=64, text=PRODUCT, device="cpu"):
    """a b of small integers, whose sums are exact, and its float64 reference."""
    a, b = (torch.randint(-8, 9, shape, device=device).to(dtype) for shape in ((64, k), (columns, k)))
    row_bytes = swizzle or 16
    span = row_bytes // dtype.itemsize
    maps = []
    for x, turned in ((a, across[0]), (b, across[1])):
        stored = x.t().contiguous() if turned else x
        maps.append(cukern.tensor_map(stored, (stored.shape[0], span), swizzle))
    words = {
        "TYPE": NAMES[dtype],
        "ROW_BYTES": row_bytes,
        "ACROSS_A": str(across[0]).lower(),
        "ACROSS_B": str(across[1]).lower(),
    }
    head = "".join(f"#define {name} {value}\n" for name, value in {**words, "K": k, "N": columns}.items())
    out = torch.full((64, columns), torch.nan, device=device)
    with on(device):
        cukern.compile(text.replace("CONSTANTS", head), "product")(out, *maps, grid=1, block=128)
    return out.double(), a.double() @ b.double().t()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize(
    "across", [(False, False), (False, True), (True, False), (True, True)], ids=["nt", "nn", "tt", "tn"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_layouts_of_16_bit_operands(dtype, across, swizzle, device):
    found, wanted = product(dtype, swizzle, across=across, device=device)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
def test_layouts_of_tf32_operands(swizzle, device):
    found, wanted = product(torch.float32, swizzle, device=device)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("dtype", NAMES, ids=str)
@pytest.mark.parametrize("columns", [32, 96, 128, 160, 192, 224, 256])
def test_numbers_of_columns(columns, dtype, device):
    found, wanted = product(dtype, 32 * dtype.itemsize, columns, k=32, device=device)
    assert torch.equal(found, wanted)


# ---- what the simulator says of wrong products

WRONG = [
    ("wgmma_wait<0>(d);", "", sim.Race, "uses a result of the wgmma at .*: a wgmma.wait_group .* is missing"),
    (
        "wgmma_wait<0>(d);",
        "wgmma_wait<1>(d);",
        sim.Race,
        "uses a result of the wgmma at .*: a wgmma.wait_group .* is missing",
    ),
    (
        "wgmma_commit();",
        "",
        sim.Race,
        r"uses a result of the wgmma at .*\(after a wgmma.commit_group\) is missing",
    ),
    (
        "wgmma_wait<0>(d);",
        "tile_b[5] = 1; wgmma_wait<0>(d);",
        sim.Race,
        "still reads 16 bytes, .*tile_b.*writes there at .*: a wgmma.wait_group is",
    ),
    (
        "wgmma_wait<0>(d);",
        "tile_a[5] = 1; wgmma_wait<0>(d);",
        sim.Race,
        "still reads 16 bytes, .*tile_a.*writes there at .*: a wgmma.wait_group is",
    ),
    (
        "wgmma_commit();",
        "wgmma_commit(); for (int i = 0; i < N / 8; ++i) d[i][0] *= 2;",
        sim.Race,
        "uses a result of the wgmma",
    ),
    (
        "    wgmma_fence();",
        "    tile_a[threadIdx.x] = out ? tile_a[threadIdx.x] : T(0); __syncthreads(); wgmma_fence();",
        sim.Race,
        "a fence.proxy.async is missing",
    ),
    (
        "    wgmma_fence();",
        "    if (threadIdx.x / 32 == 2) return; wgmma_fence();",
        sim.BarrierFault,
        "wants the four warps of its warpgroup",
    ),
    (
        "mbarrier_wait_in_block(barrier, 0);",
        "if (threadIdx.x / 32 == 2) mbarrier_wait_in_block(barrier, 1); mbarrier_wait_in_block(barrier, 0);",
        sim.BarrierFault,
        r"waits for the four warps of its warpgroup, but thread \(64, 0, 0\) waits at",
    ),
]


@pytest.mark.parametrize("change, to, fault, words", WRONG, ids=range(len(WRONG)))
def test_wrong_products(change, to, fault, words):
    assert change in PRODUCT
    with pytest.raises(fault, match=words):
        product(torch.bfloat16, 128, text=PRODUCT.replace(change, to))


def test_plain_writes_before_a_fence():
    change = (
        "    tile_a[threadIdx.x] = out ? tile_a[threadIdx.x] : T(0); fence_async(); __syncthreads(); "
        "wgmma_fence();"
    )
    found, wanted = product(torch.bfloat16, 128, text=PRODUCT.replace("    wgmma_fence();", change))
    assert torch.equal(found, wanted)
