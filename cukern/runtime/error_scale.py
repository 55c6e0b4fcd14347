"""The default error scale of a user's own op: a measured estimate of the sum of absolute terms of each result.

A result of a sum may cancel, so an error relative to the result itself calls a correct kernel wrong. The scale is |y| plus the sum over all
input elements of |dy/dx * x|. That sum is the 1-norm of a vector that need not be known: if each x is multiplied by 1 + h * c with c drawn
from the Cauchy distribution, then the change of y, divided by h, is Cauchy distributed with this 1-norm as its scale, because the Cauchy
distribution is 1-stable (P. Indyk, "Stable distributions, pseudorandom generators, embeddings, and data stream computation", J. ACM 53,
2006). The geometric mean of a few draws estimates it, because the mean of log |c| is 0.

Intermediate results may cancel too, as in the gradient of a layernorm over two numbers. So the largest error of the reference in float32,
in units of its epsilon, is added to the scale. It is measured for inputs that differ by some roundings. This does not suffice where nothing
but cancellation is left: the gradient of an RMS normalization of a single column is 1e-6 of its terms. Such an op should give `magnitude`.
"""

from collections.abc import Callable, Sequence

import torch

from cukern.runtime.registry import Tensors

_DRAWS = 16  # an estimate below a fifth of the scale has a probability of about 2e-5
_STEP = 1e-10  # float64 resolves the change to about 1e-6 of it
_NUDGES = 8  # of the inputs, for the error in float32
_EPS = torch.finfo(torch.float32).eps
_MOST = 1e5  # limits the tail of the Cauchy distribution, so that exp does not overflow


def measured(reference: Callable[..., torch.Tensor | Tensors], wanted: Sequence[int]) -> Callable[[Tensors, Tensors], Tensors]:
    """`magnitude(inputs, douts)` of an Op: the scales of the outputs of `reference`, and of the gradients of the inputs `wanted`."""

    def results(inputs: Tensors, douts: Tensors) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
        with torch.enable_grad():
            y = reference(*leaves)
        outs = y if isinstance(y, tuple) else (y,)
        grads = torch.autograd.grad(outs, [leaves[i] for i in wanted], douts) if wanted else ()
        return [t.detach() for t in (*outs, *grads)]

    def magnitude(inputs: Tensors, douts: Tensors) -> Tensors:
        truth = results(inputs, douts)
        logs = [torch.zeros_like(y) for y in truth]
        for _ in range(_DRAWS):
            moved = results(_perturbed(inputs), _perturbed(douts))
            for total, y, z in zip(logs, truth, moved, strict=True):
                total += ((z - y).abs() / _STEP).clamp(min=torch.finfo(y.dtype).tiny).log()
        scales = [y.abs() + (total / _DRAWS).exp() for y, total in zip(truth, logs, strict=True)]
        errors = [torch.zeros_like(y) for y in truth]
        for _ in range(_NUDGES):
            nudged, nudged_douts = _nudged(inputs), _nudged(douts)
            exact = results(cast(nudged, torch.float64), cast(nudged_douts, torch.float64))
            for error, y, z in zip(errors, results(nudged, nudged_douts), exact, strict=True):
                torch.maximum(error, (y - z).abs() / _EPS, out=error)
        return tuple(scale + error for scale, error in zip(scales, errors, strict=True))

    return magnitude


def cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """The tensors with those of floating point in another dtype."""
    return tuple(x.to(dtype) if x.is_floating_point() else x for x in tensors)


def _nudged(tensors: Tensors) -> Tensors:
    """The tensors in float32, each number off by up to four roundings."""
    return cast(tuple(x * (1 + _EPS * torch.empty_like(x).uniform_(-4, 4)) if x.is_floating_point() else x for x in tensors), torch.float32)


def _perturbed(tensors: Tensors) -> Tensors:
    return tuple(x * (1 + _STEP * torch.empty_like(x).cauchy_().clamp(-_MOST, _MOST)) if x.is_floating_point() else x for x in tensors)
