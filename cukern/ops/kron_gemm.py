"""One factor of kron_linear by torch's matmul, which is cuBLAS: of 16 bits and in TF32 large ones, and those whose sizes v4's kernels
have no good tiles for. It needs no more memory than the output."""

from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cukern.ops.kron_plan import Step

if TYPE_CHECKING:
    from cukern.ops.kron_groups import Target

# On one H200, 2048 rows of two factors, bfloat16, us by torch and by v4's kernel: (168, 176) the right one 73, the left one 93, both by
# kernels 321; (128, 224) 68, 64, 200; (64, 86) 32, 39, 95; (128, 148) 135, 119, 196.
START_US = 3.0
SM_BYTES_US = {2: 24_000.0, 4: 19_000.0, 8: 8_000.0}  # of a multiprocessor, by the size of a number
UNALIGNED = {2: 0.38, 4: 0.6, 8: 1.0}  # of that, where rows do not begin at multiples of 16 bytes; else:
SIDES = {True: (32, 1), False: (64, 64)}  # what a matrix's rows and columns are rounded up to: if nothing is to the right, or else
MARGIN, LARGE = 1.2, 128  # by so much it must be faster; not for more rows or columns, of which kernels take longer than is planned


def us(step: Step, rows: int, target: "Target") -> float:
    """About how long it takes."""
    last, size = step.right == 1, target.itemsize
    moved: float = rows * step.left * step.right * (step.p + step.q) * size
    if all(n * size % 16 == 0 for n in (step.p, step.q, *(() if last else (step.right,)))):
        high, wide = SIDES[last]
        moved *= ceil(step.q / high) * high / step.q * (ceil(step.right / wide) * wide / step.right)
    else:
        moved /= UNALIGNED[size]
    return START_US + moved / (target.multiprocessors * SM_BYTES_US[size])


def faster(step: Step, rows: int, target: "Target", us_of_kernel: float) -> bool:
    """Whether it is chosen, where there is a kernel. Strict float32 never is: there cuBLAS has no tensor cores."""
    margin = 1.0 if max(step.p, step.q) > LARGE else MARGIN
    return target.itemsize < 8 and (target.tensor or target.itemsize == 2) and margin * us(step, rows, target) < us_of_kernel


def mode_product(z: Tensor, w: Tensor, step: Step, out: Tensor) -> Tensor:
    """out (rows, numbers) = z (rows, numbers), both contiguous, times the factor w of a step."""
    if z.is_cuda:
        torch.cuda.set_device(z.get_device())  # a thread of autograd's may have no context yet, of which cuBLAS would warn
    if step.right == 1:
        torch.mm(z.view(-1, step.p), w, out=out.view(-1, step.q))
    else:
        torch.matmul(w.mT, z.view(-1, step.p, step.right), out=out.view(-1, step.q, step.right))
    return out
