"""Raw ops: launches registered with torch, and called with the least host time."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_unflatten

from cukern.runtime import checks, planning, recording
from cukern.runtime.dispatch import sharding as split
from cukern.runtime.launch import backend
from cukern.runtime.launch.driver import refuse_fork

_library = torch.library.Library(__name__.partition(".")[0], "DEF")  # "cukern", but for a build of the Hub
_PLAIN = checks.PLAIN | {type(None)}
_MOST_LEVELS = 64  # of torch's older vmap
_tracing = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_batched = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


def raw_op(
    schema: str, tensors: int, impl: Callable[..., Any], fake: Callable[..., Any],
    library: torch.library.Library = _library, sharding: split.Rule = None,
) -> Callable[..., Any]:  # fmt: skip
    """Register a launch as `torch.ops.cukern.<name>`. Returns a function that calls it with the least host
    time.

    Args:
        schema: torch's schema, such as "_square(Tensor x, str version) -> Tensor": first tensors, last the
            version. The raw op is not differentiable; the autograd Function that calls it is.
        tensors: the number of arguments that are tensors or lists of tensors.
        impl, fake: the launch, and its version for fake tensors.
        library: the namespace in torch.ops.
        sharding: how DTensors are split, see sharding.py. None: they are replicated.

    The versions of arguments that the schema marks as written increase, as those of torch's in-place ops do.

    The result skips torch's dispatcher (1.7 us) unless one of these needs it: torch.compile, torch.export,
    dispatch modes such as FakeTensorMode, functorch transforms, tensor subclasses, the simulator.
    """
    short = schema.partition("(")[0]
    if library is _library and "Tensor[] params" not in schema:  # adamw has tables of its own
        impl = planning.planned_launch(impl, _tensor_names(schema, tensors))
    name = f"{library.ns}::{short}"
    library.define(schema)
    writes = [
        i
        for i, argument in enumerate(schema.partition("(")[2].partition(" -> ")[0].split(", "))
        if "!" in argument
    ]
    lists = "[]" in schema  # for which torch's older vmap has no rule
    if writes:
        impl = _counted(impl, writes)

    def without_grad(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return impl(*args)
        # graphs of torch.export are called with parameters, which torch's `out=` refuses
        with torch.no_grad():
            return impl(*args)

    library.impl(short, without_grad, "CUDA")

    def simulate(*args: Any) -> Any:
        # a backward pass follows a simulated forward
        if not backend.simulating() and torch._C._current_graph_task_id() < 0:
            raise ValueError(f"{name} runs kernels, and the tensors are on the CPU; {checks.SIMULATOR}")
        with backend.simulated_memory(_flat(args)):
            return without_grad(*args)

    library.impl(short, simulate, "CPU")
    torch.library.register_fake(name, fake, lib=library)
    packet = getattr(getattr(torch.ops, library.ns), short).default
    split.add(packet, sharding)

    def op(*args: Any) -> Any:
        split.register()
        if not _tracing():
            tensors = [x for x in _flat(args) if isinstance(x, torch.Tensor)]
            if _transforms() and any(map(_wrapped, tensors)):
                raise NotImplementedError(f"{name} has no rule for this torch.func transform")
            if lists and not writes and any(map(_batched, tensors)):
                return _batched_call(call, args)
        return packet(*args)

    def call_one(x: torch.Tensor, *rest: Any) -> Any:
        if _tracing() or type(x) not in _PLAIN or _modes() or not x.is_cuda:
            return op(x, *rest)
        try:
            return impl(x, *rest)
        except RuntimeError as error:
            refuse_fork(name, error)
            if not _transforms() and not _batched(x):
                checks.strided("x", x)
                raise
        return op(x, *rest)  # data_ptr() of a wrapper raised before the launch

    def call(*args: Any) -> Any:
        first = args[0][0] if type(args[0]) is list else args[0]
        if _tracing() or _modes() or _transforms() or not first.is_cuda:
            return op(*args)
        if not _PLAIN.issuperset(map(type, args[:tensors])) and not _PLAIN.issuperset(
            map(type, _flat(args[:tensors]))
        ):
            return op(*args)
        try:
            return impl(*args)
        except RuntimeError as error:
            refuse_fork(name, error)
            if not any(isinstance(x, torch.Tensor) and (_wrapped(x) or _batched(x)) for x in _flat(args)):
                raise
        # a functorch wrapper that outlived its transform, or `is_grads_batched`: the dispatcher unwraps it
        return op(*args)

    return call_one if tensors == 1 else call


def _counted(impl: Callable[..., Any], writes: Sequence[int]) -> Callable[..., Any]:
    """`impl`, which then increments the versions of the arguments that it writes."""

    def run(*args: Any) -> Any:
        result, recorder = impl(*args), recording.local.recorder
        written = [x for x in _flat([args[i] for i in writes]) if x is not None]
        increment_version(written) if recorder is None else recorder.call(increment_version, (written,))
        return result

    return run


def _batched_call(call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The rule of `torch.autograd.grad(is_grads_batched=True)`, whose vmap is torch's older one: one call per
    element of the batch."""
    flat, tree = tree_flatten(args)
    level, whole = _unbatched(flat)
    size = next(x.shape[0] for x in whole if x is not None)
    element = [[x if t is None else t[i] for x, t in zip(flat, whole, strict=True)] for i in range(size)]
    outs = [call(*tree_unflatten(one, tree)) for one in element]
    if isinstance(outs[0], torch.Tensor):
        return torch._add_batch_dim(torch.stack(outs), 0, level)
    return [torch._add_batch_dim(torch.stack(parts), 0, level) for parts in zip(*outs, strict=True)]


def _unbatched(flat: Sequence[Any]) -> tuple[int, list[Any]]:
    """The level of the batch, which the threads of the backward do not know, and the batched tensors as plain
    ones; None for the others."""
    for level in range(1, _MOST_LEVELS + 1):
        whole = [
            torch._remove_batch_dim(x, level, 1, 0) if isinstance(x, torch.Tensor) and _batched(x) else None
            for x in flat
        ]
        if not any(x is not None and _batched(x) for x in whole):
            return level, whole
    raise NotImplementedError("is_grads_batched inside of is_grads_batched has no rule for this op")


def _tensor_names(schema: str, count: int) -> list[str]:
    """The names of the first arguments of a schema, with "[]" for lists."""
    arguments = re.findall(
        r"Tensor(?:\(\w!\))?(\[\])?\??(\[\])? (\w+)", schema.partition("(")[2].rpartition("->")[0]
    )
    return [name + (a or b) for a, b, name in arguments][:count]


def _flat(args: Iterable[Any]) -> list[Any]:
    """The arguments, with lists flattened."""
    return [x for a in args for x in (a if isinstance(a, list | tuple) else (a,))]
