"""Muon: torch.optim.Muon, with one product for all matrices of a shape instead of one for each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cukern.ops.adamw.state import local

try:
    from torch.optim import Muon as _Muon
except ImportError:
    raise ImportError(f"cukern.Muon needs torch 2.9 or later, this is {torch.__version__}") from None


class Muon(_Muon):
    """torch.optim.Muon with its arguments, state and results, in fewer launches.

        matrices = [p for p in model.parameters() if p.ndim == 2]
        optimizer = cukern.Muon(matrices, lr=0.02, weight_decay=0.01)
        model(x).sum().backward()
        optimizer.step()

    The momentum B becomes 0.95 B + 0.05 g. The update, here g + 0.95 (B - g), is orthogonalized in bfloat16:
    X, divided by its 2-norm, becomes a X + (b X X^T + c (X X^T)^2) X, ns_steps times. Matrices of one shape
    are multiplied together, so the rounding differs from torch's by that of bfloat16. All operations are
    torch's. A step can be captured in a CUDA graph, which reads an lr that is a tensor of one element on the
    parameters' device at each replay.

    Args: those of torch.optim.Muon: params (matrices; embeddings and vectors belong to AdamW), lr,
        weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn. DTensors may be
        divided: each process then orthogonalizes whole matrices.

    Raises ValueError as torch.optim.Muon does, and ImportError for torch below 2.9.
    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have a gradient. Returns what `closure`, which computes the loss and the
        gradients, returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            buffers: list[Tensor] = []
            self._init_group(group, params, grads, buffers)
            if params:
                _update(group, params, grads, buffers)
        return loss


def _update(
    group: dict[str, Any], params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor]
) -> None:
    lr, momentum = group["lr"], group["momentum"]
    # the host does not read it
    on_device = isinstance(lr, Tensor) and all(p.device == lr.device for p in params)
    lr = lr.reshape(()) if on_device else float(lr)
    locals_, grads, buffers = ([local(t) for t in tensors] for tensors in (params, grads, buffers))
    torch._foreach_lerp_(buffers, grads, 1 - momentum)
    updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
    if group["weight_decay"]:
        torch._foreach_mul_(locals_, 1 - lr * group["weight_decay"])
    places: dict[Any, list[int]] = {}
    for i, p in enumerate(params):
        places.setdefault((p.shape, p.device), []).append(i)
    for (shape, _), some in places.items():
        found = _orthogonal([_whole(updates[i], params[i]) for i in some], group)
        factor: Any = -lr * _ratio(group["adjust_lr_fn"], *shape)
        for i, update in zip(some, found, strict=True):
            part = _part(update, params[i])
            if on_device:
                locals_[i].addcmul_(part, factor)
            else:
                locals_[i].add_(part, alpha=factor)


def _orthogonal(updates: Sequence[Tensor], group: dict[str, Any]) -> Tensor:
    """Newton-Schulz iterations on matrices of one shape, (count, rows, columns), in bfloat16."""
    a, b, c = group["ns_coefficients"]
    x = updates[0].new_empty((len(updates), *updates[0].shape), dtype=torch.bfloat16)
    torch._foreach_copy_(list(x), list(updates))
    x /= torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32).clamp(min=group["eps"])
    tall = x.shape[1] > x.shape[2]  # then X^T X is the smaller square
    for _ in range(group["ns_steps"]):
        gram = x.mT @ x if tall else x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, x, polynomial, beta=a) if tall else torch.baddbmm(x, polynomial, x, beta=a)
    return x


def _ratio(adjust: str | None, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    return 0.2 * max(rows, columns) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / columns) ** 0.5


# ---- DTensors


def _whole(update: Tensor, p: Any) -> Tensor:
    """The update of a whole parameter, from this process's part."""
    if not hasattr(p, "to_local"):
        return update
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        update, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
    ).full_tensor()


def _part(update: Tensor, p: Any) -> Tensor:
    """This process's part of the update of a whole parameter."""
    if not hasattr(p, "to_local"):
        return update
    from torch.distributed.tensor import DTensor, Replicate

    return (
        DTensor.from_local(update, p.device_mesh, [Replicate()] * p.device_mesh.ndim)
        .redistribute(placements=p.placements)
        .to_local()
    )
