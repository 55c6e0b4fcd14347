"""The wheel holds the kernels, fits every machine, and works from anywhere; the sdist holds all that its
tests need."""

import shutil
import sys
import tarfile
import zipfile

import pytest
from helpers import TREE, run, run_python


def can_build() -> str:
    """Why a wheel cannot be built here, or nothing."""
    if run([sys.executable, "-m", "pip", "--version"], ok=False).returncode:
        return "pip is not installed"
    found = run_python("import setuptools; print(setuptools.__version__)", ok=False).stdout
    if not found or int(found.split(".")[0]) < 77:
        return f"building needs setuptools 77 or newer, found {found.strip() or 'none'}"
    return "" if (TREE / "pyproject.toml").is_file() else "the tests do not stand in a source tree"


REASON = can_build()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON or "can build")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, because setuptools writes beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(
        TREE,
        folder / "tree",
        ignore=shutil.ignore_patterns(".*", "tests", "build", "*.egg-info", "__pycache__", "shared"),
    )
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir"]
    run(
        [
            *pip,
            "wheel",
            str(folder / "tree"),
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "-w",
            str(folder),
        ],
        timeout=300,
    )
    (built,) = folder.glob("*.whl")
    run(
        [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(built)],
        timeout=300,
    )
    return built


def test_one_wheel_for_every_python_and_machine(wheel):
    assert wheel.name.startswith("cukern-") and wheel.name.endswith("-py3-none-any.whl")


def test_wheel_holds_every_source_and_nothing_else(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    listed = [
        n
        for n in run(
            ["git", "ls-files", "cukern", "kernels_cu", ":(glob)benchmarks/results/*.jsonl"], cwd=TREE
        ).stdout.splitlines()
        if not n.endswith(".clang-format")
    ]
    assert "kernels_cu/square.cu" in listed and "kernels_cu/common/vec.cuh" in listed
    places = ("kernels_cu/", "cukern/kernels_cu/"), ("benchmarks/results/", "cukern/results/")
    for source, installed in places:
        listed = [name.replace(source, installed) for name in listed]
    assert names == {*listed, "pytest_cukern.py"}
    assert wheel.stat().st_size <= 1_500_000


def test_wheel_holds_the_licence_and_no_compiled_code(wheel):
    archive = zipfile.ZipFile(wheel)
    assert any(name.endswith("LICENSE") for name in archive.namelist())
    (metadata,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("METADATA"))
    assert "License-Expression: MIT" in metadata and "Requires-Python: >=3.10" in metadata


@pytest.mark.skipif(
    not (TREE / ".git").exists() or not shutil.which("git"), reason="git says what the sdist should hold"
)
def test_sdist_holds_every_file_that_is_not_ignored(tmp_path):
    """The settings of git and of CI aside: all tests with their helpers and kernels, and the benchmarks that
    they read."""
    listed = run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=TREE
    ).stdout.splitlines()
    names = {
        name
        for name in listed
        if (TREE / name).is_file() and (not name.startswith(".") or name == ".clang-format")
    }
    for name in names:
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TREE / name, tmp_path / "tree" / name)
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", build], cwd=tmp_path / "tree")
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        found = {member.name.partition("/")[2] for member in archive if member.isfile()}
    assert {"tests/conftest.py", "tests/wrong/square/stride.cu"} <= found
    assert {name for name in found if not name.startswith("cukern.egg-info/")} - {
        "PKG-INFO",
        "setup.cfg",
    } == names


def test_installed_package_works_from_another_folder(wheel, tmp_path):
    site = wheel.parent / "site"
    code = f"""
import torch, cukern, cukern.ops
from cukern.runtime.registry import CASES
assert cukern.__file__.startswith({str(site)!r}), cukern.__file__
for name, kernel in CASES["square"].op.kernels(90, [torch.float32]).items():
    assert kernel.source.path.is_relative_to({str(site)!r}) and kernel.compile("sm_90a").code
x = torch.arange(4.0)
if torch.cuda.is_available():
    x = x.cuda()
print(cukern.square(x).tolist())
"""
    env = {"PYTHONPATH": str(site), "CUKERN_CACHE_DIR": str(tmp_path / "cache")}
    assert run([sys.executable, "-c", code], cwd=tmp_path, env=env).stdout.strip() == "[0.0, 1.0, 4.0, 9.0]"


def test_installed_command_line_answers_from_another_folder(wheel, tmp_path):
    site = wheel.parent / "site"
    for command in ([sys.executable, "-m", "cukern"], [str(site / "bin" / "cukern")]):
        assert (
            wheel.name.split("-")[1]
            in run([*command, "--version"], cwd=tmp_path, env={"PYTHONPATH": str(site)}).stdout
        )
    report = [sys.executable, "-m", "cukern", "report", "--op", "softmax"]
    assert "wrote report.html" in run(report, cwd=tmp_path, env={"PYTHONPATH": str(site)}).stdout


def test_twine_accepts_the_wheel(wheel):
    if run([sys.executable, "-m", "twine", "--version"], ok=False).returncode:
        pytest.skip("twine, of the extra dev, is not installed")
    assert "PASSED" in run([sys.executable, "-m", "twine", "check", "--strict", str(wheel)]).stdout
