"""rope's raw ops and its autograd: from tensors that are checked to launches. `rotate` and `rotate_` are what the public functions call.

A rotation is linear, and its gradient is its transpose: the same Function with one flag turned, any number of times.
"""

from typing import Any

import torch
from torch import Tensor

from cukern.ops import rope_plan
from cukern.ops.rope_memory import check_disjoint
from cukern.ops.rope_plan import Options
from cukern.runtime.registry import apply_of, raw_op

_tracing = torch.compiler.is_dynamo_compiling
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
        if not outs:
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


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, cos, sin, positions, *options):
        _remember(ctx, cos, sin, positions, options)
        outs = _rope(x, k, cos, sin, positions, *options)
        return outs[0] if k is None else tuple(outs)

    @staticmethod
    def backward(ctx, *douts):
        return _gradients(ctx, *douts)


class _RopeInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, cos, sin, positions, *options):
        _remember(ctx, cos, sin, positions, options)
        _rope_(x, k, cos, sin, positions, *options)
        if k is None:
            ctx.mark_dirty(x)
            return x
        ctx.mark_dirty(x, k)
        return x, k

    @staticmethod
    def backward(ctx, *douts):
        return _gradients(ctx, *douts)


def _remember(ctx: Any, cos: Tensor, sin: Tensor, positions: Tensor | None, options: tuple[Any, ...]) -> None:
    ctx.save_for_backward(cos, sin, positions)
    ctx.options = options
    if not _tracing():
        ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dx: Tensor | None, dk: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """Of x, k and all that comes after them; of a gradient that is not there, or that nobody wants, nothing."""
    o = Options(*ctx.options)
    o = o._replace(transpose=not o.transpose)
    dx = dx if ctx.needs_input_grad[0] else None
    dk = dk if ctx.needs_input_grad[1] else None
    cos, sin, positions = ctx.saved_tensors
    if dx is not None and dk is not None:
        dx, dk = rotate(dx, dk, cos, sin, positions, o)
    elif dx is not None:
        dx = rotate(dx, None, cos, sin, positions, o)
    elif dk is not None:
        dk = rotate(dk, None, cos, sin, positions, o)
    return dx, dk, *(None,) * (3 + len(o))


_apply, _apply_in_place = apply_of(_Rope), apply_of(_RopeInPlace)


def rotate(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options) -> Any:
    """x rotated, or the pair (x, k), in new memory."""
    if torch.is_grad_enabled() and (x.requires_grad or (k is not None and k.requires_grad)):
        return _apply(x, k, cos, sin, positions, *options)
    outs = _rope(x, k, cos, sin, positions, *options)
    return outs[0] if k is None else tuple(outs)


def rotate_(x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options) -> Any:
    """x, or the pair (x, k), rotated where it stands."""
    grad = torch.is_grad_enabled() and (x.requires_grad or (k is not None and k.requires_grad))
    if grad and _tracing():  # torch's compiler makes an in-place op of this copy wherever it may
        new = rotate(x, k, cos, sin, positions, options)
        return x.copy_(new) if k is None else (x.copy_(new[0]), k.copy_(new[1]))
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
