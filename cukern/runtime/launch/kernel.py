"""Kernel: one __global__ function of a .cu file, or one instance of a template, that launches on torch's
memory and stream."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from cukern.runtime import checks
from cukern.runtime.compile import signature
from cukern.runtime.compile.compiler import Cubin, Ptx, SetupError, arch_of, compile_kernel, compile_ptx
from cukern.runtime.compile.forks import no_fork
from cukern.runtime.compile.sources import Source, kernels_dir
from cukern.runtime.device import setting
from cukern.runtime.launch import arguments, backend, driver, extended_launch, limits
from cukern.runtime.recording import off as replays_off

_Function = TypeVar("_Function", bound=Callable[..., Any])


def __tracebackhide__(caught: Any) -> bool:
    """pytest leaves out the frames of this file if the simulator reports a fault."""
    return hasattr(caught.value, "_render_traceback_")


def _outside_graphs(function: _Function) -> _Function:
    """torch.compiler.disable without the import of torch._dynamo: torch.compile breaks its graph at this
    function."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    reason = "a kernel of cukern.load runs outside of graphs"
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError, AttributeError):
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function


class Kernel:
    """One kernel, compiled and loaded at its first use on each GPU.

    Call it with tensors or DLPack arrays, which are checked against the kernel's parameter list. cukern's own
    ops use `on(device)`, which takes pointers as integers and checks nothing.
    """

    def __init__(
        self,
        source: Source,
        name: str,
        pdl: bool = False,
        together: bool = False,
        cluster: limits.Dim | None = None,
    ):
        self.source, self.name, self.pdl, self._cluster = source, name, pdl, cluster
        self._attribute = cluster or (
            extended_launch.EARLY if pdl else extended_launch.TOGETHER if together else 0
        )
        self._of_cluster: dict[limits.Dim, Kernel] = {}
        self._has_variables = False  # that variable() gave out
        self.quick: arguments.Quick = arguments.never
        self._quicks: dict[int, arguments.Quick] = {}  # by GPU; `quick` is that of the last launch
        self._params: dict[int, tuple[signature.Param, ...]] = {}
        self._loaded: dict[int, driver.Launch] = {}
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
        """The parameters as the compiler saw them for the current GPU or the simulator. Compiles the kernel
        if necessary.

        Raises TypeError for a parameter type that cannot be passed, and CompileError.
        """
        return self.params_on(driver.current_device() if torch.cuda.is_available() else backend.SIMULATED)

    @property
    def removed(self) -> tuple[str, ...]:
        """The host functions whose bodies were taken out so that the file compiles for the current GPU or the
        simulator, with their lines, such as "launch (scale.cu:12-20)". Compiles the kernel if necessary.
        Raises CompileError."""
        return tuple(
            self._compiled(
                driver.current_device() if torch.cuda.is_available() else backend.SIMULATED
            ).removed
        )

    def params_on(self, device: int) -> tuple[signature.Param, ...]:
        params = self._params.get(device)
        if params is None:
            ptx = functools.partial(self._ptx, device)
            params = self._params[device] = signature.params(
                self.name, self._compiled(device).signature, self._text(), ptx
            )
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

    def on(self, device: int) -> driver.Launch:
        """The kernel on the GPU number `device`, or in the simulator: `launch(grid, block, shared_bytes,
        *args)`, pointers as integers.

        Compiles and loads it if necessary. Raises RuntimeError for an unloaded kernel inside a CUDA graph
        capture.
        """
        loaded = self._loaded.get(device)
        if _collected is not None and device == backend.SIMULATED:
            _collected[self.name] = self
            return functools.partial(_not_launched, self.name)
        if loaded is None:
            with no_fork(), self._lock:
                loaded = self._loaded.get(device) or self._load(device)
        return loaded

    def _load(self, device: int) -> driver.Launch:
        if device != backend.SIMULATED and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.name} is not loaded, and a CUDA graph capture cannot load it: call cukern.warmup() "
                f"first"
            )
        code, params = self._compiled(device), self.params_on(device)
        if isinstance(code, Ptx):
            launch = backend.load_simulated(self.name, code, params, self._cluster)
        else:
            launch, self._raw[device] = driver.load(self.name, code, params, device, self._attribute)
        self._loaded[device] = launch
        return launch

    @property
    def raw(self) -> Any:
        """The kernel as a cupy.RawKernel of the current GPU, for its attributes, such as
        `kernel.raw.num_regs`, and for launches by CuPy:

            with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                kernel.raw((grid,), (block,), (cupy.asarray(x), numpy.int32(n)))

        CuPy checks no types and launches on its own current stream. Raises SetupError without a GPU, and the
        errors of `on`.
        """
        if not torch.cuda.is_available():
            raise SetupError(
                f"{self.name} has no cupy.RawKernel: there is no GPU, and the simulator runs PTX without CuPy"
            )
        device = driver.current_device()
        self.on(device)
        if self._raw[device] is None:
            raise SetupError(
                f"{self.name} has no cupy.RawKernel: CuPy is not installed. Run: pip install cupy-cuda12x"
            )
        return self._raw[device]

    def variable(self, name: str, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """The memory of a `__constant__` or `__device__` variable on the current GPU or in the simulator, as
        a tensor of one dimension. Nothing is copied: later launches read what is written to the tensor.

            kernel.variable("weights", torch.float32).copy_(weights)

        Each kernel has variables of its own, also next to another kernel of the same file. They keep their
        values from launch to launch.

        Args:
            name: as in the source, such as "n::table", or the symbol in the PTX.
            dtype: of the elements; the bytes by default, since compiled code knows no types.

        Raises ValueError for a name that the compiled kernel does not have, and for a dtype that does not
        divide the variable's bytes; TypeError; and the errors of `on`.
        """
        if not isinstance(name, str) or not isinstance(dtype, torch.dtype):
            raise TypeError(f"variable() takes a str and a dtype, got {name!r} and {dtype!r}")
        from cukern.runtime.compile.machine_code import variable  # its patterns take 4 ms to compile

        if self._of_cluster:
            raise ValueError(self._no_cluster())
        self._has_variables = True
        device = arguments.device(())
        launch, code = self.on(device), self._compiled(device)
        symbol = variable(self.name, code.text.encode() if isinstance(code, Ptx) else code.code, name)
        memory = launch.variable(symbol)  # type: ignore[attr-defined]
        if memory.numel() % dtype.itemsize:
            raise ValueError(
                f"{name} has {memory.numel()} bytes, not a multiple of {dtype}'s {dtype.itemsize}"
            )
        return memory.view(dtype)

    def _no_cluster(self) -> str:
        return (
            f"{self.name}: a launch with cluster= has variables of its own: to use variable(), declare "
            f"__cluster_dims__ in the source"
        )

    @_outside_graphs
    def __call__(
        self,
        *args: Any,
        grid: int | Iterable[int] | None = None,
        block: int | Iterable[int] | None = None,
        shared: int = 0,
        cluster: int | Iterable[int] | None = None,
        stream: Any = None,
    ) -> None:
        """Launch the kernel. `kernel[grid, block](*args)`, `[grid, block, shared]` and `[grid, block, shared,
        stream]` do the same.

        Args:
            args: one per parameter. For a pointer: a CUDA tensor, or an array of another library on the GPU
                (DLPack: JAX, CuPy; or `__cuda_array_interface__`: Numba), of the pointee's dtype, or None for
                a null pointer. Nothing is copied; the kernel gets the address of the first element. A JAX
                array fits only a pointer to const. For a scalar: a number. For a vector such as float2: a
                tuple. For a struct by value: bytes, a ctypes.Structure or a numpy record of its size; for a
                CUtensorMap: a `cukern.tensor_map`. For a pointer to pointers: a tensor of int64 addresses. In
                the simulator: CPU tensors, and the kernel may access only them, and those of an open
                `cukern.sim.memory.scope([...])`, which addresses in structs need. The version of a tensor
                whose pointer is not to const increases, as that of torch's in-place ops does: autograd raises
                if it had saved the tensor. Write `const T*` for what the kernel only reads. Memory that is
                written through a tensor map or an address in a tensor or struct is not known: call
                torch.autograd.graph.increment_version for it.
            grid, block: one to three ints: thread blocks of the grid, and threads per block, along x, y, z.
            shared: bytes of dynamic shared memory; for more than 48 KiB the kernel's limit is raised.
            cluster: one to three ints: thread blocks of a cluster, for a kernel without `__cluster_dims__`.
                The grid is a multiple of it.
            stream: a torch.cuda.Stream, or None for torch's current stream. Not used in the simulator.

        Raises TypeError or ValueError with the kernel's signature for a wrong argument, LaunchError for a
        launch that exceeds a limit of the GPU, and in the simulator cukern.sim.Fault for a bug in the kernel.
        """
        quick = self.quick
        if cluster is not None:
            self._clustered(arguments.dim("cluster", cluster))(
                *args, grid=grid, block=block, shared=shared, stream=stream
            )
        elif stream is not None or not quick(args, grid, block, shared):
            self._launch_checked(args, grid, block, shared, stream)

    def _launch_checked(self, args: tuple[Any, ...], grid: Any, block: Any, shared: Any, stream: Any) -> None:
        """Launch with arguments that are checked one by one, by errors that explain."""
        if stream is not None and not isinstance(stream, torch.cuda.Stream):
            raise TypeError(
                f"stream must be a torch.cuda.Stream, such as ExternalStream(address), got "
                f"{checks.brief(stream)}"
            )
        first = arguments.device(args)
        if stream is None and self._quicks.get(first, self.quick) is not self.quick:
            self.quick = self._quicks[first]
            if self.quick(args, grid, block, shared):
                return
        params = self.params_on(first)
        if len(args) != len(params):
            raise signature.explain_misfit(self.name, params, args)
        try:
            if grid is None or block is None:
                raise TypeError(
                    "a launch needs grid= and block=, the numbers of thread blocks and of threads per block"
                )
            geometry = (
                arguments.dim("grid", grid),
                arguments.dim("block", block),
                checks.integer("shared", shared, 0),
            )
            tensors = [arguments.tensor(self.name, p, a) for p, a in zip(params, args, strict=True)]
            device = arguments.common_device(self.name, params, tensors, first)
            values = [
                arguments.value(self.name, p, a, t) for p, a, t in zip(params, args, tensors, strict=True)
            ]
        except (TypeError, ValueError) as error:
            raise self._with_signature(error, params) from error.__cause__
        self._launch(device, params, tensors, (*geometry, *values), stream)

    def _launch(
        self,
        device: int,
        params: Sequence[signature.Param],
        tensors: Sequence[Any],
        values: tuple[Any, ...],
        stream: Any,
    ) -> None:
        simulated = device == backend.SIMULATED
        if not simulated:
            driver.refuse_fork(self.name)
        if not simulated or not backend.simulating():
            driver.require_gpu()
        if stream is not None and stream.device_index != device and not simulated:
            raise ValueError(f"{self.name}: the stream is on {stream.device}, the arguments on cuda:{device}")
        launch = self.on(device)
        with (
            backend.simulated_memory(tensors)
            if simulated
            else torch.cuda.stream(stream)
            if stream
            else contextlib.nullcontext()
        ):
            try:
                launch(*values)
            except OverflowError:  # for example 1e6 for a __half
                raise self._with_signature(
                    signature.explain_misfit(self.name, tuple(params), values[3:]), params
                ) from None
            except (TypeError, ValueError) as error:
                raise self._with_signature(error, params) from None
        increment_version(arguments.written(params, tensors))
        if isinstance(launch, driver.Loaded) and device not in self._quicks:
            self.quick = self._quicks[device] = arguments.quick(launch, params, device)

    def __getitem__(self, launch: Any) -> Callable[..., None]:
        """`kernel[grid, block]`, `kernel[grid, block, shared]` or `kernel[grid, block, shared, stream]`, as
        in <<<...>>> of CUDA C++."""
        if type(launch) is tuple and len(launch) == 2:  # 1 us less than the general case
            grid, block = launch
            return functools.partial(_launch_at, self, grid, block)
        if not isinstance(launch, tuple) or not 2 <= len(launch) <= 4:
            raise TypeError(
                f"{self.name}[grid, block] or {self.name}[grid, block, shared, stream], got "
                f"{self.name}[{launch!r}]"
            )
        return functools.partial(
            self, **dict(zip(("grid", "block", "shared", "stream"), launch, strict=False))
        )

    def _with_signature(self, error: Exception, params: Sequence[signature.Param]) -> Exception:
        return type(error)(f"{error}; the kernel is {self.name}({', '.join(map(str, params))})")

    def _clustered(self, cluster: limits.Dim) -> "Kernel":
        """The kernel with launches of this cluster shape. Raises ValueError for a kernel whose own shape is
        another."""
        if self._attribute:
            raise ValueError(f"{self.name} is launched with another attribute: it takes no cluster={cluster}")
        kernel = self._of_cluster.get(cluster)
        if self._has_variables:
            raise ValueError(self._no_cluster())
        if kernel is None:
            new = type(self)(self.source, self.name, cluster=cluster)
            kernel = self._of_cluster.setdefault(cluster, new)
        return kernel


@_outside_graphs
def _launch_at(kernel: Kernel, grid: Any, block: Any, *args: Any) -> None:
    quick = kernel.quick
    if not quick(args, grid, block, 0):
        kernel._launch_checked(args, grid, block, 0, None)


_collected: dict[str, Kernel] | None = None
_record: Callable[..., object] | None = None


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, Kernel]]:
    """Inside the block, calls on simulated tensors launch nothing. Yields the kernels that they would launch,
    by name.

    Cached plans hold launches. They are forgotten before and after the block, which replaces launches.
    """
    global _collected
    with replays_off(), setting():
        _collected = {}
        try:
            yield _collected
        finally:
            _collected = None


