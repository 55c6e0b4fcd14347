"""The command line: what each verb prints, its status, and that an error of the user is one clear line."""

import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from helpers import dims_of, no_gpu, run, run_python
from typer.testing import CliRunner

import cukern
from cukern import sim
from cukern.bench import environment, verify
from cukern.cli import app, doctor, nsight
from cukern.runtime.compile import cache, compiler
from cukern.runtime.compile.compiler import SetupError
from cukern.runtime.device import KNOWN
from cukern.runtime.registry import CASES, Op, Version

SQUARE = CASES["square"]


def call(*args, status=0):
    result = CliRunner().invoke(app, [str(a) for a in args])
    assert result.exit_code == status, f"{result.stdout}\n{result.stderr}\n{result.exception!r}"
    return result


def refused(*args):
    """The one line on stderr of an error of the user."""
    result = call(*args, status=2)
    assert result.stderr.startswith("error: ") and "Traceback" not in result.output
    return result.stderr


@pytest.fixture
def change(monkeypatch):
    """change(name, **fields) registers a case that is square but for these fields."""
    return lambda name, **fields: monkeypatch.setitem(
        CASES, name, dataclasses.replace(SQUARE, name=name, **fields)
    )


@pytest.fixture
def broken(change):
    """An op "broken" whose one kernel does not compile."""
    kernel = cukern.compile("__global__ void broken(float* x) { x[0] = nonsense; }")
    versions = {"v1": Version("", lambda dtype: [kernel])}
    change(
        "broken", op=Op("broken", "broken", versions), call=lambda x, version=None: kernel(x, grid=1, block=1)
    )


def fails(error):
    def raises(*args, **kwargs):
        raise error

    return raises


NO_NVRTC = SetupError("NVRTC cannot be loaded. Run: pip install nvidia-cuda-nvrtc-cu12")
NO_HEADERS = SetupError("no cuda_fp16.h in /here. Run: pip install nvidia-cuda-runtime-cu12")


# ---- the command itself


def test_as_a_module():
    done = run([sys.executable, "-m", "cukern", "bench", "nothing"], ok=False)
    known = f"{', '.join(CASES)}, and those of files: my_op.py"
    assert done.returncode == 2 and done.stderr == f"error: there is no op 'nothing'; the ops are {known}\n"


def test_version_and_help():
    assert call("--version").stdout.startswith("cukern ")
    assert all(
        word in call("--help").stdout
        for word in ("check", "bench", "profile", "compile", "sim", "tune", "doctor", *CASES)
    )
    for command in ("check", "bench", "profile", "compile", "sim", "tune", "doctor"):
        assert call(command, "--help")


@pytest.mark.kernels
def test_the_factored_linear_programs_own_forms():
    out = call("--dtype", "d", "check", "kron_linear", 4, 3, 2, "--implementation", "v3").stdout
    assert "kron_linear 4 x 3 x 2 float64" in out and "float32" not in out and "v4" not in out


@no_gpu
def test_versions_in_torch_run_on_the_cpu(tmp_path):
    out = call("bench", "kron_linear", 4, 3, 2, "--pass", "fwd", "--only", "cukern").stdout
    assert all(f"cukern {name} " in out for name in ("v1", "v2", "reference")) and "missing: v3" in out
    out = call(
        "profile", "kron_linear", 4, 3, 2, "--version", "v1", "--active", 1, "--out", tmp_path / "x.json"
    ).stdout
    assert "no GPU" not in out and "aten::movedim" in (tmp_path / "x.json").read_text()


def test_tables_fit_80_columns(empty_cache):
    out = call("compile", "kron_linear", "--gpu", "h200", "--shape", "4,3,2").stdout
    assert "plans for NVIDIA H200: 132 SMs" in out and "…" in out
    out += (
        call("bench", "linear", 8, 8, 8, "--only", "cukern,torch").stdout
        + call("check", "square", 40, "--sim").stdout
    )
    assert all(len(line) <= 80 for line in out.splitlines() if not line.startswith("cache:")), out
    numbers = [line.split()[-5:] for line in out.splitlines() if line.startswith("kron_linear_v4")]
    assert numbers and all(n.isdigit() for line in numbers for n in line)


def test_a_dirty_tree_is_not_recorded(monkeypatch):
    monkeypatch.setattr(environment, "facts", lambda: {"dirty": True})
    assert "--record needs a clean tree" in refused("bench", "square", 8, "--record")


