"""Every example runs, on a GPU or on the CPU."""

import importlib
import sys

import pytest
from helpers import TREE, skip_without

FOLDER = TREE / "examples"


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.py"))])
@pytest.mark.filterwarnings("default")  # of transformers and of torch.compile
def test_an_example_runs(name, capsys, monkeypatch, registry):
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, name, raising=False)
    skip_without({"hugging_face": "transformers", "lokr_finetuning": "lycoris"}.get(name))
    result = importlib.import_module(name).main()
    assert capsys.readouterr().out.strip()
    if name == "lokr_finetuning":
        plain, ours = result
        assert ours[-1] < 0.6 * ours[0] and ours == pytest.approx(plain, rel=1e-5)
