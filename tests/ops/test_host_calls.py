"""The host time of a warm call, as counts that do not depend on the machine: Python functions of cukern, and
torch's operations.

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
OPERATIONS = {
    "t", "to", "float", "view", "reshape", "empty", "empty_like", "new_empty", "linear", "matmul", "addmm",
}  # fmt: skip
X, BIAS = torch.randn(64, 64), torch.randn(64)
HALF = X.bfloat16(), X.bfloat16(), BIAS.bfloat16()
Q = torch.randn(1, 4, 64, 64).bfloat16()
TABLE, TOKENS = torch.randn(64, 32), torch.randint(64, (2, 4))
# the simulator, which a GPU does not ask for, and switches of torch
ASKED = {"_on_cpu", "simulating", "_tf32_allowed"}
CALLS = {  # the call of a tensor; the tensor; torch's operations of a forward
    "linear, 16 bits": (lambda x: cukern.linear(x, *HALF[1:]), HALF[0], ["linear"]),
    "matmul, 16 bits": (lambda x: cukern.matmul(x, HALF[1]), HALF[0], ["matmul"]),
    "linear, v7": (lambda x: cukern.linear(x, *HALF[1:], version="v7"), HALF[0], []),
    "linear": (lambda x: cukern.linear(x, X, BIAS), X, []),
    "matmul": (lambda x: cukern.matmul(x, X), X, []),
    "matmul, v1": (lambda x: cukern.matmul(x, X, version="v1"), X, []),
    "softmax": (cukern.softmax, X, []),
    "log_softmax": (cukern.log_softmax, X, []),
    "causal_softmax": (cukern.causal_softmax, X[None], []),
    "square": (cukern.square, X, []),
    "gelu": (cukern.gelu, X, []),
    "swiglu": (lambda x: cukern.swiglu(x, X), X, []),
    "layernorm": (lambda x: cukern.layernorm(x, BIAS, BIAS), X, []),
    "rmsnorm": (lambda x: cukern.rmsnorm(x, BIAS), X, []),
    "cross_entropy": (lambda x: cukern.cross_entropy(x, torch.zeros(64, dtype=torch.int64)), X, []),
    "embedding": (lambda w: cukern.embedding(TOKENS, w), X, []),
    "rope": (lambda x: cukern.rope(x, TABLE, TABLE, layout="bhsd"), Q, []),
    "attention": (lambda x: cukern.attention(x, Q, Q), Q, []),
    "kron_linear": (lambda x: cukern.kron_linear(x, (X[:8, :8], X[:8, :8])), X, []),
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
        ours = code.co_filename.startswith((FOLDER, "<cukern", "<string>")) and not code.co_name.startswith(
            "<"
        )
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


def fewest(call):
    """The functions and operations of a call that runs the fewest; CPU tensors have several alignments."""
    functions, operations = min((steps(call) for _ in range(6)), key=lambda found: len(found[0]))
    return [name for name, _ in functions if name not in ASKED], operations


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_takes_few_steps_on_the_host(name, on_a_gpu):
    """A lookup, and a function that allocates and launches. An autograd Function calls another one of
    these."""
    call, x, expected = CALLS[name]
    for _ in range(6):  # the first calls plan
        call(x)
    assert fewest(lambda: call(x)) == (["planned", "replay"], expected)
    leaf, dout = x.clone().requires_grad_(), torch.ones_like(call(x))

    def backward():
        torch.autograd.grad(out, leaf, dout, retain_graph=True)

    for _ in range(10):
        out = call(leaf)
        backward()
    of_torch = out.grad_fn.name().removesuffix("0") in ("AddmmBackward", "MmBackward")
    assert fewest(lambda: call(leaf))[0] == ["planned", "replay"] + ["replay"] * (not of_torch)
    assert fewest(backward)[0] == ([] if of_torch else ["planned", "replay"])
