"""Triton kernels in the simulator: a driver that Triton takes for a GPU's, and that launches the PTX of a
kernel on CPU tensors.

Triton asks the active driver for its target, and gives it what it compiled to load and to launch. `block`
makes this driver the active one. Triton's last stage, ptxas, is left out: what would be the cubin is the
PTX."""

import contextlib
import functools
import importlib.metadata
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cukern.runtime.compile.compiler import Ptx
from cukern.runtime.compile.signature import Param, by_value
from cukern.runtime.launch import tensor_map
from cukern.sim import inductor, tracebacks
from cukern.sim.faults import Fault, NotSimulated
from cukern.sim.launch import Launch, load
from cukern.sim.memory import regions

TESTED = ("3.9",)  # versions of Triton
# bytes of shared memory
ARCHES = {
    "sm_80": 166912,
    "sm_86": 101376,
    "sm_89": 101376,
    "sm_90": 232448,
    "sm_100": 232448,
    "sm_120": 101376,
}
CONFIGS = ("first", "all")
_MOST_ADDRESSES = 4096  # of a tensor of pointers
_CTYPES = {
    "i1": "bool",
    "i8": "signed char",
    "i16": "short",
    "i32": "int",
    "i64": "long long",
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
}
_CTYPES |= {
    "u1": "bool",
    "u8": "unsigned char",
    "u16": "unsigned short",
    "u32": "unsigned int",
    "u64": "unsigned long long",
}
_CTYPES |= {"fp32": "float", "f32": "float", "fp64": "double"}
_DTYPES = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "i1": torch.bool,
    "i8": torch.int8,
    "u8": torch.uint8,
}
_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPES |= {
    f"{sign}{n}": getattr(torch, f"{'u' * (sign == 'u')}int{n}") for sign in "iu" for n in (16, 32, 64)
}
# Triton writes loads and stores as inline assembly. LLVM counts on from the right line, which is given before
# it.
_INLINE_ASM, _LOC = (
    re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL),
    re.compile(r"^\s*\.loc\s.*$", re.MULTILINE),
)

__tracebackhide__ = operator.methodcaller("errisinstance", tracebacks.Report)


@contextlib.contextmanager
def block(arch: str, configs: str, debug: bool, torch_compile: bool) -> Iterator[None]:
    """See `cukern.sim.triton`."""
    if arch not in ARCHES:
        raise ValueError(f"arch must be one of {', '.join(ARCHES)}, got {arch!r}")
    if configs not in CONFIGS:
        raise ValueError(f"configs must be one of {', '.join(CONFIGS)}, got {configs!r}")
    for name, flag in (("debug", debug), ("torch_compile", torch_compile)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be a bool, got {flag!r}")
    triton = _triton()
    created, knobs, active = _Created(), triton.knobs, triton.runtime.driver
    interface = triton.runtime.jit.KernelInterface
    driver = _driver(triton, arch, configs == "all", created)
    own = {
        (active, "_active"): driver,
        (knobs.runtime, "add_stages_inspection_hook"): _without_ptxas,
        (knobs.runtime, "debug"): debug or knobs.runtime.debug,
        (interface, "__getitem__"): _launched,
    }
    before = {(holder, name): getattr(holder, name) for holder, name in own}
    for (holder, name), value in own.items():
        setattr(holder, name, value)
    try:
        compiled = inductor.block(triton, driver, created) if torch_compile else contextlib.nullcontext()
        with compiled, created:
            yield
    finally:
        for (holder, name), value in before.items():
            setattr(holder, name, value)


@functools.cache
def _triton() -> Any:
    """The package; warns once if its version is not a tested one. Raises ImportError."""
    try:
        import triton
        import triton.knobs
        import triton.runtime.jit
    except ImportError as error:
        raise ImportError(
            f"cukern.sim.triton needs Triton, which runs without a GPU: pip install triton ({error})"
        ) from None
    if not tested():
        message = f"cukern.sim.triton is tested with Triton {', '.join(TESTED)}; this is {triton.__version__}"
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    return triton


def tested() -> bool:
    return importlib.metadata.version("triton").startswith(tuple(f"{version}." for version in TESTED))


def _without_ptxas(*of_a_backend: Any) -> Any:
    """Triton's hook that may change the stages of a compilation. Without arguments it gives a part of the key
    of Triton's cache."""
    if not of_a_backend:
        return "cukern", "'cukern'"
    of_a_backend[1]["cubin"] = lambda ptx, metadata: ptx.encode()
    return None


def _launched(kernel: Any, grid: Any) -> Callable[..., Any]:
    """kernel[grid]: as Triton's own, for NumPy arrays too. What an autotuner chooses here is not chosen on a
    GPU."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        tuners, inner = [], kernel
        while hasattr(inner, "fn") and not isinstance(inner.fn, type(launch)):
            tuners += [inner] if hasattr(inner, "cache") and hasattr(inner, "configs") else []
            inner = inner.fn
        before = [(tuner.cache, getattr(tuner, "cache_results", False)) for tuner in tuners]
        for tuner in tuners:
            tuner.cache, tuner.cache_results = {}, False  # in memory, and on disk
            # Triton would keep the first driver's
            tuner.do_bench = _of_one_launch(_triton().runtime.driver.active)
        try:
            return kernel.run(
                *map(_own, args), grid=grid, warmup=False, **{name: _own(x) for name, x in kwargs.items()}
            )
        except (Fault, NotSimulated) as error:
            if tracebacks.whole():
                raise
            raise error.with_traceback(None) from None
        finally:
            for tuner, (cache, cache_results) in zip(tuners, before, strict=True):
                tuner.cache, tuner.cache_results = cache, cache_results
                del tuner.do_bench

    return launch


def _of_one_launch(driver: Any) -> Callable[..., list[float]]:
    """The driver's benchmark. Once a configuration fits, the others are not even compiled, unless all of them
    are to run."""
    benchmark = driver.get_benchmarker()
    fitting: list[list[float]] = []

    def measure(kernel_call: Callable[[], None], **options: Any) -> list[float]:
        if fitting and not driver.state.every_config:
            return [math.inf] * 3
        fitting.append(benchmark(kernel_call))
        return fitting[-1]

    return measure


def _own(x: Any) -> Any:
    """An argument as Triton takes it."""
    return torch.from_numpy(x) if isinstance(x, np.ndarray) else x.item() if isinstance(x, np.generic) else x


class _Created(regions.Scope):
    """Knows the tensors that torch creates in the block, as long as they live, and which of their bytes are
    initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor, written: bool = True) -> None:
        super().add(tensor, written)
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.numel():
            return
        whole = tensor.untyped_storage()
        start = whole.data_ptr()
        storage = self.storages[start]
        storage.keep.clear()
        storage.extents[:] = [(start, start + whole.nbytes())]
        if start not in self.alive:
            self.alive[start] = StorageWeakRef(whole)
            if not written:
                self._forget_dead()

    def _forget_dead(self) -> None:
        for start in [start for start, storage in self.alive.items() if storage.expired()]:
            del self.alive[start], self.storages[start]

    def find(self, start: int) -> Any:
        if start in self.alive and self.alive[start].expired():
            del self.alive[start], self.storages[start]
        return self.storages.get(start)

    def named_in(self, tensors: list[torch.Tensor]) -> dict[int, Any]:
        """The allocations whose addresses are in a tensor of int64, as those of the matrices of a grouped
        product."""
        found: dict[int, Any] = {}
        for tensor in tensors:
            if tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= _MOST_ADDRESSES:
                self._forget_dead()
                addresses = {int(n) for n in tensor.detach().numpy().reshape(-1)}
                found |= {
                    s: x for s, x in self.storages.items() if any(s <= n < x.extents[0][1] for n in addresses)
                }
        return found


