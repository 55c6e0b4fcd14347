"""rope's raw ops and autograd Functions. The public functions check their arguments and then call `rotate` or
`rotate_`.

A rotation is linear and its gradient is its transpose: the same Function with `transpose` inverted, so
derivatives of all orders exist.
"""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.rope import versions
from cukern.ops.rope.memory import check_disjoint, written_extent
from cukern.ops.rope.plan import Options
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, save, transformed, watched
from cukern.runtime.dispatch.raw_ops import raw_op

_tracing = torch.compiler.is_dynamo_compiling
_level = torch._C._functorch.maybe_get_level

# ---- the raw ops

_TENSORS = "Tensor cos, Tensor sin, Tensor? positions"
_OPTIONS = (
    "SymInt rotary_dim, SymInt rotary_offset, bool interleaved, bool transpose, float scale, str layout, "
    "bool contiguous, str version"
)


def _launch(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any
) -> list[Tensor]:
    outs = _fake(x, k, cos, sin, positions, *options)
    _run(outs, _with_unit_stride(x), k if k is None else _with_unit_stride(k), cos, sin, positions, options)
    return outs


def _with_unit_stride(x: Tensor) -> Tensor:
    """x, copied if it is expanded along head_dim, as the gradient of a sum is: only v1 reads that. The copy
    is one head or a few, because the other expanded dimensions stay expanded."""
    if x.stride(-1) != 0:
        return x
    return x[tuple(slice(None if stride else 1) for stride in x.stride()[:-1])].contiguous().expand(x.shape)


def _launch_(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any
) -> None:
    _run([], x, k, cos, sin, positions, options)


def _run(
    outs: list[Tensor], x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None,
    options: tuple[Any, ...],
) -> None:  # fmt: skip
    """`outs`: the outputs of x and k; empty: x and k are overwritten."""
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    p, table = x.data_ptr(), (cos.dtype, cos.shape, cos.stride())  # p, k_p: inputs; q, k_q: outputs
    ins: Any = ((x.shape, x.stride()),)
    q = outs[0].data_ptr() if outs else p
    strides: Any = (outs[0].stride(),) if outs else ()
    k_p = k_q = 0
    if k is not None:
        ins, k_p = (*ins, (k.shape, k.stride())), k.data_ptr()
        k_q = outs[1].data_ptr() if outs else k_p
        strides = (*strides, outs[1].stride()) if outs else ()
        if not outs and -written_extent("k", *ins[1], x.itemsize) < k_p - p < written_extent(
            "x", *ins[0], x.itemsize
        ):
            check_disjoint(k_p - p, x.itemsize, *ins[0], *ins[1])
    shape = None if positions is None else positions.shape
    alignment = (p | q | k_p | k_q) % 16
    c, s, at = cos.data_ptr(), sin.data_ptr(), 0 if positions is None else positions.data_ptr()
    plan = versions.plan(
        x.dtype, x.get_device(), strides, ins, table, shape, alignment, (c | s) % 16, options
    )
    launch, grid, block, numbers = plan
    if launch is not None:
        launch(grid, block, 0, q, k_q, p, k_p, c, s, at, *numbers)


def _fake(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, *options: Any
) -> list[Tensor]:
    # options[6]: Options.contiguous
    memory_format = torch.contiguous_format if options[6] else torch.preserve_format
    return [torch.empty_like(t, memory_format=memory_format) for t in (x, k) if t is not None]


def _sharding(x: Tensor, k: Any, cos: Tensor, sin: Any, positions: Tensor | None, *options: Any) -> str:
    """Batch and heads are split; with one table or one row of positions for the whole batch, these are
    replicated."""
    axes = "".join(c if c in "bh" else "." for c in options[5])  # options[5]: Options.layout
    table = "b.." if cos.ndim == 3 and cos.shape[0] > 1 else "..."
    return (
        f"{axes}, {axes}, {table}, {table}, "
        f"{'b.' if positions is not None and positions.shape[0] > 1 else '..'} -> {axes}"
    )


_rope = raw_op(
    f"_rope(Tensor x, Tensor? k, {_TENSORS}, {_OPTIONS}) -> Tensor[]", 5, _launch, _fake, sharding=_sharding
)
_rope_ = raw_op(
    f"_rope_(Tensor(a!) x, Tensor(b!)? k, {_TENSORS}, {_OPTIONS}) -> ()",
    5,
    _launch_,
    lambda *_: None,
    sharding=_sharding,
)

# ---- autograd


