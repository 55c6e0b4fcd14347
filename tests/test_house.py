"""The rules of the house: where things stand, what may import what, what `import cukern` may cost, and that every kernel compiles."""

import ast
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import TREE, own_names, run_python

import cukern
from cukern.runtime import compiler
from cukern.runtime.registry import OPS

STEMS = sorted({op.stem for op in OPS.values()})
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")  # sm_86 has no instruction and no limit that differs from sm_89's
MAY_IMPORT = {
    "runtime": {"runtime"},
    "ops": {"ops", "runtime"},
    "bench": {"bench", "ops", "runtime"},
    "sim": {"sim", "runtime"},
    "cli": {"cli", "bench", "ops", "runtime", "sim"},
}


# What is compiled for an architecture; elsewhere float32 shows that a kernel compiles. float16 and bfloat16 are alike but for how they are
# converted, so each architecture has one of them.
COMPILED = {
    "sm_75": (torch.float32, torch.bfloat16),
    "sm_80": (torch.float32, torch.float16),
    "sm_90a": (torch.float64, torch.float32, torch.bfloat16),
}

PAIR = "sm_80", "sm_89"  # alike in instructions and registers

# matmul_v5 has nine ways to read its matrices, three for each: elsewhere than on sm_90a three of them, in each architecture others.
WAYS = re.compile(r"matmul_v5<\w+, (\d), (\d)")

# Bytes a thread that some instances of a kernel spill, of those for GPUs whose compiler has fewer registers to give: matmul_v5's fill the
# register file. NVRTC 12.9 puts none of it in the main loop, 13.0 at most 12 loads and stores into its 1195 instructions.
# The others are a register or three short, and spill once a row.
MAY_SPILL = {
    ("sm_100a", "matmul_v5"): 40,
    ("sm_120a", "matmul_v5"): 80,
    ("sm_80", "kron_linear_v4_bwd"): 32,
    ("sm_89", "kron_linear_v4_bwd"): 32,
    ("sm_90a", "kron_linear_v4_bwd"): 16,
    ("sm_100a", "causal_softmax_v2"): 4,
    ("sm_100a", "softmax_v8"): 8,
    ("sm_120a", "softmax_v8"): 12,
    ("sm_120a", "causal_softmax_v2_warp"): 16,
}


@pytest.mark.parametrize("stem", STEMS)
def test_an_op_stands_in_four_rooms(stem):
    rooms = (f"kernels_cu/{stem}.cu", f"cukern/ops/{stem}.py", f"tests/test_{stem}.py", f"benchmarks/bench_{stem}.py")
    assert [room for room in rooms if not (TREE / room).is_file()] == []


def test_every_source_belongs_to_an_op():
    assert sorted(p.stem for p in (TREE / "kernels_cu").glob("*.cu")) == STEMS


