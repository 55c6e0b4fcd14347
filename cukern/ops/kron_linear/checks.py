"""Argument checks of kron_linear."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.kron_linear.reference import Factors, width
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.launch import interop

COMPLEX = (torch.complex64, torch.complex128)


def tensors(
    x: Any, factors: Any, bias: Any, residual: Any
) -> tuple[Tensor, Factors, Tensor | None, Tensor | None]:
    """The arguments as tensors, of one dtype and on one device. Raises TypeError and ValueError."""
    given = [t for t in (bias, residual) if t is not None]
    plain = type(factors) in (list, tuple) and factors and checks.plain(checks.FLOATS, [x, *factors, *given])
    if plain and not autocast.enabled(x):
        return x, factors, bias, residual
    if not isinstance(factors, list | tuple | torch.nn.ParameterList):
        raise TypeError(f"factors must be a list or a tuple of matrices, got {checks.brief(factors)}")
    if not len(factors):
        raise ValueError("factors is empty: the layer needs at least one matrix")
    added = {name: value for name, value in (("bias", bias), ("residual", residual)) if value is not None}
    found = _converted({"x": x, **{f"factors[{i}]": w for i, w in enumerate(factors)}, **added})
    return found["x"], list(found.values())[1 : 1 + len(factors)], found.get("bias"), found.get("residual")


def _converted(named: dict[str, Any]) -> dict[str, Tensor]:
    found = {name: interop.to_torch(name, value) for name, value in named.items()}
    found = dict(zip(found, autocast.of_product(*found.values()), strict=True))
    checks.alike((*checks.FLOATS, *COMPLEX), **found)
    return found


def lokr(x: Any, w1: Any, w2: Any) -> tuple[Any, ...]:
    """x, and a list for each of w1 and w2: the matrix, or the two of a low-rank one. All are tensors of one
    dtype and device. Raises TypeError and ValueError."""
    named = {"x": x}
    for name, w in (("w1", w1), ("w2", w2)):
        pair = isinstance(w, tuple | list)
        if pair and len(w) != 2:
            rule = f"{name} must be a matrix or the pair (a, b) of a low-rank one"
            raise ValueError(f"{rule}, got {len(w)} of them")
        named |= {f"{name}'s a": w[0], f"{name}'s b": w[1]} if pair else {name: w}
    given = _converted(named)
    for name, w in given.items():
        if name != "x" and w.ndim not in (2, 3):
            raise ValueError(f"{name} must be a matrix, or one for each sample, got shape {tuple(w.shape)}")
    pairs = [[w for key, w in given.items() if key.startswith(name)] for name in ("w1", "w2")]
    for name, matrices in zip(("w1", "w2"), pairs, strict=True):
        if len(matrices) == 2:
            _pair(name, *matrices)
    shapes(given["x"], [pair[-1].mT for pair in pairs], None, None)
    return given["x"], *pairs


def _pair(name: str, a: Tensor, b: Tensor) -> None:
    if a.shape[-1] != b.shape[-2] or (a.ndim == b.ndim == 3 and len(a) != len(b)):
        found = f"{name}'s a has shape {tuple(a.shape)}, b has {tuple(b.shape)}"
        raise ValueError(f"{found}: they must be (q, r) and (r, p)")


def scale(value: Any, dtype: torch.dtype) -> float:
    if isinstance(value, Tensor):
        got = checks.brief(value)
        raise TypeError(f"scale must be a number, got {got}: multiply the result by it instead")
    double = dtype in (torch.float64, torch.complex128)
    return checks.number("scale", value, math.inf if double else checks.FLOAT32_MAX)


def sizes(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list or a tuple of ints, got {checks.brief(values)}")
    return tuple([checks.integer(f"{name}[{i}]", value, 1) for i, value in enumerate(values)])


def shapes(x: Tensor, factors: Factors, bias: Tensor | None, residual: Tensor | None) -> tuple[int, ...]:
    """The shape of the output. Raises ValueError for shapes that do not fit."""
    if x.ndim < 1:
        raise ValueError("x must have at least one dimension, (..., features), got a scalar")
    for i, w in enumerate(factors):
        if w.ndim not in (2, 3) or 0 in w.shape[-2:]:
            rule = "must be (p, q), or (samples, p, q), with p and q at least 1"
            raise ValueError(f"factors[{i}] {rule}, got {tuple(w.shape)}")
        if w.ndim == 3 and (x.ndim < 2 or w.shape[0] != x.shape[0]):
            raise ValueError(
                f"factors[{i}] has {w.shape[0]} samples, one for each of x's first dimension, "
                f"but x has shape {tuple(x.shape)}"
            )
    p = width(factors, -2)
    q = width(factors, -1)
    if x.shape[-1] != p:
        sizes = " x ".join(str(w.shape[-2]) for w in factors)
        rule = f"must equal the product of the factors' rows, {sizes} = {p}"
        raise ValueError(f"the last dimension of x, {x.shape[-1]}, {rule}")
    out = (*x.shape[:-1], q)
    if bias is not None:
        checks.shape("bias", bias, (q,), "one value for each output")
    if residual is not None:
        checks.shape("residual", residual, out, "that of the output")
    return out
