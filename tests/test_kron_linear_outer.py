"""The backward of two factors of 128 x 128 on few rows."""

import contextlib

import pytest
import torch
from helpers import kernels, same_bits

from cukern.ops import kron_outer, kron_v4_backward
from cukern.ops.kron_groups import Target
from cukern.runtime import backend

TARGET = Target(4, 132, 226 << 10)


def test_who_takes_the_gradients_of_few_rows():
    sizes = ((128, 128),) * 2
    assert kron_outer.takes(sizes, 32, TARGET)
    assert kron_outer.takes(sizes, 1, TARGET._replace(itemsize=2, tensor=True))
    others = (sizes, 64, TARGET), (sizes, 32, TARGET._replace(tensor=True)), (((128, 128), (128, 64)), 32, TARGET)
    assert not any(kron_outer.takes(*other) for other in (*others, (sizes, 32, TARGET._replace(shared=163 << 10))))


@kernels
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_gradients_of_few_rows(device, dtype):
    rows = 9  # a second one for one block of a cluster
    x, g = (torch.randn(rows, 1 << 14, device=device).to(dtype) for _ in range(2))
    ws = [(torch.randn(128, 128, device=device) / 11).to(dtype) for _ in range(2)]
    ws[0] = ws[0].mT.contiguous().mT

    def gradients(kind):
        X, G, left, right = (t.to(kind) for t in (x.view(rows, 128, 128), g.view(rows, 128, 128), *ws))
        z, h = X @ right, left @ G
        sums = torch.einsum("bij,bqj->iq", z, G), torch.einsum("bmp,bmq->pq", X, h)
        return [0.5 * (h @ right.mT).reshape(rows, -1), *[0.5 * s for s in sums]]

    with backend.simulated_memory([x, g, *ws]) if device == "cpu" else contextlib.nullcontext():
        found = kron_v4_backward.backward(x, g, ws, [True] * 3, 0.5)
        again = found if device == "cpu" else kron_v4_backward.backward(x, g, ws, [True] * 3, 0.5)  # 9 s a time
    for a, b, exact, other in zip(found, again, gradients(torch.float64), gradients(dtype), strict=True):
        assert a is not None and same_bits(a, b)
        assert (a - exact).abs().max() <= 2 * (other - exact).abs().max() + torch.finfo(dtype).eps
