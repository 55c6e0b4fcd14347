"""square as a Triton tutorial would write it: one program per row. Imported only where Triton is
installed."""

import torch
import triton
import triton.language as tl

_LONGEST_ROW = 16384


@triton.jit
def _kernel(out, x, dout, columns, n, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * columns + column
    mask = (column < columns) & (at < n)
    value = tl.load(x + at, mask=mask)
    if BACKWARD:
        tl.store(out + at, 2 * value * tl.load(dout + at, mask=mask), mask=mask)
    else:
        tl.store(out + at, value * value, mask=mask)


def _launch(x: torch.Tensor, dout: torch.Tensor | None = None) -> torch.Tensor:
    """One program per row: the last dimension, or 4096 elements if that is longer than _LONGEST_ROW."""
    out, n = torch.empty_like(x), x.numel()
    columns = x.shape[-1] if x.ndim and x.shape[-1] <= _LONGEST_ROW else 4096
    block = triton.next_power_of_2(columns)
    grid, warps = (triton.cdiv(n, columns),), min(max(block // 512, 1), 8)
    _kernel[grid](
        out,
        x,
        x if dout is None else dout,
        columns,
        n,
        BACKWARD=dout is not None,
        BLOCK=block,
        num_warps=warps,
    )
    return out


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _launch(x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return _launch(x, dout)


def square(x: torch.Tensor) -> torch.Tensor:
    """x * x of a contiguous tensor with at least one element."""
    return _Square.apply(x)
