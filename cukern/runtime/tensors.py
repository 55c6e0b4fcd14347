"""What launches ask of tensors: the dtype of computation, rows of a matrix, and pointers."""

import itertools
import math

import torch
from torch import Tensor

VECTOR_BYTES = 16  # the longest load and store of a thread


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels compute and add: compute_t of common/math.cuh. float32, or float64 for
    float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_matrix(x: Tensor) -> Tensor:
    """(..., columns) as (rows, columns), copied if the leading dimensions do not flatten to one."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1] if x.ndim else 1)


def mergeable(x: Tensor) -> Tensor:
    """A tensor that `as_matrix` flattens without a copy: x, or x contiguous."""
    if x.is_contiguous():
        return x
    rows = [(n, stride) for n, stride in zip(x.shape[:-1], x.stride(), strict=False) if n != 1]
    merges = all(outer == inner * n for (_, outer), (n, inner) in itertools.pairwise(rows))
    return x if merges else x.contiguous()


def unit_column_stride(x: Tensor) -> Tensor:
    """A tensor whose last dimension has stride 1, copied if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def readable(x: Tensor | None) -> Tensor | None:
    """x as kernels on rows read it, copied if necessary: the last dimension has stride 1, and there is no
    negative bit."""
    return None if x is None else unit_column_stride(x.resolve_neg())


def aligned(*tensors: Tensor | None) -> bool:
    """True if each row of each tensor starts at a multiple of VECTOR_BYTES and consists of whole vectors."""
    bits = 0
    for t in tensors:
        if t is not None:
            bits |= t.data_ptr() | t.shape[-1] * t.itemsize | (t.stride(0) * t.itemsize if t.ndim > 1 else 0)
    return bits % VECTOR_BYTES == 0


def vector_width(x: Tensor, *others: Tensor | None) -> int:
    """Elements per access: those in VECTOR_BYTES bytes of x if all tensors are `aligned`, else 1."""
    return VECTOR_BYTES // x.itemsize if aligned(x, *others) else 1


def empty_like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape, dtype and device."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def pointers(*tensors: Tensor | None) -> tuple[int, ...]:
    """Addresses; 0 for None."""
    return tuple([0 if t is None else t.data_ptr() for t in tensors])  # faster than a generator


def row_strides(*tensors: Tensor | None) -> tuple[int, ...]:
    """The first stride of each; 0 for None."""
    return tuple([0 if t is None else t.stride(0) for t in tensors])
