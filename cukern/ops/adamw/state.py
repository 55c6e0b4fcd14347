"""The tensors of AdamW: parts of DTensors, gradients and state in the layout of their parameter, and the norm
of the gradients."""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.runtime import checks

Found = tuple[int, Tensor, int]  # the number of a parameter, the parameter, its group


def sum_of_squares(found: Sequence[Found], grads: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of the gradients of all processes, in double."""
    parts: dict[Any, list[Tensor]] = {}
    for (_, p, _), grad in zip(found, grads, strict=True):
        parts.setdefault(getattr(p, "device_mesh", None), []).append(grad)
    total = grads[0].new_zeros((), dtype=torch.float64)
    for mesh, some in parts.items():
        square = torch.stack(list(torch._foreach_norm(some, 2, dtype=torch.float64))).square().sum()
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Partial

            # the sum over the processes
            square = DTensor.from_local(square, mesh, [Partial()] * mesh.ndim).full_tensor()
        total += square
    return total


def like_parameter(name: str, value: Any, p: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of a tensor of the state with the parameter's strides, which the kernels expect."""
    value = torch.as_tensor(value)
    if value.shape != p.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, it must be that of the parameter, {tuple(p.shape)}"
        )
    return torch.empty_like(p, dtype=dtype).copy_(value)


def local(x: Any) -> Tensor:
    """This process's part of a DTensor; another tensor as it is."""
    return x.to_local() if hasattr(x, "to_local") else x


class Layouts(NamedTuple):
    """Of tensors, for a key; of DTensors those of their parts. The device is left out: an address belongs to
    one device."""

    addresses: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    others: Any = None  # what is no plain tensor


def layouts(found: Sequence[Any]) -> Layouts | None:
    """None if all are None."""
    others: Any = None
    kinds = set(map(type, found))
    if kinds == {type(None)}:
        return None
    if not kinds <= checks.PLAIN:
        others = tuple([isinstance(t, Tensor) or t for t in found])
        found = [local(t) for t in found if isinstance(t, Tensor)]
    dtypes, shapes = tuple([t.dtype for t in found]), tuple([t.shape for t in found])
    return Layouts(
        tuple(map(Tensor.data_ptr, found)), dtypes, shapes, tuple(map(Tensor.stride, found)), others
    )


def gradients(found: Sequence[Found], layout: Layouts | None) -> list[Tensor]:
    """The gradients, each with the strides of its parameter. `layout`: those of the parameters."""
    grads: list[Any] = [p.grad for _, p, _ in found]
    usual = (
        layout is not None
        and layout.others is None
        and set(map(type, grads)) == {Tensor}
        and {g.layout for g in grads} == {torch.strided}
        and tuple([g.dtype for g in grads]) == layout.dtypes
        and tuple(map(Tensor.stride, grads)) == layout.strides
        and list(map(Tensor.get_device, grads)) == [p.get_device() for _, p, _ in found]
        and not any(map(Tensor.is_neg, grads))
    )
    return grads if usual else [_gradient(i, p) for i, p, _ in found]


def _gradient(index: int, p: Tensor) -> Tensor:
    grad, p = local(p.grad), local(p)
    name = f"the gradient of parameter {index}"
    checks.dtype(name, grad, (p.dtype,))
    if grad.device != p.device:
        raise ValueError(
            f"{name} is on {grad.device}, the parameter is on {p.device}: they must be on one device"
        )
    return grad if grad.stride() == p.stride() else torch.empty_like(p).copy_(grad)


_Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # of torch.compile


class Known(NamedTuple):
    """A table, and the tensors that it serves."""

    table: Any
    others: Any
    addresses: list[int]
    guards: Any


class Tensors:
    """The tensors of a step. Usually they are those of the last step, and gradients of the same layouts.

    TensorGuards compares types, dtypes, devices, shapes, strides and flags, such as the negative bit, of all
    tensors in one call. In Python this takes longer than the rest of a step.
    """

    def __init__(self, found: Sequence[Found], states: Sequence[dict[str, Any]], groups: Any):
        self.params = [p for _, p, _ in found]
        self.grads: list[Any] = [p.grad for p in self.params]
        self.written = [*self.params, *itertools.chain.from_iterable(map(dict.values, states))]
        self.others = [i for i, _, _ in found], list(map(tuple, states)), groups

    def are(self, known: Known) -> bool:
        """True if a table serves this step, too."""
        try:
            same = self.others == known.others and known.guards.check(*self.written, *self.grads)
            return same and list(map(Tensor.data_ptr, self.written)) == known.addresses
        except TypeError:  # another number of tensors
            return False

    def known(self, table: Any, grads: Sequence[Tensor], written: Sequence[Tensor]) -> Known | None:
        """What `are` needs. None if it must not decide: for gradients in other layouts than those of the
        parameters, which are copied; for states with more than the kernels write; for anything but plain
        tensors."""
        tensors = [*self.written, *self.grads]
        usual = all(map(operator.is_, grads, self.grads)) and set(map(id, written)) == set(
            map(id, self.written)
        )
        if _Guards is None or not usual or not checks.PLAIN.issuperset(map(type, tensors)):
            return None
        try:
            guards = _Guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        except TypeError:  # in a version of torch with other arguments
            return None
        return Known(table, self.others, list(map(Tensor.data_ptr, self.written)), guards)
