"""`cukern doctor`: what is installed, found and missing, and how to mend it."""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import typer

from cukern.bench import environment
from cukern.cli.common import console
from cukern.runtime import cache, compiler
from cukern.runtime.compiler import SetupError
from cukern.runtime.sources import Source, kernels_dir

State = Literal["ok", "absent", "warning", "missing"]
_MARKS = {"ok": "[green]ok[/green]", "absent": "[dim]--[/dim]", "warning": "[yellow]!![/yellow]", "missing": "[red]NO[/red]"}


@dataclass(frozen=True)
class Finding:
    """One line: "absent" is something that one can do without, "missing" is not."""

    state: State
    what: str
    found: str
    mend: str = ""


def doctor() -> None:
    """Say what is installed, found and missing, and how to mend it. Exits with 1 if something needed is missing."""
    findings = list(examine())
    for one in findings:
        console.print(f"{_MARKS[one.state]} [bold]{one.what:<18}[/bold]", end=" ")
        console.print(" ".join(one.found.split()), markup=False, highlight=False, soft_wrap=True)
        if one.mend:
            console.print(f"{'':<22}{one.mend}", markup=False, highlight=False, soft_wrap=True, style="yellow")
    if any(one.state == "missing" for one in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything that cukern needs or can use, in the order in which one would mend it."""
    yield Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "torch", f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'})")
    needed = [
        *_tried("missing", "CuPy", lambda: [_cupy()]),
        *_tried("missing", "NVRTC", lambda: [Finding("ok", "NVRTC", _nvrtc())]),
        *_tried("missing", "CUDA headers", lambda: [Finding("ok", "CUDA headers", str(compiler.cuda_include()))]),
        *_tried("missing", "kernel sources", lambda: [_sources()]),
    ]
    yield from needed
    if not any(one.state == "missing" for one in needed):
        yield from _tried("missing", "compiler", lambda: [_compiles()])
    yield from _tried("warning", "GPU", _gpus)
    yield from _tried("warning", "cache", _caches)
    for what, module, mend in (
        ("Triton", "triton", "a peer in cukern bench, and torch.compile on a GPU: pip install triton"),
        ("matplotlib", "matplotlib", "cukern bench --plot: pip install matplotlib"),
    ):
        yield from _tried("warning", what, lambda: [_package(what, module, mend)], f"pip install --force-reinstall {module}")  # noqa: B023
    yield _program("nvcc", "only the peer load_inline of cukern bench needs it: install the CUDA toolkit")
    yield _program("ncu", "cukern profile --ncu: install Nsight Compute, https://developer.nvidia.com/nsight-compute")
    yield _program("compute-sanitizer", "to look for memory errors and races: install the CUDA toolkit")


def _tried(state: State, what: str, find: Callable[[], Iterable[Finding]], mend: str = "") -> list[Finding]:
    """What is found, or why it cannot be: in a broken installation anything may raise anything."""
    try:
        return list(find())
    except SetupError as error:
        message, _, command = str(error).partition(" Run: ")
        return [Finding(state, what, message, command)]
    except Exception as error:
        return [Finding(state, what, f"{type(error).__name__}: {error}", mend or "install cukern and what it needs into a new environment")]


def _cupy() -> Finding:
    wheels = [f"{name} {version}" for name, version in environment.cupy_wheels().items()]
    found = ", ".join(wheels) or "not installed"
    if len(wheels) > 1:
        names = " ".join(environment.cupy_wheels())
        return Finding("warning", "CuPy", found, f"they overwrite each other's files: pip uninstall {names}, then install one of them")
    if importlib.util.find_spec("cupy") is None:
        return Finding("missing", "CuPy", found, "pip install cupy-cuda12x")
    try:
        cache.house_cupy()
        import cupy  # noqa: F401  that it is there does not say that it works
    except Exception as error:
        return Finding("missing", "CuPy", f"{found}, cannot be imported: {error}", "pip install --force-reinstall cupy-cuda12x")
    return Finding("ok", "CuPy", found if wheels else "from no known wheel")


def _nvrtc() -> str:
    return f"{'.'.join(map(str, compiler.nvrtc().getVersion()))} (wheel or library {compiler.nvrtc_version()})"


def _sources() -> Finding:
    """The .cu files and headers of the package: there, and for this user to read."""
    folder, mend = kernels_dir(), "make the files readable (chmod -R a+rX), or install cukern again"
    files = [*folder.glob("*.cu"), *folder.glob("common/*.cuh")]
    if not files:
        return Finding("missing", "kernel sources", f"none in {folder}", mend)
    for file in files:
        try:
            file.read_bytes()
        except OSError as error:
            return Finding("missing", "kernel sources", f"{file}: {error.strerror}", mend)
    return Finding("ok", "kernel sources", f"{len(files)} files in {folder}")


def _compiles() -> Finding:
    """NVRTC loads more libraries when it compiles."""
    text = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* x) { *x = __float2half(1.f); }\n'
    try:
        with compiler.compiled(Source.from_text(text), ("k",), "sm_80"):
            return Finding("ok", "compiler", "makes machine code")
    except Exception as error:
        return Finding("missing", "compiler", str(error), "pip install --force-reinstall nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12")


def _gpus() -> Iterator[Finding]:
    driver = environment.smi("driver_version")
    if not torch.cuda.is_available():
        yield Finding(
            "absent", "driver", driver or "nvidia-smi is not there", "" if driver else "for a GPU: https://www.nvidia.com/drivers"
        )
        why = "torch is built without CUDA: install a CUDA build, see https://pytorch.org" if torch.version.cuda is None else _why_no_gpu()
        yield Finding("absent", "GPU", "torch.cuda sees none: ops run as plain torch, kernels can only be compiled", why)
        return
    yield Finding("ok", "driver", driver or "there, of an unknown version (no nvidia-smi)")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        old = gpu.major * 10 + gpu.minor < 75
        found = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        yield Finding("warning" if old else "ok", f"GPU {i}", found, "cukern needs compute capability 7.5 or more" if old else "")


def _why_no_gpu() -> str:
    with warnings.catch_warnings(record=True):
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().partition("\n")[0]
    return "CUDA_VISIBLE_DEVICES may hide it"


def _caches() -> Iterator[Finding]:
    """Each folder that is looked into, up to the first that can be written."""
    mend = "set CUKERN_CACHE_DIR to a folder that you can write, and nobody else but root (chmod go-w)"
    for folder in cache.candidates():
        if why := cache.refusal(folder):
            yield Finding("warning", "cache", f"{folder} is not used: {why}", mend)
            continue
        try:
            entries = [file.stat().st_size for file in folder.glob(f"*{cache.SUFFIX}")]
            found = f"{folder}: {len(entries)} kernels, {sum(entries) / 2**20:.1f} MiB"
            if not os.access(folder, os.W_OK):
                yield Finding("ok", "cache", f"{found}, to read; what it does not have goes to the next")
                continue
            with tempfile.TemporaryFile(dir=folder):
                pass
            yield Finding("ok", "cache", found)
        except OSError as error:
            yield Finding("warning", "cache", f"{folder} cannot be used: {error.strerror}", mend)
        return
    yield Finding("warning", "cache", "no folder can be written: every process compiles its kernels anew", mend)


def _package(what: str, module: str, mend: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("absent", what, "not installed", mend)
    return Finding("ok", what, str(getattr(importlib.import_module(module), "__version__", "installed")))


def _program(name: str, mend: str) -> Finding:
    path = shutil.which(name)
    return Finding("ok", name, path) if path else Finding("absent", name, "not on the PATH", mend)
