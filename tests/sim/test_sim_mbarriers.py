"""mbarrier and st.async: what right kernels compute, and what it says of wrong ones."""

import pytest
import torch
from sim_kernels import PLACES, on

import cukern
from cukern import sim

# Two blocks send each other their numbers, plus 1, `rounds` times.
EXCHANGE = """#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
__global__ void __cluster_dims__(2, 1, 1) k(float4* out, const float4* x, int rounds) {
    __shared__ float4 numbers[64];
    __shared__ unsigned long long barriers[2];
    unsigned full = shared_address(barriers), free = full + 8, rank = cluster_rank(), other = rank ^ 1;
    if (threadIdx.x == 0) {
        mbarrier_init(full, 2);
        mbarrier_init(free, 2);
        MADE
    }
    cluster_arrive_relaxed();
    cluster_wait();
    float4 v = x[blockIdx.x * 64 + threadIdx.x];
    for (int i = 0; i < rounds; ++i) {
        v.x += 1;
        FREE
        st_async(shared_of_rank(shared_address(numbers + (threadIdx.x ^ 33)), other), v, shared_of_rank(full,
            other));
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full, EXPECTED);
        FULL
        v = numbers[threadIdx.x];
        __syncwarp();
        if (threadIdx.x % 32 == 0) mbarrier_arrive(shared_of_rank(free, other));
    }
    out[blockIdx.x * 64 + threadIdx.x] = v;
    cluster_arrive_relaxed();
    cluster_wait();
}
"""
RIGHT = {
    "MADE": "mbarriers_made();",
    "FREE": "mbarrier_wait(free, i + 1 & 1);",
    "FULL": "mbarrier_wait(full, i & 1);",
    "EXPECTED": "512",
}


def exchange(rounds=3, device="cpu", **changed):
    text = EXCHANGE
    for word, code in (RIGHT | changed).items():
        text = text.replace(word, code)
    x = torch.randn(4, 64, 4, device=device)
    out = torch.full_like(x, torch.nan)
    with on(device):
        cukern.compile(text)(out.view(-1), x.view(-1), rounds, grid=4, block=64)
    return out.cpu(), x.cpu()


@pytest.mark.parametrize("device", PLACES)
def test_blocks_that_send_each_other_numbers(device):
    for rounds in (1, 2, 5):
        out, x = exchange(rounds, device)
        for _ in range(rounds):
            x[..., 0] += 1
            x = x.view(2, 2, 64, 4).flip(1)[:, :, torch.arange(64) ^ 33].view(4, 64, 4)
        assert torch.equal(out, x)


@pytest.mark.parametrize(
    "changed, what",
    [
        ({"FULL": ""}, "reads 16 bytes.* wrote at"),
        ({"FREE": ""}, "writes 16 bytes.* read at"),
        ({"MADE": ""}, "reads 8 bytes.*barriers.* wrote at"),
        ({"EXPECTED": "528"}, "waits at an mbarrier for 0 arrivals and 32 bytes"),
        ({"FREE": "mbarrier_wait(free, i & 1);"}, "waits at an mbarrier for 2 arrivals and 0 bytes"),
        (
            {"FREE": "FREE if (i == 0) mbarrier_arrive(free);".replace("FREE", RIGHT["FREE"])},
            "at which only 2 arrivals are missing",
        ),
        ({"FULL": RIGHT["FULL"] + " mbarrier_wait(shared_address(numbers), 1);"}, "which is no mbarrier"),
    ],
)
def test_what_is_wrong(changed, what):
    with pytest.raises(sim.Fault, match=what):
        exchange(**changed)


@pytest.mark.parametrize("device", PLACES)
def test_each_mbarrier_counts_for_itself(device):
    """Made by one instruction, of two blocks and of two threads."""
    text = """#include "common/ptx/async_copy.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
__global__ void __cluster_dims__(2, 1, 1) k(int* out) {
    __shared__ unsigned long long barriers[2];
    unsigned rank = cluster_rank(), own = shared_address(barriers + threadIdx.x % 2);
    if (threadIdx.x < 2) {
        mbarrier_init(own, rank + threadIdx.x + 1);
        mbarriers_made();
    }
    cluster_sync();
    if (threadIdx.x < 2)
        for (unsigned i = 0; i < rank + threadIdx.x + 1; ++i) mbarrier_arrive(own);
    __syncwarp();
    mbarrier_wait(own, 0);
    out[blockIdx.x * 32 + threadIdx.x] = 1;
}
"""
    out = torch.zeros(64, dtype=torch.int32, device=device)
    with on(device):
        cukern.compile(text)(out, grid=2, block=32)
    assert out.all()
