"""PTX of Numba and of the CuTe DSL in the simulator: the examples of docs/guide/triton.md."""

import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from helpers import TREE, run

TEXT = (TREE / "docs/guide/triton.md").read_text()
EXAMPLE = re.compile(
    r'^```text title="(twice_\w+\.py)"\n(.*?)^```\n\n```text\ncukern (sim .*?)\n', re.MULTILINE | re.DOTALL
)
NEEDS = {
    "twice_numba.py": ("numba_cuda", "numba-cuda"),
    "twice_cute.py": ("nvidia_cutlass_dsl", "nvidia-cutlass-dsl"),
}
# Without it an example cannot compile: a release of numba-cuda works with some releases of NumPy only.
WORKS = {"twice_numba.py": "from numba import cuda; cuda.compile_ptx(lambda: None, (), cc=(8, 0))"}


def test_the_page_has_both_examples():
    assert {name for name, _, _ in EXAMPLE.findall(TEXT)} == set(NEEDS)


@pytest.mark.parametrize("name, code, command", EXAMPLE.findall(TEXT), ids=[*NEEDS])
def test_an_example_of_another_compiler(name, code, command, tmp_path):
    package, wheel = NEEDS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {wheel}")
    probe = subprocess.run([sys.executable, "-c", WORKS.get(name, "")], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{package} does not work here: {probe.stderr.strip().splitlines()[-1]}")
    (tmp_path / name).write_text(code)
    run([sys.executable, name], cwd=tmp_path)
    arguments = [sys.executable, "-m", "cukern", *shlex.split(command)]
    assert "no faults" in run(arguments, cwd=tmp_path).stdout
    short = [word.replace("f32:999 ", "f32:998 ") for word in arguments]
    report = run(short, cwd=tmp_path, ok=False).stdout
    line = code.split("\n").index(next(x for x in code.split("\n") if "y[i] = 2 * x[i]" in x)) + 1
    assert re.search(rf"OutOfBounds: .*{name}:{line}: reads 4 bytes", report), report
