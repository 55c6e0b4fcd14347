"""Facts about the environment of a measurement: GPU, driver, library versions, commit."""

import contextlib
import datetime
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from cukern.runtime.compile.compiler import SetupError, nvrtc_version
from cukern.runtime.device import fmas_cycle, tf32_flops

_TREE = Path(__file__).resolve().parents[2]  # the source tree, or site-packages


def device() -> torch.device:
    """The current GPU, else the CPU."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def short_name() -> str:
    """The GPU's name as a file name: "h200" for "NVIDIA H200"; "cpu" without a GPU."""
    words = re.findall(r"[a-z0-9]+", (gpu_name() or "cpu").lower())
    return "-".join(w for w in words if w != "nvidia")


@contextlib.contextmanager
def float32_products(tf32: bool = False) -> Iterator[None]:
    """Inside the block, float32 matrix products of torch use float32, or TF32."""
    before, wanted = torch.get_float32_matmul_precision(), "high" if tf32 else "highest"
    if before != wanted:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_float32_matmul_precision(before)


def with_cukern() -> dict[str, str]:
    """The environment variables of a child process that imports this cukern."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(_TREE), os.environ.get("PYTHONPATH")))),
    }


def memory() -> int:
    """Bytes of memory of the current GPU, else of this machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(device()).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def peak_flops(place: torch.device, dtype: torch.dtype, tf32: bool = False) -> float | None:
    """Peak floating-point operations per second; an FMA counts as two. float32 and float64: without tensor
    cores, at the highest clock. 16-bit types and TF32: with tensor cores and without sparsity, from data
    sheets. None for the CPU, an unknown clock or GPU."""
    if place.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(place)
    half = dtype.itemsize == 2
    if half or (tf32 and dtype == torch.float32 and properties.major >= 8):
        peak = tf32_flops(gpu_name() or "")
        return peak and peak * (2 if half else 1)
    fmas = fmas_cycle(10 * properties.major + properties.minor, dtype)
    khz = getattr(properties, "clock_rate", 0)
    mhz = "" if khz else smi("clocks.max.sm") or ""
    hz = khz * 1e3 if khz else float(mhz) * 1e6 if mhz.replace(".", "").isdigit() else None
    return None if hz is None else properties.multi_processor_count * fmas * 2 * hz


@functools.cache
def smi(query: str) -> str | None:
    """One value of `nvidia-smi --query-gpu` for the first GPU, or None."""
    program = shutil.which("nvidia-smi")
    out = output(program, f"--query-gpu={query}", "--format=csv,noheader,nounits") if program else None
    return out.splitlines()[0].strip() if out else None


def output(*command: str, cwd: Path | None = None) -> str | None:
    """The stripped output of a program, or None if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cupy_wheels() -> dict[str, str]:
    """The installed distributions that contain the package cupy, and their versions. Does not import CuPy."""
    names = importlib.metadata.packages_distributions().get("cupy", ())
    return {name.lower(): importlib.metadata.version(name) for name in names}


def facts() -> dict[str, str | bool | None]:
    """The last columns of a record. `dirty`: True if files other than results differ from the commit. The
    date is UTC."""
    commit = status = None
    if (_TREE / ".git").exists():  # not installed; a repository further up belongs to another project
        commit = output("git", "rev-parse", "HEAD", cwd=_TREE)
        status = output("git", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results", cwd=_TREE)
    try:
        nvrtc: str | None = nvrtc_version()
    except SetupError:
        nvrtc = None
    return {
        "commit": commit,
        "dirty": None if status is None else bool(status),
        "gpu": gpu_name(),
        "driver": smi("driver_version"),
        "torch": torch.__version__,
        "cupy": "+".join(cupy_wheels().values()) or None,
        "nvrtc": nvrtc,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
