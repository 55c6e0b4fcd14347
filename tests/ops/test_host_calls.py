"""The host time of a call, as counts that do not depend on the machine: Python functions of cukern, and torch's operations.

The path of a GPU runs on CPU tensors: they say that they are on a GPU, and kernels are planned but not launched.
"""

import sys
from pathlib import Path

import pytest
import torch

import cukern
from cukern.runtime.device import setting
from cukern.runtime.kernel import collecting

FOLDER = str(Path(cukern.__file__).parent)
OPERATIONS = {"t", "to", "float", "view", "reshape", "empty", "empty_like", "new_empty", "linear", "matmul", "addmm"}
X, BIAS = torch.randn(64, 64), torch.randn(64)
HALF = X.bfloat16(), X.bfloat16(), BIAS.bfloat16()
CALLS = {  # the call; the most functions of cukern, without comprehensions; torch's operations
    "linear, 16 bits": (lambda: cukern.linear(*HALF), 3, ["linear"]),
    "matmul, 16 bits": (lambda: cukern.matmul(*HALF[:2]), 3, ["matmul"]),
    "linear, v7": (lambda: cukern.linear(*HALF, version="v7"), 22, ["t", "new_empty"]),
    "linear": (lambda: cukern.linear(X, X, BIAS), 31, ["t", "new_empty"]),
    "matmul": (lambda: cukern.matmul(X, X), 28, ["new_empty"]),
    "matmul, v1": (lambda: cukern.matmul(X, X, version="v1"), 24, ["new_empty"]),
    "softmax": (lambda: cukern.softmax(X), 15, ["empty_like"]),
    "causal_softmax": (lambda: cukern.causal_softmax(X[None]), 18, ["empty_like", "empty", "view"]),
    "square": (lambda: cukern.square(X), 5, ["empty_like"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_a_gpu_takes_few_steps_on_the_host(name, monkeypatch):
    call, most, expected = CALLS[name]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    functions, operations = [], []

    def record(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(FOLDER) and not code.co_name.startswith("<"):
            functions.append(code.co_name)
        elif event == "c_call" and argument.__name__ in OPERATIONS:
            operations.append(argument.__name__)

    def steps():
        functions.clear(), operations.clear()
        sys.setprofile(record)
        try:
            call()
        finally:
            sys.setprofile(None)
        return len(functions), functions.copy(), operations.copy()

    with setting(), collecting():  # setting: plans made here do not stay
        least, names, made = min(steps() for _ in range(20))  # the first calls plan, and encode tensor maps of new addresses
    assert least <= most, names
    assert made == expected
