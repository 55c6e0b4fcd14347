"""The usual call of kron_linear, in a few microseconds: tensors on a GPU, no bias, no residual, nothing that records a graph, one launch.

A call of the same shapes and strides as an earlier one needs none of its checks again, and no plan: all but the pointers is known. What
torch.compile asks before it runs what it compiled, TensorGuards, tells so of all tensors at once: their types, dtypes, devices, shapes,
strides, whether they require a gradient, are negated lazily, or are seen by a dispatch mode or one of torch.func's transforms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from cukern.ops.kron_linear import forward
from cukern.ops.kron_linear.checks import PLAIN
from cukern.ops.kron_linear.versions import VERSIONS
from cukern.runtime.device import when_plans_change
from cukern.runtime.registry import choose

# torch's stub does not know its arguments. Without it no call is known.
TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

Call = Callable[[Tensor, Sequence[Tensor]], Tensor]

_MOST, _MOST_KEYS = 16, 512  # calls to remember that have a key in common, and keys
_recording = torch.is_grad_enabled
_tracing = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack

V4 = VERSIONS["v4"]
_known: dict[Any, list[tuple[Any, Call]]] = {}
when_plans_change(_known.clear)


def usual(x: Any, factors: Any, scale: Any) -> bool:
    """Whether a call may be known: the types of its arguments are, and nobody traces, listens or carries tangents."""
    if type(x) not in PLAIN or type(factors) not in (list, tuple) or type(scale) not in (float, int):
        return False
    return not (_tracing() or _modes() or forward_ad._current_level >= 0)


def known(x: Tensor, factors: Sequence[Tensor], scale: float) -> Call | None:
    """The launch of an earlier usual call that was like this one."""
    try:
        calls = _known.get(_key(x, factors, scale), ())
    except RuntimeError:  # a nested tensor has no shape
        return None
    for guards, call in calls:
        if guards.check(x, *factors):
            return None if x.data_ptr() & 15 else call
    return None


def remember(x: Tensor, factors: Sequence[Tensor], scale: float) -> None:
    """Prepare for calls like this usual one, which goes to kernels, if one launch will do."""
    every = (x, *factors)
    if not TensorGuards or not x.is_cuda or not x.is_contiguous() or not x.numel() or x.data_ptr() & 15:
        return
    if len({id(t) for t in every}) < len(every):  # the guards take a tensor that comes twice for another one
        return
    if not all(map(_is_plain, every)) or any([w.ndim != 2 for w in factors]) or choose("kron_linear", "", x.get_device()) is not V4:
        return
    if call := forward.single_launch(x, factors, float(scale)):
        if len(_known) >= _MOST_KEYS:
            _known.clear()
        alike = _known.setdefault(_key(x, factors, scale), [])
        if len(alike) >= _MOST:
            alike.clear()
        alike.append((TensorGuards(x, *factors, dynamic_dims_sizes=None, dynamic_dims_strides=None), call))


def _is_plain(t: Tensor) -> bool:
    return type(t) in PLAIN and not t.is_neg() and not (_recording() and t.requires_grad)


def _key(x: Tensor, factors: Sequence[Tensor], scale: float) -> Any:
    return x.shape, len(factors), scale, forward.tf32(), _recording()
