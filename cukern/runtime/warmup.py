"""Compiles and loads kernels ahead of time, so that CUDA graphs can be captured and no training step waits
for the compiler."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cukern.runtime import checks
from cukern.runtime.device import Device, assumed, device_of
from cukern.runtime.launch import backend, driver
from cukern.runtime.launch.kernel import Kernel, collecting, recording
from cukern.runtime.registry import CASES, Case

Shapes = Iterable[Sequence[int]]
Record = Callable[..., object]  # of a pass and a launch: see kernel.recording


def warmup(
    *ops: str,
    shapes: Shapes | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    device: torch.device | str | int | None = None,
) -> None:
    """Compile and load the kernels of the ops on one GPU.

    Args:
        ops: names such as "square"; all ops if none is given.
        shapes: with one op: the sizes of the calls to come, as `cukern bench OP` takes them (given a wrong
            number, it prints the names). Loads what forward and backward need for these shapes with any
            number of rows. Without shapes: all kernels that do not depend on the shape, and for kron_linear
            only some examples.
        dtypes: only kernels of these dtypes; None: all that an op has.
        device: the GPU; None: torch's current one.

    Raises TypeError for an argument of the wrong type; ValueError for an unknown op, dtype or GPU and for a
    shape that does not fit the op; SetupError without a GPU.

    Example:
        >>> shapes = [(1024, 32, 32, 32)]
        >>> cukern.warmup("kron_linear", shapes=shapes, dtypes=(torch.bfloat16,))  # doctest: +SKIP
    """
    chosen, shapes = [CASES[checks.choice("op", name, CASES)] for name in ops or CASES], _shapes(ops, shapes)
    _check_dtypes(chosen, dtypes)
    index = _index(device)
    driver.require_gpu()
    if index is None:
        index = torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(f"device must be one of the {torch.cuda.device_count()} GPUs, got {device!r}")
    facts, kernels = device_of(index), dict[str, Kernel]()
    for case in chosen:
        kernels |= (
            kernels_for(case, shapes, dtypes, facts) if shapes else case.op.kernels(facts.capability, dtypes)
        )
    # NVRTC releases the GIL
    with torch.cuda.device(index), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(lambda kernel: kernel.on(index), kernels.values()))
    with torch.inference_mode(False), torch.enable_grad():
        one = torch.ones(1, 1, dtype=torch.float32, device=f"cuda:{index}", requires_grad=True)
        # some plans use cuBLAS, which cannot start inside a capture: start it in this thread and in
        # autograd's
        (one @ one).backward()


def kernels_for(
    case: Case, shapes: Shapes, dtypes: Collection[torch.dtype] | None, device: Device
) -> dict[str, Kernel]:
    """The kernels that forward and backward of a case launch on a GPU for inputs of these shapes with any
    number of rows."""
    return planned(
        case, [variant for dims in shapes for variant in case.variants(tuple(dims))], dtypes, device
    )


def _ignored(*_: Any) -> None:
    pass


def planned(
    case: Case,
    shapes: Shapes,
    dtypes: Collection[torch.dtype] | None,
    device: Device,
    record: Record = _ignored,
) -> dict[str, Kernel]:
    """The kernels that forward and backward launch on a GPU for inputs of exactly these shapes. Needs no GPU
    and touches no memory.

    `record` is called for each launch, with its pass first: "fwd grad" (inputs that require grad), "bwd",
    "fwd".
    """
    with assumed(device), backend.backend("sim"), collecting() as kernels, _Unwritten():
        for dims in shapes:
            for dtype in case.op.dtypes if dtypes is None else [d for d in case.op.dtypes if d in dtypes]:
                _call(case, dims, dtype, record)
        return dict(kernels)


class _Unwritten(TorchFunctionMode):
    """Replaces random tensors by uninitialized ones: plans depend on shapes only, and memory that is never
    touched is never allocated."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.empty if function in (torch.randn, torch.rand) else function)(*args, **(kwargs or {}))


def _call(case: Case, dims: Sequence[int], dtype: torch.dtype, record: Record) -> None:
    """Plan the launches of forward and backward, without and with gradients."""
    inputs = case.make(dims, dtype, "cpu")
    names = case.names(inputs)
    for grad in (True, False) if case.differentiable else (False,):
        leaves = [
            x.detach().requires_grad_(grad and case.has_gradient(n, x))
            for n, x in zip(names, inputs, strict=True)
        ]
        with torch.set_grad_enabled(grad), recording(partial(record, "fwd grad" if grad else "fwd")):
            arguments = [
                x.clone() if n in case.in_place and x.requires_grad else x
                for n, x in zip(names, leaves, strict=True)
            ]
            result = case.call(*arguments)
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        if grad:
            wanted, grads = [x for x in leaves if x.requires_grad], [torch.empty_like(y) for y in outputs]
            with recording(partial(record, "bwd")):
                torch.autograd.grad(outputs, wanted, grads, allow_unused=True)


def _shapes(ops: Sequence[str], shapes: Shapes | None) -> list[tuple[int, ...]]:
    if shapes is None:
        return []
    if len(ops) != 1:
        raise ValueError(f"shapes belong to one op, got {len(ops)} ops")
    found = list(shapes) if isinstance(shapes, Iterable) else [shapes]
    if isinstance(shapes, str) or not all(
        isinstance(shape, Sequence) and not isinstance(shape, str) for shape in found
    ):
        raise TypeError(
            f"shapes must be a collection of tuples of ints, such as [(1024, 768)], got "
            f"{checks.brief(shapes)}"
        )
    sizes = [tuple(checks.integer("a size in shapes", n, 0) for n in shape) for shape in found]
    for dims in sizes:
        CASES[ops[0]].check_count(dims)
    return sizes


def _check_dtypes(cases: Sequence[Case], dtypes: Collection[torch.dtype] | None) -> None:
    if dtypes is None:
        return
    if not isinstance(dtypes, Collection) or not all(isinstance(d, torch.dtype) for d in dtypes):
        raise TypeError(f"dtypes must be a collection of torch dtypes or None, got {checks.brief(dtypes)}")
    for dtype in dtypes:
        if not any(dtype in case.op.dtypes for case in cases):
            raise ValueError(
                f"dtypes has {dtype}, but {', '.join(case.name for case in cases)} has no kernels of it"
            )


def _index(device: torch.device | str | int | None) -> int | None:
    """The number of a GPU; None for the current one."""
    if not isinstance(device, str | torch.device):
        return None if device is None else checks.integer("device", device, 0)
    with contextlib.suppress(RuntimeError):  # torch's, for a name that it does not know
        if torch.device(device).type == "cuda":
            return torch.device(device).index
    raise ValueError(f"device must be a GPU, got {str(device)!r}")
