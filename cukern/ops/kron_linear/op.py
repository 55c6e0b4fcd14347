"""kron_linear: y = scale * x (W1 (x) W2 (x) .. (x) Wn) + bias + residual, by its factors: the product matrix
is never formed.

The order is torch.kron's and einsum's: the first factor acts on the slowest index of a row of x, the last on
the fastest. (Programs that multiply by x.reshape(.., p) @ w in a loop over the factors have the reverse:
their first factor acts on the fastest index. The command line takes its DIMS in that order, as the original
command-line program does.)

A row is an array of p_1 x .. x p_n numbers, and each factor a matrix product along one of its indices; they
commute, so those that shrink the array come first (plan.py). planner.py chooses the launches, forward.py and
backward.py make them. The backward of a step of training is one raw op; higher derivatives and tangents
differentiate the product in torch's operations.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.kron_linear import backward as kron_backward
from cukern.ops.kron_linear import checks as kron_checks
from cukern.ops.kron_linear import cublas
from cukern.ops.kron_linear import forward as kron_forward
from cukern.ops.kron_linear.plan import steps_of
from cukern.ops.kron_linear.reference import (
    PRODUCTS,
    Epilogue,
    Factors,
    Found,
    Maybe,
    Product,
    Wanted,
    movedim_product,
    width,
    with_epilogue,
)
from cukern.runtime import checks
from cukern.runtime.checks import PLAIN
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, save, transformed, watched
from cukern.runtime.dispatch.higher import gradients, tangents
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend
from cukern.runtime.planning import planned
from cukern.runtime.registry import Version
from cukern.runtime.tensors import as_matrix

_transforms = torch._C._are_functorch_transforms_active
_tracing = torch.compiler.is_dynamo_compiling


def _by_torch(product: Product, x: Tensor, factors: Factors, epilogue: Epilogue) -> Tensor:
    return with_epilogue(product(x, factors), epilogue)


def _backward_by_torch(
    x: Tensor, g: Tensor, factors: Factors, wanted: Wanted, scale: float, *_: Any
) -> Found:
    every = gradients(_in_torch, (x, None, None, scale, *factors), (g,))
    found = every[0], *every[4:]
    return [d.contiguous() if w and d is not None else None for d, w in zip(found, wanted, strict=True)]


# A call with version="v1" or "v2" goes to torch, which differentiates it. `cukern.use` chooses forward and
# backward here.
VERSIONS = {
    "v1": Version("x @ w and movedim, in torch"),
    "v2": Version("w^T @ x^T and reshape, in torch"),
    "v3": Version("one GEMM a factor, read and written in place", cublas.v3_instances),
    "v4": Version(
        "a group of factors a launch, in shared memory, compiled for their sizes",
        lambda dtype: [*kron_backward.instances(dtype), *cublas.v3_instances(dtype)],
        requires=80,
    ),
}
_FORWARD: dict[str, Callable[..., Tensor]] = {
    **{version: functools.partial(_by_torch, product) for version, product in PRODUCTS.items()},
    "v3": cublas.v3_forward,
    "v4": kron_forward.forward,
}
_BACKWARD: dict[str, Callable[..., Sequence[Tensor | None]]] = {
    **dict.fromkeys(PRODUCTS, _backward_by_torch),
    "v3": cublas.v3_backward,
    "v4": kron_backward.backward,
}


@planned("x", "factors[]", "bias", "residual")
def kron_linear(
    x: Any,
    factors: Sequence[Any],
    *,
    bias: Any = None,
    scale: float = 1.0,
    residual: Any = None,
    version: str | None = None,
) -> Tensor:
    """scale * x @ torch.kron(torch.kron(W1, W2), ..) + bias + residual, differentiable any number of times,
    backward and forward.

    Args:
        x: (..., p_1 * .. * p_n), float16, bfloat16, float32 or float64: a tensor, or an array that supports
            DLPack. Copied first if it is not contiguous.
        factors: the matrices W_i, each (p_i, q_i), of any strides, square or not; or (S, p_i, q_i), where S
            is x's first dimension: then each x[s] has a factor of its own.
        bias: (q_1 * .. * q_n,) or None; residual: of the output's shape, or None. All of x's dtype and
            device.
        scale: a Python number; no gradient. At most float32's maximum unless x is float64.
        version: "v1" and "v2" are torch's own operations, from "v3" on kernels; by default the fastest that
            the GPU has. Tensors that are not on a GPU, complex ones, and those under torch.func's transforms
            go to v1.

    Returns (..., q_1 * .. * q_n), contiguous (v2: a transposed view, if x has two dimensions). Results have
    the same bits in every run. Sums of 16-bit types are float32. float32 errs up to 1.6 times as much as
    torch's product, and is TF32 where torch's switch for products allows it. Autocast casts all inputs.

    Raises TypeError for another dtype, or two, and for arguments of another type; ValueError for no factors,
    shapes that do not fit, two devices, a scale that is not finite, or an unknown version.
    """
    x, factors, bias, residual = kron_checks.tensors(x, factors, bias, residual)
    shape = kron_checks.shapes(x, factors, bias, residual)
    checks.version("kron_linear", version, VERSIONS)
    in_torch = version in PRODUCTS or _without_kernels(x, version)
    if type(scale) is not float or not abs(scale) <= checks.FLOAT32_MAX:
        scale = kron_checks.scale(scale, x.dtype)
    rows = as_matrix(x)
    if in_torch:
        if version is None and x.dtype.itemsize == 2 and not x.is_cuda:
            return _in_float32(rows, bias, residual, scale, *factors).reshape(shape)
        y = PRODUCTS.get(version or "", movedim_product)(rows, factors)
        return with_epilogue(y.reshape(shape), (scale, bias, residual))
    flat = None if residual is None else as_matrix(residual)
    y = _product(rows, factors, bias, flat, scale, version or in_force.now)
    return y if x.ndim == 2 else y.view(shape)


def _in_float32(rows: Tensor, bias: Maybe, residual: Maybe, scale: float, *factors: Tensor) -> Tensor:
    """The layer of 16-bit CPU tensors, rounded once. v1 and v2 round after each factor."""
    b = None if bias is None else bias.float()
    r = None if residual is None else as_matrix(residual).float()
    y = movedim_product(rows.float(), [w.float() for w in factors])
    return with_epilogue(y, (scale, b, r)).to(rows.dtype)


def _without_kernels(x: Tensor, version: str | None) -> bool:
    """True if a call uses torch's operations. Raises ValueError for a version that x cannot have."""
    if version is not None and x.is_complex():
        found = f"version {version!r} of cukern.kron_linear has no {x.dtype}"
        raise ValueError(f"{found}: complex tensors go through torch, v1 or v2")
    in_torch = backend.uses_torch("kron_linear", version, x) or x.is_complex()
    return in_torch or (not _tracing() and _transforms())


