"""Loads kernels on a GPU and launches them there.

CuPy's RawModule loads the machine code. CuPy's binding of the driver launches it with arguments that are
packed here. A launch takes 3 us of host time, nearly all of it in the driver; a call of a CuPy RawKernel
takes twice as long.
"""

import contextlib
import ctypes
import os
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cukern.runtime import recording
from cukern.runtime.compile import bindings
from cukern.runtime.compile.compiler import Cubin, SetupError
from cukern.runtime.compile.signature import Param, explain_misfit, offsets, packer
from cukern.runtime.device import SIMULATED, cached, device_of
from cukern.runtime.launch import extended_launch
from cukern.runtime.launch.extended_launch import Attribute
from cukern.runtime.launch.limits import Dim, LaunchError, exceeded, launch_error

Launch = Callable[..., None]

# synchronize after each launch, so that an error names its kernel
SYNC = os.environ.get("CUKERN_SYNC", "0") != "0"
NVTX = os.environ.get("CUKERN_NVTX", "0") != "0"  # put each launch in an NVTX range with the kernel's name

_MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_THREADS_ATTRIBUTE = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_STATIC_SHARED_ATTRIBUTE = 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
_CLUSTER_ATTRIBUTES = (11, 12, 13)  # CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, _HEIGHT, _DEPTH
_LARGE_CLUSTER_ATTRIBUTE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8  # thread blocks; larger clusters need the attribute
_FREE_SHARED = 48 << 10  # bytes of shared memory, static and dynamic; more needs the attribute

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


@cached(4096)
def spread(shared: int, blocks: int, device: int) -> int:
    """The bytes of dynamic shared memory to request so that the thread blocks of a launch spread evenly over
    the SMs; at least `shared`.

    A launch that overlaps the previous one (PDL) would otherwise place too many blocks on the first SMs that
    become free."""
    facts = device_of(device)
    if device == SIMULATED or facts.capability < extended_launch.CAPABILITY:
        return shared
    return max(shared, (facts.shared_bytes + 1024) // (-(-blocks // facts.sms) + 1) - 896)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SetupError(
            "there is no GPU to run kernels on: torch.cuda.is_available() is False (`cukern doctor` says "
            "more)"
        )


def load(
    name: str, cubin: Cubin, params: tuple[Param, ...], device: int, attribute: Attribute = 0
) -> tuple[Launch, Any]:
    """Load a cubin on a GPU. Returns `launch(grid, block, shared_bytes, *args)`, which launches on torch's
    current stream, and the cupy.RawKernel, or None without CuPy. `attribute`: EARLY, TOGETHER or the shape of
    a cluster, see extended_launch.py, or 0."""
    with _loading(name, cubin, device):
        raw = _raw_kernel(cubin) if bindings.has_cupy() else None
        function = raw.kernel.ptr if raw else bindings.function_of(cubin.code, cubin.symbol)
        loaded = Loaded(function, name, cubin, params, device, attribute)
    return _debugged(loaded, name) if SYNC or NVTX else loaded, raw


@contextlib.contextmanager
def _loading(name: str, cubin: Cubin, device: int) -> Iterator[None]:
    """Make the GPU current. A driver's error becomes a LaunchError, which names the kernel."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # creates torch's context, which the module must belong to
        try:
            yield
        except (bindings.driver().CUDADriverError, bindings.CUDADriverError) as error:
            major, minor = torch.cuda.get_device_capability(device)
            raise LaunchError(
                f"{name} compiled for {cubin.arch} does not load on {torch.cuda.get_device_name(device)}, "
                f"which is sm_{major}{minor}: {error}. A cubin runs on GPUs of its major version, PTX on its "
                f"target and later ones that the driver knows; a target such as sm_90a only on that one"
            ) from None
        except OSError as error:
            raise SetupError(
                f"{name} cannot be written to a temporary file ({error}): set TMPDIR to a folder that can be "
                f"written"
            ) from error


def layout_of(name: str, cubin: Cubin, device: int) -> list[tuple[int, int]]:
    """The offset and the size in bytes of each parameter of a cubin's kernel."""
    with _loading(name, cubin, device):
        try:
            return bindings.layout_of(cubin.code, cubin.symbol)
        except AttributeError:
            raise SetupError(
                f"{name}: only drivers of CUDA 12.4 and later know the parameters of a cubin"
            ) from None


