"""The output of commands fits 80 columns."""

import io
import itertools
import re

import pytest
from test_cli import call
from typer.main import get_command

from cukern.bench import record
from cukern.bench.measure import Row
from cukern.cli import app, common


@pytest.mark.parametrize(
    "name",
    [(), *([name] for name in get_command(app).commands)],
    ids=lambda words: " ".join(words) or "cukern",
)
def test_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in call(*name, "--help").stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    text = lines[: next(i for i, line in enumerate(lines) if line.startswith("╭"))]
    # paragraphs are filled: the next word would not have fitted
    for first, second in itertools.pairwise(text):
        if first and second and not second.startswith("  "):
            assert len(first) + 1 + len(second.split()[0]) > 79, f"{first!r} ends early"


@pytest.mark.parametrize(
    "command",
    [
        "check square 100 --sim",
        "bench softmax 8 64 --seconds 0.03",
        "compile square --arch sm_80",
        "doctor",
        "profile square 100 --wait 0 --warmup 1 --active 1",
        "plot softmax --from results.jsonl",
        "compare results.jsonl results.jsonl",
        "report --from results.jsonl",
        "new an_op_with_a_long_name --kind tiled",
    ],
)
def test_output_on_a_terminal(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    rows = [
        Row("softmax", f"v{i}", "fwd", (8, 64 * n), "bfloat16", "cukern", 2.0, 0.1)
        for i in (1, 2)
        for n in (1, 2, 3)
    ]
    record.append(rows, tmp_path / "results.jsonl")
    text = io.StringIO()
    for name in ("console", "errors"):
        for key, value in {"_width": 80, "_file": text, "_force_terminal": True, "no_color": True}.items():
            monkeypatch.setattr(getattr(common, name), key, value)
    call(*command.split())
    lines = [
        line for line in text.getvalue().splitlines() if "\x1b[?25" not in line and "\x1b[2K" not in line
    ]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert plain and max(map(len, plain)) <= 80
