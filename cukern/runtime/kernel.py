"""Kernel: one __global__ function of a .cu file, or one instance of a template, that launches on torch's memory and stream."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from cukern.runtime import backend, checks, extended_launch, interop, signature
from cukern.runtime.compiler import Cubin, Ptx, SetupError, arch_of, compile_kernel, compile_ptx
from cukern.runtime.forks import no_fork
from cukern.runtime.sources import Source, kernels_dir
from cukern.runtime.tensor_map import TensorMap

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _outside_graphs(function: _Function) -> _Function:
    """torch.compiler.disable without the import of torch._dynamo: torch.compile breaks its graph at this function."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "a kernel of cukern.load runs outside of graphs"  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


class Kernel:
    """One kernel, compiled and loaded at its first use on each GPU.

    Call it with tensors or DLPack arrays, which are checked against the kernel's parameter list. cukern's own ops use `on(device)`, which
    takes pointers as integers and checks nothing.
    """

    def __init__(self, source: Source, name: str, pdl: bool = False, together: bool = False):
        self.source, self.name, self.pdl = source, name, pdl
        self._attribute = extended_launch.EARLY if pdl else extended_launch.TOGETHER if together else 0
        self._params: dict[int, tuple[signature.Param, ...]] = {}
        self._loaded: dict[int, backend.Launch] = {}
        self._raw: dict[int, Any] = {}  # by GPU, cupy.RawKernel
        self._lock = threading.RLock()  # a signal handler may request the same kernel

    def __repr__(self) -> str:
        return f"<cukern kernel {self.name}({' '.join(self._text().split())}) of {self.source.path}>"

    def _text(self) -> str:
        """The parameter list as text, if the source contains it without macros."""
        base = self.name.partition("<")[0].strip()
        return self.source.kernels.get(base) or self.source.included_kernels.get(base, "")

    @property
    def params(self) -> tuple[signature.Param, ...]:
        """The parameters as the compiler saw them for the current GPU or the simulator. Compiles the kernel if necessary.

        Raises TypeError for a parameter type that cannot be passed, and CompileError.
        """
        return self.params_on(backend.current_device() if torch.cuda.is_available() else backend.SIMULATED)

    def params_on(self, device: int) -> tuple[signature.Param, ...]:
        params = self._params.get(device)
        if params is None:
            ptx = functools.partial(self._ptx, device)
            params = self._params[device] = signature.params(self.name, self._compiled(device).signature, self._text(), ptx)
        return params

    def _compiled(self, device: int) -> Cubin | Ptx:
        if device == backend.SIMULATED:
            return compile_ptx(self.source, self.name)
        return self.compile(arch_of(torch.cuda.get_device_capability(device)))

    def _ptx(self, device: int) -> tuple[str, str]:
        """The text and the symbol of the kernel in PTX, for the layout of structs among its parameters."""
        compiled = self._compiled(device)
        if not isinstance(compiled, Ptx):
            compiled = compile_ptx(self.source, self.name, compiled.arch.replace("sm_", "compute_"))
        return compiled.text, compiled.symbol

    def compile(self, arch: str) -> Cubin:
        """The machine code and resource report for an architecture such as "sm_90a". Needs no GPU."""
        return compile_kernel(self.source, self.name, arch)

    def on(self, device: int) -> backend.Launch:
        """The kernel on the GPU number `device`, or in the simulator: `launch(grid, block, shared_bytes, *args)`, pointers as integers.

        Compiles and loads it if necessary. Raises RuntimeError for an unloaded kernel inside a CUDA graph capture.
        """
        loaded = self._loaded.get(device)
        if _collected is not None and device == backend.SIMULATED:
            _collected[self.name] = self
            return _not_launched
        if loaded is None:
            with no_fork(), self._lock:
                loaded = self._loaded.get(device) or self._load(device)
        return loaded

    def _load(self, device: int) -> backend.Launch:
        if device != backend.SIMULATED and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{self.name} is not loaded, and a CUDA graph capture cannot load it: call cukern.warmup() first")
        code, params = self._compiled(device), self.params_on(device)
        if isinstance(code, Ptx):
            launch = backend.load_simulated(self.name, code, params)
        else:
            launch, self._raw[device] = backend.load(self.name, code, params, device, self._attribute)
        self._loaded[device] = launch
        return launch

    @property
    def raw(self) -> Any:
        """The kernel as a cupy.RawKernel of the current GPU, for its attributes, such as `kernel.raw.num_regs`, and for launches by CuPy:

            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel.raw((grid,), (block,), (cupy.asarray(x), numpy.int32(n)))

        CuPy checks no types and launches on its own current stream. Raises SetupError without a GPU, and the errors of `on`.
        """
        if not torch.cuda.is_available():
            raise SetupError(f"{self.name} has no cupy.RawKernel: there is no GPU, and the simulator runs PTX without CuPy")
        device = backend.current_device()
        self.on(device)
        return self._raw[device]

    @_outside_graphs
    def __call__(self, *args: Any, grid: int | Iterable[int], block: int | Iterable[int], shared: int = 0) -> None:
        """Launch the kernel.

        Args:
            args: one per parameter. For a pointer: a CUDA tensor or DLPack array of the pointee's dtype, or None for a null pointer.
                Nothing is copied; the kernel gets the address of the first element. For a scalar: a number. For a vector such as float2:
                a tuple. For a struct by value: bytes, a ctypes.Structure or a numpy record of its size; for a CUtensorMap: a
                `cukern.tensor_map`. For a pointer to pointers: a tensor of int64 addresses. In the simulator: CPU tensors, and the kernel
                may access only them, and those of an open `cukern.sim.memory.scope([...])`, which addresses in structs need.
            grid, block: one to three ints: thread blocks of the grid, and threads per block, along x, y, z.
            shared: bytes of dynamic shared memory.

        Raises TypeError or ValueError for a wrong argument, LaunchError for a launch that exceeds a limit of the GPU, and in the simulator
        cukern.sim.Fault for a bug in the kernel.
        """
        dims, shared = (_dim("grid", grid), _dim("block", block)), checks.integer("shared", shared, 0)
        first = _device(args)
        params = self.params_on(first)
        if len(args) != len(params):
            raise signature.explain_misfit(self.name, params, args)
        tensors = [_tensor(self.name, p, a) for p, a in zip(params, args, strict=True)]
        device = _common_device(self.name, params, tensors, first)
        if device != backend.SIMULATED or not backend.simulating():
            backend.require_gpu()
        launch = self.on(device)
        all_ = zip(params, args, tensors, strict=True)
        values = [t.data_ptr() if p.pointer and t is not None else _value(self.name, p, a) for p, a, t in all_]
        with backend.simulated_memory(tensors) if device == backend.SIMULATED else contextlib.nullcontext():
            try:
                launch(*dims, shared, *values)
            except OverflowError:  # for example 1e6 for a __half
                raise signature.explain_misfit(self.name, params, tuple(values)) from None


