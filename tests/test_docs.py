"""Every code block of docs/ runs: CUDA blocks with a title become files, Python blocks run in order, console lines call the commands."""

import re
import shlex

import pytest
from helpers import TREE
from typer.testing import CliRunner

from cukern.cli import app
from cukern.runtime.registry import OPS

PAGES = sorted(p for p in (TREE / "docs").rglob("*.md") if "notes" not in p.parts)
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
KINDS = {"python", "cuda", "console", "text"}  # "text" is for commands that install, or need a GPU


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_runs(page, tmp_path, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    names, text = {"__name__": page.stem}, page.read_text()
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), "a block has an unknown head"
    for kind, title, code in BLOCK.findall(text):
        assert kind in KINDS and (kind != "cuda" or title), f"{kind} {title}"
        if title and kind != "console":
            (tmp_path / title).write_text(code)
        if kind == "python":
            exec(compile(code, f"{page.name}: {code[:30]!r}", "exec"), names)
        for line in re.findall(r"^\$ cukern (.*)", code, re.MULTILINE) if kind == "console" else ():
            done = CliRunner().invoke(app, shlex.split(line))
            assert done.exit_code == (title == "exits with status 1"), f"{line}\n{done.output}\n{done.exception!r}"


def test_every_page_is_in_the_menu():
    listed = set(re.findall(r"[\w/]+\.md", (TREE / "mkdocs.yml").read_text()))
    assert {str(p.relative_to(TREE / "docs")) for p in (TREE / "docs").rglob("*.md")} == listed
    assert {f"ops/{op.stem}.md" for op in OPS.values()} <= listed