@planned("x", "w1", "w2", "residual", "bias")
def lokr_linear(
    x: Any, w1: Any, w2: Any, *, scale: float = 1.0, residual: Any = None, bias: Any = None,
    version: str | None = None,
) -> Tensor:  # fmt: skip
    """residual + scale * x @ torch.kron(W1, W2).T + bias: a LoKr adapter on top of a base layer's output, in
    one call.

    Args:
        x: (..., p1 * p2). w1: (q1, p1), as torch.nn.Linear's weights are: output first. w2: (q2, p2).
            Instead of each the pair (a, b) of a low-rank one, W = a @ b with a (q, r) and b (r, p). All may
            have one matrix for each of x's first dimension, as the factors of `kron_linear`.
        scale, residual, bias, version: as in `kron_linear`; residual is the base layer's output.

    The small product a @ b is formed, but in float16 x is multiplied by b, then by a: the product of two
    small matrices would be subnormal. The array in between is float16, with r indices instead of p.

    Returns (..., q1 * q2). Autocast: as in `kron_linear`. Raises as it does, with W1 and W2 transposed as its
    factors.
    """
    plain = type(w1) in PLAIN and type(w2) in PLAIN
    if not plain or w1.ndim < 2 or w2.ndim < 2 or w1.is_nested or w2.is_nested:
        x, *pairs = kron_checks.lokr(x, w1, w2)
        if x.dtype == torch.float16 and any(len(pair) == 2 for pair in pairs):
            x, *pairs = _inner_factors(x, pairs[0], pairs[1], version)
        w1, w2 = (torch_matmul(*pair) if len(pair) == 2 else pair[0] for pair in pairs)
    return kron_linear(x, (w1.mT, w2.mT), bias=bias, scale=scale, residual=residual, version=version)


def _inner_factors(x: Tensor, w1: list[Tensor], w2: list[Tensor], version: str | None) -> tuple[Any, ...]:
    """(a1 b1) (x) (a2 b2) = (a1 (x) a2) (b1 (x) b2). Returns x @ (b1 (x) b2).T, [a1] and [a2]. For a full W,
    a or b is the identity."""
    if len(w2) == 1:
        eye = torch.eye(w2[0].shape[-2], dtype=x.dtype, device=x.device)
        return kron_linear(x, (w1[1].mT, w2[0].mT), version=version), w1[:1], [eye]
    if len(w1) == 2:
        return kron_linear(x, (w1[1].mT, w2[1].mT), version=version), w1[:1], w2[:1]
    slices = x.unflatten(-1, (w1[0].shape[-1], w2[1].shape[-1]))
    return kron_linear(slices, (w2[1].mT,), version=version).flatten(-2), w1, w2[:1]


