"""The rules of autocast, for the inputs of public functions. Inside cukern, it is disabled around torch
operations."""

import contextlib
from typing import Any

import torch

from cukern.runtime import recording

_tracing = torch.compiler.is_dynamo_compiling


def enabled(x: torch.Tensor) -> bool:
    """True if autocast is on for the device of x."""
    if x.is_cuda:  # 1.5 us less than to ask for the name of the device
        return torch.is_autocast_enabled()  # on a GPU
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def of_product(x: torch.Tensor, *others: Any) -> tuple[Any, ...]:
    """The inputs of a matrix product, tensors or None, as torch casts them while autocast is on. float64 and
    complex numbers stay."""
    if x.dtype == torch.float64 or not enabled(x):
        return x, *others
    dtype = torch.get_autocast_dtype(x.device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in (x, *others)
    )


def widest(x: torch.Tensor, *others: Any, float32: bool = False) -> tuple[Any, ...]:
    """Tensors or None in the dtype to which torch promotes them. `float32`: at least float32 on a GPU, as
    torch's norms and softmax are under its autocast. On a CPU torch's autocast does not cast these."""
    dtype = torch.float32 if float32 and x.is_cuda else x.dtype
    for t in (x, *others):
        dtype = dtype if t is None else torch.promote_types(dtype, t.dtype)
    return tuple(t if t is None else t.to(dtype) for t in (x, *others))


def off(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Inside the block, autocast is off for the device of x."""
    if (recorder := recording.local.recorder) is not None and enabled(x):
        recorder.fail("autocast is switched off for torch operations")
    # the graph, or its backward, may run while autocast is on
    if enabled(x) or (_tracing() and x.device.type != "meta"):
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
