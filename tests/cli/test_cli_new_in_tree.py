"""`cukern new` in cukern's own source tree: a registered op, whose tests pass at once."""

import shutil
import sys

import pytest
from helpers import TREE, run


@pytest.fixture
def tree(tmp_path):
    """A copy of the source tree."""
    for folder in ("cukern", "kernels_cu", "tests", "benchmarks", "docs"):
        shutil.copytree(
            TREE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results")
        )
    for file in ("pyproject.toml", "mkdocs.yml"):
        shutil.copy(TREE / file, tmp_path)
    return tmp_path


def new(tree, name, *args, ok=True):
    return run(
        [sys.executable, "-m", "cukern", "new", name, *args],
        cwd=tree / "cukern",
        env={"PYTHONPATH": str(tree)},
        ok=ok,
    )


def test_a_new_op_is_registered_and_its_tests_pass(tree):
    said = new(tree, "my_rms", "--kind", "row").stdout
    assert (
        "kernels_cu/my_rms.cu" in said
        and "registered in cukern/ops/__init__.py, cukern/api.py, cukern/__init__.py, cukern/cli/names.py, "
        "mkdocs.yml"
        in said
    )
    assert "my_op" not in "".join(p.read_text() for p in tree.rglob("*my_rms*") if p.is_file())
    tests = [
        f"tests/{name}"
        for name in ("ops/my_rms", "test_layout.py", "test_docs.py", "runtime/test_registry.py")
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-m",
        "",
        "-k",
        "my_rms or own_folder or no_import_cycles or menu",
        *tests,
    ]
    passed = run(command, cwd=tree, env={"PYTHONPATH": str(tree)}).stdout
    assert " passed" in passed and "failed" not in passed
    checked = [sys.executable, "-m", "cukern", "check", "my_rms", "--sim", "--dtype", "f"]
    assert "nothing wrong" in run(checked, cwd=tree, env={"PYTHONPATH": str(tree)}).stdout
    if shutil.which("ruff"):
        run(["ruff", "check", "--no-cache", "cukern", "tests/ops/my_rms", "benchmarks"], cwd=tree)
        run(["ruff", "format", "--no-cache", "--check", "cukern", "tests/ops/my_rms", "benchmarks"], cwd=tree)
    source = tree / "kernels_cu/my_rms.cu"
    source.write_text(source.read_text().replace("out[i] =", "if (i) out[i] =", 1))
    assert run([*command[:-3], "-x"], cwd=tree, env={"PYTHONPATH": str(tree)}, ok=False).returncode == 1


@pytest.mark.parametrize(
    ("name", "says"),
    [("load", "a public name of cukern, got 'load'"), ("taken", "'kernels_cu/taken.cu' exists")],
)
def test_names_that_are_refused(name, says, tree):
    (tree / "kernels_cu/taken.cu").write_text("")
    before = sorted(tree.rglob("*.*"))
    done = new(tree, name, ok=False)
    assert done.returncode == 2 and says in done.stderr
    assert [p for p in sorted(tree.rglob("*.*")) if p.suffix != ".pyc"] == before
