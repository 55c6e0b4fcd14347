"""What the pytest-benchmark files share: every provider of an op, forward and backward, at sizes that the
machine can bear.

Run `pytest benchmarks/bench_square.py`. pytest-benchmark's own times are of one call that is waited for, as
by a user who needs the result. `extra_info` has what `cukern bench` measures: device time by CUDA events,
bytes, TB/s, TFLOP/s, of limit. All runs in one process.
"""

import pytest
import torch

from cukern.bench import calls, environment, timing
from cukern.bench.measure import Row, copies, measure, providers
from cukern.runtime.launch.backend import simulating
from cukern.runtime.registry import CASES

DEVICE = environment.device()
GPU = DEVICE.type == "cuda"
SECONDS = 0.3 if GPU else 0.02  # for the times of extra_info, per benchmark
TIMES = (
    f"CUDA events on {environment.gpu_name()}"
    if GPU
    else "the simulator, on the CPU"
    if simulating()
    else "torch on the CPU"
)
_ONE = pytest.StashKey[str]()  # the workers that were asked for


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """One process, whatever -n says: pytest-benchmark measures nothing under pytest-xdist, and parallel runs
    would share the GPU."""
    asked = getattr(config.option, "numprocesses", None) or getattr(config.option, "tx", None)
    if asked:
        config.stash[_ONE] = f"{asked} of -n or --tx is ignored"
    for option, value in (("numprocesses", 0), ("dist", "no"), ("tx", [])):
        if hasattr(config.option, option):
            setattr(config.option, option, value)


def pytest_report_header(config):
    one = f"; one process ({config.stash[_ONE]})" if _ONE in config.stash else ""
    return f"cukern benchmarks: times of {TIMES}{'' if GPU else ', not of a GPU: there is none'}{one}"


def _off(config) -> bool:
    """True if the user asked to measure nothing."""
    return any(
        config.getoption(name, False) for name in ("collectonly", "benchmark_disable", "benchmark_skip")
    )


def pytest_sessionfinish(session, exitstatus):
    """A run that measured nothing is not green."""
    wanted = any("benchmark" in getattr(item, "fixturenames", ()) for item in getattr(session, "items", ()))
    if (
        exitstatus == 0
        and wanted
        and not _off(session.config)
        and not session.config._benchmarksession.benchmarks
    ):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED


def pytest_terminal_summary(terminalreporter, config):
    """The numbers of extra_info, below pytest-benchmark's table."""
    found = [
        b
        for b in getattr(getattr(config, "_benchmarksession", None), "benchmarks", ())
        if "times_of" in b.extra_info
    ]
    if not found and not _off(config):
        terminalreporter.write_line("no benchmark ran: nothing was measured", red=True)
    if found:
        terminalreporter.section(f"cukern.bench: times of {TIMES}")
        width = max(len(b.name) for b in found)
        titles = "device_us", "bytes", "tbps", "tflops", "of_limit"
        for name, *cells in (
            ("", *titles),
            *((b.name, *(b.extra_info.get(t) for t in titles)) for b in found),
        ):
            shown = (
                "" if c is None else c if isinstance(c, str) else f"{c}" if isinstance(c, int) else f"{c:.4g}"
                for c in cells
            )
            terminalreporter.write_line(f"{name:{width}} " + " ".join(f"{c:>12}" for c in shown))


def cases(name: str) -> list:
    """(dims, provider) of a case: what runs here, and, to be skipped with the reason, what does not."""
    case = CASES[name]
    functions, missing = providers(case, DEVICE, None)
    shapes = case.bench_dims if GPU else case.check_dims[-1:]
    found = [
        pytest.param(dims, key, id=f"{_by(dims)}-{'-'.join(filter(None, key))}")
        for dims in shapes
        for key in functions
    ]
    return found + [
        pytest.param((), (peer, ""), marks=pytest.mark.skip(reason=f"{peer}: {why}"), id=peer)
        for peer, why in missing.items()
    ]


def family(stem: str) -> list:
    """(name, dims, provider) of all cases of this stem."""
    names = [name for name, case in CASES.items() if case.op.stem == stem]
    return [pytest.param(n, *c.values, marks=c.marks, id=f"{n}-{c.id}") for n in names for c in cases(n)]


def _by(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


@pytest.fixture(autouse=True)
def measures(request):
    """A benchmark of a run in which pytest-benchmark is switched off fails, unless the user switched it
    off."""
    if request.config._benchmarksession.disabled and not _off(request.config):
        pytest.fail(
            "pytest-benchmark measures nothing under pytest-xdist: run `pytest benchmarks/`, or with -n 0",
            pytrace=False,
        )


@pytest.fixture
def run(benchmark):
    """Time one pass of a provider."""

    def timed(name: str, dims: tuple[int, ...], key: tuple[str, str], backward: bool) -> None:
        case, only = CASES[name], [key[1] if key[1] in CASES[name].op.versions else key[0]]
        if not benchmark.disabled:
            table = measure(case, dims, torch.float32, "bwd" if backward else "fwd", DEVICE, only, SECONDS)
            for row in table.rows:
                if (row.provider, row.version) == key:
                    benchmark.extra_info.update(_extra(row))
        function = providers(case, DEVICE, only)[0][key]
        inputs = case.make(dims, torch.float32, DEVICE)
        benchmark.group = f"{name} {_by(dims)} {'backward' if backward else 'forward'}"
        if backward:
            wanted = calls.wanted_inputs(case, "bwd", inputs)
            leaves = calls.leaves_of(inputs, wanted)
            out = function(*calls.arguments(case, leaves))
            benchmark(
                _waited_for, calls.backward(out, [leaves[i] for i in wanted], calls.draw_douts(case, inputs))
            )
        else:
            benchmark(_waited_for, lambda: function(*inputs))

    return timed


@pytest.fixture
def run_call(benchmark):
    """Time one call that is not a case of the registry. `total`: the bytes that it must move; `flops`: if it
    is bound by them."""

    def timed(call, total: int, flops: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        _waited_for(call)  # compiles
        if not benchmark.disabled:
            with timing.side_stream(DEVICE):
                own = {"call": [call]} | ({"copy": copies(total, 1, DEVICE)} if GPU and not flops else {})
                times, failed = timing.device_times(own, DEVICE, SECONDS)
            for error in failed.values():
                raise error
            us, peak = times["call"].median_us, environment.peak_flops(DEVICE, dtype)
            limit = (
                flops / peak * 1e6 / us
                if flops and peak
                else times["copy"].median_us / us
                if "copy" in times
                else None
            )
            row = Row("", "", "", (), str(dtype), "", us, times["call"].iqr_us, total, flops, limit)
            benchmark.extra_info.update(_extra(row))
        benchmark(_waited_for, call)

    return timed


def _extra(row: Row) -> dict:
    """`of_limit` is None without a GPU."""
    numbers = {"device_us": row.median_us, "device_iqr_us": row.iqr_us, "bytes": row.bytes, "tbps": row.tbps}
    return numbers | {"tflops": row.tflops, "of_limit": row.of_limit, "times_of": TIMES}


def _waited_for(call):
    result = call()
    if GPU:
        torch.cuda.synchronize()
    return result
