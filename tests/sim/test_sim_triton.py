"""cukern.sim.triton: Triton kernels, compiled without a GPU, on CPU tensors in the simulator."""

import functools
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TREE, run, run_python

from cukern import sim
from cukern.sim import triton_driver

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton_cases as cases  # noqa: E402
import triton_kernels as kernels  # noqa: E402

KERNELS = Path(kernels.__file__)
pytestmark = [
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
    pytest.mark.skipif(
        not triton_driver.tested(), reason=f"Triton {triton.__version__} is not a tested version"
    ),
]

HALF, FLOAT = 2e-3, 2e-5  # relative tolerances; of float32 products, TF32's is that of float16
RIGHT = [
    ("sm_90", "add", cases.add, 0),
    ("sm_90", "softmax", cases.softmax, FLOAT),
    ("sm_80", "matmul of float16", cases.matmul, HALF),
    ("sm_90", "matmul of float16", cases.matmul, HALF),
    ("sm_80", "matmul of TF32", functools.partial(cases.matmul, dtype=torch.float32), HALF),
    ("sm_90", "persistent matmul", cases.persistent, HALF),
    ("sm_80", "grouped matmul", cases.grouped, HALF),
    ("sm_90", "dropout", cases.dropout, 0),
    ("sm_90", "layernorm", cases.layernorm, FLOAT),
    ("sm_80", "backward of layernorm, with locks", cases.layernorm_bwd, FLOAT),
    ("sm_80", "causal attention", cases.attention, HALF),
    ("sm_90", "attention", functools.partial(cases.attention, causal=False), HALF),
    ("sm_80", "descriptors of the kernel", cases.device_descriptor, 0),
    ("sm_90", "descriptors of the kernel", cases.device_descriptor, 0),
    ("sm_80", "descriptors of the host", cases.host_descriptor, HALF),
    ("sm_90", "descriptors of the host", cases.host_descriptor, HALF),
    ("sm_90", "histogram", cases.histogram, 0),
    ("sm_90", "sum of atomics", cases.total, 0),
    ("sm_90", "cumsum", cases.cumsum, 0),
    ("sm_90", "functions of libdevice", cases.math, FLOAT),
    ("sm_80", "dot of int8", functools.partial(cases.dot, dtype=torch.int8, result=torch.int32), 0),
    ("sm_90", "dot of e4m3", functools.partial(cases.dot, dtype=torch.float8_e4m3fn), FLOAT),
    ("sm_80", "dot of float32", functools.partial(cases.dot, dtype=torch.float32, size=16), FLOAT),
    ("sm_100", "add", cases.add, 0),
    ("sm_120", "add", cases.add, 0),
]


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """Triton's cache does not distinguish equal kernels of different files, so it would name the file of an
    earlier run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def close(got, want, tolerance):
    scale = tolerance * want.double().abs().max()
    assert (got.double() - want.double()).abs().max() <= scale


@pytest.mark.parametrize(
    "arch, what, case, tolerance", RIGHT, ids=[f"{arch}-{what}" for arch, what, _, _ in RIGHT]
)
def test_a_right_kernel(arch, what, case, tolerance):
    """No fault, the right result, and the same bits again."""
    with sim.triton(arch):
        torch.manual_seed(0)
        got, want = case(kernels)
        torch.manual_seed(0)
        again, _ = case(kernels)
    close(got, want, tolerance)
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))


# ---- bugs: the case, the fault, the text that becomes the other, the part of the resulting line that is
# named, what the message says

LOCKED = "    while tl.atomic_cas(lock, 0, 1) == 1:\n        pass\n"
BUGS = {
    "no mask on a load": (
        cases.add,
        sim.OutOfBounds,
        "tl.load(x + i, mask=inside) + ",
        "tl.load(x + i) + ",
        "tl.load(x + i)",
        "argument 'x'",
    ),
    "no mask on a store": (
        cases.add,
        sim.OutOfBounds,
        "mask=inside), mask=inside)",
        "mask=inside))",
        "mask=inside))",
        "writes .* argument 'out'",
    ),
    "one too many": (
        functools.partial(cases.add, n=1025),
        sim.OutOfBounds,
        "inside = i < n\n    tl.store",
        "inside = i <= n\n    tl.store",
        "+ tl.load(y + i",
        "4 bytes .* 0 bytes after",
    ),
    "a program too far": (
        cases.add,
        sim.OutOfBounds,
        "i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside = i < n",
        "i = (tl.program_id(0) + 1) * BLOCK + tl.arange(0, BLOCK)\n    inside = i < n + BLOCK",
        "tl.store(out + i, tl.load(x + i",
        "block",
    ),
    "int32 overflow of an offset": (
        cases.add,
        sim.OutOfBounds,
        "tl.load(x + i, mask=inside)",
        "tl.load(x + i * 1048576 // 1048576, mask=inside)",
        "// 1048576",
        "argument '|no argument|before",  # the nearest tensor, wherever the memory of the others is
    ),
    "a wrong stride": (
        cases.softmax,
        sim.OutOfBounds,
        "tl.load(x + row * stride + i",
        "tl.load(x + row * (stride + 1) + i",
        "(stride + 1)",
        "argument 'x'",
    ),
    "columns beyond the row": (
        cases.softmax,
        sim.OutOfBounds,
        "mask=i < cols, other",
        "mask=i < BLOCK, other",
        "mask=i < BLOCK",
        "argument 'x'",
    ),
    "no mask along k": (
        cases.matmul,
        sim.OutOfBounds,
        " & (p[None, :] < k - start)",
        "",
        "x = tl.load(at",
        "argument 'a'",
    ),
    "no mask on a tile's store": (
        cases.matmul,
        sim.Fault,
        "tl.store(at, total.to(c.dtype.element_ty), mask=(i[:, None] < m) & (j[None, :] < n))",
        "tl.store(at, total.to(c.dtype.element_ty))",
        "element_ty))\n",
        "argument 'c'",
    ),
    "the step of another dimension": (
        cases.matmul,
        sim.OutOfBounds,
        "at += BK * sak",
        "at += BK * sam",
        "x = tl.load(at",
        "argument 'a'",
    ),
    "a size of the next group": (
        cases.grouped,
        sim.OutOfBounds,
        "tl.load(sizes + 3 * g + 2)",
        "tl.load(sizes + 3 * g + 3)",
        "3 * g + 3",
        "argument 'sizes'",
    ),
    "no mask on q": (
        cases.attention,
        sim.OutOfBounds,
        "d[None, :], mask=i[:, None] < T, other=0.0)",
        "d[None, :])",
        "qs = tl.load",
        "argument 'q'",
    ),
    "no mask on k": (
        functools.partial(cases.attention, causal=False),
        sim.OutOfBounds,
        "d[:, None], mask=j[None, :] < T, other=0.0)",
        "d[:, None])",
        "ks = tl.load",
        "argument 'k'",
    ),
    "no mask on the result": (
        cases.attention,
        sim.Fault,
        "(out.dtype.element_ty), mask=i[:, None] < T)",
        "(out.dtype.element_ty))",
        "tl.store(to,",
        "argument 'out'",
    ),
    "heads that overlap": (
        cases.attention,
        sim.Race,
        "head = tl.program_id(1) * T * D",
        "head = tl.program_id(1) * T",
        "tl.store(to,",
        "block",
    ),
    "no mask on random numbers": (
        cases.dropout,
        sim.OutOfBounds,
        ", v / (1 - p), 0.0), mask=i < n)",
        ", v / (1 - p), 0.0))",
        "tl.rand",
        "argument 'out'",
    ),
    "the next row's mean": (
        cases.layernorm,
        sim.OutOfBounds,
        "tl.store(mean + row, mu)",
        "tl.store(mean + row + 1, mu)",
        "row + 1",
        "argument 'mean'",
    ),
    "one mean for all rows": (
        cases.layernorm,
        sim.Race,
        "tl.store(mean + row, mu)",
        "tl.store(mean, mu)",
        "tl.store(mean, mu)",
        "argument 'mean', (that|where) block",
    ),
    "no lock": (cases.layernorm_bwd, sim.Race, LOCKED, "", "", "nothing orders two blocks"),
    "an unlock that orders nothing": (
        cases.layernorm_bwd,
        sim.Race,
        "tl.atomic_xchg(lock, 0)",
        'tl.atomic_xchg(lock, 0, sem="relaxed")',
        "",
        "nothing orders two blocks",
    ),
    "sums that start with nothing": (
        cases.layernorm_bwd,
        sim.Uninitialized,
        "tl.load(filled) == 0",
        "tl.load(filled) == 5",
        "part_w += tl.load(dw",
        "argument 'dw'",
    ),
    "no mask on rows": (
        cases.layernorm_bwd,
        sim.OutOfBounds,
        "mask=(r[:, None] < rows) & (i[None, :] < n)",
        "mask=r[:, None] < rows",
        "sums += tl.load(at,",
        "argument 'part'",
    ),
    "a lock that nobody unlocks": (
        cases.layernorm_bwd,
        sim.StepLimit,
        "    tl.atomic_xchg(lock, 0)\n",
        "",
        "while tl.atomic_cas",
        "does its loop end",
    ),
    "a histogram without atomics": (
        cases.histogram,
        sim.Race,
        "tl.atomic_add(counts + bins, 1, mask=i < n)",
        "tl.store(counts + bins, tl.load(counts + bins, mask=i < n) + 1, mask=i < n)",
        "tl.store(counts + bins",
        "argument 'counts'",
    ),
    "a sum without atomics": (
        cases.total,
        sim.Race,
        "tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))",
        "tl.store(out, tl.load(out) + tl.sum(tl.load(x + i, mask=i < n, other=0.0), axis=0))",
        "tl.store(out, tl.load(out)",
        "argument 'out', that block",
    ),
    "a scan beyond the end": (
        cases.cumsum,
        sim.OutOfBounds,
        "tl.load(x + i, mask=i < n, other=0.0), axis=0), mask=i < n)",
        "tl.load(x + i), axis=0), mask=i < n)",
        "tl.cumsum",
        "argument 'x'",
    ),
}


def planted(folder, old, new):
    """The module of kernels with `old` replaced, from a file of its own."""
    text = KERNELS.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {KERNELS.name}"
    path = folder / "planted.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("planted", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, path


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_named_with_its_line(tmp_path, bug):
    case, fault, old, new, line, says = BUGS[bug]
    module, path = planted(tmp_path, old, new)
    steps = 5_000 if fault is sim.StepLimit else None
    with sim.triton("sm_80"), sim.checks(steps=steps), pytest.raises(fault, match=says) as caught:
        case(module)
    named, number = re.match(r"(.*?):(\d+)", caught.value.where.location).groups()
    assert named == str(path)
    assert line in path.read_text().split("\n")[int(number) - 1] + "\n", caught.value


def test_a_grid_that_is_too_small_leaves_a_result_unwritten():
    with sim.triton(), pytest.raises(sim.Uninitialized, match=r"argument 'x'; the value is used for"):
        x, y, out = torch.randn(1000), torch.empty(1000), torch.empty(1000)
        kernels.add[(3,)](x, x, y, 1000, BLOCK=256)
        kernels.add[(4,)](y, x, out, 1000, BLOCK=256)


def test_assertions_and_printing(capsys):
    x, out = torch.tensor([1.0, 2.0]), torch.empty(2)
    with sim.triton(debug=True):
        kernels.checked[(1,)](x, out, 2, BLOCK=16, num_warps=1)
        assert "v: 2.0" in capsys.readouterr().out
        with pytest.raises(sim.Fault, match=r"triton_kernels.py:\d+: assertion failed: must be positive"):
            kernels.checked[(1,)](-x, out, 2, BLOCK=16, num_warps=1)
    with sim.triton():
        kernels.checked[(1,)](-x, out, 2, BLOCK=16, num_warps=1)
    assert out.isnan().all()


def test_numpy_arrays_and_scalars():
    x, y, out = np.arange(300, dtype=np.float32), np.ones(300, np.float32), np.zeros(300, np.float32)
    with sim.triton():
        kernels.add[(2,)](x, y, out, np.int64(300), BLOCK=256)
    assert (out == x + 1).all()


def test_autotuned_kernels(monkeypatch):
    """Blocks of one process, in any order, do not see each other's settings."""
    launches = []
    original = sim.launch.run
    monkeypatch.setattr(sim.launch, "run", lambda *args: (launches.append(args), original(*args)))
    for configs, tried in (("first", 1), ("all", 3), ("first", 1)):
        launches.clear()
        with sim.triton("sm_80", configs=configs):
            cases.matmul(kernels)
        assert len(launches) == tried
        assert kernels.matmul.cache == {} and kernels.matmul.best_config.kwargs["BM"] == 32


