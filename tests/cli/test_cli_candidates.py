"""`cukern bench --kernel` and `--without`: unknown candidates are refused, and the record names what was forced or excluded."""

import json

import pytest
from test_cli import call, refused


@pytest.mark.parametrize("option", ["--kernel", "--without"])
def test_an_unknown_candidate_is_refused(option):
    assert "kron_linear has no candidate 'fast'; it has group, lanes," in refused("bench", "kron_linear", option, "fast")
    assert "softmax has no candidate 'v3'; it has only its versions: use --only" in refused("bench", "softmax", option, "v3")


def test_the_record_names_the_candidate(tmp_path):
    file = tmp_path / "rows.jsonl"
    call("bench", "kron_linear", 2, 4, 4, "--pass", "fwd", "--only", "v1", "--without", "lanes,wide", "--record-to", file)
    (row,) = [json.loads(line) for line in file.read_text().splitlines()]
    assert row["version"] == "v1 --without lanes,wide"
