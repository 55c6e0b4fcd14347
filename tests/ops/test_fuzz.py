"""The fuzzer: cases of each op, the same in every run, and planted bugs that it must find."""

import ast
import dataclasses
from pathlib import Path

import fuzz
import long_double
import mpmath
import pytest
import torch
from fuzz import Case, T
from helpers import PLACE, kernels

import cukern


@kernels
@pytest.mark.parametrize("op", fuzz.FUZZED)
def test_cases_of_every_op(op):
    assert fuzz.fuzz(op, 100 if PLACE == "cuda" else 40, seed=0) == []


NO_KEYS = {name: T((rows, 1), "float64", grad=True) for name, rows in (("q", 1), ("k", 0), ("v", 0))}
NO_TOKENS = {"weight": T((3, 1), "float64", grad=True), "tokens": T((0,), "int32", ())}
EMPTY = T((1, 0), "float64", grad=True)
ROWS = {"tokens": T((130,), "int32", (0,) * 130), "positions": None, "version": "v2"}
SPECIAL = T((1, 5, 40), "float64", values="special", seed=26, grad=True, offset=1)
SQUARES = {
    name: (T((4, 4), "float32", values="squares", seed=i),)
    for i, name in enumerate(("params", "grads", "exp_avgs", "exp_avg_sqs"))
}
STEP_1000 = dict.fromkeys(("params", "grads", "exp_avgs"), (T((), "float64"),)) | {
    "exp_avg_sqs": (T((), "float64", "squares", 57),)
}
GATED = {
    "gate": T((2, 3), "float16", values="special", seed=86, grad=True),
    "up": T((2, 3), "float16", values="wild", grad=True),
}
EXPANDED = {
    "a": T((5, 17, 2), "float32", values="ties", seed=1, grad=True, steps=(0, 0, 1)),
    "b": T((2, 1), "float32", grad=True),
}
HUGE = T((1, 1, 2), "float32", values="wild", seed=14, grad=True, steps=(1, 1, 0))
SUM = {
    "reduction": "sum",
    "label_smoothing": 0.0,
    "ignore_index": -100,
    "z_loss": 0.0,
    "softcap": None,
    "vocab_size": None,
}
SUM |= {"version": None}
ONE = {"x": T((1,), "float32"), "weight": T((1, 1), "float32"), "targets": T((), "int32", values=(0,))}
LEAST = T((8, 2), "bfloat16", values="special", grad=True)
NO_SAMPLES = tuple(T(shape, "float64", grad=True) for shape in ((2, 3), (1, 2), (0, 3, 1)))
KRON = {"bias": None, "residual": T((0, 6), "float64", grad=True), "scale": 1.0, "version": None}
LARGEST = {"gate": T((33,), "float32", values="special", grad=True), "up": T((33,), "float32", grad=True)}
EQUAL = {
    "x": T((4, 4, 4, 1), "float32", grad=True),
    **{name: T((1,), "float32", grad=True) for name in ("weight", "bias")},
}
OF_SIZE_1 = {name: (T((1, 1, 2), "float32", order=(0, 2, 1)),) for name in ("params", "grads", "exp_avgs")}
OF_SIZE_1 |= {"exp_avg_sqs": (T((1, 1, 2), "float32", values="squares", order=(0, 2, 1)),)}
COLUMN = {"x": T((1025, 1), "float64", seed=1, grad=True), "dim": 0, "scale": 0.125}
QKV = {
    name: T((33, 64), "bfloat16", seed=i, size=8.0 if name != "v" else 1.0) for i, name in enumerate("qkv")
}
ATTENTION = {
    "scale": None,
    "causal": True,
    "softcap": None,
    "window": None,
    "sink": None,
    "return_lse": False,
    "version": None,
}
SINK = (
    {name: T((1, 1), "float32", grad=True, size=1e30 if name == "v" else 1.0) for name in "qkv"}
    | ATTENTION
    | {"sink": 95.0}
)
HUGE_QKV = T((1, 2, 3, 1, 1), "float64", grad=True, size=1e103)
SLOPES = {
    "gate": T((1, 8), "float32", grad=True),
    "up": T((1, 8), "float32", values="wild", grad=True, size=1e24),
}
SMALL = {"a": T((16, 16), "float32", seed=1, grad=True), "b": T((16, 16), "float32", grad=True, size=1e-36)}
SUMMANDS = [T((2, 3), "bfloat16", grad=True, size=size) for size in (1.0, 1e19)]
NORM = {"weight": None, "residual": None, "version": None}
SPECIALS = T((17,), "bfloat16", values="special", grad=True)
TANH = {"bias": None, "approximate": "tanh", "version": None}
PAIR = {
    "gate": T((), "bfloat16", values="special", seed=28, grad=True),
    "up": T((), "bfloat16", grad=True, size=1e19),
}
TARGET = {"targets": T((), "int32", values=(0,)), **SUM, "z_loss": 1e-3, "inplace_backward": False}
ADAMW = {
    name: (T((), "float32" if "exp" in name else "bfloat16", size=1e20),) for name in ("grads", "exp_avgs")
}
ADAMW |= {
    "exp_avg_sqs": (T((), "float32", "squares", size=1e20),),
    "step": 1,
    "betas": (0.9, 0.999),
    "version": None,
}
# of the CPU path, where results or gradients were wrong, infinite or NaN, and those of the kernels right
MAGNITUDES = [
    Case("attention", "reference", "valid", {**QKV, **ATTENTION}, (0, 1)),
    Case(
        "rmsnorm",
        "reference",
        "valid",
        {"x": T((1, 8), "bfloat16", grad=True, size=1e18), "eps": 1e-5, **NORM},
        (0, 1),
    ),
    Case(
        "rmsnorm",
        "reference",
        "valid",
        {"x": T((1, 3), "bfloat16", grad=True, size=1e-15), "eps": 0.0, **NORM},
        (0, 1),
    ),
    Case(
        "layernorm",
        "reference",
        "valid",
        {"x": T((1, 8), "bfloat16", grad=True, size=1e18), "bias": None, "eps": 1e-5, **NORM},
        (0, 1),
    ),
    Case(
        "layernorm",
        "reference",
        "valid",
        {"x": T((2,), "float64", grad=True, size=1e66), "bias": None, "eps": 1e-5, **NORM},
        (0, 2, 1e242),
    ),
    Case(
        "rmsnorm",
        "reference",
        "valid",
        {"x": T((3,), "float64", grad=True, size=1e104), "eps": 1e-5, **NORM},
        (0, 1),
    ),
    Case("gelu", "reference", "valid", {"x": T((1,), "float32", grad=True, size=1e20), **TANH}, (0, 1)),
    Case("gelu", "reference", "valid", {"x": SPECIALS, **TANH}, (0, 2)),
    Case("geglu", "reference", "valid", {**PAIR, "approximate": "none", "version": None}, (0, 1)),
    Case(
        "cross_entropy",
        "reference",
        "valid",
        {"logits": T((33,), "float32", "wild", seed=22, grad=True), **TARGET},
        (0, 1),
    ),
    Case("adamw", "reference", "valid", {"params": (T((), "bfloat16", size=1e-5),), **ADAMW}, (0, 1)),
]


