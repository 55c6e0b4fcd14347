"""Appends measurements to benchmarks/results/<gpu>.jsonl, one JSON object per line, with the environment."""

import json
from collections.abc import Iterable
from pathlib import Path

from cukern.bench import environment
from cukern.bench.measure import Row


def default_file() -> Path:
    """benchmarks/results/<gpu>.jsonl of the source tree that contains the current folder, else ./<gpu>.jsonl."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "benchmarks" / "tables.py").is_file():
            return folder / "benchmarks" / "results" / f"{environment.short_name()}.jsonl"
    return here / f"{environment.short_name()}.jsonl"


def append(rows: Iterable[Row], file: Path) -> None:
    """Append the rows to the file."""
    facts = environment.facts()
    lines = [json.dumps({**_measured(row), **facts}) + "\n" for row in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as out:
        out.write("".join(lines))


def _measured(row: Row) -> dict[str, object]:
    return {
        "op": row.op,
        "version": row.version,
        "pass": row.pass_,
        "shape": list(row.shape),
        "dtype": row.dtype,
        "provider": row.provider,
        "median_us": _digits(row.median_us),
        "iqr_us": _digits(row.iqr_us),
        "bytes": row.bytes,
        "flops": row.flops,
        "tbps": _digits(row.tbps),
        "tflops": _digits(row.tflops),
        "of_limit": _digits(row.of_limit),
        "error": _digits(row.error),
    }


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
