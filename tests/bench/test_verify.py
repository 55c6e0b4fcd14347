"""cukern.bench.verify: what is right passes, what is wrong by a little is caught."""

import dataclasses
import math

import pytest
import torch
from helpers import gpu
from turn import TURN, Turn

from cukern.bench import calls, verify
from cukern.runtime.registry import CASES

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SQUARE, LINEAR = CASES["square"], CASES["linear"]


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dout):
        dx = 2 * ctx.saved_tensors[0] * dout
        dx.view(-1)[-1] *= 1.001
        return dx


def one_nan(x):
    out = x * x
    return torch.where(torch.arange(x.numel()) == 7, math.nan, out)


def half_written(x):
    out = torch.empty_like(x)
    out[: x.numel() // 2] = 0
    return out.detach() + x * x - out.detach()  # wrong only where `out` is not 0


def check(functions, dims=(100,), dtype=torch.float32, case=SQUARE):
    return verify.verify(case, dims, dtype, functions, CPU)


@pytest.mark.parametrize("dtype", SQUARE.op.dtypes)
def test_verify_passes_what_is_right(dtype):
    verdict = check({"a": lambda x: x * x, "b": torch.square}, dtype=dtype)
    assert verdict.wrong == 0
    assert [r.what for r in verdict.results] == ["out", "dx"] * 2
    assert [(p.first, p.second, p.what) for p in verdict.pairs] == [("a", "b", "out"), ("a", "b", "dx")]


@pytest.mark.parametrize(
    "wrong",
    [lambda x: x * x * 1.001, lambda x: x * x * (1 + 1e-6), one_nan, half_written, torch.zeros_like],
    ids=["1e-3", "1e-6", "a NaN", "unwritten", "zeros"],
)
def test_verify_catches_a_wrong_output(wrong):
    verdict = check({"good": lambda x: x * x, "bad": lambda x: wrong(x.detach()) + 0 * x})
    bad = {(r.version, r.what) for r in verdict.results if not r.ok}
    assert ("bad", "out") in bad
    assert not any(version == "good" for version, _ in bad)
    assert not verdict.pairs[0].ok


def test_verify_catches_a_gradient_alone():
    verdict = check({"good": torch.square, "bad": WrongGradient.apply})
    assert [(r.version, r.what) for r in verdict.results if not r.ok] == [("bad", "dx")]
    assert [p.what for p in verdict.pairs if not p.ok] == ["dx"]


def test_verify_norm_and_error_are_those_of_the_result(monkeypatch):
    case = dataclasses.replace(
        SQUARE, make=lambda dims, dtype, device: (torch.tensor([3.0, 4.0], dtype=dtype),)
    )
    verdict = check({"off": lambda x: x * x * torch.tensor([1.0, 1.125])}, case=case)
    assert verdict.results[0].norm == pytest.approx(math.hypot(9, 18), rel=1e-6)
    assert verdict.results[0].error == pytest.approx(0.125, rel=1e-6)


def test_verify_is_not_blinded_by_underflow():
    """In float16 the square of 1e-4 is 0: a relative error of 1 of torch's own, which must not excuse
    others."""
    x = torch.randn(1000).half()
    x[0] = 1e-4
    case = dataclasses.replace(SQUARE, make=lambda dims, dtype, device: (x.clone(),))
    assert check({"right": lambda x: x * x}, dtype=torch.float16, case=case).wrong == 0
    assert check({"zeros": lambda x: 0 * x}, dtype=torch.float16, case=case).wrong == 2


def test_verify_wants_exact_zeros():
    case = dataclasses.replace(SQUARE, make=lambda dims, dtype, device: (torch.tensor([0.0, 1.0]),))
    assert check({"right": lambda x: x * x}, case=case).wrong == 0
    verdict = check({"tiny": lambda x: x * x + torch.tensor([1e-30, 0.0])}, case=case)
    assert [r.error for r in verdict.results if not r.ok] == [math.inf]


def test_verify_measures_a_product_against_its_terms():
    assert check({"right": torch.nn.functional.linear}, (33, 17, 65), case=LINEAR).wrong == 0
    wrong = check(
        {"no bias": lambda x, w, b: torch.nn.functional.linear(x, w) + 0 * b}, (33, 17, 65), case=LINEAR
    )
    assert [r.what for r in wrong.results if not r.ok] == ["out", "dbias"]


def test_verify_of_float64_lets_terms_be_added_in_another_order():
    """The truth is torch's own float64, whose error is not 0, though it shows none."""

    def product(x, w, b):  # one term after another
        out = 0 * b + 0 * x[:, :1]
        for k in range(x.shape[1]):
            out = out + x[:, k, None] * w[None, :, k]
        return out + b

    off = {"right": product, "off": lambda x, w, b: product(x, w, b) * (1 + 1e-13)}
    verdict = check(off, (20, 30, 300), torch.float64, LINEAR)
    assert {r.version for r in verdict.results if not r.ok} == {"off"}
    assert max(r.allowed for r in verdict.results) < 1e-14


# ---- several outputs, in place, constants, scales of the op's own: all in the toy op of turn.py


class WrongTurn(Turn):
    @staticmethod
    def backward(ctx, dq, dk):
        dq, dk, *rest = Turn.backward(ctx, dq, dk)
        return dq, dk * 1.01, *rest


def turn_wrong_k(*inputs):
    q, k = Turn.apply(*inputs)
    return q, k + k.detach() * 0.01


@pytest.mark.parametrize("dtype", TURN.op.dtypes)
def test_verify_of_two_outputs_written_in_place(dtype):
    verdict = check({"a": TURN.call, "b": TURN.reference}, dtype=dtype, case=TURN)
    assert verdict.wrong == 0
    assert [r.what for r in verdict.results] == ["out0", "out1", "dq", "dk"] * 2
    assert all(r.norm > 1 for r in verdict.results)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (WrongTurn.apply, ["dk"]),
        (turn_wrong_k, ["out1"]),
        (lambda *x: Turn.apply(*Turn.apply(*x), *x[2:]), ["out0", "out1", "dq", "dk"]),
    ],
    ids=["gradient of k", "output of k", "turned twice"],
)
def test_verify_catches_what_is_wrong_in_one_of_several(wrong, what):
    verdict = check({"good": TURN.call, "bad": wrong}, case=TURN)
    assert [(r.version, r.what) for r in verdict.results if not r.ok] == [("bad", w) for w in what]


