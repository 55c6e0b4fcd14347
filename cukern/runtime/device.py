"""What a plan may ask about a GPU. The counts, sizes and rates of each known GPU are in this file only.

Counts and sizes come from the driver. The two rates are those that `cukern tune` measured, else those of the
table of known GPUs, else derived from the driver's attributes. Only cost models use the rates: they decide
which plan is chosen, never what it computes. Tile sizes, thresholds and fitted constants of a cost model are
next to the plan, with the name of the GPU on which they were fitted.
"""

import contextlib
import contextvars
import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from cukern.runtime import checks
from cukern.runtime.compile import bindings, cache

SIMULATED = -1  # the number of the simulated GPU, which is torch's get_device() of a CPU tensor
_CLOCKS_AND_BUS = (13, 36, 37)  # CU_DEVICE_ATTRIBUTE_CLOCK_RATE, _MEMORY_CLOCK_RATE, _GLOBAL_MEMORY_BUS_WIDTH
# of the nominal bandwidth and of the boost clock, the fractions that a copy and a long kernel reach
_BANDWIDTH, _CLOCK = 0.85, 0.88


class Device(NamedTuple):
    """`capability` is 90 for 9.0, `shared_bytes` the limit of dynamic shared memory per thread block."""

    name: str
    capability: int
    sms: int
    shared_bytes: int
    sm_bytes_us: float  # device memory bandwidth of a copy, per SM, in bytes per microsecond
    cycles_us: float  # SM clock under load, in cycles per microsecond

    @property
    def wgmma(self) -> bool:
        """True if wgmma and setmaxnreg exist: only for sm_90a. An sm_100a GPU has tcgen05 instead; there
        cukern uses mma.sync."""
        return self.capability == 90

    @property
    def sm_shared_bytes(self) -> int:
        """Shared memory of an SM. A block uses 1 KB more than it asks for."""
        return self.shared_bytes + 1024

    @property
    def mma_fmas_cycle(self) -> int:
        """FMAs per cycle and SM that mma.sync reaches with 16-bit operands and float32 sums; TF32 reaches
        half. From data sheets, but for sm_90, where mma.sync reaches 62 % of wgmma's rate (measured by others
        on an H800, arXiv 2402.13499)."""
        return {80: 1024, 90: 1280, 100: 1024}.get(self.capability, 512)

    @property
    def wgmma_fmas_cycle(self) -> int:
        """The same for wgmma."""
        return 2048


def _nominal(name: str, capability: int, sms: int, shared_kb: int, gb_s: float, boost_mhz: float) -> Device:
    return Device(name, capability, sms, shared_kb << 10, _BANDWIDTH * gb_s * 1e3 / sms, _CLOCK * boost_mhz)


# By the short name for `--gpu`. The rates of the H200 are measured; the others are derived from data sheets.
KNOWN = {
    "h200": Device("NVIDIA H200", 90, 132, 227 << 10, 31_000.0, 1750.0),
    "h100": _nominal("NVIDIA H100 80GB HBM3", 90, 132, 227, 3352, 1980),
    "h100-pcie": _nominal("NVIDIA H100 PCIe", 90, 114, 227, 2039, 1755),
    "b200": _nominal("NVIDIA B200", 100, 148, 227, 8000, 1965),
    "a100": _nominal("NVIDIA A100-SXM4-80GB", 80, 108, 163, 2039, 1410),
    "l40s": _nominal("NVIDIA L40S", 89, 142, 99, 864, 2520),
    "rtx4090": _nominal("NVIDIA GeForce RTX 4090", 89, 128, 99, 1008, 2520),
    "rtx5090": _nominal("NVIDIA GeForce RTX 5090", 120, 170, 99, 1792, 2407),
    "t4": _nominal("Tesla T4", 75, 40, 64, 320, 1590),
}

# Peak TFLOP/s of TF32 without sparsity, from data sheets. The first row whose words are part of the GPU's
# name counts.
_TF32_TFLOPS = {
    "GB200": 1250, "B200": 1100, "H200": 494.4, "H100 PCIe": 378, "H100": 494.4, "A100": 156, "L40S": 183,
    "L4": 60, "A10G": 35, "RTX 3090": 35.6, "RTX 4090": 82.6, "RTX 5090": 104.8,
}  # fmt: skip


def tf32_flops(name: str) -> float | None:
    """The peak FLOP/s of TF32 matrix products on the GPU of this name, or None if it is unknown."""
    return next(
        (1e12 * peak for words, peak in _TF32_TFLOPS.items() if re.search(rf"\b{words}\b", name)), None
    )


def fmas_cycle(capability: int, dtype: torch.dtype) -> int:
    """FMAs per cycle and SM without tensor cores, in float32 or float64. From the CUDA C++ Programming
    Guide."""
    return (
        {80: 32, 90: 64, 100: 64}.get(capability, 2)
        if dtype == torch.float64
        else {75: 64, 80: 64}.get(capability, 128)
    )


