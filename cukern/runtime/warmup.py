"""Load kernels ahead of their first use: before a CUDA graph is captured, or so that no user waits for a compiler."""

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import torch

from cukern.runtime import backend
from cukern.runtime.kernel import Kernel
from cukern.runtime.registry import OPS


def warmup(*ops: str, dtypes: Collection[torch.dtype] | None = None, device: torch.device | str | int | None = None) -> None:
    """Compile and load, on one GPU, every kernel of the ops: `cukern.warmup("square", dtypes=(torch.float32,))`.

    Args:
        ops: names such as "square"; all if none is given.
        dtypes: only the kernels of these; all that an op has if None.
        device: the GPU; torch's current one if None.

    Raises ValueError for an op that there is not, or a device that is no GPU; SetupError where there is no GPU.
    """
    for name in ops:
        if name not in OPS:
            raise ValueError(f"there is no op {name!r}; the ops are {', '.join(OPS)}")
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
    if place.type != "cuda":
        raise ValueError(f"device must be a GPU, got {place}")
    backend.require_gpu()
    index = torch.cuda.current_device() if place.index is None else place.index
    with torch.cuda.device(index):
        kernels: dict[str, Kernel] = {}
        for name in ops or OPS:
            kernels |= OPS[name].kernels(backend.capability(index), dtypes)
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # NVRTC releases the GIL
            list(pool.map(lambda kernel: kernel.on(index), kernels.values()))
