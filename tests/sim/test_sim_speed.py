"""The simulator is quick enough to be used while one writes a kernel: the time of textbook kernels,
compilation aside.

Three of them are measured in units of a loop of numpy operations on 64 numbers, whatever machine the tests
run on.
"""

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

import cukern
from cukern import sim

SOFTMAX = """
__global__ void softmax(float* out, const float* x, int n) {
    __shared__ float sums[256];
    int t = threadIdx.x, row = blockIdx.x * n;
    float largest = -INFINITY;
    for (int i = t; i < n; i += 256) largest = fmaxf(largest, x[row + i]);
    sums[t] = largest;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) sums[t] = fmaxf(sums[t], sums[t + half]);
    }
    __syncthreads();
    largest = sums[0];
    __syncthreads();
    float sum = 0;
    for (int i = t; i < n; i += 256) sum += expf(x[row + i] - largest);
    sums[t] = sum;
    for (int half = 128; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) sums[t] += sums[t + half];
    }
    __syncthreads();
    for (int i = t; i < n; i += 256) out[row + i] = expf(x[row + i] - largest) / sums[0];
}
""".replace("-INFINITY", "__int_as_float(0xff800000)")


def best_of_three(call) -> float:
    call()  # compiles
    times = []
    for _ in range(3):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def test_softmax_of_8_rows_of_1000_in_256_threads():
    kernel, x, out = cukern.compile(SOFTMAX), torch.randn(8, 1000), torch.empty(8, 1000)
    with cukern.backend("sim"):
        took = best_of_three(lambda: kernel(out, x, 1000, grid=8, block=256))
    torch.testing.assert_close(out, x.softmax(1))
    assert took <= 0.3


def test_tiled_product_of_70_90_50():
    a, b = torch.randn(70, 50), torch.randn(50, 90)
    for version, limit in (("v3", 1.5), ("v4", 1.5), ("v5", 1.5)):
        with cukern.backend("sim"):
            took = best_of_three(lambda version=version: cukern.matmul(a, b, version=version))
        assert took <= limit, version


# A thread a row: 64 lanes, and many instructions
ROWS = """
__global__ void softmax(float* out, const float* x, int rows, int n) {
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    x += row * n, out += row * n;
    float largest = -1e30f, sum = 0;
    for (int i = 0; i < n; ++i) largest = fmaxf(largest, x[i]);
    for (int i = 0; i < n; ++i) sum += out[i] = expf(x[i] - largest);
    for (int i = 0; i < n; ++i) out[i] /= sum;
}
"""
PRODUCT = """
__global__ void product(float* c, const float* a, const float* b, int n) {
    __shared__ float s[32][32], t[32][32];
    int y = threadIdx.y, x = threadIdx.x, row = blockIdx.y * 32 + y, column = blockIdx.x * 32 + x;
    float sum = 0;
    for (int k = 0; k < n; k += 32) {
        s[y][x] = a[row * n + k + x];
        t[y][x] = b[(k + y) * n + column];
        __syncthreads();
        for (int j = 0; j < 32; ++j) sum += s[y][j] * t[j][x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
"""
LAYERNORM = """
__global__ void layernorm(float* out, const float* x, const float* weight, const float* bias, int rows,
    int n) {
    int row = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * n, out += row * n;
    float sum = 0, squares = 0;
    for (int i = lane; i < n; i += 32) sum += x[i];
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    float mean = sum / n;
    for (int i = lane; i < n; i += 32) squares += (x[i] - mean) * (x[i] - mean);
    for (int d = 16; d; d /= 2) squares += __shfl_xor_sync(~0u, squares, d);
    float scale = rsqrtf(squares / n + 1e-5f);
    for (int i = lane; i < n; i += 32) out[i] = (x[i] - mean) * scale * weight[i] + bias[i];
}
"""
KERNELS = {  # arguments after the output; launch; what it computes; the most units it may take
    "a thread a row": (ROWS, (torch.randn(64, 1024), 64, 1024), {"grid": 2, "block": 32},
                       lambda x, *_: x.softmax(1), 45),
    "tiles of a product": (PRODUCT, (torch.randn(128, 128), torch.randn(128, 128), 128),
                           {"grid": (4, 4), "block": (32, 32)},
                           lambda a, b, _: a @ b, 9),
    "a warp a row": (LAYERNORM, (torch.randn(64, 768), torch.randn(768), torch.randn(768), 64, 768),
                     {"grid": 16, "block": 128},
                     lambda x, w, b, *_: torch.nn.functional.layer_norm(x, (768,), w, b), 2.2),
}  # fmt: skip


def unit() -> float:
    """CPU seconds of 3000 rounds of five operations on 64 numbers: 6 ms on the machine of the
    measurements."""
    a, table, index = np.arange(64.0), np.zeros(5000), np.arange(64) * 7
    start = time.process_time()
    for _ in range(3000):
        b = a * a
        np.count_nonzero(b - a < b)
        table[index]
    return time.process_time() - start


def in_units(call: Callable[[], object], attempts: int) -> list[float]:
    """CPU time in units, each measured before and after the call, because other processes slow both."""
    ratios = []
    for _ in range(attempts):
        before, start = unit(), time.process_time()
        call()
        taken = time.process_time() - start
        ratios.append(taken / min(before, unit()))
    return ratios


@pytest.mark.parametrize("name", KERNELS)
def test_time_in_units_of_numpy(name):
    text, inputs, launch, expected, most = KERNELS[name]
    kernel, out = cukern.compile(text), torch.empty_like(inputs[0])
    with cukern.backend("sim"):
        ratios = in_units(lambda: kernel(out, *inputs, **launch), 6)
    torch.testing.assert_close(out, expected(*inputs), rtol=1e-4, atol=1e-4)
    assert min(ratios) <= most, ratios


ENDLESS = {  # threads that poll at one address, and a spin lock that a warp takes at once
    "polls": ("while (((volatile int*)lock)[blockIdx.x] == 0) {}", {"grid": 8, "block": 1024}),
    "atomics": ("while (atomicCAS(lock, 0, 1) != 0) {} __syncwarp();", {"grid": 1, "block": 32}),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_loops_end_soon(name):
    """A 35th of the usual limit, which should take at most 10 s: 48 units of 6 ms, and half as much again."""
    body, launch = ENDLESS[name]
    kernel, lock = (
        cukern.compile(f"__global__ void spin(int* lock) {{ {body} }}"),
        torch.zeros(8, dtype=torch.int32),
    )

    def run():
        lock.zero_()
        with cukern.backend("sim"), sim.checks(steps=40_000), pytest.raises(sim.StepLimit):
            kernel(lock, **launch)

    ratios = in_units(run, 3)
    assert min(ratios) <= 72, ratios
