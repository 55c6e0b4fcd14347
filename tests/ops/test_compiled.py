"""Every kernel compiles for every architecture that it supports, with no register spills beyond those listed
here."""

import re
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cukern.runtime.compile import compiler
from cukern.runtime.device import KNOWN
from cukern.runtime.registry import CASES, ops
from cukern.runtime.warmup import planned

STEMS = sorted({op.stem for op in ops().values() if op.kernels()})
# sm_86 has no instruction and no limit that differs from sm_89's
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")

# What is compiled for an architecture; elsewhere float32 shows that a kernel compiles. float16 and bfloat16
# are alike but for how they are converted, so each architecture has one of them.
COMPILED = {
    "sm_75": (torch.float32, torch.bfloat16),
    "sm_80": (torch.float32, torch.float16),
    "sm_90a": (torch.float64, torch.float32, torch.bfloat16),
}

# empty on newer GPUs, which have no wgmma and do not launch them
WGMMA = re.compile("matmul_v7|attention_v4")

ASYNCHRONOUS = re.compile(
    "attention_v4.*false>|attention_v4_bwd_ordered"
)  # whose products do not wait for each other

# Bytes a thread that some instances of a kernel spill, of those for GPUs whose compiler has fewer registers
# to give: matmul_v5's fill the register file. NVRTC 12.9 puts none of it in the main loop, 13.0 at most 12
# loads and stores into its 1195 instructions. The others are a register or three short, and spill once a row.
MAY_SPILL = {
    ("sm_100a", "matmul_v5"): 40,
    ("sm_120a", "matmul_v5"): 80,
    ("sm_80", "kron_linear_v4_gradient"): 32,
    ("sm_89", "kron_linear_v4_gradient"): 32,
    ("sm_90a", "kron_linear_v4_gradient"): 16,
    ("sm_100a", "adamw_v2"): 48,  # float32 with moments in bfloat16
    ("sm_120a", "adamw_v2"): 56,
    ("sm_100a", "layernorm_v2_bwd"): 12,  # float32, 8 elements per thread
    # attention's accumulators fill the register file too; smaller tiles are slower on an H200
    ("sm_80", "attention_v3"): 24,
    ("sm_80", "attention_v3_bwd"): 48,  # with a softcap
    ("sm_89", "attention_v3"): 16,
    ("sm_89", "attention_v3_bwd"): 16,  # float32 as two bfloat16 numbers
    ("sm_90a", "attention_v3_bwd"): 20,  # with a softcap
    ("sm_100a", "attention_v3"): 72,
    ("sm_100a", "attention_v3_bwd"): 76,
    ("sm_120a", "attention_v3"): 112,
    ("sm_120a", "attention_v3_bwd"): 56,
    ("sm_100a", "causal_softmax_v2"): 4,
    ("sm_100a", "softmax_v8"): 8,
    ("sm_120a", "softmax_v8"): 12,
    ("sm_120a", "causal_softmax_v2_warp"): 16,
}


def compiled(kernels, arch):
    """For each kernel its report and its PTX. Those of a source all at once, which takes three quarters of
    the time."""
    found = {}
    for source in {kernel.source for kernel in kernels.values()}:
        names = [name for name, kernel in kernels.items() if kernel.source == source]
        with compiler.compiled(source, [kernels[name].name for name in names], arch) as (
            program,
            symbols,
            log,
        ):
            ptx = compiler.nvrtc().getPTX(program).decode()
        may_wait = [
            symbol for name, symbol in zip(names, symbols, strict=True) if not ASYNCHRONOUS.match(name)
        ]
        # the compiler waits after each wgmma if it finds no registers for several
        for line in log.splitlines():
            assert "serialized" not in line or any(symbol in line for symbol in may_wait), line
        entries = {re.split(r"\W", entry, maxsplit=1)[0]: entry for entry in ptx.split(".entry ")}
        found |= {
            name: (compiler.parse_report(log, symbol), entries[symbol])
            for name, symbol in zip(names, symbols, strict=True)
        }
    return found


