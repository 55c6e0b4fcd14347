"""Recorded results: the history of an op over commits, the roofline of a GPU, the ladder of an op's
versions."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cukern.bench.measure import Row
from cukern.bench.plot import (
    MOST_LINES,
    Figure,
    Rows,
    age,
    beside,
    draw_bars,
    grouped,
    newest_version,
    ordered,
    panels_of,
)
from cukern.bench.record import Recorded


def history(found: Sequence[Recorded], device: str) -> Figure:
    """The time of cukern over the commits of one op, a line per shape, pass and dtype; the newest version of
    each commit. The lines with most commits are drawn, forward and backward first."""
    order, lines = history_lines(found)
    figure, (panel,) = panels_of([4])
    for label, times in lines:
        points = sorted((order.index(commit), us) for commit, us in times.items())
        panel.plot(*zip(*points, strict=True), marker="o", ms=4, label=label)
    panel.set_xticks(range(len(order)), order, rotation=60, fontsize=7)
    _plain_log_axis(panel, [us for _, times in lines for us in times.values()])
    panel.set(ylabel="us", title=f"{found[0].row.op} over commits on {device}")
    panel.grid(alpha=0.3)
    if lines:
        beside(panel)
    return figure


def history_lines(found: Sequence[Recorded]) -> tuple[list[str], list[tuple[str, dict[str, float]]]]:
    """The commits in the order of their dates, and of each line its label and its microseconds by commit."""
    found = sorted(found, key=lambda one: one.date)
    lines = _lines(
        [one for one in found if one.row.provider == "cukern" and " " not in one.row.version and one.commit]
    )
    drawn = {commit for _, times in lines for commit in times}
    return list(dict.fromkeys(one.commit[:8] for one in found if one.commit[:8] in drawn)), lines


def _lines(found: Sequence[Recorded]) -> list[tuple[str, dict[str, float]]]:
    lines = []
    for (pass_, shape, dtype), group in grouped(
        found, lambda one: (one.row.pass_, one.row.shape, one.row.dtype)
    ):
        times = {
            one.commit[:8]: one.row.median_us for one in sorted(group, key=lambda one: age(one.row.version))
        }
        lines.append(
            (pass_ not in ("fwd", "bwd"), -len(times), f"{pass_} {'x'.join(map(str, shape))} {dtype}", times)
        )
    return [line[2:] for line in sorted(lines, key=lambda line: line[:2])[:MOST_LINES]]


def _plain_log_axis(panel: Any, values: Sequence[float]) -> None:
    """A logarithmic y axis with plain numbers. It spans at least a factor of two, so that noise does not look
    like a change."""
    from matplotlib.ticker import LogFormatter

    panel.set_yscale("log")
    for axis in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        axis(LogFormatter(minor_thresholds=(2, 0.7)))
    if values:
        low, high = min(values), max(values)
        around = max(1.1, (2 * low / high) ** 0.5)
        panel.set_ylim(low / around, high * around)


def roofline(rows: Rows) -> tuple[dict[str, list[tuple[float, float]]], list[tuple[float, float]]]:
    """TFLOP/s over flop per byte: the newest version of each op at its largest shape, and the roof: the
    bandwidth of the fastest copy, then the highest measured rate."""
    points = {
        f"{row.op} {row.version} {row.dtype}": [(row.flops / row.bytes, row.tflops)]
        for row in _largest(rows)
        if row.tflops
    }
    copy = max((r.tbps or 0 for r in rows if r.provider == "copy"), default=0)
    if not copy or not points:
        return points, []
    xs, ys = zip(*(point for (point,) in points.values()), strict=True)
    peak = max(ys)
    ends = sorted({min(xs) / 2, peak / copy, max(*xs, peak / copy) * 2})
    return points, [(x, min(x * copy, peak)) for x in ends]


def _largest(rows: Rows) -> list[Row]:
    """The forward of each op's newest version, at the shape with the most bytes."""
    known = [r for r in rows if r.bytes and r.flops and r.provider == "cukern" and r.pass_ == "fwd"]
    groups = [
        [r for r in group if r.version == newest_version(group)]
        for _, group in grouped(known, lambda r: r.op)
    ]
    return [max(group, key=lambda r: r.bytes) for group in groups if group]


def ladder(rows: Rows) -> list[Rows]:
    """The rows of every version and peer of an op, one list per pass: forward and backward at the shape and
    dtype that most versions were measured at."""
    own = [
        replace(r, version=r.version.partition(" ")[0])
        for r in rows
        if " " not in r.version and r.pass_ in ("fwd", "bwd")
    ]
    if not own:
        return []
    counts = {
        key: len({r.version for r in group}) for key, group in grouped(own, lambda r: (r.shape, r.dtype))
    }
    key = max(counts, key=lambda k: counts[k])
    chosen = sorted((r for r in own if (r.shape, r.dtype) == key), key=lambda r: r.pass_, reverse=True)
    return [ordered(group) for _, group in grouped(chosen, lambda r: r.pass_)]


def ratios(values: dict[str, float], title: str) -> Figure:
    """A bar per name, next to a line at 1."""
    figure, (panel,) = panels_of([1 + 0.3 * len(values)])
    draw_bars(panel, values, "tab:green", "%.3f")
    panel.axvline(1, color="tab:gray")
    panel.set_title(title)
    return figure
