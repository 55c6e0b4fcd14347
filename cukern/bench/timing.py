"""Times calls: device time with CUDA events around CUDA graphs, host time with the clock.

Each provider has one call per input set. All sets together exceed the L2 cache, so that no call finds its
data there. In each round the providers run in random order, so that clock and temperature drift affects all
of them equally.
"""

import contextlib
import functools
import gc
import itertools
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)  # of a provider

# Calls are replayed from a CUDA graph if they are shorter than GRAPH_BELOW_US, or if more than HOST_SHARE of
# their time is host time, as in backward passes with many launches. Longer calls are not, because the
# driver's copies may be slower in a graph (see measure.copies).
GRAPH_BELOW_US, HOST_SHARE = 200.0, 0.5
BATCH_US = 1000.0  # target time between two events
MAX_BATCH = 1000  # calls; about the length of the driver's launch queue
CPU_BATCH_US, HOST_BATCH_US = 2000.0, 20_000.0
WARMUP_US = 200_000.0  # of rounds that are not recorded
_SLEEP_CYCLES = 1_000_000  # the GPU waits about 0.5 ms, in which the host enqueues the first batches


@dataclass(frozen=True)
class Timing:
    """Microseconds per call: the median over rounds and the interquartile range. `note`: a remark on how it
    was measured."""

    median_us: float
    iqr_us: float
    note: str = ""


@dataclass(frozen=True)
class _Batch:
    """Calls between two readings of the clock, their number, and the approximate time of one call."""

    run: Call
    calls: int
    call_us: float = 0.0
    note: str = ""


@contextlib.contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """A side stream on a GPU, which graph capture needs. Create inputs and run forward passes inside it
    too."""
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
    calls: Mapping[Name, Sequence[Call]], device: torch.device, budget_s: float = 3.0
) -> tuple[dict[Name, Timing], dict[Name, Exception]]:
    """The time of one call of each provider, which has one call per input set. Use inside `side_stream`.

    Returns the times, and the errors of providers that failed.
    """
    batches: dict[Name, _Batch] = {}
    failed: dict[Name, Exception] = {}
    prepare, clock = (_prepare_gpu, _gpu_round) if device.type == "cuda" else (_prepare_cpu, _host_round)
    for name, own in calls.items():
        try:
            batches[name] = prepare(own)
        except Exception as error:  # a failing peer must not end the measurement
            failed[name] = error
    round_us = sum(b.calls * b.call_us for b in batches.values()) or 1.0
    rounds = min(max(int(budget_s * 1e6 / round_us), 5), 100)
    warmup = min(math.ceil(WARMUP_US / round_us), 20) if round_us < WARMUP_US else 0
    return _times(batches, clock, warmup, rounds), failed


def host_times(
    calls: Mapping[Name, Call], device: torch.device, rounds: int = 60, count: int = 200
) -> dict[Name, Timing]:
    """Host time of one call. A round has up to `count` calls, fewer than the length of the launch queue. It
    does not wait for the GPU."""
    batches = {name: _prepare_host(call, count) for name, call in calls.items()}
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    collecting = gc.isenabled()
    gc.disable()
    try:
        return _times(batches, lambda batches: _host_round(batches, wait), 1, rounds)
    finally:
        if collecting:
            gc.enable()
        wait()


def successive_times(call: Call, count: int, device: torch.device) -> Timing:
    """The time of one of `count` calls in a row, as a program makes them: with the host's time where the GPU
    waits for it."""
    clock = _gpu_round if device.type == "cuda" else _host_round
    return summary(clock([_Batch(call, 1)] * count))


def times_and_peak(
    call: Call, count: int, device: torch.device, warmup: int = 3
) -> tuple[Timing, float | None]:
    """`successive_times`, and the most memory of tensors in MiB, on a GPU."""
    for _ in range(warmup):
        call()
    if device.type != "cuda":
        return successive_times(call, count, device), None
    torch.cuda.reset_peak_memory_stats(device)
    times = successive_times(call, count, device)
    return times, torch.cuda.max_memory_allocated(device) / 2**20


def _prepare_host(call: Call, most: int) -> _Batch:
    run = _in_turns([call])
    run(4)  # the first three are planned and recorded
    (call_us,) = _host_round([_Batch(call, 1)])
    count = min(most, _calls_in_batch(call_us, 1, HOST_BATCH_US))
    return _Batch(lambda: run(count), count, call_us)