def representative(capability: int) -> Device:
    """The GPU that plans assume where only an architecture is named: the first known one of the newest
    capability up to this one."""
    return max((d for d in KNOWN.values() if d.capability <= capability), key=lambda d: d.capability)


# Few SMs, so that a small problem has more tiles than run at one time.
SIMULATED_DEVICE = KNOWN["h200"]._replace(name="simulated", sms=2)


@functools.cache
def _of_gpu(index: int) -> Device:
    facts = torch.cuda.get_device_properties(index)
    known = next((d for d in KNOWN.values() if d.name == facts.name), None)
    rates = tuned().get(facts.name) or (known and (known.sm_bytes_us, known.cycles_us))
    if not rates:
        runtime = bindings.runtime()
        clock_khz, memory_khz, bus_bits = (
            runtime.deviceGetAttribute(attribute, index) for attribute in _CLOCKS_AND_BUS
        )
        sm_bytes_us = _BANDWIDTH * 2 * memory_khz * bus_bits / 8 / 1e3 / facts.multi_processor_count
        rates = sm_bytes_us, _CLOCK * clock_khz / 1e3
    shared = facts.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Device(facts.name, facts.major * 10 + facts.minor, facts.multi_processor_count, shared, *rates)


@checks.constant
def device_of(index: int) -> Device:
    """The Device of a GPU by its number, or of the simulated GPU."""
    return _settings[-1].simulated if index == SIMULATED else _of_gpu(index)


def tuned_file() -> Path | None:
    """Where `cukern tune` stores rates; None if there is no cache folder."""
    folder = cache.target()
    return folder and folder / "devices.json"


def tuned() -> dict[str, tuple[float, float]]:
    """The stored rates (sm_bytes_us, cycles_us) by the full name of a GPU. An unreadable file counts as
    empty."""
    file = tuned_file()
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        if file is not None:
            found = json.loads(file.read_text())
            return {
                str(name): (float(a), float(b))
                for name, (a, b) in found.items()
                if float(a) > 0 and float(b) > 0
            }
    return {}


def store(name: str, sm_bytes_us: float, cycles_us: float) -> Path:
    """Store measured rates for later processes. Raises OSError if there is no folder to write to."""
    file = tuned_file()
    if file is None:
        raise OSError("no cache folder can be written; set CUKERN_CACHE_DIR")
    file.write_text(
        json.dumps({**tuned(), name: (round(sm_bytes_us, 1), round(cycles_us, 1))}, indent=1) + "\n"
    )
    _of_gpu.cache_clear()
    for forget in _forgetters:
        forget()
    return file


# ---- what plans depend on besides the problem: the GPU, and the candidates that they may choose

_R = TypeVar("_R")
_Candidate = TypeVar("_Candidate")
_forgetters: list[Callable[[], None]] = []


# What cukern.use chose in this context; see dispatch/versions.py.
versions_in_force: contextvars.ContextVar[str] = contextvars.ContextVar("cukern.versions", default="")


class _Setting(NamedTuple):
    simulated: Device = SIMULATED_DEVICE  # the GPU that plans of CPU tensors are made for
    forced: str = ""
    excluded: Collection[str] = ()


_settings = [_Setting()]  # the innermost block comes last


def cached(size: int) -> Callable[[Callable[..., _R]], Callable[..., _R]]:
    """functools.lru_cache for plans. It is cleared when `setting` changes what they depend on."""

    def decorate(function: Callable[..., _R]) -> Callable[..., _R]:
        made = functools.lru_cache(size)(function)
        when_plans_change(made.cache_clear)
        return made

    return decorate


def when_plans_change(forget: Callable[[], None]) -> None:
    """Call `forget` when cached plans become invalid."""
    _forgetters.append(forget)


@contextlib.contextmanager
def setting(**changes: Any) -> Iterator[None]:
    """Inside the block, plans depend on these fields of _Setting."""
    _settings.append(_settings[-1]._replace(**changes))
    forget_plans()
    try:
        yield
    finally:
        _settings.pop()
        forget_plans()


def forget_plans() -> None:
    for forget in _forgetters:
        forget()


def assumed(device: Device) -> contextlib.AbstractContextManager[None]:
    """Inside the block, plans of CPU tensors are made for this GPU. Used to find the kernels that calls need,
    not to run them."""
    return setting(simulated=device)


def restricted(kernel: str = "", without: Collection[str] = ()) -> contextlib.AbstractContextManager[None]:
    """Inside the block, plans use the candidate `kernel` where it fits, and none of `without`."""
    return setting(forced=kernel, excluded=without)


def allowed(name: str) -> bool:
    """True if plans may choose the candidate of this name."""
    return name not in _settings[-1].excluded


def eligible(candidates: Iterable[_Candidate], name: Callable[[_Candidate], str]) -> list[_Candidate]:
    """The forced candidate if it is among these, else those that are not excluded."""
    left = [c for c in candidates if allowed(name(c))]
    return [c for c in left if name(c) == _settings[-1].forced] or left
