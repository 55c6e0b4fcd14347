"""The versions of gelu: how each launches its kernels. Tensors are (rows, cols) with column stride 1; the written ones are contiguous.

`forward(out, x, up, bias, function)`; `backward(dx, dup, x, up, bias, dout, function, bias_grad)` returns dbias. up, bias may be None.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Version
from cukern.runtime.tensors import pointers, wide

FUNCTIONS = {"none": 0, "tanh": 1, "silu": 2}  # as in gelu.cu
THREADS, WARPS, VECTOR_BYTES = 256, 8, 16  # WARPS: of a block of gelu_bias_bwd, as in gelu.cu
BLOCKS = 2048  # at most, of gelu_bias_bwd: enough for any GPU, with few partial sums
_FORWARD, _BACKWARD, _BIAS_BWD = (Template("gelu.cu", f"gelu{name}", pdl=True) for name in ("", "_bwd", "_bias_bwd"))


def _sizes(bias: Tensor | None, x: Tensor, *others: Tensor | None) -> tuple[int, ...]:
    """Rows, columns and row strides. Contiguous tensors without a bias are one row."""
    if bias is None and all(t is None or t.is_contiguous() for t in (x, *others)):
        return 1, x.numel(), 0, *(0 for _ in others)
    return *x.shape, x.stride(0), *(0 if t is None else t.stride(0) for t in others)


def _aligned(itemsize: int, sizes: tuple[int, ...], *tensors: Tensor | None) -> bool:
    """True if the tensors can be accessed in whole vectors."""
    starts = (t.data_ptr() * itemsize // t.itemsize for t in tensors if t is not None)  # a vector of a float32 bias may be longer
    return all(n % VECTOR_BYTES == 0 for n in (*starts, *(size * itemsize for size in sizes[1:])))


def _launch(template: Template, vectors: bool, sizes: tuple[int, ...], x: Tensor, bias: Any, function: str, *tensors: Any) -> None:
    """Launch with a vector per thread if `vectors` and if the tensors allow it, else with an element. `tensors`: the kernel's arguments."""
    width = VECTOR_BYTES // x.itemsize if vectors and _aligned(x.itemsize, sizes, *tensors) else 1
    kernel = template[x.dtype, (x if bias is None else bias).dtype, FUNCTIONS[function], width]
    kernel.on(x.get_device())((-(-x.numel() // (THREADS * width)), 1, 1), (THREADS, 1, 1), 0, *pointers(*tensors), *sizes)


def _forward(vectors: bool, out: Tensor, x: Tensor, up: Any, bias: Any, function: str) -> None:
    _launch(_FORWARD, vectors, _sizes(bias, x, up), x, bias, function, out, x, up, bias)


def _backward(
    vectors: bool, dx: Tensor, dup: Any, x: Tensor, up: Any, bias: Any, dout: Tensor, function: str, bias_grad: bool
) -> Tensor | None:
    if vectors and bias_grad and _aligned(x.itemsize, _sizes(bias, x, dout), dx, x, bias, dout):
        terms = _bias_backward(dx, x, bias, dout, function)
    else:
        _launch(_BACKWARD, vectors, _sizes(bias, x, up, dout), x, bias, function, dx, dup, x, up, bias, dout)
        terms = dx
    return terms.sum(0, dtype=wide(dx.dtype)).to(bias.dtype) if bias_grad else None


def _bias_backward(dx: Tensor, x: Tensor, bias: Tensor, dout: Tensor, function: str) -> Tensor:
    """Write dx, and return partial sums of its columns. The grid depends only on the shape, so the sums are the same on every GPU."""
    (rows, cols), tiles = x.shape, -(-x.shape[1] * x.itemsize // (32 * VECTOR_BYTES))
    height = max(-(-rows * tiles // BLOCKS), 4 * WARPS)  # rows of a block
    chunks = -(-rows // height)
    partials = torch.empty((chunks, cols), dtype=wide(x.dtype), device=x.device)
    kernel = _BIAS_BWD[x.dtype, bias.dtype, FUNCTIONS[function]]
    sizes = rows, cols, x.stride(0), dout.stride(0), height
    kernel.on(x.get_device())((chunks * tiles, 1, 1), (32, WARPS, 1), 0, *pointers(dx, partials, x, bias, dout), *sizes)
    return partials


def _instances(vectors: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    """There is no silu with a bias."""
    for bias in {dtype, torch.float32 if dtype.itemsize == 2 else dtype}:
        for name, function in FUNCTIONS.items():
            if name != "silu" or bias == dtype:
                widths = (1, VECTOR_BYTES // dtype.itemsize)[: 1 + vectors]
                yield from (template[dtype, bias, function, width] for template in (_FORWARD, _BACKWARD) for width in widths)
            if name != "silu" and vectors:
                yield _BIAS_BWD[dtype, bias, function]


VERSIONS = {
    name: Version(idea, partial(_forward, vectors), partial(_backward, vectors), partial(_instances, vectors))
    for name, idea, vectors in (
        ("v1", "one thread per element; the bias gradient by torch's sum", False),
        ("v2", "16-byte vectors; the bias gradient from partial sums", True),
    )
}
