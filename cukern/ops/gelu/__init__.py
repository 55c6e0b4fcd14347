"""gelu, swiglu and geglu: the activations of a feed-forward layer, with a bias or a gate, and their gradients. One file of kernels."""

from cukern.ops.gelu.op import geglu, gelu, swiglu

__all__ = ["geglu", "gelu", "swiglu"]
