"""gelu of x + bias, swiglu and geglu: f(x + bias) * up, elementwise, with f = gelu or silu, and the gradients of x, up and bias."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cukern.ops.gelu.versions import VERSIONS
from cukern.runtime import backend, checks, interop
from cukern.runtime.autocast import off
from cukern.runtime.higher import gradients, tangents
from cukern.runtime.registry import Cost, Differentiable, Op, apply_of, choose, raw_op, register, rows_of_each, save, watched
from cukern.runtime.tensors import as_matrix, unit_column_stride, wide


def gelu(x: Any, bias: Any = None, *, approximate: str = "none", version: str | None = None) -> Tensor:
    """torch.nn.functional.gelu(x + bias) in one kernel. Differentiable any number of times.

        x, bias = torch.randn(8, 3072, device="cuda", requires_grad=True), torch.zeros(3072, device="cuda", requires_grad=True)
        cukern.gelu(x, bias, approximate="tanh").sum().backward()

    Args:
        x: (..., C), float16, bfloat16, float32 or float64: a tensor, or an array that supports DLPack. It is not copied if the last
            dimension has stride 1 and the others flatten to one of any stride; else it is copied once. 16-bit types are computed in
            float32 and rounded once. CPU tensors use torch's operations, or the simulator.
        bias: (C,) or None, of x's dtype or float32, on x's device.
        approximate: "none" for x Phi(x), or "tanh" for GPT-2's x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
        version: "v1" or "v2"; default: the fastest.

    Returns a new contiguous tensor of x's shape and dtype. Autocast changes nothing. A kernel computes the gradients, or torch's
    operations in torch.func transforms and with create_graph=True.

    Raises TypeError for another dtype or an option that is not a str; ValueError for a bias that does not fit or is on another device, and
    for an unknown option. Source: Hendrycks and Gimpel, arXiv 1606.08415.
    """
    return _call("gelu", checks.choice("approximate", approximate, ("none", "tanh")), version, {"x": x}, bias)


def swiglu(gate: Any, up: Any, *, version: str | None = None) -> Tensor:
    """torch.nn.functional.silu(gate) * up in one kernel. Differentiable any number of times.

        gate, up = torch.randn(8, 2 * 3072, device="cuda", requires_grad=True).chunk(2, -1)
        cukern.swiglu(gate, up).sum().backward()

    gate and up are (..., C), of one shape, dtype and device. The halves of one tensor, as above, are read in place. Returns a new
    contiguous tensor. Dtypes, copies, `version` and errors as in `gelu`. Source: Shazeer, arXiv 2002.05202.
    """
    return _call("swiglu", "silu", version, {"gate": gate, "up": up})


def geglu(gate: Any, up: Any, *, approximate: str = "none", version: str | None = None) -> Tensor:
    """gelu(gate) * up in one kernel. Differentiable any number of times.

        gate, up = torch.randn(8, 2 * 3072, device="cuda", requires_grad=True).chunk(2, -1)
        cukern.geglu(gate, up, approximate="tanh").sum().backward()

    Arguments and results as in `swiglu`, `approximate` as in `gelu`.
    """
    return _call("geglu", checks.choice("approximate", approximate, ("none", "tanh")), version, {"gate": gate, "up": up})


def _call(op: str, function: str, version: str | None, inputs: dict[str, Any], bias: Any = None) -> Tensor:
    tensors = {name: interop.to_torch(name, x) for name, x in inputs.items()}
    for name, t in tensors.items():
        checks.dtype(name, t, checks.FLOATS)
    checks.same(**tensors)
    x, up = next(iter(tensors.values())), tensors.get("up")
    if up is not None:
        checks.shape("up", up, tuple(x.shape), "the shape of gate")
    bias = None if bias is None else _checked_bias(x, interop.to_torch("bias", bias))
    checks.version(op, version, VERSIONS)
    if not x.is_cuda and not backend.simulates(x):
        if version is not None:
            checks.needs_gpu(op, version, x.device)
        return _reference(function, up is not None, x, bias if up is None else up)
    rows = _rows(x), None if up is None else _rows(up), bias if bias is None or bias.ndim else bias.view(1), function, version or ""
    return (_apply(*rows) if watched(x, up, bias) else _gelu(*rows)).view(x.shape)


def _checked_bias(x: Tensor, bias: Tensor) -> Tensor:
    checks.dtype("bias", bias, {x.dtype, torch.float32})
    checks.one_device(x=x, bias=bias)
    checks.shape("bias", bias, tuple(x.shape[-1:]), "one value for each column of x")
    return bias.double() if x.dtype == torch.float64 else bias


def _rows(x: Tensor) -> Tensor:
    """x as a matrix, with the last dimension as columns."""
    return as_matrix(x) if x.ndim else x.view(1, 1)


def _reference(function: str, gated: bool, x: Tensor, other: Tensor | None = None) -> Tensor:
    """`other` is `up` if `gated`, else the bias."""
    with off(x):
        v = x if gated or other is None else x + other
        y = (functional.silu(v) if function == "silu" else functional.gelu(v, approximate=function)).to(x.dtype)
        return y * other if gated and other is not None else y


# ---- the raw ops: x, up and dout are matrices


def _launch(x: Tensor, up: Tensor | None, bias: Tensor | None, function: str, version: str) -> Tensor:
    out = _fake(x)
    if out.numel():
        choose("gelu", version, x.get_device()).forward(out, *map(_readable, (x, up, bias)), function)
    return out


def _launch_backward(x: Tensor, up: Any, bias: Any, dout: Tensor, function: str, bias_grad: bool, version: str) -> tuple[Tensor, ...]:
    dx, dup, dbias = _fake_backward(x, up, bias, dout, function, bias_grad)
    if dx.numel():
        tensors = map(_readable, (x, up, bias, dout))
        sums = choose("gelu", version, x.get_device()).backward(dx, None if up is None else dup, *tensors, function, bias_grad)
        return dx, dup, sums if bias_grad else dbias
    return dx, dup, dbias.zero_()


def _readable(x: Any) -> Any:
    """x as the kernels read it, copied if necessary: columns with stride 1, and no negative bit."""
    return None if x is None else unit_column_stride(x.resolve_neg())


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_backward(x: Tensor, up: Any, bias: Any, dout: Tensor, function: str, bias_grad: bool, *_: Any) -> tuple[Tensor, ...]:
    """dx, dup and dbias. Absent ones are empty."""
    return _fake(x), x.new_empty(0) if up is None else _fake(up), _fake(bias) if bias_grad else x.new_empty(0)


_gelu = raw_op("_gelu(Tensor x, Tensor? up, Tensor? bias, str function, str version) -> Tensor", 3, _launch, _fake)
_SCHEMA = "_gelu_backward(Tensor x, Tensor? up, Tensor? bias, Tensor dout, str function, bool bias_grad, str version)"
_gelu_backward = raw_op(f"{_SCHEMA} -> (Tensor, Tensor, Tensor)", 4, _launch_backward, _fake_backward)

# ---- autograd


class _Gelu(Differentiable):
    forward = staticmethod(_gelu)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.function, ctx.version = inputs
        save(ctx, *tensors)

    @staticmethod
    def backward(ctx, dout):
        x, up, bias = ctx.saved_tensors
        bias_grad = bias is not None and ctx.needs_input_grad[2]
        if watched(x, up, bias, dout) and not torch.compiler.is_dynamo_compiling():
            return gradients(_in_torch, (x, up, bias, ctx.function, ctx.version), (dout,))
        dx, dup, dbias = _gelu_backward(x, up, bias, dout, ctx.function, bias_grad, ctx.version)
        return dx, None if up is None else dup, dbias if bias_grad else None, None, None

    @staticmethod
    def tangent(ctx, *dinputs):
        return tangents(_in_torch, (*ctx.saved_tensors, ctx.function, ctx.version), dinputs)[0]

    @staticmethod
    def batch(info, in_dims, *args):
        return rows_of_each(_apply, 2, info.batch_size, in_dims, args)


_apply = apply_of(_Gelu)


def _in_torch(x: Tensor, up: Tensor | None, bias: Tensor | None, function: str, *_: Any) -> Tensor:
    """The op for derivatives: computed in float32, or in float64 for float64, and finite where torch's derivative of gelu overflows."""
    v = x.to(wide(x.dtype)) if bias is None else x.to(wide(x.dtype)) + bias
    if function == "none":
        gate = 0.5 * (1 + torch.erf(v * math.sqrt(0.5)))
    else:  # gate = sigmoid(a v + b v^3)
        a, b = (1.0, 0.0) if function == "silu" else (2 * math.sqrt(2 / math.pi), 2 * math.sqrt(2 / math.pi) * 0.044715)
        gate = torch.sigmoid(v * (a + b * v.square().clamp(max=1600)))  # beyond, the gate is 0 or 1
    y = v * gate
    return (y if up is None else y * up).to(x.dtype)


