"""What llm.c's binary files have in common: a header of 256 int32, an exact size, little-endian arrays. A
file is replaced in one step."""

import contextlib
import errno
import importlib
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

HEADER_BYTES = 1024
PathLike = str | os.PathLike


def optional(package: str, module: str, needed_by: str) -> Any:
    """Import a module of a package that is not installed with cukern. Raises ImportError with the command
    that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"{needed_by} the package {package}: pip install {package}") from None


def expect(
    true: object, expected: object, found: object, path: object = None, error: type[Exception] = ValueError
) -> None:
    """Raise an error that says what was expected and what was found, and in which file, unless `true`."""
    if not true:
        raise error(f"{'' if path is None else f'{path}: '}expected {expected}; found {found}")


@contextlib.contextmanager
def replace(path: PathLike, nbytes: int | None = None) -> Iterator[BinaryIO]:
    """Open PATH.tmp for writing. At the end of the block it is flushed to disk and renamed to `path` in one
    step. On an error, a full disk or a kill, `path` keeps its old content. A kill leaves PATH.tmp; the next
    write to `path` overwrites it. `nbytes`: the size of the file, for the message about a full disk."""
    temporary = f"{os.fspath(path)}.tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # some file systems report a full disk only here
        os.replace(temporary, path)
        with contextlib.suppress(OSError):  # Windows and some network file systems cannot open a folder
            folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
            try:
                os.fsync(folder)  # before another file can depend on the new name
            finally:
                os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise full_disk(path, nbytes) from None
        raise


def full_disk(path: PathLike, nbytes: int | None = None) -> OSError:
    """The error of a full disk: the file, the bytes that it needs, if they are known, and those that are
    free."""
    free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
    needs = "" if nbytes is None else f"needs {nbytes} bytes, "
    error = OSError(f"{os.fspath(path)}: No space left on device: {needs}{free} bytes are free")
    error.errno = errno.ENOSPC
    return error


def write_header(file: BinaryIO, *slots: int) -> None:
    # OverflowError if one does not fit into int32
    file.write(np.array(slots, "<i4").tobytes().ljust(HEADER_BYTES, b"\0"))


@contextlib.contextmanager
def read(
    path: PathLike, magic: int, versions: Sequence[int], what: str
) -> Iterator[tuple[BinaryIO, list[int]]]:
    """Open a file: yields it and the 256 int32 of its header, which is checked. A ValueError inside the block
    gets the path before it."""
    with Path(path).open("rb") as file:
        try:
            data = file.read(HEADER_BYTES)
            expect(
                len(data) == HEADER_BYTES, f"a header of {HEADER_BYTES} bytes", f"a file of {len(data)} bytes"
            )
            header = np.frombuffer(data, "<i4").tolist()
            expect(header[0] == magic, f"magic number {magic}, of {what}", header[0])
            expect(
                header[1] in versions,
                f"version {' or '.join(map(str, versions))} of {what}",
                f"version {header[1]}",
            )
            yield file, header
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def check_size(file: BinaryIO, expected: int, what: str) -> None:
    found = os.fstat(file.fileno()).st_size
    expect(found == expected, f"{expected} bytes, for {what}", f"{found} bytes")


def read_tensor(file: BinaryIO, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The next tensor. The size of the file is checked before memory is allocated."""
    offset, nbytes = file.tell(), math.prod(shape) * dtype.itemsize
    left = os.fstat(file.fileno()).st_size - offset
    expect(
        nbytes <= left,
        f"{nbytes} more bytes at byte {offset}, for a tensor of shape {tuple(shape)}",
        f"{left} bytes",
    )
    return torch.from_numpy(np.fromfile(file, np.uint8, nbytes)).view(dtype).view(tuple(shape))


def write_tensors(file: BinaryIO, *tensors: Tensor) -> None:
    for tensor in tensors:
        file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
