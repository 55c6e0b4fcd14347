"""square: out = x * x elementwise; dx = 2 x dout. The smallest op, and the template for all others."""

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.device import cached
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, batched, save, transformed
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, driver, interop
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, Version, register

THREADS = 256
VECTOR_BYTES = 16


@planned("x")
def square(x: Any, *, version: str | None = None) -> Tensor:
    """x * x, elementwise. Differentiable any number of times.

        x = torch.randn(1000, device="cuda", requires_grad=True)
        cukern.square(x).sum().backward()  # x.grad is 2 * x

    Args:
        x: float16, bfloat16, float32 or float64, of any shape and strides: a tensor, or an array that
            supports DLPack. 16-bit types are computed in float32 and rounded once. CPU tensors use torch's
            operations, or the simulator.
        version: "v1" or "v2"; default: the fastest.

    Returns a new tensor of x's shape and dtype. Dense strides are kept. A view with gaps or overlaps is first
    copied to contiguous memory. Autocast does not change the dtype or the computation.

    Raises TypeError for another dtype; ValueError for an unknown version, or a tensor with the negative bit.
    """
    if type(x) is not Tensor:
        x = interop.to_torch("x", x)
    if version is not None:
        checks.version("square", version, VERSIONS)
    if not x.is_cuda:
        checks.dtype("x", x, checks.FLOATS)
        if not backend.simulates(x):
            if version is not None:
                checks.needs_gpu("square", version, x.device)
            return reference(x)
    if (x.requires_grad and torch.is_grad_enabled()) or transformed():
        return _apply(x, version or in_force.now)
    return _square(x, version or in_force.now)


def reference(x: Tensor) -> Tensor:
    return x * x


