"""The fuzzer: a hundred cases of each op, the same in every run, and planted bugs that it must find."""

import dataclasses

import fuzz
import pytest
import torch
from fuzz import Case, T
from helpers import kernels

import cukern


@kernels
@pytest.mark.parametrize("op", fuzz.FUZZED)
def test_a_hundred_cases(op):
    assert fuzz.fuzz(op, 100, seed=0) == []


EMPTY = T((1, 0), "float64", grad=True)
ROWS = {"tokens": T((130,), "int32", (0,) * 130), "positions": None, "version": "v2"}
FOUND = [  # a view with a size of -1 under vmap over an empty batch; sums of equal numbers, one by one
    Case("attention", "", "transforms", {"q": EMPTY, "k": EMPTY, "v": T((1, 1), "float64"), "scale": 1.0, "version": "v1"}, ("jacfwd", 0)),
    Case("embedding", "", "valid", {"weight": T((3, 8), "float64", grad=True), **ROWS}, (18, 0)),
    Case("embedding", "", "valid", {"weight": T((3, 8), "float32", grad=True), **ROWS}, (2, 0)),
]


@kernels
@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.op)
def test_cases_that_failed(case):
    case = dataclasses.replace(case, place=fuzz.PLACES[1])
    fuzz.REFUSED.clear()
    fuzz.RUN[case.kind](case)
    assert not fuzz.REFUSED


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
