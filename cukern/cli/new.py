"""`cukern new`: writes a small project, whose test passes at once."""

import importlib.util
import keyword
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from cukern.cli.common import say
from cukern.runtime.registry import OPS

_TEMPLATES = Path(__file__).with_name("templates")
_USED = ("forward", "backward", "reference", "make", "transpose")  # names of functions in the templates


class Kind(str, Enum):
    elementwise = "elementwise"
    row = "row"
    tiled = "tiled"


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The op: an identifier.")],
    kind: Annotated[Kind, typer.Option(help="One thread per element, a reduction of rows, or tiles in shared memory.")] = Kind.elementwise,
) -> None:
    """Write a differentiable op into the current folder: NAME.cu, NAME.py, test_NAME.py, bench_NAME.py and README.md.

    Existing files are not replaced. `pytest` passes at once, on a GPU or in the simulator.
    """
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ValueError(f"NAME must be an identifier, of letters, digits and _, got {name!r}")
    if name in (*OPS, *_USED):
        raise ValueError(f"NAME must not be {name!r}, which {'is an op of cukern' if name in OPS else 'the files use'}")
    sources = {
        f"{name}.cu": f"{kind.value}.cu",
        f"{name}.py": f"{kind.value}.py.txt",
        f"test_{name}.py": "test.py.txt",
        f"bench_{name}.py": "bench.py.txt",
        "README.md": "README.md",
    }
    for target in (*sources, name):
        if Path(target).exists():
            raise ValueError(f"{target!r} exists: choose another NAME or an empty folder")
    if importlib.util.find_spec(name) is not None:
        raise ValueError(f"NAME must not be that of an installed module, got {name!r}")
    for target, source in sources.items():
        Path(target).write_text((_TEMPLATES / source).read_text().replace("my_op", name))
    say(f"wrote {', '.join(sources)}")
    say(f"next: pytest; cukern check {name}.py; cukern bench {name}.py")
