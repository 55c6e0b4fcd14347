"""Launches with an attribute (cuLaunchKernelEx), through ctypes, because CuPy has no binding. They take 0.4
us more host time.

EARLY is programmatic dependent launch (PDL): the kernel may start while the previous one ends. It waits
before it accesses global memory (wait_for_previous in common/ptx/launch.cuh). TOGETHER is a cooperative
launch: all thread blocks are resident at the same time, so they can wait for each other. The shape of a
cluster, such as (2, 1, 1), launches clusters of thread blocks.
"""

import ctypes
import functools
import struct
import threading
from collections.abc import Callable

from cukern.runtime.compile import bindings

CAPABILITY, DRIVER = 90, 12030  # the minimum for EARLY; older drivers cannot capture it in a CUDA graph
TOGETHER, EARLY = 2, 6  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _PROGRAMMATIC_STREAM_SERIALIZATION
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION

Attribute = int | tuple[int, int, int]  # 0: none


class _Config(threading.local):
    """CUlaunchConfig with one attribute, one per thread."""

    layout = struct.Struct("7I4xQQI4x")  # grid, block, shared memory; stream, attributes, their number

    def __init__(self, attribute: Attribute) -> None:
        if isinstance(attribute, tuple):
            packed = struct.pack("I4x3I52x", _CLUSTER, *attribute)
        else:
            packed = struct.pack("I4xI60x", attribute, 1)
        self._attribute = ctypes.create_string_buffer(packed)
        config = ctypes.create_string_buffer(self.layout.size)
        self.parts = config, ctypes.addressof(config), ctypes.addressof(self._attribute)


@functools.cache
def launcher(capability: int, attribute: Attribute) -> Callable[..., None] | None:
    """A function with the arguments and errors of CuPy's driver.launchKernel, or None if the GPU or driver
    does not support EARLY."""
    driver = bindings.driver()
    if attribute == EARLY and (capability < CAPABILITY or bindings.runtime().driverGetVersion() < DRIVER):
        return None
    launch = bindings.library().cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    local, pack = _Config(attribute), _Config.layout.pack_into

    def run(
        function: int, gx: int, gy: int, gz: int, bx: int, by: int, bz: int, shared: int, stream: int,
        params: int, extra: int
    ) -> None:  # fmt: skip
        config, address, attribute = local.parts
        pack(config, 0, gx, gy, gz, bx, by, bz, shared, stream, attribute, 1)
        status = launch(address, function, params, extra)
        if status:
            raise driver.CUDADriverError(status)

    return run
