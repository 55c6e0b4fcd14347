"""cross_entropy of logits and target indices, and its gradient, each in one pass over the logits. The math is in kernels_cu/cross_entropy.cu."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cukern.ops.cross_entropy.reference import Options, reduce, reference, second, wide
from cukern.runtime import backend, checks, interop
from cukern.runtime.device import cached
from cukern.runtime.kernel import Kernel, Template
from cukern.runtime.registry import Differentiable, Version, apply_of, choose, each, raw_op, save, transformed, watched

TARGETS = (torch.int64, torch.int32)
REDUCTIONS = ("none", "sum", "mean")


def cross_entropy(
    logits: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, vocab_size: int | None = None, inplace_backward: bool = False, version: str | None = None,
) -> Tensor:  # fmt: skip
    """The cross-entropy loss of logits, as torch.nn.functional.cross_entropy of target indices. Differentiable any number of times.

        logits = torch.randn(8, 1024, 50304, device="cuda", requires_grad=True)
        targets = torch.randint(50257, (8, 1024), device="cuda")
        cukern.cross_entropy(logits, targets, vocab_size=50257).backward()

    Args:
        logits: (..., V), float16, bfloat16, float32 or float64: a tensor, or an array that supports DLPack. It is not copied if the last
            dimension has stride 1 and the others flatten to one of any stride; else it is copied once. 16-bit types are computed in
            float32. CPU tensors use torch's operations, or the simulator.
        targets: (...), int64 or int32: for each row the index of its class, in 0..vocab_size-1, or ignore_index.
        ignore_index: rows with this target have loss 0 and gradient 0.
        reduction: "mean" divides the sum of the losses by the number of targets that are not ignored. Without such a target it is NaN,
            as in torch, and the gradient is 0. "sum" or "none" do not divide.
        label_smoothing: from 0 to 1. The target's share is 1 - label_smoothing, and each of the vocab_size classes gets an equal part
            of the rest.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each row that is not ignored.
        softcap: a positive number; the logits become softcap * tanh(logits / softcap) first. None: they stay as they are.
        vocab_size: the columns from this one on are padding: they are not used, and their gradient is 0. None: V.
        inplace_backward: the backward writes the gradient over the logits, which saves their memory. The logits cannot be a leaf. If an
            operation needs their old values after that, such as a second backward, autograd raises RuntimeError. The gradient cannot be
            differentiated. On the CPU and inside torch.compile this option has no effect.
        version: "v1" or "v2"; default: the fastest.

    Returns the loss: a number, or with "none" a tensor of targets' shape. It is float32, or float64 for float64 logits. torch rounds it to
    the dtype of 16-bit logits, which leaves 2 or 3 digits, and lets a scaled float16 loss overflow. Two calls give the same bits. Autocast
    does not change the dtype or the computation.

    A target outside 0..vocab_size-1 that is not ignore_index raises ValueError on the CPU. On a GPU, where that would need a
    synchronization, the loss and the gradient of its row are NaN. So they are in the simulator.

    Raises TypeError for another dtype or an option of another type; ValueError for shapes or devices that do not fit, or an option outside
    its range. The z-loss is that of PaLM (Chowdhery et al., arXiv 2204.02311), the softcap that of Gemma 2 (arXiv 2408.00118).
    """
    logits, targets = interop.to_torch("logits", logits), interop.to_torch("targets", targets)
    checks.dtype("logits", logits, checks.FLOATS)
    checks.dtype("targets", targets, TARGETS)
    checks.version("cross_entropy", version, VERSIONS)
    if not logits.ndim or logits.shape[:-1] != targets.shape:
        raise ValueError(f"targets has shape {tuple(targets.shape)}, it must be that of logits without the last, {tuple(logits.shape)}")
    if logits.device != targets.device:
        raise ValueError(f"targets is on {targets.device}, logits is on {logits.device}: they must be on one device")
    options = _options(logits.shape[-1], ignore_index, reduction, label_smoothing, z_loss, softcap, vocab_size)
    inplace = _in_place(logits, inplace_backward)
    if not logits.is_cuda and not backend.simulates(logits):
        if version is not None:
            checks.needs_gpu("cross_entropy", version, logits.device)
        _check_targets(targets, options)
        return reference(logits, targets, options)
    rows = targets.reshape(-1)
    x = _unit_column_stride(logits.reshape(rows.shape[0], logits.shape[-1]))
    loss, *_ = (_apply if watched(x) else _forward_only)(x, rows, *options, inplace, version or "")
    return loss.view(targets.shape) if options.reduction == "none" else loss


def _options(
    columns: int, ignored: int, reduction: str, smoothing: float, z_loss: float, softcap: float | None, vocab: int | None
) -> Options:
    ignored = checks.integer("ignore_index", ignored, -(1 << 63), (1 << 63) - 1)
    reduction = checks.choice("reduction", reduction, REDUCTIONS)
    smoothing, z_loss = checks.number("label_smoothing", smoothing), checks.number("z_loss", z_loss, checks.FLOAT32_MAX)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing must be from 0 to 1, got {smoothing!r}")
    if softcap is not None:
        softcap = checks.number("softcap", softcap, 1e30)
        if softcap < 1e-30:
            raise ValueError(f"softcap must be positive, at least 1e-30, got {softcap!r}")
    if columns < 1:
        raise ValueError(f"logits must have at least one class, got {columns}")
    vocab = columns if vocab is None else checks.integer("vocab_size", vocab, 1, columns)
    return Options(vocab, ignored, reduction, smoothing, z_loss, softcap or 0.0)


def _in_place(logits: Tensor, inplace: bool) -> bool:
    if not checks.flag("inplace_backward", inplace) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    if logits.requires_grad and logits.is_leaf:
        raise ValueError("inplace_backward writes over the logits, which must not be a leaf that requires grad, such as a parameter")
    if transformed():
        raise NotImplementedError(
            "inplace_backward of cukern.cross_entropy has no rule for torch.func transforms and forward-mode derivatives"
        )
    return True


def _check_targets(targets: Tensor, options: Options) -> None:
    if torch.compiler.is_compiling() or transformed() or type(targets) is not Tensor or targets.is_meta:
        return
    wrong = targets[((targets < 0) | (targets >= options.vocab)) & (targets != options.ignored)]
    if wrong.numel():
        raise ValueError(f"targets must be in 0..{options.vocab - 1} or ignore_index {options.ignored}, got {int(wrong[0])}")


def _unit_column_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


# ---- the raw ops: x is (rows, columns), targets (rows); `count`: the number of targets that are not ignored, 0 rows without a reduction


def _launch(
    x: Tensor, targets: Tensor, vocab: int, ignored: int, reduction: str, smoothing: float, z_loss: float, softcap: float, version: str
) -> tuple[Tensor, Tensor, Tensor]:
    loss, lse, count = _fake(x, targets, vocab, ignored, reduction)
    x, targets, rows, is_wide = _unit_column_stride(x), targets.contiguous(), x.shape[0], targets.dtype == torch.int64
    losses = loss if reduction == "none" else torch.empty_like(lse, dtype=loss.dtype)
    launch, reducer, block = _plan("forward", version, x.dtype, bool(softcap), x.shape[1], x.get_device())
    scalars = is_wide, x.stride(0), vocab, ignored, smoothing, z_loss, softcap
    if rows:
        launch((rows, 1, 1), block, 0, losses.data_ptr(), lse.data_ptr(), x.data_ptr(), targets.data_ptr(), *scalars)
    if reduction != "none":
        pointers = loss.data_ptr(), count.data_ptr(), losses.data_ptr(), targets.data_ptr()
        reducer((1, 1, 1), (1024, 1, 1), 0, *pointers, is_wide, rows, ignored, reduction == "mean")
    return loss, lse, count


def _launch_backward(x: Tensor, targets: Tensor, lse: Tensor, count: Tensor, dloss: Tensor, *options: Any) -> Tensor:
    x = _unit_column_stride(x)
    return _write_gradient(torch.empty_like(x, memory_format=torch.contiguous_format), x, targets, lse, count, dloss, *options)


def _launch_backward_in_place(x: Tensor, *rest: Any) -> None:
    _write_gradient(x, x, *rest)


def _write_gradient(
    dx: Tensor, x: Tensor, targets: Tensor, lse: Tensor, count: Tensor, dloss: Tensor, vocab: int, ignored: int, reduction: str,
    smoothing: float, z_loss: float, softcap: float, version: str,
) -> Tensor:  # fmt: skip
    if not x.shape[0]:
        return dx
    targets, dloss, lse = targets.contiguous(), dloss.resolve_neg(), lse.contiguous()
    pointers = (
        dx.data_ptr(),
        x.data_ptr(),
        targets.data_ptr(),
        lse.data_ptr(),
        dloss.data_ptr(),
        count.data_ptr() if reduction == "mean" else 0,
    )
    strides = targets.dtype == torch.int64, dx.stride(0), x.stride(0), x.shape[1]
    step = dloss.stride(0) if reduction == "none" else 0
    launch, _, block = _plan("backward", version, x.dtype, bool(softcap), x.shape[1], x.get_device())
    launch((x.shape[0], 1, 1), block, 0, *pointers, *strides, vocab, ignored, step, smoothing, z_loss, softcap)
    return dx


def _fake(x: Tensor, targets: Tensor, vocab: int, ignored: int, reduction: str, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0]
    loss = torch.empty((rows,) if reduction == "none" else (), dtype=wide(x), device=x.device)
    return loss, *(torch.empty(s, dtype=torch.float64, device=x.device) for s in ((rows,), ()))


_SCALARS = "SymInt vocab, int ignored, str reduction, float smoothing, float z_loss, float softcap, str version"
_cross_entropy = raw_op(f"_cross_entropy(Tensor x, Tensor targets, {_SCALARS}) -> (Tensor, Tensor, Tensor)", 2, _launch, _fake)
_cross_entropy_backward = raw_op(
    f"_cross_entropy_backward(Tensor x, Tensor targets, Tensor lse, Tensor count, Tensor dloss, {_SCALARS}) -> Tensor",
    5,
    _launch_backward,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
_cross_entropy_backward_ = raw_op(
    f"_cross_entropy_backward_(Tensor(a!) x, Tensor targets, Tensor lse, Tensor count, Tensor dloss, {_SCALARS}) -> ()",
    5,
    _launch_backward_in_place,
    lambda *_: None,
)

# ---- autograd


def _forward_only(x: Tensor, targets: Tensor, *rest: Any) -> Any:
    *options, _, version = rest
    return _cross_entropy(x, targets, *options, version)


class _CrossEntropy(Differentiable):
    """(x, targets, *Options, inplace, version) -> loss, lse and count. The last two have no gradient."""

    forward = staticmethod(_forward_only)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, targets, *options, ctx.inplace, version = inputs
        ctx.options = *options, version
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        save(ctx, x, targets, *output[1:])

    @staticmethod
    def backward(ctx, dloss, *_):
        x, *rest = ctx.saved_tensors
        if dloss is None:
            return (None,) * 10
        if not ctx.inplace:
            return _gradient(x, *rest, dloss, *ctx.options), *(None,) * 9
        if watched(x, dloss):
            raise NotImplementedError("with inplace_backward, the gradient of cukern.cross_entropy cannot be differentiated")
        _cross_entropy_backward_(x, *rest, dloss, *ctx.options)
        torch.autograd.graph.increment_version(x)
        return x.detach(), *(None,) * 9

    @staticmethod
    def tangent(ctx, dx, *_):
        x, targets, lse, count = ctx.saved_tensors
        *_, version = ctx.options
        options = Options(*ctx.options[:-1])
        per_row = options._replace(reduction="none")
        g = _gradient(x, targets, lse, count, torch.ones_like(lse, dtype=wide(x)), *per_row, version)
        return reduce((g.to(wide(x)) * dx.to(wide(x))).sum(1), targets, options), None, None

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply, info.batch_size, in_dims, args)


class _CrossEntropyBackward(Differentiable):
    """The gradient as a function of x and dloss. lse and count depend on x and targets; here they are cached values without a gradient."""

    @staticmethod
    def forward(*args):
        return _cross_entropy_backward(*args)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, targets, lse, count, dloss, *ctx.options = inputs
        save(ctx, x, targets, lse, count, dloss)

    @staticmethod
    def backward(ctx, d):
        x, targets, _, _, dloss = ctx.saved_tensors
        dx, ddloss = second(x, targets, dloss, d, Options(*ctx.options[:-1]))
        return dx, None, None, None, ddloss, *(None,) * 7

    @staticmethod
    def tangent(ctx, dx, _targets, _lse, _count, ddloss, *_):
        x, targets, lse, count, dloss = ctx.saved_tensors
        out = None if ddloss is None else _gradient(x, targets, lse, count, ddloss, *ctx.options)
        if dx is None:
            return out
        change, _ = second(x, targets, dloss, dx, Options(*ctx.options[:-1]))
        return change if out is None else out + change

    @staticmethod
    def batch(info, in_dims, *args):
        return each(_apply_backward, info.batch_size, in_dims, args)


_apply, _apply_backward = apply_of(_CrossEntropy), apply_of(_CrossEntropyBackward)


def _gradient(x: Tensor, targets: Tensor, lse: Tensor, count: Tensor, dloss: Tensor, *options: Any) -> Tensor:
    return (_apply_backward if watched(x, dloss) else _cross_entropy_backward)(x, targets, lse, count, dloss, *options)


# ---- the versions: for each pass the kernel of a dtype, with or without softcap, and its threads for a number of columns

_V1, _V1_BWD, _V2, _V2_BWD, _REDUCE = (
    Template("cross_entropy.cu", f"cross_entropy_{name}", pdl=True) for name in ("v1", "v1_bwd", "v2", "v2_bwd", "reduce")
)


@cached(4096)
def _plan(
    pass_: str, version: str, dtype: torch.dtype, softcap: bool, columns: int, device: int
) -> tuple[backend.Launch, backend.Launch, tuple[int, int, int]]:
    """The launch of a pass, that of the reduction, and the block."""
    kernel, threads = getattr(choose("cross_entropy", version, device), pass_)(dtype, softcap, columns)
    reducer = _REDUCE[torch.float64 if dtype == torch.float64 else torch.float32]
    return kernel.on(device), reducer.on(device), (threads, 1, 1)


def _scalar(template: Template) -> Callable[..., tuple[Kernel, int]]:
    return lambda dtype, softcap, columns: (template[dtype, softcap], 256)


def _vectors(template: Template) -> Callable[..., tuple[Kernel, int]]:
    """Two vectors of 16 bytes per thread, in a block of 32 to 512 threads."""

    def choose_threads(dtype: torch.dtype, softcap: bool, columns: int) -> tuple[Kernel, int]:
        threads = math.ceil(columns * dtype.itemsize / 32)
        return template[dtype, softcap], min(512, max(32, 1 << (threads - 1).bit_length()))

    return choose_threads


def _instances(*templates: Template) -> Callable[[torch.dtype], Iterable[Kernel]]:
    def instances(dtype: torch.dtype) -> list[Kernel]:
        reducer = _REDUCE[torch.float64 if dtype == torch.float64 else torch.float32]
        return [reducer, *(template[dtype, softcap] for template in templates for softcap in (False, True))]

    return instances


VERSIONS = {
    "v1": Version("one element per thread and step", _scalar(_V1), _scalar(_V1_BWD), _instances(_V1, _V1_BWD)),
    "v2": Version("16-byte vectors, several loads in flight", _vectors(_V2), _vectors(_V2_BWD), _instances(_V2, _V2_BWD)),
}
