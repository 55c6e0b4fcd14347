"""Result tables, generated from benchmarks/results/*.jsonl. A table shows the newest row of each measurement.

python benchmarks/tables.py            writes benchmarks/tables/<gpu>/<op>.md, and the summary in README.md;
                                       removes the rows of results
                                       that are older, or of deleted code
python benchmarks/tables.py --check    writes nothing; exits with status 1 if a table, the summary or a
                                       file of results is not current
python benchmarks/tables.py --picture  also draws benchmarks/tables/<gpu>/summary.svg (needs matplotlib)
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import cukern.ops  # noqa: F401 -- registers the cases
from cukern.runtime.registry import CASES

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
KEY = ("op", "version", "pass", "shape", "dtype", "provider", "gpu")
COPY_KEY = ("provider", "gpu", "bytes")
MARKED = re.compile(r"(<!-- summary:(\S+) -->\n).*?(<!-- /summary -->)", re.DOTALL)

# The README's summary: one row per op, of a shape that models use.
SUMMARY = {
    "square": ((536870912,), "bfloat16"),
    "matmul": ((4096, 4096, 4096), "float32"),
    "linear": ((4096, 3072, 768), "float32"),
    "rope_qk": ((4, 4096, 32, 8, 128), "bfloat16"),
    "softmax": ((8192, 4096), "bfloat16"),
    "causal_softmax": ((192, 1024), "bfloat16"),
    "kron_linear": ((1024, 32, 32, 32), "bfloat16"),
}

Row = dict[str, Any]
Tables = dict[str, list[Row]]


def kept(text: str) -> str:
    """The lines of a file of results that stay: the newest row of each key, measured at a commit, of code
    that still exists.

    git has the others. A copy of the same number of bytes on the same GPU is one measurement, whichever op it
    is compared with: each row of an op has its own `of_limit`.
    """
    found: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        row = json.loads(line)
        if row["dirty"] or not exists(row):
            continue
        key = json.dumps([row[k] for k in (COPY_KEY if row["provider"] == "copy" else KEY)])
        found.pop(key, None)
        found[key] = line
    return "".join(f"{line}\n" for line in found.values())


def exists(row: Row) -> bool:
    """False for a version, or a candidate that was forced or excluded, that the registry no longer has."""
    case = CASES.get(row["op"])
    version, *names = re.split(r" --(?:kernel|without) |,", row["version"])
    if row["provider"] != "cukern" or not version or not case:
        return True
    return version in case.op.versions and set(names) <= set(case.candidates)


def read(folder: Path = HERE / "results") -> dict[str, Tables]:
    """The kept rows of each GPU and op: {"h200": {"square": [...], "kron_linear_candidates": [...]}}."""
    gpus: dict[str, Tables] = {}
    for file in sorted(folder.glob("*.jsonl")):
        tables = gpus.setdefault(file.stem, {})
        for row in map(json.loads, kept(file.read_text()).splitlines()):
            restricted = " --" in row["version"]  # plans with a candidate forced or excluded
            tables.setdefault(row["op"] + "_candidates" * restricted, []).append(row)
    return gpus


def markdown(rows: list[Row]) -> str:
    """A Markdown table; the columns that no row has are left out."""
    columns = {
        "pass": lambda r: r["pass"],
        "shape": lambda r: _shape(r["shape"]),
        "dtype": lambda r: r["dtype"],
        "provider": lambda r: f"**{_provider(r)}**" if r["provider"] == "cukern" else _provider(r),
        "us": lambda r: f"{r['median_us']:.4g}" if r["median_us"] < 1000 else f"{r['median_us']:.0f}",
        "± us": lambda r: f"{r['iqr_us']:.2g}" if r["iqr_us"] < 100 else f"{r['iqr_us']:.0f}",
        "TB/s": lambda r: _number(r["tbps"]),
        "TFLOP/s": lambda r: _number(r["tflops"]),
        "of limit": lambda r: _number(r["of_limit"]),
        "peak MiB": lambda r: f"{r['peak_mib']:.0f}" if r.get("peak_mib") else "",
        "error": lambda r: "" if r.get("error") is None else f"{r['error']:.1e}",
    }
    rows = sorted(rows, key=lambda r: (r["shape"], r["dtype"], r["pass"]))
    cells = {title: [cell(r) for r in rows] for title, cell in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    return _table(shown, zip(*(cells[title] for title in shown), strict=True)) + _measured_on(rows)


def speeds(tables: Tables, op: str, pass_: str) -> dict[str, Row]:
    """The rows of an op in the summary, by provider. cukern's is its newest version."""
    shape, dtype = SUMMARY[op]
    rows = [
        r for r in tables.get(op, ()) if (tuple(r["shape"]), r["dtype"], r["pass"]) == (shape, dtype, pass_)
    ]
    # "cublas" is no newer than v1
    rows.sort(key=lambda r: int(r["version"][1:]) if r["version"][1:].isdigit() else 0)
    found = {r["provider"]: r for r in rows}
    if op == "kron_linear":  # its v2 is torch's matmul, one per factor
        found["torch"] = next((r for r in rows if r["version"] == "v2"), found["cukern"])
    return found


