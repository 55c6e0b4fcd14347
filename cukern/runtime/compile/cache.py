"""The cache of compiled kernels on disk. Each entry is one file, written atomically, with a SHA-256 over its
key and content.

A folder or file is read only if it belongs to this user or to root and no other user has write permission.
(Permissions of parent folders do not matter: another user who replaces the folder becomes its owner.) A
folder that cannot be written, such as one in a container image, is read, and new entries go to the next
folder.
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
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SUFFIX = ".kernel2"  # 2 is the format; entries of another format are neither read nor overwritten
TEMPORARY = ".tmp-cukern-"
_LARGEST = 256 << 20  # bytes; larger files are not entries
_DAY = 24 * 3600
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Report:
    """Resources of a kernel from ptxas: registers and bytes of spills and stack per thread, and bytes of
    static shared memory."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel: its code (PTX if `arch` is virtual), the symbol of its entry, the mangled types of
    its parameters, and the host functions that were taken out of the text."""

    code: bytes
    symbol: str
    arch: str
    report: Report
    signature: str = ""
    removed: Sequence[str] = ()


# ---- folders


def cache_dir() -> Path:
    """The preferred folder."""
    return next(candidates())


def candidates() -> Iterator[Path]:
    """Folders for compiled kernels in order of preference: $CUKERN_CACHE_DIR, the user's cache folder, one
    for temporary files."""
    if named := os.environ.get("CUKERN_CACHE_DIR"):
        yield Path(named).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):  # a user in a container may have no home
        yield Path(home, "cukern")
    yield temporary_dir()


def temporary_dir() -> Path:
    """The user's own folder among the temporary files."""
    user = os.geteuid() if hasattr(os, "geteuid") else "user"
    with contextlib.suppress(OSError):  # no folder can be written
        tempfile.gettempdir()
    return Path(tempfile.tempdir or "/tmp", f"cukern-{user}").absolute()


def give_cupy_a_cache() -> None:
    """Give CuPy another cache folder if it cannot create ~/.cupy, because its import would fail."""
    if "CUPY_CACHE_DIR" not in os.environ:
        try:
            Path("~/.cupy/kernel_cache").expanduser().mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):
            own = temporary_dir()
            os.environ["CUPY_CACHE_DIR"] = (
                tempfile.mkdtemp(prefix="cukern-cupy-") if refusal(own) else str(own / "cupy")
            )


def refusal(folder: Path) -> str | None:
    """The reason why a folder is not used, or None. Creates the folder if it does not exist."""
    try:
        if not folder.exists():
            folder.mkdir(0o755 if folder == cache_dir() else 0o700, parents=True, exist_ok=True)
        status = folder.stat()
        # The owner of a symbolic link matters too: anyone can create one in /tmp that points to the folder.
        return _foreign(status, folder.lstat().st_uid) if stat.S_ISDIR(status.st_mode) else "Not a directory"
    except OSError as error:
        return error.strerror or str(error)


def folders() -> Iterator[tuple[Path, bool]]:
    """The folders to search, in order, and whether each can be written. Only the last one can."""
    for folder in candidates():
        if why := refusal(folder):
            _warn_once(f"cukern does not use the cache {folder} ({why}); `cukern doctor` says what to do")
            continue
        writable = os.access(folder, os.W_OK | os.X_OK)
        yield folder, writable
        if writable:
            return


def target() -> Path | None:
    """The folder for new entries, or None."""
    return next((folder for folder, writable in folders() if writable), None)


def _foreign(status: os.stat_result, *owners: int) -> str | None:
    """The reason why another user could have written the file with this status, or None. `owners`: further
    owners to check."""
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
        _warn_once(
            f"cukern found entries in its cache {folder} that it cannot use ({why}); it compiles these "
            f"kernels again"
        )
    return None


def corrupt(entry: Path) -> bool:
    """True if the file of an entry was changed since it was written."""
    try:
        _decode(entry.name.removesuffix(SUFFIX), _content(entry))
    except (OSError, *_UNREADABLE):
        return True
    return False


def write(key: str, cubin: Cubin) -> None:
    facts = asdict(cubin)
    code = facts.pop("code")
    body = json.dumps(facts).encode() + b"\n" + code
    folder = target()
    if folder is None:
        return _warn_once(
            "cukern has no cache that it can write: every process compiles its kernels again; `cukern "
            "doctor` says more"
        )
    try:
        _sweep(folder)
        _write_atomically(folder / (key + SUFFIX), _digest(key, body) + b"\n" + body)
    except OSError as error:
        _warn_once(
            f"cukern cannot write its cache {folder} ({error.strerror}): every process compiles its kernels "
            f"again"
        )


def _digest(key: str, body: bytes) -> bytes:
    return hashlib.sha256(f"{key}{SUFFIX}\n".encode() + body).hexdigest().encode()


def _decode(key: str, content: bytes) -> Cubin:
    digest, _, body = content.partition(b"\n")
    if digest != _digest(key, body):
        raise ValueError("changed, or of another key")
    facts, _, code = body.partition(b"\n")
    entry = json.loads(facts)
    return Cubin(code=code, **{**entry, "report": Report(**entry["report"])})


def _content(path: Path) -> bytes:
    """The content of an entry. Raises OSError or ValueError for other files. O_NONBLOCK: opening a FIFO must
    not block."""
    with open(
        path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    ) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST:
            raise ValueError("not a regular file, or too large")
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
        with contextlib.suppress(OSError):  # an interrupt may come after the rename
            os.unlink(temporary)
        raise


@functools.cache
def _sweep(folder: Path) -> None:
    """Remove temporary files of killed processes. Files younger than a day may belong to running ones."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _DAY:
                        os.unlink(entry)
