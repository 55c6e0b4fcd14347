"""Nsight Compute for `cukern profile --ncu`: runs it on a version's kernels, and says per kernel what limits
it."""

import csv
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from cukern.bench import environment
from cukern.bench.measure import name_of
from cukern.cli import common
from cukern.cli.common import console, errors, say
from cukern.runtime.compile.compiler import SetupError
from cukern.runtime.registry import Case

_REFUSED = """\
Only administrators may read performance counters (ERR_NVGPUCTRPERM). The administrator of the machine can
allow it for everyone:
    echo 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' | sudo tee /etc/modprobe.d/nvidia.conf
and reload the driver (reboot). Or run this command as root; in a container, start that with
--cap-add SYS_ADMIN.
See https://developer.nvidia.com/ERR_NVGPUCTRPERM"""

_NOT_INSTALLED = """\
Nsight Compute (ncu) is not on the PATH. It comes with the CUDA toolkit, or alone from
https://developer.nvidia.com/nsight-compute; with conda: conda install -c nvidia nsight-compute"""

_LAUNCHES = 4  # of the version's kernels; each is replayed dozens of times to read all counters
_CHILD = """
import sys, torch
from cukern.bench import environment
from cukern.cli import common
from cukern.cli.profile import stepper
op, version, dtype, *dims = sys.argv[1:]
sizes = [int(d) for d in dims]
step = stepper(common.find_case(op), sizes, getattr(torch, dtype), version, environment.device())
step()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStart()
step()
torch.cuda.synchronize()
torch.cuda.cudart().cudaProfilerStop()
"""

_TIME, _BANDWIDTH = "gpu__time_duration.sum", "dram__bytes.sum.per_second"
_MEMORY, _COMPUTE = (
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
)
_OCCUPANCY, _REGISTERS = "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread"
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_METRICS = (
    _TIME,
    _BANDWIDTH,
    _MEMORY,
    _COMPUTE,
    _OCCUPANCY,
    _REGISTERS,
    "regex:smsp__average_warps_issue_stalled_.*_per_issue_active",
)
_STALLS = {  # what the warps wait for, and what helps
    "long_scoreboard": "global memory: more bytes in flight, vector loads, prefetch",
    "short_scoreboard": "shared memory or MUFU: bank conflicts, fewer special functions",
    "lg_throttle": "the queue of global memory: fewer, wider accesses",
    "mio_throttle": "the queue of shared memory and shuffles: fewer, wider accesses",
    "barrier": "__syncthreads(): smaller blocks, or fewer barriers",
    "math_pipe_throttle": "a busy arithmetic unit: that is its limit",
    "wait": "dependent instructions: more independent work per thread",
    "no_instruction": "the instruction cache: a shorter unrolled loop",
    "gmma": "a wgmma: more warpgroups",
}
_NEAR = 75  # percent of a peak from which on it is what limits


def kernel_names(case: Case, version: str, dtype: torch.dtype) -> list[str]:
    """The names, without template arguments, of the kernels of a version; none for a peer."""
    if version not in case.op.versions:
        return []
    return sorted(
        {k.name.partition("<")[0].rpartition("::")[2] for k in case.op.versions[version].instances(dtype)}
    )


def run(spelled: str, case: Case, version: str, dims: Sequence[int], dtype: torch.dtype) -> int:
    """Profile a step and print the summary. Returns the exit status. Raises SetupError without ncu or without
    a GPU."""
    program = shutil.which("ncu")
    if program is None:
        raise SetupError(_NOT_INSTALLED)
    if not torch.cuda.is_available():
        raise SetupError("--ncu needs a GPU, and torch.cuda sees none")
    names = kernel_names(case, version, dtype)
    only = ["--kernel-name", f"regex:^({'|'.join(names)})$"] if names else []
    options = [
        "--clock-control",
        "none",
        *only,
        "--launch-count",
        str(_LAUNCHES),
        "--profile-from-start",
        "off",
    ]
    options += ["--page", "raw", "--csv", "--print-units", "base", "--metrics", ",".join(_METRICS)]
    command = [
        program,
        *options,
        sys.executable,
        "-c",
        _CHILD,
        spelled,
        version,
        name_of(dtype),
        *map(str, dims),
    ]
    with errors.status("running Nsight Compute"):
        done = subprocess.run(
            command,
            env=environment.with_cukern(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if found := parsed(done.stdout):
        show(found)
    else:
        say(done.stdout)
    refused = "ERR_NVGPUCTRPERM" in done.stdout
    if refused:
        say(_REFUSED, "red", errors)
    return 1 if refused or done.returncode else 0


def parsed(text: str) -> list[dict[str, str]]:
    """The rows of ncu's raw page as CSV: by column, the values of each launch. Other lines are skipped."""
    rows = csv.DictReader(line for line in text.splitlines() if line.startswith('"'))
    return [row for row in rows if row.get("ID")]  # the row of units has none


def show(found: Sequence[dict[str, str]]) -> None:
    """Print a table of the launches, and per launch what limits it and what its warps wait for."""
    shown = common.table(
        "Nsight Compute", "kernel", "us", "TB/s", "memory %", "SM %", "occupancy %", "registers"
    )
    for row in found:
        us, tbps = _number(row, _TIME) * 1e-3, _number(row, _BANDWIDTH) * 1e-12
        cells = [
            f"{us:.2f}",
            f"{tbps:.2f}",
            *(f"{_number(row, name):.0f}" for name in (_MEMORY, _COMPUTE, _OCCUPANCY, _REGISTERS)),
        ]
        shown.add_row(common.shorten(_name(row), console.width - 58), *cells)
    console.print(shown)
    for row in found:
        say(f"{common.shorten(_name(row), console.width - 2)}: {limit(row)}")
        for reason, share in stalls(row)[:3]:
            say(f"  {share:3.0f} % wait for {_STALLS.get(reason, reason.replace('_', ' '))}")


def limit(row: dict[str, str]) -> str:
    """What limits a launch, in words."""
    memory, compute = _number(row, _MEMORY), _number(row, _COMPUTE)
    if max(memory, compute) < _NEAR:
        few = "; the occupancy is low" if _number(row, _OCCUPANCY) < 30 else ""
        return f"latency limits it{few}"
    return "memory bandwidth limits it" if memory >= compute else "arithmetic or instruction issue limits it"


def stalls(row: dict[str, str]) -> list[tuple[str, float]]:
    """The reasons for which warps do not issue, and their shares in percent, the largest first."""
    values = {
        match[1]: _number(row, name)
        for name in row
        if name and (match := _STALL.fullmatch(name)) and match[1] != "selected"
    }
    total = sum(values.values())
    return (
        sorted(((reason, 100 * v / total) for reason, v in values.items() if v), key=lambda pair: -pair[1])
        if total
        else []
    )


def _name(row: dict[str, str]) -> str:
    return row.get("Kernel Name", "").partition("(")[0]


def _number(row: dict[str, str], name: str) -> float:
    text = (row.get(name) or "").replace(",", "")
    try:
        return float(text)
    except ValueError:
        return 0.0  # "n/a": a counter that this GPU does not have
