"""`cukern bench --kernel`, `--without`, `--pass fwd+bwd`: what is refused, and what the record says."""

import json

import pytest
from test_cli import call, refused


def rows_of(file, provider):
    return [row for row in map(json.loads, file.read_text().splitlines()) if row["provider"] == provider]


@pytest.mark.parametrize("option", ["--kernel", "--without"])
def test_an_unknown_candidate_is_refused(option):
    assert "kron_linear has no candidate 'fast'; it has tile, chain_wgmma," in refused(
        "bench", "kron_linear", option, "fast"
    )
    assert "softmax has no candidate 'v3'; it has only its versions: use --only" in refused(
        "bench", "softmax", option, "v3"
    )


def test_the_record_names_the_candidate(tmp_path):
    file = tmp_path / "rows.jsonl"
    call(
        "bench",
        "kron_linear",
        2,
        4,
        4,
        "--pass",
        "fwd",
        "--only",
        "v1",
        "--without",
        "split_wgmma,few_rows",
        "--record-to",
        file,
    )
    (row,) = rows_of(file, "cukern")
    assert row["version"] == "v1 --without split_wgmma,few_rows"


def test_forward_and_backward_together_are_timed_if_asked_for(tmp_path):
    file = tmp_path / "rows.jsonl"
    call("bench", "square", 40, "--only", "torch", "--seconds", "0.05", "--record-to", file)
    call(
        "bench",
        "square",
        40,
        "--only",
        "torch",
        "--seconds",
        "0.05",
        "--record-to",
        file,
        "--pass",
        "fwd+bwd",
    )
    forward, backward, both = rows_of(file, "torch")
    assert [row["pass"] for row in (forward, backward, both)] == ["fwd", "bwd", "fwd+bwd"]
    assert both["bytes"] == forward["bytes"] + backward["bytes"] and both["error"] is not None
