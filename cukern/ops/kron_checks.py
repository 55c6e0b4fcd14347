"""What kron_linear demands of its arguments, and how it says so."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.kron_torch import width
from cukern.runtime import backend, checks, interop

PLAIN = frozenset({Tensor, torch.nn.Parameter})  # types of tensors that nobody listens to
COMPLEX = (torch.complex64, torch.complex128)


def tensors(x: Any, factors: Any, bias: Any, residual: Any) -> tuple[Tensor, Sequence[Tensor], Tensor | None, Tensor | None]:
    """The arguments as tensors, of one dtype and on one device. Raises TypeError and ValueError."""
    if _are_plain(x, factors, bias, residual):
        return x, factors, bias, residual
    if isinstance(factors, Tensor):
        raise TypeError(f"factors must be a list of matrices, got one tensor of shape {tuple(factors.shape)}")
    factors = [interop.to_torch(f"factors[{i}]", w) for i, w in enumerate(factors)]
    x = interop.to_torch("x", x)
    bias = None if bias is None else interop.to_torch("bias", bias)
    residual = None if residual is None else interop.to_torch("residual", residual)
    if not factors:
        raise ValueError("factors is empty: the layer needs at least one matrix")
    named = {"x": x, **{f"factors[{i}]": w for i, w in enumerate(factors)}, "bias": bias, "residual": residual}
    for name, t in named.items():
        if t is not None:
            checks.dtype(name, t, (*checks.FLOATS, *COMPLEX))
    checks.same(**named)
    return x, factors, bias, residual


def _are_plain(x: Any, factors: Any, bias: Any, residual: Any) -> bool:
    """Whether all is as it must be: the usual case, told in a few microseconds."""
    if type(factors) not in (list, tuple) or not factors or type(x) not in PLAIN or x.dtype not in checks.FLOATS:
        return False
    dtype, device = x.dtype, x.device
    for t in (x, *factors, bias, residual):
        if t is not None and (type(t) not in PLAIN or t.dtype != dtype or t.device != device or t.layout is not torch.strided):
            return False
    return not torch.compiler.is_compiling() and not any([t is not None and t.is_neg() for t in (x, *factors, bias, residual)])


def shapes(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None) -> tuple[int, ...]:
    """The shape of the output. Raises ValueError for shapes that do not fit."""
    if x.ndim < 1:
        raise ValueError("x must have at least one dimension, (..., features), got a scalar")
    for i, w in enumerate(factors):
        if w.ndim not in (2, 3) or 0 in w.shape[-2:]:
            raise ValueError(f"factors[{i}] must be (p, q), or (samples, p, q), with p and q at least 1, got {tuple(w.shape)}")
        if w.ndim == 3 and (x.ndim < 2 or w.shape[0] != x.shape[0]):
            raise ValueError(
                f"factors[{i}] has {w.shape[0]} samples, one for each of x's first dimension, but x has shape {tuple(x.shape)}"
            )
    p, q = width(factors, -2), width(factors, -1)
    if x.shape[-1] != p:
        sizes = " x ".join(str(w.shape[-2]) for w in factors)
        raise ValueError(f"the last dimension of x, {x.shape[-1]}, must equal the product of the factors' rows, {sizes} = {p}")
    out = (*x.shape[:-1], q)
    if bias is not None:
        checks.shape("bias", bias, (q,), "one value for each output")
    if residual is not None:
        checks.shape("residual", residual, out, "that of the output")
    return out


def version(name: str | None, x: Tensor, known: Sequence[str], in_torch: Sequence[str]) -> None:
    """Raises ValueError for a version that there is not, or that x's device or dtype cannot have."""
    if name is None:
        return
    if name not in known:
        checks.unknown_version("kron_linear", name, known)
    if name in in_torch:
        return
    if x.dtype in COMPLEX:
        raise ValueError(f"version {name!r} of cukern.kron_linear has no {x.dtype}: complex tensors go through torch, v1 or v2")
    if not x.is_cuda and not backend.simulates(x):
        checks.needs_gpu("kron_linear", name, x.device)
