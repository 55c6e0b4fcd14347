"""The backward of a layer of two factors of 128 x 128 on few rows: what lies between the factors is made, both ways, and from it all gradients
at once. See kernels_cu/common/kron_outer.cuh.
"""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from cukern.ops import kron_v3, kron_v4
from cukern.ops.kron_groups import Target
from cukern.ops.kron_plan import Sizes
from cukern.runtime.kernel import Template

OUTER = Template("kron_linear.cu", "kron_linear_v4_outer_bwd", pdl=True)
SIZES: Sizes = ((128, 128), (128, 128))
MOST_ROWS = 32  # which fill the GPU
_THREADS = 256, 1, 1
_CLUSTERS = 200 << 10  # bytes of a block's shared memory: a GPU that has more has clusters


def takes(sizes: Sizes, rows: int, target: Target) -> bool:
    """Whether a layer's backward is one of these. (In TF32 the other launches are as fast.)"""
    exact = target.itemsize == 2 or (target.itemsize == 4 and not target.tensor)
    return sizes == SIZES and rows <= MOST_ROWS and exact and target.aligned >= 16 and target.shared >= _CLUSTERS


def backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], scale: float) -> list[Tensor | None]:
    """The gradients of x (rows, 16384) and of the two factors; two arrays of x's size besides."""
    left, right = (w[None] for w in factors)
    rows = x.shape[0]
    z = kron_v4.mode(x.view(1, rows * 128, 128, 1), right, 1.0)
    h = kron_v4.mode(g.view(1, rows, 128, 128), left.mT, 1.0)
    partials = torch.empty((2, ceil(rows / 4), 128, 128), dtype=torch.float32, device=x.device)
    grid, shared = (16 * partials.shape[1], 1, 1), max(2 * 128 * 72 * (6 if x.itemsize == 4 else 2), 128 * 128 * 4)
    OUTER[(x.dtype,)].on(x.get_device())(grid, _THREADS, shared, *kron_v3.pointers(partials, x, h, z, g), rows)
    sums = kron_v3.sum_pieces(partials, x.dtype, scale)
    dx = kron_v4.mode(h.view(1, rows * 128, 128, 1), right.mT, scale)
    return [dx.view(x.shape), sums[0], sums[1]]
