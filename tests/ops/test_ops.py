"""What holds for every op and every version in the registry, so that a new one is tested by its row in the
table."""

import itertools
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from helpers import (
    DEVICE,
    PLACE,
    dims_of,
    functions,
    gpu,
    kernels,
    own_names,
    places,
    same_bits,
    untraceable_devices,
)

import cukern
from cukern.bench.calls import Tensors, draw_douts, outputs, results
from cukern.bench.verify import verify
from cukern.runtime.device import KNOWN, assumed, device_of
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import collecting
from cukern.runtime.registry import CASES, Case

PLACES = [
    pytest.param(name, *p.values, marks=p.marks, id=f"{name}-{p.id}") for name in CASES for p in places(name)
]
VERSIONS = [pytest.param(name, v, id=f"{name}-{v}") for name, case in CASES.items() for v in case.op.versions]
NO_COMPILER = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="inductor needs a C compiler"
)
# The tracing is what may break. It is the same for all versions, and for all cases of a function but these:
# they write, or take offsets.
TRACED = [*own_names(), "rope_in_place", "attention_varlen"]
# have raw ops of others in TRACED
ALIKE = {"log_softmax", "geglu", "rmsnorm", "matmul"} if PLACE == "sim" else set()
COMPILED = [
    *(
        pytest.param(name, DEVICE, marks=(kernels, NO_COMPILER), id=f"{name}-kernels")
        for name in TRACED
        if name not in ALIKE
    ),
    *(pytest.param(name, "cpu", marks=NO_COMPILER, id=f"{name}-cpu") for name in ("square",)),
]


@pytest.fixture(autouse=True)
def fits(request):
    """Skip a version that this GPU, or the simulated one, is too old for."""
    values = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    version = CASES[values["name"]].op.versions.get(values.get("version")) if "name" in values else None
    if version is not None:
        has = device_of(0 if PLACE == "cuda" else backend.SIMULATED).capability
        if version.requires > has:
            pytest.skip(f"needs compute capability {version.requires / 10}, this GPU has {has / 10}")


