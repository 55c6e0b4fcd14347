"""The arguments of a kernel's launch: their device, the values of scalars, the dimensions of grids and
blocks."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from cukern.runtime import checks
from cukern.runtime.compile import signature
from cukern.runtime.launch import backend, driver, interop, limits
from cukern.runtime.launch.tensor_map import TensorMap

# of a launch's arguments, grid, block and bytes of shared memory
Quick = Callable[[tuple[Any, ...], Any, Any, Any], bool]

_PLAIN = checks.PLAIN
_QUICK = """
def quick(args, grid, block, shared):
    try:
        ({names}) = args
        if not ({checks} type(shared) is int and 0 <= shared <= most_shared[0]):
            return False
        if type(grid) is int and type(block) is int and grid > 0 and block > 0:
            gx, bx = grid, block
            gy = gz = by = bz = 1
        else:
            (gx, gy, gz), (bx, by, bz) = dims(grid, block)
        buffer, each, extra = arguments.parts
        pack(buffer, 0, {values})
        launch(function, gx, gy, gz, bx, by, bz, shared, stream(device), each, extra)
    except Exception:
        return False
    {count}
    return True
"""


def never(args: tuple[Any, ...], grid: Any, block: Any, shared: Any) -> bool:
    """The `Quick` of a kernel that has none."""
    return False


def quick(loaded: driver.Loaded, params: Sequence[signature.Param], device: int) -> Quick:
    """A function that launches if all arguments are plain tensors and numbers that are right, and else
    returns False. Then the checks that explain errors must look. Its code is written for the parameters: a
    loop over them takes three times as long."""
    if not any(p.pointer for p in params):  # the current GPU is that of the launch
        return never
    names, checks, values = [f"a{i}" for i in range(len(params))], "", []
    space: dict[str, Any] = {
        name: getattr(loaded, name) for name in ("function", "pack", "arguments", "launch", "most_shared")
    }
    space |= {
        "plain": _PLAIN,
        "dims": dims,
        "stream": driver.current_stream,
        "device": device,
        "increment_version": increment_version,
    }
    for a, p in zip(names, params, strict=True):
        if not p.pointer and (p.size or p.ctype in ("bool", "__nv_bfloat16")):
            return never
        values.append(f"{a}.data_ptr()" if p.pointer else a)
        if p.pointer:
            checks += _check(a, p.dtypes)
            space[f"{a}_dtype"] = p.dtypes[0] if len(p.dtypes) == 1 else p.dtypes
    if torch.cuda.device_count() > 1:
        space["current"], checks = driver.current_device, f"current() == device and {checks}"
    exec(
        _QUICK.format(
            names="".join(f"{a}, " for a in names),
            checks=checks,
            values=", ".join(values),
            count=_count(names, params),
        ),
        space,
    )
    return space["quick"]


def _count(names: Sequence[str], params: Sequence[signature.Param]) -> str:
    """The statement that increments the versions of what the kernel may write."""
    written = "".join(f"{a}, " for a, p in zip(names, params, strict=True) if p.written)
    return f"increment_version(({written}))" if written else "pass"


def _check(a: str, dtypes: tuple[torch.dtype, ...]) -> str:
    """The test of a tensor, as the beginning of a condition."""
    dtype = f"{a}.dtype {'is' if len(dtypes) == 1 else 'in'} {a}_dtype and " if dtypes else ""
    lazy = "" if dtypes and not any(d.is_complex for d in dtypes) else f"not {a}.is_conj() and "
    return f"type({a}) in plain and {dtype}{a}.get_device() == device and not {a}.is_neg() and {lazy}"


def device(args: Iterable[Any]) -> int:
    """The device of the first tensor on a GPU. Without one: the simulator if it is enabled or there is no
    GPU, else the current GPU."""
    for a in args:
        a = a.tensor if isinstance(a, TensorMap) else a
        if isinstance(a, torch.Tensor) and a.is_cuda:
            return a.get_device()
    return (
        backend.SIMULATED
        if backend.simulating() or not torch.cuda.is_available()
        else driver.current_device()
    )


def tensor(kernel: str, param: signature.Param, given: Any) -> torch.Tensor | None:
    """The tensor of a pointer or of a tensor map."""
    if isinstance(given, TensorMap):
        return given.tensor
    if (
        not param.pointer
        or given is None
        or (param.untyped and isinstance(given, (int, float, *signature.STRUCTS)))
    ):
        return None
    return interop.argument(param, given, kernel)


def common_device(
    kernel: str, params: Iterable[signature.Param], tensors: Iterable[torch.Tensor | None], default: int
) -> int:
    names = {t.get_device(): p.name for p, t in zip(params, tensors, strict=True) if t is not None}
    if len(names) > 1:
        places = [
            f"{name} on {'the CPU' if device == backend.SIMULATED else f'cuda:{device}'}"
            for device, name in names.items()
        ]
        raise ValueError(f"{kernel}: arguments on several devices: {', '.join(places)}")
    return next(iter(names), default)


def value(kernel: str, param: signature.Param, given: Any, tensor: torch.Tensor | None) -> Any:
    """What the launch takes: the address of a tensor, 0 for a null pointer, a scalar, or the bytes of a
    struct."""
    if param.pointer and (tensor is not None or given is None):
        return tensor.data_ptr() if tensor is not None else 0
    return (
        checks.flag(str(param), given) if param.ctype == "bool" else signature.by_value(kernel, param, given)
    )


def written(params: Sequence[signature.Param], tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
    """The tensors that a kernel may write."""
    return [t for p, t in zip(params, tensors, strict=True) if t is not None and p.written]


def dim(name: str, value: int | Iterable[int]) -> limits.Dim:
    dims = tuple(checks.integer(name, d, 1) for d in (value if isinstance(value, Iterable) else (value,)))
    if not 1 <= len(dims) <= 3:
        raise ValueError(f"{name} must be one to three positive ints, got {value!r}")
    return (*dims, 1, 1)[:3]  # type: ignore[return-value]


@functools.lru_cache(4096, typed=True)
def dims(grid: Any, block: Any) -> tuple[limits.Dim, limits.Dim]:
    return dim("grid", grid), dim("block", block)
