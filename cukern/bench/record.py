"""Appends measurements to a .jsonl file, one JSON object per row with the facts about the environment, and
reads them."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukern.bench import environment
from cukern.bench.measure import Row

_MEASURED = ("op", "version", "pass_", "shape", "dtype", "provider", "median_us", "iqr_us")
_DERIVED = ("bytes", "flops", "tbps", "tflops", "of_limit", "error", "peak_mib")


def default_file() -> Path:
    """benchmarks/results/<gpu>.jsonl of the source tree that contains the current folder, else
    ./<gpu>.jsonl."""
    here, name = Path.cwd(), f"{environment.short_name()}.jsonl"
    trees = [folder for folder in (here, *here.parents) if (folder / "benchmarks" / "tables.py").is_file()]
    return trees[0] / "benchmarks" / "results" / name if trees else here / name


def append(rows: Iterable[Row], file: Path) -> None:
    facts = environment.facts()
    found = [
        {name.rstrip("_"): _rounded(getattr(row, name)) for name in (*_MEASURED, *_DERIVED)} | facts
        for row in rows
    ]
    lines = [json.dumps(one, separators=(",", ":")) + "\n" for one in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a", encoding="utf-8") as out:
        out.write("".join(lines))


def _rounded(value: object) -> object:
    """A float with 5 significant digits."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Recorded:
    """A row of a file, with the GPU ("CPU" without one), the commit and the date of its measurement."""

    row: Row
    gpu: str
    commit: str
    date: str


def read(file: Path) -> list[Recorded]:
    """The rows of a file that `append` wrote. Raises FileNotFoundError; ValueError names a line that is not a
    record."""
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                made = json.loads(line)
                values: dict[str, Any] = {
                    name: made[name.rstrip("_")] for name in (*_MEASURED, "bytes", "flops", "of_limit")
                }
                row = Row(
                    **{**values, "shape": tuple(values["shape"])},
                    error=made.get("error"),
                    peak_mib=made.get("peak_mib"),
                )
                found.append(Recorded(row, made["gpu"] or "CPU", made["commit"] or "", made["date"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{file}:{number} is not a record of cukern bench: {type(error).__name__}: {error}"
                ) from None
    return found


def newest(found: Iterable[Recorded]) -> list[Recorded]:
    """The last of each measurement: op, version, pass, shape, dtype, provider and GPU."""
    return list({(one.row.key, one.gpu): one for one in found}.values())


def files() -> list[Path]:
    """The recorded files of the source tree that contains the current folder, else those in the current
    folder, else those of the installed package."""
    package = Path(__file__).resolve().parents[1]
    folders = default_file().parent, package / "results", package.parent / "benchmarks/results"
    return next((found for folder in folders if (found := sorted(folder.glob("*.jsonl")))), [])
