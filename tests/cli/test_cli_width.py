"""The output of commands fits 80 columns."""

import io
import itertools
import re

import pytest
from test_cli import call
from typer.main import get_command

from cukern.cli import app, common


@pytest.mark.parametrize("name", [(), *([name] for name in get_command(app).commands)], ids=lambda words: " ".join(words) or "cukern")
def test_help(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in call(*name, "--help").stdout.splitlines()]
    assert max(map(len, lines)) <= 80
    text = lines[: next(i for i, line in enumerate(lines) if line.startswith("╭"))]
    for first, second in itertools.pairwise(text):  # paragraphs are filled: the next word would not have fitted
        if first and second and not second.startswith("  "):
            assert len(first) + 1 + len(second.split()[0]) > 79, f"{first!r} ends early"


@pytest.mark.parametrize(
    "command", ["check square 100 --sim", "bench softmax 8 64 --seconds 0.03", "compile square --arch sm_80", "doctor"]
)
def test_output_on_a_terminal(command, monkeypatch):
    text = io.StringIO()
    for name in ("console", "errors"):
        for key, value in {"_width": 80, "_file": text, "_force_terminal": True, "no_color": True}.items():
            monkeypatch.setattr(getattr(common, name), key, value)
    call(*command.split())
    lines = [line for line in text.getvalue().splitlines() if "\x1b[?25" not in line and "\x1b[2K" not in line]
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert plain and max(map(len, plain)) <= 80
