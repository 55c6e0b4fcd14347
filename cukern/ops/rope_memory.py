"""Which elements of which tensors lie at one address: what a rotation in place has to know."""

from typing import Any

from torch import Tensor


def check_writable(x: Tensor, k: Tensor | None) -> None:
    """Each element of x and k has a place of its own. Raises ValueError."""
    check_apart("x", x.shape, x.stride())
    if k is not None:
        check_apart("k", k.shape, k.stride())
        check_disjoint(k.data_ptr() - x.data_ptr(), x.itemsize, x.shape, x.stride(), k.shape, k.stride())


def check_apart(name: str, shape: Any, strides: Any) -> None:
    """No two indices lead to one element: no dimension steps into the extent of those with smaller steps. Raises ValueError."""
    extent = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride <= extent:
            raise ValueError(
                f"{name} has shape {tuple(shape)} and strides {tuple(strides)}: elements share memory, so it cannot be in place"
            )
        extent += (size - 1) * stride


def check_disjoint(distance: int, itemsize: int, x_shape: Any, x_strides: Any, k_shape: Any, k_strides: Any) -> None:
    """k, which begins `distance` bytes after x, has no element in common with x. Raises ValueError."""
    if not _disjoint(distance, itemsize, x_shape, x_strides, k_shape, k_strides):
        raise ValueError("x and k share memory: in place, no element may be in both")


def _disjoint(distance: int, itemsize: int, x_shape: Any, x_strides: Any, k_shape: Any, k_strides: Any) -> bool:
    """True for slices of one packed tensor too, whose elements lie among each other. Neither overlaps itself. Where the strides differ,
    their extents must not meet."""
    extents = [(sum((n - 1) * s for n, s in zip(*t, strict=True)) + 1) * itemsize for t in ((x_shape, x_strides), (k_shape, k_strides))]
    if distance >= extents[0] or -distance >= extents[1] or 0 in (*x_shape, *k_shape):
        return True
    dims = []
    for n, m, s, t in zip(x_shape, k_shape, x_strides, k_strides, strict=True):
        if n > 1 and m > 1 and s != t:
            return False
        dims.append((s if n > 1 else t, n, m))
    return distance % itemsize == 0 and not _meet(distance // itemsize, sorted(d for d in dims if max(d[1:]) > 1))


def _meet(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether `distance` is a sum of steps (i - j) * stride, 0 <= i < n, 0 <= j < m, one of each dimension (stride, n, m)."""
    if not dims:
        return distance == 0
    *smaller, (stride, n, m) = dims
    nearest = distance // stride if stride else 0
    return any(-m < step < n and _meet(distance - step * stride, smaller) for step in (nearest, nearest + 1))
