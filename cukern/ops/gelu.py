"""gelu of x + bias, swiglu and geglu: f(x + bias) * up, elementwise, with f = gelu or silu, and the gradients
of x, up and bias."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import dispatched, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, Version, normal, register
from cukern.runtime.tensors import (
    VECTOR_BYTES,
    aligned,
    as_matrix,
    empty_like,
    mergeable,
    pointers,
    readable,
    row_strides,
    wide,
)

FUNCTIONS = {"none": 0, "tanh": 1, "silu": 2, "sum": 3}  # as in gelu.cu; "sum" only adds dout
THREADS = 256
CHUNKS, HEIGHT = 256, 64  # of gelu_bias_bwd: the most chunks of rows, and the fewest rows of one


@planned("x", "bias")
def gelu(x: Any, bias: Any = None, *, approximate: str = "none", version: str | None = None) -> Tensor:
    """torch.nn.functional.gelu(x + bias) in one kernel. Differentiable any number of times.

        x = torch.randn(8, 3072, device="cuda", requires_grad=True)
        bias = torch.zeros(3072, device="cuda", requires_grad=True)
        cukern.gelu(x, bias, approximate="tanh").sum().backward()

    Args:
        x: (..., C), float16, bfloat16, float32 or float64. Strides, arrays, CPU tensors, autocast: see
            `help(cukern)`.
        bias: (C,) or None, of any of these dtypes, on x's device.
        approximate: "none" for x Phi(x), or "tanh" for GPT-2's x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715
            x^3))).
        version: "v1" or "v2"; default: the fastest.

    Returns a new tensor of x's shape and dtype. Without a bias, dense strides are kept, else it is
    contiguous. A kernel computes the gradients, or torch's operations in torch.func transforms and with
    create_graph=True.

    Raises TypeError for another dtype or an option that is not a str; ValueError for a bias that does not fit
    or is on another device, and for an unknown option. Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    x = interop.floats("x", x)
    bias = interop.of_columns("bias", bias, x, checks.FLOATS)
    bias = bias.to(wide(x.dtype)) if bias is not None and bias.dtype != x.dtype else bias
    return _call("gelu", checks.choice("approximate", approximate, ("none", "tanh")), version, x, None, bias)


@planned("gate", "up")
def swiglu(gate: Any, up: Any, *, version: str | None = None) -> Tensor:
    """torch.nn.functional.silu(gate) * up in one kernel. Differentiable any number of times.

        gate, up = torch.randn(8, 2 * 3072, device="cuda", requires_grad=True).chunk(2, -1)
        cukern.swiglu(gate, up).sum().backward()

    gate and up are (..., C), of one shape, device and, except under autocast, dtype. The halves of one
    tensor, as above, are read in place. Returns a new tensor, of their strides if both are alike and dense,
    else contiguous. Dtypes, copies, `version` and errors as in `gelu`. Source: Shazeer, arXiv 2002.05202.
    """
    return _call("swiglu", "silu", version, *_pair(gate, up), None)


def _pair(gate: Any, up: Any) -> tuple[Tensor, Tensor]:
    gate = interop.floats("gate", gate)
    if autocast.enabled(gate):
        gate, up = autocast.widest(gate, interop.floats("up", up))
    return gate, interop.like("up", up, "gate", gate)


@planned("gate", "up")
def geglu(gate: Any, up: Any, *, approximate: str = "none", version: str | None = None) -> Tensor:
    """gelu(gate) * up in one kernel. Differentiable any number of times.

        gate, up = torch.randn(8, 2 * 3072, device="cuda", requires_grad=True).chunk(2, -1)
        cukern.geglu(gate, up, approximate="tanh").sum().backward()

    Arguments and results as in `swiglu`, `approximate` as in `gelu`.
    """
    return _call(
        "geglu", checks.choice("approximate", approximate, ("none", "tanh")), version, *_pair(gate, up), None
    )


def _call(
    op: str, function: str, version: str | None, x: Tensor, up: Tensor | None, bias: Tensor | None
) -> Tensor:
    checks.version(op, version, VERSIONS)
    if backend.uses_torch(op, version, x):
        return _on_cpu(function, x, up, bias)
    run = _apply if watched(x, up, bias) else _gelu
    if x.ndim >= 2:
        if _dense_order(x, up, bias) is None:
            x, up = mergeable(x), None if up is None else mergeable(up)
        return run(x, up, bias, function, version or in_force.now)
    rows = (None if t is None else t.reshape(1, t.numel()) for t in (x, up))
    return run(
        *rows, None if bias is None else bias.reshape(bias.numel()), function, version or in_force.now
    ).view(x.shape)


