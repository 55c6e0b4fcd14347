"""cukern.use and CUKERN_<OP>: one version for a block or a process."""

import asyncio
import threading

import pytest
import torch
from helpers import in_thread, kernels, run_python

import cukern
from cukern.runtime.device import KNOWN, assumed, forget_plans
from cukern.runtime.launch import backend
from cukern.runtime.launch.kernel import collecting
from cukern.runtime.registry import CASES, ops
from cukern.runtime.warmup import planned


def launched(op="softmax", dims=(4, 64)):
    """The kernels, without template arguments, that forward and backward launch on an H200."""
    return {name.partition("<")[0] for name in planned(CASES[op], [dims], (torch.float32,), KNOWN["h200"])}


def test_a_block_chooses_the_version():
    usual = launched()
    with cukern.use("softmax", "v3"):
        assert launched() == {"softmax_v3", "softmax_v3_bwd"}
        with cukern.use("softmax", "v2", backward="v4"):
            assert launched() == {"softmax_v2", "softmax_v4_bwd"}
        assert launched() == {"softmax_v3", "softmax_v3_bwd"}
    assert launched() == usual and not usual & {"softmax_v3", "softmax_v3_bwd"}


def test_one_of_forward_and_backward_may_stay_the_default():
    (usual,) = (name for name in launched() if not name.endswith("_bwd"))
    (usual_backward,) = launched() - {usual}
    with cukern.use("softmax", "v3", backward="default"):
        assert launched() == {"softmax_v3", usual_backward}
        with cukern.use("softmax", "default", backward="v4"):
            assert launched() == {usual, "softmax_v4_bwd"}
        with cukern.use("softmax", "default"):
            assert launched() == {usual, usual_backward}


def test_cases_of_one_op_change_together():
    with cukern.use("matmul", "v2"):
        assert launched("linear", (8, 8, 8)) == launched("matmul", (8, 8, 8)) == {"matmul_v2"}
        assert "softmax_v3" not in launched()
    with cukern.use("linear_gelu", "v6"):
        assert all(
            any("matmul_v6" in one for one in launched(case, (8, 8, 8))) for case in ("linear_gelu", "matmul")
        )


def test_an_explicit_version_wins_and_cpu_tensors_keep_the_reference():
    x = torch.randn(4, 64)
    with cukern.use("softmax", "v3"):
        assert torch.equal(cukern.softmax(x), torch.softmax(x, -1))
        with assumed(KNOWN["h200"]), backend.backend("sim"), collecting() as found:
            cukern.softmax(x, version="v2")
        assert {name.partition("<")[0] for name in found} == {"softmax_v2"}


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        (("softmx", "v1"), ValueError, "op must be one of"),
        (("softmax", "v99"), ValueError, r"version of cukern\.softmax must be one of v1, .*, got 'v99'"),
        (("softmax", 5), TypeError, r"version of cukern\.softmax must be a str"),
        ((None, "v1"), TypeError, "op must be a str"),
    ],
)
def test_unknown_names_are_refused_at_once(arguments, error, words):
    with pytest.raises(error, match=words):
        cukern.use(*arguments)
    with pytest.raises(error, match=words):
        cukern.use("softmax", "v1", backward=arguments[1]) if arguments[0] == "softmax" else cukern.use(
            *arguments
        )


def test_an_environment_variable_chooses_for_a_process(monkeypatch):
    code = """
import torch, cukern
from cukern.runtime.launch.kernel import collecting
x = torch.randn(4, 64)
with cukern.backend("sim"), collecting() as found:
    cukern.softmax(x)
print(*found)
"""
    assert run_python(code, CUKERN_SOFTMAX="v3").stdout == "softmax_v3<float>\n"
    monkeypatch.setenv("CUKERN_SOFTMAX", "nine")
    forget_plans()
    with (
        pytest.raises(ValueError, match=r"CUKERN_SOFTMAX: cukern\.softmax has no version 'nine'; it has v1"),
        cukern.backend("sim"),
    ):
        cukern.softmax(torch.randn(4, 64))
    forget_plans()


def forward_kernel():
    # assumed: plans made here do not stay
    with assumed(KNOWN["h200"]), backend.backend("sim"), collecting() as found:
        cukern.softmax(torch.ones(2, 64))
    return next(iter(found)).partition("<")[0]


