"""NVRTC, CUDA's driver and its runtime as CuPy binds them. Where CuPy is not installed, as in a package of
the Hugging Face Hub, the same functions call the libraries through ctypes; a launch then takes longer on the
host.
"""

import ctypes
import functools
import importlib.util
import os
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from cukern.runtime.compile import cache
from cukern.runtime.compile.forks import no_fork


class NVRTCError(RuntimeError):
    """As CuPy's nvrtc.NVRTCError."""


class CUDADriverError(RuntimeError):
    """As CuPy's driver.CUDADriverError."""


@functools.cache
def has_cupy() -> bool:
    return importlib.util.find_spec("cupy") is not None


def cupy() -> Any:
    """The package cupy. Raises what its import raises."""
    with no_fork():
        cache.give_cupy_a_cache()
        import cupy
    return cupy


@functools.cache
def library() -> ctypes.CDLL:
    """CUDA's driver, for functions that CuPy does not bind."""
    return ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")


@functools.cache
def driver() -> Any:
    """Its launchKernel, funcGetAttribute, funcSetAttribute, ctxGetCurrent, ctxSetCurrent and
    CUDADriverError."""
    if has_cupy():
        from cupy_backends.cuda.api import driver

        return driver
    launch = _function("cuLaunchKernel", "P" + 7 * "I" + "PPP")

    def launch_kernel(function: int, *sizes: int) -> None:
        x, y, z, *others = sizes
        if (x | y | z | others[0] | others[1] | others[2] | others[3]) >> 31:  # ctypes would drop these bits
            raise OverflowError(f"grid, block and shared memory must be in 0..2^31-1, got {sizes[:7]}")
        launch(function, *sizes)

    return SimpleNamespace(
        CUDADriverError=CUDADriverError,
        launchKernel=launch_kernel,
        funcGetAttribute=lambda attribute, function: _int(
            _function("cuFuncGetAttribute", "PIP"), attribute, function
        ),
        funcSetAttribute=_function("cuFuncSetAttribute", "PII"),
        ctxGetCurrent=lambda: _pointer(_function("cuCtxGetCurrent", "P")),
        ctxSetCurrent=_function("cuCtxSetCurrent", "P"),
    )


@functools.cache
def runtime() -> Any:
    """Its driverGetVersion and deviceGetAttribute."""
    if has_cupy():
        from cupy_backends.cuda.api import runtime

        return runtime

    def attribute_of(attribute: int, index: int) -> int:
        device = _int(_function("cuDeviceGet", "PI"), index)
        return _int(_function("cuDeviceGetAttribute", "PII"), attribute, device)

    return SimpleNamespace(
        driverGetVersion=lambda: _int(_function("cuDriverGetVersion", "P")), deviceGetAttribute=attribute_of
    )


def function_of(cubin: bytes, symbol: str) -> int:
    """The CUfunction of a kernel, loaded without CuPy in the current context. It is never unloaded."""
    module = ctypes.c_void_p()
    _function("cuModuleLoadData", "PP")(ctypes.addressof(module), cubin)
    return _pointer(_function("cuModuleGetFunction", "PPP"), module.value, symbol.encode())


def variable_of(function: int, symbol: str) -> tuple[int, int]:
    """The address and the bytes of a variable of a kernel's module, in the current context."""
    module = _pointer(_function("cuFuncGetModule", "PP"), function)
    address, size = ctypes.c_void_p(), ctypes.c_size_t()
    found = ctypes.addressof(address), ctypes.addressof(size)
    _function("cuModuleGetGlobal_v2", "PPPP")(*found, module, symbol.encode())
    return address.value or 0, size.value


def layout_of(cubin: bytes, symbol: str) -> list[tuple[int, int]]:
    """The offset and the size in bytes of each parameter of a kernel. Raises AttributeError if the driver is
    older than CUDA 12.4."""
    function, get = function_of(cubin, symbol), _function("cuFuncGetParamInfo", "PPPP")
    found = list[tuple[int, int]]()
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    try:
        while True:
            get(function, len(found), ctypes.addressof(offset), ctypes.addressof(size))
            found.append((offset.value, size.value))
    except CUDADriverError as error:
        if str(error) != "CUDA_ERROR_INVALID_VALUE":  # there is no parameter of this number
            raise
    return found


@functools.cache
def _function(name: str, types: str) -> Any:
    """A function of the driver that raises CUDADriverError. types: one letter per argument: P, a pointer or
    bytes, or I, an int."""
    function = library()[name]
    function.argtypes = [ctypes.c_void_p if letter == "P" else ctypes.c_int for letter in types]

    def call(*args: Any) -> None:
        if status := function(*args):
            text = ctypes.c_char_p()
            library().cuGetErrorName(status, ctypes.byref(text))
            raise CUDADriverError((text.value or str(status).encode()).decode())

    return call


def _int(call: Any, *args: Any) -> int:
    """The int that a function writes to its first argument."""
    value = ctypes.c_int()
    call(ctypes.addressof(value), *args)
    return value.value


def _pointer(call: Any, *args: Any) -> int:
    value = ctypes.c_void_p()
    call(ctypes.addressof(value), *args)
    return value.value or 0


class Nvrtc:
    """NVRTC's functions with the arguments of CuPy's module nvrtc."""

    NVRTCError = NVRTCError

    def __init__(self, libraries: Sequence[str]) -> None:
        errors = []
        for name in libraries:
            try:
                self.library = ctypes.CDLL(name)
                return
            except OSError as error:
                errors.append(str(error))
        raise OSError(errors[-1] if errors else "no library libnvrtc.so was found")

    def _call(self, name: str, *args: Any) -> None:
        if status := self.library[name](*args):
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise NVRTCError(self.library.nvrtcGetErrorString(status).decode())

    def getVersion(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> list[int]:
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        archs = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return list(archs)

    def createProgram(self, text: str, name: str, headers: Sequence[bytes], includes: Sequence[bytes]) -> int:
        program, count = ctypes.c_void_p(), len(headers)
        arrays = ((ctypes.c_char_p * count)(*values) for values in (headers, includes))
        self._call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), count, *arrays)
        return program.value or 0

    def addNameExpression(self, program: int, name: str) -> None:
        self._call("nvrtcAddNameExpression", ctypes.c_void_p(program), name.encode())

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        values = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", ctypes.c_void_p(program), len(options), values)

    def getLoweredName(self, program: int, name: str) -> bytes:
        found = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", ctypes.c_void_p(program), name.encode(), ctypes.byref(found))
        return found.value or b""

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", ctypes.byref(ctypes.c_void_p(program)))

    def getProgramLog(self, program: int) -> str:
        return self._bytes("ProgramLog", program).rstrip(b"\0").decode()

    def getPTX(self, program: int) -> bytes:
        return self._bytes("PTX", program).rstrip(b"\0")

    def getCUBIN(self, program: int) -> bytes:
        return self._bytes("CUBIN", program)[:-1]  # CuPy drops the last byte, a zero

    def _bytes(self, what: str, program: int) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", ctypes.c_void_p(program), ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", ctypes.c_void_p(program), text)
        return text.raw
