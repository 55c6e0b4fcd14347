"""A kernel: one __global__ function of a .cu file, or one instance of a template, ready to be launched on torch's memory and stream."""

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cukern.runtime import backend, checks, extended_launch, interop, signature
from cukern.runtime.compiler import Cubin, arch_of, compile_kernel, compile_ptx
from cukern.runtime.forks import no_fork
from cukern.runtime.sources import Source, kernels_dir


class Kernel:
    """One kernel. Compiled and loaded on first use, for each GPU apart.

    `on(device)` is for cukern's own ops: pointers as integers, no checks. Calling the object is for everyone: tensors and DLPack arrays,
    checked against the kernel's own parameter list.
    """

    def __init__(self, source: Source, name: str, pdl: bool = False, together: bool = False):
        self.source, self.name, self.pdl = source, name, pdl
        self._attribute = extended_launch.EARLY if pdl else extended_launch.TOGETHER if together else 0
        self.params = signature.parse(source, name)
        self._loaded: dict[int, backend.Launch] = {}
        self._lock = threading.RLock()  # a signal handler may want the same kernel

    def __repr__(self) -> str:
        return f"<cukern kernel {self.name}({', '.join(map(str, self.params))}) of {self.source.path}>"

    def compile(self, arch: str) -> Cubin:
        """The machine code and resource report for an architecture such as "sm_90a". Needs no GPU."""
        return compile_kernel(self.source, self.name, arch)

    def on(self, device: int) -> backend.Launch:
        """The kernel on the GPU number `device`, or in the simulator: `launch(grid, block, shared_bytes, *args)`, pointers as integers.

        Compiles and loads it, if that is not done. Raises RuntimeError for an unloaded kernel inside a CUDA graph capture.
        """
        loaded = self._loaded.get(device)
        if loaded is None:
            with no_fork(), self._lock:
                loaded = self._loaded.get(device) or self._load(device)
        return loaded

    def _load(self, device: int) -> backend.Launch:
        if device == backend.SIMULATED:
            self._loaded[device] = backend.load_simulated(self.name, compile_ptx(self.source, self.name), self.params)
            return self._loaded[device]
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.name} is not loaded, and a CUDA graph capture cannot load it: call cukern.warmup() first")
        cubin = self.compile(arch_of(torch.cuda.get_device_capability(device)))
        self._loaded[device] = backend.load(self.name, cubin, self.params, device, self._attribute)
        return self._loaded[device]

    def __call__(self, *args: Any, grid: int | Iterable[int], block: int | Iterable[int], shared: int = 0) -> None:
        """Launch with one's own geometry.

        Args:
            args: one for each parameter of the kernel: a CUDA tensor or DLPack array of the pointee's dtype for a pointer (None for a null
                pointer), a number for a scalar. Nothing is copied; the kernel sees the memory from the first element on. In the simulator:
                CPU tensors, and the kernel may touch nothing but them.
            grid, block: one to three ints: blocks, and threads of a block, along x, y, z.
            shared: bytes of dynamic shared memory.

        Raises TypeError or ValueError for an argument that does not fit, LaunchError for a geometry that the GPU refuses, in the simulator
        also cukern.sim.Fault for a bug of the kernel.
        """
        if len(args) != len(self.params):
            raise signature.explain_misfit(self.name, self.params, args)
        devices: dict[int, str] = {}
        values = [_pointer(p, a, self.name, devices) if p.pointer else a for p, a in zip(self.params, args, strict=True)]
        if len(devices) > 1:
            raise ValueError(f"{self.name}: arguments on several devices: {', '.join(f'{n} on {_place(d)}' for d, n in devices.items())}")
        simulated = backend.simulating() and (not devices or backend.SIMULATED in devices)
        if not simulated:
            backend.require_gpu()
        device = backend.SIMULATED if simulated else next(iter(devices)) if devices else backend.current_device()
        launch, dims = self.on(device), (_dim("grid", grid), _dim("block", block))
        with backend.simulated_memory(args) if simulated else contextlib.nullcontext():
            launch(*dims, shared, *values)