def test_commands_start_without_torch(tmp_path):
    """Those that need no op, and wrong commands and options."""
    code = f"""
import os, sys
from typer.testing import CliRunner
from cukern.cli import app
os.chdir({str(tmp_path)!r})
def run(line, status):
    result = CliRunner().invoke(app, line.split())
    heavy = {{"torch", "cupy", "triton", "matplotlib"}} & set(sys.modules)
    assert (result.exit_code, heavy) == (status, set()), (line, result.output, heavy)
for line in ("--version", "--help", "new --help", "new my_silu --kind row", "sass --help", "doctor --quick"):
    run(line, 0)
for line in ("nothing", "--nothing", "new --nothing", "sass --nothing", "new my_op --kind x", "new softmax"):
    run(line, 2)
"""
    assert run_python(code).returncode == 0 and (tmp_path / "my_silu.cu").is_file()


def test_public_names_are_imported_at_first_use():
    """And `import cukern` alone imports little. Names that do not exist say so."""
    code = """
import sys, cukern
assert not {"torch", "numpy", "cukern.api"} & set(sys.modules)
assert set(cukern.__all__) | {"layers", "sim", "__version__"} <= set(dir(cukern))
assert "torch" not in sys.modules and not hasattr(cukern, "nothing")
names = {}
exec("from cukern import *", names)
assert set(cukern.__all__) <= set(names) and cukern.tune is vars(cukern)["tune"] is names["tune"]
import pickle, torch
assert pickle.loads(pickle.dumps(cukern.tune)) is cukern.tune and torch.ops.cukern._square
"""
    assert run_python(code).returncode == 0
    code = """
import torch, cukern
square = torch.compile(lambda x: cukern.square(x), fullgraph=True, backend="eager")
print(square(torch.full((1,), 3.0)).item())
"""
    assert run_python(code).stdout.strip() == "9.0"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("check", "nothing"), "no op 'nothing'"),
        (("check", "matmul", 1, 2), "matmul takes 3 sizes, M N K, got 1 2"),
        (("bench", "kron_linear", 5), "DIMS must be ROWS, then the size of each factor, got 1 numbers"),
        (("bench", "kron_linear_rectangular", 5), "the rows and the columns of each factor, got 1 numbers"),
        (("check", "square", "--", -4), "a size cannot be negative, got -4"),
        (("check", "square", "--dtype", "x"), "got 'x'"),
        (("check", "square", "--version", "v99"), "no version 'v99'"),
        (("bench", "square", 8, "--pass", "bwd:q"), "no pass 'bwd:q'"),
        (("bench", "square", 8, "--only", "q"), "no 'q' to measure"),
        (
            ("bench", "kron_linear", 8, 2, "--tf32", "--dtype", "b"),
            "--tf32 is for device times of --dtype f, got --dtype b",
        ),
        (("bench", "kron_linear", 8, 2, "--tf32", "--host"), "got --host"),
        (("profile", "square", 8, "--version", "v99"), "no version 'v99'"),
        (("compile", "square", "--arch", "hopper"), "got 'hopper'"),
        (("compile", "--shape", "4,3"), "--shape needs an OP"),
        (
            ("compile", "square", "--shape", "4,x"),
            "--shape must be sizes separated by commas, such as 1024,32,32, got '4,x'",
        ),
        (("compile", "matmul", "--shape", "4,3"), "matmul takes 3 sizes"),
        (("compile", "square", "--gpu", "h300"), "--gpu must be one of h200"),
        (("compile", "square", "--gpu", "h200", "--arch", "sm_80"), "leave out --arch"),
    ],
    ids=lambda v: "-".join(map(str, v)) if isinstance(v, tuple) else "",
)
def test_errors_of_the_user(args, says):
    error = refused(*args)
    assert says in error and error.count("\n") == 1


# ---- check


def test_check_every_shape_and_dtype():
    short = call("check", "square").stdout
    assert len(short.splitlines()) <= 24, "one screen"
    assert all(f"\n{version} " in short for version in SQUARE.op.versions) and "nothing wrong" in short
    out = call("check", "square", "-v").stdout
    for dims in dims_of(SQUARE):
        for dtype in ("float16", "bfloat16", "float32", "float64"):
            assert (
                f"square {' x '.join(map(str, dims))} {dtype}\n"
                in "\n".join(line.rstrip() for line in out.splitlines()) + "\n"
            )
    assert "wrong" in out and "WRONG" not in out


