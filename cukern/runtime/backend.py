"""Who executes a launch: the GPU, through the CUDA driver as CuPy binds it.

`cupy_backends.cuda.api.driver` loads in 3 ms and launches in 3 us; `import cupy`, which CuPy's public RawModule needs, takes 0.2 s. So a
call that finds its cubin in the cache never imports CuPy. Where a CuPy has no such binding, RawModule does the work.
"""

import ctypes
import math
import os
import struct
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch

from cukern.runtime.compiler import Cubin, SetupError
from cukern.runtime.signature import SLOT, Param, explain_misfit, packer

Dim = tuple[int, int, int]
Launch = Callable[[Dim, Dim, int, int, tuple[Any, ...]], None]

_MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_THREADS_ATTRIBUTE = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_FREE_SHARED = 48 << 10  # bytes of dynamic shared memory that need no attribute


class LaunchError(RuntimeError):
    """The driver refused a launch, or the kernel failed; the message names the kernel, the geometry and the limit that was broken."""


def load(name: str, cubin: Cubin, params: tuple[Param, ...], device: int) -> Launch:
    """Load a cubin on a GPU. The result is called as `launch(grid, block, shared_bytes, stream, args)`, args packed by `params`."""
    try:
        from cupy_backends.cuda.api import driver
    except ImportError as error:
        raise SetupError(f"CuPy cannot be imported ({error}). Run: pip install cupy-cuda12x") from error
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # makes torch's context, which the module belongs to
        if hasattr(driver, "launchKernel") and hasattr(driver, "moduleLoadData"):
            return _through_driver(driver, name, cubin, params, device)
        return _through_raw_module(name, cubin, params, device)


def _through_driver(driver: Any, name: str, cubin: Cubin, params: tuple[Param, ...], device: int) -> Launch:
    try:
        # Modules live as long as the process: a captured graph may hold the function.
        function = driver.moduleGetFunction(driver.moduleLoadData(cubin.code), cubin.symbol)
    except driver.CUDADriverError as error:
        raise LaunchError(f"{name} compiled for {cubin.arch} does not load on {torch.cuda.get_device_name(device)}: {error}") from None
    pack, launch = packer(params).pack_into, driver.launchKernel
    buffer = ctypes.create_string_buffer(max(1, len(params)) * SLOT)
    base = ctypes.addressof(buffer)
    slots = (ctypes.c_void_p * max(1, len(params)))(*range(base, base + len(params) * SLOT, SLOT))
    slots_address = ctypes.addressof(slots)
    lock = threading.Lock()  # forward and backward run on two threads and share the buffer
    allowed = _FREE_SHARED

    def run(grid: Dim, block: Dim, shared: int, stream: int, args: tuple[Any, ...], keep: Any = slots) -> None:
        nonlocal allowed
        try:
            if shared > allowed:
                driver.funcSetAttribute(function, _MAX_SHARED_ATTRIBUTE, shared)
                allowed = shared
            with lock:
                pack(buffer, 0, *args)
                launch(function, *grid, *block, shared, stream, slots_address, 0)
        except struct.error:
            raise explain_misfit(name, params, args) from None
        except driver.CUDADriverError as error:
            threads = driver.funcGetAttribute(_MAX_THREADS_ATTRIBUTE, function)
            raise launch_error(name, grid, block, shared, device, threads, error) from None

    return run


def _through_raw_module(name: str, cubin: Cubin, params: tuple[Param, ...], device: int) -> Launch:
    import cupy
    import numpy

    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(cubin.code)
    raw = cupy.RawModule(path=file.name).get_function(cubin.symbol)
    kernel = raw.kernel
    os.unlink(file.name)
    scalars = [None if p.pointer else numpy.dtype(p.format[0]).type for p in params]

    def run(grid: Dim, block: Dim, shared: int, stream: int, args: tuple[Any, ...]) -> None:
        try:
            packer(params).pack(*args)
            if shared > _FREE_SHARED:
                raw.max_dynamic_shared_size_bytes = shared
            values = tuple(a if scalar is None else scalar(a) for scalar, a in zip(scalars, args, strict=True))
            kernel(grid, block, values, shared, cupy.cuda.ExternalStream(stream, device))
        except struct.error:
            raise explain_misfit(name, params, args) from None
        except cupy.cuda.driver.CUDADriverError as error:
            raise launch_error(name, grid, block, shared, device, raw.max_threads_per_block, error) from None

    return run


def launch_error(name: str, grid: Dim, block: Dim, shared: int, device: int, threads: int, error: Exception) -> LaunchError:
    """The error of a refused launch: what was asked for, and each limit of the GPU that it breaks."""
    if torch.cuda._is_in_bad_fork():
        return LaunchError(f"{name}: CUDA was initialised before this process was forked; start it with the 'spawn' method ({error})")
    broken = []
    for what, dims, limits in (("grid", grid, (2**31 - 1, 65535, 65535)), ("block", block, (1024, 1024, 64))):
        for axis, n, limit in zip("xyz", dims, limits, strict=True):
            if not 1 <= n <= limit:
                broken.append(f"{what} {axis} = {n} is not in 1..{limit}")
    if math.prod(block) > threads:
        broken.append(f"{math.prod(block)} threads a block are more than the {threads} that this kernel may have")
    largest = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    if shared > largest:
        broken.append(f"{shared} bytes of dynamic shared memory are more than the GPU's {largest}")
    return LaunchError(f"{name} <<<grid {grid}, block {block}, {shared} bytes shared>>> failed: {'; '.join(broken) or error}")
