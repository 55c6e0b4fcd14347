"""Where CuPy is not installed, NVRTC and the driver are called through ctypes."""

import ctypes

import pytest
from helpers import run_python

from cukern.runtime.compile import bindings
from cukern.runtime.compile.machine_code import sized_params
from cukern.runtime.compile.signature import by_value, offsets, packer

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


class Driver(dict):
    """CUDA's driver, of a module at address 5 with a variable, and a kernel at 7 with two parameters."""

    def __init__(self):
        super().__init__(
            cuModuleLoadData=lambda module, code: self.give(module, 5),
            cuModuleGetFunction=lambda function, module, name: self.give(function, module + 2),
            cuFuncGetModule=lambda module, function: self.give(module, function - 2),
            cuModuleGetGlobal_v2=lambda *args: self.variable(*args),
            cuFuncGetParamInfo=lambda *args: self.parameter(*args),
        )

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE" if status == 1 else b"CUDA_ERROR_NOT_FOUND"

    def give(self, address, value):
        ctypes.c_uint64.from_address(address).value = value
        return 0

    def variable(self, address, size, module, name):
        return self.give(address, 1 << 40) or self.give(size, 16) if (module, name) == (5, b"c") else 500

    def parameter(self, function, index, offset, size):
        assert function == 7
        return self.give(offset, 8 * index) or self.give(size, 4) if index < 2 else 1


def test_variables_and_parameters_of_a_loaded_module(monkeypatch):
    bindings._function.cache_clear()
    monkeypatch.setattr(bindings, "library", Driver)
    assert bindings.variable_of(7, "c") == (1 << 40, 16)
    assert bindings.layout_of(b"a cubin", "k") == [(0, 4), (8, 4)]
    with pytest.raises(bindings.CUDADriverError, match="CUDA_ERROR_NOT_FOUND"):
        bindings.variable_of(7, "d")
    bindings._function.cache_clear()


@pytest.mark.parametrize(
    "offset, size, expected",
    [
        (8, 8, (".b64", True, 0, 0)),
        (4, 4, (".b32", False, 0, 0)),
        (4, 8, (".align 4 .b8", False, 8, 4)),
        (0, 128, (".align 16 .b8", False, 128, 16)),
        (64, 128, (".align 64 .b8", False, 128, 64)),
    ],
)
def test_parameters_of_a_cubin(offset, size, expected):
    (found,) = sized_params([(offset, size)])
    assert (found.ctype, found.pointer, found.size, found.align) == expected


def test_a_number_of_unknown_type_is_passed_by_its_own():
    pointer, number = sized_params([(0, 8), (8, 4)])
    for param, given, bits in (
        (number, -1, 0xFFFFFFFF), (number, 1.0, 0x3F800000), (pointer, 1.0, 0x3FF << 52),
        (pointer, -1, (1 << 64) - 1),
    ):  # fmt: skip
        assert by_value("k", param, given) == bits
    assert packer((number, pointer)).size == 16 and offsets((number, pointer)) == [0, 8]
