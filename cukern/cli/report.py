"""`cukern report`: one self-contained HTML page of all recorded results."""

import io
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cukern.bench import charts, record
from cukern.bench import plot as pictures
from cukern.bench.record import Recorded
from cukern.cli import bench
from cukern.cli.common import check_target, say
from cukern.cli.plot import From, load

_COLUMNS = ("shape", "dtype", "pass", "provider", "us", "± us", "TB/s", "TFLOP/s", "of limit")
_number = itertools.count()


def report(
    source: From = None,
    op: Annotated[str | None, typer.Option(metavar="OP,...", help="Only these ops.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("report.html"),
) -> None:
    """Write one HTML page of recorded results: per GPU a roofline, and per op its ladder, its times and its
    history over commits.

    The page has no script and loads nothing: it can be mailed and opened without a network.
    """
    bench.check_plot(Path("x.svg"))
    check_target("--out", out)
    found = load(source)
    wanted = op.split(",") if op else list(dict.fromkeys(one.row.op for one in found))
    if unknown := [name for name in wanted if name not in {one.row.op for one in found}]:
        raise ValueError(f"no recorded result of {unknown[0]!r}")
    out.write_text(page([one for one in found if one.row.op in wanted]), encoding="utf-8")
    say(f"wrote {out}: {len(found)} recorded results")


def page(found: Sequence[Recorded]) -> str:
    """The HTML of the page."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True)
    environment.filters["number"] = _text
    template = environment.from_string(
        Path(__file__).with_name("templates").joinpath("report.html").read_text(encoding="utf-8")
    )
    gpus = pictures.grouped(sorted(found, key=lambda one: one.gpu), lambda one: one.gpu)
    return template.render(columns=_COLUMNS, gpus=[_of_gpu(*gpu) for gpu in gpus])


def _of_gpu(gpu: str, found: Sequence[Recorded]) -> dict[str, Any]:
    rows = [one.row for one in record.newest(found)]
    ops = [_of_op(gpu, *of_op) for of_op in pictures.grouped(found, lambda one: one.row.op)]
    roofline = _svg(charts.roofline([row for row in rows if row.op != "gpt2"], gpu))
    return {"name": gpu, "anchor": _anchor(gpu), "roofline": roofline, "ops": ops}


def _of_op(gpu: str, op: str, found: Sequence[Recorded]) -> dict[str, Any]:
    rows, commits = [one.row for one in record.newest(found)], {one.commit[:8] for one in found if one.commit}
    figures = (
        [charts.ladder(rows, gpu)]
        if any(r.pass_ in ("fwd", "bwd") and " " not in r.version for r in rows)
        else []
    )
    if len(commits) > 1 and any(r.provider == "cukern" for r in rows):
        figures.append(charts.history(found, gpu))
    return {
        "name": op,
        "anchor": _anchor(gpu, op),
        "commits": len(commits),
        "dates": sorted(one.date[:10] for one in found),
        "pictures": [_svg(figure) for figure in figures],
        "rows": sorted(rows, key=lambda r: (r.shape, r.dtype, r.pass_, r.median_us)),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _svg(figure: pictures.Figure) -> str:
    """The picture as an element of the page. Its ids get a prefix of their own, since several pictures share
    the page."""
    text = io.StringIO()
    from matplotlib import pyplot

    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    prefix = f"p{next(_number)}-"
    drawn = re.sub(r"(?s)^.*?(?=<svg)|<metadata>.*?</metadata>", "", text.getvalue())
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}", drawn)


def _anchor(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