def _driver(triton: Any, arch: str, every_config: bool, created: _Created) -> Any:
    """A driver for Triton. It names its device after the target, so that Triton keeps the kernels of each
    target apart."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    properties = {
        "max_shared_mem": ARCHES[arch],
        "multiprocessor_count": 132,
        "warpSize": 32,
        "max_num_regs": 65536,
    }
    # dry: compile and check, and do not run
    state = SimpleNamespace(dry=False, every_config=every_config)

    def load_binary(name: str, ptx: bytes, shared: int, device: Any) -> tuple[Any, ...]:
        # no module, which would be unloaded
        return None, _INLINE_ASM.sub(lambda asm: _LOC.sub("", asm[0]), ptx.decode()), 0, 0, 1024

    def benchmark(kernel_call: Callable[[], None], **options: Any) -> list[float]:
        """The time of a configuration for the autotuner: its number, which makes it take the first."""
        state.tried = getattr(state, "tried", 0) + 1
        state.dry = not every_config
        try:
            kernel_call()
        finally:
            state.dry = False
        return [float(state.tried)] * 3

    class Driver(DriverBase):
        utils = SimpleNamespace(
            load_binary=load_binary,
            unload_module=lambda module: None,
            get_device_properties=lambda device: properties,
        )

        def __init__(self) -> None:
            super().__init__()
            self.state, self.created = state, created

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            return "CUdeviceptr" if ty[0] == "*" else _CTYPES[ty]

        def launcher_cls(self, src: Any, metadata: Any) -> "_Launcher":
            return _Launcher(src, metadata, triton.runtime.driver)

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)

        def get_current_device(self) -> str:
            return f"cukern {arch}"

        def set_current_device(self, device: Any) -> None:
            pass

        def get_current_stream(self, device: Any = None) -> int:
            return 0

        def get_device_capability(self, device: Any = None) -> tuple[int, int]:
            return divmod(int(arch.removeprefix("sm_")), 10)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def get_device_interface(self) -> Any:
            return torch.cpu

        def get_benchmarker(self) -> Any:
            return benchmark

    return Driver()


@functools.lru_cache(256)
def _loaded(name: str, ptx: str, symbol: str, params: tuple[Param, ...]) -> Launch:
    return load(name, Ptx(ptx, symbol), params, replicated=True)


class _Launcher:
    """Launches one compiled kernel, as Triton calls it. Triton keeps it for later blocks, which have other
    drivers."""

    def __init__(self, src: Any, metadata: Any, driver: Any):
        self.signature, self.metadata, self.driver = src.signature, metadata, driver
        self.name = src.fn.__name__
        self.maps = list(getattr(metadata, "tensordesc_meta", None) or ())

    def __call__(
        self, x: int, y: int, z: int, stream: Any, ptx: str, packed: Any, launch_metadata: Any, enter: Any,
        leave: Any, *args: Any,
    ):  # fmt: skip
        if x * y * z <= 0 or self.driver.active.state.dry:
            return
        params: list[Param] = []
        values: list[Any] = []
        tensors: list[torch.Tensor] = []
        maps = iter(self.maps)
        for (name, type_), value in zip(self.signature.items(), args, strict=True):
            self._argument(str(name), type_, value, params, values, tensors, maps)
        ctas = getattr(self.metadata, "num_ctas", 1)
        for kind in ("global", "profile"):
            bytes_ = getattr(self.metadata, f"{kind}_scratch_size", 0) * x * y * z * ctas
            scratch = torch.empty(max(bytes_, 1) + 128, dtype=torch.uint8, device="cpu")
            scratch = scratch[-scratch.data_ptr() % 128 :]
            params.append(Param(f"{kind} scratch memory", "void", pointer=True))
            values.append(scratch.data_ptr() if bytes_ else 0)
            tensors += [scratch] if bytes_ else []
        if enter is not None:
            enter(launch_metadata)
        launch = _loaded(self.name, ptx, self.metadata.name, tuple(params))
        created = self.driver.active.created
        with regions.scope(tensors) as scope:
            for start, storage in scope.storages.items():
                known = created.find(start)
                storage.written = None if known is None else known.written
            for start, storage in created.named_in(tensors).items():
                scope.storages.setdefault(start, storage)
            launch((x * ctas, y, z), (32 * self.metadata.num_warps, 1, 1), self.metadata.shared, *values)
        if leave is not None:
            leave(launch_metadata)

    def _argument(
        self, name: str, type_: Any, value: Any, params: list, values: list, tensors: list,
        maps: Iterator[Any],
    ) -> None:  # fmt: skip
        """Append what an argument becomes in the kernel's parameters."""
        if isinstance(type_, tuple):
            for i, (inner, one) in enumerate(zip(type_, value, strict=True)):
                self._argument(f"{name}[{i}]", inner, one, params, values, tensors, maps)
        elif type_.startswith("tensordesc"):
            self._descriptor(name, type_, value, params, values, tensors, maps)
        elif type_[0] == "*":
            params.append(Param(name, "void", pointer=True))
            values.append(self._pointer(name, value, tensors))
        elif type_ != "constexpr":
            params.append(Param(name, _CTYPES[type_], pointer=False))
            values.append(by_value(self.name, params[-1], value))

    def _pointer(self, name: str, value: Any, tensors: list) -> int:
        tensor = value if isinstance(value, torch.Tensor) else getattr(value, "base", None)
        if isinstance(tensor, torch.Tensor):
            if tensor.device.type != "cpu":
                raise TypeError(
                    f"{self.name}: argument '{name}' is on {tensor.device}; cukern.sim.triton takes CPU "
                    f"tensors"
                )
            tensors.append(tensor)
        return value if isinstance(value, int) else value.data_ptr()

    def _descriptor(
        self, name: str, type_: str, value: Any, params: list, values: list, tensors: list,
        maps: Iterator[Any],
    ) -> None:  # fmt: skip
        """A tensor descriptor made on the host: a tensor map where the GPU has TMA; else its base, shape and
        strides."""
        shape, strides, nan = list(value.shape), list(value.strides), value.padding == "nan"
        meta = next(maps, None)
        if meta is None:
            flags = [("bool", nan), ("bool", getattr(value, "round_f32_to_tf32", False))]
            parts = [
                ("void", self._pointer(name, value.base, tensors)),
                *(("long long", n) for n in shape + strides),
                *flags,
            ]
        else:
            address = self._pointer(name, value.base, tensors)
            dtype, swizzle = value.base.dtype, tensor_map.SWIZZLES[meta["swizzle"]]
            data = tensor_map.encode(
                -1,
                address,
                dtype,
                tuple(shape),
                tuple(strides),
                tuple(meta["block_size"]),
                swizzle,
                fill="nan" if nan else "zeros",
            )
            parts = [("CUtensorMap", data)]
        parts += [*(("int", n) for n in shape), *(("long long", n) for n in strides)]
        for i, (ctype, part) in enumerate(parts):
            size, align = (tensor_map.BYTES, 64) if ctype == "CUtensorMap" else (0, 0)
            params.append(Param(name if i == 0 else f"{name}.{i}", ctype, ctype == "void", size, align))
            values.append(part)
