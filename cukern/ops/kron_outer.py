"""The backward of a layer of two factors of 128 x 128 on few rows: what lies between the factors is made, both ways, and from it all gradients
at once. See kernels_cu/common/kron_outer.cuh.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cukern.ops import kron_v4
from cukern.ops.kron_groups import Target
from cukern.ops.kron_plan import Sizes
from cukern.ops.kron_v3 import pointers
from cukern.runtime.kernel import Template

OUTER = Template("kron_linear.cu", "kron_linear_v4_outer_bwd", pdl=True)
SIZES: Sizes = ((128, 128), (128, 128))
MOST_ROWS = 32  # of more, tiles of all rows' sums are too few
_STAGE = 128 * (32 + 8 + 64 + 8)  # numbers


def takes(sizes: Sizes, rows: int, target: Target) -> bool:
    """Whether a layer's backward is one of these. In TF32 the other launches are as fast."""
    return sizes == SIZES and rows <= MOST_ROWS and target.itemsize <= 4 and (target.itemsize == 2 or not target.tensor) and _fits(target)


def _fits(target: Target) -> bool:
    return target.aligned >= 16 and target.shared >= _shared(4)


def _shared(itemsize: int) -> int:
    return 2 * _STAGE * (6 if itemsize == 4 else 2)


def backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], scale: float) -> list[Tensor | None]:
    """The gradients of x (rows, 16384) and of the two factors; two arrays of x's size besides."""
    left, right = (w[None] for w in factors)
    rows = x.shape[0]
    z = kron_v4.mode(x.view(1, rows * 128, 128, 1), right, 1.0)
    h = kron_v4.mode(g.view(1, rows, 128, 128), left.mT, 1.0)
    grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in factors]
    OUTER[(x.dtype,)].on(x.get_device())(
        (128, 1, 1), (256, 1, 1), _shared(x.itemsize), *pointers(grads[1], grads[0], x, h, z, g), rows, scale
    )  # fmt: skip
    dx = kron_v4.mode(h.view(1, rows * 128, 128, 1), right.mT, scale)
    return [dx.view(x.shape), *grads]