def _raw_kernel(cubin: Cubin) -> Any:
    """The cupy.RawKernel of a cubin. It is never unloaded: a captured CUDA graph may use the function."""
    cupy = bindings.cupy()
    # CuPy caches modules by path, so each load uses a new one
    with tempfile.TemporaryDirectory(prefix="cukern-") as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin.code)
        raw = cupy.RawModule(path=str(file)).get_function(cubin.symbol)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))
    return raw


def _debugged(launch: "Loaded", name: str) -> Launch:
    def run(grid: Dim, block: Dim, *args: Any) -> None:
        with torch.cuda.nvtx.range(name) if NVTX else contextlib.nullcontext():
            launch(grid, block, *args)
        if SYNC:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise LaunchError(
                    f"{name} <<<grid {grid}, block {block}>>> failed while it ran: {error}"
                ) from error

    run.variable = launch.variable  # type: ignore[attr-defined]
    return run


class _Arguments(threading.local):
    """A buffer for packed kernel arguments. Each thread has its own, because forward and backward run on
    different threads.

    `parts`: the buffer, the array of pointers to the arguments or 0, and the description of the buffer or 0.
    The description is 0.15 us faster. But a cooperative launch in a CUDA graph capture accepts only the
    pointers. And where a parameter is aligned to more than 16 bytes, as a CUtensorMap is, only the driver
    knows the offsets: ptxas aligns its address, and the first parameter is at 0x210."""

    def __init__(self, packed: bytes, params: tuple[Param, ...], attribute: Attribute):
        buffer = ctypes.create_string_buffer(packed, max(1, len(packed)))
        start, self._size = ctypes.addressof(buffer), ctypes.c_size_t(len(packed))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
        self._extra = (ctypes.c_void_p * 5)(1, start, 2, ctypes.addressof(self._size), 0)
        self._each = (ctypes.c_void_p * len(params))(*(start + offset for offset in offsets(params)))
        pointers = attribute == extended_launch.TOGETHER or any(p.size and p.align > 16 for p in params)
        view = memoryview(buffer)  # `struct` fills it 0.02 us faster
        self.parts = (
            (view, ctypes.addressof(self._each), 0) if pointers else (view, 0, ctypes.addressof(self._extra))
        )


def _allow_cluster(function: int, device: int, attribute: Attribute) -> Dim:
    """The cluster shape of a kernel, in thread blocks: that of the launch, else that of the source. Permits
    clusters larger than the portable size."""
    driver = bindings.driver()
    if device_of(device).capability < 90:
        if isinstance(attribute, tuple):
            raise LaunchError(
                f"cluster={attribute} needs compute capability 9.0, this GPU has "
                f"{device_of(device).capability / 10}"
            )
        return 1, 1, 1
    x, y, z = (max(1, driver.funcGetAttribute(one, function)) for one in _CLUSTER_ATTRIBUTES)
    if isinstance(attribute, tuple):
        x, y, z = attribute
    if x * y * z > _PORTABLE_CLUSTER:
        driver.funcSetAttribute(function, _LARGE_CLUSTER_ATTRIBUTE, 1)
    return x, y, z


