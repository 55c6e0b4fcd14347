"""Times calls: device time with CUDA events around CUDA graphs, host time with the clock.

Each provider has one call per input set. All sets together exceed the L2 cache, so that no call finds its data there. In each round the
providers run in random order, so that clock and temperature drift affects all of them equally.
"""

import contextlib
import functools
import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]

# Calls are replayed from a CUDA graph if they are shorter than this, or if host time is more than this share of their time, as in backward
# passes with many launches. Others are not, because the driver's copies may be slower in a graph (see measure.copies).
GRAPH_BELOW_US, HOST_SHARE = 200.0, 0.5
BATCH_US = 1000.0  # target time between two events
MAX_BATCH = 1000  # calls; about the length of the driver's launch queue
CPU_BATCH_US = 2000.0
_SLEEP_CYCLES = 1_000_000  # about 0.5 ms, in which the host gets ahead of the GPU


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over rounds and the interquartile range. `note`: a remark on how it was measured."""

    median_us: float
    iqr_us: float
    note: str = ""


@dataclass(frozen=True)
class _Batch:
    """Several calls between two events, and the approximate time of one call."""

    run: Call
    calls: int
    call_us: float
    note: str = ""


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A side stream on a GPU, which graph capture needs. Create inputs and run forward passes inside it too."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    with torch.cuda.device(device), torch.cuda.stream(_stream(device)):
        yield
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Always the same stream, because torch caches freed memory per stream."""
    return torch.cuda.Stream(device)


def device_times(
    calls: Mapping[str, Sequence[Call]], device: torch.device, budget_s: float = 3.0
) -> tuple[dict[str, Timing], dict[str, Exception]]:
    """The time of one call for each provider, which has one call per input set. Use inside `side_stream`.

    Returns the times, and the errors of providers that failed.
    """
    batches: dict[str, _Batch] = {}
    failed: dict[str, Exception] = {}
    prepare = _prepare_gpu if device.type == "cuda" else _prepare_cpu
    for name, own in calls.items():
        try:
            batches[name] = prepare(own)
        except Exception as error:  # a failing peer must not end the measurement
            failed[name] = error
    clock = _gpu_round if device.type == "cuda" else _cpu_round
    samples = _rounds(batches, clock, budget_s)
    return {name: summary(samples[name], batch.note) for name, batch in batches.items()}, failed


def host_times(calls: Mapping[str, Call], device: torch.device, rounds: int = 60, count: int = 200) -> dict[str, Timing]:
    """Host time of one call: `count` calls, fewer than the length of the launch queue, without waiting for the GPU."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(count):
            call()
    collecting = gc.isenabled()
    gc.disable()
    try:
        for names in _orders(calls, rounds):
            for name in names:
                call = calls[name]
                wait()
                start = time.perf_counter()
                for _ in range(count):
                    call()
                samples[name].append((time.perf_counter() - start) * 1e6 / count)
    finally:
        if collecting:
            gc.enable()
    wait()
    return {name: summary(us) for name, us in samples.items()}


def summary(us: Sequence[float], note: str = "") -> Timing:
    """Median and interquartile range of samples."""
    quarters = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else [us[0]] * 3
    return Timing(statistics.median(us), quarters[2] - quarters[0], note)


def _orders(names: Mapping[str, object], rounds: int) -> Iterator[list[str]]:
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        order = list(names)
        shuffle(order)
        yield order


def _rounds(batches: dict[str, _Batch], clock: Callable[[list[_Batch]], list[float]], budget_s: float) -> dict[str, list[float]]:
    round_us = sum(b.calls * b.call_us for b in batches.values()) or 1.0
    count = min(max(int(budget_s * 1e6 / round_us), 5), 100)
    warmup = min(math.ceil(200_000 / round_us), 20) if round_us < 200_000 else 0
    samples: dict[str, list[float]] = {name: [] for name in batches}
    for turn, names in enumerate(_orders(batches, warmup + count)):
        for name, us in zip(names, clock([batches[n] for n in names]), strict=True):
            if turn >= warmup:
                samples[name].append(us)
    return samples


def _in_turns(calls: Sequence[Call]) -> Callable[[int], None]:
    """A function that makes the next n calls, cycling through the input sets."""
    turns = itertools.cycle(calls)

    def run(count: int) -> None:
        for call in itertools.islice(turns, count):
            call()

    return run


def _calls_in_batch(call_us: float, sets: int, aim_us: float) -> int:
    return min(max(math.ceil(aim_us / max(call_us, 0.1)), sets), max(MAX_BATCH, sets))


# ---- the GPU


def _gpu_round(batches: list[_Batch]) -> list[float]:
    """Microseconds per call of each batch. All batches are enqueued before the GPU starts, with events between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda._sleep(_SLEEP_CYCLES)
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        batch.run()
        event.record()
    events[-1].synchronize()
    return [a.elapsed_time(b) * 1e3 / batch.calls for batch, a, b in zip(batches, events, events[1:], strict=False)]


def _prepare_gpu(calls: Sequence[Call]) -> _Batch:
    run = _in_turns(calls)
    run(len(calls))  # the first calls compile, load and allocate
    torch.cuda.synchronize()
    (call_us,) = _gpu_round([_Batch(lambda: run(1), 1, 0.0)])
    if call_us < BATCH_US:
        (call_us,) = _gpu_round([_Batch(lambda: run(10), 10, 0.0)])
    if call_us >= GRAPH_BELOW_US and _host_us(run) < HOST_SHARE * call_us:
        few = math.ceil(BATCH_US / call_us)
        return _Batch(lambda: run(few), few, call_us)
    count = _calls_in_batch(call_us, len(calls), BATCH_US)  # every replay starts at the first set, so all input sets must be in the graph
    try:
        graph = _capture(run, count)
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).strip().partition("\n")[0]
        return _Batch(lambda: run(count), count, call_us, f"not captured in a CUDA graph, so the time may include host time ({reason})")
    return _Batch(graph.replay, count, call_us)


def _host_us(run: Callable[[int], None]) -> float:
    """Host time of a call, without waiting for the GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run(3)
    us = (time.perf_counter() - start) * 1e6 / 3
    torch.cuda.synchronize()
    return us


def _capture(run: Callable[[int], None], count: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    # thread_local: the backward pass launches its kernels from an autograd thread
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        run(count)
    graph.replay()  # the first replay uploads the graph
    torch.cuda.synchronize()
    return graph


# ---- the CPU


def _cpu_round(batches: list[_Batch]) -> list[float]:
    times = []
    for batch in batches:
        start = time.perf_counter()
        batch.run()
        times.append((time.perf_counter() - start) * 1e6 / batch.calls)
    return times


def _prepare_cpu(calls: Sequence[Call]) -> _Batch:
    run = _in_turns(calls)
    run(len(calls))
    call_us = min(_cpu_round([_Batch(lambda: run(1), 1, 0.0)])[0] for _ in range(3))
    count = _calls_in_batch(call_us, 1, CPU_BATCH_US)
    return _Batch(lambda: run(count), count, call_us)
