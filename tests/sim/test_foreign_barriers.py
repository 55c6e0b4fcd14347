"""Early returns (since Volta, __syncthreads() waits for the threads that have not exited), grid barriers and
tiles of several warps."""

import pytest
import torch
from sim_cases import ints, iota
from sim_kernels import simulate

from cukern import sim
from cukern.runtime.compile import compiler

REVERSE = """
__global__ void k(int* out, const int* x, int n) {
    __shared__ int tile[64];
    int i = threadIdx.x;
    if (i >= n) return;
    tile[i] = x[i];
    __syncthreads();
    out[i] = tile[LAST - i];
}
"""


@pytest.mark.parametrize("n", [1, 20, 32, 50, 64])
def test_threads_that_have_returned_are_not_waited_for(n):
    out = ints(n)
    simulate(REVERSE.replace("LAST", "n - 1"), out, iota(n), n, block=64)
    assert out.tolist() == iota(n).flip(0).tolist()


def test_early_return_that_leaves_shared_memory_unfilled():
    with pytest.raises(sim.Uninitialized, match=r"thread \(0, 0, 0\).*offset 252 of shared memory"):
        simulate(REVERSE.replace("LAST", "63"), ints(50), iota(50), 50, block=64)


GRID = """
__global__ void k(int* out, int* middle, const int* x) {
    // the blocks of a cooperative launch meet as in grid.sync()
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
    unsigned high, low, old, now;
    asm("mov.u32 %0, %%envreg1;" : "=r"(high));
    asm("mov.u32 %0, %%envreg2;" : "=r"(low));
    unsigned long long barrier = ((unsigned long long)high << 32 | low) + 4;
    middle[i] = x[i] + 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned add = blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u;
        asm volatile("atom.add.ADD.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(barrier), "r"(add) : "memory");
        do {
            asm volatile("ld.LOAD.gpu.u32 %0, [%1];" : "=r"(now) : "l"(barrier) : "memory");
        } while (((now ^ old) & 0x80000000u) == 0);
    }
    __syncthreads();
    out[i] = middle[n - 1 - i];
}
"""


@pytest.mark.parametrize("grid, block", [(1, 32), (5, 64), (40, 1024)])
def test_barriers_of_the_grid(grid, block):
    """40 blocks of 1024 threads are more than one batch of the simulator."""
    x = iota(grid * block)
    out, middle = ints(len(x)), ints(len(x))
    simulate(
        GRID.replace("ADD", "release").replace("LOAD", "acquire"), out, middle, x, grid=grid, block=block
    )
    assert torch.equal(out, x.flip(0) + 1)


@pytest.mark.parametrize("add, load", [("relaxed", "acquire"), ("acquire", "acquire")])
def test_barriers_of_the_grid_that_order_nothing(add, load):
    with pytest.raises(sim.Race, match="nothing orders two blocks of one launch"):
        simulate(
            GRID.replace("ADD", add).replace("LOAD", load), ints(320), ints(320), iota(320), grid=5, block=64
        )


def test_each_launch_has_its_own_grid_barrier():
    text = GRID.replace("ADD", "release").replace("LOAD", "acquire")
    for _ in range(3):
        out = ints(320)
        simulate(text, out, ints(320), iota(320), grid=5, block=64)
        assert torch.equal(out, iota(320).flip(0) + 1)


HANDOVER = """
__global__ void k(int* out, const int* x) {  // warp 0 hands a tile to warp 1, through a flag in shared memory
    __shared__ int tile[32];
    unsigned flag, t = threadIdx.x, lane = t % 32, now;
    asm("mov.u32 %0, %%reserved_smem_offset_1;" : "=r"(flag));
    if (t < 32) {
        tile[lane] = x[lane];
        __syncwarp();
        if (lane == 0) asm volatile("red.or.STORE.cta.shared.b32 [%0], 1;" :: "r"(flag) : "memory");
    } else {
        do {
            asm volatile("atom.or.LOAD.cta.shared.b32 %0, [%1], 0;" : "=r"(now) : "r"(flag) : "memory");
        } while (now == 0);
        __syncwarp();
        out[lane] = tile[31 - lane];
    }
}
"""


def test_release_and_acquire_in_shared_memory():
    out = ints(32)
    simulate(HANDOVER.replace("STORE", "release").replace("LOAD", "acquire"), out, iota(32), block=64)
    assert torch.equal(out, iota(32).flip(0))


@pytest.mark.parametrize(
    "store, load", [("relaxed", "acquire"), ("release", "relaxed"), ("release", "release")]
)
def test_flags_in_shared_memory_that_order_nothing(store, load):
    with pytest.raises(sim.Race, match="no barrier is between the two"):
        simulate(HANDOVER.replace("STORE", store).replace("LOAD", load), ints(32), iota(32), block=64)


GROUPS = """
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;
__global__ void k(int* out, int* middle, const int* x) {
    __shared__ cg::block_tile_memory<128> memory;
    cg::thread_block block = cg::this_thread_block(memory);
    cg::grid_group grid = cg::this_grid();
    auto tile = cg::tiled_partition<64>(block);
    int mine = x[grid.thread_rank()];
    middle[grid.thread_rank()] = cg::reduce(tile, mine, cg::plus<int>()) + tile.shfl(mine, 40);
    grid.sync();
    out[grid.thread_rank()] = middle[grid.size() - 1 - grid.thread_rank()];
}
"""


def test_cooperative_groups_of_the_grid_and_of_several_warps():
    if not any(
        (folder / "nv/target").is_file() for folder in (compiler.cuda_include(), *compiler._more_includes())
    ):
        pytest.skip("nv/target is not installed: pip install nvidia-cuda-cccl-cu12")
    x = iota(384) % 23
    out, middle = ints(384), ints(384)
    simulate(GROUPS, out, middle, x, grid=3, block=128)
    tiles = x.view(6, 64)
    expected = (tiles.sum(1, dtype=torch.int32) + tiles[:, 40]).repeat_interleave(64)
    assert torch.equal(out, expected.flip(0))