@no_gpu
def test_check_without_a_gpu_says_that_it_simulates():
    out = call("check", "square", 33, "--dtype", "f").stdout
    assert out.startswith("There is no GPU. The simulator runs the kernels")
    assert "v1 and v2" in out and "16 comparisons" not in out and "on the simulator, nothing wrong" in out


def test_check_simulates_where_it_is_asked_to(monkeypatch):
    ran, launched = [], sim.launch.Launched
    monkeypatch.setattr(sim.launch, "Launched", lambda name, *args: ran.append(name) or launched(name, *args))
    out = call("check", "square", 40, "--dtype", "b", "--version", "v2", "--sim").stdout
    assert (
        out.startswith("The simulator runs the kernels")
        and "2 comparisons on the simulator, nothing wrong" in out
    )
    assert ran == ["square_v2<__nv_bfloat16, 8>", "square_v2_bwd<__nv_bfloat16, 8>"]


def test_check_names_the_bug_that_the_simulator_meets(change):
    kernel = cukern.compile(
        "__global__ void stray(float* out, const float* x, int n) {\n    out[threadIdx.x] = "
        "x[threadIdx.x];\n}"
    )

    def function(x, version=None):
        out = torch.empty_like(x)
        kernel(out, x, x.numel(), grid=1, block=64)
        return out

    change("stray", call=function)
    result = call("check", "stray", 40, "--dtype", "f", "--sim", status=1)
    assert (
        "stray" in result.stderr
        and ":2" in result.stderr
        and "thread" in result.stderr
        and "Traceback" not in result.output
    )


@no_gpu
def test_check_without_a_compiler_says_how_to_get_one(monkeypatch, empty_cache, change):
    monkeypatch.setattr(compiler, "nvrtc", fails(NO_NVRTC))
    kernel = cukern.compile("__global__ void k() {}")
    change("new", call=lambda x, version=None: kernel(grid=1, block=1))
    assert str(NO_NVRTC) in refused("check", "new", 33)


@pytest.mark.parametrize(
    "fault",
    [lambda x: x * x * 1.001, lambda x: x * x + torch.where(x == x[0], torch.nan, 0.0)],
    ids=["1e-3", "NaN"],
)
def test_check_exits_with_1_if_wrong(change, fault):
    change("wrong", call=lambda x, version=None: fault(x))
    out = call("check", "wrong", 50, "--dtype", "f", "--sim", status=1).stdout
    assert "nothing wrong" not in out and any(
        "|out|" in line and "WRONG" in line for line in out.splitlines()
    ), "the wrong column is named"


def test_check_of_a_kernel_that_does_not_compile(broken):
    assert 'identifier "nonsense" is undefined' in refused("check", "broken", 5, "--dtype", "f")


