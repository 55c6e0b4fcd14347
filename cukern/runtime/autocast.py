"""Autocast changes nothing that cukern computes: where torch's operations take part, it is off for them."""

import contextlib

import torch

_tracing = torch.compiler.is_dynamo_compiling


def enabled(x: torch.Tensor) -> bool:
    """Whether autocast is on for the device of x."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def off(x: torch.Tensor) -> contextlib.AbstractContextManager:
    """Inside it, operations on x's device are computed as if autocast were off."""
    if enabled(x) or (_tracing() and x.device.type != "meta"):  # a graph may run, and its backward be made, where autocast is on
        return torch.autocast(x.device.type, enabled=False)
    return contextlib.nullcontext()
