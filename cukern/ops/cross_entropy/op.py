"""cross_entropy of logits and target indices, and its gradient, each in one pass over the logits. Math:
kernels_cu/cross_entropy.cu."""

import itertools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.device import cached, device_of
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop, limits
from cukern.runtime.launch.kernel import Kernel, Template
from cukern.runtime.planning import planned
from cukern.runtime.registry import Version
from cukern.runtime.tensors import as_matrix, empty_like, pointers, unit_column_stride, wide


class Options(NamedTuple):
    """What a call computes. `softcap` is 0 without a softcap."""

    vocab: int
    ignored: int = -100
    reduction: str = "mean"
    smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float = 0.0
    version: str = ""

    def packed(self, dloss_step: int = 0) -> bytes:
        """The struct Options of cross_entropy.cu."""
        return struct.pack("3q3d", self.vocab, self.ignored, dloss_step, *self[3:6])


@planned("logits", "targets")
def cross_entropy(
    logits: Any, targets: Any, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None,
    vocab_size: int | None = None, inplace_backward: bool = False, version: str | None = None,
) -> Tensor:  # fmt: skip
    """The cross-entropy loss of logits, as torch.nn.functional.cross_entropy of target indices. Higher
    derivatives use torch's operations.

        logits = torch.randn(8, 1024, 50304, device="cuda", requires_grad=True)
        targets = torch.randint(50257, (8, 1024), device="cuda")
        cukern.cross_entropy(logits, targets, vocab_size=50257).backward()

    Args:
        logits: (..., V), V <= 2^30, float16, bfloat16, float32 or float64. Strides, arrays, CPU tensors,
            autocast: see `help(cukern)`.
        targets: (...), int64 or int32, in 0..vocab_size-1, or ignore_index. Others: ValueError on the CPU; a
            row of NaN on a GPU.
        ignore_index: rows with this target have loss 0 and gradient 0.
        reduction: "mean" over the targets that are not ignored, NaN without one; "sum" or "none".
        label_smoothing: from 0 to 1, shared equally by the vocab_size classes.
        z_loss: adds z_loss * logsumexp(logits)^2 to the loss of each row that is not ignored.
        softcap: a positive number; the logits become softcap * tanh(logits / softcap) first. None: they do
            not.
        vocab_size: the columns from this one on are padding: not used, with gradient 0. None: V.
        inplace_backward: the backward writes the gradient over the logits, which saves their memory. The
             logits cannot be a leaf. No effect on the CPU and inside torch.compile.
        version: "v1" or "v2"; default: the fastest.

    Returns the loss: a number, or with "none" a tensor of targets' shape, in float32, or float64 for float64
    logits.

    Raises TypeError for another dtype or an option of another type; ValueError for shapes or devices that do
    not fit, for logits whose sizes would also fit torch's (N, C, ...), and for an option outside its range.
    z-loss: PaLM, arXiv 2204.02311; softcap: Gemma 2, arXiv 2408.00118.
    """
    logits = interop.floats("logits", logits)
    targets = interop.indices("targets", targets, "logits", logits)
    checks.version("cross_entropy", version, VERSIONS)
    if not logits.ndim or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, it must be that of logits without the last, "
            f"{tuple(logits.shape)}"
        )
    if logits.ndim > 2 and _has_two_meanings(logits.shape):
        raise ValueError(
            f"logits {tuple(logits.shape)} with targets {tuple(targets.shape)} may be (..., T, V) or torch's "
            f"(N, C, ...): "
            "pass logits.flatten(0, -2) and targets.flatten(), with the classes in the last dimension of "
            "logits"
        )
    options = options_of(
        logits.shape[-1],
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        vocab_size,
        version or in_force.now,
    )
    inplace = _in_place(logits, inplace_backward)
    if backend.uses_torch("cross_entropy", version, logits):
        checked_targets(targets, options)
        return reference(logits, targets, options)
    x = unit_column_stride(as_matrix(logits))
    run = _cross_entropy if not watched(x) else _apply_in_place if inplace else _apply
    loss, _ = run(x, targets.flatten(), *options)
    return loss.view(targets.shape) if options.reduction == "none" else loss


def _has_two_meanings(shape: torch.Size) -> bool:
    """True if targets that fit (..., T, V) fit torch's (N, C, ...) too. Sizes that a graph leaves open may be
    equal."""
    return checks.known(shape[-1] > 1) and all(checks.known(a == b) for a, b in itertools.pairwise(shape[1:]))