class KronLinear(torch.nn.Module):
    """A linear layer whose weight is W1 (x) .. (x) Wn: prod(in_factors) inputs, prod(out_factors) outputs.

    Args:
        in_factors, out_factors: p_1..p_n and q_1..q_n; factor i is the parameter factors[i], (p_i, q_i).
        bias: whether a bias is added. version: see `kron_linear`.

    Factor i is drawn from the normal distribution with variance 1/p_i, so that outputs have the variance of
    the inputs; the bias is 0.
    """

    def __init__(
        self, in_factors: Sequence[int], out_factors: Sequence[int], bias: bool = True, *,
        version: str | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        self.in_factors = kron_checks.sizes("in_factors", in_factors)
        self.out_factors = kron_checks.sizes("out_factors", out_factors)
        if len(self.in_factors) != len(self.out_factors) or not self.in_factors:
            found = f"in_factors {self.in_factors} and out_factors {self.out_factors}"
            raise ValueError(f"{found} must be equally many, at least one")
        checks.version("KronLinear", version, VERSIONS)
        known = isinstance(dtype, torch.dtype) and (dtype.is_floating_point or dtype.is_complex)
        if dtype is not None and not known:
            raise TypeError(f"dtype must be a floating-point torch.dtype or None, got {checks.brief(dtype)}")
        self.version = version
        pairs = zip(self.in_factors, self.out_factors, strict=True)
        factors = [torch.empty(p, q, device=device, dtype=dtype) for p, q in pairs]
        self.factors = torch.nn.ParameterList([torch.nn.Parameter(w) for w in factors])
        size = torch.Size(self.out_factors).numel()
        empty = torch.empty(size, device=device, dtype=dtype) if checks.flag("bias", bias) else None
        self.bias = None if empty is None else torch.nn.Parameter(empty)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for p, w in zip(self.in_factors, self.factors, strict=True):
            torch.nn.init.normal_(w, std=p**-0.5)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return kron_linear(x, list(self.factors), bias=self.bias, version=self.version)

    def extra_repr(self) -> str:
        return f"{self.in_factors} -> {self.out_factors}, bias={self.bias is not None}"


# ---- autograd and the raw ops


def _product(x: Tensor, factors: Factors, bias: Maybe, residual: Maybe, scale: float, version: str) -> Tensor:
    """x (rows, prod p) times the factors, by kernels: (rows, prod q)."""
    if watched(x, bias, residual, *factors):
        return _apply(x, bias, residual, scale, version, *factors)
    return _kron_linear(x, bias, residual, factors, scale, version, 0)[0]


class _KronLinear(Differentiable):
    """The forward may keep the result of its first launch for the backward: see kron_backward.boundary."""

    @staticmethod
    def forward(ctx, x, bias, residual, scale, version, *factors):
        ctx.scale = scale
        ctx.version = version
        added = bias is not None or residual is not None
        ctx.at = _boundary(x, factors, added, version) if any(ctx.needs_input_grad[5:]) else 0
        y, *kept = _kron_linear(x, bias, residual, factors, scale, version, ctx.at)
        save(ctx, x, *factors, kept[0] if kept else None)
        return y

    @staticmethod
    def backward(ctx, g):
        x, *factors, kept = ctx.saved_tensors
        needed = ctx.needs_input_grad
        wanted = [ctx.needs_input_grad[0], *ctx.needs_input_grad[5:]]
        found: Sequence[Tensor | None] = [None] * len(wanted)
        if any(wanted) and not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transformed()):
            dx, _, _, _, *dws = gradients(_in_torch, (x, None, None, ctx.scale, *factors), (g,))
            found = dx, *dws
        elif any(wanted):
            mask = sum(w << i for i, w in enumerate(wanted))
            made = iter(_kron_linear_backward(x, g, kept, factors, mask, ctx.scale, ctx.version, ctx.at))
            found = [next(made) if w else None for w in wanted]
        # Autocast leaves a sum alone whose dtype is given.
        dbias = g.sum(0, dtype=g.dtype) if needed[1] else None
        return found[0], dbias, g if needed[2] else None, None, None, *found[1:]

    @staticmethod
    def tangent(ctx, dx, dbias, dresidual, _scale, _version, *dfactors):
        x, *factors, _ = ctx.saved_tensors
        columns = width(factors, -1)
        inputs = x, x.new_zeros(columns), x.new_zeros(x.shape[0], columns), ctx.scale, *factors
        return tangents(_in_torch, inputs, (dx, dbias, dresidual, None, *dfactors))[0]


