"""kron_linear's raw ops, and the autograd Functions around them.

The backward of a step of training is one raw op. Where its result shall be differentiated in turn, and for the tangents, the same chain
runs on two Functions, a mode product and its contraction, which are each other's derivatives; so any order of them is right.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import cublas, derivatives, plan, reference, v3
from cukern.ops.kron_linear.checks import PLAIN
from cukern.runtime.registry import Differentiable, apply_of, batched, choose, raw_op, save, transformed, watched


def product(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, scale: float, version: str) -> Tensor:
    """x (rows, prod p) times the factors, by kernels: (rows, prod q)."""
    if watched(x, bias, residual, *factors):
        return _apply(x, bias, residual, scale, version, *factors)
    return _kron_linear(x, bias, residual, factors, scale, version)


class _KronLinear(Differentiable):
    """Where v4's backward is two launches the forward may be as many, and what lies between them is kept: kron_backward.boundary."""

    @staticmethod
    def forward(ctx, x, bias, residual, scale, version, *factors):
        ctx.scale, ctx.version, kept = scale, version, None
        ctx.at = _boundary(x, factors, bias is not None or residual is not None, version) if any(ctx.needs_input_grad[5:]) else 0
        if ctx.at:
            y, kept = _kron_linear_keeping(x, bias, residual, factors, scale, ctx.at)
        else:
            y = _kron_linear(x, bias, residual, factors, scale, version)
        save(ctx, x, *factors, kept)
        return y

    @staticmethod
    def backward(ctx, g):
        x, *factors, kept = ctx.saved_tensors
        need = ctx.needs_input_grad
        wanted = [need[0], *need[5:]]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if any(wanted):
            if not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transformed()):
                found = derivatives.gradients(x, g, factors, wanted, ctx.scale, _mode, _contract)
            else:
                made = iter(_kron_linear_backward(x, g, factors, wanted, ctx.scale, ctx.version, kept, ctx.at))
                found = [next(made) if w else None for w in wanted]
        dbias = g.sum(0, dtype=g.dtype) if need[1] else None  # autocast leaves a sum alone whose dtype is given
        return found[0], dbias, g if need[2] else None, None, None, *found[1:]

    @staticmethod
    def tangent(ctx, dx, dbias, dresidual, _scale, _version, *dfactors):
        x, *factors, _ = ctx.saved_tensors
        dy = derivatives.tangent(x, factors, dx, dfactors, ctx.scale, _mode)
        dy = dy if dbias is None else dy + dbias
        return dy if dresidual is None else dy + dresidual


