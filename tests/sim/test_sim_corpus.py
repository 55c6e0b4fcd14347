"""The corpus: correct kernels that the simulator must not accuse, and planted bugs that it must find, each
with its kind."""

import importlib
import re

import pytest
import torch

from cukern import sim

FAMILIES = ("reductions", "scans", "tiles", "elements", "flags", "warps", "copies")
KERNELS = {
    f"{name}-{kernel.id}": kernel
    for name in FAMILIES
    for kernel in importlib.import_module(f"corpus.{name}").KERNELS
}
BUGS = [(id_, i) for id_, kernel in KERNELS.items() for i in range(len(kernel.bugs))]


LINE = re.compile(r"<cukern.compile \w+>:(\d+)")
SAYS = {  # what a report says of the remedy, or of the value and the rule that it breaks
    sim.Race: "no barrier is between|a __syncwarp|(?:nothing orders two|does not order) blocks|cp.async|a "
    "wait |cluster barrier|fence.proxy"
    "|another value|without __ldg",
    sim.OutOfBounds: "(after|across) the end of|before the start of|(block|thread) has \\d+ bytes|which "
    "has|null pointer|view"
    "|of the shared memory of",
    sim.Misaligned: "is .*not a multiple of \\d+",
    sim.Uninitialized: "that nobody wrote|no statement has set|which is not (there|in the mask)|hold an "
    "uninitialized value",
    sim.BarrierFault: "waits (at|for) .*(but|for \\d+ arrivals)|names the lanes|meets .* but others|are "
    "missing|wants all|barrier",
    sim.StepLimit: "does its loop end",
}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr("cukern.sim.machine.options.MOST_STEPS", 10_000)


def test_size_of_the_corpus():
    assert len(KERNELS) >= 60 and len(BUGS) >= 90


@pytest.mark.parametrize("id_", KERNELS)
def test_correct_kernel_is_not_accused(id_):
    kernel = KERNELS[id_]
    found, inputs = kernel.run(kernel.source())
    expected = kernel.expected(*inputs)
    if kernel.close:
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("id_, number", BUGS)
def test_planted_bug_is_found(id_, number):
    kernel = KERNELS[id_]
    bug = kernel.bugs[number]
    text = kernel.source(bug)
    with pytest.raises(sim.Fault, match=bug[3] if len(bug) > 3 else SAYS[bug[2]]) as caught:
        kernel.run(text)
    fault = caught.value
    assert type(fault) is bug[2], fault
    lines = [text.split("\n")[int(n) - 1].strip() for n in LINE.findall(str(fault))]
    # statements of this kernel, no brackets
    assert lines and all(len(line) > 1 for line in lines if "has ended" not in str(fault)), fault
