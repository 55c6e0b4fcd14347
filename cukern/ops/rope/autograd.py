"""rope's raw ops and its autograd: from tensors that are checked to launches. `rotate` and `rotate_` are what the public functions call.

A rotation is linear, and its gradient is its transpose: the same Function with one flag turned, any number of times.
"""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope import plan as rope_plan
from cukern.ops.rope.memory import check_disjoint, written_extent
from cukern.ops.rope.plan import Options
from cukern.runtime.registry import Differentiable, apply_of, each, raw_op, save, transformed

_tracing = torch.compiler.is_dynamo_compiling
_level = torch._C._functorch.maybe_get_level
_increment_version = torch.autograd.graph.increment_version

# ---- the raw ops

_TENSORS = "Tensor cos, Tensor sin, Tensor? positions"
_OPTIONS = (
    "SymInt rotary_dim, SymInt rotary_offset, bool interleaved, bool transpose, float scale, str layout, bool contiguous, str version"
)


def _launch(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any) -> list[Tensor]:
    outs = _fake(x, k, cos, sin, positions, *options)
    _run(outs, x, k, cos, sin, positions, options)
    return outs


def _launch_(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any) -> None:
    _run([], x, k, cos, sin, positions, options)


def _run(
    outs: list[Tensor], x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: tuple[Any, ...]
) -> None:
    """`outs`: one for each of x and k, or none, and they are written themselves."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    p, table = x.data_ptr(), (cos.dtype, cos.shape, cos.stride())
    ins: Any = ((x.shape, x.stride()),)
    q = outs[0].data_ptr() if outs else p
    strides: Any = (outs[0].stride(),) if outs else ()
    k_p = k_q = 0
    if k is not None:
        ins, k_p = (*ins, (k.shape, k.stride())), k.data_ptr()
        k_q = outs[1].data_ptr() if outs else k_p
        strides = (*strides, outs[1].stride()) if outs else ()
        if not outs and -written_extent("k", *ins[1], x.itemsize) < k_p - p < written_extent("x", *ins[0], x.itemsize):
            check_disjoint(k_p - p, x.itemsize, *ins[0], *ins[1])
    shape = None if positions is None else positions.shape
    alignment = (p | q | k_p | k_q) % 16
    c, s, at = cos.data_ptr(), sin.data_ptr(), 0 if positions is None else positions.data_ptr()
    plan = rope_plan.plan(x.dtype, x.get_device(), strides, ins, table, shape, alignment, (c | s) % 16, options)
    launch, grid, block, numbers = plan
    if launch is not None:
        launch(grid, block, 0, q, k_q, p, k_p, c, s, at, *numbers)


def _fake(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any) -> list[Tensor]:
    contiguous = torch.contiguous_format if options[6] else torch.preserve_format
    outs = [torch.empty_like(x, memory_format=contiguous)]
    if k is not None:
        outs.append(torch.empty_like(k, memory_format=contiguous))
    return outs


_rope = raw_op(f"_rope(Tensor x, Tensor? k, {_TENSORS}, {_OPTIONS}) -> Tensor[]", 5, _launch, _fake)
_rope_ = raw_op(f"_rope_(Tensor(a!) x, Tensor(b!)? k, {_TENSORS}, {_OPTIONS}) -> ()", 5, _launch_, lambda *_: None)

# ---- autograd


class _Rope(Differentiable):
    @staticmethod
    def forward(x, k, cos, sin, positions, *options):
        outs = _rope(x, k, cos, sin, positions, *options)
        return outs[0] if k is None else tuple(outs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, k, cos, sin, positions, *ctx.options = inputs
        save(ctx, cos, sin, positions)
        if transformed():
            ctx.shapes = [t.shape for t in (x, k) if t is not None]
        if not _tracing():
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *douts):
        return _gradients(ctx, *douts)

    @staticmethod
    def tangent(ctx, dx, dk, *others):
        if any(d is not None for d in others):
            raise ValueError("cos and sin have no derivative: pass them without a tangent")
        tangents = zip(_both(dx, dk, *ctx.saved_tensors, Options(*ctx.options)), ctx.shapes, strict=False)
        filled = [(dk if dx is None else dx).new_zeros(shape) if d is None else d for d, shape in tangents]
        return filled[0] if len(filled) == 1 else tuple(filled)

    @staticmethod
    def batch(info, in_dims, x, k, cos, sin, positions, *options):
        o, size = Options(*options), info.batch_size
        if any(dim is not None for dim in in_dims[2:]):
            return each(_apply, size, in_dims, (x, k, cos, sin, positions, *options))
        heads = o.layout.index("h")
        x, k = (  # the batch becomes more heads
            t if dim is None else t.movedim(dim, heads).flatten(heads, heads + 1) for t, dim in zip((x, k), in_dims, strict=False)
        )
        outs = rotate(x, k, cos, sin, positions, o)
        dims = tuple(None if dim is None else heads for dim in in_dims[:2])
        outs = tuple(
            out if dim is None else out.unflatten(heads, (size, out.shape[heads] // size))
            for out, dim in zip((outs,) if k is None else outs, dims, strict=False)
        )
        return (outs[0], dims[0]) if k is None else (outs, dims)

    @staticmethod
    def recorded(ctx, x, k, cos, sin, positions, *options):
        ctx.save_for_backward(cos, sin, positions)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return _Rope.forward(x, k, cos, sin, positions, *options)


class _RopeInPlace(Differentiable):
    """Under no transform: see `rotate_`."""

    @staticmethod
    def forward(x, k, cos, sin, positions, *options):
        _rope_(x, k, cos, sin, positions, *options)
        return x if k is None else (x, k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, k, *_ = inputs
        ctx.mark_dirty(*((x,) if k is None else (x, k)))
        _Rope.setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx, *douts):
        return _gradients(ctx, *douts)


def _gradients(ctx: Any, dx: Tensor | None, dk: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Of x, k and all that comes after them; of a gradient that is not there, or that nobody wants, nothing."""
    o = Options(*ctx.options)
    o = o._replace(transpose=not o.transpose)
    dx = dx if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    dx, dk = _both(dx, dk, *ctx.saved_tensors, o)
    return dx, dk, *(None,) * (3 + len(o))


