"""The launch ledger: the launches of all ops are those of tests/ledger/launches.txt, and a difference is
explained.

To update the file after a change that is meant: `cukern ledger --digest -o tests/ledger/launches.txt`.
To see a difference: `cukern ledger OP -o before.txt` in the old tree, `cukern ledger OP --diff before.txt` in
the new one.
"""

import sys

import pytest
from helpers import TREE, run

REFERENCE = TREE / "tests/ledger/launches.txt"
HOW = __doc__.partition("\n\n")[2]


def digests(*args):
    return run(
        [sys.executable, "-m", "cukern", "ledger", "--digest", *args], timeout=1200
    ).stdout.splitlines()


def compare(found, expected):
    changed = sorted({*found} ^ {*expected})
    assert not changed, f"{HOW}\nlaunches differ (GPU op version calls launches digest):\n" + "\n".join(
        changed
    )


def test_launches_of_square_are_those_of_the_reference():
    compare(
        digests("square", "--gpu", "h200"),
        [x for x in REFERENCE.read_text().splitlines() if x.startswith("h200 square ")],
    )


@pytest.mark.slow
def test_launches_are_those_of_the_reference():
    compare(digests(), REFERENCE.read_text().splitlines())


@pytest.mark.slow
def test_a_ledger_lists_launches_and_differences(tmp_path):
    file = tmp_path / "ledger.txt"
    ledger = sys.executable, "-m", "cukern", "ledger", "square", "--gpu", "a100"
    run([*ledger, "-o", str(file)])
    lines = file.read_text().splitlines()
    assert lines[0].startswith("a100 square v1 ") and any(
        line.startswith("  bwd: square_v1_bwd<float> ") for line in lines
    )
    assert "no line differs" in run([*ledger, "--diff", str(file)]).stdout
    file.write_text(file.read_text().replace("256x1x1", "128x1x1", 1))
    result = run([*ledger, "--diff", str(file)], ok=False)
    assert (
        result.returncode == 1
        and sum(line.startswith(("+ ", "- ")) for line in result.stdout.splitlines()) == 2
    )
