"""Checks for a rotation in place: which elements of the tensors have the same address."""

import functools
from typing import Any

import torch
from torch import Tensor

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_unwrap = torch._C._functorch.get_unwrapped
_PLAIN = (Tensor, torch.nn.Parameter)
_NO_EXTENT = -(1 << 63)  # the extent of an empty tensor, which overlaps nothing


def unwrapped(t: Any) -> Any:
    """The tensor inside torch.func's wrappers, with vmap's batches as dimensions."""
    while t is not None and _wrapped(t):
        t = _unwrap(t)
    return t


_OTHERS = ("cos", "sin", "position_ids", "cu_seqlens", "start_positions")


def check_writable(x: Tensor, k: Tensor | None, *others: Tensor | None) -> None:
    """Raises ValueError if two elements of x and k share memory, or if another input overlaps them.

    Extents are cached by shape and strides, so that a call only compares addresses. Another input is refused
    even if it lies in gaps between the elements of x.
    """
    p, extent = x.data_ptr(), written_extent("x", x.shape, x.stride(), x.itemsize)
    p_k, extent_k = 0, _NO_EXTENT
    if k is not None:
        p_k, extent_k = k.data_ptr(), written_extent("k", k.shape, k.stride(), k.itemsize)
        if -extent_k < p_k - p < extent:
            check_disjoint(p_k - p, x.itemsize, x.shape, x.stride(), k.shape, k.stride())
    for name, t in zip(_OTHERS, others, strict=True):
        if t is not None:
            q, size = t.data_ptr(), _extent(t.shape, t.stride(), t.itemsize)
            if -size < q - p < extent or -size < q - p_k < extent_k:
                raise ValueError(
                    f"{name} lies in the memory of {'x' if -size < q - p < extent else 'k'}, which is "
                    f"written in place"
                )


def check_writable_wrapped(*tensors: Tensor | None) -> None:
    """The same for tensors that torch.func may have wrapped, or that have no memory."""
    plain: Any = [unwrapped(t) for t in tensors]
    if all(t is None or (type(t) in _PLAIN and not t.is_meta) for t in plain):
        check_writable(*plain)
    else:
        for name, t in zip("xk", plain, strict=False):
            if t is not None:
                written_extent(name, t.shape, t.stride(), t.itemsize)


@functools.lru_cache(4096)
def _extent(shape: Any, strides: Any, itemsize: int) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    return (
        _NO_EXTENT
        if 0 in shape
        else (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1) * itemsize
    )


@functools.lru_cache(4096)
def written_extent(name: str, shape: Any, strides: Any, itemsize: int) -> int:
    """The same for a tensor to be written. Raises ValueError if two indices lead to the same element: if the
    stride of a dimension is within the extent of those with smaller strides."""
    extent = 0
    for stride, size in sorted(
        (stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1 and 0 not in shape
    ):
        if stride <= extent:
            raise ValueError(
                f"{name} has shape {tuple(shape)} and strides {tuple(strides)}: elements share memory, so it "
                f"cannot be in place"
            )
        extent += (size - 1) * stride
    return _extent(shape, strides, itemsize)


@functools.lru_cache(4096)
def check_disjoint(
    distance: int, itemsize: int, x_shape: Any, x_strides: Any, k_shape: Any, k_strides: Any
) -> None:
    """Raises ValueError if x and k, which begins `distance` bytes after x, have an element in common."""
    if not _disjoint(distance, itemsize, x_shape, x_strides, k_shape, k_strides):
        raise ValueError("x and k share memory: in place, no element may be in both")


def _disjoint(
    distance: int, itemsize: int, x_shape: Any, x_strides: Any, k_shape: Any, k_strides: Any
) -> bool:
    """Also True for interleaved slices of one packed tensor. If the strides differ, the extents must not
    overlap. Neither tensor overlaps itself."""
    if distance >= _extent(x_shape, x_strides, itemsize) or -distance >= _extent(
        k_shape, k_strides, itemsize
    ):
        return True
    if len(x_shape) != len(k_shape):
        return False
    dims = []
    for n, m, s, t in zip(x_shape, k_shape, x_strides, k_strides, strict=True):
        if n > 1 and m > 1 and s != t:
            return False
        dims.append((s if n > 1 else t, n, m))
    return distance % itemsize == 0 and not _reachable(
        distance // itemsize, sorted(d for d in dims if max(d[1:]) > 1)
    )


def _reachable(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """True if `distance` is a sum of (i - j) * stride, 0 <= i < n, 0 <= j < m, with one term for each
    dimension (stride, n, m)."""
    if not dims:
        return distance == 0
    *smaller, (stride, n, m) = dims
    nearest = distance // stride if stride else 0
    return any(
        -m < step < n and _reachable(distance - step * stride, smaller) for step in (nearest, nearest + 1)
    )
