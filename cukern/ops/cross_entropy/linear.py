"""linear_cross_entropy: the cross-entropy loss of x @ weight.T, in chunks of rows, so that all logits are
never in memory.

For each chunk: the logits, their loss and, written over them, their gradient, and two products for the
gradients of x and weight. So the forward computes the gradients, for a gradient of the loss of 1; the
backward only scales them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from cukern.ops.cross_entropy.op import (
    SCALARS,
    Options,
    checked_targets,
    entropy_kernels,
    launch_forward,
    options_of,
    write_gradient,
)
from cukern.ops.cross_entropy.op import VERSIONS as loss_versions
from cukern.ops.cross_entropy.op import reference as loss_of_logits
from cukern.ops.cross_entropy.parallel import parallel_losses, ranks_of
from cukern.ops.cross_entropy.per_token import add_product, checked_bias, reduced, token_factors
from cukern.runtime import checks
from cukern.runtime.device import device_of
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, save, transformed, watched
from cukern.runtime.dispatch.higher import gradients, tangents
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Version
from cukern.runtime.tensors import as_matrix, pointers, unit_column_stride, wide

_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


@planned("x", "weight", "targets", "bias", "class_weights", "token_weights")
def linear_cross_entropy(
    x: Any, weight: Any, targets: Any, *, bias: Any = None, class_weights: Any = None,
    token_weights: Any = None, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    vocab_size: int | None = None, chunk_rows: int | None = None, group: Any = None,
    version: str | None = None,
) -> Tensor:  # fmt: skip
    """cukern.cross_entropy(x @ weight.T, targets, ...) that never holds all logits, with the gradients of x
    and weight.

        x = torch.randn(8, 1024, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        head = torch.randn(50304, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(50257, (8, 1024), device="cuda")
        cukern.linear_cross_entropy(x, head, targets, vocab_size=50257).backward()

    Args:
        x: (..., C), float16, bfloat16, float32 or float64: a tensor or DLPack array. Copied as in
            cross_entropy.
        weight: (V, C), of x's dtype and device.
        targets: (...), int64 or int32, as in cross_entropy, and so are ignore_index, label_smoothing, z_loss,
            softcap and vocab_size.
        bias: (V,), of x's dtype: added to the logits.
        class_weights: (V,), floating-point: weights of the targets; not with label_smoothing.
        token_weights: floating-point, of targets' shape: factors for the losses. With weights of either kind,
            which may require a gradient, "mean" divides by their sum over the targets that are not ignored.
        reduction: "mean", "sum" or "none", as in cross_entropy.
        chunk_rows: rows whose logits are in memory at a time. None: about an eighth of the rows, and C.
        group: a torch.distributed.ProcessGroup of n ranks. Each passes its V / n rows of weight and bias,
            and the same other arguments. torch computes the losses.
        version: "v1" or "v2"; default: the fastest.

    Returns the loss in float32, or float64 for float64: a number, or with "none" a tensor of targets' shape.
    The logits are rounded to x's dtype. torch computes the products, with TF32 where its setting allows it.
    Two calls give the same bits. Autocast casts x, weight and bias. Memory beyond inputs and gradients is
    that of chunk_rows rows of logits.

    Raises TypeError and ValueError as cross_entropy, and for a weight or chunk_rows that does not fit.
    """
    x, weight, targets = checked_inputs("linear_cross_entropy", x, weight, targets, version)
    classes = ranks_of(group, version) * weight.shape[0]
    options = options_of(
        classes,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        vocab_size,
        version or in_force.now,
    )
    kernels, chunk = x.is_cuda or backend.simulates(x), rows_of_chunk(targets, weight, chunk_rows)
    if version is not None and not kernels:
        checks.needs_gpu("linear_cross_entropy", version, x.device)
    if reduction == "none" or not (group is bias is class_weights is token_weights is None):
        weights = token_factors(x, classes, targets, class_weights, token_weights, options)
        losses = parallel_losses(x, weight, checked_bias(bias, x, weight), targets, chunk, group, options)
        return reduced(losses, weights, targets, options)
    if not kernels:
        checked_targets(targets, options)
        if torch.compiler.is_compiling() or transformed():
            return reference(x, weight, targets, options)
    matrix, any_gradient = as_matrix(x), watched(x, weight)
    wanted = [any_gradient and (t.requires_grad or transformed()) for t in (x, weight)]
    arguments = matrix, weight, targets.flatten(), *wanted, chunk, *options
    return _apply(*arguments)[0] if any_gradient else (_raw if kernels else _compute)(*arguments)[0]


def rows_of_chunk(targets: Tensor, weight: Tensor, chunk_rows: Any) -> int:
    if chunk_rows is not None:
        return checks.integer("chunk_rows", chunk_rows, 1, (1 << 63) - 1)
    return _rows_of_chunk(targets.numel(), weight.shape[1])


def _rows_of_chunk(rows: int, columns: int) -> int:
    """The logits of a chunk take the memory of an eighth of all logits, and of a gradient of weight, which
    exists only in the backward."""
    chunks = -(-rows // max(rows // 8 + columns, 1))
    return -(-rows // (8 * max(chunks, 1))) * 8 or 8  # equal chunks


def checked_inputs(
    op: str, x: Any, weight: Any, targets: Any, version: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = autocast.of_product(interop.floats("x", x), interop.floats("weight", weight))
    checks.same(x=x, weight=weight)
    checks.version(op, version, VERSIONS)
    if weight.ndim != 2 or not x.ndim or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x must be (..., C) and weight (V, C), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    targets = interop.indices("targets", targets, "x", x)
    checks.shape("targets", targets, tuple(x.shape[:-1]), "that of x without the last dimension")
    return x, weight, targets


def reference(x: Tensor, weight: Tensor, targets: Tensor, options: Options, *_: Any) -> Tensor:
    """The op in torch's operations, with all logits."""
    return loss_of_logits(torch_matmul(x, weight.mT), targets, options)


# ---- x is (rows, C), targets (rows). Returns the loss, the gradients of x and weight for a gradient of the
# summed losses of 1 (in the dtype of computation; without elements if they are not wanted), and the number by
# which the losses were divided. If the gradient of x was rounded before it is scaled, its roundings would not
# cancel: for 510 targets all elements of bfloat16 would be rounded up.


def _compute(
    x: Tensor, weight: Tensor, targets: Tensor, wants_dx: bool, wants_dweight: bool, chunk: int, *rest: Any
) -> tuple[Tensor, ...]:
    options, rows, classes = Options(*rest), x.shape[0], weight.shape[0]
    loss, dx, dweight, count = _fake(x, weight, targets, wants_dx, wants_dweight)
    x, weight, targets = unit_column_stride(x), weight.resolve_neg(), targets.contiguous()
    logits, losses = x.new_empty(min(chunk, rows), classes), [loss.new_empty(0)]
    kernels = x.is_cuda or backend.simulates(x)
    gradient_of = (
        LOSSES[choose("linear_cross_entropy", options.version, x.get_device()).forward]
        if kernels
        else _by_torch
    )
    by_row = options._replace(reduction="none", version=in_force.now)
    one = count if wants_dx or wants_dweight else None
    with torch.no_grad(), autocast.off(x):
        for a in range(0, rows, chunk):
            x_part = x[a : a + chunk]
            part = torch.mm(x_part, weight.t(), out=logits[: len(x_part)])
            losses.append(gradient_of(part, targets[a : a + chunk], one, by_row))
            if wants_dx:
                add_product(dx[a : a + chunk], part, weight, first=True)
            if wants_dweight:
                add_product(dweight, part.t(), x_part, first=a == 0)
        if options.reduction == "mean":
            count.copy_((targets != options.ignored).sum())
        torch.div(torch.cat(losses).sum(dtype=torch.float64), count, out=loss)
    if not rows:
        dweight.zero_()
    return loss, dx, dweight, count


def _fake(
    x: Tensor, weight: Tensor, targets: Tensor, wants_dx: bool, wants_dweight: bool, *_: Any
) -> tuple[Tensor, ...]:
    dtype = wide(x.dtype)
    dx = x.new_empty(tuple(x.shape) if wants_dx else (0,), dtype=dtype)
    dweight = x.new_empty(tuple(weight.shape) if wants_dweight else (0,), dtype=dtype)
    return x.new_empty((), dtype=dtype), dx, dweight, x.new_ones((), dtype=dtype)


def _scaled(total: Tensor, scale: Tensor, like: Tensor) -> Tensor:
    """total * scale, computed in the dtype of `scale` and rounded once to that of `like`, without a copy in
    between.

    torch would round a factor without dimensions to the dtype of a 16-bit `total` first. is_grads_batched has
    no rule for out=."""
    if like.dtype == scale.dtype:
        return total * scale
    if not torch.compiler.is_compiling() and _batched(scale):
        return (total.to(scale.dtype) * scale).to(like.dtype)
    return torch.mul(
        total, scale.reshape(1), out=torch.empty_like(like, memory_format=torch.contiguous_format)
    )


def _by_kernels(logits: Tensor, targets: Tensor, one: Tensor | None, options: Options) -> Tensor:
    """The losses. Writes the gradient of their sum over the logits, if `one`, the gradient of the sum, is
    given."""
    losses, stats = launch_forward(logits, targets, *options)
    if one is not None:
        write_gradient(logits, logits, targets, stats, one.expand(len(losses)), *options)
    return losses


def _by_one_kernel(logits: Tensor, targets: Tensor, one: Tensor | None, options: Options) -> Tensor:
    """The same, where v2's kernel can: an SM has two thread blocks, each with a row and 2 KiB of shared
    memory."""
    rows, columns = logits.shape
    device = device_of(logits.get_device())
    if (
        one is None
        or not rows
        or logits.dtype.itemsize != 2
        or 2 * (2 * columns + 2048) > device.sm_shared_bytes
    ):
        return _by_kernels(logits, targets, one, options)
    # at most four vectors per thread, or 512 threads
    losses, threads = one.new_empty(rows), 32 * min(16, -(-columns // 1024))
    launch = _fused(logits.dtype, options.softcap != 0, options.smoothing != 0).on(logits.get_device())
    sizes = targets.dtype == torch.int64, columns, logits.stride(0), options.packed()
    launch((rows, 1, 1), (threads, 1, 1), 2 * columns + 16, *pointers(logits, losses, targets), *sizes)
    return losses


def _by_torch(logits: Tensor, targets: Tensor, one: Tensor | None, options: Options) -> Tensor:
    with torch.set_grad_enabled(one is not None):
        leaf = logits.detach().requires_grad_(one is not None)
        losses = loss_of_logits(leaf, targets, options)
        if one is not None:
            logits.copy_(torch.autograd.grad(losses, leaf, torch.ones_like(losses))[0])
    return losses.detach()


_raw = raw_op(
    f"_linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, bool dx, bool dweight, SymInt chunk, "
    f"{SCALARS})"
    " -> (Tensor, Tensor, Tensor, Tensor)", 3, _compute, _fake,
    sharding=lambda *args: "" if "mean" in args else "r., .., r -> , r., .., =",
)  # fmt: skip


class _LinearCrossEntropy(Differentiable):
    @staticmethod
    def forward(x, *args):
        return (_raw if x.is_cuda or backend.simulates(x) else _compute)(x, *args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, targets, _, _, _, *ctx.options = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # zeros for the other outputs would double their memory
        save(ctx, x, weight, targets, *output[1:])

    @staticmethod
    def backward(ctx, dloss, *_):
        x, weight, targets, dx, dweight, count = ctx.saved_tensors
        found: tuple[Tensor | None, ...] = (None, None)
        if dloss is None:
            pass
        elif watched(x, weight, dloss) and not torch.compiler.is_compiling():
            found = gradients(reference, (x, weight, targets, Options(*ctx.options)), (dloss,))[:2]
        else:
            with autocast.off(x):
                scale = dloss / count.clamp(min=1)
                dx = _scaled(dx, scale, dx) if ctx.needs_input_grad[0] else None
                found = dx, _scaled(dweight, scale, weight) if ctx.needs_input_grad[1] else None
        return *found, *(None,) * (len(ctx.options) + 4)

    @staticmethod
    def tangent(ctx, dx, dweight, *_):
        x, weight, targets = ctx.saved_tensors[:3]
        (dloss,) = tangents(reference, (x, weight, targets, Options(*ctx.options)), (dx, dweight))
        return dloss, None, None, None

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


_apply = apply_of(_LinearCrossEntropy)

# ---- the versions: LOSSES[version](logits, targets, one, options) returns the losses of the rows

_FUSED = Template("cross_entropy.cu", "cross_entropy_fused", pdl=True)


def _fused(dtype: torch.dtype, softcap: bool, smoothing: bool) -> Kernel:
    return _FUSED[dtype, softcap, smoothing or softcap]


def _instances(version: int, dtype: torch.dtype) -> list[Kernel]:
    fused = [(False, False), (False, True), (True, True)] if version == 2 and dtype.itemsize == 2 else []
    return [
        *loss_versions[[*loss_versions][-1]].instances(dtype),
        *(_fused(dtype, *options) for options in fused),
        *entropy_kernels(dtype),
    ]


VERSIONS = {
    "v1": Version("chunks of rows", partial(_instances, 1)),
    "v2": Version(
        "loss and gradient by one kernel, a row in shared memory", partial(_instances, 2), requires=80
    ),
}
LOSSES = {"v1": _by_kernels, "v2": _by_one_kernel}
