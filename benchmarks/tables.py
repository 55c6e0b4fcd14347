"""The README's tables from benchmarks/results/*.jsonl: the newest row of each measurement.

    python benchmarks/tables.py                        prints every table
    python benchmarks/tables.py --update README.md     replaces what stands between <!-- results:GPU/OP --> and <!-- /results -->

GPU is the name of the file, as h200; OP an op, or startup.
"""

import argparse
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
KEY = ("op", "version", "pass", "shape", "dtype", "provider", "gpu")
MARKED = re.compile(r"(<!-- results:(\S+) -->\n).*?(<!-- /results -->)", re.DOTALL)

Row = dict[str, Any]


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last written row of each key, in the order in which the keys were last measured."""
    found: dict[str, Row] = {}
    for row in rows:
        key = json.dumps([row[k] for k in KEY])
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def read(folder: Path = RESULTS) -> dict[str, list[Row]]:
    """Tables' names, such as "h200/square", and their rows."""
    tables: dict[str, list[Row]] = {}
    for file in sorted(folder.glob("*.jsonl")):
        for row in newest(json.loads(line) for line in file.read_text().splitlines() if line.strip()):
            tables.setdefault(f"{file.stem}/{row['op']}", []).append(row)
    return tables


def markdown(rows: list[Row]) -> str:
    """A Markdown table; the columns that no row has are left out."""
    columns = {
        "pass": lambda r: r["pass"],
        "shape": lambda r: " x ".join(map(str, r["shape"])),
        "dtype": lambda r: r["dtype"],
        "provider": lambda r: f"**{r['provider']} {r['version']}**" if r["version"] else r["provider"],
        "us": lambda r: f"{r['median_us']:.4g}" if r["median_us"] < 1000 else f"{r['median_us']:.0f}",
        "± us": lambda r: f"{r['iqr_us']:.2g}" if r["iqr_us"] < 100 else f"{r['iqr_us']:.0f}",
        "TB/s": lambda r: _number(r["tbps"]),
        "TFLOP/s": lambda r: _number(r["tflops"]),
        "of limit": lambda r: _number(r["of_limit"]),
        "error": lambda r: "" if r.get("error") is None else f"{r['error']:.1e}",
    }
    rows = sorted(rows, key=lambda r: (r["shape"], r["dtype"], r["pass"]))
    cells = {title: [cell(r) for r in rows] for title, cell in columns.items()}
    shown = [title for title, column in cells.items() if any(column)]
    lines = ["| " + " | ".join(shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(line) + " |" for line in zip(*(cells[title] for title in shown), strict=True)]
    return "\n".join(lines) + "\n" + _made_on(rows) + "\n"


def update(text: str, tables: dict[str, list[Row]]) -> str:
    """`text` with its marked places filled anew. Raises SystemExit for a mark whose table there is not."""

    def fill(match: re.Match[str]) -> str:
        if match[2] not in tables:
            raise SystemExit(f"there are no results {match[2]!r}; there are {', '.join(tables) or 'none'}")
        return match[1] + markdown(tables[match[2]]) + match[3]

    return MARKED.sub(fill, text)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _made_on(rows: list[Row]) -> str:
    """One line below a table: what it was measured on."""

    def both(name: str) -> str:
        return ", ".join(sorted({str(r[name]) for r in rows if r[name] is not None})) or "unknown"

    days = sorted({r["date"][:10] for r in rows})
    commits = ", ".join(sorted({r["commit"][:8] + ("+" if r["dirty"] else "") for r in rows if r["commit"]})) or "unknown"
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    gpu = f"{both('gpu')}, driver {both('driver')}" if any(r["gpu"] for r in rows) else "CPU"
    return f"\n{gpu}; torch {both('torch')}, CuPy {both('cupy')}, NVRTC {both('nvrtc')}; commit {commits}; {when}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", type=Path, metavar="FILE")
    file = parser.parse_args().update
    tables = read()
    if file:
        file.write_text(update(file.read_text(), tables))
        return
    for name, rows in tables.items():
        print(f"### {name}\n\n{markdown(rows)}")


if __name__ == "__main__":
    main()
