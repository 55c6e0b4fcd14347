"""Draws measurements as bar charts, one panel per table."""

from collections.abc import Sequence
from pathlib import Path

from cukern.bench.measure import Row, Table
from cukern.runtime.compiler import SetupError

_COLORS = {"cukern": "tab:green", "copy": "tab:gray"}


def drawable(file: Path) -> None:
    """Raises SetupError without matplotlib, and ValueError for an unknown picture format."""
    try:
        import matplotlib
    except ImportError as error:
        raise SetupError(f"--plot needs matplotlib ({error}). Run: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    if file.suffix[1:].lower() not in FigureCanvasAgg.filetypes:
        raise ValueError(f"--plot must name a file that ends with .{', .'.join(sorted(FigureCanvasAgg.filetypes))}, got {str(file)!r}")


def plot(tables: Sequence[Table], file: Path) -> None:
    """Write a picture in the format of the file's extension. Raises as `drawable` does."""
    drawable(file)
    from matplotlib import pyplot

    tables = [t for t in tables if t.rows]
    heights = [0.8 + 0.35 * len(t.rows) for t in tables]
    figure, panels = pyplot.subplots(len(tables), 1, figsize=(8, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained")
    for table, panel in zip(tables, panels[:, 0], strict=True):
        values, unit = _values(table.rows)
        colors = [_COLORS.get(r.provider, "tab:blue") for r in table.rows]
        bars = panel.barh([f"{r.provider} {r.version}" for r in table.rows], values, color=colors)
        panel.bar_label(bars, fmt="%.3g", padding=3)
        panel.margins(x=0.12)
        panel.invert_yaxis()
        panel.set_xlabel(unit)
        first = table.rows[0]
        panel.set_title(f"{first.op} {first.pass_} {'x'.join(map(str, first.shape))} {first.dtype}", loc="left", fontsize=10)
    figure.savefig(file)
    pyplot.close(figure)


def _values(rows: Sequence[Row]) -> tuple[list[float], str]:
    """The lengths of the bars: TFLOP/s for compute-bound ops, TB/s for others if known, else microseconds."""
    if all(r.tflops for r in rows) and rows[0].flops > 8 * rows[0].bytes:
        return [r.tflops or 0.0 for r in rows], "TFLOP/s"
    if all(r.tbps for r in rows):
        return [r.tbps or 0.0 for r in rows], "TB/s"
    return [r.median_us for r in rows], "us"
