"""Compiles one kernel of a .cu file with NVRTC to a cubin, with a report of registers, spills and shared
memory. Needs no GPU.

CuPy's `RawModule(code=...)` is not used to compile: it cannot target sm_90a before NVRTC 12.9, forces
-ftz=true, and its cache does not notice edits of included headers.
"""

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukern.runtime.compile import bindings, cache
from cukern.runtime.compile.cache import Cubin as Cubin
from cukern.runtime.compile.cache import Report as Report
from cukern.runtime.compile.forks import no_fork
from cukern.runtime.compile.hints import hint
from cukern.runtime.compile.signature import PROBE, probe
from cukern.runtime.compile.sources import NOWHERE, Source

_FILE = re.compile(r'^(\s*\.file\s+\d+\s+")([^"]+)', re.MULTILINE)
OPTIONS = ("--std=c++17", "-lineinfo", "--ptxas-options=-v")


class CompileError(RuntimeError):
    """NVRTC could not compile a source. The message contains its log, with file and line."""


class SetupError(RuntimeError):
    """CuPy, NVRTC, the CUDA headers or the driver are missing. The message says what to install."""


@dataclass(frozen=True)
class Ptx:
    """A kernel in PTX with line information, the symbol of its entry, and the mangled types of its
    parameters."""

    text: str
    symbol: str
    signature: str = ""
    removed: Sequence[str] = ()


# By cache key. dict.setdefault is atomic: two threads get the same lock. RLock: a signal handler may request
# the kernel that its own thread is compiling.
_compile_locks: dict[str, contextlib.AbstractContextManager] = {}


def arch_of(capability: tuple[int, int]) -> str:
    """NVRTC's name of an architecture. From 9.0 on the "a" variant, which has the architecture-specific
    instructions, such as wgmma."""
    number = capability[0] * 10 + capability[1]
    return f"sm_{number}a" if number >= 90 else f"sm_{number}"


def compile_kernel(source: Source, name: str, arch: str) -> Cubin:
    """Compile the kernel `name`, such as `square_v2<float, 4>`, for `arch`, or take it from the cache.

    Raises CompileError with the compiler's log, and SetupError if NVRTC is not available.
    """
    key = hashlib.sha256(
        "\0".join((arch, nvrtc_version(), *OPTIONS, name, source.digest())).encode()
    ).hexdigest()
    if cached := cache.read(key):
        return cached
    with no_fork(), _compile_locks.setdefault(key, threading.RLock()):
        cubin = cache.read(key)
        if cubin is None:
            removed = list[str]()
            with compiled(source, (name, probe(name)), arch, removed) as (program, (symbol, signature), log):
                # CuPy drops the last byte of a cubin, a zero, which disassemblers need.
                code = (
                    _shared_ptx(nvrtc().getPTX(program), source)
                    if arch.startswith("compute_")
                    else nvrtc().getCUBIN(program) + b"\0"
                )
            cubin = Cubin(code, symbol, arch, parse_report(log, symbol), signature, removed)
            cache.write(key, cubin)
    return cubin


def compile_ptx(source: Source, name: str, arch: str = "compute_90a") -> Ptx:
    """Compile the kernel `name` to PTX for the virtual architecture `arch`, or take it from the cache. Raises
    as compile_kernel does."""
    compiled = compile_kernel(source, name, arch)
    text = _FILE.sub(lambda match: match[1] + source.path_of(match[2]), compiled.code.decode())
    return Ptx(text, compiled.symbol, compiled.signature, compiled.removed)


def _shared_ptx(code: bytes, source: Source) -> bytes:
    """PTX for the cache, which checkouts with the same content share: it names files relative to the
    source."""
    names = {str(path): source.name_of(path) for path in (source.path, *source.program.files)}
    return _FILE.sub(lambda match: match[1] + names.get(match[2], match[2]), code.decode()).encode()


# ---- NVRTC


