"""Graphs of torch.export hold for all sizes of dimensions that are declared dynamic."""

import pytest
import torch
from helpers import OLD_TORCH
from torch.export import Dim, export

import cukern

BATCH, TIME = Dim("BATCH", min=2, max=64), Dim("TIME", min=2, max=64)
WEIGHT = torch.ones(11, 8)


def qkv(batch, time):
    return tuple(torch.randn(batch, 4, time, 8) for _ in range(3))


def tokens(batch, time):
    return torch.randn(batch, time, 8), torch.randint(11, (batch, time))


def lengths(batch, time):
    return *qkv(batch, time), torch.arange(batch).int()


HEADS = {0: BATCH, 2: TIME}
CASES = {
    "linear_cross_entropy": (lambda x, t: cukern.linear_cross_entropy(x, WEIGHT, t), tokens, ({0: BATCH, 1: TIME},) * 2),
    "window": (lambda q, k, v: cukern.attention(q, k, v, window=5), qkv, (HEADS,) * 3),
    "key_lengths": (lambda q, k, v, n: cukern.attention(q, k, v, key_lengths=n), lengths, (HEADS, HEADS, HEADS, {0: BATCH})),
}


@pytest.mark.skipif(OLD_TORCH, reason="torch 2.11 exports attention with guards on the time")
@pytest.mark.parametrize("name", CASES)
def test_exported_with_dynamic_batch_and_time(name):
    function, make, dims = CASES[name]

    class Module(torch.nn.Module):
        def forward(self, *inputs):
            return function(*inputs)

    exported = export(Module(), make(2, 13), dynamic_shapes=(dims,)).module()
    for batch, time in ((3, 4), (5, 40)):
        inputs = make(batch, time)
        torch.testing.assert_close(exported(*inputs), function(*inputs))
