"""The cache of compiled kernels on disk: <key>.json names <hash of the code>.cubin, or .ptx; both are written whole or not at all."""

import functools
import hashlib
import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Report:
    """What ptxas says that one kernel uses: registers a thread, bytes of spills and stack a thread, bytes of static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: machine code for one architecture, the symbol to look up in it, and its report.

    `signature` is the mangled C++ type of the kernel's parameters, as the compiler saw them.
    """

    code: bytes
    symbol: str
    arch: str
    report: Report
    signature: str = ""


def virtual(arch: str) -> bool:
    """Whether NVRTC makes PTX for it, not machine code."""
    return arch.startswith("compute_")


@functools.cache
def cache_dir() -> Path:
    """Where cubins are kept: $CUKERN_CACHE_DIR, else the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(os.environ.get("CUKERN_CACHE_DIR") or Path(home) / "cukern").absolute()


def _code_path(folder: Path, sha256: str, arch: str) -> Path:
    return folder / (sha256 + (".ptx" if virtual(arch) else ".cubin"))


def read(key: str) -> Cubin | None:
    folder = cache_dir()
    try:
        entry = json.loads((folder / f"{key}.json").read_bytes())
        code = _code_path(folder, entry["sha256"], entry["arch"]).read_bytes()
        if hashlib.sha256(code).hexdigest() != entry["sha256"]:
            raise ValueError("the machine code is not the one that was written")
        return Cubin(code, entry["symbol"], entry["arch"], Report(**entry["report"]), entry["signature"])
    except OSError:
        return None  # not there; where the folder cannot be used at all, writing will say so
    except (ValueError, KeyError, TypeError, AttributeError):
        _warn_once(f"cukern found corrupt entries in its cache {folder} and compiles their kernels anew")
        return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def write(key: str, cubin: Cubin) -> None:
    folder = cache_dir()
    sha256 = hashlib.sha256(cubin.code).hexdigest()
    entry = {"sha256": sha256, "symbol": cubin.symbol, "arch": cubin.arch, "signature": cubin.signature, "report": asdict(cubin.report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(_code_path(folder, sha256, cubin.arch), cubin.code)
        _write_atomically(folder / f"{key}.json", json.dumps(entry).encode())
    except OSError as error:
        _warn_once(f"cukern cannot write its cache {folder} ({error.strerror}): every process compiles its kernels anew")


def _write_atomically(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
