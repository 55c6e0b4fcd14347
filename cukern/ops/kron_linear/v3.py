"""v3 of kron_linear: a factor a launch, which is a GEMM whose rows are fibers, read from and written to their places.

Here an array is 4-D, (S, A, p, C), contiguous, and a factor (S, p, q) of any strides: see kernels_cu/kron_linear.cu. Each launch makes its
own output.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops.kron_linear import derivatives
from cukern.runtime import backend
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.tensors import pointers, wide

_V3, _V3_BWD = Template("kron_linear/kron_linear.cu", "kron_linear_v3"), Template("kron_linear/kron_linear.cu", "kron_linear_v3_bwd")
_V3_SUM = Template("kron_linear/kron_linear.cu", "kron_linear_v3_sum", pdl=True)
_BLOCK = (256, 1, 1)
_WIDTHS = 8, 64  # columns of a block's tile: the least that is enough, else the last
_PIECES = 512  # of a sum over fibers, at most: enough to fill every GPU
_PIECE = 256  # fibers in a piece, at least

Epilogue = tuple[float, Tensor | None, Tensor | None]  # scale, bias, residual
PLAIN: Epilogue = (1.0, None, None)


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


def contraction(z: Tensor, h: Tensor, scale: float = 1.0) -> Tensor:
    """out[s, k, j] = scale * sum over a and c of z[s, a, k, c] h[s, a, j, c], in pieces, always added in the same order."""
    samples, A, p, C = z.shape
    q, device = h.shape[2], z.get_device()
    if not A * C or not samples:
        return torch.zeros((samples, p, q), dtype=z.dtype, device=z.device)
    kind, side = wide(z.dtype), _tile(max(p, q))
    tiles = -(-p // side) * -(-q // side)
    piece = max(_PIECE, -(-A * C * tiles * samples // _PIECES))
    pieces = -(-A * C // piece)
    partials = torch.empty((samples, pieces, p, q), dtype=kind, device=z.device)
    grid = (samples * pieces * tiles, 1, 1)
    _V3_BWD[z.dtype, kind, side].on(device)(grid, _BLOCK, 0, *pointers(partials, z, h), A, p, q, C, pieces, piece)
    return sum_pieces(partials, z.dtype, scale)


def sum_pieces(partials: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """scale times the sum of the second index of partials, (samples, pieces, p, q)."""
    samples, pieces, p, q = partials.shape
    out = torch.empty((samples, p, q), dtype=dtype, device=partials.device)
    device, blocks = partials.get_device(), samples * -(-p * q // 32)
    launch = _V3_SUM[dtype, partials.dtype].on(device)
    launch((blocks, 1, 1), (32, 8, 1), backend.spread(0, blocks, device), *pointers(out, partials), p * q, pieces, scale)
    return out


def forward(x: Tensor, factors: Sequence[Tensor], epilogue: Epilogue) -> Tensor:
    """x (rows, prod p) times the factors, one launch each."""
    z, order = x, derivatives.plan(factors)
    for step in order:
        w = factors[step.factor]
        w = w if w.ndim == 3 else w[None]
        z = mode_product(derivatives.seen(z, w, step.p, step.right), w, epilogue if step is order[-1] else PLAIN)
    return z.view(x.shape[0], -1)


def backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], wanted: Sequence[bool], scale: float) -> list[Tensor | None]:
    return derivatives.gradients(x, g, factors, wanted, scale, lambda z, w, s: mode_product(z, w, (s, None, None)), contraction)


def _tile(n: int) -> int:
    return next((width for width in _WIDTHS if n <= width), _WIDTHS[-1])


def instances(dtype: torch.dtype) -> list[Kernel]:
    kind = wide(dtype)
    widths = [template for width in _WIDTHS for template in (_V3[dtype, width], _V3_BWD[dtype, kind, width])]
    return [*widths, _V3_SUM[dtype, kind]]