def test_overlapping_blocks_of_generators():
    usual = forward_kernel()

    def block(version):
        with cukern.use("softmax", version):
            yield
            yield

    first, second = block("v1"), block("v5")
    next(first)
    next(second)
    first.close()
    assert forward_kernel() == "softmax_v5"
    second.close()
    assert forward_kernel() == usual


def test_overlapping_blocks_of_threads():
    usual, seen, turn = forward_kernel(), {}, threading.Barrier(2, timeout=60)

    def first():
        with cukern.use("softmax", "v1"):
            turn.wait()
            turn.wait()
        turn.wait()

    def second():
        turn.wait()
        seen["before"] = forward_kernel()
        with cukern.use("softmax", "v5"):
            turn.wait()
            turn.wait()
            seen["inside"] = forward_kernel()

    threads = [threading.Thread(target=f) for f in (first, second)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == {"before": usual, "inside": "softmax_v5"} and forward_kernel() == usual


def test_overlapping_blocks_of_tasks():
    async def main():
        ready, done = asyncio.Event(), asyncio.Event()

        async def first():
            with cukern.use("softmax", "v1"):
                ready.set()
                await done.wait()
                return forward_kernel()

        async def second():
            await ready.wait()
            with cukern.use("softmax", "v5"):
                inner = asyncio.create_task(third())
                done.set()
            return await inner

        async def third():
            return forward_kernel()

        return await asyncio.gather(first(), second())

    assert asyncio.run(main()) == ["softmax_v1", "softmax_v5"]


def test_the_backward_uses_the_version_of_its_forward_in_another_thread():
    x = torch.randn(2, 64, requires_grad=True)
    with backend.backend("sim"), cukern.use("softmax", "v3", backward="v4"):
        y = cukern.softmax(x)
    with collecting() as found:
        in_thread(lambda: y.sum().backward())
    assert {name.partition("<")[0] for name in found} == {"softmax_v4_bwd"}


def test_compiled_functions_see_the_block():
    versions = []

    def record(graph, _):
        versions.extend(node.args[-1] for node in graph.graph.nodes if "_square" in str(node.target))
        return graph

    compiled, x = torch.compile(lambda x: cukern.square(x), backend=record, fullgraph=True), torch.randn(8)
    with backend.backend("sim"):
        compiled(x)
        with cukern.use("square", "v1"):
            compiled(x)
        compiled(x)
    assert len(versions) == 2 and versions[0] == "" and "v1" in versions[1]


@kernels
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_kron_linear_in_torch_has_gradients(version, device):
    x, *ws = (torch.randn(n, n, device=device, requires_grad=True) for n in (6, 2, 3))
    expected = torch.autograd.grad(cukern.kron_linear(x, ws, version=version).sum(), (x, *ws))
    with cukern.use("kron_linear", version):
        found = torch.autograd.grad(cukern.kron_linear(x, ws).sum(), (x, *ws))
    torch.testing.assert_close(found, expected)


@kernels
@pytest.mark.parametrize("name, version", [(n, v) for n, op in ops().items() for v in op.versions])
def test_every_version_forward_and_backward(name, version, device, monkeypatch):
    case = CASES[name]
    if device != "cpu" and torch.cuda.get_device_capability() < divmod(
        case.op.versions[version].requires, 10
    ):
        pytest.skip("this GPU does not have the version")
    dims = min(case.sim_dims, key=lambda dims: torch.Size(dims).numel())
    torch.manual_seed(0)
    inputs = case.make(dims, case.op.dtypes[0], device)
    first = [x.clone() for x in inputs]
    wanted = [
        x.requires_grad_()
        for n, x in zip(case.names(inputs), inputs, strict=True)
        if case.has_gradient(n, x) and not case.in_place
    ]

    def gradients(call):
        with torch.no_grad():
            [x.copy_(start) for x, start in zip(inputs, first, strict=True)]
        outs = call()
        outs = [o for o in ((outs,) if isinstance(outs, torch.Tensor) else outs or ()) if o is not None]
        return (
            [*outs, *torch.autograd.grad(sum(o.double().square().sum() for o in outs), wanted)]
            if wanted
            else outs
        )

    expected = [t.detach().clone() for t in gradients(lambda: case.call(*inputs, version=version))]
    with cukern.use(name, version):
        by_use = [t.detach().clone() for t in gradients(lambda: case.call(*inputs))]
    monkeypatch.setenv(f"CUKERN_{name.upper()}", version)
    forget_plans()
    by_variable = gradients(lambda: case.call(*inputs))
    monkeypatch.undo()
    forget_plans()
    for found in (by_use, by_variable):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
