"""`cukern watch`: an edit gives a new verdict within seconds; the old kernel stays while the new one does not compile."""

import re
import subprocess
import sys
import time

import pytest
from helpers import no_gpu, run
from test_cli import refused

from cukern.bench import environment


def lines_until(process, pattern, most_s=60):
    """The output up to a line that matches."""
    found, end = [], time.monotonic() + most_s
    while time.monotonic() < end and (line := process.stdout.readline()):
        found.append(line)
        if re.search(pattern, line):
            return "".join(found)
    raise AssertionError(f"no line matches {pattern!r}: {''.join(found)}")


def test_an_edit_gives_a_verdict_within_seconds(tmp_path):
    env = environment.with_cukern()
    run([sys.executable, "-m", "cukern", "new", "my_rms", "--kind", "row"], cwd=tmp_path, env=env)
    source = tmp_path / "my_rms.cu"
    text = source.read_text()
    command = [sys.executable, "-u", "-m", "cukern", "watch", "my_rms", "--saves", "3"]
    with subprocess.Popen(command, cwd=tmp_path, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        first = lines_until(process, "watching")
        assert "right" in first and "my_rms.cu, my_rms.py" in first
        source.write_text(text.replace("sum += load_as", "sum += lod_as", 1))
        broken = lines_until(process, "stay")
        assert re.search(r'my_rms\.cu\(27\): error: identifier "lod_as" is undefined\n.*lod_as\(x\[i\]\)', broken)
        assert "my_rms.py is broken. The kernels before it stay: v1" in broken
        source.write_text(text.replace("T(load_as(x[i]) * s)", "T(load_as(x[i]) * s * 2)", 1))
        start = time.monotonic()
        assert re.search(r"v1 +WRONG \|out\|", lines_until(process, "to this line"))
        took = time.monotonic() - start
        source.write_text(text)
        assert re.search("v1 +right", lines_until(process, "to this line"))
        assert process.wait(60) == 0
    assert took <= 3, f"{took:.1f} s from the edit to the verdict"


@no_gpu
def test_an_op_of_cukern_is_watched_in_new_processes(tmp_path):
    done = run([sys.executable, "-m", "cukern", "watch", "square", "5", "--saves", "0"], cwd=tmp_path, env=environment.with_cukern())
    assert "nothing wrong" in done.stdout and "math.cuh" in done.stdout and "square.cu" in done.stdout


@pytest.mark.parametrize("args, says", [(("nothing",), "there is no op 'nothing'"), (("absent.py",), "there is no file 'absent.py'")])
def test_what_cannot_be_watched(args, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert says in refused("watch", *args, "--saves", "0")
