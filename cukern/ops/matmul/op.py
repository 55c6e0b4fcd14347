"""matmul and linear: the public functions, and their cases in the registry."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.matmul.plan import FMA_TILES, TILES
from cukern.ops.matmul.product import PLAIN, default_is_cublas, is_odd, product
from cukern.ops.matmul.tensor_cores import ACTIVATIONS
from cukern.ops.matmul.versions import VERSIONS, in_torch
from cukern.runtime import checks
from cukern.runtime.dispatch.autocast import of_product
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.dispatch.versions import in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.planning import planned
from cukern.runtime.registry import Case, Cost, Op, register, row_counts
from cukern.runtime.tensors import as_matrix

PRECISIONS = "ieee", "tf32", "3xtf32"
# 16-bit results of which torch's sum of columns, the gradient of a bias, takes longer than a product with
# ones and the host time of our own autograd Function
SUM_BY_PRODUCT = 1 << 20
_tracing = torch.compiler.is_dynamo_compiling
_autocast = torch.is_autocast_enabled  # of a GPU


@planned("a", "b")
def matmul(a: Any, b: Any, *, precision: str | None = None, version: str | None = None) -> Tensor:
    """a @ b in 16-bit types with float32 sums, in float32, TF32, 3xTF32 or float64. Differentiable any number
    of times.

        a = torch.randn(8, 512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        y = cukern.matmul(a, torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16))  # (8, 512, 1024)
        y.sum().backward()

    Args:
        a: (..., M, K), float16, bfloat16, float32 or float64: a tensor, or an array that supports DLPack.
        b: (..., K, N), of a's dtype and device. Leading dimensions broadcast. Transposed views of a and b are
            not copied. A view without a stride of 1 is copied first, and so is one whose leading dimensions
            cannot be flattened to one.
        precision: of float32. "ieee": float32 throughout. "tf32": one product of TF32, with a relative error
            of 1e-3. "3xtf32": three such products, with float32's error. None: "tf32" if torch's switches
            allow it (torch.backends.cuda.matmul.fp32_precision), else "ieee".
        version: "v1" to "v7", or "cublas" for torch's product, which follows torch's switches only. By
            default the fastest. v6 and v7 compute float32 as 3xTF32 unless TF32 is allowed; v1 to v5 always
            as "ieee". CPU tensors use torch.matmul, or the simulator.

    Returns (..., M, N), contiguous. Two calls return the same bits. With
    torch.use_deterministic_algorithms(True), a row of the result of v6 and v7 does not depend on the number
    of rows. Autocast casts the inputs, as it does for torch.matmul.

    Raises TypeError for another dtype or two different dtypes; ValueError for shapes that do not fit, two
    devices, or an unknown option.
    """
    if precision is None and _takes_torch(a, version):
        out = _by_torch(torch.matmul, a, b)
        if out is not None:
            return out
    a, b = _checked("matmul", precision, version, ("a", "b"), a, b)
    if a.ndim < 2 or b.ndim < 2 or a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"a must be (..., M, K) and b (..., K, N), got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if b.ndim == 2:
        out = _computed("matmul", as_matrix(a), b, *PLAIN, precision, version)[0]
        return out if a.ndim == 2 else out.view(*a.shape[:-1], b.shape[1])
    try:
        lead = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"the leading dimensions of a and b must broadcast, got {tuple(a.shape)} and {tuple(b.shape)}"
        ) from None
    matrices = (t.expand(*lead, *t.shape[-2:]).reshape(math.prod(lead), *t.shape[-2:]) for t in (a, b))
    return _computed("matmul", *matrices, *PLAIN, precision, version)[0].view(*lead, a.shape[-2], b.shape[-1])


@planned("x", "weight", "bias", "residual", "accumulate_into")
def linear(
    x: Any, weight: Any, bias: Any = None, *, activation: str | None = None,
    return_pre_activation: bool = False, residual: Any = None, accumulate_into: Tensor | None = None,
    precision: str | None = None, version: str | None = None,
) -> Any:  # fmt: skip
    """activation(x @ weight.T + bias) + residual (in one kernel by v6 and v7), like
    torch.nn.functional.linear with an epilogue.

        sizes = (32, 768), (3072, 768), (3072,)
        x, weight, bias = (torch.randn(s, device="cuda", requires_grad=True) for s in sizes)
        cukern.linear(x, weight, bias, activation="gelu_tanh").square().sum().backward()

    Args:
        x: (..., K), float16, bfloat16, float32 or float64: a tensor, or an array that supports DLPack.
        weight: (N, K); bias: (N,) or None. Of x's dtype and device.
        activation: None, "gelu" (exact), "gelu_tanh", "relu" or "silu", applied before the sums are rounded
            to x's dtype, by "cublas" afterwards, as torch does.
        return_pre_activation: return (result, x @ weight.T + bias) instead of the result.
        residual: (..., N) of x's dtype and device, or None: added to the result. A version may round the
            result first, as torch does.
        accumulate_into: (N, K), contiguous, float32 or of x's dtype: backward adds the gradient of weight to
            it and rounds the float32 sum once. weight gets no gradient of its own. It may be weight.grad of
            an earlier backward. No higher derivatives. By default v7 or v6 computes the product if
            accumulate_into is float32 and x is not.
        precision, version: see `matmul`.

    Returns (..., N), contiguous. Copies, autocast and errors as in `matmul`.
    """
    plain = activation is residual is accumulate_into is precision is None and return_pre_activation is False
    if plain and _takes_torch(x, version):
        out = _by_torch(torch.nn.functional.linear, x, weight, bias)
        if out is not None:
            return out
    names = "x", "weight", "bias", "residual"
    x, weight, bias, residual = _checked("linear", precision, version, names, x, weight, bias, residual)
    shape = _check_linear(x, weight, bias, residual, accumulate_into)
    keep = checks.flag("return_pre_activation", return_pre_activation)
    which = (
        0
        if activation is None
        else ACTIVATIONS.index(checks.choice("activation", activation, ACTIVATIONS[1:]))
    )
    rows, residual = as_matrix(x), None if residual is None else as_matrix(residual)
    outs = _computed(
        "linear", rows, weight.t(), bias, residual, accumulate_into, which, keep, precision, version
    )
    outs = outs if x.ndim == 2 else [out.view(shape) for out in outs]
    return tuple(outs[:2]) if keep else outs[0]


def _check_linear(x: Tensor, weight: Tensor, bias: Any, residual: Any, into: Any) -> tuple[int, ...]:
    """The shape of the result."""
    shape, of_weight = x.shape, weight.shape
    if not shape or len(of_weight) != 2 or shape[-1] != of_weight[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(shape)} and {tuple(of_weight)}")
    result = *shape[:-1], of_weight[0]
    if bias is not None:
        checks.shape("bias", bias, (of_weight[0],), "one value for each row of weight")
    if residual is not None:
        checks.shape("residual", residual, result, "the shape of the result")
    if into is not None:
        if not isinstance(into, Tensor):
            raise TypeError(f"accumulate_into must be a torch.Tensor, got {checks.brief(into)}")
        checks.dtype("accumulate_into", into, {torch.float32, weight.dtype})
        checks.one_device(weight=weight, accumulate_into=into)
        checks.shape("accumulate_into", into, tuple(of_weight), "the shape of weight")
        if not into.is_contiguous() or into.requires_grad:
            rule = "accumulate_into must be contiguous and require no gradient"
            raise ValueError(f"{rule}, got strides {into.stride()}, {into.requires_grad=}")
    return result


def _takes_torch(x: Any, version: Any) -> bool:
    """True if torch computes a product of x without options, because "cublas" is named or is the default:
    `_by_torch`. Not under autocast, because torch's backward would be cast again if it runs under another
    autocast."""
    if _tracing() or type(x) not in checks.PLAIN or not x.is_cuda:
        return False
    if version is None:
        cublas = default_is_cublas(x.dtype, x.get_device(), in_force.now)
    else:
        cublas = version == "cublas" and x.dtype in checks.FLOATS
    return cublas and x.layout is torch.strided and not x.is_nested and not _autocast()


def _by_torch(function: Callable[..., Tensor], x: Tensor, y: Any, bias: Any = None) -> Tensor | None:
    """function(x, y, bias) of torch, in half of the host time of one of our ops. None for arguments that may
    be wrong, and for an error of torch: the full checks name what is wrong. Lazy negations, which torch reads
    correctly, are accepted."""
    dtype, strided = x.dtype, torch.strided
    for t in (y,) if bias is None else (y, bias):
        if type(t) not in checks.PLAIN or t.dtype is not dtype or t.layout is not strided or not t.is_cuda:
            return None
    try:
        shape = y.shape
        if len(shape) != 2 or x.ndim < 2 or _is_odd(x, y):
            return None
        if bias is None:
            return function(x, y)
        if bias.shape != shape[:1]:
            return None
        if _adds_by_product(x, shape, bias):
            return torch_matmul(as_matrix(x), y.t(), bias).view(*x.shape[:-1], shape[0])
        return function(x, y, bias)
    except RuntimeError:
        return None


def _adds_by_product(x: Tensor, of_weight: Sequence[int], bias: Tensor) -> bool:
    """True if the bias needs a gradient, of many results of 16 bits."""
    if not bias.requires_grad or x.itemsize != 2 or not torch.is_grad_enabled():
        return False
    return x.numel() // max(of_weight[1], 1) * of_weight[0] > SUM_BY_PRODUCT


def _is_odd(x: Tensor, y: Tensor) -> bool:
    k = max(x.shape[-1], 1)
    return x.itemsize == 2 and is_odd(x.numel() // k, y.numel() // k, k, *y.shape, x.stride(-2))


def _checked(
    op: str, precision: Any, version: Any, names: tuple[str, ...], x: Any, y: Any, *optional: Any
) -> Sequence[Any]:
    """The tensors, cast as autocast wants them."""
    checks.version(op, version, VERSIONS)
    if precision is not None:
        checks.choice("precision", precision, PRECISIONS)
    values = x, y, *optional
    if (
        checks.plain(checks.FLOATS, (x, y, *[t for t in optional if t is not None]))
        and x.is_cuda
        and not _autocast()
    ):
        return values  # as in most calls: what follows would take most of the host time
    tensors: list[Any] = [
        v if v is None and i > 1 else interop.to_torch(names[i], v) for i, v in enumerate(values)
    ]
    tensors = [*of_product(*tensors)]
    checks.alike(checks.FLOATS, **dict(zip(names, tensors, strict=True)))
    return tensors


def _computed(
    op: str, a: Tensor, b: Tensor, bias: Any, residual: Any, into: Any, *options: Any
) -> Sequence[Tensor]:
    """`product`, by kernels or in torch's operations."""
    if a.is_cuda or backend.simulates(a):
        return product(a, b, bias, residual, into, *options[:-1], options[-1] or in_force.now)
    version = options[-1]
    if version is not None and not VERSIONS[version].in_torch:
        checks.needs_gpu(op, version, a.device)
    if into is not None:
        raise ValueError(f"accumulate_into needs kernels, and x is on {a.device}; {checks.SIMULATOR}")
    if a.dtype.itemsize == 2:  # rounded once, at the end
        bias, residual = (None if t is None else t.float() for t in (bias, residual))
        return [t.to(a.dtype) for t in in_torch(a.float(), b.float(), bias, residual, options[0])]
    return in_torch(a, b, bias, residual, options[0])


