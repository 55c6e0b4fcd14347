"""What every test stands on: GPU tests skip aloud, outputs start as NaN, and kernels are compiled into a cache of the run's own."""

import os

# cuBLAS reads this when CUDA starts; without it deterministic mode, which poisons memory, refuses matrix products.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from helpers import forget_cache

NO_GPU = "needs a GPU, and torch.cuda sees none"


def pytest_report_header(config):
    if not torch.cuda.is_available():
        return f"cukern: torch {torch.__version__} sees no GPU; the tests marked gpu are skipped"
    return f"cukern: torch {torch.__version__} on {torch.cuda.get_device_name()}"


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=NO_GPU))


def pytest_terminal_summary(terminalreporter):
    skipped = sum(NO_GPU in str(report.longrepr) for report in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests were skipped for want of a GPU: nothing here shows that the kernels run", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """One folder of cubins for the whole run, empty at its start, so that nothing compiled earlier can hide a fault."""
    folder = tmp_path_factory.mktemp("cubins")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUKERN_CACHE_DIR", str(folder))
        forget_cache()
        yield folder
    forget_cache()


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """An empty cache folder for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUKERN_CACHE_DIR", str(folder))
    forget_cache()
    yield folder
    monkeypatch.undo()
    forget_cache()


@pytest.fixture(autouse=True)
def poison(request):
    """GPU tests: torch.empty gives NaN (integers: the largest), so that an element which a kernel does not write is seen."""
    if not request.node.get_closest_marker("gpu"):
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