def options_of(
    columns: int, ignored: Any, reduction: Any, smoothing: Any, z_loss: Any, softcap: Any, vocab: Any,
    version: str,
) -> Options:  # fmt: skip
    ignored = checks.integer("ignore_index", ignored, -(1 << 63), (1 << 63) - 1)
    reduction = checks.choice("reduction", reduction, ("none", "sum", "mean"))
    smoothing, z_loss = (
        checks.number("label_smoothing", smoothing, 1, least=0),
        checks.number("z_loss", z_loss, checks.FLOAT32_MAX),
    )
    if softcap is not None and not checks.number("softcap", softcap, 1e30) >= 1e-30:
        raise ValueError(f"softcap must be positive, at least 1e-30, got {softcap!r}")
    checks.integer("the number of classes, logits.shape[-1],", columns, 1, 1 << 30)
    vocab = columns if vocab is None else checks.integer("vocab_size", vocab, 1, columns)
    return Options(vocab, ignored, reduction, smoothing, z_loss, float(softcap or 0), version)


def _in_place(logits: Tensor, inplace: bool) -> bool:
    if not checks.flag("inplace_backward", inplace) or torch.compiler.is_compiling() or not watched(logits):
        return False
    if logits.is_leaf or (logits._base is not None and logits._base.is_leaf and logits._base.requires_grad):
        raise ValueError(
            "inplace_backward writes over the logits, which must not be a leaf that requires grad, such as a "
            "parameter"
        )
    if any(n > 1 and stride == 0 for n, stride in zip(logits.shape, logits.stride(), strict=True)):
        raise ValueError(
            f"inplace_backward writes over the logits, which must not overlap: their strides are "
            f"{logits.stride()}"
        )
    if transformed():
        raise NotImplementedError(
            "inplace_backward of cross_entropy has no rule for torch.func transforms and forward-mode "
            "derivatives"
        )
    return True


def checked_targets(targets: Tensor, options: Options) -> None:
    if (
        torch.compiler.is_compiling()
        or transformed()
        or type(targets) not in (Tensor, torch.nn.Parameter)
        or targets.is_meta
    ):
        return
    wrong = targets[((targets < 0) | (targets >= options.vocab)) & (targets != options.ignored)]
    if wrong.numel():
        raise ValueError(
            f"targets must be in 0..{options.vocab - 1} or ignore_index {options.ignored}, got "
            f"{int(wrong[0])}"
        )


def reference(logits: Tensor, targets: Tensor, options: Options) -> Tensor:
    with autocast.off(logits):
        vocab, ignored, reduction, smoothing, z_loss, softcap, _ = options
        flat = targets.flatten().long()
        x = logits.to(wide(logits.dtype))[..., :vocab].reshape(flat.shape[0], vocab)
        x = x.masked_fill((flat == ignored)[:, None], 0.0)  # a NaN in an ignored row would reach its gradient
        if softcap:
            x = softcap * torch.tanh(x / softcap)
        inner = "none" if z_loss else reduction
        loss = torch.nn.functional.cross_entropy(
            x, flat, ignore_index=ignored, reduction=inner, label_smoothing=smoothing
        )
        if z_loss:
            top = x.detach().amax(-1, keepdim=True)
            # torch's derivative of logsumexp, exp(x - lse), is less accurate
            lse = top[:, 0] + (x - top).exp().sum(-1).log()
            rows = loss + (z_loss * lse * lse).masked_fill(flat == ignored, 0.0)
            loss = rows if reduction == "none" else rows.sum()
            if reduction == "mean":
                loss = loss / (flat != ignored).sum()
        return loss.view(targets.shape) if reduction == "none" else loss


# ---- the raw ops: x is (rows, columns), targets (rows), stats: 16 bytes per row, struct Lse in
# cross_entropy.cu, and for a sum the number of targets not ignored


