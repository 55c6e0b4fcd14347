"""square: out = x * x elementwise; dx = 2 x dout. The smallest op, and the pattern of all others."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch

from cukern.runtime import backend, checks, interop
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Cost, Op, Version, apply_of, choose, raw_op, register

THREADS = 256
VECTOR_BYTES = 16


def square(x: Any, *, version: str | None = None) -> torch.Tensor:
    """x * x, elementwise, differentiable any number of times.

    Args:
        x: float16, bfloat16, float32 or float64, of any shape and strides: a tensor, or an array that speaks DLPack. 16-bit types are
            computed in float32 and rounded once. A tensor that is not on a GPU goes to the plain torch reference.
        version: "v1" or "v2"; by default the fastest.

    Returns a new tensor of x's shape and dtype. Dense strides are kept; a view with gaps or overlaps is first copied to contiguous memory.

    Raises TypeError for another dtype, ValueError for a version that there is not, or a tensor with the negative bit.
    """
    if type(x) is not torch.Tensor:
        x = interop.to_torch("x", x)
    if x.dtype not in _DTYPES:
        checks.dtype("x", x, checks.FLOATS)
    if version is not None and version not in VERSIONS:
        checks.unknown_version("square", version, VERSIONS)
    if not x.is_cuda:
        if version is not None:
            checks.needs_gpu("square", version, x.device)
        checks.dtype("x", x, checks.FLOATS)
        return reference(x)
    if x.requires_grad and torch.is_grad_enabled():
        return _apply(x, version or "")
    return _square(x, version or "")


def reference(x: torch.Tensor) -> torch.Tensor:
    return x * x


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, version):
        ctx.save_for_backward(x)
        ctx.version = version
        return _square(x, version)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return _SquareBackward.apply(x, dout, ctx.version), None


class _SquareBackward(torch.autograd.Function):
    """B(x, dout) = 2 x dout is bilinear: its gradients are B again, so every higher derivative is this kernel."""

    @staticmethod
    def forward(ctx, x, dout, version):
        ctx.save_for_backward(x, dout)
        ctx.version = version
        return _square_backward(x, dout, version)

    @staticmethod
    def backward(ctx, d):
        x, dout = ctx.saved_tensors
        dx = _SquareBackward.apply(d, dout, ctx.version) if ctx.needs_input_grad[0] else None
        ddout = _SquareBackward.apply(x, d, ctx.version) if ctx.needs_input_grad[1] else None
        return dx, ddout, None


def _launch_square(x: torch.Tensor, version: str) -> torch.Tensor:
    if x.is_neg():
        checks.negative_bit("x")
    out = torch.empty_like(x)
    n = x.numel()
    if n:
        if not x.is_contiguous():
            x = _laid_out_as(out, x)
        device = x.get_device()
        choose("square", version, device).forward(out, x, n, device)
    return out


def _launch_square_backward(x: torch.Tensor, dout: torch.Tensor, version: str) -> torch.Tensor:
    dx = torch.empty_like(x)
    n = x.numel()
    if n:
        device = x.get_device()
        choose("square", version, device).backward(dx, _laid_out_as(dx, x), _laid_out_as(dx, dout), n, device)
    return dx


def _laid_out_as(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x, copied if its elements do not lie in memory in the order of out's, or if they lie there negated."""
    if (x.stride() == out.stride() or (x.is_contiguous() and out.is_contiguous())) and not x.is_neg():
        return x
    return torch.empty_like(out).copy_(x)


def _fake(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


_square = raw_op("_square(Tensor x, str version) -> Tensor", 1, _launch_square, _fake)
_square_backward = raw_op(
    "_square_backward(Tensor x, Tensor dout, str version) -> Tensor",
    2,
    _launch_square_backward,
    _fake,
)
_apply = apply_of(_Square)
_DTYPES = frozenset(checks.FLOATS)

# ---- the ladder

_V1, _V1_BWD = Template("square.cu", "square_v1"), Template("square.cu", "square_v1_bwd")
_V2, _V2_BWD = Template("square.cu", "square_v2"), Template("square.cu", "square_v2_bwd")
_BLOCK = (THREADS, 1, 1)


class _Plans(dict[tuple[torch.dtype, int, int], tuple[backend.Launch, int]]):
    """By dtype, device and misalignment (bytes past a multiple of 16): the instance with the widest vectors, and elements a block."""

    def __init__(self, template: Template):
        self.template = template

    def __missing__(self, key: tuple[torch.dtype, int, int]) -> tuple[backend.Launch, int]:
        dtype, device, misalignment = key
        width = (misalignment & -misalignment or VECTOR_BYTES) // dtype.itemsize
        self[key] = self.template[dtype, width].on(device), THREADS * width
        return self[key]


_V2_PLANS, _V2_BWD_PLANS = _Plans(_V2), _Plans(_V2_BWD)


def _v1(out: torch.Tensor, x: torch.Tensor, n: int, device: int) -> None:
    _V1[x.dtype].on(device)((-(-n // THREADS), 1, 1), _BLOCK, 0, out.data_ptr(), x.data_ptr(), n)


def _v1_backward(dx: torch.Tensor, x: torch.Tensor, dout: torch.Tensor, n: int, device: int) -> None:
    _V1_BWD[x.dtype].on(device)((-(-n // THREADS), 1, 1), _BLOCK, 0, dx.data_ptr(), x.data_ptr(), dout.data_ptr(), n)


def _v2(out: torch.Tensor, x: torch.Tensor, n: int, device: int) -> None:
    q, p = out.data_ptr(), x.data_ptr()
    launch, elements = _V2_PLANS[x.dtype, device, (p | q) % VECTOR_BYTES]
    launch((-(-n // elements), 1, 1), _BLOCK, 0, q, p, n)


def _v2_backward(dx: torch.Tensor, x: torch.Tensor, dout: torch.Tensor, n: int, device: int) -> None:
    r, p, q = dx.data_ptr(), x.data_ptr(), dout.data_ptr()
    launch, elements = _V2_BWD_PLANS[x.dtype, device, (p | q | r) % VECTOR_BYTES]
    launch((-(-n // elements), 1, 1), _BLOCK, 0, r, p, q, n)


def _v1_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    return _V1[dtype], _V1_BWD[dtype]


def _v2_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    widths = [w for w in (1, 2, 4, 8) if w * dtype.itemsize <= VECTOR_BYTES]
    return [template[dtype, width] for width in widths for template in (_V2, _V2_BWD)]


VERSIONS = {
    "v1": Version("one thread an element", _v1, _v1_backward, _v1_instances),
    "v2": Version("16-byte vectors", _v2, _v2_backward, _v2_instances),
}


def _make(dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    return (torch.randn(*dims, dtype=dtype, device=device),)


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n = prod(dims)
    return {"fwd": Cost(2 * n * itemsize, n), "bwd": Cost(3 * n * itemsize, 2 * n)}


register(
    Op(
        name="square",
        stem="square",
        function=square,
        reference=reference,
        versions=VERSIONS,
        dtypes=checks.FLOATS,
        dims="SHAPE...",
        check_dims=((1,), (1023,), (64, 1000), (3, 5, 7)),
        bench_dims=((1 << 28,),),
        make=_make,
        inputs=("x",),
        cost=_cost,
        bound="memory",
    )
)
