"""The derivatives of kron_linear, in terms of two operations: a mode product and its gradient, the contraction.

With Z_0 = x and Z_i = Z_(i-1) x_i W_i, the layer is y = Z_n. With H_n = dy and H_(i-1) = H_i x_i W_i^T, the gradients are dx = H_0 and
dW_i = the contraction of Z_(i-1) and H_i over every index but i, in which alone they differ. Only x and the factors are kept; the Z are
multiplied again. The tangents are dZ_i = dZ_(i-1) x_i W_i + Z_(i-1) x_i dW_i.

The operations are the kernels, or the same wrapped in autograd: then these derivatives can be differentiated in turn, any number of times.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from cukern.ops.kron_linear.plan import Step, steps
from cukern.ops.kron_linear.reference import width

Mode = Callable[[Tensor, Tensor, float], Tensor]  # z (S, A, p, C), w (S, p, q), scale -> (S, A, q, C)
Contract = Callable[[Tensor, Tensor, float], Tensor]  # z (S, A, p, C), h (S, A, q, C), scale -> (S, p, q)


def plan(factors: Sequence[Tensor]) -> tuple[Step, ...]:
    return steps(tuple((w.shape[-2], w.shape[-1]) for w in factors))


def seen(z: Tensor, w: Tensor, n: int, right: int) -> Tensor:
    """The array as a factor sees it, whose index has n places: (S, A, n, C)."""
    return z.reshape(w.shape[0], z.numel() // max(w.shape[0] * n * right, 1), n, right)


def gradients(
    x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float, mode: Mode, contract: Contract
) -> list[Tensor | None]:
    """The gradients of x and of each factor, those that are wanted, for the gradient g of the output."""
    order, ws = plan(factors), [w if w.ndim == 3 else w[None] for w in factors]
    wanted_x, wanted_w = wanted[0], wanted[1:]
    last = max((n for n, s in enumerate(order) if wanted_w[s.factor]), default=0)  # no Z after it is of use
    zs = [x]
    for s in order[:last]:
        zs.append(mode(seen(zs[-1], ws[s.factor], s.p, s.right), ws[s.factor], 1.0))
    found: list[Tensor | None] = [None] * len(wanted)
    h = g
    for n, s in reversed(list(enumerate(order))):
        w = ws[s.factor]
        h = seen(h, w, s.q, s.right)
        if wanted_w[s.factor]:
            found[s.factor + 1] = contract(seen(zs[n], w, s.p, s.right), h, scale).reshape(factors[s.factor].shape)
        if not wanted_x and not any(wanted_w[earlier.factor] for earlier in order[:n]):
            return found
        h = mode(h, w.mT, scale if n == 0 else 1.0)
    found[0] = h.reshape(x.shape)
    return found


def tangent(x: Tensor, factors: Sequence[Tensor], dx: Tensor | None, dws: Sequence[Tensor | None], scale: float, mode: Mode) -> Tensor:
    """The tangent of the output, for those of x and of the factors; None is zero."""
    z, dz = x, dx
    for s in plan(factors):
        w, dw = factors[s.factor], dws[s.factor]
        if w.ndim == 2:
            w, dw = w[None], None if dw is None else dw[None]
        parts = [] if dz is None else [mode(seen(dz, w, s.p, s.right), w, 1.0)]
        parts += [] if dw is None else [mode(seen(z, w, s.p, s.right), dw, 1.0)]
        z, dz = mode(seen(z, w, s.p, s.right), w, 1.0), sum(parts[1:], parts[0]) if parts else None
    return (z.new_zeros(z.shape) if dz is None else dz * scale).reshape(x.shape[0], width(factors, -1))
