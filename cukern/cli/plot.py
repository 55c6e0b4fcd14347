"""`cukern plot` and `cukern compare`: pictures and tables of recorded results."""

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cukern.bench import charts, environment, record
from cukern.bench import plot as pictures
from cukern.bench.measure import Row
from cukern.bench.record import Recorded
from cukern.cli import bench, common
from cukern.cli.common import console, say

From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Recorded results; by default those of the current folder, else cukern's.",
    ),
]


def plot(
    op: Annotated[str, typer.Argument(metavar="OP", help="An op of the recorded results, such as softmax.")],
    dims: Annotated[
        list[str] | None, typer.Argument(metavar="DIMS", help="Only these sizes; * is any: 8192 *.")
    ] = None,
    source: From = None,
    dtype: Annotated[str | None, typer.Option(metavar="d|f|h|b", help="Only this dtype.")] = None,
    pass_: Annotated[
        str | None,
        typer.Option("--pass", metavar="fwd|bwd,...", help="Only these passes; by default fwd and bwd."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A GPU with this in its name; by default yours, else one with most results."
        ),
    ] = None,
    history: Annotated[
        bool, typer.Option("--history", help="Time over commits, instead of throughput over size.")
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The picture; by default OP.png.")] = None,
) -> None:
    """Draw recorded results of OP: throughput over size with its peers and the limit, or with --history the
    time over commits."""
    file = out or Path(f"{op}.png")
    bench.check_plot(file)
    found = [one for one in load(source) if one.row.op == op]
    if not found:
        raise ValueError(f"no recorded result of {op!r}")
    passes = pass_.split(",") if pass_ else ["fwd", "bwd"]
    found = [one for one in found if _wanted(one, dims, dtype, passes, gpu)]
    if not found:
        raise ValueError(f"no recorded result of {op!r} has these sizes, dtype, pass and GPU")
    gpus = Counter(one.gpu for one in found)
    mine = environment.gpu_name()
    name = mine if mine and mine in gpus else gpus.most_common(1)[0][0]
    _draw([one for one in found if one.gpu == name], name, history, file)
    if len(gpus) > 1:
        say(f"--gpu chooses another of {', '.join(sorted(gpus))}")


def _draw(found: Sequence[Recorded], name: str, history: bool, file: Path) -> None:
    rows = [one.row for one in record.newest(found) if " " not in one.row.version]
    pictures.save(charts.history(found, name) if history else pictures.drawn(rows, name), file)
    say(f"drawn to {file}: {name}")


def load(files: Sequence[Path] | None) -> list[Recorded]:
    """The rows of the files. Raises ValueError if there are none."""
    found = [one for file in (files or record.files()) for one in record.read(file)]
    if not found:
        raise ValueError(
            "there are no recorded results: name files with --from, or write one with cukern bench OP "
            "--record-to FILE"
        )
    return found


def _wanted(
    one: Recorded, dims: Sequence[str] | None, letter: str | None, passes: Sequence[str], gpu: str | None
) -> bool:
    row = one.row
    sizes = not dims or (
        len(dims) == len(row.shape) and all(d in ("*", str(n)) for d, n in zip(dims, row.shape, strict=True))
    )
    kind = letter is None or row.dtype == common.letter_name(letter)
    return sizes and kind and row.pass_ in passes and (gpu is None or gpu.lower() in one.gpu.lower())


# ---- compare


def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A GPU, such as h100, or a file; @COMMIT may follow.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    op: Annotated[str | None, typer.Option("--op", metavar="OP", help="Only this op.")] = None,
    peers: Annotated[bool, typer.Option("--peers", help="Peers and copies too.")] = False,
    most: Annotated[int, typer.Option(min=1, help="Rows of the table: those that differ most.")] = 30,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the ratios.")] = None,
) -> None:
    """Compare recorded results of two GPUs or two commits: the time of each measurement that both have, and
    the ratio. Above 1, B is slower.

        cukern compare h100 h200
    """
    bench.check_plot(plot)
    (name_a, rows_a), (name_b, rows_b) = _side(a, op, peers), _side(b, op, peers)
    ratios = {row: rows_b[key].median_us / row.median_us for key, row in rows_a.items() if key in rows_b}
    if not ratios:
        raise ValueError(f"{a} and {b} have no measurement in common{f' of {op!r}' if op else ''}")
    say(f"A: {name_a}\nB: {name_b}")
    shown = common.table(
        f"{len(ratios)} in common, the {min(most, len(ratios))} that differ most",
        "what",
        "A us",
        "B us",
        "B/A",
    )
    for row, ratio in sorted(ratios.items(), key=lambda pair: -abs(math.log(pair[1])))[:most]:
        style = "red" if ratio > 1.03 else "green" if ratio < 1 / 1.03 else None
        what = (
            f"{row.op} {row.pass_} {'x'.join(map(str, row.shape))} {row.dtype} {row.version or row.provider}"
        )
        times = _us(row.median_us), _us(rows_b[row.key].median_us)
        shown.add_row(common.shorten(what, console.width - 28), *times, f"{ratio:.3f}", style=style)
    console.print(shown)
    summary, means = common.table("geometric mean of B/A", "op", "measurements", "B/A"), dict[str, float]()
    for name, rows in pictures.grouped(
        [row for row in ratios if row.provider == "cukern"], lambda row: row.op
    ):
        means[name] = statistics.geometric_mean(ratios[row] for row in rows)
        summary.add_row(name, str(len(rows)), f"{means[name]:.3f}")
    console.print(summary)
    if plot:
        pictures.save(charts.ratios(means, f"time of {name_b} / {name_a}"), plot)
        say(f"drawn to {plot}")


def _us(value: float) -> str:
    return f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def _side(text: str, op: str | None, peers: bool) -> tuple[str, dict[Any, Row]]:
    """The GPUs and commits of A or B as text, and the newest row of each measurement there, of the op or of
    all ops."""
    name, _, commit = text.partition("@")
    found = [one for one in _results_of(name) if one.commit.startswith(commit)]
    if not found:
        raise ValueError(
            f"{name} has no results of commit {commit!r}" if commit else f"{name} has no results"
        )
    gpus, commits = _listed(one.gpu for one in found), _listed(one.commit[:8] for one in found)
    rows = [one.row for one in found if op in (None, one.row.op) and (peers or one.row.provider == "cukern")]
    return f"{gpus}, {commits}", {row.key: row for row in rows}


def _results_of(name: str) -> list[Recorded]:
    """The rows of a file, or those of a GPU. Raises ValueError."""
    if Path(name).is_file():
        return record.read(Path(name))
    if found := [one for one in load(None) if name.lower() in one.gpu.lower()]:
        return found
    raise ValueError(f"{name!r} is neither a file nor a GPU of the recorded results")


def _listed(values: Iterable[str]) -> str:
    found = list(dict.fromkeys(v for v in values if v))
    return f"{len(found)} commits to {found[-1]}" if len(found) > 2 else ", ".join(found) or "unknown"