def draw(
    case: Case, dims: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[list[torch.Tensor], Tensors]:
    """Fresh inputs and a gradient of each output."""
    inputs = list(case.make(dims, dtype, device))
    return inputs, draw_douts(case, inputs)


def call(case: Case, version: str | None):
    return lambda *x: case.call(*x, version=version)


@pytest.mark.parametrize("name, device, version", PLACES)
def test_output_and_gradients_against_float64(name, device, version):
    case = CASES[name]
    # of the others, the simulator runs two dtypes and the largest sizes
    whole = PLACE == "cuda" or name == case.op.name
    for dtype in case.op.dtypes if whole else (torch.bfloat16, torch.float32):
        every = dims_of(case) if whole else dims_of(case)[-2:]
        # the two 16-bit types take turns
        if PLACE == "sim" and whole and len(every) > 1 and dtype.itemsize == 2:
            every = every[dtype == torch.bfloat16 :: 2]
        for dims in every:
            verdict = verify(
                case, dims, dtype, {version or "ours": call(case, version)}, torch.device(device)
            )
            assert [r for r in verdict.results if not r.ok] == [], f"{dims} {dtype}"


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_version_takes_the_sizes_of_a_check(name):
    """For every dtype, as a GPU checks them. Nothing is launched."""
    case = CASES[name]
    for version, dtype, dims in itertools.product(case.op.versions, case.op.dtypes, case.check_dims):
        with cukern.backend("sim"), assumed(KNOWN["h200"]), collecting():
            case.call(*case.make(dims, dtype, "cpu"), version=version)


@gpu
@pytest.mark.parametrize("name, version", VERSIONS)
def test_runs_on_the_current_stream(name, version):
    case = CASES[name]
    inputs, douts = draw(case, dims_of(case)[-1], case.op.dtypes[-1], "cuda")
    changed = [x + 1 if x.is_floating_point() else x for x in inputs]
    # torch's matmul takes other ways with gradients
    expected_outs = results(case, call(case, version), changed, douts, wanted=())
    expected = results(case, call(case, version), changed, douts)  # also loads the kernels
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s: a launch on any other stream would read the old inputs
        for x, new in zip(inputs, changed, strict=True):
            x.copy_(new)
        outs = results(case, call(case, version), inputs, douts, wanted=())
        found = results(case, call(case, version), inputs, douts)
    side.synchronize()
    assert all(same_bits(a, b) for a, b in zip([*outs, *found], [*expected_outs, *expected], strict=True))


@gpu
@pytest.mark.parametrize("name, version", VERSIONS)
def test_cuda_graph_replays_with_changed_inputs(name, version):
    case = CASES[name]
    for dtype in case.op.dtypes:
        inputs, douts = draw(case, dims_of(case)[-1], dtype, "cuda")

        def step(inputs=inputs, douts=douts):
            return results(case, call(case, version), inputs, douts)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(2):
            fresh, fresh_douts = draw(case, dims_of(case)[-1], dtype, "cuda")
            for x, new in zip((*inputs, *douts), (*fresh, *fresh_douts), strict=True):
                x.copy_(new)
            graph.replay()
            assert all(same_bits(a, b) for a, b in zip(captured, step(), strict=True))


@gpu
@pytest.mark.parametrize("name, version", VERSIONS)
def test_threads_may_call_at_once(name, version):
    case = CASES[name]

    def work(number: int) -> None:
        torch.manual_seed(number)
        with torch.cuda.stream(torch.cuda.Stream()):
            inputs, douts = draw(case, dims_of(case)[-1], case.op.dtypes[-1], "cuda")
            first = results(case, call(case, version), inputs, douts)
            for _ in range(20):
                again = results(case, call(case, version), inputs, douts)
                assert all(same_bits(a, b) for a, b in zip(first, again, strict=True))
            theirs = results(case, case.reference, inputs, douts)
            assert all(torch.allclose(a, b) for a, b in zip(first, theirs, strict=True)), (
                "another thread's arguments"
            )

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("name, device", COMPILED)
def test_torch_compile_without_a_graph_break(name, device, monkeypatch):
    """By inductor. tests/ops/test_dynamic.py has dynamic sizes and torch.export, of CPU tensors and in the
    simulator."""
    untraceable_devices(monkeypatch)
    case = CASES[name]
    dtype = case.op.dtypes[0]
    for dynamic in (False, True) if device == "cuda" else (False,):
        torch._dynamo.reset()

        def function(*x):
            return tuple(y + 1 for y in outputs(case.call(*x)))

        compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
        first = dims_of(case)[-1] if device == DEVICE else case.check_dims[-1]
        for dims in (first, tuple(d + 2 for d in first)) if dynamic else (first,):
            inputs, douts = draw(case, dims, dtype, device)
            for wanted in ((), None) if device == "cuda" else (None,):  # without gradients, and with all
                ours, theirs = (results(case, f, inputs, douts, wanted) for f in (compiled, function))
                rounding = 4 * torch.finfo(dtype).eps  # a compiler may fuse the reference's operations
                torch.testing.assert_close(ours, theirs, rtol=rounding, atol=rounding)


@gpu
@pytest.mark.parametrize("name, version", VERSIONS)
def test_on_a_gpu_that_is_not_the_current_one(name, version):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = CASES[name]
    inputs, douts = draw(case, dims_of(case)[-1], case.op.dtypes[-1], "cuda:1")
    assert torch.cuda.current_device() == 0
    ours = results(case, call(case, version), inputs, douts)
    with torch.cuda.device(1):
        for _ in range(4):  # the plan is learned
            there = results(case, call(case, version), inputs, douts)
    for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
        torch.cuda.synchronize(1)
        with torch.cuda.stream(stream), torch.cuda.device(0):
            again = results(case, call(case, version), inputs, douts)
        torch.cuda.synchronize(1)
        for found in (ours, again):
            assert all(x.device.index == 1 for x in found) and all(
                same_bits(a, b) for a, b in zip(found, there, strict=True)
            )
    assert torch.cuda.current_device() == 0


@pytest.mark.parametrize("name, device, version", PLACES)
def test_equal_inputs_give_equal_bits_and_are_left_alone(name, device, version):
    """But for those that the op says it writes: their memory is the outputs'. In the simulator also what the
    launch before left in memory; there the cases that do not have the name of their op run in bfloat16
    only."""
    case = CASES[name]
    dtypes = (
        case.op.dtypes
        if device == "cuda"
        else (torch.bfloat16, torch.float32)
        if name == case.op.name
        else (torch.bfloat16,)
    )
    for dtype in dtypes:
        inputs, douts = draw(case, dims_of(case)[-1], dtype, device)
        before = [x.clone() for x in (*inputs, *douts)]
        passed: list[torch.Tensor] = []

        def function(*x, passed=passed):
            passed[:] = x
            return case.call(*x, version=version)

        first, *rest = [results(case, function, inputs, douts) for _ in range(4 if device == "cuda" else 2)]
        assert all(same_bits(a, b) for other in rest for a, b in zip(first, other, strict=True))
        assert all(same_bits(x, y) for x, y in zip((*inputs, *douts), before, strict=True))
        memory = {y.data_ptr() for y in rest[-1][: len(douts)]}
        for input_, x, y in zip(case.names(inputs), passed, before[: len(inputs)], strict=True):
            written = input_ in case.in_place
            assert (x.data_ptr() in memory) == written and (written or same_bits(x.detach(), y)), input_


@kernels
@pytest.mark.parametrize("name", [name for name in functions().values() if CASES[name].differentiable])
def test_an_expanded_gradient_is_read_as_one_with_memory(device, name):
    """The gradient of a sum has stride 0 along all dimensions."""
    case = CASES[name]
    inputs = case.make(
        max(case.sim_dims, key=lambda dims: torch.Size(dims).numel()), case.op.dtypes[0], device
    )
    wanted = [
        x.requires_grad_() for n, x in zip(case.names(inputs), inputs, strict=True) if case.has_gradient(n, x)
    ]
    outs = case.call(*[x.clone() for x in inputs])  # some write in place
    outs = (
        [outs]
        if isinstance(outs, torch.Tensor)
        else [out for out in outs if out is not None and out.requires_grad]
    )
    expanded = [torch.ones((), dtype=out.dtype, device=device).expand(out.shape) for out in outs]
    found, expected = (
        torch.autograd.grad(outs, wanted, g, retain_graph=True)
        for g in (expanded, [g.clone() for g in expanded])
    )
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)
