"""Argument checks. Each error names the value and the rule."""

import math
import numbers
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, TypeVar

import torch

SIMULATOR = 'run it in the simulator: with cukern.backend("sim")'
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOAT32_MAX = torch.finfo(torch.float32).max
_Function = TypeVar("_Function", bound=Callable[..., Any])
PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # types without a __torch_function__ of their own


def number(name: str, value: Any, most: float = math.inf, least: float = -math.inf) -> float:
    """`value` as a float: a finite int, float or NumPy scalar, at least `least`, and of at most `most` in
    magnitude. Raises TypeError and ValueError."""
    if type(value) is not float:
        if not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, got {brief(value)}")
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f"{name} must be finite, got an integer of {value.bit_length()} bits") from None
    if not abs(value) < math.inf:
        raise ValueError(f"{name} must be finite, got {value!r}")
    if abs(value) > most:
        raise ValueError(f"{name} is {value!r}: its magnitude must be at most {most:.6g}")
    if value < least:
        raise ValueError(f"{name} must be at least {least:g}, got {value!r}")
    return value


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int, or as the SymInt of a trace, in least..most. Raises TypeError and ValueError."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        try:
            if isinstance(value, bool | torch.Tensor):
                raise TypeError
            value = operator.index(value)
        except TypeError:
            raise TypeError(f"{name} must be an int, got {brief(value)}") from None
    if (least is not None and value < least) or (most is not None and value > most):
        rule = (
            f"at least {least}"
            if most is None
            else f"at most {most}"
            if least is None
            else f"in {least}..{most}"
        )
        raise ValueError(f"{name} must be {rule}, got {value}")
    return value


def constant(function: _Function) -> _Function:
    """In a trace, the function is called, not traced, and its result is a constant. As
    torch.compiler.assume_constant_result, which imports dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def static(size: Any) -> bool:
    """False for a size that changes between calls of the function that is traced."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def known(condition: Any) -> bool:
    """`condition` on sizes; in a trace, True only if it holds for all sizes, so that the graph does not
    depend on it."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def flag(name: str, value: Any) -> bool:
    """`value` as a bool. Raises TypeError for anything else, such as 1 or "no"."""
    if value is True or value is False:
        return value
    if type(value).__name__ not in ("bool_", "bool"):  # NumPy's
        raise TypeError(f"{name} must be a bool, got {brief(value)}")
    return bool(value)


def choice(name: str, value: Any, known: Iterable[str]) -> str:
    """`value`, which is one of the strings `known`. Raises TypeError and ValueError."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, got {brief(value)}")
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return value


def version(op: str, value: Any, known: Iterable[str]) -> None:
    """`value` is None or one of the op's versions. Raises TypeError and ValueError."""
    if value is None:
        return
    if not isinstance(value, str):
        raise TypeError(f"version of cukern.{op} must be a str or None, got {brief(value)}")
    if value not in known:
        unknown_version(op, value, known)


def brief(value: Any) -> str:
    """A value for an error message: its type, and its repr if that is short."""
    if isinstance(value, torch.Tensor):
        return "a nested tensor" if value.is_nested else f"a tensor of shape {tuple(value.shape)}"
    try:
        text = repr(value)
    except Exception:
        text = ""
    return f"{type(value).__name__} {text}" if 0 < len(text) <= 80 else type(value).__name__


def dtype(name: str, tensor: torch.Tensor, allowed: Collection[torch.dtype]) -> None:
    """`tensor` has one of the dtypes, is strided, and has no lazy negation."""
    if tensor.dtype not in allowed or tensor.layout is not torch.strided or tensor.is_nested:
        one_of(name, tensor.dtype, allowed)
        strided(name, tensor)
    # a compiled graph resolves the bit before the call
    if not torch.compiler.is_compiling() and tensor.is_neg():
        negative_bit(name)


def one_of(name: str, dtype: torch.dtype, allowed: Collection[torch.dtype]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{name} must be {_or(allowed)}, got {dtype}")


def strided_layout(name: str, layout: torch.layout) -> None:
    if layout is not torch.strided:
        raise TypeError(f"{name} must be a strided tensor, got layout {layout}")


def strided(name: str, tensor: torch.Tensor) -> None:
    strided_layout(name, tensor.layout)
    if tensor.is_nested:
        raise TypeError(f"{name} must be a strided tensor, got a nested one")


def negative_bit(name: str) -> NoReturn:
    raise ValueError(
        f"{name} has the negative bit set (a lazy view such as x.conj().imag): pass {name}.resolve_neg()"
    )


def one_device(**tensors: Any) -> None:
    """All are on the device of the first."""
    (first, one), *others = tensors.items()
    for name, t in others:
        if t.device != one.device:
            raise ValueError(
                f"{name} is on {t.device}, {first} is on {one.device}: they must be on one device"
            )


def same(**tensors: torch.Tensor | None) -> None:
    """All tensors have the dtype and device of the first; None is ignored."""
    first = ""
    for name, t in tensors.items():
        if t is None:
            continue
        if not first:
            first, dtype, device = name, t.dtype, t.device
        elif t.dtype != dtype:
            raise TypeError(f"{name} is {t.dtype}, {first} is {dtype}: they must have one dtype")
        elif t.device != device:
            raise ValueError(f"{name} is on {t.device}, {first} is on {device}: they must be on one device")


def alike(dtypes: Collection[torch.dtype], **tensors: torch.Tensor | None) -> None:
    """All tensors pass `dtype` and `same`; None is ignored."""
    for name, t in tensors.items():
        if t is not None:
            dtype(name, t, dtypes)
    same(**tensors)


def plain(dtypes: Collection[torch.dtype], tensors: Sequence[Any]) -> bool:
    """True for tensors of a plain type that pass `alike`, in a fraction of its time. False in
    torch.compile."""
    first, strided = tensors[0], torch.strided
    if torch.compiler.is_compiling() or type(first) not in PLAIN:
        return False
    dtype, device = first.dtype, first.device
    for t in tensors:
        if (
            type(t) not in PLAIN
            or t.dtype is not dtype
            or t.layout is not strided
            or t.is_nested
            or t.is_neg()
            or t.device != device
        ):
            return False
    return dtype in dtypes


def shape(name: str, tensor: torch.Tensor, expected: tuple[Any, ...], why: str) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, it must be {expected}: {why}")


def unknown_version(op: str, version: Any, known: Iterable[str]) -> NoReturn:
    raise ValueError(f"cukern.{op} has no version {version!r}; it has {', '.join(known)}")


def needs_gpu(op: str, version: str, device: torch.device) -> NoReturn:
    raise ValueError(
        f"version {version!r} of cukern.{op} is a CUDA kernel, the tensor is on {device}: leave version out "
        f"for the reference, "
        f"or {SIMULATOR}"
    )


def unsupported_version(op: str, version: str, needs: int, has: int) -> NoReturn:
    raise ValueError(
        f"version {version!r} of cukern.{op} needs compute capability {needs / 10}, this GPU has {has / 10}"
    )


def _or(items: Collection[Any]) -> str:
    words = [str(i) for i in items]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