_collected: dict[str, Kernel] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, Kernel]]:
    """Inside the block, calls on simulated tensors launch nothing. Yields the kernels that they would launch, by name."""
    global _collected
    _collected = {}
    try:
        yield _collected
    finally:
        _collected = None


def planning() -> bool:
    """True inside `collecting`: results are not needed, so one plan may be used for several calls."""
    return _collected is not None


def _not_launched(*_: Any) -> None:
    if _collected is None:
        raise RuntimeError("this launch was planned by cukern.warmup or cukern compile, and cannot run")


_shipped = functools.cache(Source.read)


class Template:
    """The instances of one template in kernels_cu, created on demand: `Template("square.cu", "square_v2")[torch.float32, 4]`.

    `pdl`: programmatic dependent launch; the kernel calls wait_for_previous() of common/ptx/launch.cuh before it accesses global memory.
    `together`: cooperative launch; all thread blocks fit on the GPU and may wait for each other.
    """

    def __init__(self, file: str, name: str, pdl: bool = False, together: bool = False):
        self.file, self.name, self.pdl, self.together = file, name, pdl, together
        self._instances: dict[Any, Kernel] = {}

    def __getitem__(self, key: Any) -> Kernel:
        kernel = self._instances.get(key)
        if kernel is None:
            arguments = ", ".join(cpp(a) for a in (key if isinstance(key, tuple) else (key,)))
            kernel = Kernel(_shipped(kernels_dir() / self.file), f"{self.name}<{arguments}>", self.pdl, self.together)
            kernel = self._instances.setdefault(key, kernel)  # of two threads that create it, both get the same one
        return kernel


