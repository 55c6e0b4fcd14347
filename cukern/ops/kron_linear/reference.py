"""kron_linear in torch's own operations: v1, which is also the reference, and v2. Both take the factors from
the last to the first.

x is (rows, prod p); a factor is (p, q), or (S, p, q) where each of S samples, rows / S rows one after
another, has its own.
"""

from collections.abc import Callable, Sequence
from math import prod

from torch import Tensor

from cukern.runtime.dispatch.products import torch_matmul

Factors = Sequence[Tensor]
Maybe = Tensor | None
Epilogue = tuple[float, Maybe, Maybe]  # scale, bias, residual
Wanted = Sequence[bool]  # whether the gradient of x is, and those of the factors
Found = list[Maybe]  # gradients of x and the factors, None where not wanted
PLAIN: Epilogue = (1.0, None, None)
Product = Callable[[Tensor, Factors], Tensor]


def movedim_product(x: Tensor, factors: Factors) -> Tensor:
    """v1: multiply the last index, move it to the front, and so on, until all have been last."""
    samples = samples_of(factors)
    sizes = [w.shape[-2] for w in factors]
    z = x.reshape(samples, x.shape[0] // max(samples, 1), *sizes)
    for w in reversed(factors):
        y = torch_matmul(z, w) if w.ndim == 2 else torch_matmul(z.flatten(1, -2), w)
        z = y.view(*z.shape[:-1], w.shape[-1]).movedim(-1, 2)
    return z.reshape(x.shape[0], width(factors, -1))


def transposed_product(x: Tensor, factors: Factors) -> Tensor:
    """v2: a row is slices of p numbers. w^T times the transposed slices puts q first, the next p last."""
    samples = samples_of(factors)
    rows = x.shape[0]
    z = x
    slices = x.numel() // max(samples, 1)
    for w in reversed(factors):
        slices //= w.shape[-2]
        z = torch_matmul(w.mT, z.reshape(samples, slices, w.shape[-2]).mT)
        slices *= w.shape[-1]
    columns = width(factors, -1)
    return z.reshape(samples, columns, rows // max(samples, 1)).mT.reshape(rows, columns)


def samples_of(factors: Factors) -> int:
    """How many samples have factors of their own; 1 where all share them."""
    return next((w.shape[0] for w in factors if w.ndim == 3), 1)


def seen(z: Tensor, w: Tensor, n: int, right: int) -> Tensor:
    """The array as a factor w (S, p, q) sees it, whose index has n places: (S, A, n, C)."""
    return z.reshape(w.shape[0], z.numel() // max(w.shape[0] * n * right, 1), n, right)


def width(factors: Factors, side: int) -> int:
    """The number of inputs (side -2) or outputs (side -1) of the layer."""
    return prod([w.shape[side] for w in factors])  # a list: torch.compile takes no generator


def with_epilogue(product: Tensor, epilogue: Epilogue) -> Tensor:
    scale, bias, residual = epilogue
    y = product if scale == 1.0 else product * scale
    y = y if bias is None else y + bias
    return y if residual is None else y + residual


PRODUCTS: dict[str, Product] = {"v1": movedim_product, "v2": transposed_product}
