"""Errors of the command line are one clear line, without a traceback: impossible sizes, files that cannot be
written, Ctrl-C."""

import os
import shlex
import subprocess
import sys

import pytest
import torch
from helpers import run
from test_cli import call, fails, refused

from cukern.bench import environment
from cukern.cli import check

COMMAND = [sys.executable, "-m", "cukern"]
QUICK = ("--wait", 0, "--warmup", 1, "--active", 1)
HUGE = 99_999_999_999


@pytest.mark.parametrize("verb", ["check", "bench", "profile"])
@pytest.mark.parametrize(
    ("dims", "says"),
    [
        (
            ("kron_linear", 5, 0, 3),
            "cannot have the sizes ROWS F1 F2... = 5 0 3: a size that it divides by is 0",
        ),
        (
            ("square", HUGE),
            "cannot have the sizes SHAPE... = 99999999999: the inputs take at least 186.3 GiB, there are "
            "64.0",
        ),
        (("matmul", HUGE, HUGE, HUGE), "no memory holds so many elements"),
        (("square", 1 << 64), "no memory holds so many elements"),
    ],
    ids=["zero", "memory", "product", "one"],
)
def test_sizes_that_cannot_be(verb, dims, says, monkeypatch):
    monkeypatch.setattr("cukern.bench.environment.memory", lambda: 64 << 30)
    assert says in refused(verb, *dims)


def test_torchs_own_error_of_memory(monkeypatch):
    monkeypatch.setattr(check, "verify", lambda *args: torch.empty(1 << 50))
    assert "can't allocate memory" in refused("check", "square", 3)


ODD = """bench square 3 --only ''; bench square 3 --pass ''; bench square 3 --dtype ''; bench startup 3;
check square --dtype '';
bench llama_block 3; bench startup --host; bench optimizers --tf32; bench fused_loss --pass fwd;
bench llama --over S=3,4; bench llama --pass fwd; profile square --dtype '';
compile ''; compile square --arch sm_70;
compile square --arch sm_\u0669\u0660"""


@pytest.mark.parametrize("line", ODD.split(";"))
def test_empty_and_odd_options(line):
    refused(*shlex.split(line))


@pytest.fixture
def unmeasured(tmp_path, monkeypatch):
    """The current folder, empty but for two entries. A measurement fails the test."""
    monkeypatch.chdir(tmp_path)
    for function in ("cukern.cli.bench.measure", "cukern.cli.profile.stepper"):
        monkeypatch.setattr(function, fails(AssertionError()))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    return tmp_path


@pytest.mark.parametrize(
    "path", ["", "folder", "file/x{}", "n" * 300 + "{}"], ids=["empty", "folder", "under a file", "long"]
)
@pytest.mark.parametrize("option", ["--record-to", "--plot", "--out"])
def test_a_target_is_tried_before_anything_is_measured(option, path, unmeasured):
    # bench --plot takes a folder
    verb = {"--out": "profile", "--plot": "plot" if path == "folder" else "bench"}.get(option, "bench")
    refused(verb, "square", 3, "--out" if verb == "plot" else option, path.format(".png"))
    assert sorted(p.name for p in unmeasured.iterdir()) == ["file", "folder"]


def test_targets_that_may_not_be_written(unmeasured, monkeypatch):
    """In /proc nobody makes a file, not even root."""
    assert "ends with" in refused("bench", "square", 3, "--plot", "x")
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    assert "that can be written, got 'file'" in refused("bench", "square", 3, "--record-to", "file")
    monkeypatch.chdir("/proc")
    monkeypatch.setattr(environment, "facts", lambda: {"dirty": False})
    for args in (
        ("bench", "square", 3, "--record"),
        ("bench", "square", 3, "--plot", "x.png"),
        ("profile", "square", 3),
    ):
        assert "No such file" in refused(*args)


@pytest.mark.parametrize("text", [None, '{"traceEvents": ['], ids=["absent", "cut"])
def test_a_trace_that_torch_did_not_write_is_not_reported(text, tmp_path, monkeypatch):
    write = lambda self, path: text and (tmp_path / "t.json").write_text(text)  # noqa: E731
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", write)
    assert "could not be written" in refused("profile", "square", 3, *QUICK, "--out", tmp_path / "t.json")


def test_ctrl_c_ends_with_130(monkeypatch):
    monkeypatch.setattr(check, "verify", fails(KeyboardInterrupt()))
    assert "Traceback" not in call("check", "square", 3, status=130).output


def test_a_full_disk_on_stdout():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, "doctor"], stdout=full, stderr=subprocess.PIPE, text=True, timeout=180
        )
    assert done.returncode == 2 and done.stderr == "error: [Errno 28] No space left on device\n"


def test_a_closed_pipe_is_quiet():
    done = run(["bash", "-c", f"{sys.executable} -m cukern doctor | head -1"])
    assert done.stdout.count("\n") == 1 and not done.stderr


def test_a_wrong_backend_in_the_environment():
    done = run([*COMMAND, "doctor"], env={"CUKERN_BACKEND": "zzz"}, ok=False)
    assert (
        done.returncode == 2
        and done.stderr == "error: CUKERN_BACKEND: there is no backend 'zzz'; there are gpu, sim\n"
    )
