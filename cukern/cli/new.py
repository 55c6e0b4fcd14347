"""`cukern new`: writes a small project, whose test passes at once."""

import importlib.util
import keyword
import re
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

import cukern
from cukern.cli.common import say
from cukern.cli.names import NAMES

_TEMPLATES = Path(__file__).with_name("templates")
_USED = ("forward", "backward", "reference", "make", "transpose")  # names of functions in the templates


class Kind(str, Enum):
    elementwise = "elementwise"
    row = "row"
    tiled = "tiled"


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The op: an identifier.")],
    kind: Annotated[
        Kind, typer.Option(help="One thread per element, a reduction of rows, or tiles in shared memory.")
    ] = Kind.elementwise,
) -> None:
    """Write a differentiable op into the current folder: NAME.cu, NAME.py, test_NAME.py, bench_NAME.py and
    README.md.

    Existing files are not replaced. `pytest` passes at once, on a GPU or in the simulator. Inside cukern's
    own source tree, the files of a new op are written to their places, and its public name is registered.
    """
    tree = _tree()
    _check_name(name, tree)
    root = tree or Path()
    texts = _project(name, kind.value) if tree is None else _in_tree(tree, name, kind.value)
    for target in (*texts, name if tree is None else f"cukern/ops/{name}"):
        if (root / target).exists():
            raise ValueError(f"{target!r} exists: choose another NAME or an empty folder")
    edits = {} if tree is None else _registered(tree, name)
    for target, text in {**texts, **edits}.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        (root / target).write_text(text)
    say(f"wrote {', '.join(texts)}")
    if tree is None:
        say(f"next: pytest; cukern check {name}.py; cukern bench {name}.py")
    else:
        say(f"registered in {', '.join(edits)}")
        say(f"next: pytest tests/ops/{name}; cukern check {name}; planted bugs in tests/ops/test_wrong.py")


def _check_name(name: str, tree: Path | None) -> None:
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        raise ValueError(f"NAME must be an identifier, of letters, digits and _, got {name!r}")
    if name in (*NAMES, *_USED):
        raise ValueError(
            f"NAME must not be {name!r}, which {'is an op of cukern' if name in NAMES else 'the files use'}"
        )
    if tree is None and importlib.util.find_spec(name) is not None:
        raise ValueError(f"NAME must not be that of an installed module, got {name!r}")
    if tree is not None and name in dir(cukern):
        raise ValueError(f"NAME must not be a public name of cukern, got {name!r}")


def _text(template: str, name: str) -> str:
    return (_TEMPLATES / template).read_text().replace("my_op", name)


def _project(name: str, kind: str) -> dict[str, str]:
    """The files of a project of its own, by path."""
    return {
        f"{name}.cu": _text(f"{kind}.cu", name),
        f"{name}.py": _text(f"{kind}.py.txt", name),
        f"test_{name}.py": _text("test.py.txt", name),
        f"bench_{name}.py": _text("bench.py.txt", name),
        "README.md": _text("README.md", name),
    }


# ---- inside cukern's source tree


def _tree() -> Path | None:
    """The root of the source tree that contains the current folder, if any."""
    here = Path.cwd()
    return next(
        (
            f
            for f in (here, *here.parents)
            if (f / "cukern/ops/square.py").is_file() and (f / "kernels_cu").is_dir()
        ),
        None,
    )


def _in_tree(tree: Path, name: str, kind: str) -> dict[str, str]:
    """The files of a new op, by path. The op is made by cukern.op; its registry row is the arguments of that
    call."""
    op = _text(f"{kind}.py.txt", name).replace("from pathlib import Path\n\n", "")
    imports = (
        "from cukern.runtime.compile.sources import kernels_dir\nfrom cukern.runtime.dispatch.own_op import "
        "op"
    )
    op = op.replace("import cukern\n", f"{imports}\n", 1).replace(
        f"in {name}.cu; help(cukern.op)", f"in kernels_cu/{name}.cu; help(cukern.op)"
    )
    op = op.replace("cukern.op(", "op(").replace(
        f'Path(__file__).with_name("{name}.cu")', f'kernels_dir() / "{name}.cu"'
    )
    return {
        f"kernels_cu/{name}.cu": _text(f"{kind}.cu", name),
        f"cukern/ops/{name}.py": op,
        f"tests/ops/{name}/test_{name}.py": _text("tree_test.py.txt", name),
        f"benchmarks/bench_{name}.py": re.sub(
            r"(?<![a-z])square\b", name, (tree / "benchmarks/bench_square.py").read_text()
        ),
        f"docs/ops/{name}.md": _text("tree_page.md", name),
        f"docs/notes/{name}.md": _text("tree_notes.md", name),
    }


def _registered(tree: Path, name: str) -> dict[str, str]:
    """The files that list the ops, with this one in its place."""
    ops, api, public = "cukern/ops/__init__.py", "cukern/api.py", "cukern/__init__.py"
    names, menu = "cukern/cli/names.py", "mkdocs.yml"
    texts = {path: (tree / path).read_text() for path in (ops, api, public, names, menu)}
    texts[ops] = _inserted(texts[ops], "from cukern.ops import ", f"from cukern.ops import {name} as {name}")
    texts[api] = _inserted(texts[api], "from cukern.ops.", f"from cukern.ops.{name} import {name}")
    texts[public] = _inserted(texts[public], '    "', f'    "{name}",')
    texts[names] = texts[names].replace('_TEXT = """\n', f'_TEXT = """\n{name}\n', 1)
    for folder in ("ops", "notes"):
        texts[menu] = _inserted(texts[menu], f"      - {folder}/", f"      - {folder}/{name}.md")
    return texts


def _inserted(text: str, prefix: str, line: str) -> str:
    """The text with a line among those of the prefix, before the first that is greater."""
    lines = text.split("\n")
    at = [i for i, one in enumerate(lines) if one.startswith(prefix)]
    place = next((i for i in at if lines[i] > line), at[-1] + 1)
    return "\n".join([*lines[:place], line, *lines[place:]])