def test_check_of_a_version_that_the_gpu_cannot_run(monkeypatch, change):
    """With a stand-in for the GPU: the answer must come before anything is launched."""
    change(
        "square",
        op=dataclasses.replace(
            SQUARE.op, versions={"v2": dataclasses.replace(SQUARE.op.versions["v2"], requires=120)}
        ),
    )
    monkeypatch.setattr(environment, "device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(verify, "device_of", lambda index: KNOWN["h200"])
    assert "square v2 needs compute capability 12.0, this GPU has 9.0" in refused(
        "check", "square", "--version", "v2"
    )


# ---- compile


def test_compile_prints_resources_and_fills_the_cache(empty_cache):
    out = call("compile", "square", "--arch", "sm_80,sm_90a").stdout
    assert (
        f"{len(SQUARE.op.kernels())} kernels for sm_80" in out
        and "kernels for sm_90a" in out
        and "square_v2<__half, 8>" in out
    )
    assert (
        len(list(empty_cache.iterdir())) == 2 * len(SQUARE.op.kernels()) and f"cache: {empty_cache}\n" in out
    )
    line = next(line for line in out.splitlines() if "square_v1<float>" in line).split()
    report = SQUARE.op.kernels()["square_v1<float>"].compile("sm_80").report
    assert line[1:] == [
        str(v)
        for v in (report.registers, report.spill_stores, report.spill_loads, report.stack, report.shared)
    ]


def test_compile_exits_with_1_in_the_compilers_words(broken):
    result = call("compile", "broken", "--arch", "sm_80", status=1)
    assert 'identifier "nonsense" is undefined' in result.stderr and "failed" in result.stdout


def test_compile_lists_what_an_architecture_is_too_old_for(change):
    new = dataclasses.replace(SQUARE.op.versions["v2"], requires=90)
    change("square", op=dataclasses.replace(SQUARE.op, versions=SQUARE.op.versions | {"v2": new}))
    out = call("compile", "square", "--arch", "sm_80").stdout
    assert "square_v2" not in out and "not for sm_80: square v2: needs compute capability 9.0" in out
    assert "square_v2" in call("compile", "square", "--arch", "sm_90").stdout


# ---- bench


def test_bench_records_and_draws(tmp_path):
    file, picture = tmp_path / "it.jsonl", tmp_path / "it.png"
    for _ in range(2):
        call(
            "bench",
            "square",
            64,
            "--pass",
            "fwd",
            "--only",
            "cukern,torch",
            "--record-to",
            file,
            "--plot",
            picture,
        )
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [r["provider"] for r in rows].count("torch") == 2 and rows[0]["shape"] == [64]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_bench_in_tf32(tmp_path, monkeypatch):
    """The switch is on while float32 is measured, and the record says so."""
    seen, case = set(), CASES["kron_linear"]
    spy = dataclasses.replace(
        case, call=lambda *x, **k: (seen.add(torch.get_float32_matmul_precision()), case.call(*x, **k))[1]
    )
    monkeypatch.setitem(CASES, "kron_linear", spy)
    call(
        "bench",
        "kron_linear",
        4,
        3,
        2,
        "--tf32",
        "--pass",
        "fwd",
        "--only",
        "cukern",
        "--record-to",
        tmp_path / "rows.jsonl",
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert seen == {"high"} and {row["dtype"] for row in rows} == {"tf32"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_bench_prints_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = call("bench", "matmul", 8, 8, 8, "--pass", "fwd,bwd:b", "--only", "cukern,torch").stdout
    assert "matmul fwd 8 x 8 x 8 float32" in out and "matmul bwd:b 8 x 8 x 8" in out and "flop/byte" in out
    assert not list(tmp_path.iterdir())


def test_bench_host():
    out = call("bench", "square", 16, "--host", "--only", "cukern,torch").stdout
    assert (
        "square host fwd 16 float32" in out and "square host fwd grad 16 float32" in out and "TB/s" not in out
    )


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(
        "bench", "square", 8, "--pass", "fwd", "--only", "torch", "--plot", tmp_path / "x.png"
    )


# ---- profile


def test_profile_writes_a_trace_and_overwrites_none(tmp_path):
    file = tmp_path / "x.trace.json"
    for name in ("x.trace.json", "x-2.trace.json", "x-3.trace.json"):
        out = call("profile", "square", 8, "--wait", 0, "--warmup", 1, "--active", 2, "--out", file).stdout
        assert "us a call" in out and f"trace: {tmp_path / name}" in out
        assert json.loads((tmp_path / name).read_text())["traceEvents"]
    assert len(list(tmp_path.iterdir())) == 3


def test_ncu_runs_on_the_kernels_of_one_version_alone():
    assert nsight.kernel_names(SQUARE, "v2", torch.float32) == ["square_v2", "square_v2_bwd"]


@pytest.mark.parametrize(("says", "status"), [("ERR_NVGPUCTRPERM - no permission", 1), ("all is well", 0)])
def test_ncu_refused_is_explained(tmp_path, monkeypatch, capsys, says, status):
    ncu = tmp_path / "ncu"
    ncu.write_text(f'#!/bin/sh\necho "{says}"\nfor a in "$@"; do echo "$a"; done\n')
    ncu.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert nsight.run("square", SQUARE, "v2", (64,), torch.float32) == status
    out, err = capsys.readouterr()
    assert says in out and "regex:^(square_v2|square_v2_bwd)$" in out and "\nnone\n" in out
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in err) == bool(status)


def test_ncu_missing_says_how_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    error = refused("profile", "square", 8, "--ncu")
    assert error.startswith("error: Nsight Compute") and "conda install" in error


# ---- doctor


def test_doctor_reports_every_component():
    out = call("doctor").stdout
    for word in (
        "Python",
        "torch",
        "CuPy",
        "NVRTC",
        "CUDA headers",
        "GPU",
        "cache",
        "Triton",
        "nvcc",
        "ncu",
        "compute-sanitizer",
    ):
        assert word in out


def test_a_quick_doctor(monkeypatch):
    """test_commands_start_without_torch sees that it imports no package."""
    out = call("doctor", "--quick").stdout
    assert "torch" in out and "kernel sources" in out and "cache" in out and "compiler" not in out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "cupy" else True)
    assert "pip install cupy-cuda12x" in call("doctor", "--quick", status=1).stdout


def test_doctor_warns_of_two_cupy_wheels(monkeypatch):
    monkeypatch.setattr(
        environment, "cupy_wheels", lambda: {"cupy-cuda12x": "14.2.0", "cupy-cuda13x": "14.2.0"}
    )
    assert "pip uninstall cupy-cuda12x cupy-cuda13x" in call("doctor").stdout


@pytest.mark.parametrize(
    ("broken", "name", "value", "says", "status"),
    [
        (
            compiler,
            "nvrtc",
            fails(NO_NVRTC),
            ("NVRTC cannot be loaded", "pip install nvidia-cuda-nvrtc-cu12"),
            1,
        ),
        (
            compiler,
            "nvrtc",
            fails(OSError("no such library")),
            ("NVRTC", "OSError: no such library", "--force-reinstall"),
            1,
        ),
        (
            compiler,
            "cuda_include",
            fails(NO_HEADERS),
            ("no cuda_fp16.h in /here", "pip install nvidia-cuda-runtime-cu12"),
            1,
        ),
        (
            compiler,
            "compiled",
            fails(RuntimeError("no builtins")),
            ("compiler", "no builtins", "pip install --force-reinstall"),
            1,
        ),
        (environment, "cupy_wheels", fails(TypeError("no name")), ("CuPy", "TypeError: no name"), 1),
        (
            doctor,
            "kernels_dir",
            lambda: Path("/proc/none"),
            ("kernel sources", "none in /proc/none", "install cukern again"),
            1,
        ),
        (
            Path,
            "read_bytes",
            fails(PermissionError(13, "Permission denied")),
            ("Permission denied", "chmod -R a+rX"),
            1,
        ),
        (environment, "smi", fails(IndexError("nothing")), ("GPU", "IndexError: nothing"), 0),
        (torch.cuda, "is_available", fails(RuntimeError("bad driver")), ("GPU", "bad driver"), 0),
        (
            importlib.util,
            "find_spec",
            fails(ValueError("matplotlib.__spec__ is None")),
            ("matplotlib", "--force-reinstall"),
            1,
        ),
        (
            cache,
            "refusal",
            lambda folder: "it belongs to user 7",
            ("belongs to user 7", "no folder can be written", "CUKERN_CACHE_DIR"),
            0,
        ),
        (
            os,
            "access",
            lambda path, mode: False,
            ("read-only", "no folder can be written", "CUKERN_CACHE_DIR"),
            0,
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_doctor_ends_in_a_broken_installation(monkeypatch, empty_cache, broken, name, value, says, status):
    """It says what is wrong and what to do, and goes on."""
    monkeypatch.setattr(broken, name, value)
    out = call("doctor", status=status).stdout
    assert all(words in out for words in says) and "compute-sanitizer" in out, out


def test_doctor_of_a_cupy_that_cannot_be_imported(tmp_path):
    (tmp_path / "cupy.py").write_text("raise OSError('libcuda is away')")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv[1:] = ['doctor']; from cukern.cli "
        f"import main; main()"
    )
    done = run_python(code, ok=False)
    assert (
        done.returncode == 1 and "OSError: libcuda is away" in done.stdout and "Traceback" not in done.stderr
    )
    assert "pip install --force-reinstall cupy" in done.stdout and "compute-sanitizer" in done.stdout


def test_doctor_says_what_to_do_about_a_cache_that_cannot_be_written(monkeypatch, empty_cache):
    empty_cache.touch()  # a file where the folder should be
    first, second = doctor._caches()
    assert first.state == "warning" and str(empty_cache) in first.found and "CUKERN_CACHE_DIR" in first.mend
    assert second.state == "ok" and str(empty_cache.parent / "user") in second.found


def test_cupy_wheels_are_those_of_this_environment():
    import cupy

    assert cupy.__version__ in environment.cupy_wheels().values()
