"""`cukern tune`: measures two rates of this GPU for the cost models, or the configurations of a user's own
op, and stores the result."""

from typing import Annotated

import torch
import typer

import cukern
from cukern.bench import environment
from cukern.bench.timing import device_times, side_stream
from cukern.cli.common import Dims, Dtype, find_case, find_dims, find_dtype, say
from cukern.runtime import device as devices
from cukern.runtime.launch.driver import require_gpu
from cukern.runtime.launch.load import compile as compile_text

COPY_BYTES = 1 << 30
FMAS = 1 << 18  # per thread: several milliseconds, so that the clock settles
CLOCKS = """
extern "C" __global__ void clock_rate(double* rates, float* sink, int n) {
    unsigned long long begin_ns, end_ns;
    float x = threadIdx.x;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin_ns));
    long long begin = clock64();
    for (int i = 0; i < n; ++i) x = fmaf(x, 0.999f, 1.0f);
    long long end = clock64();
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end_ns));
    if (threadIdx.x == 0) rates[blockIdx.x] = 1e3 * (end - begin) / (end_ns - begin_ns);
    sink[blockIdx.x * blockDim.x + threadIdx.x] = x;
}"""


def tune(
    op: Annotated[
        str | None,
        typer.Argument(metavar="[OP]", help="A file of your own op, whose configs= are measured: my_op.py."),
    ] = None,
    dims: Dims = None,
    dtype: Dtype = None,
) -> None:
    """Measure this GPU's copy bandwidth and its SM clock under load, and store them. Plans of later processes
    use them.

    With OP, check and measure the configurations of your own op, and store the fastest one for this GPU: see
    help(cukern.tune).
    """
    if op is not None:
        found = find_case(op)
        shape, kind = find_dims(found, dims, ()), find_dtype(found, dtype) if dtype else None
        for one in cukern.tune(found.call, *(shape[0] if shape else ()), dtype=kind):
            say(f"{one.problem or ('right' if one.us is None else f'{one.us:.2f} us')}: {dict(one.config)}")
        return
    require_gpu()
    facts = devices.device_of(torch.cuda.current_device())
    bandwidth, clock = _bandwidth() / facts.sms, _clock(facts.sms)
    say(f"copy bandwidth of an SM, bytes/us: {bandwidth:.0f}; plans used {facts.sm_bytes_us:.0f}")
    say(f"SM clock under load, MHz: {clock:.0f}; plans used {facts.cycles_us:.0f}")
    say(f"stored in {devices.store(facts.name, bandwidth, clock)}")


def _bandwidth() -> float:
    """Bytes that a copy reads and writes per microsecond."""
    place = environment.device()
    with side_stream(place):
        src = torch.empty(COPY_BYTES, dtype=torch.uint8, device=place).random_()
        dst = torch.empty_like(src)
        times, failed = device_times({"copy": [lambda: dst.copy_(src)]}, place)
    for error in failed.values():
        raise error
    return 2 * COPY_BYTES / times["copy"].median_us


def _clock(sms: int) -> float:
    """SM cycles per microsecond while all SMs execute FMAs: the median over the thread blocks of the second
    launch."""
    blocks, threads = 2 * sms, 512
    rates = torch.empty(blocks, dtype=torch.float64, device="cuda")
    sink = torch.empty(blocks * threads, dtype=torch.float32, device="cuda")
    for _ in range(2):
        compile_text(CLOCKS)(rates, sink, FMAS, grid=blocks, block=threads)
    return float(rates.median())
