"""cukern.op: a user's own kernels as an op that behaves like the ops of the package."""

import ast
import importlib
from pathlib import Path

import pytest
import torch
from helpers import DEVICE, gpu, kernels
from torch._subclasses.fake_tensor import FakeTensorMode

import cukern
from cukern.bench.verify import verify
from cukern.runtime.registry import CASES

FOLDER = Path(__file__).parent
pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.reload(importlib.import_module("own_layernorm"))


@pytest.fixture
def layernorm(module):
    return module.own_layernorm


def drawn(module, *dims, grad=True):
    return [x.requires_grad_(grad) for x in module.make(*dims, dtype=torch.float32, device=DEVICE)]


def test_twenty_lines_of_python():
    """Without the docstring and the imports. It uses only names that help(cukern.op) explains."""
    text = (FOLDER / "own_layernorm.py").read_text()
    code = [node for node in ast.parse(text).body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
    lines = {line for node in code for line in range(node.lineno, node.end_lineno + 1)}
    blank = [
        line
        for line in lines
        if not text.splitlines()[line - 1].strip() or '"""' in text.splitlines()[line - 1]
    ]
    assert len(lines) - len(blank) <= 20
    used = {
        n.attr
        for n in ast.walk(ast.parse(text))
        if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "cukern"
    }
    assert used == {"op"} and used <= set(cukern.__all__)


@kernels
def test_a_correct_op_is_never_called_wrong(layernorm, module):
    case = CASES["own_layernorm"]
    for _ in range(3):
        for dtype in case.op.dtypes:
            for dims in ((1, 2), (3, 300), (40, 7), (300, 5)):
                verdict = verify(case, dims, dtype, {"v1": layernorm}, torch.device(DEVICE))
                assert not verdict.wrong, verdict
                # of two numbers the gradient cancels, in torch too
                assert dims == (1, 2) or all(r.allowed < 30 * torch.finfo(dtype).eps for r in verdict.results)


@kernels
def test_a_wrong_op_is_called_wrong(module):
    """Two bugs: the gradient of a row's mean is missing; one element in a thousand is wrong by a
    thousandth."""

    def backward(kernels, x, w, _b, _out, mean, rstd, dout):
        _, dw, db = module.backward(kernels, x, w, _b, _out, mean, rstd, dout)
        return rstd[:, None] * w * dout, dw, db

    def forward(kernels, x, w, b):
        out, mean, rstd = module.forward(kernels, x, w, b)
        out.view(-1)[::1000] *= 1.001
        return out, mean, rstd

    options = {"make": module.make, "cases": [(3, 300)], "dtypes": torch.float32}
    f = cukern.op("wrong", module.SOURCE, module.reference, {"v1": (forward, backward)}, **options)
    verdict = verify(CASES["wrong"], (3, 300), torch.float32, {"v1": f}, torch.device(DEVICE))
    assert [r.what for r in verdict.results if not r.ok] == ["out", "dx"]


@kernels
def test_gradients_whatever_the_strides(layernorm, module):
    x, w, b = drawn(module, 5, 60)
    expected = torch.autograd.grad(module.reference(x, w, b).sum(), (x, w, b))
    # the gradient of sum() is expanded, with strides 0
    found = torch.autograd.grad(layernorm(x, w, b).sum(), (x, w, b))
    torch.testing.assert_close(found, expected)
    turned = x.detach().t().contiguous().t().requires_grad_()
    torch.testing.assert_close(layernorm(turned, w=w, b=b), module.reference(x, w, b))
    (only,) = torch.autograd.grad(layernorm(x.detach(), w, b.detach()).sum(), w)
    torch.testing.assert_close(only, expected[1])


@kernels
@pytest.mark.filterwarnings("default")  # torch's compiler warns of its own affairs
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_graph_break(layernorm, module, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: layernorm(*args).sin(), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    for rows in (3, 6):
        inputs = drawn(module, rows, 40)
        eager = torch.autograd.grad(layernorm(*inputs).sin().sum(), inputs)
        assert all(map(torch.equal, torch.autograd.grad(compiled(*inputs).sum(), inputs), eager))


@kernels
def test_opcheck(module):
    cukern.op("checked", module.SOURCE, module.reference, module.VERSIONS, make=module.make, cases=[(3, 40)])
    inputs, raw = drawn(module, 4, 40, grad=False), torch.ops.cukern_own
    torch.library.opcheck(raw.checked.default, (*inputs, ""))
    out, mean, rstd = raw.checked(*inputs, "")
    torch.library.opcheck(
        raw.checked_backward.default, ([torch.randn_like(out)], [*inputs[:2], None, None, mean, rstd], "")
    )


@kernels
def test_transforms(layernorm, module):
    x, w, b = drawn(module, 4, 40, grad=False)
    (expected,) = torch.autograd.grad(module.reference(x.requires_grad_(), w, b).sin().sum(), x)
    torch.testing.assert_close(
        torch.func.grad(lambda x: layernorm(x, w, b).sin().sum())(x.detach()), expected
    )
    torch.testing.assert_close(
        torch.func.vmap(lambda x: layernorm(x, w, b))(x.detach()[None]),
        module.reference(x.detach()[None], w, b),
    )
    dx = torch.autograd.grad(layernorm(x, w, b).sin().sum(), x, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="own_layernorm has no second derivatives"):
        dx.sum().backward()


def test_fake_and_cpu_tensors(layernorm, module):
    with FakeTensorMode():
        y = layernorm(*module.make(3, 4, dtype=torch.bfloat16, device="cuda"))
        assert y.shape == (3, 4) and y.dtype == torch.bfloat16 and y.is_cuda
    inputs = module.make(3, 4, dtype=torch.float32, device="cpu")
    assert torch.equal(layernorm(*inputs), module.reference(*inputs))
    assert torch.equal(layernorm(*(x.numpy() for x in inputs)), module.reference(*inputs)), "DLPack"


@gpu
def test_cuda_graph(layernorm, module):
    inputs = drawn(module, 64, 300, grad=False)
    layernorm(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layernorm(*inputs)
    inputs[0].normal_()
    graph.replay()
    torch.testing.assert_close(out, module.reference(*inputs))


@kernels
def test_an_empty_input_launches_nothing(layernorm, module):
    assert layernorm(*drawn(module, 0, 40)).shape == (0, 40)


def test_the_registry_lists_its_kernels_and_cost(layernorm):
    case = CASES["own_layernorm"]
    assert set(case.op.kernels(90, [torch.float32])) == {"ln<float>", "ln_dx<float>", "ln_dw<float>"}
    cost = case.cost((10, 100), 4)
    assert cost["fwd"].bytes == 4 * 2200 and cost["bwd"].bytes == 4 * (2200 + 1200)
    assert case.dims == "ROWS COLS" and case.op.versions["v1"].idea == "one thread block per row"


@kernels
def test_template_arguments_that_are_equal_in_python(tmp_path):
    """True == 1 == 1.0, but each is another instance."""
    (tmp_path / "k.cu").write_text(
        "template <auto value> __global__ void k(int* out) { *out = sizeof(value); }"
    )

    def forward(kernels, x):
        outs = [torch.empty_like(x, dtype=torch.int32) for _ in range(2)]
        for out, value in zip(outs, (True, 1), strict=True):
            kernels("k", value)(out, grid=1, block=1)
        return torch.stack(outs)

    op = cukern.op("my_sizes", tmp_path / "k.cu", lambda x: torch.stack([x, x]).int(), {"v1": forward})
    assert op(torch.zeros(1, device=DEVICE)).tolist() == [[1], [4]]


@kernels
def test_versions(module):
    def forward(kernels, x, w, b):
        called.append("v2")
        return module.forward(kernels, x, w, b)

    called = []
    versions = {**module.VERSIONS, "v2": (forward, module.backward)}
    f = cukern.op("two", module.SOURCE, module.reference, versions, make=module.make, cases=[(3, 40)])
    inputs = drawn(module, 3, 40)
    f(*inputs, version="v1")
    assert not called
    f(*inputs)
    assert called == ["v2"]
    with cukern.use("two", "v1"):
        f(*inputs)
    assert called == ["v2"]
    again = cukern.op(
        "two", module.SOURCE, module.reference, module.VERSIONS, make=module.make, cases=[(3, 40)]
    )
    again(*inputs)
    assert called == ["v2"] and list(CASES["two"].op.versions) == ["v1"], (
        "the second definition replaces the first"
    )
    with pytest.raises(ValueError, match="two has no version 'v2'; it has v1"):
        again(*inputs, version="v2")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"name": "no name"}, ValueError, "name must be an identifier of Python, got 'no name'"),
        ({"name": "class"}, ValueError, "got 'class'"),
        ({"name": 3}, TypeError, "name must be a str, got int 3"),
        ({"name": "square"}, ValueError, "must not be that of an op of cukern, got 'square'"),
        ({"source": "absent.cu"}, FileNotFoundError, "there is no file 'absent.cu'"),
        ({"source": 5}, TypeError, "source must be a path, or None for kernels of Triton, got int 5"),
        ({"reference": 5}, TypeError, "reference must be a function, got int 5"),
        ({"reference": lambda *x: x}, ValueError, r"must name each input as a parameter, got \(\*x\)"),
        ({"versions": {}}, TypeError, "versions must be a dict such as"),
        ({"versions": {"v1": 5}}, TypeError, "got 'v1': int 5"),
        (
            {"versions": {"v1": (max, max, 9)}},
            ValueError,
            "compute capability of version 'v1' must be at least 75, got 9",
        ),
        (
            {"versions": {"v1": (len, lambda k, x: x)}},
            ValueError,
            r"backward of version 'v1' of other takes 1 tensors \(x\); it must",
        ),
        (
            {"versions": {"v1": len, "v2": (len, len)}},
            ValueError,
            "must all have a backward or none, got v2 with one",
        ),
        ({"cases": None}, ValueError, r"cases must be sizes for make, such as .* got None"),
        ({"cases": [(3, -1)]}, ValueError, "a size in cases must be at least 0, got -1"),
        ({"make": 3}, TypeError, "make must be a function, got int 3"),
        ({"dtypes": torch.int32}, ValueError, "dtypes must be some of"),
        ({"constants": "z"}, ValueError, "a name in constants must be one of x, w, b, got 'z'"),
        ({"outputs": 0}, ValueError, "outputs must be at least 1, got 0"),
    ],
)
def test_wrong_definitions(module, change, error, says):
    given = {
        "name": "other",
        "source": module.SOURCE,
        "reference": module.reference,
        "versions": module.VERSIONS,
    }
    before = set(CASES)
    with pytest.raises(error, match=says):
        cukern.op(**{**given, "make": module.make, "cases": [(3, 4)], **change})
    assert set(CASES) == before