def _dense_order(x: Tensor, up: Tensor | None, bias: Tensor | None) -> Sequence[int] | None:
    """The dimensions of x from the outermost if x is dense, such as channels_last, `up` is alike, and there
    is no bias; else None."""
    if bias is not None:
        return None
    if x.is_contiguous():
        return range(x.ndim) if up is None or up.is_contiguous() else None
    if up is not None and up.stride() != x.stride():
        return None
    order = x.dim_order()
    return order if x.permute(order).is_contiguous() else None


def _matrices(order: Sequence[int] | None, *tensors: Tensor | None) -> list[Tensor | None]:
    """One row in the order of memory, or without an order (rows, columns); readable, as kernels read them."""
    if order is None:
        return [None if t is None else readable(as_matrix(t)) for t in tensors]
    return [None if t is None else readable(t.permute(*order).reshape(1, t.numel())) for t in tensors]


def _on_cpu(function: str, x: Tensor, up: Tensor | None, bias: Tensor | None) -> Tensor:
    """Torch's operations, rounded once, as by the kernels."""
    # torch's gelu overflows from 1.7e38 on, and the tangents of numbers would be float64
    if up is not None and function != "silu":
        return _in_torch(x[None], up[None], None, function)[0]
    return _reference(function, up is not None, x.to(wide(x.dtype)), bias if up is None else up).to(x.dtype)


def _may_overflow(v: Tensor) -> bool:
    """False if the square of no number overflows. Tensors whose numbers are not at hand may."""
    if type(v) not in checks.PLAIN or v.device.type != "cpu" or dispatched():
        return True
    low, high = v.detach().aminmax() if v.numel() else (0.0, 0.0)
    return not (low > -1e15 and high < 1e15)  # NaN may, too


def _reference(function: str, gated: bool, x: Tensor, other: Tensor | None = None) -> Tensor:
    """`other` is `up` if `gated`, else the bias."""
    with autocast.off(x):
        v = x if gated or other is None else x + other
        # torch's derivative is NaN from 1.8e19 on, where the square overflows
        if function == "tanh" and _may_overflow(v):
            beyond = v.abs() > 100  # a clamped NaN would have the derivative 0
            y = torch.nn.functional.gelu(v.masked_fill(beyond, 0.0), approximate=function)
            y = torch.where(beyond, v * (v > 0), y).to(x.dtype)
        else:
            y = (
                torch.nn.functional.silu(v)
                if function == "silu"
                else torch.nn.functional.gelu(v, approximate=function)
            ).to(x.dtype)
        return y * other if gated and other is not None else y


# ---- the raw ops: x, up and dout have two dimensions or more


def _launch(x: Any, up: Any, bias: Any, function: str, version: str) -> Tensor:
    order = _dense_order(x, up, bias)
    out = _empty(order, x)
    if out.numel():
        x, up, bias = *_matrices(order, x, up), readable(bias)
        _run(
            _FORWARD,
            *_WIDTHS[choose("gelu", version, x.get_device()).forward](bias, x, up),
            function,
            bias,
            (out, x, up, bias),
            x,
            up,
        )
    return out


def _launch_backward(
    x: Any, up: Any, bias: Any, dout: Any, function: str, bias_grad: bool, version: str
) -> tuple[Tensor, ...]:
    dx, dup, dbias = _fake_backward(x, up, bias, dout, function, bias_grad)
    if not dx.numel():
        return dx, dup, dbias.zero_()
    x, up, dout, bias = *_matrices(_dense_order(x, up, bias), x, up, dout), readable(bias)
    width, is_aligned = _WIDTHS[choose("gelu", version, x.get_device()).backward](bias, x, up, dout)
    if bias_grad and width > 1:
        _bias_backward(is_aligned, dx, dbias, x, bias, dout, function)
        return dx, dup, dbias
    _run(
        _BACKWARD,
        width,
        is_aligned,
        function,
        bias,
        (dx, None if up is None else dup, x, up, bias, dout),
        x,
        up,
        dout,
    )
    return dx, dup, as_matrix(dx).sum(0, dtype=bias.dtype) if bias_grad else dbias