def launch_forward(x: Tensor, targets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    options, rows, is_wide, device = Options(*rest), x.shape[0], targets.dtype == torch.int64, x.get_device()
    loss, stats = _fake(x, targets, *rest)
    x, targets, is_reduced = unit_column_stride(x), targets.contiguous(), options.reduction != "none"
    launch, block, warps = _plan(
        "forward", options.version, x.dtype, options.softcap != 0, options.smoothing != 0, x.shape[1], device
    )
    block = (32, 4, 1) if rows * block[0] < 4 * warps else block  # few rows: shorter, with more lanes
    # rows of some lanes, the same number for all
    each = max(1, min(-(-rows * block[0] // (32 * warps)), block[0])) if warps else 1
    blocks = -(-rows // (each * block[1]))
    partials = torch.empty(blocks, 2, dtype=torch.float64, device=x.device) if is_reduced else None
    if rows:
        addresses = pointers(None if is_reduced else loss, stats, partials, x, targets)
        launch((blocks, 1, 1), block, 0, *addresses, is_wide, rows, x.stride(0), options.packed())
    if partials is not None:
        addresses = loss.data_ptr(), stats.data_ptr() + 16 * rows, partials.data_ptr()
        _REDUCE[wide(x.dtype)].on(device)(
            (1, 1, 1), (256, 1, 1), 0, *addresses, blocks, options.reduction == "mean"
        )
    return loss, stats


def write_gradient(dx: Tensor, x: Tensor, targets: Tensor, stats: Tensor, dloss: Tensor, *rest: Any) -> None:
    options, rows, is_wide = Options(*rest), x.shape[0], targets.dtype == torch.int64
    targets, dloss, stats = targets.contiguous(), dloss.resolve_neg(), stats.contiguous()
    step = dloss.stride(0) if options.reduction == "none" else 0
    count = stats.data_ptr() + 16 * rows if options.reduction == "mean" else 0
    launch, block, pieces = _plan(
        "backward", options.version, x.dtype, options.softcap != 0, False, x.shape[1], x.get_device()
    )
    arguments = (
        *pointers(dx, x, targets, stats, dloss),
        count,
        is_wide,
        *x.shape,
        dx.stride(0),
        x.stride(0),
        pieces,
        options.packed(step),
    )
    if rows:
        launch((-(-rows // block[1]) * pieces, 1, 1), block, 0, *arguments)


def launch_entropies(x: Tensor, targets: Tensor, stats: Tensor, options: Options) -> Tensor:
    """The entropy of each row. `stats`: of launch_forward, without smoothing, z-loss and softcap."""
    rows, targets = x.shape[0], targets.contiguous()
    entropies = x.new_empty(rows, dtype=wide(x.dtype))
    arguments = *pointers(entropies, x, targets, stats), targets.dtype == torch.int64, x.stride(0)
    if rows:
        launch = _ENTROPY[x.dtype].on(x.get_device())
        launch((rows, 1, 1), (256, 1, 1), 0, *arguments, options.packed())
    return entropies


def write_entropy_gradient(
    x: Tensor, targets: Tensor, stats: Tensor, dloss: Tensor | None, dentropy: Tensor, options: Options
) -> None:
    """Write the gradient of the logits over them. Options: see launch_entropies."""
    entropies = launch_entropies(x, targets, stats, options)
    targets, dentropy = targets.contiguous(), dentropy.resolve_neg().contiguous()
    dloss = None if dloss is None else dloss.resolve_neg().contiguous()
    addresses = pointers(x, targets, stats, entropies, dloss, dentropy)
    if len(x):
        launch = _ENTROPY_BWD[x.dtype].on(x.get_device())
        sizes = targets.dtype == torch.int64, x.shape[1], x.stride(0), options.packed()
        launch((len(x), 1, 1), (256, 1, 1), 0, *addresses, *sizes)


def _fake(
    x: Tensor, targets: Tensor, vocab: int, ignored: int, reduction: str, *_: Any
) -> tuple[Tensor, Tensor]:
    loss = torch.empty(x.shape[:1] if reduction == "none" else (), dtype=wide(x.dtype), device=x.device)
    return loss, torch.empty(2 * x.shape[0] + int(reduction != "none"), dtype=torch.float64, device=x.device)


def _launch_backward(x: Tensor, *rest: Any) -> Tensor:
    dx = empty_like(x)
    write_gradient(dx, unit_column_stride(x), *rest)
    return dx


def _sharding(rest: str) -> Callable[..., str]:
    """Losses of rows can be split. Their sum keeps the number of all targets behind the rows' statistics."""
    return lambda *args: f"r., r{rest}" if "none" in args else ""


SCALARS = (
    "SymInt vocab, int ignored, str reduction, float smoothing, float z_loss, float softcap, str version"
)
_REST = f"Tensor targets, Tensor stats, Tensor dloss, {SCALARS}"
_cross_entropy = raw_op(
    f"_cross_entropy(Tensor x, Tensor targets, {SCALARS}) -> (Tensor, Tensor)",
    2,
    launch_forward,
    _fake,
    sharding=_sharding(" -> r, r"),
)
_backward = raw_op(
    f"_cross_entropy_backward(Tensor x, {_REST}) -> Tensor",
    4,
    _launch_backward,
    lambda x, *_: empty_like(x),
    sharding=_sharding(", r, r -> r."),
)
_backward_in_place = raw_op(
    f"_cross_entropy_backward_(Tensor(a!) x, {_REST}) -> ()",
    4,
    lambda x, *rest: write_gradient(x, x, *rest),
    lambda *_: None,
    sharding=_sharding(", r, r -> "),
)


def _gradient(
    _: Any, inputs: Sequence[Any], stats: Sequence[Tensor], dloss: Tensor
) -> tuple[Tensor | None, ...]:
    x, targets, *options = inputs
    return _backward(x, targets, *stats, dloss, *options), None


def _gradient_in_place(
    _: Any, inputs: Sequence[Any], stats: Sequence[Tensor], dloss: Tensor
) -> tuple[Tensor | None, ...]:
    x, targets, *options = inputs
    _backward_in_place(x, targets, *stats, dloss, *options)
    return x.detach(), None


def _no_second_derivative(*_: Any) -> NoReturn:
    raise NotImplementedError("with inplace_backward, the gradient of cross_entropy cannot be differentiated")


_apply = differentiable(
    "_CrossEntropy",
    _cross_entropy,
    lambda x, t, *rest: reference(x, t, Options(*rest)),
    2,
    gradient=_gradient,
)
_apply_in_place = differentiable(
    "_CrossEntropy", _cross_entropy, _no_second_derivative, 2, gradient=_gradient_in_place
)

# ---- the versions. _PLANS give the kernel of a pass for (version, dtype, has softcap, has label smoothing,
# columns), its block (threads per row, rows, 1), and a number: for the forward, the warps per SM if a row has
# lanes of a warp, else 0; for the backward, the blocks of a row

_FWD, _BWD, _REDUCE, _ENTROPY, _ENTROPY_BWD = (
    Template("cross_entropy.cu", f"cross_entropy_{name}", pdl=True)
    for name in ("fwd", "bwd", "reduce", "entropy", "entropy_bwd")
)


def entropy_kernels(dtype: torch.dtype) -> list[Kernel]:
    return [_ENTROPY[dtype], _ENTROPY_BWD[dtype]]


# rows of up to _SHORT_BYTES have 8 to 32 lanes of one of _WARPS warps per SM
_SHORT_BYTES, _LANE_BYTES, _WARPS = 16384, 512, 32
_THREADS, _LOADS = 96, 4  # of v2's backward: threads per block, and vectors per thread


@cached(4096)
def _plan(pass_: str, version: str, dtype: torch.dtype, *rest: Any) -> tuple[Any, limits.Dim, int]:
    """The launch of a pass, its block, and the number of warps on the GPU, or of blocks that share a row."""
    *features, device = rest
    kernel, block, number = _PLANS[pass_](
        getattr(choose("cross_entropy", version, device), pass_), dtype, *features
    )
    return kernel.on(device), block, number * device_of(device).sms if pass_ == "forward" else number


def _forward_plan(
    version: str, dtype: torch.dtype, softcap: bool, smoothing: bool, columns: int
) -> tuple[Kernel, limits.Dim, int]:
    loads = 0 if version == "v1" else 2 if dtype.itemsize == 8 else 4
    is_short = loads > 0 and columns * dtype.itemsize <= _SHORT_BYTES
    # one kernel less: with a softcap it always adds the logits
    kernel = _FWD[dtype, softcap, smoothing or softcap, is_short, loads]
    lanes = next(n for n in (8, 16, 32) if n == 32 or columns * dtype.itemsize <= n * _LANE_BYTES)
    return kernel, (lanes, 128 // lanes, 1) if is_short else (256, 1, 1), _WARPS * is_short


def _backward_plan(
    version: str, dtype: torch.dtype, softcap: bool, _: bool, columns: int
) -> tuple[Kernel, limits.Dim, int]:
    if version == "v1":
        return _BWD[dtype, softcap, 0], (256, 1, 1), 1
    # threads; 16, because up to 14 columns are not in vectors
    needed = max(16, -(-columns * dtype.itemsize // (16 * _LOADS)))
    pieces = -(-needed // _THREADS)
    threads = -(-needed // pieces)
    return _BWD[dtype, softcap, _LOADS], (threads, _THREADS // threads, 1), pieces


def _instances(version: str, dtype: torch.dtype) -> list[Kernel]:
    calls = itertools.product(
        (_forward_plan, _backward_plan), (False, True), (False, True), (1, _SHORT_BYTES)
    )
    kernels = [
        plan(version, dtype, softcap, smoothing, columns)[0] for plan, softcap, smoothing, columns in calls
    ]
    return [_REDUCE[wide(dtype)], *{kernel.name: kernel for kernel in kernels}.values()]


_PLANS = {"forward": _forward_plan, "backward": _backward_plan}
VERSIONS = {
    "v1": Version("one element per thread and step", partial(_instances, "v1")),
    "v2": Version("16-byte vectors; a warp per short row", partial(_instances, "v2")),
}
