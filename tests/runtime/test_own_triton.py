"""cukern.op with kernels of Triton in place of a .cu file."""

import pytest
import torch
from helpers import DEVICE, kernels

import cukern
from cukern.bench.verify import verify
from cukern.runtime.registry import CASES

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("registry"),
    pytest.mark.filterwarnings("ignore:cukern.sim.triton is tested", "ignore:TRITON_DEFAULT_FP_FUSION"),
    kernels,
]


@triton.jit
def scaled(out, x, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) * factor, mask=at < n)


@triton.jit
def out_of_bounds(out, x, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) * factor, mask=at < n)


def op(kernel=scaled, name="scaled", **options):
    def launch(kernels, x, factor):
        out = torch.empty_like(x)
        kernels(kernel)[(triton.cdiv(x.numel(), 64),)](out, x, x.numel(), factor, BLOCK=64)
        return out

    def forward(kernels, x, factor):
        return launch(kernels, x, factor)

    def backward(kernels, _x, _out, dout, factor):
        return launch(kernels, dout, factor)

    versions = {"v1": (forward, backward)}
    dtypes = (torch.float32, torch.bfloat16)
    cases = [(1,), (200,)]
    return cukern.op(
        name, None, lambda x, factor=2.0: x * factor, versions, cases=cases, dtypes=dtypes, **options
    )


def test_a_kernel_of_triton_is_checked():
    function = op()
    for dtype in CASES["scaled"].op.dtypes:
        verdict = verify(CASES["scaled"], (200,), dtype, {"v1": function}, torch.device(DEVICE))
        assert not verdict.wrong, verdict
    assert CASES["scaled"].op.kernels(90) == {}  # nothing that NVRTC compiles


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
def test_autograd_and_torch_compile():
    function = op()
    x = torch.randn(3, 50, device=DEVICE, requires_grad=True)
    compiled = torch.compile(lambda x: function(x, 3.0).sin(), fullgraph=True, backend="aot_eager")
    (found,) = torch.autograd.grad(compiled(x).sum(), x)
    torch.testing.assert_close(found, 3 * torch.cos(3 * x))


@pytest.mark.skipif(DEVICE != "cpu", reason="faults are found in the simulator")
def test_a_fault_names_the_line_of_the_kernel():
    with pytest.raises(cukern.sim.OutOfBounds, match=r"test_own_triton.py:\d+.*reads"):
        op(out_of_bounds, "out_of_bounds")(torch.randn(50))


def test_what_is_refused():
    with pytest.raises(ValueError, match="configs must be None with source=None: Triton has an autotuner"):
        op(configs=[{"BLOCK": 64}])
    with pytest.raises(TypeError, match="takes a kernel of Triton, as source is None, got str 'scaled'"):
        op("scaled", "named")(torch.randn(5, device=DEVICE))
