"""OP as a file: `cukern check my_op.py`, or my_op.py:NAME, runs the file and uses an op that it makes with
cukern.op. compile and sass also take a .cu file."""

import functools
import importlib.util
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cukern.runtime.launch.kernel import Kernel
    from cukern.runtime.registry import Case

_ran: set[str] = set()  # the files


def is_file(name: str) -> bool:
    return name.partition(":")[0].endswith(".py")


def is_source(name: str) -> bool:
    return name.endswith(".cu")


def kernels_of(file: str, names: Sequence[str]) -> "dict[str, Kernel]":
    """The kernels of a .cu file: those named, such as "scale<float>", else all that are no templates. Raises
    ValueError if all are templates or there is none, and FileNotFoundError."""
    from cukern.runtime.compile.sources import Source, blanked
    from cukern.runtime.launch.load import load

    source = Source.read(file)
    templates = [
        k
        for k in source.kernels
        if re.search(rf"\btemplate\b[^;{{}}]*\b{k.rpartition('::')[2]}\s*\(", blanked(source.text))
    ]
    wanted = names or [k for k in source.kernels if k not in templates]
    if not wanted:
        known = (
            f"only templates: name an instance with --kernel '{templates[0]}<float>'"
            if templates
            else "no __global__ function"
        )
        raise ValueError(f"{file} has {known}")
    return {kernel.name: kernel for kernel in (load(file, name) for name in wanted)}


def find(name: str) -> "Case":
    """The op that a file defines. Raises ValueError for a file that fails or has no such op, or several;
    FileNotFoundError."""
    from cukern.runtime.registry import CASES

    path, _, wanted = name.partition(":")
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no file {path!r}")
    file = Path(path).resolve()
    names = _ops_of(file, file.stat().st_mtime_ns)
    listed = ", ".join(names) or "none: make one with cukern.op"
    if wanted and wanted not in names:
        raise ValueError(f"{path} has no op {wanted!r}; its ops: {listed}")
    if not wanted and len(names) != 1:
        raise ValueError(f"{path} must have one op, or name one: {path}:NAME; its ops: {listed}")
    return CASES[wanted or names[0]]


def forget() -> None:
    """Run the files again at the next `find`, since a kernel of theirs changed."""
    _ops_of.cache_clear()


@functools.lru_cache
def _ops_of(file: Path, changed: int) -> list[str]:
    """Run the file once. Returns the names of the ops that it defined."""
    from cukern.runtime.registry import CASES

    before = dict(CASES)
    _ran.add(str(file))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))  # as `python my_op.py` does
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = place(error) or f"{file.name}:{getattr(error, 'lineno', 1)}: "
        raise ValueError(f"{where}{type(error).__name__}: {error}") from error
    return [name for name, case in CASES.items() if before.get(name) is not case]


def place(error: BaseException) -> str:
    """The last line of a file of `find` that an exception passed through, such as "my_op.py:19: ", or ""."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in _ran]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
