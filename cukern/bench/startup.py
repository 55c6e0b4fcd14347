"""Start-up costs of fresh processes: the import, the first call with an empty and a full cache, and eight processes at once."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import cukern
from cukern.bench.measure import Row, Table
from cukern.bench.peers import STARTUP_OPS
from cukern.bench.timing import summary
from cukern.runtime import cache

REPEATS = 5
AT_ONCE = 8

_IMPORT = """
import sys, time, torch
start = time.perf_counter()
import cukern
print(time.perf_counter() - start)
assert "cupy" not in sys.modules, "import cukern imports CuPy"
"""

# Not timed: torch's import, the CUDA context, and the first torch op
_FIRST_CALL = """
import time, torch
from cukern.runtime.registry import OPS
op = OPS[{op!r}]
x = op.make(op.bench_dims[0], torch.float32, "cuda")
op.reference(*x)
torch.cuda.synchronize()
start = time.perf_counter()
op.function(*x)
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""

_COMPILE = """
import time, torch
from cukern.runtime.registry import OPS
kernels = OPS[{op!r}].kernels(90, (torch.float32,))
start = time.perf_counter()
for kernel in kernels.values():
    kernel.compile("sm_90a")
print(time.perf_counter() - start)
"""


def measure_startup() -> Iterator[Table]:
    """Yield medians over fresh processes, as rows of the op "startup". Without a GPU, compiling one op's kernels replaces its first call.

    Raises RuntimeError if a process fails, `import cukern` imports CuPy, or eight concurrent processes corrupt the cache.
    """
    gpu = torch.cuda.is_available()
    missing = {} if gpu else {"first call": "there is no GPU; the time to compile is shown instead"}
    notes = {f"{AT_ONCE} processes at once": "all ended with status 0, and no entry of the cache is corrupt"}
    yield Table([_row("import", [_seconds(_IMPORT) for _ in range(REPEATS)])], missing)
    for op in _ops():
        what, code = (f"first call of {op}", _FIRST_CALL) if gpu else (f"compile {op} for sm_90a", _COMPILE)
        code = code.format(op=op)
        with tempfile.TemporaryDirectory() as folder:
            empty = [_seconds(code, Path(folder) / str(i)) for i in range(REPEATS)]
            full = [_seconds(code, Path(folder) / "0") for _ in range(REPEATS)]
            together = _at_once(code, Path(folder) / "together")
            verify_cache(Path(folder) / "together")
        rows = [_row(f"{what}, empty cache", empty), _row(f"{what}, full cache", full)]
        yield Table([*rows, _row(f"{what}, empty cache, {AT_ONCE} processes at once", together)], {}, notes)


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
        raise RuntimeError(f"the cache {folder} has {len(entries)} entries and {len(left)} left-over files {left}")
    return len(entries)


def _row(pass_: str, seconds: list[float]) -> Row:
    timing = summary([s * 1e6 for s in seconds])
    return Row("startup", "", pass_, (), "", "cukern", timing.median_us, timing.iqr_us)


def _start(code: str, cache: Path | None) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(Path(cukern.__file__).resolve().parents[1]), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **({"CUKERN_CACHE_DIR": str(cache)} if cache else {})}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> float:
    out, err = process.communicate(timeout=300)
    if process.returncode != 0:
        raise RuntimeError(f"a fresh process ended with status {process.returncode}:\n{err.strip()}")
    if "cukern" in err:
        raise RuntimeError(f"a fresh process warned:\n{err.strip()}")
    return float(out)


def _seconds(code: str, cache: Path | None = None) -> float:
    return _finish(_start(code, cache))


def _at_once(code: str, cache: Path) -> list[float]:
    processes = [_start(code, cache) for _ in range(AT_ONCE)]
    return [_finish(p) for p in processes]
