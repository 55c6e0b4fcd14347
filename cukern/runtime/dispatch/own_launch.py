"""The raw ops, the autograd Function and the public function of a user's own op; see own_op.py."""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cukern.runtime import checks
from cukern.runtime.dispatch import autocast
from cukern.runtime.dispatch.autograd import Differentiable, apply_of, each, save, transformed, watched
from cukern.runtime.dispatch.higher import differentiable
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, collecting, cpp, planning
from cukern.runtime.launch.load import load
from cukern.runtime.registry import Tensors

NAMESPACE = "cukern_own"  # in torch.ops
_library = torch.library.Library(NAMESPACE, "DEF")
_defined: dict[str, int] = {}  # by name, how often the op was defined: torch keeps each raw op for the life of the process


class Pair(NamedTuple):
    """One version: the functions that launch it, and the least compute capability."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    requires: int = 75


def is_own(name: str) -> bool:
    """True if `cukern.op` defined an op of this name."""
    return name in _defined


def _kernels(source: Path) -> Callable[..., Callable[..., None]]:
    """The kernels of a .cu file by name and template arguments, as forward and backward of a version get them."""

    @functools.lru_cache(None, typed=True)
    def launcher(name: str, *arguments: Any) -> Callable[..., None]:
        return _launcher(load(source, f"{name}<{', '.join(map(cpp, arguments))}>" if arguments else name))

    return launcher


def _launcher(kernel: Kernel) -> Callable[..., None]:
    def launch(*args: Any, grid: Any, block: Any, shared: int = 0) -> None:
        if kernel.quick(args, grid, block, shared):
            return
        if planning():
            kernel.on(backend.SIMULATED)  # only lists the kernel
        elif grid != 0 and not (isinstance(grid, tuple | list) and 0 in grid):
            kernel(*args, grid=grid, block=block, shared=shared)

    return launch


def _no_kernels(*_: Any) -> Callable[..., None]:
    """In place of the kernels, for fake tensors: launches nothing."""
    return lambda *args, **options: None


@dataclass
class Own:
    """The raw ops, the autograd Function and the public function of one own op."""

    name: str
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: int
    source: Path
    dtypes: tuple[torch.dtype, ...]
    reference: Callable[..., Tensor | Tensors]
    versions: dict[str, Pair]

    def __post_init__(self) -> None:
        self.kernels = _kernels(self.source)
        self.signature = inspect.Signature([inspect.Parameter(x, inspect.Parameter.POSITIONAL_OR_KEYWORD) for x in self.inputs])
        self.newest: Any = list(self.versions.values())[-1]
        self.differentiable = self.newest.backward is not None
        self.kept, self.results = (True,) * len(self.inputs) + (False,) * self.outputs, self.outputs
        if self.differentiable:
            self.kept, self.results = self._signature_of_backward()

    def _signature_of_backward(self) -> tuple[tuple[bool, ...], int]:
        """Which inputs and results some version's backward uses, and the number of results."""
        names = {v: list(inspect.signature(b).parameters)[1:] for v, (_, b, _) in self.versions.items() if b}
        counts = {v: len(one) - len(self.inputs) - self.outputs for v, one in names.items()}
        for version, count in counts.items():
            if count < self.outputs or count != next(iter(counts.values())):
                raise ValueError(
                    f"backward of version {version!r} of {self.name} takes {len(names[version])} tensors ({', '.join(names[version])}); "
                    f"it must take the {len(self.inputs)} inputs, at least {self.outputs} results of forward, as many in every version, "
                    f"and {self.outputs} gradients"
                )
        results = next(iter(counts.values()))
        places = range(len(self.inputs) + results)
        return tuple(any(not one[i].startswith("_") for one in names.values()) for i in places), results

    def forward(self, kernels: Any, function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
        tensors = [x.resolve_neg().contiguous() for x in inputs]
        return self._checked("forward", function(kernels, *tensors), self.results, tensors)

    def backward(self, kernels: Any, function: Callable[..., Any], saved: Sequence[Tensor | None], douts: Sequence[Tensor]) -> list[Tensor]:
        tensors = [None if x is None else x.resolve_neg().contiguous() for x in (*saved, *douts)]
        return self._checked("backward", function(kernels, *tensors), len(self.inputs) - len(self.constants), tensors)

    def _no_backward(self, *_: Any) -> list[Tensor]:
        raise NotImplementedError(
            f"cukern.op {self.name!r} has no backward: call it under torch.no_grad(), name the inputs without a gradient in constants=, or "
            "give its versions a backward"
        )

    def _checked(self, pass_: str, found: Any, count: int, given: Sequence[Tensor | None]) -> list[Tensor]:
        tensors = list(as_tuple(found))
        if len(tensors) != count:
            raise ValueError(f"{pass_} of {self.name} must return {count} tensors, got {len(tensors)}")
        for t in tensors:
            if not isinstance(t, Tensor):
                raise TypeError(f"{pass_} of {self.name} must return tensors, got {', '.join(type(t).__name__ for t in tensors)}")
            if any(t is x for x in given):
                raise ValueError(f"{pass_} of {self.name} must return new tensors, got one of its arguments")
        return tensors

    def instances(self, version: str, cases: Sequence[Tensors]) -> list[Kernel]:
        """The kernels that a version launches for these inputs, which may be on the meta device."""
        forward, backward, _ = self.versions[version]
        with collecting() as found, torch.no_grad():
            for inputs in cases:
                results = self.forward(self.kernels, forward, inputs)
                if backward:
                    self.backward(self.kernels, backward, (*inputs, *results), [torch.empty_like(y) for y in results[: self.outputs]])
        return list(found.values())

    def _raw(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def forward_of(version: str, x: Tensor) -> Callable[..., Any]:
            return self.versions[choose(self.name, version, x.get_device()).forward].forward

        def backward_of(version: str, x: Tensor) -> Any:
            return self.versions[choose(self.name, version, x.get_device()).backward].backward

        again = _defined[self.name] = _defined.get(self.name, 0) + 1
        mark = f"_{again}" if again > 1 else ""
        schema = f"{self.name}{mark}({', '.join(f'Tensor {x}' for x in self.inputs)}, str version) -> Tensor[]"
        forward = raw_op(
            schema, len(self.inputs),
            lambda *args: self.forward(self.kernels, forward_of(args[-1], args[0]), args[:-1]),
            lambda *args: self.forward(_no_kernels, self.newest.forward, args[:-1]), _library,
        )  # fmt: skip
        backward = raw_op(
            f"{self.name}_backward{mark}(Tensor[] douts, Tensor?[] saved, str version) -> Tensor[]", 2,
            lambda douts, saved, version: self.backward(self.kernels, backward_of(version, douts[0]), saved, douts),
            lambda douts, saved, version: self.backward(_no_kernels, self.newest.backward, saved, douts), _library,
        ) if self.differentiable else raw_op(
            f"{self.name}_backward{mark}(Tensor[] douts, Tensor?[] saved, str version) -> Tensor[]", 2,
            lambda douts, saved, version: self._no_backward(),
            lambda douts, saved, version: [torch.empty_like(saved[i]) for i, x in enumerate(self.inputs) if x not in self.constants],
            _library,
        )  # fmt: skip
        return forward, backward

    def function(self) -> Callable[..., Any]:
        """Register the raw ops. Returns the public function."""
        raw, raw_backward = self._raw()
        apply = self._autograd(raw, raw_backward)
        name, outputs, reference, versions = self.name, self.outputs, self.reference, tuple(self.versions)
        backward, variables = self.differentiable, [i for i, x in enumerate(self.inputs) if x not in self.constants]

        def call(*inputs: Any, version: str | None = None, **named: Any) -> Any:
            tensors = self.tensors(inputs, named)
            checks.version(name, version, versions)
            recorded = watched(*(tensors if backward else [tensors[i] for i in variables]))
            if backend.uses_torch(name, version, tensors[0]):
                with autocast.off(tensors[0]):
                    if backward or not recorded or transformed():
                        return reference(*tensors)
                    results = apply(None, *tensors)
                    return results[0] if outputs == 1 else results
            if recorded:
                results = apply(version or in_force.now, *tensors)
            else:  # a constant that requires a gradient has none
                results = raw(*[x.detach() if x.requires_grad else x for x in tensors], version or in_force.now)
            return results[0] if outputs == 1 else tuple(results[:outputs])

        call.__name__ = call.__qualname__ = name
        call.__doc__ = reference.__doc__
        return call

    def _autograd(self, raw: Callable[..., Any], raw_backward: Callable[..., Any]) -> Callable[..., Any]:
        op, outputs, kept, count, reference = self.name, self.outputs, self.kept, len(self.inputs), self.reference
        gradients = [i for i, name in enumerate(self.inputs, 1) if name not in self.constants]

        def plain_backward(*args):
            return tuple(raw_backward(list(args[:outputs]), list(args[outputs:-1]), args[-1]))

        def no_math(*_):
            raise NotImplementedError(f"{op} has no second derivatives: its backward is a kernel without a backward")

        # Only so that torch.func transforms may contain the backward pass.
        apply_backward = differentiable(f"{op}_backward", plain_backward, no_math, outputs + len(kept), len(gradients))

        class Forward(Differentiable):
            @staticmethod
            def forward(version, *inputs):
                return as_tuple(reference(*inputs)) if version is None else tuple(raw(*inputs, version))

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.version = inputs[0] or ""
                ctx.mark_non_differentiable(*output[outputs:])
                save(ctx, *[x if keep else None for x, keep in zip((*inputs[1:], *output), kept, strict=True)])

            @staticmethod
            def backward(ctx, *douts):
                # torch.compile does not trace a Function inside the backward of another
                tensors = (*douts[:outputs], *ctx.saved_tensors)
                backward = plain_backward if torch.compiler.is_dynamo_compiling() or not watched(*tensors) else apply_backward
                grads, needed = [None] * (count + 1), ctx.needs_input_grad
                for i, grad in zip(gradients, backward(*tensors, ctx.version), strict=True):
                    grads[i] = grad if needed[i] else None
                return tuple(grads)

            @staticmethod
            def batch(info, in_dims, *args):
                return each(apply, info.batch_size, in_dims, args)

        apply = apply_of(Forward)
        return apply

    def tensors(self, inputs: Sequence[Any], named: dict[str, Any]) -> list[Tensor]:
        """The inputs of a call in their order, checked. Raises TypeError and ValueError."""
        if named or len(inputs) != len(self.inputs):
            try:
                inputs = self.signature.bind(*inputs, **named).args
            except TypeError as error:
                raise TypeError(f"{self.name}({', '.join(self.inputs)}, *, version=None): {error}") from None
        tensors = [x if isinstance(x, Tensor) else interop.to_torch(n, x) for n, x in zip(self.inputs, inputs, strict=True)]
        for name, x in zip(self.inputs, tensors, strict=True):
            if x.is_floating_point():
                checks.dtype(name, x, self.dtypes)
            elif name not in self.constants and self.differentiable:
                raise TypeError(f"{self.name}: {name} is {x.dtype}, which has no gradient: name it in constants=")
        if len(tensors) > 1:
            checks.one_device(**dict(zip(self.inputs, tensors, strict=True)))
        return tensors


def as_tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)