def load(path: str | Path, name: str | None = None) -> Kernel:
    """The kernel `name` of a .cu file, as a callable.

    Args:
        path: the file. `#include "..."` searches its folder and cukern's kernels_cu.
        name: the __global__ function; a template instance is written as in C++, "scale<float, 4>". Optional if the file has one kernel.

    Returns a Kernel: `kernel(out, x, n, grid=..., block=...)`. An edit of the file takes effect at the next `load`.
    Raises FileNotFoundError, and ValueError for a name that the file does not have. The first launch may raise CompileError, and TypeError
    for a parameter type that cannot be passed: a pointer to a type that no tensor has. void* accepts any tensor.

    Headers are found through #include lines and literals in #define lines. <cstdint>, which NVRTC lacks, is provided. Host code (functions
    that use torch:: or <<<...>>>, bindings, `main`) is skipped, so the source of a torch extension or a program loads unchanged.
    """
    return _kernel(Source.read(path), name)


def compile(source: str, name: str | None = None) -> Kernel:
    """The kernel `name` of CUDA C++ source text, such as the `cuda_sources` of `torch.utils.cpp_extension.load_inline`; see `load`."""
    if not isinstance(source, str):
        raise TypeError(f"source must be a str of CUDA C++, got {type(source).__name__}")
    return _kernel(Source.from_text(source), name)


def _kernel(source: Source, name: str | None) -> Kernel:
    names = list(source.kernels)
    if name is None:
        if len(names) != 1:
            raise ValueError(f"{source.path} has {len(names)} kernels ({', '.join(names)}): name one")
        return Kernel(source, names[0])
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {checks.brief(name)}")
    base, angle, rest = name.strip().partition("<")
    return Kernel(source, _qualified(source, base.strip(), names) + angle + rest)


def _qualified(source: Source, base: str, names: Sequence[str]) -> str:
    """The kernel's name with its namespace. A name that only occurs somewhere in the text is accepted, because a macro may define it."""
    last = base.rpartition("::")[2]
    same = [n for n in (*names, *source.included_kernels) if n == base or n.endswith(f"::{base}")]
    if not same and not (last and any(last in text for text in (source.text, *source.program.files.values()))):
        raise ValueError(f"{source.path} has no __global__ function {base!r}; it has {', '.join(names) or 'none'}")
    if len(set(same)) > 1 and base not in same:
        raise ValueError(f"{source.path} has several kernels {base!r} ({', '.join(same)}): write the namespace")
    return base if base in same or not same else same[0]


def _device(args: Iterable[Any]) -> int:
    """The device of the first tensor on a GPU. Without one: the simulator if it is enabled or there is no GPU, else the current GPU."""
    for a in args:
        a = a.tensor if isinstance(a, TensorMap) else a
        if isinstance(a, torch.Tensor) and a.is_cuda:
            return a.get_device()
    return backend.SIMULATED if backend.simulating() or not torch.cuda.is_available() else backend.current_device()


def _common_device(kernel: str, params: Iterable[signature.Param], tensors: Iterable[torch.Tensor | None], default: int) -> int:
    names = {t.get_device(): p.name for p, t in zip(params, tensors, strict=True) if t is not None}
    if len(names) > 1:
        places = [f"{name} on {'the CPU' if device == backend.SIMULATED else f'cuda:{device}'}" for device, name in names.items()]
        raise ValueError(f"{kernel}: arguments on several devices: {', '.join(places)}")
    return next(iter(names), default)


def _tensor(kernel: str, param: signature.Param, value: Any) -> torch.Tensor | None:
    """The tensor of a pointer or of a tensor map."""
    if isinstance(value, TensorMap):
        return value.tensor
    return interop.argument(param, value, kernel) if param.pointer and value is not None else None


def _value(kernel: str, param: signature.Param, value: Any) -> Any:
    """The value of a null pointer, a scalar or a struct."""
    if param.pointer:
        return 0
    return checks.flag(str(param), value) if param.ctype == "bool" else signature.by_value(kernel, param, value)


def _dim(name: str, value: int | Iterable[int]) -> backend.Dim:
    dims = tuple(checks.integer(name, d, 1) for d in (value if isinstance(value, Iterable) else (value,)))
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name} must be one to three positive ints, got {value!r}")
    return (*dims, 1, 1)[:3]  # type: ignore[return-value]


def cpp(argument: Any) -> str:
    """A template argument as C++ text: a dtype, a bool or a number."""
    if isinstance(argument, torch.dtype):
        return signature.CTYPES[argument]
    return str(argument).lower() if isinstance(argument, bool) else str(argument)
