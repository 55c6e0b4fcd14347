"""Derivatives that no kernel computes: higher ones, and those of forward mode. They differentiate an op's
math in torch's operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.runtime.dispatch.autocast import off
from cukern.runtime.dispatch.autograd import (
    Differentiable,
    apply_of,
    each,
    rows_of_each,
    save,
    transformed,
    watched,
)

Math = Callable[..., Any]
_tracing = torch.compiler.is_dynamo_compiling


def gradients(math: Math, inputs: Sequence[Any], douts: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, in operations that can be differentiated again. They are None for inputs
    without a gradient.

    `math(*inputs)` returns a tensor or a tuple of tensors. `douts` are the gradients of the first ones; None:
    0.
    """
    where = [i for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.is_floating_point()]
    call = _function_of(math, inputs, where, [dout is not None for dout in douts])
    tensors, given = [inputs[i] for i in where], tuple(dout for dout in douts if dout is not None)
    with off(tensors[0]):
        if transformed():
            found = torch.func.vjp(call, *tensors)[1](given)
        else:  # torch.func refuses to run inside of saved-tensor hooks
            with torch.enable_grad():
                views = [x.view_as(x) for x in tensors]
                leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in views]
                pairs = [
                    (out, dout) for out, dout in zip(call(*leaves), given, strict=True) if out.requires_grad
                ]
                outs, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(outs, leaves, given, create_graph=True, allow_unused=True)
    of_input = dict(zip(where, found, strict=True))
    return tuple(of_input.get(i) for i in range(len(inputs)))


def tangents(
    math: Math, inputs: Sequence[Any], dinputs: Sequence[Tensor | None], outputs: int = 1
) -> tuple[Tensor, ...]:
    """The derivatives of the first `outputs` outputs of `math(*inputs)` along `dinputs`; None: 0.

    Forward mode inside of forward mode is not possible in torch. So this is the gradient of the gradient,
    which is linear in `dout`.
    """
    where = [i for i, dx in enumerate(dinputs) if dx is not None]
    call = _function_of(math, inputs, where, [True] * outputs)
    along = tuple(dx for dx in dinputs if dx is not None)
    with off(along[0]):
        outs, pull, *_ = torch.func.vjp(call, *(inputs[i] for i in where))
        return torch.func.vjp(lambda *douts: pull(douts), *map(torch.zeros_like, outs))[1](along)


def _function_of(
    math: Math, inputs: Sequence[Any], where: Sequence[int], selected: Sequence[bool]
) -> Callable[..., tuple[Tensor, ...]]:
    """`math` as a function of the inputs at `where`. It returns the selected outputs."""

    def call(*some: Tensor) -> tuple[Tensor, ...]:
        changed = dict(zip(where, some, strict=True))
        outs = math(*(changed.get(i, x) for i, x in enumerate(inputs)))
        every = (outs,) if isinstance(outs, Tensor) else outs
        return tuple(out for out, is_selected in zip(every, selected, strict=False) if is_selected)

    return call


def differentiable(
    name: str, raw: Callable[..., Any], math: Math, tensors: int, outputs: int = 1, *, rows: int = 0,
    gradient: Callable[..., Any] | None = None, kept: Callable[..., Sequence[Any]] = lambda inputs,
    output: inputs,
) -> Callable[..., Any]:  # fmt: skip
    """Make a raw op differentiable any number of times.

    Args:
        name: of the node in autograd's graph.
        math: the same function in torch's operations. Its derivatives are used where there is no kernel.
        tensors: the number of arguments that are tensors or None. They come first.
        outputs: the number of outputs with a gradient, -n: all but the last n. They come first; `others` are
            the outputs behind them.
        rows: the vmap rule is `rows_of_each` for as many matrices, or with 0 `each`.
        gradient: `gradient(needed, inputs, others, *douts)` computes the gradients of the tensors by kernels.
            `inputs`: the arguments of `raw`; `needed`: which of them need a gradient; `douts`: None for
            outputs that have none. It is not called in torch.func transforms, nor if its result will be
            differentiated.
        kept: `kept(tensors, output)` replaces the tensors in what derivatives get as `inputs`, to keep less
            memory.
    """

    class Function(Differentiable):
        forward = staticmethod(raw)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            others = () if isinstance(output, Tensor) else output[outputs:]
            if others:
                ctx.mark_non_differentiable(*others)
                if not _tracing():
                    # zeros for the gradients of `others` would take a launch each
                    ctx.set_materialize_grads(False)
            ctx.options, ctx.outputs = inputs[tensors:], outputs if outputs > 0 else len(output) + outputs
            save(ctx, *kept(inputs[:tensors], output), *others)

        @staticmethod
        def backward(ctx: Any, *douts: Any) -> Any:
            saved, douts = ctx.saved_tensors, douts[: ctx.outputs]
            inputs = *saved[:tensors], *ctx.options
            if all(dout is None for dout in douts):
                return (None,) * len(inputs)
            if gradient is None or (watched(*inputs[:tensors], *douts) and not torch.compiler.is_compiling()):
                return gradients(math, inputs, douts)
            return *gradient(ctx.needs_input_grad, inputs, saved[tensors:], *douts), *(None,) * len(
                ctx.options
            )

        @staticmethod
        def tangent(ctx: Any, *dinputs: Any) -> Any:
            saved = ctx.saved_tensors
            found = (
                *tangents(math, (*saved[:tensors], *ctx.options), dinputs, ctx.outputs),
                *(None,) * (len(saved) - tensors),
            )
            return found[0] if len(found) == 1 else found

        @staticmethod
        def batch(info: Any, in_dims: Any, *args: Any) -> Any:
            return (
                rows_of_each(apply, rows, info.batch_size, in_dims, args)
                if rows
                else each(apply, info.batch_size, in_dims, args)
            )

    Function.__name__ = Function.__qualname__ = name
    apply = apply_of(Function)
    return apply
