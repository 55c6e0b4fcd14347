"""Tensors of NumPy's long doubles, of 64 bits of precision on x86: what is right where float64 is tested.

A `LongDouble` says that it is float64 on the CPU, and autograd differentiates it. The operations that torch
performs on it, forward and backward, run here in NumPy; one that is missing raises NotImplementedError.
Others are torch's decompositions of them.
"""

import math
from typing import Any

import mpmath
import numpy as np
import torch
from torch._decomp import decomposition_table
from torch.utils import _pytree as pytree

mpmath.mp.prec = 100


def _axes(x: Any, dim: Any) -> Any:
    """As NumPy has it. A number has no axes, and no dimensions are all."""
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(dims) if dims and x.ndim else None


def _slice(x, dim=0, start=None, end=None, step=1):
    return x[(slice(None),) * (dim % x.ndim) + (slice(start, end, step),)]


def _index(indices: Any) -> tuple:
    return tuple(slice(None) if i is None else i for i in indices)


def _index_put(x, indices, values, accumulate=False, *_):
    x = x.copy()
    np.add.at(x, _index(indices), values) if accumulate else x.__setitem__(_index(indices), values)
    return x


def _erfc(x):
    # no underflow
    return x if math.isnan(x) else np.longdouble(mpmath.nstr(mpmath.erfc(mpmath.mpmathify(min(x, 100))), 25))


def _sum(x, dim=None, keepdim=False, dtype=None):
    return x.sum(_axes(x, dim), keepdims=keepdim)


NUMPY = {  # the operations by their names in aten
    "add": lambda a, b, alpha=1: a + alpha * b, "sub": lambda a, b, alpha=1: a - alpha * b,
    "rsub": lambda a, b, alpha=1: b - alpha * a,
    "mul": np.multiply, "div": np.true_divide, "neg": np.negative, "abs": np.abs, "pow": np.power,
    "exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt, "sin": np.sin, "cos": np.cos,
    "atan": np.arctan,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "eq": np.equal,
    "le": np.less_equal,
    "ge": np.greater_equal, "where": np.where,
    "erfc": lambda x: np.vectorize(_erfc, [np.longdouble])(x) if x.size else x,
    "clamp": lambda x, least=None, most=None: np.clip(x, least, most),
    "masked_fill": lambda x, mask, value: np.where(mask, value, x),
    "nan_to_num": lambda x, nan, posinf: np.nan_to_num(x, nan=nan, posinf=posinf),
    "sum": _sum, "amax": lambda x, dim=(), keepdim=False: x.max(_axes(x, dim), keepdims=keepdim),
    "mean": lambda x, dim, keepdim=False, dtype=None: (
        _sum(x, dim, keepdim) / math.prod(x.shape[i] for i in dim)),
    "mm": np.matmul, "bmm": np.matmul,
    "view": np.reshape, "_unsafe_view": np.reshape, "unsqueeze": np.expand_dims, "permute": np.transpose,
    "transpose": np.swapaxes,
    "t": np.transpose,
    "expand": lambda x, shape, implicit=False: np.broadcast_to(
        x, [n if n >= 0 else x.shape[i + x.ndim - len(shape)] for i, n in enumerate(shape)]),
    "squeeze": lambda x, dim: np.squeeze(x, tuple(i for i in _axes(x, dim) or () if x.shape[i] == 1)),
    "select": lambda x, dim, i: np.take(x, i, dim), "slice": _slice,
    "split_with_sizes": lambda x, sizes, dim=0: np.split(x, np.cumsum(sizes)[:-1], dim),
    "cat": lambda xs, dim=0: np.concatenate(xs, dim),
    "stack": lambda xs, dim=0: np.stack(xs, dim),
    "unbind": lambda x, dim=0: [np.take(x, i, dim) for i in range(x.shape[dim])],
    "index": lambda x, indices: x[_index(indices)], "index_put": _index_put,
    "detach": np.copy, "clone": lambda x, **_: x.copy(), "alias": np.copy,
    "_to_copy": lambda x, **_: x.copy(),
    "full_like": lambda x, v, **_: np.full_like(x, v),
    "new_zeros": lambda x, n, **_: np.zeros(n, np.longdouble),
    "new_ones": lambda x, n, **_: np.ones(n, np.longdouble),
    "new_full": lambda x, n, v, **_: np.full(n, v, np.longdouble),
}  # fmt: skip


class LongDouble(torch.Tensor):
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, numbers: Any) -> "LongDouble":
        return torch.Tensor._make_wrapper_subclass(cls, np.shape(numbers), dtype=torch.float64)

    def __init__(self, numbers: Any):
        self.numbers = np.asarray(numbers, np.longdouble)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"LongDouble({self.numbers})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {
            k: v
            for k, v in (kwargs or {}).items()
            if k not in ("memory_format", "layout", "device", "pin_memory")
        }
        name = func.overloadpacket.__name__
        if name not in NUMPY:
            done = (
                decomposition_table[func](*args, **kwargs)
                if func in decomposition_table
                else func.decompose(*args, **kwargs)
            )
            assert done is not NotImplemented, f"LongDouble has no {func}; add it to NUMPY"
            return done
        assert kwargs.pop("dtype", torch.float64) in (None, torch.float64), f"{func} changes the dtype"
        with np.errstate(all="ignore"):
            args, kwargs = pytree.tree_map(numbers_of, (args, kwargs))
            return pytree.tree_map(tensor_of, NUMPY[name](*args, **kwargs))


def numbers_of(x: Any) -> Any:
    if isinstance(x, LongDouble) or not isinstance(x, torch.Tensor):
        return x.numbers if isinstance(x, LongDouble) else x
    return x.numpy().astype(np.longdouble) if x.is_floating_point() else x.numpy()


def tensor_of(x: Any) -> Any:
    floats = np.issubdtype(np.asarray(x).dtype, np.floating)
    return LongDouble(x) if floats else torch.from_numpy(np.ascontiguousarray(x)).reshape(np.shape(x))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return (torch.from_numpy(x.numbers.astype(np.float64)) if isinstance(x, LongDouble) else x).to(dtype)


def exact(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, as a LongDouble if they are float64."""
    return LongDouble(x.detach().numpy()) if x.dtype == torch.float64 else x
