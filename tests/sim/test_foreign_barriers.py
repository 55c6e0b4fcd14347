"""Early returns: since Volta, __syncthreads() waits for the threads that have not exited."""

import pytest
from sim_cases import ints, iota
from sim_kernels import simulate

from cukern import sim

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