def test_nothing_is_left_behind():
    jit, driver = triton.runtime.jit, triton.runtime.driver
    before = (
        driver._active,
        jit.KernelInterface.__getitem__,
        triton.knobs.runtime.add_stages_inspection_hook,
        triton.knobs.runtime.debug,
    )
    with pytest.raises(KeyError), sim.triton(debug=True):
        raise KeyError
    assert before == (
        driver._active,
        jit.KernelInterface.__getitem__,
        triton.knobs.runtime.add_stages_inspection_hook,
        triton.knobs.runtime.debug,
    )


class Elsewhere(torch.Tensor):
    """A CPU tensor that says it is on a GPU."""

    device = torch.device("cuda:1")


@pytest.mark.parametrize(
    "error, says, act",
    [
        (ValueError, "arch must be one of sm_80, .* got 'sm_70'", lambda: sim.triton("sm_70").__enter__()),
        (
            ValueError,
            "configs must be one of first, all, got 'fast'",
            lambda: sim.triton(configs="fast").__enter__(),
        ),
        (TypeError, "debug must be a bool, got 1", lambda: sim.triton(debug=1).__enter__()),
        (
            TypeError,
            "add: argument 'x' is on cuda:1; cukern.sim.triton takes CPU tensors",
            lambda: add_of(torch.ones(4).as_subclass(Elsewhere)),
        ),
        (
            ValueError,
            "has 8388608 threads, and the simulator takes at most 4194304",
            lambda: add_of(torch.ones(4), grid=65536),
        ),
        (TypeError, "not subscriptable", lambda: add_of.__call__[(1,)]),
    ],
)
def test_wrong_arguments(error, says, act):
    with pytest.raises(error, match=says), sim.triton():
        act()


