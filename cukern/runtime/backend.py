"""Loads and launches kernels: on the GPU, or in the simulator for CPU tensors if the user chose it.

CuPy's RawModule loads the machine code. `cupy_backends.cuda.api.driver` launches it with arguments that are packed here. A launch takes
3 us of host time, nearly all of it in the driver; a call of a CuPy RawKernel takes twice as long.
"""

import contextlib
import contextvars
import ctypes
import os
import struct
import tempfile
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cukern.runtime import checks, compiler, extended_launch, recording
from cukern.runtime.compiler import Cubin, Ptx, SetupError
from cukern.runtime.device import SIMULATED, cached, device_of
from cukern.runtime.extended_launch import Attribute
from cukern.runtime.limits import Dim, LaunchError, exceeded, launch_error
from cukern.runtime.signature import Param, explain_misfit, offsets, packer

Launch = Callable[..., None]

SYNC = os.environ.get("CUKERN_SYNC", "0") != "0"  # synchronize after each launch, so that an error names its kernel
NVTX = os.environ.get("CUKERN_NVTX", "0") != "0"  # put each launch in an NVTX range with the kernel's name

_MAX_SHARED_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAX_THREADS_ATTRIBUTE = 0  # CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
_CLUSTER_ATTRIBUTES = (11, 12, 13)  # CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH, _HEIGHT, _DEPTH
_LARGE_CLUSTER_ATTRIBUTE = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_PORTABLE_CLUSTER = 8  # thread blocks; larger clusters need the attribute
_FREE_SHARED = 48 << 10  # bytes of shared memory, static and dynamic; more needs the attribute

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream)


# ---- the simulator

BACKENDS = ("gpu", "sim")
_START = [os.environ.get("CUKERN_BACKEND") or "gpu"]  # checked at first use, so that the command line can report an error
_blocks: contextvars.ContextVar[tuple[list[str], ...]] = contextvars.ContextVar("cukern.backend", default=(_START,))


class _Traced(types.ModuleType):
    """The backend for torch.compile, which cannot trace a context variable. It reads an attribute of a module instead of tracing it, and
    its guard reads the attribute again, in the context of the call."""

    name = property(lambda self: _blocks.get()[-1][0])


_traced = _Traced("cukern.traced")


@contextlib.contextmanager
def backend(name: str) -> Iterator[None]:
    """Choose how CPU tensors are processed: `with cukern.backend("sim"): cukern.square(torch.randn(1000))`.

    Args:
        name: "sim": the simulator runs the CUDA kernels. It raises cukern.sim.Fault for races, out-of-bounds accesses and similar bugs.
            "gpu": CPU tensors use the plain torch reference. Tensors on a GPU always run on the GPU.

    The setting is a context variable. It holds for the thread or asyncio task that opened the block and for tasks started inside it. A
    thread started inside the block does not inherit it, unless it runs in `contextvars.copy_context()`. The backward pass of a simulated
    forward pass is simulated, wherever it is called. The environment variable CUKERN_BACKEND sets the default.

    Raises TypeError for a name that is not a str and ValueError for an unknown name. A wrong CUKERN_BACKEND raises at the first CPU tensor.
    """
    _check("", name)
    mine = [name]  # a list has an identity: blocks in generators may end in any order
    _blocks.set((*_blocks.get(), mine))
    try:
        yield
    finally:
        _blocks.set(tuple(block for block in _blocks.get() if block is not mine))


