"""Start-up times of fresh processes: the import, the first call with an empty and a full cache, and eight
processes at once. And the CPU time to compile kernels."""

import itertools
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from cukern.bench import environment
from cukern.bench.measure import Row, Table
from cukern.bench.peers import STARTUP_OPS
from cukern.bench.timing import summary
from cukern.runtime import checks
from cukern.runtime.compile import cache, compiler
from cukern.runtime.compile.signature import probe
from cukern.runtime.launch.kernel import Kernel
from cukern.runtime.registry import CASES

REPEATS = 5
AT_ONCE = 8
COMPILED = "attention"  # the op of whose templates the slowest kernels are timed

# Without a collection of torch's objects, which falls into the import or not.
_IMPORT = """
import gc, sys, time, torch
gc.collect()
start = time.perf_counter()
import cukern.api
print(time.perf_counter() - start)
assert "cupy" not in sys.modules, "import cukern.api imports CuPy"
"""

# Not timed: torch's import, the CUDA context, and the first torch op
_FIRST_CALL = """
import time, torch
import cukern.ops
from cukern.runtime.registry import CASES
case = CASES[{op!r}]
x = case.make(case.bench_dims[0], torch.float32, "cuda")
case.reference(*x)
torch.cuda.synchronize()
start = time.perf_counter()
case.call(*x)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""

_COMPILE = """
import time, torch
import cukern.ops
from cukern.runtime.registry import CASES
kernels = CASES[{op!r}].op.kernels(90, (torch.float32,))
start = time.perf_counter()
for kernel in kernels.values():
    kernel.compile("sm_90a")
print(time.perf_counter() - start)
"""


def measure_startup(only: Collection[str] | None = None) -> Iterator[Table]:
    """Yield medians over fresh processes, as rows of the op "startup". Without a GPU, compiling one op's
    kernels replaces its first call. `only`: "import", the op of a first call, or "compile".

    Raises ValueError for an unknown name in `only`, and RuntimeError if a process fails, `import cukern`
    imports CuPy, or concurrent processes corrupt the cache.
    """
    gpu = torch.cuda.is_available()
    missing = {} if gpu else {"first call": "there is no GPU; the time to compile is shown instead"}
    parts = "import", *_ops(), "compile"
    chosen = [checks.choice("--only", name, parts) for name in only or parts]
    if "import" in chosen:
        yield Table([_row("import", [s for _ in range(REPEATS) for s in fresh_seconds(_IMPORT)])], missing)
    yield from (_first_calls(op, gpu) for op in _ops() if op in chosen)
    if "compile" in chosen:
        yield compile_times(COMPILED)


def _first_calls(op: str, gpu: bool) -> Table:
    what, code = (f"first call of {op}", _FIRST_CALL) if gpu else (f"compile {op} for sm_90a", _COMPILE)
    code = code.format(op=op)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        empty = [s for i in range(REPEATS) for s in fresh_seconds(code, folder / str(i))]
        full = [s for _ in range(REPEATS) for s in fresh_seconds(code, folder / "0")]
        together = fresh_seconds(code, folder / "together", AT_ONCE)
        verify_cache(folder / "together")
    samples = {
        "empty cache": empty,
        "full cache": full,
        f"empty cache, {AT_ONCE} processes at once": together,
    }
    notes = {f"{AT_ONCE} processes at once": "all ended with status 0, and no entry of the cache is corrupt"}
    return Table([_row(f"{what}, {state}", seconds) for state, seconds in samples.items()], {}, notes)


def compile_times(op: str) -> Table:
    """The CPU time to compile, without a cache, the slowest kernel of each template of an op: in bfloat16,
    for this GPU or for sm_90a."""
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    arch, kernels = (
        compiler.arch_of(capability),
        CASES[op].op.kernels(capability[0] * 10 + capability[1], (torch.bfloat16,)),
    )
    compiler.nvrtc()  # loading it is not timed

    def seconds(kernel: Kernel) -> float:
        start = time.thread_time()
        with compiler.compiled(kernel.source, (kernel.name, probe(kernel.name)), arch):
            return time.thread_time() - start

    rows, notes = list[Row](), dict[str, str]()
    for template, group in itertools.groupby(
        [kernels[name] for name in sorted(kernels)], lambda kernel: kernel.name.split("<")[0]
    ):
        some = list(group)
        slowest = max(some, key=seconds)
        rows.append(
            _row(f"compile {template} for {arch}, CPU time", [seconds(slowest) for _ in range(REPEATS)])
        )
        notes[template] = f"the slowest of {len(some)} kernels: {slowest.name}"
    return Table(rows, {}, notes)


def _ops() -> tuple[str, ...]:
    return STARTUP_OPS if torch.cuda.is_available() else STARTUP_OPS[:1]


def verify_cache(folder: Path) -> int:
    """The number of entries in a cache folder. Raises RuntimeError for a corrupt or left-over file."""
    entries = list(folder.glob(f"*{cache.SUFFIX}"))
    for entry in entries:
        if cache.corrupt(entry):
            raise RuntimeError(f"corrupt cache entry {entry}")
    left = [p.name for p in folder.iterdir() if p not in entries]
    if not entries or left:
        raise RuntimeError(
            f"the cache {folder} has {len(entries)} entries and {len(left)} left-over files {left}"
        )
    return len(entries)


def _row(pass_: str, seconds: list[float]) -> Row:
    timing = summary([s * 1e6 for s in seconds])
    return Row("startup", "", pass_, (), "", "cukern", timing.median_us, timing.iqr_us)


def fresh_seconds(
    code: str, folder: Path | None = None, processes: int = 1, variables: dict[str, str] | None = None
) -> list[float]:
    """The seconds that `code` prints, in fresh processes started at the same time. `folder`: their kernel
    cache. `variables`: of their environment."""
    env = {
        **environment.with_cukern(),
        **({"CUKERN_CACHE_DIR": str(folder)} if folder else {}),
        **(variables or {}),
    }
    options: dict[str, Any] = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    seconds = []
    for process in [subprocess.Popen([sys.executable, "-c", code], **options) for _ in range(processes)]:
        out, err = process.communicate(timeout=300)
        if process.returncode != 0:
            raise RuntimeError(f"a fresh process ended with status {process.returncode}:\n{err.strip()}")
        if "cukern" in err:
            raise RuntimeError(f"a fresh process warned:\n{err.strip()}")
        seconds.append(float(out))
    return seconds
