"""Every example runs, on a GPU or on the CPU."""

import importlib
import importlib.util
import sys

import pytest
from helpers import TREE

FOLDER = TREE / "examples"


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.py"))])
@pytest.mark.filterwarnings("default")  # of transformers and of torch.compile
def test_an_example_runs(name, capsys, monkeypatch, registry):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    if name == "hugging_face" and importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers: pip install transformers")
    result = importlib.import_module(name).main()
    assert capsys.readouterr().out.strip()
    if name == "lokr_finetuning":
        first, last = result
        assert last < 0.6 * first
