"""Products in torch's operations: the dtypes of autocast, the epilogue and its activations."""

from typing import NamedTuple

import torch
from torch import Tensor

from cukern.runtime.autocast import enabled, off
from cukern.runtime.products import torch_matmul

ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # as enum Activation in epilogue.cuh


def cast(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """The tensors as autocast wants the inputs of a product: all but float64 in its dtype."""
    first = tensors[0]
    if first is None or not enabled(first) or first.dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return [t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors]


# ---- the epilogue


class Epilogue(NamedTuple):
    """out = activation(product + bias) + residual. `activation` is an index of ACTIVATIONS. `pre` is where product + bias is stored.
    `residual` may be the output, which is added to."""

    bias: Tensor | None = None
    activation: int = 0
    pre: Tensor | None = None
    residual: Tensor | None = None


def activate(x: Tensor, activation: int, out: Tensor | None = None) -> Tensor:
    """The activation in torch's operations, written to `out` if that is given."""
    if not activation:
        return x
    name, _, kind = ACTIVATIONS[activation].partition("_")
    op, options = getattr(torch.ops.aten, name), {"approximate": kind or "none"} if name == "gelu" else {}
    with off(x):
        return op(x, **options) if out is None else op.out(x, **options, out=out)


def finish(out: Tensor, product: Tensor, e: Epilogue) -> None:
    """Write the results to `out` by torch's operations, from a product, which may be `out` or `e.pre`, to which the bias has been added."""
    if e.pre is not None and e.pre is not product:
        e.pre.copy_(product)
    if e.activation and product.dtype == out.dtype:
        activate(product, e.activation, out)
    elif product is not out:
        out.copy_(activate(product, e.activation) if e.residual is not out else activate(product, e.activation) + out)
    if e.residual is not None and e.residual is not out:
        out.add_(e.residual)


def in_torch(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
    """activation(a @ b + bias) + residual, and a @ b + bias, in torch's operations."""
    pre = torch_matmul(a, b, bias)
    out = activate(pre, activation)
    return out if residual is None else out + residual, pre
