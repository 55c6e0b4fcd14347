"""`cukern.load` and `cukern.compile`: a kernel of a user's own CUDA source."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from cukern.runtime import checks
from cukern.runtime.compile.signature import CTYPES
from cukern.runtime.compile.sources import Source
from cukern.runtime.launch.kernel import Kernel, cpp


def load(
    path: str | Path, name: str | None = None, defines: Mapping[str, Any] | None = None, *,
    options: Sequence[str] = (), include_dirs: Sequence[str | Path] = (),
) -> Kernel:  # fmt: skip
    """The kernel `name` of a .cu, .ptx or .cubin file, as a callable.

    Args:
        path: the file. `#include "..."` searches its folder and cukern's kernels_cu.
        name: the `__global__` function; a template instance is written as in C++, `scale<float, 4>`. Optional
            if the file has one kernel. Of compiled code: its entry, or the name in the source.
        defines: macros before the text, such as `{"TILE": 32, "T": torch.float16, "FAST": None}`: a number,
            text, a dtype, a bool (true, false), or None for a macro without a value.
        options: for NVRTC, such as ["--use_fast_math", "--maxrregcount=64"].
        include_dirs: folders that `#include` searches after that of the file.

    Returns a Kernel: `kernel(out, x, n, grid=..., block=...)` or `kernel[grid, block](out, x, n)`.
    `help(kernel)` explains the arguments, dynamic shared memory, clusters and streams. An edit of the file
    takes effect at the next `load`.
    Raises FileNotFoundError, ValueError for a name that the file does not have, TypeError and ValueError for
    a wrong macro. The first launch may raise CompileError, and TypeError for a parameter type that cannot be
    passed: a pointer to a type that no tensor has. `void*` accepts any tensor.

    Headers are found through #include lines and literals in #define lines. Functions without `__device__` are
    compiled as device code. If the file does not compile, host functions with errors, such as a launch with
    `<<<...>>>`, lose their bodies, so the source of a torch extension or a program loads unchanged;
    `kernel.removed` lists them. Device code, templates, types and constants are never removed.
    """
    more = _lines(defines), _options(options), _folders(include_dirs)
    if Path(path).suffix in (".ptx", ".cubin"):
        return _compiled(Path(path).resolve(), Path(path).read_bytes(), name, more)
    return _kernel(Source.read(path, *more), name)


def compile(
    source: str | bytes, name: str | None = None, defines: Mapping[str, Any] | None = None, *,
    options: Sequence[str] = (), include_dirs: Sequence[str | Path] = (),
) -> Kernel:  # fmt: skip
    """The kernel `name` of CUDA C++ source text, such as the `cuda_sources` of
    `torch.utils.cpp_extension.load_inline`, of PTX, or of a cubin; see `load`. PTX may be bytes too."""
    from cukern.runtime.compile.machine_code import is_compiled

    compiled = is_compiled(source)
    more = _lines(defines), _options(options), _folders(include_dirs)
    if compiled:
        code = source.encode() if isinstance(source, str) else source
        return _compiled(Path("<cukern.compile>"), code, name, more)
    if not isinstance(source, str):
        raise TypeError(
            f"source must be a str of CUDA C++ or PTX, or bytes of PTX or a cubin, got {checks.brief(source)}"
        )
    return _kernel(Source.from_text(source, *more), name)


def _compiled(path: Path, text: bytes, name: str | None, more: tuple[Any, ...]) -> Kernel:
    from cukern.runtime.compile.machine_code import MachineCode, source_name
    from cukern.runtime.launch.compiled_kernel import CompiledKernel

    code = MachineCode(path, text)
    if any(more):
        raise ValueError(f"{code.path} is compiled: it takes no defines=, options= or include_dirs=")
    names = [one for one in code.kernels if name in (None, one)]
    names = names or [one for one in code.kernels if name == source_name(one)]
    if len(names) > 1:
        raise ValueError(f"{code.path} has {len(names)} entries ({', '.join(names)}): name one")
    if not names:
        known = ", ".join(code.kernels) or "none"
        raise ValueError(f"{code.path} has no entry{f' {name!r}' if name else ''}; its entries: {known}")
    return CompiledKernel(code, names[0])  # type: ignore[arg-type]


def _options(options: Sequence[str]) -> tuple[str, ...]:
    """Raises TypeError and ValueError."""
    if isinstance(options, str) or not all(isinstance(one, str) for one in options):
        raise TypeError(
            f"options must be a list of str, such as ['--use_fast_math'], got {checks.brief(options)}"
        )
    for one in options:
        if re.match(r"-I|--?(?:include-path|pre-include|include|gpu-architecture|arch)\b", one):
            raise ValueError(
                f"options must not have {one!r}: cukern chooses the architecture, and include_dirs= adds "
                f"folders"
            )
    return tuple(options)


def _folders(include_dirs: Sequence[str | Path]) -> tuple[Path, ...]:
    """Raises TypeError and ValueError."""
    if isinstance(include_dirs, str) or not all(isinstance(one, str | Path) for one in include_dirs):
        raise TypeError(f"include_dirs must be a list of folders, got {checks.brief(include_dirs)}")
    for one in include_dirs:
        if not Path(one).is_dir():
            raise ValueError(f"include_dirs: there is no folder {str(one)!r}")
    return tuple(Path(one).resolve() for one in include_dirs)


def _lines(defines: Mapping[str, Any] | None) -> str:
    """The macros as lines of #define. Raises TypeError and ValueError."""
    if defines is not None and not isinstance(defines, Mapping):
        raise TypeError(f"defines must be a dict such as {{'TILE': 32}}, got {checks.brief(defines)}")
    lines = []
    for name, value in (defines or {}).items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(f"defines: the name of a macro must be an identifier, got {name!r}")
        if value is not None and not isinstance(value, str | int | float | torch.dtype):
            raise TypeError(
                f"defines: {name} must be a number, a str, a dtype, a bool or None, got {checks.brief(value)}"
            )
        if isinstance(value, torch.dtype) and value not in CTYPES:
            raise ValueError(f"defines: {name} must be one of {', '.join(map(str, CTYPES))}, got {value}")
        text = "" if value is None else cpp(value)
        if "\n" in text:
            raise ValueError(f"defines: {name} must be one line, got {value!r}")
        lines.append(f"#define {name} {text}\n")
    return "".join(lines)


