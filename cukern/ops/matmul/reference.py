"""The epilogue of a product, and products with an epilogue in torch's operations."""

from typing import NamedTuple

import torch
from torch import Tensor

from cukern.runtime.autocast import off
from cukern.runtime.products import torch_matmul

ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # as enum Activation in epilogue.cuh


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
    if e.residual is not None:
        torch.add(activate(product, e.activation), e.residual, out=out)
    elif e.activation and product.dtype == out.dtype:
        activate(product, e.activation, out)
    elif product is not out:
        out.copy_(activate(product, e.activation))


def in_torch(a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int) -> tuple[Tensor, Tensor]:
    """activation(a @ b + bias) + residual, and a @ b + bias, in torch's operations."""
    pre = torch_matmul(a, b, bias)
    out = activate(pre, activation)
    return out if residual is None else out + residual, pre
