"""`cukern new`, and commands that take a Python file: from an empty folder to a checked op."""

import re
import resource
import sys
from pathlib import Path

import pytest
import torch
from helpers import no_gpu, run
from test_cli import call, refused

from cukern.bench import environment

KINDS = ("elementwise", "row", "tiled")
QUICK = {
    "bench": ("--seconds", "0.05"),
    "profile": ("--wait", 0, "--warmup", 1, "--active", 1),
    "check": (),
    "compile": ("--arch", "sm_90a"),
}
SAYS = {
    "bench": "my_silu bwd 1000",
    "profile": "trace: my_silu_",
    "check": "nothing wrong",
    "compile": "my_silu_bwd<float>",
}
pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_two_commands_from_an_empty_folder_to_a_passing_test(folder, monkeypatch):
    """`cukern new` and `pytest`, for each kind: here one pytest for all."""
    env, before = environment.with_cukern(), _cpu_seconds()
    for kind in KINDS:
        (folder / kind).mkdir()
        monkeypatch.chdir(folder / kind)
        name = f"my_{kind}"
        call("new", name, "--kind", kind)
        assert sorted(p.name for p in Path().iterdir()) == [
            "README.md",
            f"bench_{name}.py",
            f"{name}.cu",
            f"{name}.py",
            f"test_{name}.py",
        ]
        assert not any("my_op" in p.read_text() for p in Path().iterdir())
    assert "15 passed" in run([sys.executable, "-m", "pytest", "-q", "-n", "0"], cwd=folder, env=env).stdout
    assert _cpu_seconds() - before <= 90, (
        "of a processor, for all three; the wall clock depends on what else runs"
    )
    for kind in KINDS:
        source = folder / kind / f"my_{kind}.cu"
        source.write_text(source.read_text().replace("out[", "if (threadIdx.x) out[", 1))
    failed = run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--tb=no"], cwd=folder, env=env, ok=False
    ).stdout
    assert all(re.search(f"FAILED .*test_my_{kind}.py", failed) for kind in KINDS), failed


@pytest.mark.parametrize("verb", QUICK)
def test_commands_take_a_file(verb, folder):
    call("new", "my_silu")
    sizes = () if verb == "compile" else (1000,)
    assert SAYS[verb] in call(verb, "my_silu.py", *sizes, *QUICK[verb]).output
    assert call(verb, "my_silu.py:my_silu", *sizes, *QUICK[verb])


ROW_MAX = (
    "__global__ void row_max(float* out, const float* x, int n) { out[blockIdx.x] = x[blockIdx.x * n]; }\n"
)


def test_sim_takes_the_file_of_an_op(folder):
    call("new", "my_silu")
    text = (folder / "my_silu.py").read_text()
    (folder / "my_silu.py").write_text(
        text.replace("cases=[(1,), (1023,), (64, 100)]", "dtypes=torch.float32, cases=[(5,)]")
    )
    out = call("sim", "my_silu.py").stdout
    assert "my_silu 5 float32" in out and "comparisons on the simulator, nothing wrong" in out
    assert "leave out KERNEL and --args" in refused("sim", "my_silu.py", "my_silu_fwd<float>")


def test_a_cu_file_is_compiled(folder):
    """What needs no Python: resources and machine code of kernels and of named instances."""
    (folder / "row_max.cu").write_text(ROW_MAX)
    call("new", "my_rms", "--kind", "row")
    assert re.search(
        r"1 kernel for sm_80;.*\nkernel.*\n.*\nrow_max +\d+",
        call("compile", "row_max.cu", "--arch", "sm_80").stdout,
    )
    out = call(
        "compile",
        "my_rms.cu",
        "--arch",
        "sm_90a",
        "--kernel",
        "my_rms_fwd<float>",
        "--kernel",
        "my_rms_bwd<double>",
    ).stdout
    assert (
        "2 kernels for sm_90a" in out
        and "my_rms_bwd<double>" in out
        and max(map(len, out.splitlines())) <= 80
    )
    assert "only templates: name an instance with --kernel 'my_rms_fwd<float>'" in refused(
        "compile", "my_rms.cu"
    )
    assert "has no __global__ function 'foo'; it has row_max" in refused(
        "compile", "row_max.cu", "--kernel", "foo"
    )
    assert "--kernel names a kernel of a .cu file" in refused("compile", "square", "--kernel", "foo")
    assert "--shape and --gpu are of ops" in refused("compile", "row_max.cu", "--shape", "3")
    assert "row_max.cu has kernels, but no reference" in refused("check", "row_max.cu")
    (folder / "row_max.cu").write_text(ROW_MAX.replace("x[block", "y[block"))
    out = call("compile", "row_max.cu", "--arch", "sm_90a", status=1).output
    assert re.search(r'row_max\.cu\(1\): error: identifier "y" is undefined\n.*y\[blockIdx', out), (
        "the source line is shown"
    )


