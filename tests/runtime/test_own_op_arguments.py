"""Scalars, integer outputs and configurations of cukern.op."""

import pytest
import torch
from helpers import DEVICE, kernels

import cukern
from cukern.bench import own_tune
from cukern.bench.verify import verify
from cukern.runtime.device import device_of
from cukern.runtime.dispatch import own_kernels
from cukern.runtime.launch import backend
from cukern.runtime.registry import CASES

pytestmark = pytest.mark.usefixtures("registry")

SCALE = """
#ifndef BLOCK
#define BLOCK 32
#endif
__global__ void scale(float* out, const float* x, float p, int n) {
    int i = blockIdx.x * BLOCK + threadIdx.x;
    if (i < n && threadIdx.x < SKIP) out[i] = p * x[i];
}
"""
CONFIGS = [
    {"BLOCK": 32, "SKIP": 1024},
    {"BLOCK": 64, "SKIP": 63},
    {"BLOCK": 128, "SKIP": 1024},
    {"BLOCK": 2048, "SKIP": 4096},
]


def scale(kernels, like, x, p):
    out, block = torch.empty_like(like), kernels.config["BLOCK"]
    kernels("scale")(out, x, p, x.numel(), grid=-(-x.numel() // block), block=block)
    return out


def forward(kernels, x, p, twice):
    return scale(kernels, x, x, p * (1 + twice))


def backward(kernels, x, _out, dout, p, twice):
    return scale(kernels, x, dout, p * (1 + twice))


def reference(x, p=0.5, twice=False):
    return x * p * (1 + twice)


@pytest.fixture
def scaled(tmp_path):
    (tmp_path / "scale.cu").write_text(SCALE)
    options = {"dtypes": torch.float32, "cases": [(300,)], "bench": [(300,)], "configs": CONFIGS}
    return cukern.op("scaled", tmp_path / "scale.cu", reference, {"v1": (forward, backward)}, **options)


@pytest.mark.parametrize("place", ["cpu", pytest.param("kernels", marks=kernels)])
def test_scalars_reach_reference_forward_and_backward(scaled, place):
    x = torch.randn(40, device=DEVICE if place == "kernels" else "cpu", requires_grad=True)
    calls = [
        lambda: scaled(x),
        lambda: scaled(x, p=3),
        lambda: scaled(x, 0.25, True),
        lambda: scaled(x, twice=True),
    ]
    with cukern.backend("sim" if place == "kernels" else "gpu"):
        for call, factor in zip(calls, (0.5, 3, 0.5, 1), strict=True):
            out = call()
            assert torch.equal(out, x * factor)
            assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full_like(x, factor))


@kernels
@pytest.mark.filterwarnings("default")
def test_scalars_guard_compiled_code(scaled):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, p: scaled(x, p).sin(), fullgraph=True, backend="aot_eager")
    x = torch.randn(40, device=DEVICE, requires_grad=True)
    for p in (0.5, 0.25, 2, 3):
        out = compiled(x, p)
        torch.testing.assert_close(out, (x * p).sin())
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], (x * p).cos() * p)


def test_wrong_scalars(scaled, tmp_path):
    x = torch.randn(4)
    with pytest.raises(TypeError, match="scaled: p must be an int, a float, a bool or None, got str 'a'"):
        scaled(x, "a")
    with pytest.raises(
        TypeError,
        match=r"scaled\(x, p=0.5, twice=False, \*, version=None\): got an unexpected keyword argument 'q'",
    ):
        scaled(x, q=1)
    given = ("other", tmp_path / "scale.cu")
    for wrong, pair, error, says in (
        (
            lambda x, p="a": x,
            forward,
            TypeError,
            "p of reference: a default must be an int, a float, a bool or None, got str 'a'",
        ),
        (lambda x, version=1: x, forward, ValueError, "a scalar called version"),
        (
            lambda x, q=1: x,
            forward,
            ValueError,
            "must take the scalars of reference by their names, q: q is missing",
        ),
        (
            lambda x, p=1: x,
            lambda k, x, p, r=2: x,
            ValueError,
            "has a default for r, which reference does not have",
        ),
    ):
        with pytest.raises(error, match=says):
            cukern.op(*given, wrong, {"v1": pair})