@functools.cache
def nvrtc_version() -> str:
    """Version of the NVRTC in use, from its wheel's metadata if possible, because loading NVRTC imports
    CuPy."""
    found = []
    for wheel in ("nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(importlib.metadata.version(wheel))
    return "+".join(found) or ".".join(map(str, nvrtc().getVersion()))


@functools.cache
def nvrtc() -> Any:
    """CuPy's binding of NVRTC, or without CuPy one of the same functions. Raises SetupError with the command
    that installs what is missing."""
    wheels = [str(file) for root in _wheel_folders() for file in root.glob("*/lib/libnvrtc.so.[0-9]*")]
    try:
        if not bindings.has_cupy():
            return bindings.Nvrtc([*wheels, "libnvrtc.so.13", "libnvrtc.so.12"])
        binding = _cupy_nvrtc()
        try:
            binding.getVersion()
        except Exception:
            for library in wheels:  # CuPy before 14 does not search them, but finds a loaded library
                ctypes.CDLL(library)
            binding.getVersion()
    except SetupError:
        raise
    except Exception as error:
        command = "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
        raise SetupError(f"NVRTC cannot be loaded ({error}). Run: {command}") from error
    return binding


def _cupy_nvrtc() -> Any:
    try:
        return bindings.cupy().cuda.nvrtc
    except Exception as error:
        raise SetupError(f"CuPy cannot be imported ({error}). Run: pip install cupy-cuda12x") from error


def _wheel_folders() -> list[Path]:
    """The folders into which pip installs NVIDIA's wheels."""
    wheels = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (wheels.submodule_search_locations or ())] if wheels else []


@functools.cache
def cuda_include() -> Path:
    """The folder of cuda_fp16.h: from pip's wheels for NVRTC's CUDA version, else from a toolkit."""
    major = nvrtc().getVersion()[0]
    folders = [root / sub / "include" for root in _wheel_folders() for sub in (f"cu{major}", "cuda_runtime")]
    folders += [Path(os.environ[v]) / "include" for v in ("CUDA_PATH", "CUDA_HOME") if v in os.environ]
    folders.append(Path("/usr/local/cuda/include"))
    for folder in folders:
        if (folder / "cuda_fp16.h").is_file():
            return folder
    wheel = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
    raise SetupError(f"no cuda_fp16.h in {', '.join(map(str, folders))}. Run: pip install {wheel}")


@functools.cache
def _more_includes() -> list[Path]:
    """The folders of other headers of NVIDIA: CCCL for cuda::std, cuda::atomic and CUB, from its wheel or
    from CuPy, which ships a copy; NVCC for mma.h; curand_kernel.h."""
    folders = [cuda_include() / "cccl"]  # CUDA 13
    folders += [
        root / part / "include" for root in _wheel_folders() for part in ("cuda_cccl", "cuda_nvcc", "curand")
    ]
    spec = importlib.util.find_spec("cupy")  # not imported: cupy takes 0.3 s
    for root in map(Path, (spec and spec.submodule_search_locations) or ()):
        folders += [root / "_core/include/cupy/_cccl" / part for part in ("libcudacxx", "cub", "thrust")]
    return [folder for folder in folders if folder.is_dir()]


@contextlib.contextmanager
def compiled(
    source: Source, names: Sequence[str], arch: str, removed: list[str] | None = None
) -> Iterator[tuple[int, list[str], str]]:
    """Compile several kernels of a source as one NVRTC program. Yields the program, the kernels' symbols and
    the log. Raises as compile_kernel does. Appends the host functions that had to be taken out to
    `removed`."""
    headers = source.program.headers
    program, log = _try(source, source.program.text, headers, names, arch)
    host = None
    while program is None and source.foreign:
        if host is None:
            texts = {source.host_program.name: source.host_program.text, **source.host_program.headers}
        elif host.cut(log):
            texts = dict(host.texts)
        else:
            break
        program, log = _try(source, texts.pop(source.program.name), texts, names, arch)
        if program is None and host is None:
            try:
                from cukern.runtime.compile.host_code import HostCode

                host = HostCode(source.host_program)
            except ImportError as error:
                log += (
                    f"\nhost functions are found with libclang, which cannot be loaded ({error}). Run: pip "
                    f"install libclang"
                )
                break
    taken = host.removed if host else ()
    if program is None:
        log = _explained(log, source) + "".join(
            f"\ntaken out as host code: {', '.join(taken)}" for _ in taken[:1]
        )
        raise CompileError(f"{names[0]} does not compile for {arch} with NVRTC {nvrtc_version()}\n{log}")
    if removed is not None:
        removed.extend(taken)
    try:
        symbols = [nvrtc().getLoweredName(program, name) for name in names]
        yield program, [s.decode() if isinstance(s, bytes) else s for s in symbols], log
    finally:
        nvrtc().destroyProgram(program)


