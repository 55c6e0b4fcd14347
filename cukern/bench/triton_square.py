"""The peer that a Triton tutorial would write for square: one program a row. Imported only where Triton is."""

import torch
import triton
import triton.language as tl

_LONGEST_ROW = 16384


@triton.jit
def _forward(out, x, columns, n, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * columns + column
    mask = (column < columns) & (at < n)
    value = tl.load(x + at, mask=mask)
    tl.store(out + at, value * value, mask=mask)


@triton.jit
def _backward(dx, x, dout, columns, n, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = tl.program_id(0).to(tl.int64) * columns + column
    mask = (column < columns) & (at < n)
    tl.store(dx + at, 2 * tl.load(x + at, mask=mask) * tl.load(dout + at, mask=mask), mask=mask)


def _launch(kernel, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Rows are the last dimension, or, where that is too long for one program, pieces of the whole."""
    n = out.numel()
    columns = out.shape[-1] if out.ndim and out.shape[-1] <= _LONGEST_ROW else 4096
    block = triton.next_power_of_2(columns)
    kernel[(triton.cdiv(n, columns),)](out, *inputs, columns, n, BLOCK=block, num_warps=min(max(block // 512, 1), 8))
    return out


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return _launch(_forward, torch.empty_like(x), x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return _launch(_backward, torch.empty_like(x), x, dout)


def square(x: torch.Tensor) -> torch.Tensor:
    """x * x of a contiguous tensor with at least one element."""
    return _Square.apply(x)