TABLES = {"cos": T((1, 1), "float32"), "sin": T((1, 1), "float32")}
# a view with a size of -1 under vmap over an empty batch; sums of equal numbers, one by one; rounding of
# torch's float64;
FOUND = [
    # a moment that is the gradient, of its difference from the old one; the tangent of lse = -inf;
    # torch's second derivative of an embedding of no tokens; torch's gelu of the least normal bfloat16;
    # logsumexp of logits of 1e13; no gradient of torch's for a factor without samples; torch's gelu of the
    # largest float32;
    # a sink of which the sigmoid is 0; squares that overflow in float32, and some that do not; an int that
    # torch's ops do not take; 64 equal numbers in float32; strides of dimensions of size 1, and of an empty
    # array in NumPy; gelu's slope times the largest float32; small parts of 3xTF32 that are subnormal; a
    # product of two parts of one tensor that overflows, and such an error's scale; derivatives of NaN and
    # infinity
    Case(
        "attention",
        "",
        "transforms",
        {"q": EMPTY, "k": EMPTY, "v": T((1, 1), "float64"), "scale": 1.0, "version": "v1"},
        ("jacfwd", 0),
    ),
    Case(
        "attention",
        "",
        "transforms",
        {**NO_KEYS, "causal": False, "return_lse": True, "version": None},
        ("jvp", 0),
    ),
    Case("embedding", "", "transforms", {**NO_TOKENS, "positions": None, "version": None}, ("twice", 0)),
    Case("embedding", "", "valid", {"weight": T((3, 8), "float64", grad=True), **ROWS}, (18, 0)),
    Case("embedding", "", "valid", {"weight": T((3, 8), "float32", grad=True), **ROWS}, (2, 0)),
    Case(
        "cross_entropy",
        "",
        "valid",
        {"logits": HUGE, "targets": T((1, 1), "int32", values=(0,)), **SUM, "inplace_backward": False},
        (0, 1),
    ),
    Case(
        "kron_linear",
        "reference",
        "transforms",
        {"x": T((0, 6), "float64", grad=True), "factors": NO_SAMPLES, **KRON},
        ("checkpoint", 0),
    ),
    Case("attention", "", "valid", SINK, (0, 1)),
    Case("rmsnorm", "", "valid", {"x": SUMMANDS[0], "eps": 1e-5, **NORM, "residual": SUMMANDS[1]}, (0, 1)),
    Case(
        "layernorm",
        "",
        "valid",
        {"x": SUMMANDS[0], "bias": None, "eps": 1e-5, **NORM, "residual": SUMMANDS[1]},
        (0, 1),
    ),
    Case(
        "rmsnorm",
        "",
        "valid",
        {"x": T((2, 3), "bfloat16", grad=True, size=1e18), "eps": 1e-5, **NORM},
        (0, 1),
    ),
    Case(
        "linear_cross_entropy",
        "",
        "nonsense",
        {**ONE, **SUM, "chunk_rows": None},
        ("chunk_rows", None, "10**400"),
    ),
    Case("layernorm", "sim", "valid", {**EQUAL, "eps": 1e-05, "residual": None, "version": None}, (1, 0)),
    Case(
        "adamw",
        "",
        "nonsense",
        {**OF_SIZE_1, "step": 1, "betas": (0.9, 0.999), "version": None},
        ("params", 0, "v.numpy()"),
    ),
    Case(
        "gelu",
        "reference",
        "valid",
        {"x": LEAST, "bias": None, "approximate": "none", "version": None},
        (0, 1),
    ),
    Case("gelu", "", "valid", {"x": SPECIAL, "bias": None, "approximate": "tanh", "version": None}, (0, 1)),
    Case("geglu", "", "valid", {**LARGEST, "approximate": "none", "version": None}, (0, 1)),
    Case("softmax", "", "valid", {**COLUMN, "version": None}, (0, 1)),
    Case("geglu", "sim", "valid", {**SLOPES, "approximate": "none", "version": None}, (0, 1, 1e-2)),
    Case("matmul", "sim", "valid", {**SMALL, "version": "v6"}, (0, 1)),
    Case("matmul", "sim", "valid", {**SMALL, "version": "v7"}, (0, 1)),
    Case(
        "attention", "sim", "valid", {"q": SMALL["a"], "k": SMALL["a"], "v": SMALL["b"], **ATTENTION}, (0, 1)
    ),
    Case(
        "attention_packed",
        "reference",
        "valid",
        {"qkv": T((1, 1, 3, 1, 1), "bfloat16", grad=True, size=1e20), **ATTENTION},
        (0, 1),
    ),
    Case(
        "attention_packed", "reference", "valid", {"qkv": HUGE_QKV, **ATTENTION, "return_lse": True}, (0, 1)
    ),
    Case("gelu", "", "valid", {"x": T((40,), "float32", values="special", grad=True), **TANH}, (0, 1)),
    Case("swiglu", "", "valid", {**LARGEST, "version": None}, (0, 1)),
    Case("geglu", "", "valid", {**GATED, "approximate": "none", "version": None}, (0, 1)),
    Case("matmul", "reference", "valid", {**EXPANDED, "version": None}, (0, 0)),
    Case(
        "rope_",
        "",
        "nonsense",
        {"x": T((1, 1, 0, 2), "float32"), "layout": "bshd", **TABLES, "version": None},
        ("x", None, "v.numpy()"),
    ),
    Case("adamw", "", "valid", {**STEP_1000, "step": 1000, "lr": 0.5, "version": None}, (0, 1)),
    Case("adamw", "", "valid", {**SQUARES, "betas": (0.0, 0.5), "version": "v1"}, (0, 1)),
    Case("adamw", "", "valid", {**SQUARES, "betas": (0.0, 0.5), "version": "v2"}, (0, 1)),
]


