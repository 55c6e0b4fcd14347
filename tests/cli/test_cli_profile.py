"""`cukern profile`: peers, repetitions, TensorBoard, and the summary of Nsight Compute."""

import json
import os
import sys

import pytest
import torch
from helpers import DEVICE, no_gpu, run
from test_cli import call, refused

from cukern.bench import environment
from cukern.cli import nsight
from cukern.runtime.registry import CASES

QUICK = ("--wait", 0, "--warmup", 1, "--active", 2)
SHORT = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
COLUMNS = [
    "ID",
    "Kernel Name",
    *nsight._METRICS[:6],
    *map(SHORT.format, ("long_scoreboard", "barrier", "selected")),
]
UNITS = ["", "", "ns", "byte/s", "%", "%", "%", "register/thread", "inst", "inst", "inst"]
FAST = [
    "0",
    "void square_v2<float, 4>(float*, const float*, long long)",
    "502,500",
    "4.27e+12",
    "91.5",
    "20",
    "85",
    "22",
    "30",
    "10",
    "1",
]
SLOW = ["1", "square_v2_bwd", "1000", "1e11", "12", "9", "11", "40", "1", "3", "1"]


@pytest.mark.parametrize(
    ("peer", "shown"),
    [
        ("torch", "aten::square" if DEVICE == "cpu" else "aten::pow"),
        ("a*a", "aten::mul"),
        ("a**2", "aten::pow"),
    ],
)
def test_a_peer_is_profiled(peer, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown in call("profile", "square", 8, "--version", peer, *QUICK).stdout
    (file,) = tmp_path.iterdir()
    assert file.name.startswith("square_") and json.loads(file.read_text())["traceEvents"]


def test_stderr_has_no_log_of_torch(tmp_path):
    command = [
        sys.executable, "-m", "cukern", "profile", "square", "8", "--version", "torch", *map(str, QUICK),
    ]  # fmt: skip
    assert "Profiler" not in run(command, cwd=tmp_path, env=environment.with_cukern()).stderr


@no_gpu
def test_a_peer_that_does_not_run_here():
    assert "square triton: there is no GPU" in refused("profile", "square", 8, "--version", "triton")


def test_each_repetition_is_a_trace(tmp_path):
    out = call("profile", "square", 8, *QUICK, "--repeat", 3, "--out", tmp_path / "x.json").stdout
    assert (
        sorted(p.name for p in tmp_path.iterdir()) == ["x-2.json", "x-3.json", "x.json"]
        and "time in 6 steps" in out
    )
    call("profile", "square", 8, *QUICK, "--repeat", 2, "--tensorboard", tmp_path / "board")
    board = [p.name for p in (tmp_path / "board").iterdir()]
    assert len(board) == 2 and all(name.endswith(".pt.trace.json") for name in board)


def test_the_summary_of_nsight_compute(tmp_path, monkeypatch, capsys):
    """With a program in the place of ncu, which writes the raw page of two launches."""
    page = "\n".join(",".join(f'"{cell}"' for cell in row) for row in (COLUMNS, UNITS, FAST, SLOW))
    (tmp_path / "page").write_text(f"==PROF== Connected\n{page}\n")
    ncu = tmp_path / "ncu"
    ncu.write_text(f"#!/bin/sh\ncat {tmp_path / 'page'}\n")
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nsight.run("square", CASES["square"], "torch", (64,), torch.float32) == 0
    out = capsys.readouterr().out
    assert "502.50" in out and "4.27" in out and "square_v2<float, 4>: memory bandwidth limits it" in out
    assert "square_v2_bwd: latency limits it; the occupancy is low" in out
    assert " 75 % wait for global memory" in out and " 75 % wait for __syncthreads()" in out
    assert all(len(line) <= 80 for line in out.splitlines())


def test_arithmetic_as_the_limit():
    row = dict(zip(COLUMNS, FAST, strict=True)) | {nsight._COMPUTE: "95", nsight._REGISTERS: "n/a"}
    assert nsight.limit(row) == "arithmetic or instruction issue limits it" and nsight.stalls({}) == []
