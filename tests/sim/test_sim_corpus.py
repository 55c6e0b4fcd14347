"""The corpus: correct kernels that the simulator must not accuse, and planted bugs that it must find, each with its kind."""

import importlib

import pytest
import torch

from cukern import sim

FAMILIES = ("reductions", "scans")
KERNELS = {f"{name}-{kernel.id}": kernel for name in FAMILIES for kernel in importlib.import_module(f"corpus.{name}").KERNELS}
BUGS = [(id_, i) for id_, kernel in KERNELS.items() for i in range(len(kernel.bugs))]


@pytest.fixture(autouse=True)
def short_patience(monkeypatch):
    monkeypatch.setattr("cukern.sim.machine.options.MOST_STEPS", 100_000)


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
    with pytest.raises(sim.Fault, match=bug[3] if len(bug) > 3 else "k, block") as caught:
        kernel.run(kernel.source(bug))
    assert type(caught.value) is bug[2], caught.value
