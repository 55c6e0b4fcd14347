"""Load kernels ahead of their first use: before a CUDA graph is captured, or so that no user waits for a compiler."""

import contextlib
import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch

from cukern.runtime import backend, checks
from cukern.runtime.kernel import Kernel
from cukern.runtime.registry import OPS


def warmup(*ops: str, dtypes: Collection[torch.dtype] | None = None, device: torch.device | str | int | None = None) -> None:
    """Compile and load, on one GPU, every kernel of the ops: `cukern.warmup("square", dtypes=(torch.float32,))`.

    Args:
        ops: names such as "square"; all if none is given.
        dtypes: only the kernels of these; all that an op has if None.
        device: the GPU; torch's current one if None.

    Raises TypeError for what is no op's name, collection of dtypes or device; ValueError for an op, dtype or GPU that there is not;
    SetupError where there is no GPU.
    """
    for name in ops:
        checks.choice("op", name, OPS)
    if dtypes is not None:
        if not isinstance(dtypes, Collection) or not all(isinstance(d, torch.dtype) for d in dtypes):
            raise TypeError(f"dtypes must be a collection of torch dtypes or None, got {checks.brief(dtypes)}")
        for dtype in dtypes:
            if not any(dtype in OPS[name].dtypes for name in ops or OPS):
                raise ValueError(f"dtypes has {dtype}, of which {', '.join(ops) or 'no op'} has no kernels")
    index = _index(device)
    backend.require_gpu()
    if index is None:
        index = torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(f"device must be one of the {torch.cuda.device_count()} GPUs, got {device!r}")
    with torch.cuda.device(index):
        kernels: dict[str, Kernel] = {}
        for name in ops or OPS:
            kernels |= OPS[name].kernels(backend.capability(index), dtypes)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NVRTC releases the GIL
            list(pool.map(lambda kernel: kernel.on(index), kernels.values()))


def _index(device: torch.device | str | int | None) -> int | None:
    """The number of a GPU; None for the current one."""
    if not isinstance(device, str | torch.device):
        return None if device is None else checks.integer("device", device, 0)
    with contextlib.suppress(RuntimeError):  # torch's, for a name that it does not know
        if torch.device(device).type == "cuda":
            return torch.device(device).index
    raise ValueError(f"device must be a GPU, got {str(device)!r}")
