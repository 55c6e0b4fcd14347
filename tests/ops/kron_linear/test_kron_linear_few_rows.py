"""Two factors of 128 x 128 on few rows."""

import pytest
import torch
from helpers import kernels, problem, same_bits, simulated

from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear import planner

TARGET = problem(4, 132, 226 << 10, wgmma=True)


def test_when_the_backward_kernel_is_chosen():
    def kernel(sizes=((128, 128),) * 2, rows=32, **other):
        return planner.backward(sizes, rows, problem(**{"itemsize": 4, "wgmma": True} | other))[-1].kernel

    assert kernel() == kernel(rows=1) == kernel(itemsize=2, tensor=True) == "few_rows"
    others = (
        {"sizes": ((128, 128), (128, 64))},
        {"rows": 128},
        {"itemsize": 8},
        {"wgmma": False},
        {"shared": 163 << 10},
    )
    assert all(kernel(**other) != "few_rows" for other in others)


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16))
def test_gradients_of_few_rows(device, dtype):
    # two launches, or one; a last sum that some threads have no part in
    rows = 9 if dtype == torch.float32 else 5
    x, g = (torch.randn(rows, 1 << 14, device=device).to(dtype) for _ in range(2))
    ws = [(torch.randn(128, 128, device=device) / 11).to(dtype) for _ in range(2)]
    ws[0] = ws[0].mT.contiguous().mT

    def gradients(kind):
        X, G, left, right = (t.to(kind) for t in (x.view(rows, 128, 128), g.view(rows, 128, 128), *ws))
        z, h = X @ right, left @ G
        sums = torch.einsum("bij,bqj->iq", z, G), torch.einsum("bmp,bmq->pq", X, h)
        return [0.5 * (h @ right.mT).reshape(rows, -1), *[0.5 * s for s in sums]]

    with simulated(x, g, *ws):
        found = kron_backward.backward(x, g, ws, [True] * 3, 0.5)
        again = found if device == "cpu" else kron_backward.backward(x, g, ws, [True] * 3, 0.5)  # 15 s a time
    for a, b, exact, other in zip(found, again, gradients(torch.float64), gradients(dtype), strict=True):
        assert a is not None and same_bits(a, b)
        assert (a - exact).abs().max() <= 2 * (other - exact).abs().max() + torch.finfo(dtype).eps


@kernels
def test_infinities_and_nan_go_where_torch_lets_them(device):
    x, g, *ws = (torch.randn(1, 1 << 14, device=device) for _ in range(4))
    left, right = ws = [w.view(128, 128) for w in ws]
    x[0, 647], g[0, 9060], right[100, 3] = torch.inf, torch.nan, -torch.inf
    with simulated(x, g, *ws):
        found = kron_backward.backward(x, g, ws, [True] * 3, 1.0)
        y = kron_forward.forward(x, ws, (1.0, None, None))
    X, G = x.view(128, 128), g.view(128, 128)
    for a, b in zip(
        (*found, y),
        (left @ G @ right.mT, X @ right @ G.mT, X.mT @ (left @ G), left.mT @ (X @ right)),
        strict=True,
    ):
        assert a is not None and a.isnan().any()
        for at in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(at(a.view(128, 128)), at(b))