# ---- for the tools


def _make(kind: str, dims: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """x, x and bias, two tensors, or the halves of one tensor."""
    shapes = {"x": (dims,), "bias": (dims, dims[1:]), "pair": (dims, dims), "halves": ((dims[0], 2 * dims[1]),)}[kind]
    tensors = tuple(torch.randn(*shape, dtype=dtype, device=device) for shape in shapes)
    return tensors[0].chunk(2, -1) if kind == "halves" else tensors


def _cost(inputs: int, bias: bool, dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    n, extra = math.prod(dims), bias * dims[1]
    forward = Cost(((inputs + 1) * n + extra) * itemsize, 20 * n)
    return {"fwd": forward, "bwd": Cost(((2 * inputs + 1) * n + 2 * extra) * itemsize, 30 * n)}


for _name, _public, _kind, _function in (
    ("gelu", gelu, "x", "none"),
    ("gelu_tanh", partial(gelu, approximate="tanh"), "x", "tanh"),
    ("gelu_bias", partial(gelu, approximate="tanh"), "bias", "tanh"),
    ("swiglu", swiglu, "halves", "silu"),
    ("geglu", geglu, "pair", "none"),
):
    _gated, _bias = _kind in ("pair", "halves"), _kind == "bias"
    register(
        Op(
            name=_name, stem="gelu", function=_public, reference=partial(_reference, _function, _gated), versions=VERSIONS,
            dtypes=checks.FLOATS, dims="ROWS COLUMNS", make=partial(_make, _kind), cost=partial(_cost, 1 + _gated, _bias), bound="memory",
            inputs=("gate", "up") if _gated else ("x", "bias") if _bias else ("x",),
            check_dims=((1, 1), (33, 1023), (129, 64), (1000, 256)), sim_dims=((1, 1), (5, 67), (35, 24)),
            bench_dims=((32768, 768), (8192, 4096), (32768, 3072), (8192, 14336)),
            roundings=4 if _bias else 2,  # the gradient of the bias is a sum
        )
    )  # fmt: skip