# ---- for the tools


def _make(
    linear: bool, dims: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, ...]:
    M, N, K = dims
    x, y, *bias = (
        torch.randn(s, dtype=dtype, device=device)
        for s in (((M, K), (N, K), (N,)) if linear else ((M, K), (K, N)))
    )
    return (x, y * K**-0.5, *bias) if linear else (x, y)


def _cost(inputs: tuple[str, ...], dims: Sequence[int], itemsize: int) -> dict[str, Cost]:
    M, N, K = dims
    one = Cost((M * K + K * N + M * N) * itemsize, 2 * M * N * K)
    return {
        "fwd": one,
        "bwd": Cost(2 * one.bytes, 2 * one.flops),
        **{f"bwd:{name}": one for name in inputs[:2]},
    }


def _torch_gelu(*tensors: Tensor) -> Tensor:
    return torch.nn.functional.gelu(torch.nn.functional.linear(*tensors))


def _gelu_magnitude(inputs: tuple[Tensor, ...], douts: Any) -> tuple[Tensor, ...]:
    """The sum of the magnitudes of the product's terms, and of those that the gradients have with an error of
    the product."""
    x, weight, _ = inputs
    product, size = (torch.nn.functional.linear(*tensors) for tensors in (inputs, [t.abs() for t in inputs]))
    density = torch.exp(-product.square() / 2) / (2 * math.pi) ** 0.5
    first = (1 + torch.erf(product / 2**0.5)) / 2 + product * density
    second = (2 - product.square()) * density
    g = douts[0].abs() * (first.abs() + second.abs() * size)
    return size, g @ weight.abs(), g.t() @ x.abs(), g.sum(0)


