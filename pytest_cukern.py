"""The pytest plugin: `pytest --cukern-sim` runs the kernels of cukern and of Triton on CPU tensors in
cukern's simulator.

It is no part of the package cukern, which imports torch: pytest imports each installed plugin, wanted or
not."""

import contextlib
import importlib.util
import os

import pytest


def pytest_addoption(parser):
    group = parser.getgroup("cukern")
    group.addoption(
        "--cukern-sim",
        action="store_true",
        help="run kernels on CPU tensors in cukern's simulator, Triton's too; no GPU is needed",
    )
    group.addoption(
        "--cukern-arch",
        default="sm_90",
        metavar="ARCH",
        help="what Triton kernels are compiled for, such as sm_80; default: sm_90",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "cukern_sim: run this test's kernels on CPU tensors in cukern's simulator, as --cukern-sim does",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    wanted = (
        item.config.getoption("--cukern-sim")
        or item.get_closest_marker("cukern_sim")
        or os.environ.get("CUKERN_BACKEND") == "sim"
    )
    with contextlib.ExitStack() as blocks:
        if wanted:
            from cukern import backend, sim

            blocks.enter_context(backend("sim"))
            if importlib.util.find_spec("triton") is not None:
                blocks.enter_context(sim.triton(item.config.getoption("--cukern-arch")))
        return (yield)
