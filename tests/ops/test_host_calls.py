"""The host time of a warm call, as counts that do not depend on the machine: Python functions of cukern, and torch's operations.

The path of a GPU runs on CPU tensors: they say that they are on a GPU, and nothing is launched.
"""

import sys
from pathlib import Path

import pytest
import torch

import cukern
from cukern.runtime import recording
from cukern.runtime.device import setting
from cukern.runtime.launch.kernel import Kernel

FOLDER = str(Path(cukern.__file__).parent)
OPERATIONS = {"t", "to", "float", "view", "reshape", "empty", "empty_like", "new_empty", "linear", "matmul", "addmm"}
X, BIAS = torch.randn(64, 64), torch.randn(64)
HALF = X.bfloat16(), X.bfloat16(), BIAS.bfloat16()
Q = torch.randn(1, 4, 64, 64).bfloat16()
TABLE, TOKENS = torch.randn(64, 32), torch.randint(64, (2, 4))
CALLS = {  # the call of a tensor; the tensor; the most functions of cukern of a forward, and of a backward; torch's operations
    "linear, 16 bits": (lambda x: cukern.linear(x, *HALF[1:]), HALF[0], 6, None, ["linear"]),
    "matmul, 16 bits": (lambda x: cukern.matmul(x, HALF[1]), HALF[0], 6, None, ["matmul"]),
    "linear, v7": (lambda x: cukern.linear(x, *HALF[1:], version="v7"), HALF[0], 8, 35, []),
    "linear": (lambda x: cukern.linear(x, X, BIAS), X, 8, 35, []),
    "matmul": (lambda x: cukern.matmul(x, X), X, 8, 35, []),
    "matmul, v1": (lambda x: cukern.matmul(x, X, version="v1"), X, 8, 35, []),
    "softmax": (cukern.softmax, X, 8, 35, []),
    "log_softmax": (cukern.log_softmax, X, 8, 35, []),
    "causal_softmax": (cukern.causal_softmax, X[None], 8, 35, []),
    "square": (cukern.square, X, 8, 35, []),
    "gelu": (cukern.gelu, X, 8, 35, []),
    "swiglu": (lambda x: cukern.swiglu(x, X), X, 8, 35, []),
    "layernorm": (lambda x: cukern.layernorm(x, BIAS, BIAS), X, 8, 35, []),
    "rmsnorm": (lambda x: cukern.rmsnorm(x, BIAS), X, 8, 35, []),
    "cross_entropy": (lambda x: cukern.cross_entropy(x, torch.zeros(64, dtype=torch.int64)), X, 8, 35, []),
    "embedding": (lambda w: cukern.embedding(TOKENS, w), X, 8, 35, []),
    "rope": (lambda x: cukern.rope(x, TABLE, TABLE, layout="bhsd"), Q, 8, 35, []),
    "attention": (lambda x: cukern.attention(x, Q, Q), Q, 8, 35, []),
    "kron_linear": (lambda x: cukern.kron_linear(x, (X[:8, :8], X[:8, :8])), X, 8, 60, []),
}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """CPU tensors take the path of a GPU, where launches do nothing."""

    launches = {}

    def load(self, device):
        params = self.params_on(device)

        def run(grid, block, shared, *args):
            if (recorder := recording.local.recorder) is not None:
                recorder.launch(run, params, grid, block, shared, args)

        run.bound = lambda grid, block, shared, *last: lambda *first: None
        return run

    def on(self, device):
        if self not in launches:
            launches[self] = load(self, device)
        return launches[self]

    monkeypatch.setattr(Kernel, "on", on)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    with cukern.backend("sim"), setting():
        yield


def steps(call):
    """The functions of cukern that a call runs, with their files, and torch's operations."""
    functions, operations = [], []

    def record(frame, event, argument):
        code = frame.f_code
        ours = code.co_filename.startswith((FOLDER, "<cukern", "<string>")) and not code.co_name.startswith("<")
        if event == "call" and ours:
            functions.append((code.co_name, code.co_filename))
        elif event == "c_call" and argument.__name__ in OPERATIONS:
            operations.append(argument.__name__)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return functions, operations


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_takes_few_steps_on_the_host(name, on_a_gpu):
    call, x, most, most_backward, expected = CALLS[name]
    for _ in range(6):  # the first calls plan; CPU tensors have several alignments
        call(x)
    functions, operations = min((steps(lambda: call(x)) for _ in range(6)), key=lambda found: len(found[0]))
    assert len(functions) <= most and len({file for _, file in functions}) <= 5, functions
    assert operations == expected
    if most_backward is None:
        return
    leaf = x.clone().requires_grad_()
    dout = torch.ones_like(call(x))

    def backward():
        torch.autograd.grad(out, leaf, dout, retain_graph=True)

    for _ in range(6):
        out = call(leaf)
        backward()
    functions, _ = min((steps(backward) for _ in range(6)), key=lambda found: len(found[0]))
    assert len(functions) <= most_backward, functions
