"""Every code block of docs/, the README and public docstrings runs, each command that a page names exists,
and the site builds.

CUDA blocks with a title become files, Python blocks run in order, console lines call the commands.
"""

import doctest
import importlib.util
import inspect
import json
import re
import shlex
import sys
import textwrap

import pytest
import torch
from helpers import DEVICE, TREE, run, skip_without
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

import cukern
from cukern.cli import app
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.registry import ops

PAGES = sorted(p for p in (TREE / "docs").rglob("*.md") if "notes" not in p.parts)
TEXTS = [
    *PAGES,
    *(TREE / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md")),
]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
KINDS = {"python", "cuda", "console", "text"}  # "text" is for commands that install, or need a GPU
COMMAND = re.compile(r"(?:`|^|\$ |&& )cukern ([^`\n#&]*)", re.MULTILINE)


# by page, and by function
PACKAGES = {
    "lokr": "lycoris",
    "patch_lycoris": "lycoris",
    "transformers": "transformers",
    "patch": "transformers",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_block_runs(page, tmp_path, monkeypatch, registry):
    monkeypatch.chdir(tmp_path)
    names, text = {"__name__": page.stem}, page.read_text()
    skip_without(PACKAGES.get(page.stem))
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(BLOCK.findall(text)), (
        "a block has an unknown head"
    )
    for kind, title, code in BLOCK.findall(text):
        assert kind in KINDS and (kind != "cuda" or title), f"{kind} {title}"
        if title and kind != "console":
            (tmp_path / title).write_text(code)
        if kind == "python":
            exec(compile(code, f"{page.name}: {code[:30]!r}", "exec"), names)
        for line in re.findall(r"^\$ cukern (.*)", code, re.MULTILINE) if kind == "console" else ():
            done = CliRunner().invoke(app, shlex.split(line))
            assert done.exit_code == (title == "exits with status 1"), (
                f"{line}\n{done.output}\n{done.exception!r}"
            )


def test_blocks_of_the_readme(tmp_path, monkeypatch):
    """On the CPU and in the simulator without a GPU. The reports of the simulator are those that the README
    prints."""
    monkeypatch.chdir(tmp_path)
    text = (TREE / "README.md").read_text()
    ops, warmup, own, debugged = (
        code.replace('device="cuda"', f'device="{DEVICE}"')
        for kind, _, code in BLOCK.findall(text)
        if kind == "python"
    )
    ((_, _, row_max),) = [block for block in BLOCK.findall(text) if block[0] == "cuda"]
    (tmp_path / "my.cu").write_text(
        "template <typename T> __global__ void scale(T* out, const T* x, float a, int n) {"
        "    if (threadIdx.x < n) out[threadIdx.x] = a * x[threadIdx.x]; }"
    )
    (tmp_path / "row_max.cu").write_text(row_max)
    exec(ops, {})
    if DEVICE == "cpu":
        monkeypatch.setattr(cukern, "warmup", lambda *args, **options: None)  # needs a GPU
    with cukern.backend("gpu" if DEVICE == "cuda" else "sim"):
        exec(warmup, {})
        x = torch.randn(200, device=DEVICE)
        exec(own, {"cukern": cukern, "x": x, "out": (out := torch.empty_like(x))})
    assert torch.equal(out, 0.5 * x)
    printed = [
        " ".join(report.split())
        for report in re.findall(r"^```\ncukern\.sim\.faults\.(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    found = [_fault(debugged)]
    (tmp_path / "row_max.cu").write_text(
        row_max.replace("        if (t < half)", "        __syncthreads(); if (t < half)")
    )
    found.append(_fault(debugged))
    assert [report.replace(f"{tmp_path}/", "") for report in found] == printed


def _fault(code):
    with pytest.raises(cukern.sim.Fault) as raised:
        exec(code, {"cukern": cukern, "torch": torch})
    return f"{raised.type.__name__}: {raised.value}"


@pytest.mark.parametrize("page", TEXTS, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_commands_and_options_exist(page):
    for line in COMMAND.findall(page.read_text()):
        words, command = shlex.split(line), get_command(app)
        context = command.context_class(command)
        while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
            _, command, words = command.resolve_command(context, words)  # fails if there is none
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - {
            "--help"
        } <= known, f"{page.name}: cukern {line}"


# ---- docstrings

PUBLIC = {name: getattr(cukern, name) for name in cukern.__all__ if callable(getattr(cukern, name))}
PUBLIC |= {f"Kernel.{name}": getattr(Kernel, name) for name in ("__call__", "compile", "raw", "variable")}
PUBLIC |= {f"sim.{name}": getattr(cukern.sim, name) for name in ("collect", "checks", "coverage")}
PUBLIC |= {f"layers.{name}": getattr(cukern.layers, name) for name in cukern.layers.__all__}
CODE = re.compile(r"\n\n((?:(?:    [^\n]*)?\n)+)")  # indented after a blank line; what follows "Args:" is not
SQUARE = """#include "common/math.cuh"
template <typename T> __global__ void square(T* out, const T* x, long long n) {
    if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x]; }
template <typename T> __global__ void square_bwd(T* dx, const T* x, const T* dout, long long n) {}
"""
COPY = (
    "__global__ void copy(float* out, const float* x, int n) { int i = blockIdx.x * 256 + threadIdx.x; if "
    "(i < n) out[i] = x[i]; }"
)
NOT_RUN = {"tensor_map": "is one line of a larger program", "Kernel.raw": "is one line of a larger program"}
NOT_RUN |= {"Kernel.variable": "is one line of a larger program"}
NOT_RUN |= {"tune": "is one line of a larger program"}
NOT_RUN |= {"warmup": "needs a GPU"} if DEVICE == "cpu" else {}


def examples(text):
    """The code of a docstring: indented blocks and doctest lines. Sizes from 512 on are divided by 16 on the
    CPU."""
    found = [code for code in CODE.findall(f"\n\n{inspect.cleandoc(text)}\n") if code.strip()]
    code = "\n".join(textwrap.dedent(block) for block in found if ">>>" not in block)
    code += "".join(example.source for example in doctest.DocTestParser().get_examples(text))
    if DEVICE == "cpu":
        code = re.sub(r"\b[0-9]{3,}\b", lambda n: str(int(n[0]) // 16 if int(n[0]) >= 512 else n[0]), code)
    return code.replace('"cuda"', repr(DEVICE)).replace(".cuda()", f".to({DEVICE!r})")


@pytest.mark.parametrize("name", [name for name in PUBLIC if examples(PUBLIC[name].__doc__ or "")])
def test_examples_in_docstrings(name, tmp_path, monkeypatch, registry):
    if name in NOT_RUN:
        pytest.skip(f"the example of {name} {NOT_RUN[name]}")
    skip_without(PACKAGES.get(name))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "square.cu").write_text(SQUARE)
    x, model = torch.randn(1024, device=DEVICE), torch.nn.Linear(1024, 4, device=DEVICE)
    known = {
        "torch": torch,
        "cukern": cukern,
        "sim": cukern.sim,
        "model": model,
        "x": x,
        "out": torch.empty_like(x),
        "n": 1024,
    }
    known["kernel"] = cukern.compile(COPY)
    exec(examples(PUBLIC[name].__doc__), known)


@pytest.mark.parametrize("name", PUBLIC)
def test_docstrings_are_markdown(name):
    """Outside of code, the site would drop <float> as a tag and print __global__ in bold."""
    text = re.sub(r"`[^`]*`", "", CODE.sub("\n\n", f"\n\n{inspect.cleandoc(PUBLIC[name].__doc__ or '')}\n"))
    assert re.findall(r"<\w[^>]*>|<<<|__\w+__", text) == []


# ---- pages


def test_links_lead_to_files():
    """Also those of the lab notebooks to kernels and tables, which MkDocs does not follow."""
    links = {
        (page, link)
        for page in (*TEXTS, *(TREE / "docs/notes").glob("*.md"))
        for link in re.findall(
            r"\]\(([^)#:\s]+)(?:#[^)]*)?\)",
            re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL),
        )
    }
    assert (
        len(links) > 20
        and [(page.name, link) for page, link in links if not (page.parent / link).exists()] == []
    )


def test_every_page_is_in_the_menu():
    listed = set(re.findall(r"[\w/]+\.md", (TREE / "mkdocs.yml").read_text()))
    assert {str(p.relative_to(TREE / "docs")) for p in (TREE / "docs").rglob("*.md")} == listed
    assert {f"ops/{op.stem}.md" for op in ops().values()} <= listed


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason='needs mkdocs: pip install ".[docs]"')
def test_the_site_builds(tmp_path):
    run([sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)], cwd=TREE)
    page = (tmp_path / "ops/softmax/index.html").read_text()
    assert "Layout" in page and "{{" not in page, "the head of the kernel file and the tables are filled in"
    assert "--without" in (tmp_path / "commands/index.html").read_text(), "the help of commands is filled in"
    assert "versions" in (tmp_path / "api/index.html").read_text(), "docstrings are filled in"


# ---- notebooks


NOTEBOOKS = sorted((TREE / "docs/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path, monkeypatch, capsys):
    """Its code cells run in order, without lines such as %pip install, and print the outputs in the file."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(re.sub(r"^%.*", "", "".join(cell["source"]), flags=re.MULTILINE), names)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out.replace(f"{tmp_path}/", "") == shown