def _try(
    source: Source, text: str, headers: Mapping[str, str], names: Sequence[str], arch: str
) -> tuple[int | None, str]:
    """NVRTC's program, or None if it does not compile, and the log."""
    binding = nvrtc()
    includes_ = [cuda_include(), *_more_includes()]
    options: tuple[str, ...] = (
        *OPTIONS,
        f"--gpu-architecture={arch}",
        *(f"-I{folder}" for folder in includes_),
        *source.options,
    )
    if source.foreign:
        options += ("--device-as-default-execution-space",)
    if binding.getVersion() >= (12, 9):
        options += ("--no-cache",)  # a hit in NVRTC's own cache (new in 12.9) prints no resource report
    texts, includes = [text.encode() for text in headers.values()], [name.encode() for name in headers]
    program = binding.createProgram(text + PROBE, source.program.name, texts, includes)
    done = False
    try:
        for name in names:
            binding.addNameExpression(program, name)
        try:
            binding.compileProgram(program, options)
            done = True
        except binding.NVRTCError as error:
            return None, binding.getProgramLog(program).strip() or str(error)
        return program, binding.getProgramLog(program)
    finally:
        if not done:
            binding.destroyProgram(program)


def _explained(log: str, source: Source) -> str:
    """NVRTC's log with real file names and hints."""
    log = log.replace(f"{NOWHERE}/<", "<").replace(f"{NOWHERE}/", "/").replace(": Not a directory", "")
    # follows from the other errors
    consequence = r"__nv_name_map\(\d+\): error:[^\n]*\n[^\n]*cukern_signature[^\n]*\n[^\n]*\n+"
    log = re.sub(consequence, "", log)
    log = re.sub(r"ptxas (?:info|  ).*\n", "", log.replace("\0", "")).rstrip()
    log += hint(log)
    missing = re.search(r'cannot open source file "([^"]+)"', log)
    if missing and (source.folder / missing[1]).is_file():
        log += (
            f"\ncukern found no #include or #define with the literal name {missing[1]!r}: write one, so "
            f"that it can follow edits"
        )
    wheel = header_wheel(missing[1], nvrtc().getVersion()[0]) if missing else ""
    return log + (f"\nThe header is in one of NVIDIA's wheels. Run: pip install {wheel}" if wheel else "")


def header_wheel(header: str, major: int) -> str:
    """The wheel of NVIDIA that has a header, for a major version of CUDA, or ""."""
    parts = {
        "nv/": "cuda-cccl",
        "cuda/": "cuda-cccl",
        "cub/": "cuda-cccl",
        "thrust/": "cuda-cccl",
        "curand": "curand",
    }
    parts |= {"crt/": "cuda-nvcc" if major == 12 else "cuda-crt"}
    part = next((part for start, part in parts.items() if header.startswith(start)), "")
    return part and f"nvidia-{part}{'-cu12' if major == 12 else ''}"


def parse_report(log: str, symbol: str) -> Report:
    """The resources of a kernel from the log of `ptxas -v`: the lines after the symbol's "Compiling entry
    function"."""
    block = log.split(f"Compiling entry function '{symbol}'", 1)[-1].split("Compiling entry function", 1)[0]
    # in the order of Report
    fields = ("registers", "bytes spill stores", "bytes spill loads", "bytes stack frame", "bytes smem")
    return Report(
        *(int(number[1]) if (number := re.search(rf"(\d+) {field}", block)) else 0 for field in fields)
    )
