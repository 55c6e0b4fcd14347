"""The arguments of a kernel's launch: their device, the values of scalars, the dimensions of grids and blocks."""

import functools
from collections.abc import Iterable
from typing import Any

import torch

from cukern.runtime import backend, checks, interop, signature
from cukern.runtime.tensor_map import TensorMap

Quick = dict[Any, tuple[backend.Launch, tuple[Any, ...]]]  # by GPU: a launch, and `quick` of each parameter

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({int, float})
_EVERY = frozenset(d for d in vars(torch).values() if isinstance(d, torch.dtype))


def quick(param: signature.Param) -> Any:
    """What a quick launch takes for a parameter: the dtypes of a pointer, None for a number, () for what must be looked at."""
    if param.pointer:
        return param.dtypes or _EVERY
    return () if param.size or param.ctype in ("bool", "__nv_bfloat16") else None


def quick_values(args: tuple[Any, ...], kinds: tuple[Any, ...], device: int) -> list[Any] | None:
    """What a launch on this GPU takes; None if an argument must be looked at."""
    values: list[Any] = []
    for a, kind in zip(args, kinds, strict=True):
        if kind is None:
            if type(a) not in _NUMBERS:
                return None
            values.append(a)
        elif (
            type(a) in _PLAIN
            and a.dtype in kind
            and a.get_device() == device
            and not a.is_neg()
            and (kind is not _EVERY or not a.is_conj())
        ):
            values.append(a.data_ptr())
        else:
            return None
    return values


def device(args: Iterable[Any]) -> int:
    """The device of the first tensor on a GPU. Without one: the simulator if it is enabled or there is no GPU, else the current GPU."""
    for a in args:
        a = a.tensor if isinstance(a, TensorMap) else a
        if isinstance(a, torch.Tensor) and a.is_cuda:
            return a.get_device()
    return backend.SIMULATED if backend.simulating() or not torch.cuda.is_available() else backend.current_device()


def tensor(kernel: str, param: signature.Param, given: Any) -> torch.Tensor | None:
    """The tensor of a pointer or of a tensor map."""
    if isinstance(given, TensorMap):
        return given.tensor
    return interop.argument(param, given, kernel) if param.pointer and given is not None else None


def common_device(kernel: str, params: Iterable[signature.Param], tensors: Iterable[torch.Tensor | None], default: int) -> int:
    names = {t.get_device(): p.name for p, t in zip(params, tensors, strict=True) if t is not None}
    if len(names) > 1:
        places = [f"{name} on {'the CPU' if device == backend.SIMULATED else f'cuda:{device}'}" for device, name in names.items()]
        raise ValueError(f"{kernel}: arguments on several devices: {', '.join(places)}")
    return next(iter(names), default)


def value(kernel: str, param: signature.Param, given: Any, tensor: torch.Tensor | None) -> Any:
    """What the launch takes: the address of a tensor, 0 for a null pointer, a scalar, or the bytes of a struct."""
    if param.pointer:
        return tensor.data_ptr() if tensor is not None else 0
    return checks.flag(str(param), given) if param.ctype == "bool" else signature.by_value(kernel, param, given)


def dim(name: str, value: int | Iterable[int]) -> backend.Dim:
    dims = tuple(checks.integer(name, d, 1) for d in (value if isinstance(value, Iterable) else (value,)))
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name} must be one to three positive ints, got {value!r}")
    return (*dims, 1, 1)[:3]  # type: ignore[return-value]


@functools.lru_cache(4096, typed=True)
def dims(grid: Any, block: Any) -> tuple[backend.Dim, backend.Dim]:
    return dim("grid", grid), dim("block", block)