@contextlib.contextmanager
def recording(record: Callable[..., object] | None) -> Iterator[None]:
    """Inside the block, each launch that `collecting` leaves out is given to `record`: name, grid, block,
    shared bytes, arguments."""
    global _record
    before, _record = _record, record
    try:
        yield
    finally:
        _record = before


def planning() -> bool:
    """True inside `collecting`: results are not needed, so one plan may be used for several calls."""
    return _collected is not None


def _not_launched(name: str, *launch: Any) -> None:
    if _collected is None:
        raise RuntimeError("this launch was planned by cukern.warmup or cukern compile, and cannot run")
    if _record is not None:
        _record(name, *launch)


_shipped = functools.cache(Source.read)


class Template:
    """The instances of one template in kernels_cu, created on demand: `Template("square.cu",
    "square_v2")[torch.float32, 4]`.

    `pdl`: programmatic dependent launch; the kernel calls wait_for_previous() of common/ptx/launch.cuh before
    it accesses global memory. `together`: cooperative launch; all thread blocks fit on the GPU and may wait
    for each other.
    """

    def __init__(self, file: str, name: str, pdl: bool = False, together: bool = False):
        self.file, self.name, self.pdl, self.together = file, name, pdl, together
        self._instances: dict[Any, Kernel] = {}

    def __getitem__(self, key: Any) -> Kernel:
        kernel = self._instances.get(key)
        if kernel is None:
            arguments = ", ".join(cpp(a) for a in (key if isinstance(key, tuple) else (key,)))
            kernel = Kernel(
                _shipped(kernels_dir() / self.file), f"{self.name}<{arguments}>", self.pdl, self.together
            )
            # of two threads that create it, both get the same one
            kernel = self._instances.setdefault(key, kernel)
        return kernel


def cpp(argument: Any) -> str:
    """A template argument as C++ text: a dtype, a bool or a number."""
    if isinstance(argument, torch.dtype):
        return signature.CTYPES[argument]
    return str(argument).lower() if isinstance(argument, bool) else str(argument)
