"""`cukern doctor`: reports what is installed and missing, and how to fix it."""

import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import typer

from cukern.cli.common import console, say
from cukern.runtime.compile import cache
from cukern.runtime.compile.sources import Source, kernels_dir

_MARKS = {
    "ok": "[green]ok[/green]",
    "absent": "[dim]--[/dim]",
    "warning": "[yellow]!![/yellow]",
    "missing": "[red]NO[/red]",
}

_WHEELS = "pip install --force-reinstall nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
_SOURCES = "make the files readable (chmod -R a+rX), or install cukern again"
_OWN_CACHE = "set CUKERN_CACHE_DIR to a folder that you can write, and nobody else but root (chmod go-w)"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `mend`: how to fix it. State "absent" is for optional things, "missing" for
    required ones."""

    state: Literal["ok", "absent", "warning", "missing"]
    what: str
    found: str
    mend: str = ""


def doctor(
    quick: Annotated[
        bool, typer.Option("--quick", help="Import no package and compile nothing: takes half a second.")
    ] = False,
) -> None:
    """Report what is installed and missing, and how to fix it. Exits with 1 if something required is
    missing."""
    findings = list(examine(quick))
    for one in findings:
        console.print(f"{_MARKS[one.state]} [bold]{one.what:<18}[/bold]", end=" ")
        say(_beside(" ".join(one.found.split())))
        if one.mend:
            say(f"{'':<22}{_beside(one.mend)}", "yellow")
    if any(one.state == "missing" for one in findings):
        raise typer.Exit(1)


def _beside(text: str) -> str:
    """The text in the columns from the 23rd on; in a file or a pipe one line."""
    if not console.is_terminal:
        return text
    return textwrap.fill(text, console.width - 22, break_on_hyphens=False).replace("\n", "\n" + 22 * " ")


def examine(quick: bool = False) -> Iterator[Finding]:
    """Everything that cukern needs or can use. `quick`: without importing packages."""
    yield Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")
    if quick:
        yield from _package("torch", "torch", "see https://pytorch.org", quick, "missing")
        yield from _package("CuPy", "cupy", "pip install cupy-cuda12x", quick, "missing")
        yield from _tried("kernel sources", _sources, _SOURCES)
    else:
        yield from _working()
    yield from _tried("cache", _caches, _OWN_CACHE, required=False)
    yield from _package(
        "Triton", "triton", "a peer in cukern bench, and torch.compile on a GPU: pip install triton", quick
    )
    yield from _package("matplotlib", "matplotlib", "cukern bench --plot: pip install matplotlib", quick)
    yield _program("nvcc", "only the peer load_inline of cukern bench needs it: install the CUDA toolkit")
    yield _program(
        "ncu", "cukern profile --ncu: install Nsight Compute, https://developer.nvidia.com/nsight-compute"
    )
    yield _program("compute-sanitizer", "to look for memory errors and races: install the CUDA toolkit")


def _working() -> Iterator[Finding]:
    """The packages that cukern needs, tried by importing them and compiling a kernel, and the GPU. What is
    needed by later entries comes first."""
    import torch

    from cukern.runtime.compile import compiler
    from cukern.runtime.launch.backend import simulating

    simulating()  # reports a wrong CUKERN_BACKEND
    yield Finding(
        "ok",
        "torch",
        f"{torch.__version__} "
        f"({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'})",
    )
    needed = [
        *_tried("CuPy", _cupy, "pip install --force-reinstall cupy-cuda12x"),
        *_tried("NVRTC", _nvrtc, _WHEELS),
        *_tried("CUDA headers", lambda: str(compiler.cuda_include()), _WHEELS),
        *_tried("kernel sources", _sources, _SOURCES),
    ]
    yield from needed
    if not any(one.state == "missing" for one in needed):
        yield from _tried("compiler", _compiles, _WHEELS)
    yield from _tried(
        "GPU", _gpus, "see https://pytorch.org and https://www.nvidia.com/drivers", required=False
    )


def _tried(
    what: str, find: Callable[[], str | Iterable[Finding]], mend: str, required: bool = True
) -> list[Finding]:
    """The result of `find`, or its error as a finding. In a broken installation any call may raise any
    exception."""
    try:
        found = find()
        return [Finding("ok", what, found)] if isinstance(found, str) else list(found)
    except Exception as error:
        message, _, command = str(error).partition(" Run: ")
        text = message if command else f"{type(error).__name__}: {error}"
        return [Finding("missing" if required else "warning", what, text, command or mend)]


def _cupy() -> str | list[Finding]:
    from cukern.bench import environment

    wheels = environment.cupy_wheels()
    found = ", ".join(f"{name} {version}" for name, version in wheels.items()) or "not installed"
    if len(wheels) > 1:
        mend = (
            f"they overwrite each other's files: pip uninstall {' '.join(wheels)}, then install one of them"
        )
        return [Finding("warning", "CuPy", found, mend)]
    if importlib.util.find_spec("cupy") is None:
        return [Finding("missing", "CuPy", found, "pip install cupy-cuda12x")]
    cache.give_cupy_a_cache()
    importlib.import_module("cupy")  # an installed package may fail to import
    return found if wheels else "from no known wheel"


def _nvrtc() -> str:
    from cukern.runtime.compile import compiler

    return (
        f"{'.'.join(map(str, compiler.nvrtc().getVersion()))} (wheel or library {compiler.nvrtc_version()})"
    )


def _sources() -> str:
    """The .cu files and headers of the package exist and can be read."""
    files = [*kernels_dir().rglob("*.cu"), *kernels_dir().rglob("*.cuh")]
    if not files:
        raise FileNotFoundError(f"none in {kernels_dir()}")
    return (
        f"{len(files)} files, {sum(len(file.read_bytes()) for file in files) >> 10} KiB, in {kernels_dir()}"
    )


def _compiles() -> str:
    """Compile a kernel, because NVRTC loads more libraries at its first compilation."""
    from cukern.runtime.compile import compiler

    text = '#include <cuda_fp16.h>\nextern "C" __global__ void k(__half* x) { *x = __float2half(1.f); }\n'
    with compiler.compiled(Source.from_text(text), ("k",), "sm_80"):
        return "makes machine code"


def _gpus() -> Iterator[Finding]:
    import torch

    from cukern.bench import environment

    driver = environment.smi("driver_version")
    if not torch.cuda.is_available():
        yield Finding(
            "absent",
            "driver",
            driver or "nvidia-smi not found",
            "" if driver else "for a GPU: https://www.nvidia.com/drivers",
        )
        found = (
            "torch.cuda sees none: ops run as plain torch; the simulator runs the kernels with "
            "CUKERN_BACKEND=sim"
        )
        yield Finding("absent", "GPU", found, _why_no_gpu())
        return
    yield Finding("ok", "driver", driver or "installed, of an unknown version (no nvidia-smi)")
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        old = gpu.major * 10 + gpu.minor < 75
        found = f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        yield Finding(
            "warning" if old else "ok",
            f"GPU {i}",
            found,
            "cukern needs compute capability 7.5 or more" if old else "",
        )


def _why_no_gpu() -> str:
    import torch

    if torch.version.cuda is None:
        return "torch is built without CUDA: install a CUDA build, see https://pytorch.org"
    with warnings.catch_warnings(record=True):
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            return str(error).strip().partition("\n")[0]
    return "CUDA_VISIBLE_DEVICES may hide it"


def _caches() -> Iterator[Finding]:
    """Each cache folder up to the first one that can be written."""
    for folder in cache.candidates():
        if why := cache.refusal(folder):
            yield Finding("warning", "cache", f"{folder} is not used: {why}", _OWN_CACHE)
            continue
        try:
            sizes = [file.stat().st_size for file in folder.glob(f"*{cache.SUFFIX}")]
            found = f"{folder}: {len(sizes)} kernels, {sum(sizes) / 2**20:.1f} MiB"
            if not os.access(folder, os.W_OK):
                yield Finding("ok", "cache", f"{found}, read-only; new kernels go to the next folder")
                continue
            with tempfile.TemporaryFile(dir=folder):
                yield Finding("ok", "cache", found)
        except OSError as error:
            yield Finding("warning", "cache", f"{folder} cannot be used: {error.strerror}", _OWN_CACHE)
        return
    yield Finding(
        "warning", "cache", "no folder can be written: every process compiles its kernels anew", _OWN_CACHE
    )


def _package(
    what: str, module: str, mend: str, quick: bool, without: Literal["absent", "missing"] = "absent"
) -> list[Finding]:
    def find() -> str | list[Finding]:
        if importlib.util.find_spec(module) is None:
            return [Finding(without, what, "not installed", mend)]
        return (
            "installed"
            if quick
            else str(getattr(importlib.import_module(module), "__version__", "installed"))
        )

    return _tried(what, find, f"pip install --force-reinstall {module}", required=False)


def _program(name: str, mend: str) -> Finding:
    path = shutil.which(name)
    return Finding("ok", name, path) if path else Finding("absent", name, "not on the PATH", mend)
