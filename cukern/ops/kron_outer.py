"""The backward of a layer of two factors of 128 x 128 on few rows: launches for what lies between the factors, from x and from the output's
gradient, one for the gradients of both, and one for that of x. See kernels_cu/common/kron_outer.cuh.
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
SIDE = 128
MOST_ROWS = 32  # of more, the launches of kron_backward.py fill a GPU as well
_STAGE = SIDE * (32 + 8 + 64 + 8)  # numbers of Outer4, where both operands' rows are padded


def takes(sizes: Sizes, rows: int, target: Target) -> bool:
    """Whether a layer's backward is one of these, on a GPU with clusters. (In TF32 the other launches are as fast.)"""
    exact = target.itemsize == 2 or (target.itemsize == 4 and not target.tensor)
    return sizes == ((SIDE, SIDE),) * 2 and rows <= MOST_ROWS and exact and target.aligned >= 16 and target.shared >= _shared(4)


def _shared(itemsize: int) -> int:
    return 2 * _STAGE * (6 if itemsize == 4 else 2)


def backward(x: Tensor, g: Tensor, factors: Sequence[Tensor], scale: float, wanted: bool) -> list[Tensor | None]:
    """The gradients of x (rows, 16384), if it is wanted, and of the two factors; two arrays of x's size besides."""
    left, right = (w[None] for w in factors)
    rows = x.shape[0]
    z = kron_v4.mode(x.view(1, rows * SIDE, SIDE, 1), right, 1.0)
    h = kron_v4.mode(g.view(1, rows, SIDE, SIDE), left.mT, 1.0)
    grads = [torch.empty_like(w, memory_format=torch.contiguous_format) for w in factors]
    launch = OUTER[(x.dtype,)].on(x.get_device())
    launch((128, 1, 1), (256, 1, 1), _shared(x.itemsize), *pointers(grads[1], grads[0], x, h, z, g), rows, scale)
    dx = kron_v4.mode(h.view(1, rows * SIDE, SIDE, 1), right.mT, scale).view(x.shape) if wanted else None
    return [dx, *grads]