@pytest.mark.parametrize("name", own_names())
def test_an_op_is_public(name):
    assert getattr(cukern, name) is OPS[name].function
    names = {
        alias.asname
        for node in ast.parse((TREE / "cukern/__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert name in names, "`from ... import x as x`: re-exported by name"


def imported(path: Path) -> set[str]:
    """The modules of cukern that a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] == "cukern"}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_arrows_run_one_way(room):
    for path in (TREE / "cukern" / room).rglob("*.py"):
        rooms = {name.split(".")[1] if "." in name else "ops" for name in imported(path)}  # the package itself imports the ops
        wrong = (rooms & set(MAY_IMPORT)) - MAY_IMPORT[room]
        if path.name == "backend.py":
            wrong -= {"sim"}  # the one door to it
        assert not wrong, f"{path.relative_to(TREE)} imports of {', '.join(sorted(wrong))}"


def test_kernels_do_not_include_what_pip_does_not_bring():
    allowed = {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}
    for path in (TREE / "kernels_cu").rglob("*.cu*"):
        angled = set(re.findall(r"^\s*#\s*include\s*<([^>]+)>", path.read_text(), re.MULTILINE))
        assert angled <= allowed, f"{path.name} includes {', '.join(sorted(angled - allowed))}"


def test_import_touches_no_device_and_costs_little():
    """Beyond torch: at most 0.1 s of CPU time with the bytecode that pip leaves, the best of a few."""
    code = """
import sys, time, torch
start = time.process_time()
import cukern
took = time.process_time() - start
heavy = {"cupy", "cupy_backends", "triton", "typer", "rich", "matplotlib", "torch._dynamo", "torch._inductor"}
print(took, torch.cuda.is_initialized(), *heavy.intersection(sys.modules))
"""
    runs = [run_python(code, PYTHONDONTWRITEBYTECODE="").stdout.split() for _ in range(3)]
    assert all(run[1:] == ["False"] for run in runs), runs
    assert min(float(run[0]) for run in runs) <= 0.1


def compiled(kernels, arch):
    """For each kernel its report and its PTX. All at once, which takes three quarters of the time."""
    (source,) = {kernel.source for kernel in kernels.values()}
    with compiler.compiled(source, [kernel.name for kernel in kernels.values()], arch) as (program, symbols, log):
        ptx = compiler.nvrtc().getPTX(program).decode()
    entries = {re.split(r"\W", entry, maxsplit=1)[0]: entry for entry in ptx.split(".entry ")}
    return {name: (compiler.parse_report(log, symbol), entries[symbol]) for name, symbol in zip(kernels, symbols, strict=True)}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_compiles_without_spills(stem, arch):
    """For each architecture that it claims and that this NVRTC knows, of the dtypes of COMPILED. Two threads: NVRTC lets go of Python's
    lock. And one that may be launched early waits for the kernel before it."""
    number = int(re.sub(r"\D", "", arch))
    if number not in compiler.nvrtc().getSupportedArchs():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    kernels = {}
    for op in OPS.values():
        if op.stem == stem:
            kernels |= op.kernels(number, COMPILED.get(arch, (torch.float32,)))
    if arch != "sm_90a":
        ways = {name: WAYS.match(name) for name in kernels}
        kernels = {name: kernels[name] for name, way in ways.items() if not way or (int(way[1]) + int(way[2]) - ARCHS.index(arch)) % 3 == 0}
    if arch in PAIR:  # of float32, what the other does not compile
        kernels = {name: k for name, k in kernels.items() if "<float" not in name or zlib.crc32(name.encode()) % 2 == PAIR.index(arch)}
    assert kernels
    halves = [dict(list(kernels.items())[i::2]) for i in range(min(2, len(kernels)))]
    with ThreadPoolExecutor(2) as pool:
        found = {name: each for half in pool.map(compiled, halves, [arch] * 2) for name, each in half.items()}
    spilling = {name: report.spill_stores for name, (report, _) in found.items() if report.spill_stores or report.spill_loads}
    allowed = {name: MAY_SPILL.get((arch, name.partition("<")[0]), 0) for name in spilling}
    assert {name for name, stores in spilling.items() if stores > allowed[name]} == set(), spilling
    assert all(report.registers for report, _ in found.values()), "the report was read"
    for name, kernel in kernels.items():
        assert_waits(name, found[name][1], early=kernel.pdl and number >= 90)


TOUCHES = re.compile(r"(@\S+ )?(ld\.(?!param|shared|local|const)|st\.(?!param|shared|local)|atom|red\.|cp\.)")  # global memory


def assert_waits(name, ptx, early):
    """A kernel that may be launched early, and no other, waits, and before it touches memory. In the order of the PTX's lines."""
    lines = [line.strip() for line in ptx.splitlines()]
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    assert bool(waits) == early, name
    assert not waits or waits[0] < next(i for i, line in enumerate(lines) if TOUCHES.match(line)), name


def test_no_file_knows_a_machine():
    words = re.compile("|".join(("/" + "work/", "/" + "home/", "/" + "root/", "/tmp/" + "venv", "site-" + "packages/torch")))
    suffixes = (".py", ".cu", ".cuh", ".md", ".toml", ".yaml", ".yml", ".jsonl")
    for path in TREE.rglob("*"):
        parts = path.relative_to(TREE).parts
        if path.suffix in suffixes and not any(part.startswith(".") or part in ("build", "shared") for part in parts[:-1]):
            found = words.search(path.read_text())
            assert not found, f"{path.relative_to(TREE)}: {found[0] if found else ''}"
