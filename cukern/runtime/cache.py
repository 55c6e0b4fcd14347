"""The cache of compiled kernels on disk: one file an entry, written whole or not at all, that holds a SHA-256 over its key and its content.

Nothing is read that another user can have written: folders and files must belong to this user or to root, and no other may write them.
(The parents of a folder do not matter: who replaces the folder leaves one of another owner.) Where the first folder cannot be written, as
that of a container's image, it is read, and new entries go to the next one.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SUFFIX = ".kernel2"  # 2 is the format: entries of another format have another name, and are neither read nor overwritten
TEMPORARY = ".tmp-cukern-"
_LARGEST = 256 << 20  # bytes of an entry; what has more is none
_DAY = 24 * 3600
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


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


# ---- folders


@functools.cache
def cache_dir() -> Path:
    """The first choice: $CUKERN_CACHE_DIR, else the user's cache folder, else one for temporary files."""
    return next(candidates())


def candidates() -> Iterator[Path]:
    """Folders for compiled kernels, the best first. A user of a container may have no home."""
    if named := os.environ.get("CUKERN_CACHE_DIR"):
        yield Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home, "cukern")
    yield temporary_dir()


def temporary_dir() -> Path:
    """The user's own folder among the temporary files."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    with contextlib.suppress(OSError):  # nothing at all can be written
        tempfile.gettempdir()
    return Path(tempfile.tempdir or "/tmp", f"cukern-{user}").absolute()


def house_cupy() -> None:
    """CuPy makes ~/.cupy when it is imported, and cannot be imported where it cannot: give it another folder there."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            Path("~/.cupy/kernel_cache").expanduser().mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            own = temporary_dir()
            os.environ["CUPY_CACHE_DIR"] = tempfile.mkdtemp(prefix="cukern-cupy-") if refusal(own) else str(own / "cupy")


def refusal(folder: Path) -> str | None:
    """Why a folder is not used, None if it is; makes the folder if it is not there."""
    try:
        if not folder.exists():
            folder.mkdir(0o755 if folder == cache_dir() else 0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # The owner of a link matters too: anyone can lay one in /tmp that leads to a folder of ours.
        return _foreign(status, folder.lstat().st_uid) if stat.S_ISDIR(status.st_mode) else "Not a directory"
    except OSError as error:
        return error.strerror or str(error)


def folders() -> Iterator[tuple[Path, bool]]:
    """The folders to look in, in order, and whether they can be written: those before the last cannot."""
    for folder in candidates():
        if why := refusal(folder):
            _warn_once(f"cukern does not use the cache {folder} ({why}); `cukern doctor` says what to do")
            continue
        writable = os.access(folder, os.W_OK | os.X_OK)
        yield folder, writable
        if writable:
            return


def target() -> Path | None:
    """The folder that new entries go to, if there is one."""
    return next((folder for folder, writable in folders() if writable), None)


def _foreign(status: os.stat_result, *owners: int) -> str | None:
    """How another user may have written it."""
    if hasattr(os, "geteuid"):
        for owner in {status.st_uid, *owners} - {0, os.geteuid()}:
            return f"it belongs to user {owner}"
        if status.st_mode & 0o022:
            return f"its mode {status.st_mode & 0o7777:o} lets other users write"
    return None


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


# ---- entries


def read(key: str) -> Cubin | None:
    for folder, _ in folders():
        try:
            return _decode(key, _content(folder / (key + SUFFIX)))
        except FileNotFoundError:
            continue
        except OSError as error:
            why = error.strerror
        except _UNREADABLE:
            why = "corrupt"
        _warn_once(f"cukern found entries in its cache {folder} that it cannot use ({why}) and compiles their kernels anew")
    return None


def corrupt(entry: Path) -> bool:
    """Whether the file of an entry is not as it was written."""
    try:
        _decode(entry.name.removesuffix(SUFFIX), _content(entry))
    except (OSError, *_UNREADABLE):
        return True
    return False


def write(key: str, cubin: Cubin) -> None:
    known = asdict(cubin)
    code = known.pop("code")
    body = json.dumps(known).encode() + b"\n" + code
    folder = target()
    if folder is None:
        return _warn_once("cukern has no cache that it can write: every process compiles its kernels anew; `cukern doctor` says more")
    try:
        _sweep(folder)
        _write_atomically(folder / (key + SUFFIX), _digest(key, body) + b"\n" + body)
    except OSError as error:
        _warn_once(f"cukern cannot write its cache {folder} ({error.strerror}): every process compiles its kernels anew")


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(f"{key}{SUFFIX}\n".encode() + body).hexdigest().encode()


def _decode(key: str, content: bytes) -> Cubin:
    digest, _, body = content.partition(b"\n")
    if digest != _digest(key, body):
        raise ValueError("not what was written for this key")
    known, _, code = body.partition(b"\n")
    entry = json.loads(known)
    return Cubin(code=code, **{**entry, "report": Report(**entry["report"])})


def _content(path: Path) -> bytes:
    """Raises OSError or ValueError for what is no readable file of ours. O_NONBLOCK: a FIFO must not make us wait."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise ValueError("no file of an entry")
        if why := _foreign(status):
            raise PermissionError(1, why)
        return file.read(status.st_size)


def _write_atomically(path: Path, content: bytes) -> None:
    temporary = path.with_name(TEMPORARY + os.urandom(8).hex())
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(content)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the interrupt may come when it has its name already
            os.unlink(temporary)
        raise


@functools.cache
def _sweep(folder: Path) -> None:
    """Remove what killed processes left. What is younger, another process may be writing."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DAY:
                        os.unlink(entry)