_LINEAR = "x", "weight", "bias"
_OP = Op("matmul", "matmul", VERSIONS)
for _name, _function, _reference, _names, _bench_dims in (
    ("matmul", matmul, torch.matmul, ("a", "b"), ((4096, 4096, 4096), (8192, 8192, 8192))),
    ("linear", linear, torch.nn.functional.linear, _LINEAR, ((4096, 3072, 768),)),
    (
        "linear_gelu",
        partial(linear, activation="gelu"),
        _torch_gelu,
        _LINEAR,
        ((32768, 3072, 768), (8192, 16384, 4096)),
    ),
):
    register(
        Case(
            name=_name, op=_OP, call=_function, reference=_reference, dims="M N K",
            variants=row_counts, candidates=(*(t.name for t in FMA_TILES[4]), *(t.name for t in TILES)),
            bound="compute",
            check_dims=((1, 1, 1), (64, 64, 64), (129, 67, 255), (5, 300, 1000)), bench_dims=_bench_dims,
            sim_dims=((1, 1, 1), (3, 33, 800), (64, 64, 64), (70, 90, 50)),
            make=partial(_make, _names is _LINEAR), inputs=_names, cost=partial(_cost, _names),
            # One chain of additions, as in v1 to v4, has an error of up to 2.6 epsilons times the sum of |a
            # b| on random data, whatever its length. So does cuBLAS on an H200, except where it splits the
            # chain. v5 splits it too, and stays within twice cuBLAS's error.
            roundings=3, magnitude=_gelu_magnitude if _name == "linear_gelu" else None,
        )
    )  # fmt: skip
