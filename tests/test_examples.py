"""Every example runs, on a GPU or on the CPU."""

import importlib
import importlib.util
import sys

import pytest
from helpers import TREE

from cukern.runtime.registry import OPS

FOLDER = TREE / "examples"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    before = dict(OPS)
    yield importlib.import_module
    OPS.clear()
    OPS.update(before)
    for path in FOLDER.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.py"))])
@pytest.mark.filterwarnings("default")  # of transformers and of torch.compile
def test_an_example_runs(name, example, capsys):
    if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install transformers")
    result = example(name).main()
    assert capsys.readouterr().out.strip()
    if name == "lokr_finetuning":
        first, last = result
        assert last < 0.6 * first