@kernels
def test_wrong_calls(layernorm, module):
    x, w, b = drawn(module, 3, 40)
    with pytest.raises(
        TypeError, match=r"own_layernorm\(x, w, b, \*, version=None\): missing a required argument: 'b'"
    ):
        layernorm(x, w)
    with pytest.raises(
        TypeError, match=r"own_layernorm: x is torch.int64, which has no gradient: name it in constants="
    ):
        layernorm(torch.zeros(3, 40, dtype=torch.int64, device=DEVICE), w, b)
    with pytest.raises(TypeError, match=r"w must be torch.float32 or torch.bfloat16, got torch.float64"):
        layernorm(x, w.double(), b)
    with pytest.raises(ValueError, match="w is on meta, x is on"):
        layernorm(x, w.to("meta"), b)


@kernels
@pytest.mark.parametrize(
    ("found", "error", "says"),
    [
        (lambda x: None, TypeError, "forward of bad must return tensors, got NoneType"),
        (lambda x: (x + 1, x + 1), ValueError, "forward of bad must return 1 tensors, got 2"),
        (lambda x: x, ValueError, "forward of bad must return new tensors, got one of its arguments"),
        (lambda x: x[None], ValueError, "forward of bad must return tensors that share no memory"),
    ],
)
def test_wrong_results(module, found, error, says):
    bad = cukern.op("bad", module.SOURCE, lambda x: x + 1, {"v1": lambda kernels, x: found(x)})
    with pytest.raises(error, match=says):
        bad(torch.ones(3, device=DEVICE))


