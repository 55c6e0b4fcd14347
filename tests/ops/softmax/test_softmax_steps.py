"""v11: the gradient of rows that all blocks of the GPU share, one row after the other. With two SMs, short rows are enough."""

import pytest
import torch
from helpers import PLACE, gpu, kernels, same_bits, with_sms
from test_softmax import check

from cukern.ops.softmax import plan, row_storage

nan = float("nan")


@pytest.fixture
def launched(monkeypatch):
    """The backward problems. All are run by in_step, planned for two SMs."""
    problems, first = [], row_storage.first
    monkeypatch.setattr(row_storage, "device_of", with_sms(2))
    monkeypatch.setattr(plan, "LEAST_STEPS", 1)

    def way(ways, problem):
        if not problem.backward:
            return first(ways, problem)
        problems.append(problem)
        return row_storage.in_step(problem)

    monkeypatch.setattr(row_storage, "first", way)
    return problems


def gradients(y: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    return torch.ops.cukern._softmax_backward(y, g, 1, 0.5, False, "v11")


@kernels
@pytest.mark.parametrize(("vectors", "shape"), ((1366, 0), (1793, 0), (2048, 0), (2731, 1), (4095, 1), (4096, 1)))
def test_rows_in_step(launched, device, vectors, shape):
    """Two to four vectors per thread, divergent warps; fewer, as many and more rows than blocks per SM."""
    for rows, dtype in ((1, torch.float32), (2, torch.float16), (5, torch.bfloat16), (7, torch.float32)):
        width = 16 // dtype.itemsize
        g = torch.randn(rows, vectors * width + 3 * width, dtype=dtype, device=device)[:, : vectors * width]
        check("softmax", torch.randn(rows, vectors * width, dtype=dtype, device=device), "v11", scale=0.7, g=g)
        assert plan.steps_shape(rows, launched[-1].vectors, launched[-1].shared_bytes, 2) == plan.STEPS[shape]


@kernels
def test_a_nan_stays_in_its_row(launched, device):
    """Also, a sum of 0 is not mistaken for one that has not arrived."""
    y, g = torch.softmax(torch.randn(6, 8192, device=device), -1), torch.randn(6, 8192, device=device)
    g[3] = 0
    clean = gradients(y, g)
    assert (clean[3] == 0).all()
    g[2, 5000], g[4, 0] = nan, float("inf")
    dx = gradients(y, g)
    assert dx[2].isnan().all() and not dx[4].isfinite().any()
    assert same_bits(dx[[0, 1, 3, 5]], clean[[0, 1, 3, 5]]) and clean.isfinite().all()


def test_which_rows_go_in_step():
    """Rows that fill at least two thirds of the registers, if there are enough rows and all blocks fit on the GPU."""
    least, h200, smaller = plan.LEAST_STEPS, 227 << 10, 99 << 10
    for shape in plan.STEPS:
        most = 132 * shape.threads * shape.vectors
        assert plan.steps_shape(least, most, h200, 132) == plan.steps_shape(least, -(-2 * most // 3), h200, 132) == shape
        for rows, vectors, shared in ((least - 1, most, h200), (least, 2 * most // 3 - 1, h200), (least, most, smaller)):
            assert plan.steps_shape(rows, vectors, shared, 132) is None
    assert plan.steps_shape(512, most + 1, h200, 132) is None


@kernels
def test_other_rows_do_not_go_in_step(launched, device):
    """Rows that are not whole vectors, float64, and log_softmax."""
    for log, dtype, columns in ((False, torch.float32, 8190), (False, torch.float64, 4096), (True, torch.float32, 8192)):
        problem = row_storage.Problem(40, columns, columns, 1.0, log, True, dtype, torch.device(device), 0 if PLACE == "cuda" else -1, 0, 0)
        assert row_storage.in_step(problem) is None


def long_rows() -> tuple[torch.Tensor, torch.Tensor]:
    columns = 4 * plan.STEPS[0].threads * plan.STEPS[0].vectors * torch.cuda.get_device_properties(0).multi_processor_count
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs compute capability 9.0")
    x = torch.randn(plan.LEAST_STEPS, columns, device="cuda")
    return torch.softmax(x, -1), torch.randn_like(x)


@gpu
def test_two_at_a_time():
    """Two launches whose blocks do not fit on the GPU together: one waits until the other has ended."""
    y, g = long_rows()
    shorter = y.shape[1] // 4 * 3
    problems = [(y, g), (y[:, :shorter].contiguous(), g[:, :shorter])]
    expected, streams = [gradients(*p) for p in problems], [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = [[], []]
    for _ in range(20):
        for stream, problem, results in zip(streams, problems, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(gradients(*problem))
    torch.cuda.synchronize()
    assert all(same_bits(dx, truth) for results, truth in zip(found, expected, strict=True) for dx in results)


@gpu
def test_in_a_graph():
    y, g = long_rows()
    expected, graph = gradients(y, g), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx = gradients(y, g)
    for _ in range(3):
        dx.fill_(nan)
        graph.replay()
        assert same_bits(dx, expected)
