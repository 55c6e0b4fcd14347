"""The epilogue of a product: out = activation(product + bias) + residual."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cukern.runtime.autocast import off

ACTIVATIONS = "none", "gelu", "gelu_tanh", "relu", "silu"  # as enum Activation in epilogue.cuh


class Epilogue(NamedTuple):
    """`activation` is an index of ACTIVATIONS. `pre` is where product + bias is stored. `residual` may be the output, which is added to."""

    bias: Tensor | None = None
    activation: int = 0
    pre: Tensor | None = None
    residual: Tensor | None = None

    @property
    def only_adds(self) -> bool:
        """True for out = product + residual."""
        return self.bias is None and self.activation == 0 and self.pre is None


NO_EPILOGUE = Epilogue()
_OUT = {  # of a tensor of products, into another
    "gelu": lambda x, out: torch.ops.aten.gelu.out(x, approximate="none", out=out),
    "gelu_tanh": lambda x, out: torch.ops.aten.gelu.out(x, approximate="tanh", out=out),
    "relu": lambda x, out: torch.ops.aten.relu.out(x, out=out),
    "silu": lambda x, out: torch.ops.aten.silu.out(x, out=out),
}


def activate(x: Tensor, activation: int) -> Tensor:
    """The activation in torch's operations."""
    name = ACTIVATIONS[activation]
    with off(x):
        if name.startswith("gelu"):
            return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
        return x if name == "none" else getattr(functional, name)(x)


def finish(out: Tensor, product: Tensor, e: Epilogue) -> None:
    """Write the results to `out` by torch's operations, from a product, which may be `out` or `e.pre`, to which the bias has been added."""
    if e.pre is not None and e.pre is not product:
        e.pre.copy_(product)
    if e.activation and product.dtype == out.dtype:
        _OUT[ACTIVATIONS[e.activation]](product, out)
    elif product is not out:
        out.copy_(activate(product, e.activation) if e.residual is not out else activate(product, e.activation) + out)
    if e.residual is not None and e.residual is not out:
        out.add_(e.residual)