def _fake(x: Tensor, up: Any, bias: Any, *_: Any) -> Tensor:
    return _empty(_dense_order(x, up, bias), x)


def _fake_backward(
    x: Tensor, up: Any, bias: Any, dout: Tensor, function: str, bias_grad: bool, *_: Any
) -> tuple[Tensor, ...]:
    """dx, dup and dbias. Absent ones are empty."""
    order = _dense_order(x, up, bias)
    return (
        _empty(order, x),
        x.new_empty(0) if up is None else _empty(order, up),
        empty_like(bias) if bias_grad else x.new_empty(0),
    )


def _empty(order: Sequence[int] | None, x: Tensor) -> Tensor:
    """Without an order contiguous, else of x's strides."""
    return empty_like(x) if order is None else torch.empty_like(x)


_SCHEMA = "Tensor x, Tensor? up, Tensor? bias"
_gelu = raw_op(
    f"_gelu({_SCHEMA}, str function, str version) -> Tensor", 3, _launch, _fake, sharding="*c, *c, c -> *c"
)
_SCHEMA = (
    f"_gelu_backward({_SCHEMA}, Tensor dout, str function, bool bias_grad, str version) -> (Tensor, Tensor, "
    f"Tensor)"
)
_gelu_backward = raw_op(_SCHEMA, 4, _launch_backward, _fake_backward, sharding="*c, *c, c, *c -> *c, *c, c")


def _gradient(
    needed: Sequence[bool], inputs: Sequence[Any], _: Any, dout: Tensor
) -> tuple[Tensor | None, ...]:
    x, up, bias, function, version = inputs
    bias_grad = bias is not None and needed[2]
    dx, dup, dbias = _gelu_backward(x, up, bias, dout, function, bias_grad, version)
    return dx, None if up is None else dup, dbias if bias_grad else None