def _in_torch(x: Tensor, bias: Maybe, residual: Maybe, scale: float, *factors: Tensor) -> Tensor:
    return with_epilogue(movedim_product(x, factors), (scale, bias, residual))


_apply = apply_of(_KronLinear)


def _launch(
    x: Tensor, bias: Maybe, residual: Maybe, factors: Factors, scale: float, version: str, at: int
) -> list[Tensor]:
    """The product; and if `at` is not 0, what there is after `at` steps, for the backward."""
    if not x.shape[0]:
        return _fake(x, bias, residual, factors, scale, version, at)
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    epilogue = scale, bias, residual
    if at:
        return list(kron_backward.forward_keeping(x, factors, epilogue, at))
    forward = _FORWARD[choose("kron_linear", version, x.get_device()).forward]
    return [forward(x.contiguous(), factors, epilogue)]


def _fake(
    x: Tensor, bias: Any, residual: Any, factors: Factors, scale: float, version: str, at: int
) -> list[Tensor]:
    widths = [width(factors, -1)]
    if at:
        step = steps_of(factors)[abs(at) - 1]
        widths.append(step.left * step.q * step.right)
    return [torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device) for n in widths]


def _boundary(x: Tensor, factors: Factors, added: bool, version: str) -> int:
    """See kron_backward.boundary; 0 for tensor subclasses, and in torch.compile for dynamic sizes."""
    plain = x.is_contiguous() and all([type(t) in PLAIN for t in (x, *factors)])
    if not plain or not x.shape[0] or any([w.ndim == 3 for w in factors]):
        return 0
    address = 0  # in compiled code addresses are multiples of 16
    if not torch.compiler.is_compiling():
        address = x.data_ptr()
    elif not all([checks.static(n) for t in (x, *factors) for n in t.shape]):
        return 0
    sizes = kron_forward.sizes_of(factors)
    return _kept_after(version, sizes, x.shape[0], x.dtype, x.get_device(), address, added)


@checks.constant
def _kept_after(version: str, *problem: Any) -> int:
    key = kron_forward.key(*problem)
    return kron_backward.boundary(key) if choose("kron_linear", version, key[3]).backward == "v4" else 0


def _launch_backward(
    x: Tensor, g: Tensor, kept: Maybe, factors: Factors, mask: int, scale: float, version: str, at: int
) -> list[Tensor]:
    """The gradients of x and the factors whose bit is set in `mask`."""
    if not x.shape[0]:
        return [t.zero_() for t in _fake_backward(x, g, kept, factors, mask)]
    backward = _BACKWARD[choose("kron_linear", version, x.get_device()).backward]
    more = () if kept is None else (kept, at)
    wanted = _wanted(mask, factors)
    found = backward(x.contiguous(), g.contiguous(), factors, wanted, scale, *more)
    return [t for t in found if t is not None]


def _wanted(mask: int, factors: Factors) -> list[bool]:
    return [bool(mask >> i & 1) for i in range(1 + len(factors))]


def _fake_backward(x: Tensor, g: Tensor, kept: Any, factors: Factors, mask: int, *_: Any) -> list[Tensor]:
    pairs = zip((x, *factors), _wanted(mask, factors), strict=True)
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t, w in pairs if w]


def _sharding(x: Tensor, bias: Any, residual: Any, factors: Factors, *_: Any) -> str:
    """Rows are split, and with them factors of their own."""
    return f"r., ., r., {'r..' if factors[0].ndim == 3 else '..'} -> r."


def _sharding_backward(x: Tensor, g: Tensor, kept: Any, factors: Factors, mask: int, *_: Any) -> str:
    own = "r.." if factors[0].ndim == 3 else ".."
    return f"r., r., r., {own} -> {'r., ' if mask & 1 else ''}{own}"


_REST = "float scale, str version, int at) -> Tensor[]"
_SCHEMA = "(Tensor x, Tensor? bias, Tensor? residual, Tensor[] factors, " + _REST
_SCHEMA_BACKWARD = "_backward(Tensor x, Tensor g, Tensor? kept, Tensor[] factors, int mask, " + _REST
_kron_linear = raw_op("_kron_linear" + _SCHEMA, 4, _launch, _fake, sharding=_sharding)
_kron_linear_backward = raw_op(
    "_kron_linear" + _SCHEMA_BACKWARD, 4, _launch_backward, _fake_backward, sharding=_sharding_backward
)
