"""Where CuPy is not installed, NVRTC and the driver are called through ctypes."""

import pytest
from helpers import run_python

from cukern.runtime.compile import bindings

HIDDEN = "import sys; sys.modules.update(dict.fromkeys(('cupy', 'cupy_backends')))\n"
CODE = """
import torch, cukern
from cukern.runtime.compile import bindings, compiler
assert not bindings.has_cupy() and type(compiler.nvrtc()).__module__ == bindings.__name__
x = torch.randn(5, 1000)
kernel = cukern.compile("__global__ void k(float* x) { x[threadIdx.x] = 1 }")
try:
    kernel.compile("sm_90a")
except cukern.CompileError as error:
    assert 'expected a ";"' in str(error)
"""
IN_SIMULATOR = """
with cukern.backend("sim"):
    torch.testing.assert_close(cukern.softmax(x), x.softmax(-1))
empty = cukern.compile("__global__ void k() {}").source
assert compiler.compile_kernel(empty, "k", "sm_90a").code[:4] == b"\\x7fELF"
"""
ON_GPU = """
from torch.nn import functional as F
x = x.cuda().requires_grad_()
y = cukern.softmax(x)
y.backward(x.detach())
torch.testing.assert_close(y, x.softmax(-1))
# TMA, PDL, more than 48 KiB of shared memory
a, b = torch.randn(2, 300, 264, device="cuda", dtype=torch.bfloat16)
torch.testing.assert_close(cukern.linear(a, b, version="v7"), F.linear(a, b))
try:
    cukern.compile("__global__ void k() {}")(grid=2**32 + 1, block=1)
except (cukern.LaunchError, ValueError) as error:
    assert "grid" in str(error)
else:
    raise AssertionError("a grid that is too large was launched")
"""


def test_compiles_and_simulates_without_cupy(tmp_path):
    run_python(HIDDEN + CODE + IN_SIMULATOR, CUKERN_CACHE_DIR=str(tmp_path))


@pytest.mark.gpu
def test_launches_without_cupy(tmp_path):
    run_python(HIDDEN + CODE + ON_GPU, CUKERN_CACHE_DIR=str(tmp_path))


def test_the_error_of_a_missing_library_is_the_loaders():
    with pytest.raises(OSError, match=r"libnothing\.so\.1"):
        bindings.Nvrtc(["libnothing.so.1"])
