"""Draws measurements: bars for a few shapes, lines over size for many. The device is in each title. See
charts.py for recorded results."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cukern.bench import environment
from cukern.bench.measure import Row
from cukern.runtime.compile.compiler import SetupError
from cukern.runtime.registry import CASES

_COLORS = {"cukern": "tab:green", "copy": "tab:gray", "torch": "tab:orange", "torch.compile": "tab:blue"}
_OTHERS = ("tab:purple", "tab:red", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")  # for other peers
MOST_LINES = 8  # in a panel; of more versions, only the newest is drawn
LEAST_SIZES = 3  # that make a line

Rows = Sequence[Row]
Figure = Any  # of matplotlib, which is optional
T = TypeVar("T")


def drawable(file: Path) -> None:
    """Raises SetupError without matplotlib, and ValueError for an unknown picture format."""
    try:
        import matplotlib
    except ImportError as error:
        raise SetupError(f"a picture needs matplotlib ({error}). Run: pip install matplotlib") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"axes.titlelocation": "left", "axes.titlesize": 10, "legend.fontsize": 7})
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if file.suffix[1:].lower() not in FigureCanvasAgg.filetypes:
        raise ValueError(
            f"--plot must name a file that ends with .{', .'.join(sorted(FigureCanvasAgg.filetypes))}, got "
            f"{str(file)!r}"
        )


def save(figure: Figure, file: Path) -> None:
    """Write a picture in the format of the file's extension, and close it."""
    from matplotlib import pyplot

    figure.savefig(file)
    pyplot.close(figure)


def drawn(rows: Rows, device: str | None = None) -> Figure:
    """Lines over size if there are at least LEAST_SIZES sizes, else bars."""
    draw = lines if len({row.shape for row in rows}) >= LEAST_SIZES else bars
    return draw(rows, device or environment.gpu_name() or "CPU")


def panels_of(heights: Sequence[float]) -> tuple[Figure, Any]:
    drawable(Path("x.svg"))
    from matplotlib import pyplot

    size = (8, sum(heights))
    figure, axes = pyplot.subplots(
        len(heights), 1, figsize=size, squeeze=False, height_ratios=heights, layout="constrained"
    )
    return figure, axes[:, 0]