def test_verify_gives_each_function_inputs_that_nobody_has_written():
    drawn, seen = TURN.make((100,), torch.float32, CPU), []
    before = [x.clone() for x in drawn]

    def function(*x):
        seen.append([y.detach().clone() for y in x])
        return TURN.call(*x)

    case = dataclasses.replace(TURN, make=lambda *_: drawn)
    assert check({"first": function, "second": function}, case=case).wrong == 0
    assert (
        len(verify.errors(case, drawn, {"first": function, "second": function}, "fwd")) == 2
        and len(seen) == 4
    )
    assert all(torch.equal(x, y) for one in (drawn, *seen) for x, y in zip(one, before, strict=True))


def test_verify_refuses_an_output_too_few():
    with pytest.raises(
        ValueError,
        match=r"the output is \(100, 2\) of torch\.float32, torch's is \(100, 2\) of torch\.float32 and",
    ):
        check({"bad": lambda *x: TURN.reference(*x)[0]}, case=TURN)


def test_constants_and_integers_have_no_gradient():
    inputs = TURN.make((100,), torch.float32, CPU)
    assert calls.wanted_inputs(TURN, "bwd", inputs) == [0, 1] and calls.wanted_inputs(
        TURN, "bwd:k", inputs
    ) == [1]
    seen = []
    calls.results(
        TURN,
        lambda *x: seen.extend(y.requires_grad for y in x) or TURN.call(*x),
        inputs,
        calls.draw_douts(TURN, inputs),
    )
    assert seen == [True, True, False, False, False]


