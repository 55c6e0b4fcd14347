"""cukern.sim.triton: Triton kernels, compiled without a GPU, on CPU tensors in the simulator."""

import contextlib
import functools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TREE, run, run_python

from cukern import sim
from cukern.runtime.compile.compiler import Ptx
from cukern.sim import triton_driver

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
import triton_cases as cases  # noqa: E402
import triton_kernels as kernels  # noqa: E402
from triton_cases import own_cache  # noqa: E402, F401

KERNELS = Path(kernels.__file__)
pytestmark = cases.MARKS

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
    ("sm_90", "sums that programs wait for", cases.prefix_sum, 0),
    ("sm_90", "rows at 64-bit offsets", cases.first_of_rows, 0),
    ("sm_80", "values exchanged between threads", cases.reverse, 0),
    ("sm_90", "argmax", cases.largest, 0),
    ("sm_80", "asynchronous copies of Gluon", cases.gluon_copy, 0),
    ("sm_100", "add", cases.add, 0),
    ("sm_120", "add", cases.add, 0),
]


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
    cases.close(got, want, tolerance)
    assert torch.equal(got.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize(
    "case", [cases.matmul, functools.partial(cases.dot, dtype=torch.int8, result=torch.int32)]
)
def test_products_one_by_one(case):
    """Several mma are executed at once, unless faults are collected. The bits are the same."""
    results = []
    for scope in (contextlib.nullcontext, sim.collect):
        torch.manual_seed(0)
        with sim.triton("sm_80"), scope():
            results.append(case(kernels)[0])
    assert torch.equal(*results)


@pytest.mark.parametrize(
    "instruction, races", [("and.b32 %r2, %r1, 31", False), ("shr.u32 %r2, %r1, 5", True)]
)
def test_copies_of_a_sum(instruction, races):
    """All threads of two warps store to one place: the lanes of a warp different values, or the warps do."""
    ptx = f"""
.version 8.0
.target sm_80
.address_size 64
.shared .align 4 .b32 place;
.visible .entry store() {{
    .reg .b32 %r<3>;
    mov.u32 %r1, %tid.x;
    {instruction};
    st.shared.b32 [place], %r2;
    ret;
}}
"""
    launch = sim.load("store", Ptx(ptx, "store"), (), replicated=True)
    with pytest.raises(sim.Race, match="writes another value") if races else contextlib.nullcontext():
        launch((1, 1, 1), (64, 1, 1), 0)


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


def test_the_first_config_that_fits_is_the_only_one_compiled(tmp_path, monkeypatch):
    """Nor is the choice written to Triton's cache on disk, where a process with a GPU would find it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, metadata, **_: compiled.append(metadata["num_warps"])
    )
    configs = [triton.Config({"BLOCK": 128}, num_warps=n) for n in (1, 2, 4)]
    for choice, found in (("first", [1]), ("all", [1, 2, 4])):
        compiled.clear()
        add = triton.autotune(configs, key=["n"], cache_results=True)(triton.jit(kernels.add.fn))
        x, out = torch.randn(300), torch.empty(300)
        with sim.triton("sm_80", configs=choice):
            add[(3,)](x, x, out, 300)
        assert torch.equal(out, 2 * x) and compiled == found and add.cache_results
    assert not list(tmp_path.rglob("*.autotune.json"))


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
            "torch_compile must be a bool, got 'yes'",
            lambda: sim.triton(torch_compile="yes").__enter__(),
        ),
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
