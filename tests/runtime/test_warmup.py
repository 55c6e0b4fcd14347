"""warmup(shapes=...) and `cukern compile --shape` find exactly the kernels that calls need, with any number
of rows."""

from math import prod

import pytest
import torch
from helpers import count_compilations, gpu, same_bits

import cukern
from cukern.runtime.device import KNOWN, representative
from cukern.runtime.registry import CASES
from cukern.runtime.warmup import kernels_for, planned

ROWS = (
    1, 2, 3, 7, 16, 31, 32, 33, 48, 64, 65, 96, 100, 127, 129, 200, 255, 256, 257, 384, 500, 511, 512, 513,
    777, 1000, 1023, 1024, 1025,
)  # fmt: skip
ROWS += 1500, 2047, 2048, 3000, 4096, 4097, 6000, 8191, 8192, 10_000, 20_001, 32_768, 65_536
MOST_NUMBERS = 1 << 30  # elements of x, whose memory is never touched
BUCKETED = [
    (name, dims)
    for name in ("softmax", "matmul", "linear", "kron_linear", "kron_linear_rectangular")
    for dims in CASES[name].bench_dims
]


@pytest.mark.parametrize("gpu_name", ("h200", "rtx4090"))
@pytest.mark.parametrize(("name", "dims"), BUCKETED, ids=str)
def test_every_number_of_rows_needs_only_the_kernels_of_warmup(name, dims, gpu_name):
    """For softmax at most five kernels of a pass: rows of several thread blocks take more blocks the fewer
    there are."""
    case, device = CASES[name], KNOWN[gpu_name]
    shapes = [
        (rows, *dims[1:])
        for rows in (ROWS if gpu_name == "h200" else ROWS[::2])
        if rows * prod(dims[1:]) <= MOST_NUMBERS
    ]
    for dtype in {torch.float32, torch.bfloat16} & set(case.op.dtypes):
        prepared = set(kernels_for(case, [dims], (dtype,), device))
        assert set(planned(case, shapes, (dtype,), device)) <= prepared
        if name == "softmax":
            assert all(
                len({k for k in prepared if ("_bwd" in k) == backward}) <= 5 for backward in (False, True)
            )


@pytest.mark.parametrize("length", (64, 1000, 4200))
def test_causal_softmax_needs_nothing_new_for_shorter_sequences(length):
    case, device = CASES["causal_softmax"], KNOWN["h200"]
    for dtype in (torch.float32, torch.bfloat16):
        shorter = planned(
            case, [(2, t) for t in range(1, length + 1, max(7, length // 60))], (dtype,), device
        )
        assert set(shorter) <= set(kernels_for(case, [(48, length)], (dtype,), device))


def test_an_architecture_alone_stands_for_a_known_gpu():
    assert [representative(n) for n in (75, 80, 86, 90, 103)] == [
        KNOWN[name] for name in ("t4", "a100", "a100", "h200", "b200")
    ]


def test_a_wrong_number_of_sizes():
    with pytest.raises(ValueError, match="softmax takes 2 sizes, ROWS COLUMNS, got 5"):
        cukern.warmup("softmax", shapes=[(5,)])


@pytest.mark.parametrize(
    "shapes, error, words",
    [
        ([(4, 8)], ValueError, "shapes belong to one op, got 2 ops"),
        ("48", TypeError, "shapes must be a collection of tuples of ints"),
        ((4, 8), TypeError, r"shapes must be a collection of tuples of ints, such as .*, got tuple \(4, 8\)"),
        ([(4, 2.5)], TypeError, "a size in shapes must be an int"),
        ([(-4,)], ValueError, "a size in shapes must be at least 0"),
    ],
)
def test_shapes_are_checked(shapes, error, words):
    ops = ("square", "softmax") if len(shapes) == 1 and shapes[0] == (4, 8) else ("square",)
    with pytest.raises(error, match=words):
        cukern.warmup(*ops, shapes=shapes)


@gpu
@pytest.mark.parametrize(
    "sizes, dtype",
    (((32, 32, 32), torch.float32), ((32, 32, 32), torch.bfloat16), ((64, 64), torch.float32)),
    ids=str,
)
def test_thirty_batch_sizes_compile_nothing(sizes, dtype, monkeypatch, empty_cache):
    """Forward and backward of a layer, in eager mode and inside a CUDA graph capture."""
    layer = cukern.KronLinear(sizes, sizes, device="cuda", dtype=dtype)
    cukern.warmup("kron_linear", shapes=[(1024, *reversed(sizes))], dtypes=(dtype,))
    compiled = count_compilations(monkeypatch)

    def train(x):
        y = layer(x)
        return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))

    for rows in [*range(1, 130, 9), *range(150, 3000, 203), 4096]:
        x = torch.randn(rows, prod(sizes), device="cuda", dtype=dtype, requires_grad=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = train(x)
        eager = train(x)
        graph.replay()
        assert all(map(same_bits, captured, eager)), rows
    assert compiled == []
