"""Checks of tensors and numbers of AdamW. Each error names the value and the rule."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks, interop

Numbers = tuple[Any, float, float, float, float]  # lr, beta1, beta2, eps, weight_decay; lr may be a tensor


def check_numbers(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> Numbers:
    """lr, beta1, beta2, eps and weight_decay. A learning rate in a float32 tensor stays one."""
    if isinstance(lr, Tensor):
        if lr.ndim or lr.dtype != torch.float32:
            raise TypeError(f"lr must be a number or a float32 tensor of shape (), got {lr.dtype} of shape {tuple(lr.shape)}")
    else:
        lr = _not_negative("lr", lr)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers, got {checks.brief(betas)}")
    for i, beta in enumerate(betas):
        if not 0 <= checks.number(f"betas[{i}]", beta) < 1:
            raise ValueError(f"betas[{i}] must be at least 0 and less than 1, got {beta!r}")
    return lr, float(betas[0]), float(betas[1]), _not_negative("eps", eps), _not_negative("weight_decay", weight_decay)


def _not_negative(name: str, value: Any) -> float:
    number = checks.number(name, value)
    if number < 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return number


def check_param(name: str, tensor: Tensor) -> None:
    checks.dtype(name, tensor, checks.FLOATS)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: its elements must lie side by side")


def check_tensors(name: str, tensors: Any, written: bool) -> list[Tensor]:
    """A list of tensors or arrays, as tensors."""
    if not isinstance(tensors, Iterable) or isinstance(tensors, str | bytes | dict | Tensor):
        raise TypeError(f"{name} must be a list of tensors, got {checks.brief(tensors)}")
    found = [interop.to_torch(f"{name}[{i}]", t, written) for i, t in enumerate(tensors)]
    for i, t in enumerate(found):
        check_param(f"{name}[{i}]", t)
    return found
