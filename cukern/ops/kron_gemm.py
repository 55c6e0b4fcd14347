"""One factor of kron_linear by torch's matmul, which is cuBLAS: of 16 bits and in TF32 large ones, and those whose sizes v4's kernels
have no good tiles for. It needs no more memory than the output."""

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cukern.ops.kron_plan import Step
from cukern.ops.kron_v3 import Epilogue

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


@torch.no_grad()
def mode_product(z: Tensor, w: Tensor, step: Step, epilogue: Epilogue, out: Tensor) -> Tensor:
    """out (rows, numbers) = scale * z (rows, numbers) times the factor w of a step + bias + residual; all but w contiguous."""
    scale, bias, residual = epilogue
    added = [t for t in (residual, bias) if t is not None]
    beta = int(bool(added))
    if beta:
        out.copy_(added[0]) if len(added) == 1 else torch.add(*added, out=out)
    if not (_dense(w.stride(), w.shape[1]) or _dense(w.stride()[::-1], w.shape[0])):
        w = w.contiguous()  # one matrix; cuBLAS would have a copy made for each of a batch
    if step.right == 1:
        y = out.view(-1, step.q)
        torch.addmm(y, z.view(-1, step.p), w, beta=beta, alpha=scale, out=y)
    else:
        x, y = z.view(-1, step.p, step.right), out.view(-1, step.q, step.right)
        torch.baddbmm(y, w.mT.expand(x.shape[0], -1, -1), x, beta=beta, alpha=scale, out=y)
    return out


def _dense(strides: Sequence[int], columns: int) -> bool:
    """Whether the numbers of a row lie side by side, and rows do not overlap."""
    return strides[1] == 1 and strides[0] >= columns