@kernels
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_results_that_share_memory(module, pass_):
    """torch.compile takes the results of a custom operator for separate tensors."""

    def forward(kernels, x, w, b):
        out, mean, rstd = module.forward(kernels, x, w, b)
        return (out, *torch.stack([mean, rstd])) if pass_ == "forward" else (out, mean, rstd)

    def backward(kernels, x, w, _b, _out, mean, rstd, dout):
        dx, dw, db = module.backward(kernels, x, w, _b, _out, mean, rstd, dout)
        return dx, *torch.stack([dw, db])

    bad = cukern.op("bad", module.SOURCE, module.reference, {"v1": (forward, backward)})
    with pytest.raises(ValueError, match=f"{pass_} of bad must return tensors that share no memory"):
        bad(*drawn(module, 3, 40)).sum().backward()


COPY = (
    "__global__ void copy(float* out, const float* x, int n) { if (threadIdx.x < n) out[threadIdx.x] = "
    "x[threadIdx.x]; }"
)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by torch.compile
@pytest.mark.parametrize("place", ["cpu", pytest.param("kernels", marks=kernels)])
def test_a_forward_only_op_raises_in_backward(place, tmp_path):
    (tmp_path / "copy.cu").write_text(COPY)

    def forward(kernels, x, w):
        out = torch.empty_like(x)
        kernels("copy")(out, x, x.numel(), grid=1, block=32)
        return out

    f = cukern.op(
        "only_forward",
        tmp_path / "copy.cu",
        lambda x, w: x.clone(),
        {"v1": forward},
        cases=[(8,)],
        constants="w",
    )
    device = DEVICE if place == "kernels" else "cpu"
    x, w = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    with cukern.backend("sim" if place == "kernels" else "gpu"):
        for call in (f, torch.compile(f, backend="aot_eager", fullgraph=True)):
            out = call(x, w)
            assert torch.equal(out, x)
            with pytest.raises(NotImplementedError, match="'only_forward' has no backward"):
                out.sum().backward()
        assert not f(x.detach(), w).requires_grad, "w is a constant"
        with torch.no_grad():
            assert not f(x, w).requires_grad
