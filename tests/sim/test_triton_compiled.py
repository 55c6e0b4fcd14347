"""torch.compile's Triton kernels in the simulator, against the uncompiled functions."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._triton import has_triton

from cukern import sim
from cukern.sim import triton_driver

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton_kernels as kernels  # noqa: E402
from triton_cases import MARKS, own_cache  # noqa: E402, F401

pytestmark = MARKS


def x(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype)


def loss(a, b):
    return F.cross_entropy(a, b, label_smoothing=0.1)


INDEX = torch.tensor([3, 0, 3, 8, 1, 8, 8])
FUNCTIONS = {  # name: the function, and how its inputs are made
    "pointwise": (lambda a, b: F.gelu(a) * torch.sigmoid(b) + 2, lambda: (x(7, 50), x(50))),
    "transcendental": (lambda a: a.sin() + a.tanh() + a.abs().log1p() + a.erf(), lambda: (x(300),)),
    "bfloat16": (lambda a, b: F.silu(a) * b, lambda: (x(9, 70, dtype=torch.bfloat16),) * 2),
    "integers": (lambda a: (a * 3 // 4) ^ (a % 7) | (a << 2), lambda: (torch.randint(-99, 99, (400,)),)),
    "where": (lambda a: torch.where(a > 0, a, a.exp() - 1).clamp(max=1.5), lambda: (x(13, 31),)),
    "transposed": (lambda a, b: (a.T + b).contiguous(), lambda: (x(40, 60), x(60, 40))),
    "cat": (lambda a, b: torch.cat((a * 2, b.flip(1)), 1), lambda: (x(5, 30), x(5, 20))),
    "sum of rows": (lambda a: a.square().sum(1), lambda: (x(20, 300),)),
    "sum of columns": (lambda a: a.mean(0), lambda: (x(300, 20),)),
    "sum of all": (lambda a: a.sum(), lambda: (x(300, 70),)),
    "variance": (lambda a: torch.var_mean(a, 1), lambda: (x(6, 2000),)),
    "argmax": (lambda a: (a.argmax(1), a.amin(0)), lambda: (x(17, 90),)),
    "softmax": (lambda a: (a / 3).softmax(-1), lambda: (x(6, 200),)),
    "log-sum-exp": (lambda a: torch.logsumexp(a, 1), lambda: (x(6, 3000),)),
    "layer norm": (lambda a, w, b: F.layer_norm(a, (90,), w, b), lambda: (x(11, 90), x(90), x(90))),
    "cumsum": (lambda a: a.cumsum(1), lambda: (x(4, 150),)),
    "sort": (lambda a: a.sort(1), lambda: (x(3, 60),)),
    "gather": (lambda t, i: t[i] * 2, lambda: (x(9, 33), INDEX)),
    "scatter": (lambda t, i, v: t.index_add(0, i, v), lambda: (x(9, 33), INDEX, x(7, 33))),
    "pool": (lambda a: F.max_pool2d(F.relu(a), 3, 2, 1), lambda: (x(1, 2, 15, 17),)),
    "cross entropy": (loss, lambda: (x(7, 90), INDEX)),
    "product": (lambda a, b: F.relu(a @ b + 1), lambda: (x(20, 30), x(30, 40))),
}


@pytest.fixture
def launched(monkeypatch):
    """The names of the kernels that are launched."""
    names, run = [], sim.launch.run
    monkeypatch.setattr(sim.launch, "run", lambda *args: (names.append(args[0].name), run(*args)))
    return names


QUICK = "pointwise", "softmax", "scatter", "product"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FUNCTIONS]
)
def test_generated_kernels_of(name, launched):
    function, inputs = FUNCTIONS[name]
    torch.manual_seed(0)
    args = inputs()
    with sim.triton("sm_80", torch_compile=True):
        got = torch.compile(function, fullgraph=True)(*args)
    assert launched and all(kernel.startswith("triton_") for kernel in launched)
    torch.testing.assert_close(got, function(*args))


def test_forward_and_backward(launched):
    def function(a, w, b):
        return F.layer_norm(a, (90,), w, b).square().sum()

    ours, torchs = ([t.clone().requires_grad_() for t in (x(11, 90), x(90), x(90))] for _ in range(2))
    for one, other in zip(ours, torchs, strict=True):
        other.data.copy_(one.data)
    with sim.triton("sm_80", torch_compile=True):
        torch.compile(function, fullgraph=True)(*ours).backward()
    function(*torchs).backward()
    assert any("backward" in kernel for kernel in launched)
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_a_fault_names_the_generated_line():
    function = torch.compile(lambda table, i: table[i])
    for checked, fault in (
        (True, "assertion failed: index out of bounds"),
        (False, "bytes after the end of"),
    ):
        with (
            sim.triton(torch_compile=True),
            torch._inductor.config.patch(assert_indirect_indexing=checked),
            pytest.raises(
                sim.Fault, match=rf"triton_poi_fused_index_0, block.*\.py:\d+: .*{fault}"
            ) as caught,
        ):
            function(x(9, 33), torch.tensor([1, 12]))
        path, line = re.match(r"(.*?):(\d+)", caught.value.where.location).groups()
        assert "tl." in Path(path).read_text().split("\n")[int(line) - 1]


def test_kernels_in_a_compiled_function(launched):
    def function(a, b):
        out = torch.empty_like(a)
        kernels.add[(4,)](a * 2, b, out, 1000, BLOCK=256)
        return out + 1

    a, b = x(1000), x(1000)
    with sim.triton(torch_compile=True):
        assert torch.equal(torch.compile(function)(a, b), a * 2 + b + 1)
    assert len(launched) == 3 and launched[1] == "add"


def test_a_block_compiles_for_its_target_and_leaves_nothing_behind(monkeypatch):
    targets, load = [], triton_driver.load
    monkeypatch.setattr(
        triton_driver,
        "load",
        lambda name, ptx, *args, **options: (targets.append(ptx.text), load(name, ptx, *args, **options))[1],
    )
    triton_driver._loaded.cache_clear()
    function, a = torch.compile(lambda a: a.cumsum(0)), x(50)
    before = dict(triton.backends.backends), torch._inductor.config.cpu_backend
    for arch in ("sm_80", "sm_90"):
        with sim.triton(arch, torch_compile=True):
            function(a)
        assert f".target {arch}" in targets.pop() and not targets
        assert before == (triton.backends.backends, torch._inductor.config.cpu_backend)
        assert not has_triton()
