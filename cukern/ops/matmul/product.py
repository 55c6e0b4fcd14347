"""Products with an epilogue, and their derivatives of any order: the raw ops and autograd.

Every product is out (M x N) = activation(A (M x K) . B (K x N) + bias) + residual, or a batch of A . B. A and
B are views of any strides, so a transposed matrix is not copied.
    y = x W^T + bias          A = x,    B = W^T
    dx = dy W                 A = dy,   B = W
    dW = dy^T x               A = dy^T, B = x
    dbias = column sums of dy
"""

from typing import Any

import torch
from torch import Tensor

from cukern.ops.matmul.tensor_cores import Epilogue
from cukern.ops.matmul.versions import ACTIVATION_BWD, ACTIVATION_WIDTH, PRODUCTS, VERSIONS, in_torch
from cukern.runtime import checks
from cukern.runtime.device import cached, device_of
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, batched, each, save, watched
from cukern.runtime.dispatch.higher import gradients, tangents
from cukern.runtime.dispatch.products import column_sums, tf32_allowed
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import DEFAULT, choose, names_of
from cukern.runtime.tensors import pointers, wide

# ---- the version and the precision of a call

Option = str | None


def run(out: Tensor, a: Tensor, b: Tensor, e: Epilogue, precision: Option, version: Option) -> None:
    """Launch out = epilogue(a . b). `precision`: None for torch's switches, or 3xTF32 if they do not allow
    TF32 and the version is one of tensor cores; `version`: None for that of `cukern.use`."""
    switched = a.dtype == torch.float32 and precision != "ieee" and tf32_allowed()
    chosen = _chosen(
        a.dtype, out.dtype, e.activation, precision, switched, _is_odd(out, a, b), version, a.get_device()
    )
    PRODUCTS[chosen](
        out, a.resolve_neg(), b.resolve_neg(), e, precision or ("tf32" if switched else "3xtf32")
    )


def is_odd(m: int, n: int, k: int, *rows: int) -> bool:
    """True if cuBLAS is slow for a 16-bit product (m, k) . (k, n), because `rows`, the elements from one row
    in memory to the next, are not whole 16 bytes. It is not slow for a single row or column, nor for sums of
    2 to 16 products (docs/notes/matmul.md)."""
    return m > 1 and n > 1 and not 2 <= k <= 16 and any(row % 8 for row in rows)


def _is_odd(out: Tensor, a: Tensor, b: Tensor) -> bool:
    matrices = a.itemsize == 2 and a.ndim == 2
    return matrices and is_odd(*out.shape, a.shape[1], out.shape[1], max(a.stride()), max(b.stride()))


@cached(4096)
def _chosen(
    a: torch.dtype, out: torch.dtype, activation: int, precision: Option, switched: bool, odd: bool,
    version: Option, device: int,
) -> str:  # fmt: skip
    """The version for these dtypes. `switched`: torch's switches allow TF32, and cuBLAS follows them."""
    named = names_of("matmul", version or "")[0]
    if named not in ("", DEFAULT):
        return choose("matmul", version or "", device).forward
    names, gpu = _defaults(a, out, activation, precision, switched, odd), device_of(device)
    return next(n for n in names if VERSIONS[n].requires <= gpu.capability and (gpu.wgmma or n != "v7"))


def _defaults(
    a: torch.dtype, out: torch.dtype, activation: int, precision: Option, switched: bool, odd: bool
) -> tuple[str, ...]:
    """The default versions. The first one that the GPU supports is used. Their speeds are in
    docs/notes/matmul.md."""
    single = a == torch.float32
    if single and not switched and precision in (None, "ieee"):
        return "v5", "v4"
    if out != a or (single and (precision == "3xtf32" or not switched)):
        return "v7", "v6", "v4"
    if odd:
        return "v7", "v6", "cublas"
    # v7 applies the activation before it stores the results
    return ("v7", "cublas") if activation and a.itemsize == 2 else ("cublas",)


@cached(64)
def default_is_cublas(dtype: torch.dtype, device: int, version: str) -> bool:
    """True if a product without options, of even 16-bit matrices or of float64, is cuBLAS's. `version`: that
    of `in_force`."""
    return (
        dtype.itemsize in (2, 8) and _chosen(dtype, dtype, 0, None, False, False, version, device) == "cublas"
    )


