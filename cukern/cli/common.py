"""Shared by the commands: OP, DIMS and --dtype, the two consoles, tables and the progress bar."""

import difflib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cukern.cli import own_file

if TYPE_CHECKING:
    import torch

    from cukern.runtime.registry import Case

_WIDTH = 80  # columns at least, so that no number in a table is cut


def _console(stderr: bool) -> Console:
    made = Console(stderr=stderr)
    return made if made.width >= _WIDTH else Console(stderr=stderr, width=_WIDTH)


console, errors = _console(stderr=False), _console(stderr=True)

DTYPES = {"d": "float64", "f": "float32", "h": "float16", "b": "bfloat16"}

OpName = Annotated[
    str, typer.Argument(metavar="OP", help="An op, such as square, or a file that makes one: my_op.py.")
]
Dims = Annotated[
    list[int] | None,
    typer.Argument(metavar="DIMS", help="Sizes, such as ROWS COLUMNS of softmax; by default the op's list."),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", metavar="d|f|h|b", help="float64, float32, float16 or bfloat16.")
]


def find_case(name: str) -> "Case":
    """The case of this name, or of a Python file; see own_file.py. Raises ValueError for an unknown op."""
    if own_file.is_file(name):
        return own_file.find(name)
    if own_file.is_source(name):
        raise ValueError(
            f"{name} has kernels, but no reference: name a Python file that makes an op of them, as cukern "
            f"new writes it"
        )
    import cukern.ops  # noqa: F401  fills the registry
    from cukern.runtime.registry import CASES

    if name not in CASES:
        close = [f"{name}.py"] if Path(f"{name}.py").is_file() else difflib.get_close_matches(name, CASES, 1)
        hint = f": did you mean {close[0]}? The" if close else "; the"
        raise ValueError(
            f"there is no op {name!r}{hint} ops are {', '.join(CASES)}, and those of files: my_op.py"
        )
    return CASES[name]


def letter_name(letter: str) -> str:
    """The name of the dtype for a letter, such as "float32". Raises ValueError."""
    if letter not in DTYPES:
        raise ValueError(
            f"--dtype must be one of {', '.join(f'{k} ({v})' for k, v in DTYPES.items())}, got {letter!r}"
        )
    return DTYPES[letter]


def torch_dtype(letter: str) -> "torch.dtype":
    """The dtype for a letter. Raises ValueError."""
    import torch

    return getattr(torch, letter_name(letter))


def find_dtype(case: "Case", letter: str) -> "torch.dtype":
    """The dtype for a letter. Raises ValueError if the op does not have it."""
    dtype, known = torch_dtype(letter), [str(d).removeprefix("torch.") for d in case.op.dtypes]
    if dtype not in case.op.dtypes:
        raise ValueError(f"{case.name} has no {DTYPES[letter]}; it has {', '.join(known)}")
    return dtype


def find_dims(
    case: "Case", dims: Sequence[int] | None, default: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """A list with the given DIMS, or the default. Raises ValueError for sizes that the op cannot have or that
    do not fit in memory."""
    if not dims:
        return list(default)
    case.check_count(dims)
    if min(dims) < 0:
        raise ValueError(f"a size cannot be negative, got {min(dims)}")
    named = f"{case.name} cannot have the sizes {case.dims} = {' '.join(map(str, dims))}"
    try:
        inputs = case.make(dims, min(case.op.dtypes, key=lambda dtype: dtype.itemsize), "meta")
        case.cost(dims, 1)
    except ZeroDivisionError:
        raise ValueError(f"{named}: a size that it divides by is 0") from None
    except (RuntimeError, TypeError):  # sizes, or products of them, overflow
        raise ValueError(f"{named}: no memory holds so many elements") from None
    from cukern.bench import environment

    need, memory = sum(x.nbytes for x in inputs), environment.memory()
    if need > memory:
        raise ValueError(
            f"{named}: the inputs take at least {need / 2**30:.1f} GiB, there are {memory / 2**30:.1f}"
        )
    return [tuple(dims)]


def check_target(option: str, file: Path) -> None:
    """Check that a file can be written before the work starts. Raises ValueError for a folder, and
    OSError."""
    if file.is_dir():  # so is Path("")
        raise ValueError(f"{option} must name a file, got the folder {str(file)!r}")
    if file.exists():
        if not os.access(file, os.W_OK):
            raise ValueError(f"{option} must name a file that can be written, got {str(file)!r}")
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(exist_ok=False)
    file.unlink()


def table(title: str, *columns: str) -> Table:
    """A table with a left-aligned first column and right-aligned numbers."""
    style = {
        "title_style": "bold",
        "header_style": "",
        "box": box.SIMPLE_HEAD,
        "show_edge": False,
        "padding": (0, 1, 0, 0),
    }
    width = min(len(title), console.width)
    made = Table(title=title, title_justify="left", min_width=width, **style)  # type: ignore[arg-type]
    for i, column in enumerate(columns):
        made.add_column(column, justify="right" if i else "left", no_wrap=True)
    return made


def progress() -> Progress:
    """A progress bar on stderr that disappears at the end; stdout contains only results."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)


def say(text: str, style: str | None = None, to: Console = console) -> None:
    """Print a line; no part of it is read as markup. On a terminal it is wrapped at words, in a file or a
    pipe it is not."""
    to.print(text, style=style, markup=False, highlight=False, soft_wrap=not to.is_terminal)


def listed(title: str, reasons: dict[str, str]) -> None:
    """Print each name and its reason, with the title before each."""
    for name, reason in reasons.items():
        say(f"  {title} {name}: {reason}")


def shorten(name: str, width: int) -> str:
    """A name with an ellipsis in the middle if it is longer than `width`."""
    if len(name) <= width:
        return name
    return f"{name[: (width + 1) // 2]}…{name[len(name) - width // 2 + 1 :]}"
