"""Derivatives that no kernel computes: higher ones, and those of forward mode. They differentiate an op's math in torch's operations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.runtime.autocast import off
from cukern.runtime.registry import Differentiable, apply_of, each, save, transformed

Math = Callable[..., Any]


def gradients(math: Math, inputs: Sequence[Any], douts: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`, in operations that can be differentiated again. They are None for inputs without a gradient.

    `math(*inputs)` returns a tensor or a tuple of tensors. `douts` are the gradients of the first ones; None: 0.
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
                pairs = [(out, dout) for out, dout in zip(call(*leaves), given, strict=True) if out.requires_grad]
                outs, given = zip(*pairs, strict=True)
                found = torch.autograd.grad(outs, leaves, given, create_graph=True, allow_unused=True)
    of_input = dict(zip(where, found, strict=True))
    return tuple(of_input.get(i) for i in range(len(inputs)))


def tangents(math: Math, inputs: Sequence[Any], dinputs: Sequence[Tensor | None], outputs: int = 1) -> tuple[Tensor, ...]:
    """The derivatives of the first `outputs` outputs of `math(*inputs)` along `dinputs`; None: 0.

    Forward mode inside of forward mode is not possible in torch. So this is the gradient of the gradient, which is linear in `dout`.
    """
    where = [i for i, dx in enumerate(dinputs) if dx is not None]
    call, along = _function_of(math, inputs, where, [True] * outputs), tuple(dx for dx in dinputs if dx is not None)
    with off(along[0]):
        outs, pull, *_ = torch.func.vjp(call, *(inputs[i] for i in where))
        return torch.func.vjp(lambda *douts: pull(douts), *map(torch.zeros_like, outs))[1](along)


def _function_of(math: Math, inputs: Sequence[Any], where: Sequence[int], selected: Sequence[bool]) -> Callable[..., tuple[Tensor, ...]]:
    """`math` as a function of the inputs at `where`. It returns the selected outputs."""

    def call(*some: Tensor) -> tuple[Tensor, ...]:
        changed = dict(zip(where, some, strict=True))
        outs = math(*(changed.get(i, x) for i, x in enumerate(inputs)))
        every = (outs,) if isinstance(outs, Tensor) else outs
        return tuple(out for out, is_selected in zip(every, selected, strict=False) if is_selected)

    return call


def differentiable(raw: Callable[..., Any], math: Math, outputs: int) -> Callable[..., Any]:
    """Make a raw op differentiable. `math` is the same function in torch's operations; its derivatives are used. `outputs`: the number of
    tensors that `raw` returns."""

    class _Higher(Differentiable):
        forward = staticmethod(raw)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.options = [None if isinstance(x, Tensor) else x for x in inputs]
            save(ctx, *(x if isinstance(x, Tensor) else None for x in inputs))

        @staticmethod
        def backward(ctx: Any, *douts: Any) -> Any:
            return gradients(math, _inputs(ctx), douts)

        @staticmethod
        def tangent(ctx: Any, *dinputs: Any) -> Any:
            return tangents(math, _inputs(ctx), dinputs, outputs)

        @staticmethod
        def batch(info: Any, in_dims: Any, *args: Any) -> Any:
            return each(apply, info.batch_size, in_dims, args)

    def _inputs(ctx: Any) -> list[Any]:
        return [option if x is None else x for x, option in zip(ctx.saved_tensors, ctx.options, strict=True)]

    apply = apply_of(_Higher)
    return apply