def _gradients(ctx: Any, dx: Tensor | None, dk: Tensor | None = None) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs. Returns None for gradients that are missing or not needed."""
    o = Options(*ctx.options)
    o = o._replace(transpose=not o.transpose)
    dx, dk = (d if needed else None for d, needed in zip((dx, dk), ctx.needs_input_grad, strict=False))
    return *_rotate_given(dx, dk, *ctx.saved_tensors, o), *(None,) * (3 + len(o))


def _rotate_given(dx: Tensor | None, dk: Tensor | None, *others: Any) -> tuple[Tensor | None, Tensor | None]:
    """dx and dk, rotated in one launch if both are given."""
    if dx is not None and dk is not None:
        return rotate(dx, dk, *others)
    return None if dx is None else rotate(dx, None, *others), None if dk is None else rotate(
        dk, None, *others
    )


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

    backward = staticmethod(_gradients)

    @staticmethod
    def tangent(ctx, dx, dk, *others):
        if any(d is not None for d in others):
            raise ValueError("cos and sin have no derivative: pass them without a tangent")
        tangents = zip(
            _rotate_given(dx, dk, *ctx.saved_tensors, Options(*ctx.options)), ctx.shapes, strict=False
        )
        filled = [(dk if dx is None else dx).new_zeros(shape) if d is None else d for d, shape in tangents]
        return filled[0] if len(filled) == 1 else tuple(filled)

    @staticmethod
    def batch(info, in_dims, x, k, cos, sin, positions, *options):
        o, size = Options(*options), info.batch_size
        if any(dim is not None for dim in in_dims[2:]):
            return each(_apply, size, in_dims, (x, k, cos, sin, positions, *options))
        heads = o.layout.index("h")
        first = [t if dim is None else t.movedim(dim, heads) for t, dim in zip((x, k), in_dims, strict=False)]
        dims = tuple(None if dim is None else heads for dim in in_dims[:2])
        # merged into the heads
        x, k = (t if dim is None else t.flatten(heads, heads + 1) for t, dim in zip(first, dims, strict=True))
        outs = rotate(x, k, cos, sin, positions, o)
        outs = tuple(
            out if dim is None else out.unflatten(heads, (size, t.shape[heads + 1]))
            for out, t, dim in zip((outs,) if k is None else outs, first, dims, strict=False)
        )
        return (outs[0], dims[0]) if k is None else (outs, dims)


class _RopeInPlace(Differentiable):
    """Only used where no torch.func transform or forward-mode derivative is active: see `rotate_`."""

    @staticmethod
    def forward(x, k, cos, sin, positions, *options):
        _rope_(x, k, cos, sin, positions, *options)
        return x if k is None else (x, k)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, k, *_ = inputs
        ctx.mark_dirty(*((x,) if k is None else (x, k)))
        _Rope.setup_context(ctx, inputs, output)

    backward = staticmethod(_gradients)


_apply, _apply_in_place = apply_of(_Rope), apply_of(_RopeInPlace)


def rotate(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options
) -> Any:
    """x rotated, or the pair (x, k), in new memory."""
    if watched(x, k):
        return _apply(x, k, cos, sin, positions, *options)
    outs = _rope(x, k, cos, sin, positions, *options)
    return outs[0] if k is None else tuple(outs)


def rotate_(
    x: Tensor, k: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, options: Options
) -> Any:
    """x, or the pair (x, k), rotated in place. The caller has checked the memory of tensors that have one."""
    if not watched(x, k):
        _rope_(x, k, cos, sin, positions, *options)
        return x if k is None else (x, k)
    if _tracing() or transformed():  # torch.compile turns this copy into an in-place op where it can
        return write(x, k, rotate(x, k, cos, sin, positions, options))
    # autograd accepts only one view per in-place Function
    if k is not None and (x._is_view() or k._is_view()):
        return tuple(_apply_in_place(t, None, cos, sin, positions, *options) for t in (x, k))
    return _apply_in_place(x, k, cos, sin, positions, *options)


def write(x: Tensor, k: Tensor | None, new: Any) -> Any:
    """Copy `rotate`'s result into x, or into x and k. Raises ValueError if a torch.func transform forbids
    it."""
    pairs = ((x, new),) if k is None else ((x, new[0]), (k, new[1]))
    for name, (t, out) in () if _tracing() else zip("xk", pairs, strict=False):
        if _level(out) > _level(t):
            raise ValueError(
                f"{name} comes from outside a torch.func transform, which does not allow it to be written: "
                f"use cukern.rope"
            )
    for t, out in pairs:
        t.copy_(out)
    return x if k is None else (x, k)
