"""The fuzzer: a hundred cases of each op, the same in every run, and planted bugs that it must find."""

import fuzz
import pytest
import torch
from helpers import kernels

import cukern


@kernels
@pytest.mark.parametrize("op", fuzz.FUZZED)
def test_a_hundred_cases(op):
    assert fuzz.fuzz(op, 100, seed=0) == []


@pytest.mark.parametrize("kind", ["valid", "nonsense", "transforms"])
def test_planted_bugs_are_found(kind, monkeypatch):
    square = cukern.square

    def wrong(x, **options):
        try:
            out = square(x, **options)
        except TypeError as error:
            raise AttributeError(str(error)) from error
        return out.detach() if kind == "transforms" else torch.where(out > 1, out * 1.01, out)

    monkeypatch.setattr(cukern, "square", wrong)
    assert fuzz.fuzz("square", 100, seed=1, places=("reference",), kinds=(kind,))
