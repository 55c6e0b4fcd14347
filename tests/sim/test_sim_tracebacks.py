"""An uncaught fault prints the user's lines and the report, and no frame of the simulator; CUKERN_TRACEBACK=1
brings them back."""

import os
import subprocess
import sys
from pathlib import Path

from cukern import sim
from cukern.sim.faults import Where

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, cukern
kernel = cukern.compile("__global__ void k(int* x) { x[threadIdx.x] = 1; }")
def test_mine():
    with cukern.backend("sim"):
        kernel[1, 32](torch.zeros(31, dtype=torch.int32))
if __name__ == "__main__":
    test_mine()
"""
REPORT = "OutOfBounds: k, block (0, 0, 0), thread (31, 0, 0), <cukern.compile"


def run(folder, *command, **environment):
    file = folder / "test_mine.py"
    file.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "", **environment}
    done = subprocess.run(
        [sys.executable, *command, str(file)], capture_output=True, text=True, env=environment, cwd=folder
    )
    assert done.returncode == 1
    return done.stdout + done.stderr


def test_a_script_prints_its_own_lines_and_the_report(tmp_path):
    text = run(tmp_path)
    assert text.count(", line ") == 2 and "kernel[1, 32](" in text and str(ROOT / "cukern") not in text
    assert text.strip().split("\n")[-1].startswith(f"cukern.sim.faults.{REPORT}")


def test_the_switch_brings_the_frames_back(tmp_path):
    text = run(tmp_path, CUKERN_TRACEBACK="1")
    assert "machine.py" in text and "spaces.py" in text and REPORT in text


def test_pytest_shows_the_report_alone(tmp_path):
    text = run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert REPORT in text and "kernel[1, 32](" in text
    for name in ("kernel.py", "machine.py", "spaces.py", "sim/__init__.py", "contextlib"):
        assert name not in text, name


def test_ipython_shows_the_report_alone(monkeypatch):
    for kind in (sim.Race, sim.NotSimulated):
        fault = (
            kind("what", Where("k", (0, 0, 0), (1, 0, 0), "file.cu:3")) if kind is sim.Race else kind("what")
        )
        assert fault._render_traceback_() == [f"{kind.__name__}: {fault}"]
        monkeypatch.setenv("CUKERN_TRACEBACK", "1")
        assert fault._render_traceback_() is None
        monkeypatch.delenv("CUKERN_TRACEBACK")


def test_other_exceptions_are_printed_as_before(monkeypatch, capsys):
    from cukern.sim import tracebacks

    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    tracebacks.install()
    tracebacks.install()
    error = ValueError("mine")
    sys.excepthook(ValueError, error, None)
    assert seen == [(ValueError, error, None)] and capsys.readouterr().err == ""
    sys.excepthook(sim.NotSimulated, sim.NotSimulated("tcgen05"), None)
    assert len(seen) == 1 and capsys.readouterr().err == "cukern.sim.faults.NotSimulated: tcgen05\n"