@pytest.mark.parametrize("case", MAGNITUDES, ids=lambda case: case.op)
def test_magnitudes_that_failed(case):
    fuzz.run_valid(case)


def test_the_truth_is_independent():
    """The formulas import nothing of cukern."""
    for name in ("fuzz_truth", "long_double", "rope_oracle"):
        tree = ast.parse((Path(fuzz.__file__).parent / f"{name}.py").read_text())
        modules = [
            n.module if isinstance(n, ast.ImportFrom) else n.names[0].name
            for n in ast.walk(tree)
            if isinstance(n, ast.Import | ast.ImportFrom)
        ]
        assert modules and not [m for m in modules if m.split(".")[0] in ("cukern", "fuzz")], name


@kernels
@pytest.mark.parametrize("case", FOUND, ids=lambda case: case.op)
def test_cases_that_failed(case):
    fuzz.REFUSED.clear()
    places = (
        (case.place,) if case.place else (fuzz.PLACES[1], "reference")[: 1 + (case.args["version"] is None)]
    )
    for place in places:
        fuzz.RUN[case.kind](dataclasses.replace(case, place=place))
    assert not fuzz.REFUSED


def test_second_derivatives_of_lse_with_a_small_sink():
    q, sink = torch.ones(1, 1, requires_grad=True), torch.tensor(-100.0, requires_grad=True)
    lse = cukern.attention(q, torch.ones(1, 1), torch.ones(1, 1), sink=sink, return_lse=True)[1]
    first = torch.autograd.grad(lse.sum(), [q, sink], create_graph=True)
    assert torch.autograd.grad(first[0].sum() + first[1], [q, sink]) == (torch.zeros(1, 1), torch.tensor(0.0))


def test_long_doubles_and_their_gradients():
    x = long_double.exact(torch.tensor([0.3, 3.0, 6.0], dtype=torch.float64)).requires_grad_()
    y = torch.erfc(-x) * x.sigmoid()
    y.sum().backward()

    def f(t):
        return mpmath.erfc(-t) / (1 + mpmath.exp(-t))

    for i, v in enumerate((0.3, 3.0, 6.0)):
        for found, right in ((y, f(mpmath.mpf(v))), (x.grad, mpmath.diff(f, v))):
            assert abs(mpmath.mpmathify(found.numbers[i]) / right - 1) < 2.0**-53


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


@pytest.mark.parametrize("special", ["nan", "inf"])
def test_finite_results_of_special_numbers_are_found(special, monkeypatch):
    square = cukern.square

    def wrong(x, **options):
        out = square(x, **options)
        return torch.where(out.isnan() if special == "nan" else out.isinf(), 0.5, out)

    monkeypatch.setattr(cukern, "square", wrong)
    assert fuzz.fuzz("square", 100, seed=1, places=("reference",), kinds=("valid",))
