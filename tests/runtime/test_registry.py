"""The registry of ops is complete and consistent; a version is chosen by what the GPU can run; dispatch modes
see the raw ops."""

import dataclasses
import itertools

import pytest
import torch
from helpers import kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import cukern
from cukern.bench import calls
from cukern.runtime import registry
from cukern.runtime.device import KNOWN
from cukern.runtime.dispatch import versions
from cukern.runtime.dispatch.autograd import apply_of
from cukern.runtime.dispatch.own_launch import is_own
from cukern.runtime.dispatch.versions import choose
from cukern.runtime.registry import CASES, Version, ops


@pytest.mark.parametrize("name", CASES)
def test_registry_entry_is_complete(name):
    case = CASES[name]
    assert case.name == name and case.bound in ("memory", "compute") and case.dims and case.bench_dims
    for dims, dtype in itertools.product(case.check_dims[:2], case.op.dtypes):
        inputs = case.make(dims, dtype, "cpu")
        assert (
            len(inputs) == len(case.names(inputs))
            and inputs[0].dtype == dtype
            and all(x.device.type == "cpu" for x in inputs)
        )
        assert not torch.equal(inputs[0], case.make(dims, dtype, "cpu")[0]), "drawn afresh"
        douts = calls.draw_douts(case, inputs)
        found = calls.results(case, case.call, inputs, douts)
        # their loss is float32
        wide = name in ("cross_entropy", "cross_entropy_padded") and dtype != torch.float64
        assert found[0].dtype == (torch.float32 if wide else dtype)
        wanted = [inputs[i] for i in calls.wanted_inputs(case, "bwd", inputs)]
        assert bool(wanted) == case.differentiable and [(g.shape, g.dtype) for g in found[len(douts) :]] == [
            (x.shape, x.dtype) for x in wanted
        ]
    assert set(case.constants) <= set(case.inputs) and set(case.in_place) <= set(case.inputs) - set(
        case.constants
    )


@pytest.mark.parametrize("name", CASES)
def test_cost_is_at_least_reading_the_inputs_and_writing_the_outputs(name):
    case = CASES[name]
    for dims, dtype in [
        *itertools.product(case.check_dims[:2], case.op.dtypes),
        (case.check_dims[-1], case.op.dtypes[0]),
    ]:
        inputs = case.make(dims, dtype, "cpu")
        size = sum(x.nbytes for x in (*inputs, *calls.outputs(case.reference(*inputs))))
        cost = case.cost(dims, dtype.itemsize)
        assert set(cost) == {"fwd"} if not case.differentiable else {"fwd", "bwd"} <= set(cost)
        backward = cost.get("bwd", cost["fwd"])
        assert 0 < cost["fwd"].bytes <= size and cost["fwd"].bytes <= backward.bytes
        least = 0 if is_own(name) else 1  # cukern.op may leave the flops out
        assert least <= cost["fwd"].flops <= backward.flops


@pytest.mark.parametrize("op", ops().values(), ids=ops())
def test_rows_of_versions(op):
    versions = dict(op.versions)
    assert CASES[op.name].op is op, "a case has the name of its op"
    cublas = versions.pop("cublas", None)
    first = int(next(iter(versions))[1:])  # not 1 for log_softmax, which lacks the first versions of softmax
    assert list(versions) == [f"v{i}" for i in range(first, first + len(versions))], (
        "numbered from the simplest on"
    )
    assert versions[f"v{first}"].requires <= 75 or (cublas and first > 1), (
        "a simple version runs on every GPU"
    )
    for version in versions.values():
        assert version.idea
        # some versions lack a dtype
        kernels = [[k.name for k in version.instances(dtype)] for dtype in op.dtypes]
        assert any(kernels) or version.instances is Version.instances, "none at all: torch's own operations"
        assert all(len(set(names)) == len(names) for names in kernels), (
            "a kernel of all dtypes may be in several lists, but once in each"
        )


def test_kernels_are_those_of_the_capability_and_dtypes(monkeypatch):
    op = CASES["square"].op
    new = dataclasses.replace(op.versions["v2"], requires=200)
    op = dataclasses.replace(op, versions={**op.versions, "v2": new})
    assert not any("v2" in name for name in op.kernels(90)) and any("v2" in name for name in op.kernels(200))
    halves = op.kernels(90, [torch.float16])
    assert halves and all("__half" in name for name in halves)


def test_choice_of_a_version(monkeypatch):
    square = CASES["square"]
    rows = {**square.op.versions, "v3": dataclasses.replace(square.op.versions["v2"], requires=200)}
    monkeypatch.setitem(
        registry.CASES,
        "square",
        dataclasses.replace(square, op=dataclasses.replace(square.op, versions=rows)),
    )
    capability = {0: 90, 1: 200, 2: 75}
    monkeypatch.setattr(
        versions, "device_of", lambda index: KNOWN["h200"]._replace(capability=capability[index])
    )
    choose.cache_clear()
    try:
        assert choose("square", "", 0) == ("v2", "v2"), "the newest that this GPU can run"
        assert choose("square", "", 1) == ("v3", "v3")
        assert choose("square", "v1", 2) == ("v1", "v1")
        with pytest.raises(
            ValueError,
            match=r"version 'v3' of cukern\.square needs compute capability 20\.0, this GPU has 9\.0",
        ):
            choose("square", "v3", 0)
        with pytest.raises(ValueError, match="no version 'v7'; it has v1, v2, v3"):
            choose("square", "v7", 0)
    finally:
        choose.cache_clear()


def test_a_dispatch_mode_sees_the_raw_op():
    seen = []

    class Listen(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
        with Listen():
            cukern.square(x, version="v1")
    assert torch.ops.cukern._square.default in seen


def test_apply_of_is_apply():
    class Triple(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 3 * x

        @staticmethod
        def backward(ctx, d):
            return 3 * d

    x = torch.randn(4, requires_grad=True)
    a, b = apply_of(Triple)(x), Triple.apply(x)
    assert torch.equal(a, b) and torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (a, b)))


def _rotated(device, x):
    return cukern.rope_(x, *cukern.rope_tables(4, 8, device=device))


def _accumulated(device, into):
    x, weight = (torch.ones(s, device=device, requires_grad=True) for s in ((3, 8), (4, 8)))
    cukern.linear(x, weight, accumulate_into=into).sum().backward()


def _loss(device, logits):
    cukern.cross_entropy(
        logits, torch.zeros(3, dtype=torch.long, device=device), inplace_backward=True
    ).backward()


def _adam(device, p):
    cukern.adamw([p], [torch.ones_like(p)], [torch.zeros_like(p)], [torch.zeros_like(p)], step=1)


@kernels
@pytest.mark.parametrize(
    "write, shape", [(_rotated, (1, 4, 2, 8)), (_accumulated, (4, 8)), (_loss, (3, 5)), (_adam, (8,))]
)
def test_an_op_increments_the_version_of_what_it_writes(write, shape, device):
    w = torch.ones(shape, device=device, requires_grad=True)
    x = torch.randn(shape, device=device, requires_grad=write is _loss).clone()
    y = (w * x).sum()
    write(device, x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()
