"""The launch ledger: every launch of every case, version, size, dtype and pass, planned for a GPU that need
not be there.

Two trees whose ledgers are equal launch the same kernels with the same geometry and the same scalars.
"""

import ctypes
import functools
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from cukern.bench.measure import name_of
from cukern.runtime.device import KNOWN
from cukern.runtime.dispatch.versions import use
from cukern.runtime.registry import CASES, Case
from cukern.runtime.warmup import planned

GPUS = "h200", "a100", "rtx4090"
_PAGE = os.sysconf("SC_PAGESIZE")


def ledger(gpus: Iterable[str] = GPUS, ops: Collection[str] | None = None) -> Iterator[str]:
    """Lines of text. A call has one line, `GPU CASE VERSION DIMS DTYPE`, and below it one indented line per
    launch: pass, kernel, grid, block, shared bytes, arguments. Addresses are written "ptr"; structs by value
    are written as words of 8 bytes, in hexadecimal.

    Args:
        gpus: names in `cukern.runtime.device.KNOWN`.
        ops: names of cases; None: all.

    Raises AssertionError for a launch that asks for more shared memory than the GPU has.
    """
    for gpu in gpus:
        for name in CASES if ops is None else ops:
            for version, needs in CASES[name].op.versions.items():
                if needs.requires <= KNOWN[gpu].capability:
                    yield from _calls(gpu, CASES[name], version)


def _calls(gpu: str, case: Case, version: str) -> Iterator[str]:
    for dims in dict.fromkeys((*case.sim_dims, *case.check_dims)):
        for dtype in case.op.dtypes:
            yield f"{gpu} {case.name} {version} {','.join(map(str, dims))} {name_of(dtype)}"
            lines: list[str] = []
            largest = [(0, "")]

            def add(*launch: Any, lines: list[str] = lines, largest: list[Any] = largest) -> None:
                # now, while the tensors exist: later their addresses would look like numbers
                lines.append(_line(*launch))
                largest.append((launch[4], launch[1]))

            try:
                with use(case.name, version):
                    planned(case, [dims], [dtype], KNOWN[gpu], add)
            except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
                lines.append(f"  raises {type(error).__name__}")
            shared, kernel = max(largest)
            if shared > KNOWN[gpu].shared_bytes:
                rule = f"a thread block of {gpu} has at most {KNOWN[gpu].shared_bytes} bytes of shared memory"
                raise AssertionError(f"{rule}, got {shared} for {kernel}")
            yield from lines


def digests(lines: Iterable[str]) -> dict[str, str]:
    """By `GPU CASE VERSION`: the numbers of calls and launches, and a digest of their lines."""
    parts: dict[str, list[str]] = {}
    for line in lines:
        if not line.startswith(" "):
            part = parts.setdefault(" ".join(line.split()[:3]), [])
        part.append(line)
    return {key: _digest(part) for key, part in parts.items()}


def _digest(part: list[str]) -> str:
    launches = sum(line.startswith(" ") for line in part)
    return f"{len(part) - launches} {launches} {hashlib.sha256(chr(10).join(part).encode()).hexdigest()[:16]}"


def _line(pass_: str, kernel: str, grid: Any, block: Any, shared: int, *arguments: Any) -> str:
    dims = " ".join("x".join(map(str, dim)) for dim in (grid, block))
    return f"  {pass_}: {kernel} {dims} {shared} {' '.join(map(_text, arguments))}"


def _text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        words = bytes(value).ljust(-(-len(value) // 8) * 8, b"\0")
        numbers = (int.from_bytes(words[i : i + 8], "little") for i in range(0, len(words), 8))
        return f"<{len(value)}:{','.join(map(_word, numbers))}>"
    return "ptr" if type(value) is int and _is_address(value) else repr(value)


def _word(word: int) -> str:
    return "ptr" if _is_address(word) else f"{word:x}"


def _is_address(word: int) -> bool:
    """True if the page of this address is mapped. Two 32-bit sizes in one word look like an address, but
    nothing is mapped there. The heap of some builds of Python lies at low addresses, where sizes are too: of
    those its own range counts."""
    if not 1 << 36 < word < 1 << 56:
        return _heap() <= word < _libc.sbrk(0)
    return (
        _libc.mincore(
            ctypes.c_void_p(word // _PAGE * _PAGE), ctypes.c_size_t(1), ctypes.byref(ctypes.c_ubyte())
        )
        == 0
    )


_libc = ctypes.CDLL(None)
_libc.sbrk.restype = ctypes.c_size_t


@functools.cache
def _heap() -> int:
    """The first address of the heap; beyond all addresses where Linux does not say it."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    return next((int(line.partition("-")[0], 16) for line in lines if "[heap]" in line), 1 << 64)