def _launch_square(x: Tensor, version: str) -> Tensor:
    if x.is_neg():
        checks.negative_bit("x")
    if x.is_nested:
        checks.strided("x", x)
    out = torch.empty_like(x)
    n = x.numel()
    if n == 0:
        return _fake(x)
    if not x.is_contiguous():
        x = _like(out, x)
    q, p = out.data_ptr(), x.data_ptr()
    launch, elements = _plan("forward", version, x.dtype, x.get_device(), (p | q) % VECTOR_BYTES)
    launch((-(-n // elements), 1, 1), _BLOCK, 0, q, p, n)
    return out


def _launch_square_backward(x: Tensor, dout: Tensor, version: str) -> Tensor:
    dx = torch.empty_like(x)
    n = x.numel()
    if n == 0:
        return dx
    x, dout = _like(dx, x), _like(dx, dout)
    r, p, q = dx.data_ptr(), x.data_ptr(), dout.data_ptr()
    launch, elements = _plan("backward", version, x.dtype, x.get_device(), (p | q | r) % VECTOR_BYTES)
    launch((-(-n // elements), 1, 1), _BLOCK, 0, r, p, q, n)
    return dx


def _like(out: Tensor, x: Tensor) -> Tensor:
    """x in out's memory order and without the negative bit, copied if necessary."""
    if (x.stride() == out.stride() or (x.is_contiguous() and out.is_contiguous())) and not x.is_neg():
        return x
    return torch.empty_like(out).copy_(x)


def _fake(x: Tensor, *_: Any) -> Tensor:
    checks.dtype("x", x, checks.FLOATS)
    return torch.empty_like(x)


_square = raw_op("_square(Tensor x, str version) -> Tensor", 1, _launch_square, _fake, sharding="* -> *")
_square_backward = raw_op(
    "_square_backward(Tensor x, Tensor dout, str version) -> Tensor",
    2,
    _launch_square_backward,
    _fake,
    sharding="*, * -> *",
)


class _Square(Differentiable):
    @staticmethod
    def forward(x, version):
        return _square(x, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.version = inputs
        save(ctx, x)

    @staticmethod
    def backward(ctx, dout):
        (x,) = ctx.saved_tensors
        return _apply_backward(x, dout, ctx.version), None

    @staticmethod
    def tangent(ctx, dx, _):
        (x,) = ctx.saved_tensors
        return _apply_backward(x, dx, ctx.version)

    @staticmethod
    def batch(info, in_dims, x, version):
        return _apply(x, version), in_dims[0]


class _SquareBackward(Differentiable):
    """2 x dout is bilinear, so its derivatives, and all higher ones, use the same kernel."""

    @staticmethod
    def forward(x, dout, version):
        return _square_backward(x, dout, version)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, dout, ctx.version = inputs
        save(ctx, x, dout)

    @staticmethod
    def backward(ctx, d):
        x, dout = ctx.saved_tensors
        dx = _apply_backward(d, dout, ctx.version) if ctx.needs_input_grad[0] else None
        ddout = _apply_backward(x, d, ctx.version) if ctx.needs_input_grad[1] else None
        return dx, ddout, None

    @staticmethod
    def tangent(ctx, dx, ddout, _):
        x, dout = ctx.saved_tensors
        return _apply_backward(dx, dout, ctx.version) + _apply_backward(x, ddout, ctx.version)

    @staticmethod
    def batch(info, in_dims, x, dout, version):
        x, dout = (batched(t, dim, info.batch_size) for t, dim in ((x, in_dims[0]), (dout, in_dims[1])))
        return _apply_backward(x, dout, version), 0


_apply, _apply_backward = apply_of(_Square), apply_of(_SquareBackward)

# ---- the versions: for each pass the kernel for a dtype and an alignment, and the elements per thread block

_V1, _V1_BWD = Template("square.cu", "square_v1"), Template("square.cu", "square_v1_bwd")
_V2, _V2_BWD = Template("square.cu", "square_v2"), Template("square.cu", "square_v2_bwd")
_BLOCK = (THREADS, 1, 1)


@cached(4096)
def _plan(
    pass_: str, version: str, dtype: torch.dtype, device: int, misalignment: int
) -> tuple[driver.Launch, int]:
    """The launch of a pass and the elements per block. `misalignment`: the addresses modulo VECTOR_BYTES,
    ORed.

    Cached, so that a call costs one lookup. The dtype is checked here, once.
    """
    checks.one_of("x", dtype, checks.FLOATS)
    chosen = choose("square", version, device)
    plan = _PLANS[chosen.forward][0] if pass_ == "forward" else _PLANS[chosen.backward][1]
    kernel, elements = plan(dtype, misalignment)
    return kernel.on(device), elements


def _scalar(template: Template) -> Callable[[torch.dtype, int], tuple[Kernel, int]]:
    return lambda dtype, misalignment: (template[dtype], THREADS)


def _vectors(template: Template) -> Callable[[torch.dtype, int], tuple[Kernel, int]]:
    """The widest vectors, up to VECTOR_BYTES, to which the addresses are aligned."""

    def choose_width(dtype: torch.dtype, misalignment: int) -> tuple[Kernel, int]:
        width = (misalignment & -misalignment or VECTOR_BYTES) // dtype.itemsize
        return template[dtype, width], THREADS * width

    return choose_width


def _v2_instances(dtype: torch.dtype) -> Iterable[Kernel]:
    widths = [w for w in (1, 2, 4, 8) if w * dtype.itemsize <= VECTOR_BYTES]
    return [template[dtype, width] for width in widths for template in (_V2, _V2_BWD)]


VERSIONS = {
    "v1": Version("one thread per element", lambda dtype: (_V1[dtype], _V1_BWD[dtype])),
    "v2": Version("16-byte vectors", _v2_instances),
}
_PLANS = {  # of the forward and of the backward
    "v1": (_scalar(_V1), _scalar(_V1_BWD)),
    "v2": (_vectors(_V2), _vectors(_V2_BWD)),
}

# ---- for the tools


def _cost(dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n = prod(dims)
    return {"fwd": Cost(2 * n * itemsize, n), "bwd": Cost(3 * n * itemsize, 2 * n)}


register(
    Case(
        name="square",
        op=Op("square", "square", VERSIONS),
        call=square,
        reference=reference,
        dims="SHAPE...",
        check_dims=((1,), (1023,), (64, 1000), (3, 5, 7)),
        sim_dims=((1,), (1023,), (64, 1000), (3, 5, 7)),
        bench_dims=((1 << 28,),),
        inputs=("x",),
        cost=_cost,
    )
)
