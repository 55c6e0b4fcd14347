"""What launches ask of tensors: the dtype of computation, rows of a matrix, and pointers."""

import math

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute and add: compute_t of common/math.cuh. float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_matrix(x: Tensor) -> Tensor:
    """(..., columns) as (rows, columns), copied if the leading dimensions do not flatten to one. `x` has at least one dimension."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def unit_column_stride(x: Tensor) -> Tensor:
    """A tensor whose last dimension has stride 1, copied if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses; 0 for None."""
    return tuple(0 if t is None else t.data_ptr() for t in tensors)
