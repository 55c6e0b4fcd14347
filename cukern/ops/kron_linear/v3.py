"""v3 of kron_linear: a factor a launch, which is a GEMM whose rows are fibers, read from and written to their places.

Here an array is 4-D, (S, A, p, C), contiguous, and a factor (S, p, q) of any strides: see kernels_cu/kron_linear.cu. Each launch makes its
own output. cuBLAS makes the gradients of factors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.kron_linear import cublas
from cukern.ops.kron_linear.plan import steps_of
from cukern.ops.kron_linear.reference import PLAIN, Epilogue, seen
from cukern.runtime.kernel import Kernel, Template

_V3 = Template("kron_linear/kron_linear.cu", "kron_linear_v3")
_BLOCK = (256, 1, 1)
_WIDTHS = 8, 64  # columns of a block's tile: the least that is enough, else the last


def mode_product(z: Tensor, w: Tensor, epilogue: Epilogue = PLAIN) -> Tensor:
    """out[s, a, j, c] = scale * sum over k of z[s, a, k, c] w[s, k, j], plus bias and residual: one launch."""
    samples, A, p, C = z.shape
    q, (scale, bias, residual) = w.shape[2], epilogue
    out = torch.empty((samples, A, q, C), dtype=z.dtype, device=z.device)
    if out.numel():
        columns = _tile(q)
        grid = samples * -(-A * C // (4096 // columns)) * -(-q // columns)
        pointers = (0 if t is None else t.data_ptr() for t in (out, z, w, bias, residual))
        launch = _V3[z.dtype, columns].on(z.get_device())
        launch((grid, 1, 1), _BLOCK, 0, *pointers, A, p, q, C, *w.stride(), scale, 1 if bias is None else bias.numel())
    return out


def forward(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> Tensor:
    """x (rows, prod p) times the factors, one launch each."""
    z, order = x, steps_of(factors)
    for step in order:
        w = factors[step.factor]
        w = w if w.ndim == 3 else w[None]
        z = mode_product(seen(z, w, step.p, step.right), w, epilogue if step is order[-1] else PLAIN)
    return z.view(x.shape[0], -1)


def backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float) -> list[Tensor | None]:
    """With Z_0 = x and Z_i = Z_(i-1) x_i W_i the layer is Z_n. With H_n = g and H_(i-1) = H_i x_i W_i^T, dx is H_0, and dW_i is the sum of
    Z_(i-1) H_i over every index but i. The Z are computed again."""
    order, ws = steps_of(factors), [w if w.ndim == 3 else w[None] for w in factors]
    last = max((n for n, s in enumerate(order) if wanted[s.factor + 1]), default=0)  # no Z after it is of use
    zs, h = [x], g
    for s in order[:last]:
        zs.append(mode_product(seen(zs[-1], ws[s.factor], s.p, s.right), ws[s.factor]))
    found: list[Tensor | None] = [None] * len(wanted)
    for n, s in reversed(list(enumerate(order))):
        w = ws[s.factor]
        h = seen(h, w, s.q, s.right)
        if wanted[s.factor + 1]:
            found[s.factor + 1] = cublas.contraction(seen(zs[n], w, s.p, s.right), h, scale).reshape(factors[s.factor].shape)
        if not wanted[0] and not any(wanted[earlier.factor + 1] for earlier in order[:n]):
            return found
        h = mode_product(h, w.mT, (1.0 if n else scale, None, None))
    found[0] = h.reshape(x.shape)
    return found


def _tile(n: int) -> int:
    return next((width for width in _WIDTHS if n <= width), _WIDTHS[-1])


def instances(dtype: torch.dtype) -> list[Kernel]:
    return [_V3[dtype, width] for width in _WIDTHS]
