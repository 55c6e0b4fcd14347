"""`pytest benchmarks/...` must measure: in one process, with device times, and never green without a
number."""

import json
import re
import sys
from importlib.util import find_spec

import pytest
from helpers import DEVICE, TREE, run

QUICK = "--benchmark-max-time=0.001", "--benchmark-min-rounds=2"
SQUARE = str(TREE / "benchmarks/bench_square.py")
ONE = "square and torch-forward and not compile"


def bench(*args, cwd=TREE, ok=True, **env):
    return run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *QUICK, *args],
        cwd=cwd,
        ok=ok,
        timeout=180,
        env=env,
    )


def _saved(folder):
    return f"--benchmark-storage={folder}", "--benchmark-autosave"


def test_a_benchmark_file_measures(tmp_path):
    """From another folder, with `addopts` as they are, -n 2 and PYTEST_ADDOPTS: one process, a table, JSON
    and a saved run."""
    file = tmp_path / "out.json"
    shown = bench(
        SQUARE,
        "-k",
        ONE,
        "-n",
        "2",
        f"--benchmark-json={file}",
        *_saved(tmp_path),
        cwd=tmp_path,
        PYTEST_ADDOPTS="-n 3",
    ).stdout
    assert (
        " passed" in shown
        and "Name (time in " in shown
        and "one process (2 of -n or --tx is ignored)" in shown
    )
    for row in json.loads(file.read_text())["benchmarks"]:
        info = row["extra_info"]
        assert row["stats"]["rounds"] >= 2 and row["stats"]["median"] > 0 and info["device_us"] > 0
        assert (
            info["bytes"] > 0
            and info["tbps"] == pytest.approx(info["bytes"] / info["device_us"] * 1e-6)
            and "of_limit" in info
        )
        assert info["times_of"] in shown and (info["of_limit"] is not None or DEVICE == "cpu")
    assert list(tmp_path.glob("*/0001_*.json"))


@pytest.mark.slow
def test_runs_are_compared_and_drawn(tmp_path):
    drawn = [f"--benchmark-histogram={tmp_path}/times"] if all(map(find_spec, ("pygal", "pygaljs"))) else []
    bench(SQUARE, "-k", ONE, *_saved(tmp_path))
    shown = bench(SQUARE, "-k", ONE, *_saved(tmp_path), "--benchmark-compare", *drawn).stdout
    assert " passed" in shown and "(0001_" in shown and "(NOW)" in shown
    assert bool(drawn) == bool(list(tmp_path.glob("times*.svg")))


@pytest.mark.slow
def test_the_folder_collects_every_file():
    found = bench("benchmarks/", "--collect-only", "-q").stdout
    assert {m[1] for m in re.finditer(r"benchmarks/(bench_\w+\.py)", found)} == {
        f.name for f in TREE.glob("benchmarks/bench_*.py")
    }


@pytest.mark.parametrize(
    "args, status, says",
    [
        ((SQUARE, "-k", "load_inline"), 5, "no benchmark ran"),
        pytest.param((SQUARE, "-k", ONE, "--benchmark-disable"), 0, " passed", marks=pytest.mark.slow),
        pytest.param(
            (SQUARE, "-k", ONE, "-p", "no:xdist", "-o", "addopts="),
            0,
            "Name (time in ",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (".", "--ignore=tests", "-n", "2", "-k", f"bench_square and {ONE}"),
            1,
            "measures nothing under pytest-xdist",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_without_a_number_is_not_green(args, status, says):
    result = bench(*args, ok=False)
    assert result.returncode == status and says in result.stdout, result.stdout + result.stderr


def test_only_the_conftest_calls_pytest_benchmark():
    """It waits for the GPU in each call and adds the device times."""
    for file in TREE.glob("benchmarks/bench_*.py"):
        assert not re.search(r"\bbenchmark\(|\.pedantic\(", file.read_text()), (
            f"{file.name}: use the fixture `run` or `run_call`"
        )