QUANTIZE = """
__global__ void quantize(signed char* q, bool* big, const float* x, int n) {
    int i = threadIdx.x;
    if (i < n) q[i] = (signed char)(rintf(x[i] * 20) + (WRONG && i == 7)), big[i] = fabsf(x[i]) > 1;
}
"""


@kernels
@pytest.mark.parametrize("wrong", [0, 1])
def test_integer_and_bool_outputs_are_compared_exactly(tmp_path, wrong):
    (tmp_path / "quantize.cu").write_text(f"#define WRONG {wrong}\n{QUANTIZE}")

    def forward(kernels, x):
        q, big = torch.empty_like(x, dtype=torch.int8), torch.empty_like(x, dtype=torch.bool)
        kernels("quantize")(q, big, x, x.numel(), grid=1, block=64)
        return q, big

    def reference(x):
        return torch.round(x.float() * 20).to(torch.int8), x.abs() > 1

    f = cukern.op(
        "quantized",
        tmp_path / "quantize.cu",
        reference,
        {"v1": forward},
        outputs=2,
        dtypes=torch.float32,
        cases=[(60,)],
    )
    verdict = verify(CASES["quantized"], (60,), torch.float32, {"v1": f}, torch.device(DEVICE))
    assert [(r.what, r.ok, r.error) for r in verdict.results] == [
        ("out0", not wrong, wrong),
        ("out1", True, 0),
    ]
    assert all(r.allowed == 0 for r in verdict.results)


@kernels
def test_tune_checks_every_configuration(scaled, monkeypatch, tmp_path):
    """A time is taken only of what is right, and the fastest is recorded by the model of GPU. An edit of the
    source forgets it."""
    monkeypatch.setattr(own_kernels, "_file", lambda: tmp_path / "own_ops.json")
    problems = [one.problem for one in _tried(scaled, monkeypatch)]
    assert (
        problems[0] == problems[2] == ""
        and problems[1] == "out is wrong at 300"
        and problems[3].startswith("LaunchError")
    )
    configs = scaled.own.kernels
    assert configs.on(0).config == CONFIGS[2]
    configs._by_device.clear()
    assert configs.on(0).config == CONFIGS[2], "a later process reads the record"
    assert configs.on(backend.SIMULATED).config == CONFIGS[0]
    configs._by_device.clear()
    (tmp_path / "scale.cu").write_text(SCALE + "// edited")
    assert configs.on(0).config == CONFIGS[0]


def _tried(function, monkeypatch):
    """What tune finds if a larger block is faster. Without a GPU the simulator checks, and GPU 0 is a
    fake."""
    monkeypatch.setattr(own_tune, "_us", lambda op, *_: 1e3 / function.own.kernels.on(0).config["BLOCK"])
    if DEVICE == "cpu":
        assert all(one.us is None for one in cukern.tune(function, 300))
        assert function.own.kernels._by_device == {}, "nothing is recorded in the simulator"
        monkeypatch.setattr(own_kernels, "device_of", lambda index: device_of(backend.SIMULATED))
        monkeypatch.setattr(own_tune, "simulating", lambda: False)
        monkeypatch.setattr(own_tune, "require_gpu", lambda: None)
        monkeypatch.setattr(own_tune.environment, "device", lambda: torch.device("cpu"))
        monkeypatch.setattr(own_tune, "current_device", lambda: 0)
    return cukern.tune(function, 300)


def test_wrong_configurations(scaled, tmp_path):
    given = ("other", tmp_path / "scale.cu", reference, {"v1": (forward, backward)})
    for wrong, error in (({"BLOCK": 1}, TypeError), ([], ValueError), ([{"A": 1}, {"B": 1}], ValueError)):
        with pytest.raises(error, match="configs must be a list of dicts with the same names"):
            cukern.op(*given, configs=wrong)
    with pytest.raises(TypeError, match="takes a function that"):
        cukern.tune(torch.sin)
    with pytest.raises(ValueError, match="other has nothing to tune"):
        cukern.tune(cukern.op(*given))
