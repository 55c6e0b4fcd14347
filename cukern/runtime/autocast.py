"""cukern ignores autocast: it is disabled around torch operations inside cukern."""

import contextlib

import torch

from cukern.runtime import recording

_tracing = torch.compiler.is_dynamo_compiling


def enabled(x: torch.Tensor) -> bool:
    """True if autocast is on for the device of x."""
    if x.is_cuda:  # 1.5 us less than to ask for the name of the device
        return torch.is_autocast_enabled()  # on a GPU
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def off(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Inside the block, autocast is off for the device of x."""
    if (recorder := recording.active()) is not None and enabled(x):
        recorder.fail("autocast is switched off for torch operations")
    if enabled(x) or (_tracing() and x.device.type != "meta"):  # the graph, or its backward, may run while autocast is on
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
