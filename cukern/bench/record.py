"""Appends measurements to a .jsonl file: one JSON object per row, with the facts about the environment."""

import json
from collections.abc import Iterable
from pathlib import Path

from cukern.bench import environment
from cukern.bench.measure import Row

_MEASURED = ("op", "version", "pass_", "shape", "dtype", "provider", "median_us", "iqr_us")
_DERIVED = ("bytes", "flops", "tbps", "tflops", "of_limit", "error")


def default_file() -> Path:
    """benchmarks/results/<gpu>.jsonl of the source tree that contains the current folder, else ./<gpu>.jsonl."""
    here, name = Path.cwd(), f"{environment.short_name()}.jsonl"
    trees = [folder for folder in (here, *here.parents) if (folder / "benchmarks" / "tables.py").is_file()]
    return trees[0] / "benchmarks" / "results" / name if trees else here / name


def append(rows: Iterable[Row], file: Path) -> None:
    facts = environment.facts()
    lines = [
        json.dumps({name.rstrip("_"): _rounded(getattr(row, name)) for name in (*_MEASURED, *_DERIVED)} | facts) + "\n" for row in rows
    ]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as out:
        out.write("".join(lines))


def _rounded(value: object) -> object:
    """A float with 5 significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