def selected(kernels, arch):
    """sm_90a compiles all. Each other architecture compiles one instance of each kernel and a sixth of the
    others, which differ between architectures."""
    if arch == "sm_90a":
        return kernels
    found, seen = {}, set()
    for name in sorted(kernels, key=lambda name: zlib.crc32(f"{name} {arch}".encode())):
        kernel = name.partition("<")[0]
        if kernel not in seen or zlib.crc32(name.encode()) % 6 == ARCHS.index(arch):
            found[name] = kernels[name]
        seen.add(kernel)
    return found


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_compiles_without_spills(stem, arch):
    """For each architecture that it claims and that this NVRTC knows, of the dtypes of COMPILED. Two threads:
    NVRTC lets go of Python's lock. And one that may be launched early waits for the kernel before it."""
    number = int(re.sub(r"\D", "", arch))
    if number not in compiler.nvrtc().getSupportedArchs():
        pytest.skip(f"NVRTC {compiler.nvrtc_version()} does not know {arch}")
    kernels = {}
    for op in ops().values():
        if op.stem == stem:
            kernels |= op.kernels(number, COMPILED.get(arch, (torch.float32,))) or op.kernels(
                number, (torch.bfloat16,)
            )
    kernels = selected(kernels, arch)
    if not kernels:
        assert not any(op.kernels(number) for op in ops().values() if op.stem == stem)
        pytest.skip(f"{stem} has no kernels of its own on {arch}")
    halves = [dict(list(kernels.items())[i::2]) for i in range(min(2, len(kernels)))]
    with ThreadPoolExecutor(2) as pool:
        found = {name: each for half in pool.map(compiled, halves, [arch] * 2) for name, each in half.items()}
    spilling = {
        name: report.spill_stores
        for name, (report, _) in found.items()
        if report.spill_stores or report.spill_loads
    }
    allowed = {name: MAY_SPILL.get((arch, name.partition("<")[0]), 0) for name in spilling}
    assert {name for name, stores in spilling.items() if stores > allowed[name]} == set(), spilling
    assert all(report.registers for report, _ in found.values()), "the report was read"
    for name, kernel in kernels.items():
        has_body = number == 90 or not WGMMA.match(name)
        assert_waits(name, found[name][1], early=kernel.pdl and number >= 90 and has_body)


# bytes a thread: 1024 x 32^3 float, whose 512 threads have 128 registers each
MAY_SPILL_WHEN_PLANNED = {"kron_linear_v4_tile": 32}


# the kernels of cross_entropy, and torch's products
@pytest.mark.parametrize("name", [n for n in CASES if n != "linear_cross_entropy"])
def test_kernels_planned_for_benchmarked_shapes_do_not_spill(name):
    """On an H200, float32 and bfloat16, forward and backward. Only kernels that the test above does not
    compile."""
    case, shipped = CASES[name], CASES[name].op.kernels(90)
    found = planned(case, case.bench_dims, {torch.float32, torch.bfloat16}, KNOWN["h200"])
    kernels = {kernel_name: kernel for kernel_name, kernel in found.items() if kernel_name not in shipped}
    assert found
    halves = [dict(list(kernels.items())[i::2]) for i in range(min(2, len(kernels)))]
    with ThreadPoolExecutor(2) as pool:
        reports = {
            k: report
            for half in pool.map(compiled, halves, ["sm_90a"] * 2)
            for k, (report, _) in half.items()
        }
    spilled = {k: max(report.spill_stores, report.spill_loads) for k, report in reports.items()}
    assert {k: n for k, n in spilled.items() if n > MAY_SPILL_WHEN_PLANNED.get(k.partition("<")[0], 0)} == {}


# global memory
TOUCHES = re.compile(r"(@\S+ )?(ld\.(?!param|shared|local|const)|st\.(?!param|shared|local)|atom|red\.|cp\.)")


def assert_waits(name, ptx, early):
    """A kernel that may be launched early, and no other, waits, and before it touches memory. In the order of
    the PTX's lines."""
    lines = [line.strip() for line in ptx.splitlines()]
    waits = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    assert bool(waits) == early, name
    assert not waits or waits[0] < next(i for i, line in enumerate(lines) if TOUCHES.match(line)), name
