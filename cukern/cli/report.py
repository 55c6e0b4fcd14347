"""`cukern report`: one self-contained HTML page of all recorded results."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from cukern.bench import charts, record
from cukern.bench import plot as pictures
from cukern.bench.measure import Row
from cukern.bench.record import Recorded
from cukern.cli.common import check_target, say
from cukern.cli.plot import From, load

_COLUMNS = ("shape", "dtype", "pass", "provider", "us", "± us", "TB/s", "TFLOP/s", "of limit")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 400, 260, 42, 34, 8  # of a chart, which a narrow screen shows 1:1

Curves = Mapping[str, Sequence[tuple[float, float]]]  # the points of each by its label


def report(
    source: From = None,
    op: Annotated[str | None, typer.Option(metavar="OP,...", help="Only these ops.")] = None,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="The page.")] = Path("report.html"),
) -> None:
    """Write one HTML page of recorded results: per GPU a roofline, and per op its ladder, its times and its
    history over commits.

    The page has no script and loads nothing: it can be mailed and opened without a network.
    """
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

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _text
    template = environment.from_string(
        Path(__file__).with_name("templates").joinpath("report.html").read_text(encoding="utf-8")
    )
    gpus = pictures.grouped(sorted(found, key=lambda one: one.gpu), lambda one: one.gpu)
    return template.render(columns=_COLUMNS, gpus=[_of_gpu(*gpu) for gpu in gpus])


def _of_gpu(gpu: str, found: Sequence[Recorded]) -> dict[str, Any]:
    rows = [one.row for one in record.newest(found)]
    ops = [_of_op(gpu, *of_op) for of_op in pictures.grouped(found, lambda one: one.row.op)]
    points, roof = charts.roofline([row for row in rows if row.op != "gpt2"])
    chart = _chart(points, "flop per byte", "TFLOP/s", roof=roof)
    return {"name": gpu, "anchor": _anchor(gpu), "roofline": chart, "ops": ops}


def _of_op(gpu: str, op: str, found: Sequence[Recorded]) -> dict[str, Any]:
    rows, commits = [one.row for one in record.newest(found)], {one.commit[:8] for one in found if one.commit}
    order, lines = charts.history_lines(found)
    history = None
    if len(order) > 1:
        curves = {label: [(order.index(c), us) for c, us in times.items()] for label, times in lines}
        history = _chart(curves, "commit", "us", order)
    return {
        "name": op,
        "anchor": _anchor(gpu, op),
        "commits": len(commits),
        "dates": sorted(one.date[:10] for one in found),
        "ladder": [_bars(table) for table in charts.ladder(rows)],
        "history": history,
        "rows": sorted(rows, key=lambda r: (r.shape, r.dtype, r.pass_, r.median_us)),
    }


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def color(index: int) -> str:
    """A color of its own for each index; 0 is green. Neighbours differ by the golden angle."""
    return f"hsl({(130 + 137.508 * index) % 360:.0f} 60% 45%)"


def _bars(table: Sequence[Row]) -> dict[str, Any]:
    """The names, values and lengths in % of the bars of one pass, shape and dtype."""
    unit, value = pictures.unit(table)
    first, most = table[0], max(value(row) for row in table)
    providers = list(dict.fromkeys(["cukern", *(row.provider for row in table)]))
    colors = {name: color(i) for i, name in enumerate(providers)} | {"copy": "gray"}
    bars = [(r.name, value(r), 100 * value(r) / most, colors[r.provider]) for r in table]
    return {"title": f"{first.pass_} {'x'.join(map(str, first.shape))} {first.dtype}, {unit}", "bars": bars}


def _chart(
    curves: Curves, x_label: str, y_label: str, names: Sequence[str] = (), roof: Sequence[tuple] = ()
) -> dict[str, Any]:
    """What the template draws: curves and axes in the units of an SVG picture. The axes are logarithmic; with
    `names`, those of x = 0, 1, ..., the x axis is linear. `roof` is a dashed line."""
    points = [point for curve in (*curves.values(), roof) for point in curve] or [(1.0, 1.0)]
    to_y, y_ticks = _axis([y for _, y in points], _HEIGHT - _BOTTOM, _EDGE)
    if names:
        step = (_WIDTH - _EDGE - _LEFT) / len(names)
        to_x = lambda i: round(_LEFT + (i + 0.5) * step, 1)  # noqa: E731
        x_ticks = [(to_x(i), names[i][:7]) for i in range(0, len(names), math.ceil(len(names) / 6))]
    else:
        to_x, x_ticks = _axis([x for x, _ in points], _LEFT, _WIDTH - _EDGE)
    placed = [
        (label, color(i), [(to_x(x), to_y(y)) for x, y in sorted(curve)])
        for i, (label, curve) in enumerate(curves.items())
    ]
    return {
        "curves": placed, "x_ticks": x_ticks, "y_ticks": y_ticks, "x_label": x_label, "y_label": y_label,
        "roof": [(to_x(x), to_y(y)) for x, y in roof],
    }  # fmt: skip


def _axis(values: Sequence[float], start: float, end: float) -> tuple[Any, list[tuple[float, str]]]:
    """The position of a value on a logarithmic axis, and the ticks. The axis spans at least a factor of two,
    so that noise does not look like a change."""
    low, high = min(values), max(values)
    around = max(1.1, (2 * low / high) ** 0.5)
    low, high = low / around, high * around

    def place(value: float) -> float:
        return round(start + (end - start) * math.log(value / low) / math.log(high / low), 1)

    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 3) if high < 1000 * low else (1,)
    ticks = [step * 10.0**k for k in decades for step in steps]
    return place, [(place(tick), f"{tick:g}") for tick in ticks if low <= tick <= high]


def _anchor(*words: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())