def _times(
    batches: dict[Name, _Batch], clock: Callable[[list[_Batch]], list[float]], warmup: int, rounds: int
) -> dict[Name, Timing]:
    """Run all batches in random order in each round. The samples of the `warmup` rounds are discarded."""
    samples: dict[Name, list[float]] = {name: [] for name in batches}
    order, shuffle = list(batches), random.Random(0).shuffle
    for turn in range(warmup + rounds):
        shuffle(order)
        for name, us in zip(order, clock([batches[n] for n in order]), strict=True):
            if turn >= warmup:
                samples[name].append(us)
    return {name: summary(samples[name], batch.note) for name, batch in batches.items()}


def summary(us: Sequence[float], note: str = "") -> Timing:
    """Median and interquartile range of samples."""
    quarters = statistics.quantiles(us, n=4, method="inclusive") if len(us) > 1 else [us[0]] * 3
    return Timing(statistics.median(us), quarters[2] - quarters[0], note)


def _host_round(batches: list[_Batch], wait: Call = lambda: None) -> list[float]:
    """Host microseconds per call of each batch. `wait` is called before each batch, and is not timed."""
    times = []
    for batch in batches:
        wait()
        start = time.perf_counter()
        batch.run()
        times.append((time.perf_counter() - start) * 1e6 / batch.calls)
    return times


def _in_turns(calls: Sequence[Call]) -> Callable[[int], None]:
    """A function that makes the next n calls, cycling through the input sets."""
    turns = itertools.cycle(calls)

    def run(count: int) -> None:
        for call in itertools.islice(turns, count):
            call()

    return run


def _calls_in_batch(call_us: float, sets: int, aim_us: float) -> int:
    return min(max(math.ceil(aim_us / max(call_us, 0.1)), sets), max(MAX_BATCH, sets))


def _gpu_round(batches: list[_Batch]) -> list[float]:
    """Microseconds per call of each batch. All batches are enqueued before the GPU starts, with events
    between them."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    torch.cuda._sleep(_SLEEP_CYCLES)
    events[0].record()
    for batch, event in zip(batches, events[1:], strict=True):
        batch.run()
        event.record()
    events[-1].synchronize()
    return [
        a.elapsed_time(b) * 1e3 / batch.calls
        for batch, a, b in zip(batches, events, events[1:], strict=False)
    ]


def _prepare_gpu(calls: Sequence[Call]) -> _Batch:
    run = _in_turns(calls)
    run(len(calls))  # the first calls compile, load and allocate
    torch.cuda.synchronize()
    (call_us,) = _gpu_round([_Batch(lambda: run(1), 1)])
    if call_us < BATCH_US:
        (call_us,) = _gpu_round([_Batch(lambda: run(10), 10)])
    if (
        call_us >= GRAPH_BELOW_US
        and _host_round([_Batch(lambda: run(3), 3)], torch.cuda.synchronize)[0] < HOST_SHARE * call_us
    ):
        few = math.ceil(BATCH_US / call_us)
        return _Batch(lambda: run(few), few, call_us)
    # every replay starts at the first set, so all input sets must be in the graph
    count = _calls_in_batch(call_us, len(calls), BATCH_US)
    try:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the backward pass launches its kernels from an autograd thread
        capture = torch.cuda.graph(
            graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"
        )
        with warnings.catch_warnings():  # a call that refuses the capture leaves the graph empty
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with capture:
                run(count)
        graph.replay()  # the first replay uploads the graph
        torch.cuda.synchronize()
    except RuntimeError as error:
        torch.cuda.synchronize()
        reason = str(error).strip().partition("\n")[0]
        return _Batch(
            lambda: run(count),
            count,
            call_us,
            f"not captured in a CUDA graph, so the time may include host time ({reason})",
        )
    return _Batch(graph.replay, count, call_us)


def _prepare_cpu(calls: Sequence[Call]) -> _Batch:
    run = _in_turns(calls)
    run(len(calls))
    call_us = min(_host_round([_Batch(lambda: run(1), 1)])[0] for _ in range(3))
    count = _calls_in_batch(call_us, 1, CPU_BATCH_US)
    return _Batch(lambda: run(count), count, call_us)
