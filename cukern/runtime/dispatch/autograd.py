"""autograd Functions that cost little host time, their vmap rules, and whether a call needs them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from cukern.runtime import planning, recording
from cukern.runtime.dispatch import autocast

_tracing = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active


class Differentiable(torch.autograd.Function):
    """Base class of the ops' autograd Functions; `apply_of` returns the callable.

    Subclasses define static methods: `forward(*args)`, `setup_context(ctx, inputs, output)`, which calls
    `save`, `backward(ctx, *grads)`, `tangent(ctx, *tangents)` (torch's jvp) and `batch(info, in_dims, *args)`
    (torch's vmap). The last two have their own names, because torch.compile does not trace a Function that
    defines jvp.
    """


class _Context:
    """The context of a backward, with the tensors that `saved_tensors` gave."""

    def __init__(self, ctx: Any, saved: tuple[Any, ...]):
        self._ctx, self.saved_tensors = ctx, saved

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


def save(ctx: Any, *tensors: torch.Tensor | None) -> None:
    """Save tensors for backward, and for `tangent` if forward-mode derivatives are active."""
    ctx.save_for_backward(*tensors)
    if forward_ad._current_level >= 0 and not _tracing():
        ctx.save_for_forward(*tensors)


def apply_of(function: type[Differentiable]) -> Callable[..., Any]:
    """`function.apply` with forward-mode derivatives and vmap.

    `apply` of a Function with setup_context costs 47 us per call because of its torch.func support. This one
    skips that support (8 us) unless a transform is active.
    """

    def in_one(ctx: Any, *args: Any) -> Any:
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    base: Any = torch.autograd.Function
    alone = function.setup_context is not base.setup_context  # forward takes no context
    forward = in_one if alone else function.forward
    planned_backward = planning.planned_backward(
        lambda ctx, saved, douts: function.backward(_Context(ctx, saved), *douts)
    )

    def variant(
        forward: Callable[..., Any], attributes: dict[str, Any] | None = None, *counts: int
    ) -> Callable[..., Any]:
        """`apply` with another forward. See recording.Forward; without attributes, the backward is not
        planned."""
        made: Any = type(
            function.__name__,
            (function,),
            {"forward": staticmethod(forward), "setup_context": base.setup_context},
        )
        if attributes is not None:
            for name, value in {**attributes, "apply": planned_backward(*counts)}.items():
                setattr(made._backward_cls, name, value)
        return super(base, made).apply

    rules = {"jvp": getattr(function, "tangent", None), "vmap": getattr(function, "batch", None)}
    full = type(
        function.__name__, (function,), {name: staticmethod(rule) for name, rule in rules.items() if rule}
    )
    fast, dual = variant(forward), super(base, full).apply

    def apply(*args: Any) -> Any:
        if forward_ad._current_level >= 0 or _transforms():
            return eager(*args)
        if _tracing():
            return function.apply(*args)
        recorder = recording.local.recorder
        if recorder is None:
            return fast(*args)
        if alone and not torch.is_grad_enabled():
            return function.forward(*args)
        return recorder.differentiable(fast, variant, forward, args)

    def transform(*args: Any) -> Any:
        return full.apply(*args) if _transforms() else dual(*args)  # type: ignore[attr-defined]

    # torch.compile breaks its graph here and reports this name. Without the break, forward-mode derivatives
    # would silently be zero.
    transform.__qualname__ = f"{function.__name__}.transform"
    eager = torch._disable_dynamo(transform)
    return apply


def watched(*tensors: torch.Tensor | None) -> bool:
    """True if a call must use the autograd Function: a tensor requires grad, or `transformed()`."""
    for x in tensors:
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled() or transformed()
    return forward_ad._current_level >= 0 or _transforms()


def transformed() -> bool:
    """True if tensors may carry forward-mode tangents or a torch.func transform is active."""
    return forward_ad._current_level >= 0 or _transforms()


def dispatched() -> bool:
    """True if an operation on plain tensors may do something else: in torch.compile, FakeTensorMode,
    torch.func transforms."""
    return _tracing() or _modes() > 0 or _transforms()


def batched(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """A tensor of a vmap rule with the batch dimension first, expanded if it has none."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def each(
    apply: Callable[..., Any], size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """The vmap rule for any op: one call per element of the batch. Returns (outputs, out_dims). One call with
    zeros gives the shapes of the results of an empty batch."""
    if not size:
        one = [
            a if d is None else a.new_zeros((*a.shape[:d], 1, *a.shape[d + 1 :]))
            for a, d in zip(args, in_dims, strict=True)
        ]
        outputs, dims = each(apply, 1, in_dims, one)
        return (
            outputs[:0]
            if dims == 0
            else tuple(o if d is None else o[:0] for o, d in zip(outputs, dims, strict=True))
        ), dims
    calls = [
        apply(*(a if d is None else a.select(d, i) for a, d in zip(args, in_dims, strict=True)))
        for i in range(size)
    ]
    if isinstance(calls[0], torch.Tensor):
        with autocast.off(calls[0]):
            return torch.stack(calls), 0
    with autocast.off(calls[0][0]):
        outputs = tuple(
            None if parts[0] is None else torch.stack(parts) for parts in zip(*calls, strict=True)
        )
    return outputs, tuple(None if out is None else 0 for out in outputs)


def rows_of_each(
    apply: Callable[..., Any], matrices: int, size: int, in_dims: Sequence[int | None], args: Sequence[Any]
) -> tuple[Any, Any]:
    """The vmap rule of an op on rows: one call, with the batch merged into the rows of the first `matrices`
    arguments. Other arguments that have a batch dimension need `each`. Returns (outputs, out_dims)."""
    if any(dim is not None for dim in in_dims[matrices:]):
        return each(apply, size, in_dims, args)
    full = [
        t if t is None else batched(t, dim, size) for t, dim in zip(args[:matrices], in_dims, strict=False)
    ]
    outs = apply(*(t if t is None else t.flatten(0, 1) for t in full), *args[matrices:])
    shape = next(t.shape[:2] for t in full if t is not None)
    if isinstance(outs, torch.Tensor):
        return outs.unflatten(0, shape), 0
    return tuple(out.unflatten(0, shape) for out in outs), (0,) * len(outs)
