"""No result depends on the defaults of the process: torch's default dtype and device, the number of threads,
deterministic mode."""

import ast
import contextlib
import zlib
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, functions, kernels, same_bits

import cukern
from cukern.bench.calls import draw_douts, results
from cukern.runtime.registry import CASES

PACKAGE = Path(cukern.__file__).parent
FACTORIES = {
    *(
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "tensor",
        "scalar_tensor",
        "arange",
        "linspace",
        "logspace",
        "eye",
    ),
    *("rand", "randn", "randint", "randperm", "normal"),
}
PLACES = [pytest.param("cpu", id="cpu"), pytest.param(DEVICE, marks=kernels, id="kernels")]


def unnamed(source: str) -> list[tuple[int, str]]:
    """Line and text of each call of one of torch's factories that does not name both dtype and device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if (
            not isinstance(node, ast.Call)
            or not isinstance(node.func, ast.Attribute)
            or node.func.attr not in FACTORIES
        ):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            named = {keyword.arg for keyword in node.keywords}
            if None not in named and not {"dtype", "device"} <= named:
                found.append((node.lineno, ast.unparse(node)))
    return found


def test_the_static_check_sees_what_it_should():
    assert len(unnamed("torch.zeros(3)\ntorch.ones(2, dtype=d)\ntorch.arange(5, device=d)")) == 3
    assert not unnamed(
        "torch.zeros(3, dtype=d, device=e)\nx.new_zeros(2)\ntorch.empty_like(x)\nnumpy.zeros(3)"
    )


def test_every_allocation_names_its_dtype_and_device():
    wrong = [
        f"{file.relative_to(PACKAGE)}:{line}: {text}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, text in unnamed(file.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def default_dtype(dtype):
    old = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(old)


@contextlib.contextmanager
def deterministic():
    old = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills memory that torch.empty allocates with NaN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(old)


DEFAULTS = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "meta": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", functions().values())
def test_results_do_not_depend_on_defaults(name, device):
    case = CASES[name]
    dtype = torch.bfloat16 if torch.bfloat16 in case.op.dtypes else torch.float32

    def run():
        torch.manual_seed(zlib.crc32(name.encode()))
        inputs = case.make(case.sim_dims[0], dtype, device)
        return (
            results(case, case.call, inputs, draw_douts(case, inputs))
            if case.differentiable
            else case.call(*[x.clone() for x in inputs])
        )

    exact = run()
    for what, setting in DEFAULTS.items():
        with setting():
            found = run()
        for a, b in zip(found, exact, strict=True):
            assert a.dtype == b.dtype and a.device == b.device and same_bits(a, b), what