def grouped(rows: Iterable[T], key: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    """Rows of equal keys, in the order in which the keys occur."""
    groups: dict[Any, list[T]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def ordered(rows: Rows) -> list[Row]:
    """The versions of cukern from old to new, then its peers, then the copy."""
    return sorted(rows, key=lambda r: (r.provider != "cukern", r.provider == "copy", age(r.version)))


def age(version: str) -> tuple[int, str]:
    return (int(version[1:]) if version[1:].isdigit() else -1), version


# ---- bars


def bars(rows: Rows, device: str) -> Figure:
    """One panel per pass, shape and dtype, with a bar per provider."""
    tables = [ordered(group) for _, group in grouped(rows, lambda r: (r.op, r.pass_, r.shape, r.dtype))]
    figure, panels = panels_of([0.8 + 0.35 * len(table) for table in tables])
    for table, panel in zip(tables, panels, strict=True):
        name, value = unit(table)
        colors = [_COLORS.get(r.provider, "tab:purple") for r in table]
        draw_bars(panel, {r.name: value(r) for r in table}, colors, "%.3g")
        first = table[0]
        panel.set(
            xlabel=name,
            title=f"{first.op} {first.pass_} {'x'.join(map(str, first.shape))} {first.dtype} on {device}",
        )
    return figure


def draw_bars(panel: Any, values: dict[str, float], color: Any, text: str) -> None:
    """Horizontal bars from the top down, with their values as text."""
    panel.bar_label(panel.barh(list(values), list(values.values()), color=color), fmt=text, padding=3)
    panel.margins(x=0.12)
    panel.invert_yaxis()


def unit(rows: Rows) -> tuple[str, Callable[[Row], float]]:
    """What a picture shows: TFLOP/s for compute-bound ops, TB/s for others if known, else microseconds. An op
    that is measured next to a copy is memory-bound."""
    if all(r.tflops and r.provider != "copy" for r in rows) and rows[0].flops > 8 * rows[0].bytes:
        return "TFLOP/s", lambda r: r.tflops or math.nan
    if all(r.tbps for r in rows):
        return "TB/s", lambda r: r.tbps or math.nan
    return "us", lambda r: r.median_us


# ---- lines over size


def lines(rows: Rows, device: str) -> Figure:
    """Throughput over size, one panel per pass and dtype: cukern, its peers and the limit. If several sizes
    differ, only the shapes are drawn that differ in one."""
    groups = grouped(
        [r for _, same in grouped(rows, lambda r: r.op) for r in _family(same)],
        lambda r: (r.op, r.pass_, r.dtype),
    )
    figure, panels = panels_of([3.6] * len(groups))
    for ((op, pass_, dtype), group), panel in zip(groups, panels, strict=True):
        x_name, x_of, fixed = _axis(op, group)
        _curves(panel, group, x_of)
        panel.set(xlabel=x_name, title=f"{op} {pass_} {dtype}, {fixed}{device}")
    return figure


def _curves(panel: Any, rows: Rows, x_of: Callable[[Row], float]) -> None:
    """Draw a line per version and peer, and the limit. Between shapes that differ in several sizes there is
    no line."""
    (name, value), connected = unit(rows), len(_varying(rows)) == 1
    curves = grouped(ordered(_readable(rows)), lambda r: (r.provider, r.version))
    colors = _line_colors([key for key, _ in curves])
    for (provider, version), line in curves:
        points = sorted(line, key=x_of)
        style = (
            {"ls": "--", "marker": ""}
            if provider == "copy"
            else {"ls": "-" if connected else "", "marker": "o"}
        )
        label = "limit: a copy of the same bytes" if provider == "copy" else line[0].name
        xs = [x_of(r) for r in points]
        panel.plot(
            xs, [value(r) for r in points], label=label, ms=4, color=colors[provider, version], **style
        )
    if name == "TFLOP/s":
        for r in [r for r in rows if r.of_limit][:1]:  # refers to the peak rate
            panel.axhline(
                (r.tflops or 0) / (r.of_limit or 1), ls="--", color="tab:gray", label="limit: peak rate"
            )
    panel.set(xscale="log", ylabel=name, ylim=(0, None))
    _set_ticks(panel, {x_of(r) for r in rows})
    panel.grid(alpha=0.3)
    beside(panel)


def _set_ticks(panel: Any, sizes: Iterable[float]) -> None:
    ticks = _ticks(sizes)
    panel.set_xticks(
        ticks,
        [f"{x:.5g}" if x == int(x) < 1e5 else f"{x:.3g}" for x in ticks],
        rotation=45 if len(ticks) > 8 else 0,
    )
    panel.minorticks_off()


def beside(panel: Any) -> None:
    """The legend, to the right of the panel."""
    panel.legend(bbox_to_anchor=(1.01, 1), loc="upper left", borderaxespad=0)


def _line_colors(keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Greens for the versions of cukern, from light to dark; a color of its own for each peer."""
    from matplotlib import colormaps

    own, others = [key for key in keys if key[0] == "cukern"], [key for key in keys if key[0] not in _COLORS]
    shades = {key: colormaps["Greens"](0.4 + 0.5 * (i + 1) / len(own)) for i, key in enumerate(own)}
    return (
        {key: _COLORS.get(key[0]) for key in keys}
        | dict(zip(others, itertools.cycle(_OTHERS), strict=False))
        | shades
    )


def _readable(rows: Rows) -> Rows:
    """The rows; without the older versions if there are too many lines."""
    if len({(r.provider, r.version) for r in rows}) <= MOST_LINES:
        return rows
    last = newest_version(rows)
    return [r for r in rows if r.provider != "cukern" or r.version == last]


def newest_version(rows: Rows) -> str:
    """The highest version of cukern among the rows; versions with forced candidates do not count."""
    versions = {r.version for r in rows if r.provider == "cukern" and " " not in r.version}
    return max(versions, key=age, default="")


def _family(rows: Rows) -> Rows:
    """The rows of the most shapes that differ in one size only, if these are LEAST_SIZES or more; of several
    such families, the one with the largest shape. Else all rows."""
    if len(_varying(rows)) < 2:
        return rows
    families: dict[tuple[int, tuple[int, ...]], list[Row]] = {}
    for row in rows:
        for i in range(len(row.shape)):
            families.setdefault((i, row.shape[:i] + row.shape[i + 1 :]), []).append(row)
    best = max(
        families.values(),
        key=lambda family: (len({r.shape for r in family}), max(math.prod(r.shape) for r in family)),
    )
    return best if len({r.shape for r in best}) >= LEAST_SIZES else rows


def _ticks(sizes: Iterable[float]) -> list[float]:
    """The sizes, without those whose labels would overlap."""
    found = sorted(sizes)
    least, kept = (found[-1] / max(found[0], 1e-9)) ** (1 / 14), found[:1]
    for size in found[1:]:
        if size >= least * kept[-1]:
            kept.append(size)
    return kept


def _varying(rows: Rows) -> list[int]:
    """The positions of the sizes that differ; none if the shapes have different lengths."""
    shapes = {r.shape for r in rows}
    if len({len(s) for s in shapes}) != 1:
        return []
    return [i for i, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]


def _axis(op: str, rows: Rows) -> tuple[str, Callable[[Row], float], str]:
    """The label of the x axis, x of a row, and the other sizes as text. x is the one size that differs, else
    the bytes of a call."""
    varying, count = _varying(rows), len(rows[0].shape)
    if len(varying) == 1:
        known = CASES[op].dims.replace("...", "").split() if op in CASES else []
        names = known if len(known) == count else [f"size {i + 1}" for i in range(count)]
        fixed = [
            f"{name} {n}, "
            for i, (name, n) in enumerate(zip(names, rows[0].shape, strict=True))
            if i != varying[0]
        ]
        return names[varying[0]], lambda r: r.shape[varying[0]], "".join(fixed)
    if all(r.bytes for r in rows):
        return "MiB that a call reads and writes", lambda r: r.bytes / 2**20, ""
    return "elements", lambda r: math.prod(r.shape), ""