def _both(dx: Tensor | None, dk: Tensor | None, *others: Any) -> tuple[Tensor | None, Tensor | None]:
    """Those of the two that are there, rotated."""
    if dx is not None and dk is not None:
        return rotate(dx, dk, *others)
    return None if dx is None else rotate(dx, None, *others), None if dk is None else rotate(dk, None, *others)


_apply, _apply_in_place = apply_of(_Rope), apply_of(_RopeInPlace)


def rotate(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options) -> Any:
    """x rotated, or the pair (x, k), in new memory."""
    if (torch.is_grad_enabled() and (x.requires_grad or (k is not None and k.requires_grad))) or transformed():
        return _apply(x, k, cos, sin, positions, *options)
    outs = _rope(x, k, cos, sin, positions, *options)
    return outs[0] if k is None else tuple(outs)


def rotate_(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options) -> Any:
    """x, or the pair (x, k), rotated where it stands. Memory is checked already, as far as it is known."""
    grad = torch.is_grad_enabled() and (x.requires_grad or (k is not None and k.requires_grad))
    if (grad and _tracing()) or transformed():  # torch's compiler makes an in-place op of this copy wherever it may
        return write(x, k, rotate(x, k, cos, sin, positions, options))
    if not grad:
        _rope_(x, k, cos, sin, positions, *options)
        for t in () if _tracing() else (x, k):
            if t is not None and not t.is_inference():
                _increment_version(t)  # so that autograd notices, if it has saved it
        return x if k is None else (x, k)
    if k is None:
        return _apply_in_place(x, None, cos, sin, positions, *options)
    if x._is_view() or k._is_view():  # autograd takes one view at a time
        return tuple(_apply_in_place(t, None, cos, sin, positions, *options) for t in (x, k))
    return _apply_in_place(x, k, cos, sin, positions, *options)


def write(x: Tensor, k: Tensor | None, new: Any) -> Any:
    """Write what `rotate` gave over x, or over x and k. Raises ValueError where torch.func lets nobody."""
    pairs = ((x, new),) if k is None else ((x, new[0]), (k, new[1]))
    for name, (t, out) in () if _tracing() else zip("xk", pairs, strict=False):
        if _level(out) > _level(t):
            raise ValueError(f"{name} comes from outside of a torch.func transform, which lets nobody write it: use cukern.rope")
    for t, out in pairs:
        t.copy_(out)
    return x if k is None else (x, k)