class Template:
    """The instances of one template of kernels_cu, made when first asked for: `Template("square.cu", "square_v2")[torch.float32, 4]`.

    `pdl`: programmatic dependent launch; the kernel calls wait_for_previous() of common/ptx.cuh before it touches global memory.
    `together`: cooperative launch; all blocks fit the GPU, and may wait for one another.
    """

    def __init__(self, file: str, name: str, pdl: bool = False, together: bool = False):
        self.file, self.name, self.pdl, self.together = file, name, pdl, together
        self._instances: dict[Any, Kernel] = {}

    def __getitem__(self, key: Any) -> Kernel:
        kernel = self._instances.get(key)
        if kernel is None:
            arguments = ", ".join(_cpp(a) for a in (key if isinstance(key, tuple) else (key,)))
            kernel = Kernel(Source.read(kernels_dir() / self.file), f"{self.name}<{arguments}>", self.pdl, self.together)
            kernel = self._instances.setdefault(key, kernel)
        return kernel


def load(path: str | Path, name: str | None = None) -> Kernel:
    """The kernel `name` of a .cu file, as a callable.

    Args:
        path: the file. Its `#include "..."` are looked for beside it and in cukern's own kernels_cu.
        name: the __global__ function; a template instance is written as in C++, "scale<float, 4>". May be left out if there is one.

    Returns a Kernel: `kernel(out, x, n, grid=..., block=...)`. An edit of the file takes effect at the next `load`.
    Raises FileNotFoundError, ValueError for a name that the file does not have, TypeError for a parameter type that cannot be passed;
    CompileError comes with the first launch.

    What only a host compiler can read is skipped (functions that use torch:: or <<<...>>>, bindings), so the source of a torch extension
    loads as it stands.
    """
    return _kernel(Source.read(path), name)


def compile(source: str, name: str | None = None) -> Kernel:
    """The kernel `name` of CUDA C++ source text, such as that of a `torch.utils.cpp_extension.load_inline`; see `load`."""
    if not isinstance(source, str):
        raise TypeError(f"source must be a str of CUDA C++, got {type(source).__name__}")
    return _kernel(Source.from_text(source), name)


def _kernel(source: Source, name: str | None) -> Kernel:
    if name is None:
        names = signature.kernel_names(source)
        if len(names) != 1:
            raise ValueError(f"{source.path} has {len(names)} kernels ({', '.join(names)}): name one")
        name = names[0]
    return Kernel(source, name)


def _pointer(param: signature.Param, value: Any, kernel: str, devices: dict[int, str]) -> int:
    if value is None:
        return 0
    tensor = interop.to_torch(param.name, value)
    if not tensor.is_cuda and not backend.simulates(tensor):
        raise ValueError(f"{kernel}: the argument for {param} must be on a GPU, it is on {tensor.device}; {checks.SIMULATOR}")
    if tensor.is_neg() or tensor.is_conj():
        raise ValueError(f"{kernel}: the argument for {param} is a lazy negation or conjugation: pass .resolve_neg().resolve_conj()")
    if param.dtypes and tensor.dtype not in param.dtypes:
        raise TypeError(f"{kernel}: the argument for {param} must be {' or '.join(map(str, param.dtypes))}, it is {tensor.dtype}")
    devices.setdefault(tensor.get_device(), param.name)
    return tensor.data_ptr()


def _place(device: int) -> str:
    return "the CPU" if device == backend.SIMULATED else f"cuda:{device}"


def _dim(name: str, value: int | Iterable[int]) -> backend.Dim:
    dims = tuple(value) if isinstance(value, Iterable) else (value,)
    if not 1 <= len(dims) <= 3 or any(not isinstance(d, int) or d < 1 for d in dims):
        raise ValueError(f"{name} must be one to three positive ints, got {value!r}")
    return (*dims, 1, 1)[:3]  # type: ignore[return-value]


def _cpp(argument: Any) -> str:
    if isinstance(argument, torch.dtype):
        return signature.CTYPES[argument]
    return str(argument).lower() if isinstance(argument, bool) else str(argument)
