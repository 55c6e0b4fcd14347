"""Times a user's own kernel, next to torch's ways: from its text to a result in a fresh process, and the host
time of a launch."""

import tempfile
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import cukern
from cukern.bench import environment, peers, timing
from cukern.bench.measure import Row, Table
from cukern.bench.startup import fresh_seconds

NAME = "own_kernel"  # of this benchmark, in place of an op
REPEATS = 3  # fresh processes for cukern; one for its peers, which take longer
_ELEMENTS = 1000

_SQUARE = """
__global__ void square(float* out, const float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i] * x[i];
}
"""
# Not timed: torch's import, the CUDA context, and the first torch op
_RUN = f"""
import time, torch
x = torch.randn({_ELEMENTS}, device="{{device}}")
out = torch.zeros_like(x)
torch.equal(x, out)
{{before}}
start = time.perf_counter()
{{code}}
assert torch.equal(out, x * x), "a wrong result"  # waits for the kernel
print(time.perf_counter() - start)
"""
_CODE = {  # by provider: what is not timed, and what is
    "cukern": (
        "",
        f'import cukern\nsquare = cukern.compile("""{_SQUARE}""")\nsquare[4, 256](out, x, {_ELEMENTS})',
    ),
    "_compile_kernel": (
        "",
        f'square = torch.cuda._compile_kernel("""{_SQUARE}""", "square")\n'
        f"square(grid=(4, 1, 1), block=(256, 1, 1), args=[out, x, {_ELEMENTS}])",
    ),
    "load_inline": ("from cukern.bench import peers", "out = peers.load_inline_square()(x)"),
}
PROVIDERS = (*_CODE, "torch")


def measure_own_kernel(only: Collection[str] | None = None) -> Iterator[Table]:
    """Yield the host time of a launch, the seconds of a first run with empty caches, and those of a second
    run.

    Without a GPU the simulator runs the kernel, and only cukern is measured. load_inline runs only if it is
    in `only`. Raises ValueError for an unknown name in `only`, and RuntimeError if a process fails.
    """
    missing = _missing(only)
    wanted = [name for name in only or PROVIDERS if name not in missing]
    if torch.cuda.is_available():
        times = timing.host_times(_launches(wanted), environment.device())
        yield Table([_row("launch", *key, t) for key, t in times.items()], missing)
    samples = {
        name: [_two_runs(name) for _ in range(REPEATS if name == "cukern" else 1)]
        for name in _CODE
        if name in wanted
    }
    for i, run in enumerate(("first run", "second run")):
        yield Table(
            [
                _row(run, name, "", timing.summary([both[i] * 1e6 for both in runs]))
                for name, runs in samples.items()
            ],
            missing,
        )


def _missing(only: Collection[str] | None) -> dict[str, str]:
    """The providers that are not measured, and why. Raises ValueError for an unknown name."""
    for name in only or ():
        if name not in PROVIDERS:
            raise ValueError(f"there is no {name!r} to measure for {NAME}; there are {', '.join(PROVIDERS)}")
    no_gpu = None if torch.cuda.is_available() else "there is no GPU"
    reasons = {
        "_compile_kernel": no_gpu
        or (None if import_module("torch.utils.cpp_extension").CUDA_HOME else "needs a CUDA toolkit"),
        "load_inline": peers.no_load_inline()
        if only
        else "takes a minute to build, so it runs only with --only load_inline",
        "torch": no_gpu,
    }
    return {name: why for name, why in reasons.items() if why and (only is None or name in only)}


def _row(pass_: str, provider: str, version: str, t: timing.Timing) -> Row:
    return Row(NAME, version, pass_, (_ELEMENTS,), "float32", provider, t.median_us, t.iqr_us)


def _two_runs(name: str) -> tuple[float, float]:
    """The seconds of two fresh processes, the first with empty caches."""
    gpu, (before, code) = torch.cuda.is_available(), _CODE[name]
    code = _RUN.format(device="cuda" if gpu else "cpu", before=before, code=code)
    with tempfile.TemporaryDirectory() as folder:
        own = {"TORCH_EXTENSIONS_DIR": folder} | ({} if gpu else {"CUKERN_BACKEND": "sim"})
        first, second = (fresh_seconds(code, Path(folder, "cukern"), variables=own)[0] for _ in range(2))
    return first, second


def _launches(names: Collection[str]) -> dict[tuple[str, str], Callable[[], Any]]:
    """A launch with three arguments, by provider and the way to write it."""
    x = torch.randn(_ELEMENTS, dtype=torch.float32, device="cuda")
    out, square = torch.empty_like(x), cukern.compile(_SQUARE)
    theirs: Any = torch.cuda._compile_kernel(_SQUARE, "square") if "_compile_kernel" in names else None
    args = [out, x, _ELEMENTS]
    calls: dict[tuple[str, str], Callable[[], Any]] = {
        ("cukern", "square[4,256]"): lambda: square[4, 256](out, x, _ELEMENTS),
        ("cukern", "grid=4"): lambda: square(out, x, _ELEMENTS, grid=4, block=256),
        ("torch", ""): lambda: torch.mul(x, x, out=out),
        ("_compile_kernel", ""): lambda: theirs(grid=(4, 1, 1), block=(256, 1, 1), args=args),
    }
    calls = {key: call for key, call in calls.items() if key[0] in names}
    for call in calls.values():
        call()
    return calls