def add_of(x, grid=1):
    kernels.add[(grid,)](x, torch.ones(4), torch.ones(4), 4, BLOCK=16)


def test_another_version_of_triton_is_warned_of_once(monkeypatch):
    from cukern.sim import triton_driver

    monkeypatch.setattr(triton_driver, "TESTED", ("2.1",))
    triton_driver._triton.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"tested with Triton 2.1; this is \d"), sim.triton():
        pass
    with sim.triton():
        pass
    monkeypatch.undo()
    triton_driver._triton.cache_clear()


def test_without_triton():
    code = """
import sys
from cukern import sim
assert "triton" not in sys.modules
sys.modules["triton"] = None
try:
    sim.triton().__enter__()
except ImportError as error:
    print(error)
"""
    assert "needs Triton, which runs without a GPU: pip install triton" in run_python(code).stdout


def test_the_pytest_plugin(tmp_path):
    """A repository's own tests, on CPU tensors; the first has a bug."""
    (tmp_path / "kernels.py").write_text(
        KERNELS.read_text().replace("tl.load(y + i, mask=inside)", "tl.load(y + i)")
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_own.py").write_text("""
import torch, kernels, cukern

def test_add():
    x, out = torch.randn(1000), torch.empty(1000)
    kernels.add[(4,)](x, x, out, 1000, BLOCK=256)

def test_cukern():
    assert torch.equal(cukern.square(torch.ones(4)), torch.ones(4))
""")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "pytest_cukern",
        "-p",
        "no:cacheprovider",
        "--cukern-sim",
        str(tmp_path),
    ]
    env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # where cukern is installed, -p would load the plugin twice
    ran = run([*command, f"--rootdir={tmp_path}", "--cukern-arch", "sm_80"], ok=False, cwd=TREE, env=env)
    assert ran.returncode == 1 and "1 failed, 1 passed" in ran.stdout, ran.stdout
    assert re.search(
        r"OutOfBounds: add, block \(3, 0, 0\), thread .*kernels.py:\d+: reads .* argument 'x'", ran.stdout
    ), ran.stdout
    assert "runtime/jit.py" not in ran.stdout  # no frames of Triton
