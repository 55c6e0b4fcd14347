"""`cukern tune`: measure the two rates of this GPU that plans ask for, and store them for later processes."""

import torch

from cukern.bench.timing import device_times, side_stream
from cukern.cli.common import console
from cukern.runtime import device as devices
from cukern.runtime.backend import require_gpu
from cukern.runtime.kernel import compile as compile_text

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


def tune() -> None:
    """Measure this GPU's copy bandwidth and its SM clock under load; plans of later processes use them."""
    require_gpu()
    facts = devices.device_of(torch.cuda.current_device())
    bandwidth, clock = _bandwidth() / facts.sms, _clock(facts.sms)
    for what, measured, used in (
        ("copy bandwidth of an SM, bytes/us", bandwidth, facts.sm_bytes_us),
        ("SM clock under load, MHz", clock, facts.cycles_us),
    ):
        console.print(f"{what}: {measured:.0f}; plans used {used:.0f}", highlight=False)
    file = devices.store(facts.name, bandwidth, clock)
    console.print(f"stored in {file}", markup=False, highlight=False, soft_wrap=True)


def _bandwidth() -> float:
    """Bytes read and written by a copy in a microsecond."""
    place = torch.device("cuda", torch.cuda.current_device())
    with side_stream(place):
        src = torch.empty(COPY_BYTES, dtype=torch.uint8, device=place).random_()
        dst = torch.empty_like(src)
        times, failed = device_times({"copy": [lambda: dst.copy_(src)]}, place)
    for error in failed.values():
        raise error
    return 2 * COPY_BYTES / times["copy"].median_us


def _clock(sms: int) -> float:
    """Cycles of an SM in a microsecond while all SMs multiply and add: the median over the thread blocks of the second launch."""
    blocks, threads = 2 * sms, 512
    rates, sink = torch.empty(blocks, dtype=torch.float64, device="cuda"), torch.empty(blocks * threads, device="cuda")
    for _ in range(2):
        compile_text(CLOCKS)(rates, sink, FMAS, grid=blocks, block=threads)
    return float(rates.median())
