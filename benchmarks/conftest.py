"""What the pytest-benchmark files share: every provider of an op, forward and backward, at sizes that the machine can bear.

Run `pytest benchmarks/bench_square.py`. `cukern bench` measures the device alone; here each call is waited for, as by a user who needs
the result.
"""

import pytest
import torch

from cukern.bench import calls, environment
from cukern.bench.measure import providers
from cukern.runtime.registry import OPS

DEVICE = environment.device()


def cases(name: str) -> list:
    """(dims, provider) of an op: what runs here, and, to be skipped with the reason, what does not."""
    op = OPS[name]
    functions, missing = providers(op, DEVICE, None)
    shapes = op.bench_dims if DEVICE.type == "cuda" else op.check_dims[-1:]
    found = [pytest.param(dims, key, id=f"{_by(dims)}-{'-'.join(filter(None, key))}") for dims in shapes for key in functions]
    return found + [pytest.param((), (peer, ""), marks=pytest.mark.skip(reason=f"{peer}: {why}"), id=peer) for peer, why in missing.items()]


def family(stem: str) -> list:
    """(name, dims, provider) of all ops of this stem."""
    return [pytest.param(n, *c.values, marks=c.marks, id=f"{n}-{c.id}") for n, op in OPS.items() if op.stem == stem for c in cases(n)]


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


@pytest.fixture
def run(benchmark):
    """Time one pass of a provider."""

    def timed(name: str, dims: tuple[int, ...], key: tuple[str, str], backward: bool) -> None:
        op = OPS[name]
        function = providers(op, DEVICE, [key[1] if key[1] in op.versions else key[0]])[0][key]
        inputs = op.make(dims, torch.float32, DEVICE)
        benchmark.group = f"{name} {_by(dims)} {'backward' if backward else 'forward'}"
        if backward:
            wanted = calls.wanted_inputs(op, "bwd", inputs)
            leaves = calls.leaves_of(inputs, wanted)
            out = function(*calls.arguments(op, leaves))
            benchmark(_waited_for, calls.backward(out, [leaves[i] for i in wanted], calls.draw_douts(op, inputs)))
        else:
            benchmark(_waited_for, lambda: function(*inputs))

    return timed


def _waited_for(call):
    result = call()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return result
