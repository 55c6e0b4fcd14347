"""`cukern doctor`: what is installed, found and missing, and how to mend it."""

import importlib.util
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import typer

from cukern.bench import environment
from cukern.cli.common import console
from cukern.runtime import cache, compiler
from cukern.runtime.compiler import SetupError

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
        console.print(one.found, markup=False, highlight=False, soft_wrap=True)
        if one.mend:
            console.print(f"{'':<22}{one.mend}", markup=False, highlight=False, soft_wrap=True, style="yellow")
    if any(one.state == "missing" for one in findings):
        raise typer.Exit(1)


def examine() -> Iterator[Finding]:
    """Everything that cukern needs or can use, in the order in which one would mend it."""
    yield Finding("ok", "Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("ok", "torch", f"{torch.__version__} ({f'CUDA {torch.version.cuda}' if torch.version.cuda else 'built without CUDA'})")
    yield _cupy()
    yield _needed("NVRTC", lambda: f"{'.'.join(map(str, compiler.nvrtc().getVersion()))} (wheel or library {compiler.nvrtc_version()})")
    yield _needed("CUDA headers", lambda: str(compiler.cuda_include()))
    yield from _gpus()
    yield _cache()
    yield _package("Triton", "triton", "a peer in cukern bench, and torch.compile on a GPU: pip install triton")
    yield _package("matplotlib", "matplotlib", "cukern bench --plot: pip install matplotlib")
    yield _program("nvcc", "only the peer load_inline of cukern bench needs it: install the CUDA toolkit")
    yield _program("ncu", "cukern profile --ncu: install Nsight Compute, https://developer.nvidia.com/nsight-compute")
    yield _program("compute-sanitizer", "to look for memory errors and races: install the CUDA toolkit")


def _cupy() -> Finding:
    wheels = [f"{name} {version}" for name, version in environment.cupy_wheels().items()]
    found = ", ".join(wheels) or "not installed"
    if len(wheels) > 1:
        names = " ".join(environment.cupy_wheels())
        return Finding("warning", "CuPy", found, f"they overwrite each other's files: pip uninstall {names}, then install one of them")
    if importlib.util.find_spec("cupy") is None:
        return Finding("missing", "CuPy", found, "pip install cupy-cuda12x")
    try:
        import cupy  # noqa: F401  that it is there does not say that it works
    except Exception as error:
        return Finding("missing", "CuPy", f"{found}, cannot be imported: {error}", "pip install --force-reinstall cupy-cuda12x")
    return Finding("ok", "CuPy", found if wheels else "from no known wheel")


def _needed(what: str, find: Callable[[], str]) -> Finding:
    try:
        return Finding("ok", what, find())
    except SetupError as error:
        message, _, mend = str(error).partition(" Run: ")
        return Finding("missing", what, message, mend)


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


def _cache() -> Finding:
    folder = cache.cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        size = sum(file.stat().st_size for file in folder.glob("*.cubin"))
    except OSError as error:
        found = f"{folder} cannot be written ({error.strerror}): every process compiles its kernels anew"
        return Finding("warning", "cache", found, "set CUKERN_CACHE_DIR to a folder that you may write to")
    return Finding("ok", "cache", f"{folder}: {len(list(folder.glob('*.json')))} kernels, {size / 2**20:.1f} MiB")


def _package(what: str, module: str, mend: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding("absent", what, "not installed", mend)
    return Finding("ok", what, str(getattr(importlib.import_module(module), "__version__", "installed")))


def _program(name: str, mend: str) -> Finding:
    path = shutil.which(name)
    return Finding("ok", name, path) if path else Finding("absent", name, "not on the PATH", mend)
