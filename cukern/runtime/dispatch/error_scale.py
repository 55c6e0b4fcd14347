"""The default error scale of a user's own op: a measured estimate of the sum of absolute terms of each
result.

A result of a sum may cancel, so an error relative to the result itself calls a correct kernel wrong. The
scale is |y| plus the sum over all input elements of |dy/dx * x|. That sum is the 1-norm of a vector that need
not be known: if each x is multiplied by 1 + h * c with c drawn from the Cauchy distribution, then the change
of y, divided by h, is Cauchy distributed with this 1-norm as its scale, because the Cauchy distribution is
1-stable (P. Indyk, "Stable distributions, pseudorandom generators, embeddings, and data stream computation",
J. ACM 53, 2006). The geometric mean of a few draws estimates it, because the mean of log |c| is 0.

Intermediate results may cancel too: the gradient of an RMS normalization of a single column, g / r - x * (g *
x) / r^3, is 1e-6 of these terms. What is left of their roundings does not depend on how the result depends on
the inputs. So the scale is at least six standard deviations of the reference's own error in float32, in units
of its epsilon. They are measured as in Monte Carlo arithmetic (D. S. Parker, 1997): the reference runs in
float64, and each operation of the forward and backward is rounded to float32, up or down at random. A
rounding is at most sqrt(3) of its standard deviation, so six cover twelve roundings that all have the worst
size and sign.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cukern.runtime.registry import Tensors

_DRAWS = 16  # an estimate below a fifth of the scale has a probability of about 2e-5
_STEP = 1e-10  # float64 resolves the change to about 1e-6 of it
_DEVIATIONS = 6
# runs with random rounding: a deviation below half of the true one has a probability of about 2e-4
_ROUNDED = 16
_EPS = torch.finfo(torch.float32).eps
_MOST = 1e5  # limits the tail of the Cauchy distribution, so that exp does not overflow


def measured(
    reference: Callable[..., torch.Tensor | Tensors], wanted: Sequence[int]
) -> Callable[[Tensors, Tensors], Tensors]:
    """`magnitude(inputs, douts)` of an Op: the scales of the outputs of `reference`, and of the gradients of
    the inputs `wanted`."""

    def results(inputs: Tensors, douts: Tensors) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        with torch.enable_grad():
            outs = exact(reference, douts)(*leaves)
        pairs = [(out, dout) for out, dout in zip(outs, douts, strict=True) if out.requires_grad]
        outs_of, given = zip(*pairs, strict=True) if pairs else ((), ())
        grads = torch.autograd.grad(outs_of, [leaves[i] for i in wanted], given) if wanted else ()
        return [t.detach() if t.is_floating_point() else t.double() for t in (*outs, *grads)]

    def magnitude(inputs: Tensors, douts: Tensors) -> Tensors:
        truth = results(inputs, douts)
        logs = [torch.zeros_like(y) for y in truth]
        for _ in range(_DRAWS):
            moved = results(_perturbed(inputs), _perturbed(douts))
            for total, y, z in zip(logs, truth, moved, strict=True):
                total += ((z - y).abs() / _STEP).clamp(min=torch.finfo(y.dtype).tiny).log()
        squares = [torch.zeros_like(y) for y in truth]
        for _ in range(_ROUNDED):
            with _RandomRounding():
                moved = results(inputs, douts)
            for total, y, z in zip(squares, truth, moved, strict=True):
                total += (z - y).square()
        terms = [y.abs() + (total / _DRAWS).exp() for y, total in zip(truth, logs, strict=True)]
        return tuple(
            torch.maximum(t, _DEVIATIONS / _EPS * (s / _ROUNDED).sqrt())
            for t, s in zip(terms, squares, strict=True)
        )

    return magnitude


def exact(reference: Callable[..., torch.Tensor | Tensors], douts: Tensors) -> Callable[..., Tensors]:
    """`reference` for float64 inputs: what it casts to another floating-point dtype stays float64. Outputs
    have the dtypes of `douts`."""

    def run(*inputs: torch.Tensor) -> Tensors:
        with _Float64():
            y = reference(*inputs)
        return tuple(
            x.to(d.dtype) for x, d in zip(y if isinstance(y, tuple | list) else (y,), douts, strict=True)
        )

    return run


def rounded(reference: Callable[..., Tensors], inputs: Tensors) -> list[Tensors]:
    """Outputs of an `exact` reference with random roundings: the values that a quantized output may have next
    to a tie."""
    with torch.no_grad(), _RandomRounding():
        return [reference(*inputs) for _ in range(_ROUNDED)]


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The tensors with those of floating point in another dtype."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


class _Float64(TorchDispatchMode):
    """Casts to float64 where the reference casts to another dtype of floating point."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(kwargs.get("dtype"), "is_floating_point", False):
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


class _RandomRounding(TorchDispatchMode):
    """Rounds the result of each operation on float64 to float32, up or down at random, unless float32 holds
    it exactly."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_new = not any(r.alias_info for r in func._schema.returns)  # no view
        return pytree.tree_map_only(torch.Tensor, _rounded, out) if is_new else out


def _rounded(x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.float64:
        return x
    moved = (x * (1 + _EPS * torch.empty_like(x).uniform_(-0.5, 0.5))).float().double()
    return torch.where(x.float() == x, x, moved)


def _perturbed(tensors: Tensors) -> Tensors:
    return tuple(
        x * (1 + _STEP * torch.empty_like(x).cauchy_().clamp(-_MOST, _MOST)) if x.is_floating_point() else x
        for x in tensors
    )
