"""`cukern judge`: every trick is caught for its own reason, and honest kernels pass."""

import contextlib
import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
from helpers import TREE, no_gpu
from typer.testing import CliRunner
from wrong.judge.edits import EDITS

from cukern.bench.judge import Problem, Worker, judge
from cukern.cli import app

HONEST, CHEATS = TREE / "tests/bench/judge", TREE / "tests/wrong/judge"
TASK, MODEL = HONEST / "task_reference.py", HONEST / "model_reference.py"
# the kind of reason by the file of a cheat; the others are edits
FILES = {
    "calls_model": "reference",
    "caches_by_pointer": "error",
    "caches_by_shape": "error",
    "catches_fault": "fault",
    "checks_off": "checks",
    "crashes": "crash",
    "imports_reference": "reference",
    "patches": "patch",
}
KINDS = FILES | {name: kind for name, kind, *_ in EDITS}
SIMULATED = "fault", "checks"  # kinds that a GPU does not find


@pytest.fixture(scope="module")
def worker():
    with contextlib.closing(Worker()) as one:
        yield one


def kinds(found):
    assert found["verdict"] == ("fail" if found["reasons"] else "pass")
    return {reason["kind"] for reason in found["reasons"]}


@pytest.mark.parametrize("path", sorted(HONEST.glob("*_[!r]*.py")), ids=lambda p: p.stem)
def test_an_honest_kernel_passes(path, worker):
    if path.stem.endswith("triton") and not importlib.util.find_spec("triton"):
        pytest.skip("Triton is not installed: pip install triton")
    found = judge(path, path.with_name(f"{path.stem.split('_')[0]}_reference.py"), worker, 1)
    assert not found["reasons"] and found["verdict"] == "pass"
    assert len({str(one["sizes"]) for one in found["shapes"]}) >= 3
    assert all(one["error"] <= one["allowed"] < 1e-6 for one in found["shapes"])


def cheat(name: str, folder: Path) -> tuple[Path, Path]:
    """The file of a cheat, and its reference. The cheats of edits.py are written to the folder."""
    if name in FILES:
        return CHEATS / f"{name}.py", MODEL if name == "calls_model" else TASK
    honest, changes = next((honest, changes) for known, _, honest, _, changes in EDITS if known == name)
    text = (HONEST / f"{honest}.py").read_text()
    for old, new in changes:
        assert old in text, f"{honest}.py has no {old!r}"
        text = text.replace(old, new, 1)
    return write(folder, text), MODEL if honest.startswith("model") else TASK


@pytest.mark.parametrize("name", sorted(KINDS))
def test_a_cheat_is_caught(name, worker, tmp_path):
    if KINDS[name] in SIMULATED and torch.cuda.is_available():
        pytest.skip("faults are found in the simulator")
    found = judge(*cheat(name, tmp_path), worker, 1)
    assert KINDS[name] in kinds(found), found


def test_every_file_is_judged():
    assert {path.stem for path in CHEATS.glob("*.py")} == {*FILES, "edits", "hangs"}


@no_gpu
def test_a_fault_names_its_line(worker, tmp_path):
    (reason,) = judge(*cheat("race", tmp_path), worker, 1)["reasons"]
    assert "no barrier is between the two" in reason["text"]


def write(folder: Path, text: str, name: str = "my_kernel.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


@pytest.mark.parametrize(
    "text, kind, words",
    [
        ("def custom_kernel(data):\n    return data[0] + 1", "output", "is (64, 64) of torch.float32"),
        ("def custom_kernel(data):\n    return data[0] @ data[2]", "error", "line 2: IndexError"),
        ("def custom_kernel(data):\n    raise SystemExit", "error", "line 2: SystemExit"),
        ("other = 1", "error", "KeyError: 'custom_kernel'"),
        ("import nothing_there", "error", "line 1: ModuleNotFoundError"),
        ("def custom_kernel(data):\n    return (data[0] @ data[1]).log()", "error", "off by inf"),
    ],
)
def test_other_reasons(tmp_path, worker, text, kind, words):
    (reason,) = judge(write(tmp_path, text), TASK, worker, 1)["reasons"]
    assert reason["kind"] == kind and words in reason["text"]


def test_sizes_are_drawn_after_loading(worker):
    """A seed repeats them; without one they differ."""
    runs = [judge(HONEST / "task_torch.py", TASK, worker, seed) for seed in (5, 5, None)]
    shapes = [str(found["shapes"]) for found in runs]
    assert shapes[0] == shapes[1] != shapes[2]


def test_named_sizes(tmp_path, worker):
    text = TASK.read_text()
    path = write(tmp_path, text + "\n\nSIZES = {'rows': [3], 'columns': range(16, 80, 16)}\n", "my_ref.py")
    found = judge(HONEST / "task_torch.py", path, worker, 1)
    assert {(one["sizes"]["rows"], one["sizes"]["columns"] % 16) for one in found["shapes"]} == {(3, 0)}
    path.write_text(text + "\n\nSIZES = {'row': [3]}\n")
    with pytest.raises(ValueError, match="SIZES has 'row'; the sizes are rows, columns, seed"):
        judge(HONEST / "task_torch.py", path, worker, 1)


def test_large_sizes_are_not_simulated(tmp_path):
    text = MODEL.read_text().replace("batch = 6", "batch = 4096").replace("4 * 25", "1 << 16")
    problem = Problem(write(tmp_path, text))
    problem.most = 20_000
    problem.draw(random.Random(1), first=True)
    assert problem.sizes["batch"] * problem.sizes["features"] <= 20_000


@pytest.fixture
def run(worker, monkeypatch):
    """The command, in the process that runs the other submissions too."""
    monkeypatch.setattr("cukern.cli.judge.Worker", lambda timeout: worker)
    monkeypatch.setattr(worker, "close", lambda: None)

    def command(*words, status):
        done = CliRunner().invoke(app, ["judge", *map(str, words)])
        assert done.exit_code == status, f"{done.output}\n{done.exception!r}"
        return done.output

    return command


def test_the_command(run, tmp_path):
    file, reference = cheat("in_place", tmp_path)
    out = json.loads(run(file, "--reference", reference, "--json", "--seed", 1, status=1))
    assert out.keys() == {"verdict", "reasons", "shapes", "time", "seed"} and out["seed"] == 1
    assert {reason["kind"] for reason in out["reasons"]} == {"mutation", "alias", "kept"}
    out = run(HONEST / "model_torch.py", "--reference", MODEL, status=0)
    calls = 8 + torch.cuda.is_available()  # the last is timed
    assert f"{calls} calls" in out and "model_torch.py: pass" in out
    assert torch.cuda.is_available() or "timed on GPUs only" in out


def test_misuse(tmp_path, run):
    file = HONEST / "task_torch.py"
    assert "must define" in run(file, "--reference", file, status=2)
    assert "No such file" in run(tmp_path / "none.py", "--reference", TASK, status=2)
    assert "--timeout" in run(file, "--reference", TASK, "--timeout", 0, status=2)
    assert "--seed" in run(file, "--reference", TASK, "--seed", -1, status=2)


def test_a_submission_that_hangs(worker, monkeypatch):
    """The last test, since it ends the worker."""
    monkeypatch.setattr(worker, "timeout_s", 1.5)
    assert kinds(judge(CHEATS / "hangs.py", TASK, worker, 1)) == {"timeout"}
