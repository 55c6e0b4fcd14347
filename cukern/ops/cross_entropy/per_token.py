"""Losses and log-probabilities per token of x @ weight.T + bias, in chunks of rows, so that all logits are
never in memory.

The gradients of the results are known only in the backward. So it computes the logits of each chunk again: 8
N C V floating-point operations for both passes, N rows, instead of 6 N C V.

With z the logits divided by the temperature, p = softmax(z) and H = -sum(p log p), the gradients by z are p -
onehot(target) for the loss, which is minus the log-probability, and -p (log p + H) for H.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.cross_entropy.op import (
    SCALARS,
    Options,
    checked_targets,
    launch_entropies,
    launch_forward,
    write_entropy_gradient,
    write_gradient,
)
from cukern.ops.cross_entropy.op import reference as loss_of_logits
from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import transformed, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.products import torch_matmul
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.tensors import as_matrix, unit_column_stride, wide


def checked_bias(bias: Any, x: Tensor, weight: Tensor) -> Tensor | None:
    bias = interop.of_columns(
        "bias", bias, weight[:1].expand(1, -1).new_empty(0, weight.shape[0]), checks.FLOATS
    )
    (bias,) = (None,) if bias is None else autocast.of_product(bias)
    checks.same(x=x, bias=bias)
    return bias


def token_factors(
    x: Tensor, classes: int, targets: Tensor, of_class: Any, of_token: Any, options: Options
) -> Tensor | None:
    """The factor of each row, checked, 0 for an ignored one. None: 1."""
    if of_class is None and of_token is None:
        return None
    if of_class is not None and options.smoothing:
        raise ValueError(f"class_weights must be None with label_smoothing, which is {options.smoothing}")
    weights = (targets != options.ignored).to(wide(x.dtype))
    for name, value, shape in (
        ("class_weights", of_class, (classes,)),
        ("token_weights", of_token, targets.shape),
    ):
        if value is None:
            continue
        value = interop.floats(name, value)
        checks.one_device(x=x, **{name: value})
        checks.shape(
            name,
            value,
            tuple(shape),
            "one weight for each class" if name == "class_weights" else "the shape of targets",
        )
        value = value.to(weights.dtype)
        weights = weights * (
            value[targets.clamp(0, len(value) - 1).long()] if name == "class_weights" else value
        )
    return weights


def token_losses(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, options: Options
) -> Tensor:
    """The loss of each token, with a backward that computes the logits again."""
    if not (x.is_cuda or backend.simulates(x)):
        checked_targets(targets, options)
    by_row = options._replace(reduction="none", version=in_force.now)
    found = losses_of(as_matrix(x), weight, bias, targets.flatten(), chunk, 1.0, False, by_row)
    return found[0].view(targets.shape)


def reduced(losses: Tensor, weights: Tensor | None, targets: Tensor, options: Options) -> Tensor:
    """The loss of weighted losses of tokens."""
    losses = losses if weights is None else losses * weights
    if options.reduction == "none":
        return losses
    total = losses.sum()
    if options.reduction == "sum":
        return total
    return total / ((targets != options.ignored).sum() if weights is None else weights.sum())


def losses_of(
    matrix: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, temperature: float,
    entropy: bool, options: Options,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each row, and its entropy, without elements unless `entropy`. Checked arguments;
    options.reduction is "none"."""
    kernels = matrix.is_cuda or backend.simulates(matrix)
    arguments = matrix, weight, bias, targets, chunk, temperature, entropy, *options
    if not kernels and (torch.compiler.is_compiling() or transformed()):
        return reference(*arguments)
    run: Callable[..., Any] = (
        (_apply if kernels else _apply_on_cpu)
        if watched(matrix, weight, bias)
        else _raw
        if kernels
        else _forward
    )
    return run(*arguments)[:2]


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, _: int, temperature: float,
    entropy: bool, *rest: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in torch's operations, with all logits."""
    options = Options(*rest)
    with autocast.off(x):
        logits = torch_matmul(x, weight.mT, *(() if bias is None else (bias,)))
        z = logits / temperature
        losses = loss_of_logits(z, targets, options)
        if not entropy:
            return losses, losses.new_empty(0)
        logs = z[:, : options.vocab].to(wide(z.dtype)).log_softmax(1)
        return losses, (-(logs.exp() * logs).sum(1)).masked_fill(targets == options.ignored, 0.0)


# ---- the raw ops: x is (rows, C), targets (rows)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    """The losses, the entropies, and what the backward needs of each row: 16 bytes."""
    options, entropy, parts = Options(*rest[3:]), rest[2], []
    with torch.no_grad(), autocast.off(x):
        for logits, chosen, _ in chunks(x, weight, bias, targets, *rest[:2]):
            losses, stats = _losses(logits, chosen, options)
            found = _entropies(logits, chosen, stats, options) if entropy else losses[:0]
            parts.append((losses, found, stats))
    return (
        tuple(torch.cat(each) for each in zip(*parts, strict=True))
        if parts
        else _fake(x, weight, bias, targets, *rest)
    )


def _fake(
    x: Tensor, weight: Tensor, bias: Any, targets: Tensor, chunk: Any, temperature: Any, entropy: bool,
    *_: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, dtype = x.shape[0], wide(x.dtype)
    losses, entropies = x.new_empty(rows, dtype=dtype), x.new_empty(rows if entropy else 0, dtype=dtype)
    return losses, entropies, x.new_empty(2 * rows, dtype=torch.float64)


def chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, temperature: float
) -> Any:
    """(logits / temperature, targets, slice) of each chunk. The logits' memory is used again."""
    x, weight, targets = unit_column_stride(x), weight.resolve_neg(), targets.contiguous()
    memory = x.new_empty(min(chunk, x.shape[0]), weight.shape[0])
    for a in range(0, x.shape[0], chunk):
        part, scale = x[a : a + chunk], 1 / temperature
        out = memory[: len(part)]
        if bias is None:
            torch.addmm(out, part, weight.t(), beta=0.0, alpha=scale, out=out)
        else:
            torch.addmm(bias, part, weight.t(), beta=scale, alpha=scale, out=out)
        yield out, targets[a : a + chunk], slice(a, a + chunk)