def _in_torch(x: Tensor, up: Tensor | None, bias: Tensor | None, function: str, *_: Any) -> Tensor:
    """The op for derivatives: computed in float32, or in float64 for float64, and finite where torch's
    derivative of gelu overflows."""
    v = x.to(wide(x.dtype)) if bias is None else x.to(wide(x.dtype)) + bias
    # beyond, the gate is 0 or 1, and its derivative, which is 0, may be multiplied by infinity
    c = v.clamp(-800, 800)
    if function == "none":
        gate = 0.5 * (1 + torch.erf(c * math.sqrt(0.5)))
    else:  # gate = sigmoid(a v + b v^3)
        a, b = (
            (1.0, 0.0)
            if function == "silu"
            else (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
        )
        gate = torch.sigmoid(c * (a + b * c.square()))
    y = v * gate
    return (y if up is None else y * up).to(x.dtype)


_apply = differentiable("_Gelu", _gelu, _in_torch, 3, gradient=_gradient, rows=2)

# ---- the launches. Tensors are (rows, cols) with column stride 1; the written ones are contiguous. up and
# bias may be None.

_FORWARD, _BACKWARD, _BIAS_BWD = (
    Template("gelu.cu", f"gelu{name}", pdl=True) for name in ("", "_bwd", "_bias_bwd")
)


def _run(
    template: Template,
    width: int,
    is_aligned: bool,
    function: str,
    bias: Any,
    tensors: Sequence[Any],
    *matrices: Any,
) -> None:
    """Launch with `width` elements per thread. `tensors`: the kernel's arguments."""
    x, grid = matrices[0], -(-matrices[0].numel() // (THREADS * width))
    kernel = template[x.dtype, (x if bias is None else bias).dtype, FUNCTIONS[function], width, is_aligned]
    kernel.on(x.get_device())(
        (grid, 1, 1), (THREADS, 1, 1), 0, *pointers(*tensors), *x.shape, *row_strides(*matrices)
    )


def _bias_backward(
    is_aligned: bool, dx: Any, dbias: Any, x: Any, bias: Any, dout: Any, function: str, most: int = CHUNKS
) -> None:
    """Write dx and dbias; "sum": only dbias, the sums of dout. The grid depends only on the shape, so all
    GPUs give the same bits."""
    (rows, cols), lanes, width = (
        dout.shape,
        8 if is_aligned else 32,
        VECTOR_BYTES // dout.itemsize if is_aligned else 1,
    )
    height = max(-(-rows // most), HEIGHT)
    chunks, tiles = -(-rows // height), -(-cols // (lanes * width))
    partials = None if chunks == 1 else dout.new_empty((chunks, cols), dtype=wide(dout.dtype))
    kernel = _BIAS_BWD[dout.dtype, dbias.dtype, FUNCTIONS[function], is_aligned]
    sizes = (rows, cols, *row_strides(x, dout), height)
    block, addresses = (lanes, THREADS // lanes, 1), pointers(dx, partials, dbias, x, bias, dout)
    kernel.on(dout.get_device())((tiles, chunks, 1), block, 0, *addresses, *sizes)
    if partials is not None:
        _bias_backward(is_aligned, None, dbias, None, None, partials, "sum", 1)


# ---- the versions


def _vectors(bias: Tensor | None, x: Tensor, *others: Tensor | None) -> tuple[int, bool]:
    """Elements per thread, and whether 16-byte accesses are aligned. A vector of a float32 bias has 32 bytes
    if x is 16-bit."""
    width = VECTOR_BYTES // x.itemsize
    fits = bias is None or bias.data_ptr() * x.itemsize % (VECTOR_BYTES * bias.itemsize) == 0
    return (
        (width, fits and aligned(x, bias, *others)) if x.shape[0] == 1 or x.shape[1] >= width else (1, True)
    )


def _instances(vectors: bool, dtype: torch.dtype) -> Iterable[Kernel]:
    """All kernel instances of a dtype; silu has none with a bias."""
    vector = VECTOR_BYTES // dtype.itemsize
    shapes = ((1, True), (vector, True), (vector, False))[: 3 if vectors else 1]
    for bias, (name, function) in itertools.product({dtype, wide(dtype)}, FUNCTIONS.items()):
        if name != "sum" and (name != "silu" or bias == dtype):
            yield from (
                template[dtype, bias, function, n, whole]
                for template in (_FORWARD, _BACKWARD)
                for n, whole in shapes
            )
        if name != "silu" and vectors:
            yield from (
                _BIAS_BWD[wide(dtype) if name == "sum" else dtype, bias, function, whole]
                for whole in (True, False)
            )


VERSIONS = {
    "v1": Version("one thread per element; dbias by torch's sum", partial(_instances, False)),
    "v2": Version("16-byte vectors; dbias from partial sums", partial(_instances, True)),
}
# elements per thread; aligned or not
_WIDTHS: dict[str, Callable[..., tuple[int, bool]]] = {"v1": lambda *_: (1, True), "v2": _vectors}

# ---- for the tools


def _cost(inputs: int, bias: bool, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n, extra = math.prod(dims), bias * dims[1]
    return {
        "fwd": Cost(((inputs + 1) * n + extra) * itemsize, 20 * n),
        "bwd": Cost(((2 * inputs + 1) * n + 2 * extra) * itemsize, 30 * n),
    }


_OP = Op("gelu", "gelu", VERSIONS)
for _name, _public, _function, _inputs, _make in (
    ("gelu", gelu, "none", ("x",), normal()),
    ("gelu_tanh", partial(gelu, approximate="tanh"), "tanh", ("x",), normal()),
    ("gelu_bias", partial(gelu, approximate="tanh"), "tanh", ("x", "bias"), normal(1, 1)),
    (
        "swiglu",
        swiglu,
        "silu",
        ("gate", "up"),
        lambda dims, *options: normal()((dims[0], 2 * dims[1]), *options)[0].chunk(2, -1),
    ),
    ("geglu", geglu, "none", ("gate", "up"), normal(2)),
):
    _gated, _bias = "up" in _inputs, "bias" in _inputs
    register(Case(
        name=_name, op=_OP, call=_public, reference=partial(_reference, _function, _gated),
        dims="ROWS COLUMNS", inputs=_inputs, make=_make, cost=partial(_cost, 1 + _gated, _bias),
        check_dims=((1, 1), (33, 1023), (129, 64), (1000, 256)), sim_dims=((1, 1), (5, 67), (35, 24)),
        bench_dims=((32768, 768), (8192, 4096), (32768, 3072), (8192, 14336)),
        roundings=4 if _bias else 2,  # the gradient of the bias is a sum
    ))  # fmt: skip