def summary(tables: Tables) -> str:
    """The README's table: time of cukern, its fraction of the hardware limit, and how many times as long the
    peers take."""
    lines = []
    for op, (shape, dtype) in SUMMARY.items():
        line = [f"`{op}`", f"{_shape(shape)} {dtype}"]
        for pass_ in ("fwd", "bwd"):
            found = speeds(tables, op, pass_)
            ours = found.get("cukern")
            line += [f"{ours['median_us']:.4g}", _number(ours["of_limit"])] if ours else ["", ""]
            line += [
                f"{found[p]['median_us'] / ours['median_us']:.2f}x" if ours and p in found else ""
                for p in ("torch", "torch.compile")
            ]
        lines.append(line)
    return _table(
        [
            "op",
            "shape",
            *("forward us", "of limit", "torch", "torch.compile"),
            *("backward us", "of limit", "torch", "torch.compile"),
        ],
        lines,
    )


def files(gpus: dict[str, Tables]) -> dict[Path, str]:
    """The content of every generated file."""
    found = {
        HERE / "tables" / gpu / f"{op}.md": f"# {op} on {gpu}\n\n{markdown(rows)}"
        for gpu, t in gpus.items()
        for op, rows in t.items()
    }
    readme = MARKED.sub(lambda match: match[1] + summary(gpus[match[2]]) + match[3], README.read_text())
    return {**found, README: readme}


def picture(tables: Tables, file: Path) -> None:
    """Bars: how many times as long torch and torch.compile take, one group per op of the summary."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cukern"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3), sharey=True, layout="constrained")
    for panel, pass_, title in zip(panels, ("fwd", "bwd"), ("forward", "backward"), strict=True):
        for i, (peer, color) in enumerate((("torch", "tab:orange"), ("torch.compile", "tab:blue"))):
            found = [speeds(tables, op, pass_) for op in SUMMARY]
            times = [
                f[peer]["median_us"] / f["cukern"]["median_us"] if peer in f and "cukern" in f else 0
                for f in found
            ]
            bars = panel.barh(
                [n + 0.4 * i for n in range(len(times))], times, height=0.38, color=color, label=peer
            )
            panel.bar_label(bars, [f"{t:.2f}" if t else "" for t in times], padding=2, fontsize=7)
        panel.axvline(1, color="tab:green", label="cukern")
        panel.set_yticks([n + 0.2 for n in range(len(SUMMARY))], [*SUMMARY])
        panel.set_xscale("log")
        panel.margins(x=0.12)
        panel.set_xlabel(f"{title} time, cukern = 1")
    panels[0].invert_yaxis()
    panels[1].legend(fontsize=7, loc="lower right")
    figure.savefig(file, metadata={"Date": None})


def _table(titles: list[str], lines: Iterable[Iterable[str]]) -> str:
    return (
        "\n".join(
            [
                "| " + " | ".join(titles) + " |",
                "|" + "---|" * len(titles),
                *("| " + " | ".join(line) + " |" for line in lines),
            ]
        )
        + "\n"
    )


def _provider(row: Row) -> str:
    return f"{row['provider']} {row['version']}".strip()


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _measured_on(rows: list[Row]) -> str:
    """One line below a table: GPU, versions, commits and dates."""

    def both(name: str) -> str:
        return ", ".join(sorted({str(r[name]) for r in rows if r[name] is not None})) or "unknown"

    days = sorted({r["date"][:10] for r in rows})
    commits = (
        ", ".join(sorted({r["commit"][:8] + ("+" if r["dirty"] else "") for r in rows if r["commit"]}))
        or "unknown"
    )
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    gpu = f"{both('gpu')}, driver {both('driver')}" if any(r["gpu"] for r in rows) else "CPU"
    return (
        f"\n{gpu}; torch {both('torch')}, CuPy {both('cupy')}, NVRTC {both('nvrtc')}; commit {commits}; "
        f"{when}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--picture", action="store_true")
    options = parser.parse_args()
    results = {file: kept(file.read_text()) for file in sorted((HERE / "results").glob("*.jsonl"))}
    gpus = read()
    stale = {
        file: text
        for file, text in (results | files(gpus)).items()
        if not file.exists() or file.read_text() != text
    }
    if options.check:
        raise SystemExit(
            "\n".join(f"{file} is not current: run python benchmarks/tables.py" for file in stale) or 0
        )
    for file, text in stale.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for gpu, tables in gpus.items() if options.picture else ():
        picture(tables, HERE / "tables" / gpu / "summary.svg")


if __name__ == "__main__":
    main()
