"""kron_linear's raw ops, and the autograd Functions around them.

The backward of a step of training is one raw op. Higher derivatives and tangents differentiate the product in torch's operations.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import plan
from cukern.ops.kron_linear.checks import PLAIN_TYPES
from cukern.ops.kron_linear.reference import movedim_product, width, with_epilogue
from cukern.runtime.higher import gradients, tangents
from cukern.runtime.registry import Differentiable, apply_of, choose, raw_op, save, transformed, watched


def product(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, scale: float, version: str) -> Tensor:
    """x (rows, prod p) times the factors, by kernels: (rows, prod q)."""
    if watched(x, bias, residual, *factors):
        return _apply(x, bias, residual, scale, version, *factors)
    return _kron_linear(x, bias, residual, factors, scale, version, 0)[0]


class _KronLinear(Differentiable):
    """If v4's backward takes two launches, the forward may take two as well. It keeps the result of the first: kron_backward.boundary."""

    @staticmethod
    def forward(ctx, x, bias, residual, scale, version, *factors):
        ctx.scale, ctx.version = scale, version
        ctx.at = _boundary(x, factors, bias is not None or residual is not None, version) if any(ctx.needs_input_grad[5:]) else 0
        y, *kept = _kron_linear(x, bias, residual, factors, scale, version, ctx.at)
        save(ctx, x, *factors, kept[0] if kept else None)
        return y

    @staticmethod
    def backward(ctx, g):
        x, *factors, kept = ctx.saved_tensors
        need = ctx.needs_input_grad
        wanted = [need[0], *need[5:]]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if any(wanted):
            if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transformed()):
                made = gradients(_in_torch, (x, None, None, ctx.scale, *factors), (g,))
                found = [t if w else None for t, w in zip((made[0], *made[4:]), wanted, strict=True)]
            else:
                made = iter(_kron_linear_backward(x, g, factors, wanted, ctx.scale, ctx.version, kept, ctx.at))
                found = [next(made) if w else None for w in wanted]
        dbias = g.sum(0, dtype=g.dtype) if need[1] else None  # autocast leaves a sum alone whose dtype is given
        return found[0], dbias, g if need[2] else None, None, None, *found[1:]

    @staticmethod
    def tangent(ctx, dx, dbias, dresidual, _scale, _version, *dfactors):
        x, *factors, _ = ctx.saved_tensors
        inputs = x, x.new_zeros(width(factors, -1)), x.new_zeros(x.shape[0], width(factors, -1)), ctx.scale, *factors
        return tangents(_in_torch, inputs, (dx, dbias, dresidual, None, *dfactors))[0]


def _in_torch(x: Tensor, bias: Tensor | None, residual: Tensor | None, scale: float, *factors: Tensor) -> Tensor:
    return with_epilogue(movedim_product(x, factors), (scale, bias, residual))


_apply = apply_of(_KronLinear)

# ---- raw ops


def _launch(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Sequence[Tensor], scale: float, version: str, at: int
) -> list[Tensor]:
    """The product; and if `at` is not 0, what there is after `at` steps, for the backward."""
    if not x.shape[0]:
        return _fake(x, bias, residual, factors, scale, version, at)
    epilogue = scale, None if bias is None else bias.contiguous(), None if residual is None else residual.contiguous()
    if at:
        return list(kron_backward.forward_keeping(x, factors, epilogue, at))
    return [choose("kron_linear", version, x.get_device()).forward(x.contiguous(), factors, epilogue)]


def _fake(x: Tensor, bias: Any, residual: Any, factors: Sequence[Tensor], scale: float, version: str, at: int) -> list[Tensor]:
    widths = [width(factors, -1)]
    if at:
        step = plan.steps_of(factors)[abs(at) - 1]
        widths.append(step.left * step.q * step.right)
    return [torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device) for n in widths]


def _boundary(x: Tensor, factors: Sequence[Tensor], added: bool, version: str) -> int:
    """See kron_backward.boundary; 0 where somebody traces, or tensors are not plain ones."""
    plain = x.is_contiguous() and PLAIN_TYPES.issuperset(map(type, (x, *factors)))
    if torch.compiler.is_compiling() or not x.shape[0] or not plain:
        return 0
    usual = choose("kron_linear", version, x.get_device()).backward is kron_backward.backward
    return kron_backward.boundary(x, factors, added) if usual else 0


def _launch_backward(
    x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float, version: str, kept: Tensor | None, at: int
) -> list[Tensor]:
    if not x.shape[0]:
        return [t.zero_() for t in _fake_backward(x, g, factors, wanted)]
    backward = choose("kron_linear", version, x.get_device()).backward
    more = () if kept is None else (kept, at)
    return [t for t in backward(x.contiguous(), g.contiguous(), factors, wanted, scale, *more) if t is not None]


def _fake_backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], *_: Any) -> list[Tensor]:
    pairs = zip((x, *factors), wanted, strict=True)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t, w in pairs if w]


_SCHEMA = "(Tensor x, Tensor? bias, Tensor? residual, Tensor[] factors, float scale, str version, int at) -> Tensor[]"
_SCHEMA_BACKWARD = "(Tensor x, Tensor g, Tensor[] factors, bool[] wanted, float scale, str version, Tensor? kept, int at) -> Tensor[]"
_kron_linear = raw_op("_kron_linear" + _SCHEMA, 4, _launch, _fake)
_kron_linear_backward = raw_op("_kron_linear_backward" + _SCHEMA_BACKWARD, 3, _launch_backward, _fake_backward)