def test_an_edited_file_is_read_again(folder):
    call("new", "my_silu")
    call("check", "my_silu.py", 100, "--dtype", "f", "--sim")
    python, source = folder / "my_silu.py", folder / "my_silu.cu"
    source.write_text(source.read_text().replace("1 + exp(-a)", "2 + exp(-a)"))
    python.write_text(python.read_text() + "\n")
    assert "WRONG" in call("check", "my_silu.py", 100, "--dtype", "f", "--sim", status=1).output


def test_a_benchmark_runs(folder):
    call("new", "my_silu", "--kind", "row")
    done = run(
        [sys.executable, "bench_my_silu.py", "8", "64", "--seconds", "0.05", "--pass", "fwd"],
        cwd=folder,
        env=environment.with_cukern(),
    )
    assert "my_silu fwd 8 x 64 float32" in done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("two words", "NAME must be an identifier, of letters, digits and _, got 'two words'"),
        ("my-op", "got 'my-op'"),
        ("2x", "got '2x'"),
        ("", "got ''"),
        ("../x", "got '../x'"),
        ("lambda", "got 'lambda'"),
        ("größe", "got 'größe'"),
        ("softmax", "NAME must not be 'softmax', which is an op of cukern"),
        ("forward", "NAME must not be 'forward', which the files use"),
        ("torch", "NAME must not be that of an installed module, got 'torch'"),
    ],
)
def test_names_that_are_refused(name, says, folder):
    assert says in refused("new", name)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("there", ["my_silu.cu", "test_my_silu.py", "README.md", "my_silu"])
def test_an_existing_file_or_folder_is_refused(there, folder):
    (folder / there).mkdir() if there == "my_silu" else (folder / there).write_text("mine")
    assert f"{there!r} exists: choose another NAME or an empty folder" in refused("new", "my_silu")
    assert [p.name for p in folder.iterdir()] == [there]


FILES = {
    "": "empty.py must have one op, or name one: empty.py:NAME; its ops: none: make one with cukern.op",
    "x = 1 +\n": "empty.py:1: SyntaxError: invalid syntax",
    "import nowhere\n": "empty.py:1: ModuleNotFoundError: No module named 'nowhere'",
    "import torch\n\ntorch.ones(2) + torch.ones(3)\n": "empty.py:3: RuntimeError: The size of tensor a",
    "raise SystemExit(3)\n": "empty.py:1: SystemExit: 3",
}


@pytest.mark.parametrize("text", FILES, ids=["empty", "syntax", "import", "torch", "exit"])
def test_files_without_an_op(text, folder):
    (folder / "empty.py").write_text(text)
    assert FILES[text] in refused("check", "empty.py")


@no_gpu
@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        (
            "x.numel()",
            "x.count_all()",
            "error: my_silu.py:20: AttributeError: 'Tensor' object has no attribute 'count_all'",
        ),
        (
            "(out, x, n,",
            "(out, x,",
            "error: my_silu.py:21: my_silu_fwd<float> takes 3 arguments (float* out, const float* x, ",
        ),
    ],
)
def test_an_error_of_a_launch_names_its_line(was, becomes, says, folder):
    call("new", "my_silu")
    file = folder / "my_silu.py"
    file.write_text(file.read_text().replace(was, becomes, 1))
    assert says in refused("check", "my_silu.py", 8, "--dtype", "f")
    assert (
        "No such file or directory: " in (missing := refused("compile", "absent.cu"))
        and "Errno" not in missing
    )


def test_names_of_files_and_ops(folder):
    assert "there is no file 'absent.py'" in refused("bench", "absent.py")
    assert "and those of files: my_op.py" in refused("bench", "absent")
    assert "there is no op 'softmx': did you mean softmax?" in refused("bench", "softmx")
    call("new", "my_silu")
    assert "there is no op 'my_silu': did you mean my_silu.py?" in refused("check", "my_silu")
    assert "my_silu.py has no op 'other'; its ops: my_silu" in refused("profile", "my_silu.py:other")
    text = (folder / "my_silu.py").read_text()
    other = text.replace('"my_silu"', '"one"')
    (folder / "two.py").write_text(text + other[other.index("my_silu = ") :])
    assert "two.py must have one op, or name one: two.py:NAME; its ops: my_silu, one" in refused(
        "check", "two.py"
    )
    call("compile", "two.py:my_silu", "--arch", "sm_90a")


@no_gpu
def test_a_missing_kernel_is_named(folder):
    call("new", "my_silu")
    text = (folder / "my_silu.py").read_text()
    (folder / "my_silu.py").write_text(text.replace('"my_silu_fwd"', '"my_silu_forward"'))
    assert "has no __global__ function 'my_silu_forward'; it has my_silu_fwd, my_silu_bwd" in refused(
        "check", "my_silu.py", 100
    )
    assert not torch.cuda.is_available()