class _Bilinear(Differentiable):
    """Of two tensors whose first dimension is the samples', to which vmap adds its own."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        z, w, ctx.scale = inputs
        save(ctx, z, w)

    @staticmethod
    def batch_of(apply, info, in_dims, z, w, scale):
        z, w = (batched(t, dim, info.batch_size) for t, dim in zip((z, w), in_dims, strict=False))
        return apply(z.flatten(0, 1), w.flatten(0, 1), scale).unflatten(0, z.shape[:2]), 0


class _ModeProduct(_Bilinear):
    """z, w -> z x w: linear in each, so its derivatives are mode products and contractions."""

    @staticmethod
    def forward(z, w, scale):
        return _kron_mode(z, w, scale)

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        dz = _mode(g, w.mT, ctx.scale) if ctx.needs_input_grad[0] else None
        dw = _contract(z, g, ctx.scale) if ctx.needs_input_grad[1] else None
        return dz, dw, None

    @staticmethod
    def tangent(ctx, dz, dw, _):
        z, w = ctx.saved_tensors
        return _mode(dz, w, ctx.scale) + _mode(z, dw, ctx.scale)

    @staticmethod
    def batch(*args):
        return _Bilinear.batch_of(_mode, *args)


class _Contraction(_Bilinear):
    """z, h -> the gradient that a factor gets where z went in and h came back: linear in each, too."""

    @staticmethod
    def forward(z, h, scale):
        return _kron_contract(z, h, scale)

    @staticmethod
    def backward(ctx, v):
        z, h = ctx.saved_tensors
        dz = _mode(h, v.mT, ctx.scale) if ctx.needs_input_grad[0] else None
        dh = _mode(z, v, ctx.scale) if ctx.needs_input_grad[1] else None
        return dz, dh, None

    @staticmethod
    def tangent(ctx, dz, dh, _):
        z, h = ctx.saved_tensors
        return _contract(dz, h, ctx.scale) + _contract(z, dh, ctx.scale)

    @staticmethod
    def batch(*args):
        return _Bilinear.batch_of(_contract, *args)


_apply, _mode, _contract = apply_of(_KronLinear), apply_of(_ModeProduct), apply_of(_Contraction)

# ---- raw ops


def _launch(x: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Sequence[Tensor], scale: float, version: str) -> Tensor:
    if not x.shape[0]:
        return _fake(x, bias, residual, factors, scale, version)
    return choose("kron_linear", version, x.get_device()).forward(x.contiguous(), factors, _epilogue(bias, residual, scale))


def _epilogue(bias: Tensor | None, residual: Tensor | None, scale: float) -> reference.Epilogue:
    return scale, None if bias is None else bias.contiguous(), None if residual is None else residual.contiguous()


def _fake(x: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Sequence[Tensor], scale: float, version: str) -> Tensor:
    return torch.empty((x.shape[0], reference.width(factors, -1)), dtype=x.dtype, device=x.device)


def _boundary(x: Tensor, factors: Sequence[Tensor], added: bool, version: str) -> int:
    """See kron_backward.boundary; 0 where somebody traces, or tensors are not plain ones."""
    if torch.compiler.is_compiling() or not x.shape[0] or not x.is_contiguous() or not PLAIN.issuperset(map(type, (x, *factors))):
        return 0
    if choose("kron_linear", version, x.get_device()).backward is not kron_backward.backward:
        return 0
    return kron_backward.boundary(x, factors, added)


def _launch_keeping(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Sequence[Tensor], scale: float, at: int
) -> tuple[Tensor, Tensor]:
    return kron_backward.forward_keeping(x, factors, _epilogue(bias, residual, scale))


def _fake_keeping(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, factors: Sequence[Tensor], scale: float, at: int
) -> tuple[Tensor, Tensor]:
    step = plan.steps(tuple([tuple(w.shape) for w in factors]))[at - 1]
    return _fake(x, bias, residual, factors, scale, ""), x.new_empty((x.shape[0], step.left * step.q * step.right))


def _launch_backward(
    x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float, version: str, kept: Tensor | None, at: int
) -> list[Tensor]:
    if not x.shape[0]:
        return [torch.zeros_like(t, memory_format=torch.contiguous_format) for t in _wanted(x, factors, wanted)]
    backward = choose("kron_linear", version, x.get_device()).backward
    more = () if kept is None else (kept, at)
    return [t for t in backward(x.contiguous(), g.contiguous(), factors, wanted, scale, *more) if t is not None]


def _fake_backward(
    x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float, version: str, kept: Tensor | None, at: int
) -> list[Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in _wanted(x, factors, wanted)]


def _wanted(x: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool]) -> list[Tensor]:
    return [t for t, w in zip((x, *factors), wanted, strict=True) if w]


def _fake_mode(z: Tensor, w: Tensor, scale: float) -> Tensor:
    return z.new_empty((*z.shape[:2], w.shape[2], z.shape[3]))


def _fake_contract(z: Tensor, h: Tensor, scale: float) -> Tensor:
    return z.new_empty((z.shape[0], z.shape[2], h.shape[2]))


_kron_linear = raw_op(
    "_kron_linear(Tensor x, Tensor? bias, Tensor? residual, Tensor[] factors, float scale, str version) -> Tensor", 4, _launch, _fake
)
_kron_linear_keeping = raw_op(
    "_kron_linear_keeping(Tensor x, Tensor? bias, Tensor? residual, Tensor[] factors, float scale, int at) -> (Tensor, Tensor)",
    4,
    _launch_keeping,
    _fake_keeping,
)
_kron_linear_backward = raw_op(
    "_kron_linear_backward(Tensor x, Tensor dout, Tensor[] factors, bool[] wanted, float scale, str version, Tensor? kept, int at)"
    " -> Tensor[]",
    3,
    _launch_backward,
    _fake_backward,
)
_kron_mode = raw_op(
    "_kron_mode(Tensor z, Tensor w, float scale) -> Tensor",
    2,
    lambda z, w, scale: v3.mode_product(z.contiguous(), w.resolve_neg(), (scale, None, None)),
    _fake_mode,
)
_kron_contract = raw_op(
    "_kron_contract(Tensor z, Tensor h, float scale) -> Tensor",
    2,
    lambda z, h, scale: cublas.contraction(z.contiguous(), h.contiguous(), scale),
    _fake_contract,
)