def _check(where: str, name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of a backend must be a str, got {checks.brief(name)}")
    if name not in BACKENDS:
        raise ValueError(f"{where}there is no backend {name!r}; there are {', '.join(BACKENDS)}")


def simulates(x: torch.Tensor) -> bool:
    """True if kernels on this tensor run in the simulator."""
    return simulating() and x.device.type == "cpu"


def uses_torch(op: str, version: str | None, x: torch.Tensor) -> bool:
    """True if a call uses torch's operations: x is on the CPU and not simulated. Raises ValueError if the call names a version."""
    if x.is_cuda or simulates(x):
        return False
    if version is not None:
        checks.needs_gpu(op, version, x.device)
    return True


def simulating() -> bool:
    """True if CPU tensors go to the simulator. Raises ValueError for a wrong CUKERN_BACKEND."""
    name = _traced.name if torch.compiler.is_dynamo_compiling() else _blocks.get()[-1][0]
    if name not in BACKENDS:
        _check("CUKERN_BACKEND: ", name)
    return name == "sim"


def load_simulated(name: str, ptx: Ptx, params: tuple[Param, ...], cluster: Dim | None = None) -> Launch:
    """The launch function of a kernel in the simulator; see `load`."""
    from cukern import sim

    return sim.load(name, ptx, params, cluster)


def simulated_memory(tensors: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Inside the block, simulated kernels may access these tensors and new ones. Items that are not tensors are ignored."""
    from cukern import sim

    return sim.memory.scope([t for t in tensors if isinstance(t, torch.Tensor)])


# ---- the GPU


@cached(4096)
def spread(shared: int, blocks: int, device: int) -> int:
    """The bytes of dynamic shared memory to request so that the thread blocks of a launch spread evenly over the SMs; at least `shared`.

    A launch that overlaps the previous one (PDL) would otherwise place too many blocks on the first SMs that become free."""
    facts = device_of(device)
    if device == SIMULATED or facts.capability < extended_launch.CAPABILITY:
        return shared
    return max(shared, (facts.shared_bytes + 1024) // (-(-blocks // facts.sms) + 1) - 896)


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SetupError("there is no GPU to run kernels on: torch.cuda.is_available() is False (`cukern doctor` says more)")


def load(name: str, cubin: Cubin, params: tuple[Param, ...], device: int, attribute: Attribute = 0) -> tuple[Launch, Any]:
    """Load a cubin on a GPU. Returns `launch(grid, block, shared_bytes, *args)`, which launches on torch's current stream, and the
    cupy.RawKernel. `attribute`: EARLY, TOGETHER or the shape of a cluster, see extended_launch.py, or 0."""
    cupy = compiler.cupy()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # creates torch's context, which the module must belong to
        try:
            with tempfile.TemporaryDirectory(prefix="cukern-") as folder:  # CuPy caches modules by path, so each load uses a new one
                file = Path(folder, "kernel.cubin")
                file.write_bytes(cubin.code)
                raw = cupy.RawModule(path=str(file)).get_function(cubin.symbol)
        except cupy.cuda.driver.CUDADriverError as error:
            raise LaunchError(f"{name} compiled for {cubin.arch} does not load on {torch.cuda.get_device_name(device)}: {error}") from None
        except OSError as error:
            raise SetupError(
                f"{name} cannot be written to a temporary file ({error}): set TMPDIR to a folder that can be written"
            ) from error
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(raw))  # never unloaded: a captured CUDA graph may use the function
        launch = _launcher(raw.kernel.ptr, name, cubin, params, device, attribute)
    if SYNC or NVTX:
        launch = _debugged(launch, name)
    return launch if torch.cuda.device_count() == 1 else _on_device(launch, device), raw


def bind(launch: Launch, grid: Dim, block: Dim, shared: int, *last: Any) -> Launch:
    """`launch(grid, block, shared, *first, *last)` as a function of `first` alone. The other arguments are packed once."""
    bound = getattr(launch, "bound", None)
    return bound(grid, block, shared, *last) if bound else lambda *first: launch(grid, block, shared, *first, *last)


class Prepared(NamedTuple):
    """What a launch needs besides its arguments. `most_shared`: a list of the bytes of dynamic shared memory that are allowed so far."""

    function: int
    pack: Callable[..., None]
    local: "_Arguments"
    launch: Callable[..., None]
    most_shared: list[int]


def _on_device(launch: Launch, device: int) -> Launch:
    def run(*args: Any) -> None:
        if current_device() == device:
            launch(*args)
        else:
            with torch.cuda.device(device):
                launch(*args)

    if prepared := getattr(launch, "prepared", None):
        run.prepared = prepared  # type: ignore[attr-defined]
    return run


def _debugged(launch: Launch, name: str) -> Launch:
    def run(grid: Dim, block: Dim, *args: Any) -> None:
        with torch.cuda.nvtx.range(name) if NVTX else contextlib.nullcontext():
            launch(grid, block, *args)
        if SYNC:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                raise LaunchError(f"{name} <<<grid {grid}, block {block}>>> failed while it ran: {error}") from error

    return run


class _Arguments(threading.local):
    """A buffer for packed kernel arguments. Each thread has its own, because forward and backward run on different threads.

    `parts`: the buffer, the array of pointers to the arguments or 0, and the description of the buffer or 0. The description is 0.15 us
    faster. But a cooperative launch in a CUDA graph capture accepts only the pointers. And where a parameter is aligned to more than 16
    bytes, as a CUtensorMap is, only the driver knows the offsets: ptxas aligns its address, and the first parameter is at 0x210."""

    def __init__(self, packed: bytes, params: tuple[Param, ...], attribute: Attribute):
        buffer = ctypes.create_string_buffer(packed, max(1, len(packed)))
        start, self._size = ctypes.addressof(buffer), ctypes.c_size_t(len(packed))
        # CU_LAUNCH_PARAM_BUFFER_POINTER, _SIZE, _END
        self._extra = (ctypes.c_void_p * 5)(1, start, 2, ctypes.addressof(self._size), 0)
        self._each = (ctypes.c_void_p * len(params))(*(start + offset for offset in offsets(params)))
        pointers = attribute == extended_launch.TOGETHER or any(p.size and p.align > 16 for p in params)
        view = memoryview(buffer)  # `struct` fills it 0.02 us faster
        self.parts = (view, ctypes.addressof(self._each), 0) if pointers else (view, 0, ctypes.addressof(self._extra))


def _allow_cluster(function: int, device: int, attribute: Attribute) -> Dim:
    """The cluster shape of a kernel, in thread blocks: that of the launch, else that of the source. Permits clusters larger than the
    portable size."""
    from cupy_backends.cuda.api import driver

    if device_of(device).capability < 90:
        if isinstance(attribute, tuple):
            raise LaunchError(f"cluster={attribute} needs compute capability 9.0, this GPU has {device_of(device).capability / 10}")
        return 1, 1, 1
    x, y, z = (max(1, driver.funcGetAttribute(one, function)) for one in _CLUSTER_ATTRIBUTES)
    if isinstance(attribute, tuple):
        x, y, z = attribute
    if x * y * z > _PORTABLE_CLUSTER:
        driver.funcSetAttribute(function, _LARGE_CLUSTER_ATTRIBUTE, 1)
    return x, y, z


def _launcher(function: int, name: str, cubin: Cubin, params: tuple[Param, ...], device: int, attribute: Attribute) -> Launch:
    from cupy_backends.cuda.api import driver

    layout, context, cluster = packer(params), driver.ctxGetCurrent(), _allow_cluster(function, device, attribute)
    pack, stream, arguments = layout.pack_into, current_stream, _Arguments(bytes(layout.size), params, attribute)
    launch = (attribute and extended_launch.launcher(device_of(device).capability, attribute)) or driver.launchKernel
    most_shared, growing = [_FREE_SHARED - cubin.report.shared], threading.Lock()

    def beyond_limits(grid: Dim, block: Dim, shared: int) -> list[str]:
        threads = driver.funcGetAttribute(_MAX_THREADS_ATTRIBUTE, function)
        return exceeded(grid, block, shared, threads, device_of(device).shared_bytes, cluster, cubin.report.shared)

    def run(grid: Dim, block: Dim, shared: int, *args: Any) -> None:
        try:
            if shared > most_shared[0]:
                with growing:
                    if shared > most_shared[0]:
                        driver.funcSetAttribute(function, _MAX_SHARED_ATTRIBUTE, shared)
                        most_shared[0] = shared
            (gx, gy, gz), (bx, by, bz) = grid, block
            buffer, each, extra = arguments.parts
            pack(buffer, 0, *args)
            launch(function, gx, gy, gz, bx, by, bz, shared, stream(device), each, extra)
            if (recorder := recording.active()) is not None:
                recorder.launch(run, params, grid, block, shared, args)
        except (struct.error, OverflowError):
            beyond = beyond_limits(grid, block, shared)
            raise (launch_error(name, grid, block, shared, beyond) if beyond else explain_misfit(name, params, args)) from None
        except driver.CUDADriverError as error:
            refuse_fork(name, error)
            if not driver.ctxGetCurrent():  # a new thread without a context, such as autograd's at the first backward
                driver.ctxSetCurrent(context)
                return run(grid, block, shared, *args)
            raise launch_error(name, grid, block, shared, beyond_limits(grid, block, shared) or [str(error)]) from None

    def bound(grid: Dim, block: Dim, shared: int, *last: Any) -> Launch:
        first = params[: len(params) - len(last)]
        nothing = [bytes(p.size) if p.size else 0 for p in first]
        pack, filled = packer(first).pack_into, _Arguments(layout.pack(*nothing, *last), params, attribute)
        (gx, gy, gz), (bx, by, bz) = grid, block

        def run_bound(*args: Any) -> None:
            if shared > most_shared[0] or recording.active() is not None:
                return run(grid, block, shared, *args, *last)
            buffer, each, extra = filled.parts
            try:
                pack(buffer, 0, *args)
                launch(function, gx, gy, gz, bx, by, bz, shared, stream(device), each, extra)
            except (struct.error, OverflowError, driver.CUDADriverError):
                run(grid, block, shared, *args, *last)  # raises the explained error, or sets the context

        return run_bound

    run.bound = bound  # type: ignore[attr-defined]
    run.prepared = Prepared(function, pack, arguments, launch, most_shared)  # type: ignore[attr-defined]
    return run


def refuse_fork(name: str, error: Exception | None = None) -> None:
    """Raise the LaunchError that explains `error`, if this process was forked after CUDA was initialised."""
    if torch.cuda._is_in_bad_fork():
        raise LaunchError(f"{name}: CUDA was initialised before this process was forked; start it with the 'spawn' method") from error
