"""`cukern report`: one self-contained HTML page of all recorded results."""

import html
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from cukern.bench import charts, record
from cukern.bench import plot as pictures
from cukern.bench.measure import Row
from cukern.bench.record import Recorded
from cukern.cli import bench
from cukern.cli.common import check_target, say
from cukern.cli.plot import From, load

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto } nav { margin-bottom: 1rem }
nav a { margin-right: .8rem }
tr.own { font-weight: bold } details { margin: .5rem 0 } summary { cursor: pointer }
"""

_number = itertools.count()


def report(
    source: From = None,
    op: Annotated[str | None, typer.Option(metavar="OP,...", help="Only these ops.")] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The page.")] = Path("report.html"),
) -> None:
    """Write one HTML page of recorded results: per GPU a roofline, and per op its ladder, its times and its history over commits.

    The page has no script and loads nothing: it can be mailed and opened without a network.
    """
    bench.check_plot(Path("x.svg"))
    check_target("--out", out)
    found = load(source)
    wanted = op.split(",") if op else list(dict.fromkeys(one.row.op for one in found))
    for name in wanted:
        if not any(one.row.op == name for one in found):
            raise ValueError(f"no recorded result of {name!r}")
    out.write_text(page([one for one in found if one.row.op in wanted]), encoding="utf-8")
    say(f"wrote {out}: {len(found)} recorded results")


def page(found: Sequence[Recorded]) -> str:
    """The HTML of the page."""
    gpus = sorted({one.gpu for one in found})
    links = " ".join(f'<a href="#{_anchor(gpu)}">{html.escape(gpu)}</a>' for gpu in gpus)
    body = "".join(_of_gpu(gpu, [one for one in found if one.gpu == gpu]) for gpu in gpus)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>cukern: recorded results</title>'
        f"<style>{_STYLE}</style></head>"
        f"<body><h1>cukern: recorded results</h1><nav>{links}</nav>{body}</body></html>\n"
    )


def _of_gpu(gpu: str, found: Sequence[Recorded]) -> str:
    current = record.newest(found)
    ops = list(dict.fromkeys(one.row.op for one in current))
    rooflines = _svg(charts.roofline([one.row for one in current if one.row.op != "gpt2"], gpu))
    links = " ".join(f'<a href="#{_anchor(gpu, op)}">{html.escape(op)}</a>' for op in ops)
    parts = [_of_op(gpu, op, [one for one in found if one.row.op == op], [c.row for c in current if c.row.op == op]) for op in ops]
    return f'<h2 id="{_anchor(gpu)}">{html.escape(gpu)}</h2><nav>{links}</nav>{rooflines}{"".join(parts)}'


def _of_op(gpu: str, op: str, found: Sequence[Recorded], rows: Sequence[Row]) -> str:
    commits = {one.commit[:8] for one in found if one.commit}
    dates = sorted(one.date[:10] for one in found)
    parts = [f'<h3 id="{_anchor(gpu, op)}">{html.escape(op)}</h3><p>{len(commits)} commits, {dates[0]} to {dates[-1]}.</p>']
    passes = {r.pass_ for r in rows if " " not in r.version}
    if passes & {"fwd", "bwd"}:
        parts.append(_svg(charts.ladder(rows, gpu)))
    if len(commits) > 1 and any(r.provider == "cukern" for r in rows):
        parts.append(_svg(charts.history(found, gpu)))
    parts.append(f"<details><summary>{len(rows)} measurements</summary>{_table(rows)}</details>")
    return "".join(parts)


def _table(rows: Sequence[Row]) -> str:
    cells = [
        (r, ("x".join(map(str, r.shape)), r.dtype, r.pass_, pictures.name_of(r), _text(r.median_us), _text(r.iqr_us), _text(r.tbps),
             _text(r.tflops), _text(r.of_limit)))
        for r in sorted(rows, key=lambda r: (r.shape, r.dtype, r.pass_, r.median_us))
    ]  # fmt: skip
    head = _row("th", ("shape", "dtype", "pass", "provider", "us", "± us", "TB/s", "TFLOP/s", "of limit"))
    return f"<table>{head}{''.join(_row('td', texts, r.provider == 'cukern') for r, texts in cells)}</table>"


def _row(tag: str, texts: Iterable[str], own: bool = False) -> str:
    return f"<tr{' class=own' * own}>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>\n"


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def _svg(figure: pictures.Figure) -> str:
    """The picture as an element of the page. Its ids get a prefix of their own, since several pictures share the page."""
    text = io.StringIO()
    from matplotlib import pyplot

    figure.savefig(text, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    prefix = f"p{next(_number)}-"
    drawn = text.getvalue()[text.getvalue().index("<svg") :]
    drawn = re.sub(r"(?s)<metadata>.*?</metadata>", "", drawn)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\1{prefix}", drawn)


def _anchor(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
