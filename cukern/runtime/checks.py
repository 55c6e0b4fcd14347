"""Every check of an argument, and the wording of its error: the value, and the rule that it breaks."""

from collections.abc import Collection, Iterable
from typing import Any, NoReturn

import torch

SIMULATOR = 'run it in the simulator: with cukern.backend("sim")'
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def dtype(name: str, tensor: torch.Tensor, allowed: Collection[torch.dtype]) -> None:
    """`tensor` has one of the dtypes, is strided, and lies in memory as it reads."""
    one_of(name, tensor.dtype, allowed)
    strided(name, tensor)
    if not torch.compiler.is_compiling() and tensor.is_neg():  # a compiled graph resolves the bit before it calls us
        negative_bit(name)


def one_of(name: str, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{name} must be {_or(allowed)}, got {dtype}")


def strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {tensor.layout}")


def negative_bit(name: str) -> NoReturn:
    raise ValueError(f"{name} has the negative bit set (a lazy view such as x.conj().imag): pass {name}.resolve_neg()")


def same(**tensors: torch.Tensor | None) -> None:
    """All tensors that are given have the dtype and the device of the first."""
    given = {name: t for name, t in tensors.items() if t is not None}
    first, reference = next(iter(given.items()))
    for name, t in given.items():
        if t.dtype != reference.dtype:
            raise TypeError(f"{name} is {t.dtype}, {first} is {reference.dtype}: they must have one dtype")
        if t.device != reference.device:
            raise ValueError(f"{name} is on {t.device}, {first} is on {reference.device}: they must be on one device")


def shape(name: str, tensor: torch.Tensor, expected: tuple[Any, ...], why: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, it must be {expected}: {why}")


def unknown_version(op: str, version: Any, known: Iterable[str]) -> NoReturn:
    raise ValueError(f"cukern.{op} has no version {version!r}; it has {', '.join(known)}")


def needs_gpu(op: str, version: str, device: torch.device) -> NoReturn:
    raise ValueError(
        f"version {version!r} of cukern.{op} is a CUDA kernel, the tensor is on {device}: leave version out for the reference, "
        f"or {SIMULATOR}"
    )


def unsupported_version(op: str, version: str, needs: int, has: int) -> NoReturn:
    raise ValueError(f"version {version!r} of cukern.{op} needs compute capability {needs / 10}, this GPU has {has / 10}")


def _or(items: Collection[Any]) -> str:
    words = [str(i) for i in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
