"""Fills the pages of the ops when MkDocs builds the site.

{{ head OP }} is the comment at the head of the op's kernel file, with its versions, after that of its ladder.
{{ tables OP ... }} are benchmarks/tables.
{{ commands }} is the help of each command. Links of lab notebooks to files outside of docs/ become names of
files.
"""

import os
import re
from itertools import takewhile
from pathlib import Path

TREE = Path(__file__).resolve().parents[1]


def on_page_markdown(markdown: str, **_) -> str:
    markdown = re.sub(r"\{\{ head (\w+) \}\}", lambda m: head(m[1]), markdown)
    markdown = re.sub(r"\[([^]]+)\]\((?:\.\./){2}[\w/.-]+\)", r"\1", markdown)
    if "{{ commands }}" in markdown:
        markdown = markdown.replace("{{ commands }}", commands())
    return re.sub(r"\{\{ tables ([\w ]+) \}\}", lambda m: tables(m[1].split()), markdown)


def commands() -> str:
    """The help of each command, as the terminal prints it."""
    os.environ["COLUMNS"] = os.environ["TERMINAL_WIDTH"] = "100"
    from typer.main import get_command
    from typer.testing import CliRunner

    from cukern.cli import app

    parts, root = [], get_command(app)
    for name in root.commands:
        _, command, _ = root.resolve_command(root.context_class(root), [name])  # imports it
        names = [name, *(f"{name} {sub}" for sub in getattr(command, "commands", ()))]
        for line in names:
            text = CliRunner().invoke(app, [*line.split(), "--help"], env={"NO_COLOR": "1"}).stdout
            parts += [f"## cukern {line}", "", "```text", text.strip(), "```", ""]
    return "\n".join(parts)


def head(op: str) -> str:
    file = next((TREE / "kernels_cu").rglob(f"{op}.cu"), None)
    if file is None:
        return "This op is made of other ops."
    ladder = file.with_name("ladder.cu")
    files = [ladder, file] if file.parent.name == op and ladder.exists() else [file]
    return "\n".join(line for one in files for line in ("```text", *comment(one), "```"))


def comment(file: Path) -> list[str]:
    """The comment at the head of a file."""
    return [
        line[2:].removeprefix(" ")
        for line in takewhile(lambda line: line.startswith("//"), file.read_text().splitlines())
    ]


def tables(ops: list[str]) -> str:
    found = [
        (folder.name, op)
        for folder in sorted((TREE / "benchmarks/tables").iterdir())
        for op in ops
        if (folder / f"{op}.md").is_file()
    ]
    parts = []
    for gpu, op in found:
        text = (TREE / "benchmarks/tables" / gpu / f"{op}.md").read_text().partition("\n")[2].strip()
        parts += [f'??? note "{op} on {gpu}"', "", *(f"    {line}" for line in text.splitlines()), ""]
    return "\n".join(parts) or f"Not recorded yet: `cukern bench {ops[0]}` measures it."
