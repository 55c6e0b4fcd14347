"""kron_linear v4 where one launch begins before another ends: each reads what those just before it wrote."""

import itertools
from math import prod

import pytest
import torch
from helpers import gpu, same_bits

import cukern
from cukern.ops.kron_linear import backward as kron_backward
from cukern.runtime.device import KNOWN
from cukern.runtime.launch import backend, driver

# Layers whose plans are, between them, of all kernels; of few rows, so that launches follow each other
# quickly, and of many.
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LAYERS = [
    *[
        (F32, rows, sizes)
        for rows, sizes in (
            (32, (128,) * 2),
            (3, (128,) * 2),
            (150, (16,) * 4),
            (200, (8,) * 5),
            (200, (4,) * 7),
        )
    ],
    *[
        (F32, rows, sizes)
        for rows, sizes in (
            (70, (32,) * 3),
            (4096, (32,) * 2),
            (16, (2,) * 16),
            (16, (64,) * 3),
            (300, (64,) * 2),
        )
    ],
    *[
        (BF16, rows, sizes)
        for rows, sizes in (
            (32, (128,) * 2),
            (1000, (64,) * 2),
            (2, (64,) * 3),
            (16, (64,) * 3),
            (300, (32,) * 3),
        )
    ],
    *[(BF16, rows, sizes) for rows, sizes in ((4096, (32,) * 2), (9, (16,) * 4), (7, (24, 6, 10)))],
    *[(F16, 300, (64,) * 2), (torch.float64, 50, (12, 20))],
]


@pytest.mark.parametrize("total", (228 << 10, 100 << 10))
def test_blocks_are_spread_evenly_over_sms(monkeypatch, total):
    """Of blocks that have no other shared memory; 1 KB of each is the driver's."""
    facts = KNOWN["h200"]._replace(shared_bytes=total - 1024)
    monkeypatch.setattr(driver, "device_of", lambda device: facts)
    spread = driver.spread.__wrapped__
    for blocks in (1, 132, 133, 528, 529, 1056):
        part = -(-blocks // 132)
        assert part * (spread(0, blocks, 0) + 1024) <= total < (part + 1) * (spread(0, blocks, 0) + 1024)
    assert spread(60 << 10, 132, 0) == max(60 << 10, spread(0, 132, 0)) and spread(0, 10**6, 0) == 0
    facts = facts._replace(capability=80)
    assert spread(5, 132, 0) == spread(5, 132, backend.SIMULATED) == 5


def chain(x, layers, pause):
    """Through the layers, and back; each layer's gradients are factors once more, straight after the launch
    that wrote them."""
    inputs, found = [x], []
    for ws in layers:
        inputs.append(cukern.kron_linear(inputs[-1], ws, version="v4"))
        pause()
    g = inputs.pop()
    for x, ws in zip(reversed(inputs), reversed(layers), strict=True):
        before = g
        g, *dws = kron_backward.backward(x, g, ws, [True] * (1 + len(ws)), 0.5)
        pause()
        found += [g, *dws, cukern.kron_linear(before, [w.mT for w in dws], version="v4")]
        pause()
    return found


@gpu
@pytest.mark.parametrize(
    "dtype, rows, sizes", LAYERS, ids=lambda v: str(v).removeprefix("torch.").replace(", ", "x")
)
def test_overlapping_launches_give_the_bits_of_separate_ones(dtype, rows, sizes):
    x = torch.empty(rows, prod(sizes), dtype=dtype, device="cuda")
    layers = [[torch.randn(n, n, device="cuda").div(n**0.5).to(dtype) for n in sizes] for _ in range(4)]

    def alone():
        found = chain(x, layers, torch.cuda.synchronize)
        torch.cuda.synchronize()
        return [t.clone() for t in found]

    x.normal_()
    alone()  # compiles
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        captured = chain(x, layers, lambda: None)
    for _ in range(3):
        x.normal_()
        expected = alone()
        eager = [chain(x, layers, lambda: None) for _ in range(3)]
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        for a, b in itertools.product([*eager, captured], [expected]):
            assert all(map(same_bits, a, b))
