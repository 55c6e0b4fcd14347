"""The tensors of AdamW: parts of DTensors, gradients and state in the layout of their parameter, and the norm of the gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks

Found = tuple[int, Tensor, int]  # the number of a parameter, the parameter, its group


def sum_of_squares(found: Sequence[Found], grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of the gradients of all processes, in double."""
    parts: dict[Any, list[Tensor]] = {}
    for (_, p, _), grad in zip(found, grads, strict=True):
        parts.setdefault(getattr(p, "device_mesh", None), []).append(grad)
    total = grads[0].new_zeros((), dtype=torch.float64)
    for mesh, some in parts.items():
        square = torch.stack(list(torch._foreach_norm(some, 2, dtype=torch.float64))).square().sum()
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Partial

            square = DTensor.from_local(square, mesh, [Partial()] * mesh.ndim).full_tensor()  # the sum over the processes
        total += square
    return total


def like_parameter(name: str, value: Any, p: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor of the state with the parameter's strides, which the kernels expect."""
    value = torch.as_tensor(value)
    if value.shape != p.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, it must be that of the parameter, {tuple(p.shape)}")
    return torch.empty_like(p, dtype=dtype).copy_(value)


def local(x: Any) -> Tensor:
    """This process's part of a DTensor; another tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


def gradient(index: int, p: Tensor) -> Tensor:
    """The gradient of a parameter, with its strides."""
    grad, p = local(p.grad), local(p)
    plain = type(grad) is Tensor and grad.dtype is p.dtype and grad.layout is torch.strided and grad.device == p.device
    if plain and grad.stride() == p.stride() and not grad.is_neg():
        return grad
    name = f"the gradient of parameter {index}"
    checks.dtype(name, grad, (p.dtype,))
    if grad.device != p.device:
        raise ValueError(f"{name} is on {grad.device}, the parameter is on {p.device}: they must be on one device")
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)
