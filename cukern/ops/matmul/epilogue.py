"""The epilogue of a product: out = activation(product + bias) + residual."""

from typing import NamedTuple

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
    def only_bias(self) -> bool:
        return self.activation == 0 and self.pre is None and self.residual is None


def activate(x: Tensor, activation: int) -> Tensor:
    """The activation in torch's operations."""
    name = ACTIVATIONS[activation]
    with off(x):
        if name.startswith("gelu"):
            return functional.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
        return x if name == "none" else getattr(functional, name)(x)


def finish(out: Tensor, product: Tensor, e: Epilogue) -> None:
    """Write the results to `out` by torch's operations, from a product to which the bias has been added."""
    if e.pre is not None:
        e.pre.copy_(product)
    y = activate(product, e.activation)
    out.copy_(y if e.residual is None else y + e.residual)