# ---- the raw ops


def _launch(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int, precision: Option,
    version: Option, *pre: Tensor,
) -> Tensor:  # fmt: skip
    out = _fake(a, b)
    if out.numel():
        bias, residual = (t if t is None else t.resolve_neg().contiguous() for t in (bias, residual))
        run(out, a, b, Epilogue(bias, activation, pre[0] if pre else None, residual), precision, version)
    return out


def _launch_with_pre(a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    pre = _fake(a, b)
    return _launch(a, b, *rest, pre), pre


def _fake(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]))


def _launch_add(out: Tensor, a: Tensor, b: Tensor, precision: Option, version: Option) -> None:
    if out.numel() and a.shape[-1]:
        run(out, a, b, Epilogue(residual=out), precision, version)


# of a gradient, whose columns a kernel adds in chunks: the most chunks, and the fewest rows of one
CHUNKS, ROWS = 256, 32


def _launch_activation_backward(dout: Tensor, pre: Tensor, activation: int) -> tuple[Tensor, Tensor]:
    (rows, columns), dout = dout.shape, dout.resolve_neg().contiguous()
    dpre, dbias = _fake_activation_backward(dout, pre)
    if not dpre.numel():
        return dpre, dbias.zero_()
    height = max(-(-rows // CHUNKS), ROWS)
    chunks = -(-rows // height)
    sums = torch.empty((chunks, columns), dtype=wide(dout.dtype), device=dout.device)
    width = ACTIVATION_WIDTH[dout.itemsize]
    if columns % width or any(p % 16 for p in pointers(dout, pre)):
        width = 1
    kernel = ACTIVATION_BWD[dout.dtype, width].on(dout.get_device())
    grid = (chunks * -(-columns // (32 * width)), 1, 1)
    kernel(grid, (32, 8, 1), 0, *pointers(dpre, sums, dout, pre), rows, columns, height, activation)
    return dpre, sums.sum(0).to(dout.dtype)


def _fake_activation_backward(dout: Tensor, pre: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The gradient of the pre-activation, and its column sums."""
    return torch.empty_like(pre), pre.new_empty(pre.shape[1])


def _sharding(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, activation: int, *_: Any
) -> str:
    """Batches, rows and columns are split, and in a plain product the sum too."""
    batch, k = "b" * (a.ndim - 2), "." if activation or bias is not None or residual is not None else "k"
    return f"{batch}m{k}, {batch}{k}n, n, {batch}mn -> {batch}mn"


_ARGUMENTS = (
    "(Tensor a, Tensor b, Tensor? bias, Tensor? residual, int activation, str? precision, str? version)"
)
_product = raw_op(f"_product{_ARGUMENTS} -> Tensor", 4, _launch, _fake, sharding=_sharding)
_product_with_pre = raw_op(
    f"_product_with_pre{_ARGUMENTS} -> (Tensor, Tensor)",
    4,
    _launch_with_pre,
    lambda *a: (_fake(*a), _fake(*a)),
    sharding=_sharding,
)
_SCHEMA = "_add_product(Tensor(a!) out, Tensor a, Tensor b, str? precision, str? version) -> ()"
_add_product = raw_op(_SCHEMA, 3, _launch_add, lambda *_: None, sharding="mn, m., .n -> ")
_SCHEMA = "_activation_backward(Tensor dout, Tensor pre, int activation) -> (Tensor, Tensor)"
_activation_backward = raw_op(
    _SCHEMA, 2, _launch_activation_backward, _fake_activation_backward, sharding="rc, rc -> rc, c"
)

# ---- autograd


PLAIN = None, None, None, 0, False  # the arguments of `product` for a . b


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, residual: Tensor | None, into: Tensor | None, activation: int,
    keep: bool, *options: Option,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The result and, with `keep`, the pre-activation, differentiable. `into`: the transposed gradient of b
    is added to it, or None. `options`: precision and version, as in `run`."""
    if watched(a, b, bias, residual):
        return _apply(a, b, bias, residual, into, activation, keep, *options)
    args = a, b, bias, residual, activation, *options
    return _product_with_pre(*args) if keep else (_product(*args),)


class _Product(Differentiable):
    """The arguments are those of `product`: two matrices, or two batches without an epilogue. Gradients
    without an activation are products, which have derivatives of any order."""

    @staticmethod
    def forward(a, b, bias, residual, into, activation, keep, *options):
        args = a, b, bias, residual, activation, *options
        return _product_with_pre(*args) if keep or activation else (_product(*args),)

    @staticmethod
    def setup_context(ctx, inputs, output):
        a, b, bias, residual, ctx.into, ctx.activation, _, *ctx.options = inputs
        ctx.outputs = len(output)
        ctx.set_materialize_grads(False)
        save(ctx, a, b, bias, residual, output[1] if ctx.activation else None)

    @staticmethod
    def backward(ctx, dout, dpre=None):
        if dout is None and dpre is None:
            return (None,) * 9
        *inputs, pre = ctx.saved_tensors
        if watched(*inputs, dout, dpre) and not torch.compiler.is_dynamo_compiling():
            if ctx.into is not None:
                raise NotImplementedError(
                    "a call of cukern.linear with accumulate_into has no higher derivatives"
                )
            if ctx.activation:
                return *gradients(in_torch, (*inputs, ctx.activation), (dout, dpre))[:4], *(None,) * 5
        (d, dbias), needed = _of_pre(dout, dpre, pre, ctx), ctx.needs_input_grad
        da = product(d, inputs[1].mT, *PLAIN, *ctx.options)[0] if needed[0] else None
        db = _of_b(d, inputs[0], inputs[1], ctx) if needed[1] else None
        if needed[2] and dbias is None:
            dbias = column_sums(d)
        return da, db, dbias if needed[2] else None, dout if needed[3] else None, *(None,) * 5

    @staticmethod
    def tangent(ctx, *dinputs):
        return tangents(in_torch, (*ctx.saved_tensors[:4], ctx.activation), dinputs[:4], 2)[: ctx.outputs]

    @staticmethod
    def batch(info, in_dims, a, b, bias, residual, into, activation, keep, *options):
        rest = into, activation, keep or activation > 0, *options  # as many outputs as those of `forward`
        a_dim, b_dim, bias_dim, residual_dim, into_dim, *_ = in_dims
        size, matrices = info.batch_size, a.ndim - (a_dim is not None) == 2
        if matrices and b_dim is bias_dim is into_dim is None:  # more rows
            a, residual = (
                t if t is None else batched(t, d, size) for t, d in ((a, a_dim), (residual, residual_dim))
            )
            shape, rows = a.shape[:2], None if residual is None else residual.flatten(0, 1)
            outs = product(a.flatten(0, 1), b, bias, rows, *rest)
            return tuple(out.unflatten(0, shape) for out in outs), (0,) * len(outs)
        if matrices and b_dim is not None and bias is residual is None and not (keep or activation):
            return product(batched(a, a_dim, size), batched(b, b_dim, size), None, None, *rest), (0,)
        return each(product, size, in_dims, (a, b, bias, residual, *rest))


def _of_pre(dout: Tensor | None, dpre: Tensor | None, pre: Tensor, ctx: Any) -> Any:
    """The gradient of the pre-activation from those of both outputs, and its column sums if a kernel has
    computed them."""
    if dout is None:
        return dpre, None
    d, sums = _activation_backward(dout, pre, ctx.activation) if ctx.activation else (dout, None)
    return (d, sums) if dpre is None else (d + dpre, None)


def _of_b(d: Tensor, a: Tensor, b: Tensor, ctx: Any) -> Tensor | None:
    """The gradient of b. It has b's layout, unless of 16-bit types only the other layout has rows of whole 16
    bytes."""
    if ctx.into is not None:
        return _add_product(ctx.into, d.mT, a, *ctx.options)
    K, N = b.shape[-2:]
    only_other = b.itemsize == 2 and checks.known(K % 8 > 0) and checks.known(N % 8 == 0)
    transposed = b.stride(-2) == 1 and not only_other
    return (
        product(d.mT, a, *PLAIN, *ctx.options)[0].mT
        if transposed
        else product(a.mT, d, *PLAIN, *ctx.options)[0]
    )


_apply = apply_of(_Product)