class Loaded:
    """A kernel on one GPU. A call launches it on torch's current stream. `bound` gives a launch whose last
    arguments are packed once.

    `most_shared`: a list of the bytes of dynamic shared memory that are allowed so far."""

    def __init__(
        self, function: int, name: str, cubin: Cubin, params: tuple[Param, ...], device: int,
        attribute: Attribute,
    ):  # fmt: skip
        self.driver = bindings.driver()
        self.context = self.driver.ctxGetCurrent()
        self.function, self.name, self.params = function, name, params
        self.device, self.attribute = device, attribute
        self.layout, self.cluster = packer(params), _allow_cluster(function, device, attribute)
        self.pack, self.arguments = (
            self.layout.pack_into,
            _Arguments(bytes(self.layout.size), params, attribute),
        )
        capability = device_of(device).capability
        self.launch = (
            attribute and extended_launch.launcher(capability, attribute)
        ) or self.driver.launchKernel
        self.static_shared = self.driver.funcGetAttribute(_STATIC_SHARED_ATTRIBUTE, function)
        self.most_shared, self.growing = [_FREE_SHARED - self.static_shared], threading.Lock()

    def __call__(self, grid: Dim, block: Dim, shared: int, *args: Any) -> None:
        try:
            if shared > self.most_shared[0]:
                self._allow_shared(shared)
            (gx, gy, gz), (bx, by, bz) = grid, block
            buffer, each, extra = self.arguments.parts
            self.pack(buffer, 0, *args)
            self.launch(
                self.function, gx, gy, gz, bx, by, bz, shared, current_stream(self.device), each, extra
            )
            if (recorder := recording.local.recorder) is not None:
                recorder.launch(self, self.params, grid, block, shared, args)
        except (struct.error, OverflowError):
            beyond = self._beyond_limits(grid, block, shared)
            error = (
                launch_error(self.name, grid, block, shared, beyond)
                if beyond
                else explain_misfit(self.name, self.params, args)
            )
            raise error from None
        except self.driver.CUDADriverError as error:
            refuse_fork(self.name, error)
            before = self.driver.ctxGetCurrent()
            # another GPU is the current one; or a new thread, such as autograd's, has no context
            if before != self.context:
                self.driver.ctxSetCurrent(self.context)
                try:
                    return self(grid, block, shared, *args)
                finally:
                    if before:
                        self.driver.ctxSetCurrent(before)
            beyond = self._beyond_limits(grid, block, shared) or [str(error)]
            raise launch_error(self.name, grid, block, shared, beyond) from None

    def bound(self, grid: Dim, block: Dim, shared: int, *last: Any) -> Launch:
        first = self.params[: len(self.params) - len(last)]
        nothing = [bytes(p.size) if p.size else 0 for p in first]
        pack, filled = (
            packer(first).pack_into,
            _Arguments(self.layout.pack(*nothing, *last), self.params, self.attribute),
        )
        (gx, gy, gz), (bx, by, bz) = grid, block
        function, device, launch, stream = self.function, self.device, self.launch, current_stream
        if shared > self.most_shared[0]:
            self._allow_shared(shared)

        def run_bound(*args: Any) -> None:
            buffer, each, extra = filled.parts
            try:
                pack(buffer, 0, *args)
                launch(function, gx, gy, gz, bx, by, bz, shared, stream(device), each, extra)
            except (struct.error, OverflowError, self.driver.CUDADriverError):
                self(grid, block, shared, *args, *last)  # raises the explained error, or sets the context

        return run_bound

    def variable(self, symbol: str) -> torch.Tensor:
        """The memory of a variable, as bytes."""
        with torch.cuda.device(self.device):
            address, size = bindings.variable_of(self.function, symbol)
            interface = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
            return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device="cuda")

    def _allow_shared(self, shared: int) -> None:
        with self.growing:
            if shared > self.most_shared[0]:
                self.driver.funcSetAttribute(self.function, _MAX_SHARED_ATTRIBUTE, shared)
                self.most_shared[0] = shared

    def _beyond_limits(self, grid: Dim, block: Dim, shared: int) -> list[str]:
        threads = self.driver.funcGetAttribute(_MAX_THREADS_ATTRIBUTE, self.function)
        return exceeded(
            grid,
            block,
            shared,
            threads,
            device_of(self.device).shared_bytes,
            self.cluster,
            self.static_shared,
        )


def refuse_fork(name: str, error: Exception | None = None) -> None:
    """Raise the LaunchError that explains `error`, if this process was forked after CUDA was initialised."""
    if torch.cuda._is_in_bad_fork():
        raise LaunchError(
            f"{name}: CUDA was initialised before this process was forked; start it with the 'spawn' method"
        ) from error
