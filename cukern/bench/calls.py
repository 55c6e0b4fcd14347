"""Calls a case with any number of outputs, gradients and in-place inputs; shared by checks and
measurements."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from cukern.runtime.registry import Case, Tensors

Function = Callable[..., "torch.Tensor | Tensors"]


def outputs(y: torch.Tensor | Tensors) -> Tensors:
    """The result of a call, one tensor or several, as a tuple."""
    return y if isinstance(y, tuple) else (y,)


def wanted_inputs(case: Case, pass_: str, inputs: Sequence[torch.Tensor]) -> list[int]:
    """The inputs that a backward pass differentiates: "bwd" all with a gradient, "bwd:x" only x."""
    one = pass_.partition(":")[2]
    return [
        i
        for i, name in enumerate(case.names(inputs))
        if case.has_gradient(name, inputs[i]) and one in ("", name)
    ]


def draw_douts(case: Case, inputs: Sequence[torch.Tensor]) -> Tensors:
    """Random gradients, one per output, and zeros for outputs of integers and bools, which have none. The
    reference gives their shapes; if it needs too much memory, the op does."""
    with torch.no_grad():
        try:
            found = case.reference(*inputs)
        except torch.OutOfMemoryError:
            found = case.call(*arguments(case, inputs))
        return tuple(
            torch.randn_like(y) if y.is_floating_point() else torch.zeros_like(y) for y in outputs(found)
        )


def precision(douts: Tensors, inputs: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of the first output of floating point, else of the first such input."""
    return next((x.dtype for x in (*douts, *inputs) if x.is_floating_point()), torch.float32)


def leaves_of(inputs: Sequence[torch.Tensor], wanted: Sequence[int]) -> list[torch.Tensor]:
    """The inputs as leaves on the same memory; the `wanted` ones require grad."""
    return [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]


def arguments(case: Case, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The arguments of a call: the leaves, with copies of in-place inputs, because autograd forbids writing
    to a leaf."""
    return [
        x.clone() if name in case.in_place else x for name, x in zip(case.names(leaves), leaves, strict=True)
    ]


def backward(
    y: torch.Tensor | Tensors, leaves: Sequence[torch.Tensor], douts: Tensors, again: bool = True
) -> Callable[[], Tensors]:
    """The backward pass from the outputs `y`, as a function that can run many times if `again`. Raises
    TypeError if no output requires grad; outputs that do not are left out."""
    pairs = [(out, dout) for out, dout in zip(outputs(y), douts, strict=True) if out.requires_grad]
    if not pairs:
        raise TypeError("has no backward")
    outs, grads = zip(*pairs, strict=True)
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=again)


def results(
    case: Case,
    function: Function,
    inputs: Sequence[torch.Tensor],
    douts: Tensors,
    wanted: Sequence[int] | None = None,
) -> Tensors:
    """The outputs of a call and the gradients of the inputs `wanted` (None: all with a gradient). The inputs
    are not modified.

    Raises ValueError if the outputs differ from `douts` in number, shape or dtype.
    """
    wanted = wanted_inputs(case, "bwd", inputs) if wanted is None else wanted
    leaves = leaves_of(inputs, wanted)
    y = function(*arguments(case, leaves))
    ours, theirs = _kinds(outputs(y)), _kinds(douts)
    if ours != theirs:
        raise ValueError(f"the output is {ours}, torch's is {theirs}")
    outs = tuple(out.detach() for out in outputs(y))
    return (*outs, *backward(y, [leaves[i] for i in wanted], douts, again=False)()) if wanted else outs


def _kinds(tensors: Sequence[Any]) -> str:
    return " and ".join(f"{tuple(x.shape)} of {x.dtype}" for x in tensors)