def _losses(logits: Tensor, targets: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    if logits.is_cuda or backend.simulates(logits):
        return launch_forward(logits, targets, *options)
    return loss_of_logits(logits, targets, options), logits.new_empty(2 * len(logits), dtype=torch.float64)


def _entropies(logits: Tensor, targets: Tensor, stats: Tensor, options: Options) -> Tensor:
    if logits.is_cuda or backend.simulates(logits):
        return launch_entropies(logits, targets, stats, options)
    return _by_torch(logits, targets, options)[2]


def _by_torch(logits: Tensor, targets: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """p, p log p and H of each row. H of an ignored row is 0."""
    p = logits[:, : options.vocab].to(wide(logits.dtype)).softmax(1)
    terms = torch.xlogy(p, p)
    return p, terms, (-terms.sum(1)).masked_fill(targets == options.ignored, 0.0)


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, stats: Tensor, dloss: Tensor | None,
    dentropy: Tensor | None, dx: bool, dweight: bool, dbias: bool, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of x, weight and bias, without elements if they are not wanted."""
    _, temperature, _, *scalars = rest
    options = Options(*scalars)
    outs = _fake_backward(x, weight, bias, targets, stats, dloss, dentropy, dx, dweight, dbias)
    total, of_bias = (t.new_zeros(t.shape, dtype=wide(x.dtype)) for t in outs[1:])
    with torch.no_grad(), autocast.off(x):
        for logits, chosen, rows in chunks(x, weight, bias, targets, *rest[:2]):
            of_loss, of_entropy = (None if d is None else d[rows] / temperature for d in (dloss, dentropy))
            _write_gradient(
                logits, chosen, stats[2 * rows.start : 2 * rows.stop], of_loss, of_entropy, options
            )
            if dx:
                torch.mm(logits, weight, out=outs[0][rows])
            if dweight:
                add_product(total, logits.t(), x[rows])
            if dbias:
                of_bias += logits.sum(0, dtype=of_bias.dtype)
    return outs[0], total.to(weight.dtype), of_bias.to(outs[2].dtype)


def _fake_backward(
    x: Tensor, weight: Tensor, bias: Any, targets: Any, stats: Any, dloss: Any, dentropy: Any, *wanted: Any
) -> Any:
    shapes = x.shape, weight.shape, weight.shape[:1]
    return tuple(x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted[:3], strict=True))


def _write_gradient(
    logits: Tensor, targets: Tensor, stats: Tensor, dloss: Any, dentropy: Any, options: Options
) -> None:
    """Write the gradient of the logits over them."""
    if logits.is_cuda or backend.simulates(logits):
        if dentropy is None:
            return write_gradient(logits, logits, targets, stats, dloss, *options)
        return write_entropy_gradient(logits, targets, stats, dloss, dentropy, options)
    if dentropy is None:
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            logits.copy_(torch.autograd.grad(loss_of_logits(leaf, targets, options), leaf, dloss)[0])
        return None
    valid = (targets != options.ignored)[:, None]
    p, terms, entropies = _by_torch(logits, targets, options)
    found = -dentropy[:, None] * (terms + p * entropies[:, None])
    if dloss is not None:
        found += dloss[:, None] * p
        found.scatter_add_(1, targets.clamp(0, options.vocab - 1).long()[:, None], -dloss[:, None])
    logits[:, options.vocab :] = 0
    logits[:, : options.vocab] = found.masked_fill_(~valid, 0.0)
    return None


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total += a @ b, or = for the first. 16-bit factors are added in float32."""
    if a.dtype == total.dtype or not a.is_cuda:
        torch.addmm(total, a.to(total.dtype), b.to(total.dtype), beta=0.0 if first else 1.0, out=total)
    elif first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


_SCALARS = f"SymInt chunk, float temperature, bool entropy, {SCALARS}"
_INPUTS = "Tensor x, Tensor weight, Tensor? bias, Tensor targets"
_raw = raw_op(f"_linear_losses({_INPUTS}, {_SCALARS}) -> (Tensor, Tensor, Tensor)", 4, _forward, _fake)
_raw_backward = raw_op(
    f"_linear_losses_backward({_INPUTS}, Tensor stats, Tensor? dloss, Tensor? dentropy, bool dx, bool "
    f"dweight, bool dbias, {_SCALARS})"
    " -> (Tensor, Tensor, Tensor)", 7, _backward, _fake_backward,
)  # fmt: skip


def _gradient(of: Callable[..., Any]) -> Callable[..., tuple[Tensor | None, ...]]:
    def gradient(
        needed: Sequence[bool], inputs: Sequence[Any], stats: Sequence[Tensor], *douts: Any
    ) -> tuple[Tensor | None, ...]:
        x, weight, bias, targets, *rest = inputs
        douts = douts[0], douts[1] if rest[2] else None
        found = of(
            x, weight, bias, targets, *stats, *douts, *needed[:2], bias is not None and needed[2], *rest
        )
        return *(t if need else None for t, need in zip(found, needed, strict=False)), None

    return gradient


_apply, _apply_on_cpu = (
    differentiable("_LinearLosses", forward, reference, 4, 2, gradient=_gradient(backward))
    for forward, backward in ((_raw, _raw_backward), (_forward, _backward))
)