def test_verify_takes_the_scales_of_the_op():
    off = {"off": lambda x: x * x * 1.5}
    double = dataclasses.replace(
        SQUARE, magnitude=lambda inputs, douts: (2 * inputs[0] ** 2, 8 * (inputs[0] * douts[0]).abs())
    )
    assert [r.error for r in check(off).results] == pytest.approx([0.5, 0.5])
    assert [r.error for r in check(off, case=double).results] == pytest.approx([0.25, 0.125])
    with pytest.raises(ValueError, match="zip"):
        check(off, case=dataclasses.replace(SQUARE, magnitude=lambda inputs, douts: inputs))


def test_scales_of_the_op_excuse_a_cancellation():
    """|a| cos - |b| sin may be next to nothing beside |a cos| + |b sin|, which is what rounding is relative
    to."""
    x = torch.tensor([[1.0, -1.0]]).repeat(100, 1)
    angle = torch.pi / 4 + torch.linspace(0, 1e-6, 200)
    inputs = (x, x.clone(), angle.cos(), angle.sin(), torch.arange(100))
    rounded = {"other order": lambda *x: tuple(y * (1 + 2e-7) for y in TURN.reference(*x))}
    ours = dataclasses.replace(TURN, make=lambda *_: inputs)
    assert check(rounded, case=dataclasses.replace(ours, roundings=2)).wrong == 0
    scales = {r.what: r.error for r in check(rounded, case=dataclasses.replace(ours, magnitude=None)).results}
    assert scales["out0"] > 1e-3, "by absolute values alone, a rounding would seem a large error"


def test_errors_of_two_outputs_written_in_place():
    inputs = TURN.make((100,), torch.float32, CPU)
    functions = {
        "right": TURN.call,
        "reference": TURN.reference,
        "wrong k": turn_wrong_k,
        "wrong dk": WrongTurn.apply,
    }
    found = {p: verify.errors(TURN, inputs, functions, p) for p in ("fwd", "bwd", "bwd:q")}
    assert [name for name, e in found["fwd"].items() if e > 1e-6] == ["wrong k"]
    assert [name for name, e in found["bwd"].items() if e > 1e-6] == ["wrong dk"]
    assert all(len(e) == 4 for e in found.values()) and max(found["bwd:q"].values()) < 1e-6


def test_errors_are_those_of_the_pass():
    def wrong(x, weight, bias):
        out = torch.nn.functional.linear(x, weight, bias)
        return out + (weight - weight.detach()).sum()  # right forward, and in the gradient of x

    functions = {"right": LINEAR.call, "wrong": wrong, "no gradient": lambda *x: LINEAR.call(*x).detach()}
    inputs = LINEAR.make((8, 16, 4), torch.float32, CPU)
    found = {p: verify.errors(LINEAR, inputs, functions, p) for p in ("fwd", "bwd:x", "bwd:weight", "bwd")}
    assert all(0 < e["right"] < 1e-6 for e in found.values())
    assert found["fwd"]["wrong"] < 1e-6 and found["bwd:x"]["wrong"] < 1e-6
    assert found["bwd:weight"]["wrong"] > 1e-2 and found["bwd"]["wrong"] > 1e-2
    assert [p for p, e in found.items() if "no gradient" in e] == ["fwd"]


def test_verify_refuses_another_shape_or_dtype():
    with pytest.raises(ValueError, match=r"the output is \(10, 10\)"):
        check({"bad": lambda x: (x * x).view(10, 10)})
    with pytest.raises(ValueError, match=r"of torch\.float64, torch"):
        check({"bad": lambda x: (x * x).double()})


def test_poison_is_taken_away_again():
    with verify.poisoned():
        assert torch.empty(10).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()


def test_candidates_without_a_gpu():
    functions, refused = verify.candidates(SQUARE, CPU)
    assert list(functions) == [verify.REFERENCE] and list(refused) == list(SQUARE.op.versions)
    with pytest.raises(ValueError, match="no version 'v99'"):
        verify.candidates(SQUARE, CPU, "v99")


@gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_verify_on_the_gpu(case):
    functions, _ = verify.candidates(case, CUDA)
    assert list(functions) == list(case.op.versions)
    assert verify.verify(case, case.check_dims[-1], torch.float32, functions, CUDA).wrong == 0