def _kernel(source: Source, name: str | None) -> Kernel:
    names = list(source.kernels)
    if name is None:
        if not names:
            raise ValueError(f"{source.path} has no kernel: no __global__ function was found")
        if len(names) > 1:
            raise ValueError(f"{source.path} has {len(names)} kernels ({', '.join(names)}): name one")
        return Kernel(source, names[0])
    if not isinstance(name, str):
        raise TypeError(f"name must be a str or None, got {checks.brief(name)}")
    base, angle, rest = name.strip().partition("<")
    return Kernel(source, _qualified(source, base.strip(), names) + angle + rest)


def _qualified(source: Source, base: str, names: Sequence[str]) -> str:
    """The kernel's name with its namespace. A name that only occurs somewhere in the text is accepted,
    because a macro may define it."""
    last = base.rpartition("::")[2]
    same = [n for n in (*names, *source.included_kernels) if n == base or n.endswith(f"::{base}")]
    word = re.compile(rf"\b{re.escape(last)}\b")
    if not same and not (last and any(map(word.search, (source.text, *source.program.files.values())))):
        raise ValueError(
            f"{source.path} has no __global__ function {base!r}; it has {', '.join(names) or 'none'}"
        )
    if len(set(same)) > 1 and base not in same:
        raise ValueError(
            f"{source.path} has several kernels {base!r} ({', '.join(same)}): write the namespace"
        )
    return base if base in same or not same else same[0]
