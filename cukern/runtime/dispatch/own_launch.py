"""The raw ops, the autograd Function and the public function of a user's own op; see own_op.py."""

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
from cukern.runtime.dispatch.own_kernels import Config, Configs
from cukern.runtime.dispatch.raw_ops import raw_op
from cukern.runtime.dispatch.versions import choose, in_force
from cukern.runtime.launch import backend, interop
from cukern.runtime.launch.kernel import Kernel, collecting
from cukern.runtime.registry import Tensors

NAMESPACE = f"{__name__.partition('.')[0]}_own"  # in torch.ops
_library = torch.library.Library(NAMESPACE, "DEF")
# by name, how often the op was defined: torch keeps each raw op for the life of the process
_defined: dict[str, int] = {}


Scalar = int | float | bool | None


class Pair(NamedTuple):
    """One version: the functions that launch it, and the least compute capability."""

    forward: Callable[..., Any]
    backward: Callable[..., Any] | None = None
    requires: int = 75


def is_own(name: str) -> bool:
    """True if `cukern.op` defined an op of this name."""
    return name in _defined


@dataclass
class Own:
    """The raw ops, the autograd Function and the public function of one own op."""

    name: str
    inputs: tuple[str, ...]
    constants: tuple[str, ...]
    outputs: int
    source: Path | None  # None: kernels of Triton
    dtypes: tuple[torch.dtype, ...]
    reference: Callable[..., Tensor | Tensors]
    versions: dict[str, Pair]
    scalars: dict[str, Scalar]
    configs: Sequence[Config]

    def __post_init__(self) -> None:
        self.kernels = Configs(self.name, self.source, self.configs)
        self._alone: set[Callable[..., Any]] = set()  # whose results were seen to share no memory
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(x, kind) for x in self.inputs]
        parameters += [inspect.Parameter(x, kind, default=value) for x, value in self.scalars.items()]
        self.signature = inspect.Signature(parameters)
        self._taken = {
            function: _parameters(function)
            for pair in self.versions.values()
            for function in pair[:2]
            if function
        }
        for version, pair in self.versions.items():
            self._check_scalars(version, pair)
        self.newest: Any = list(self.versions.values())[-1]
        self.differentiable = self.newest.backward is not None
        self.kept, self.results = (True,) * len(self.inputs) + (False,) * self.outputs, self.outputs
        if self.differentiable:
            self.kept, self.results = self._signature_of_backward()

    def _signature_of_backward(self) -> tuple[tuple[bool, ...], int]:
        """Which inputs and results some version's backward uses, and the number of results."""
        names = {
            v: [x for x in _parameters(b)[1:] if x not in self.scalars]
            for v, (_, b, _) in self.versions.items()
            if b
        }
        counts = {v: len(one) - len(self.inputs) - self.outputs for v, one in names.items()}
        for version, count in counts.items():
            if count < self.outputs or count != next(iter(counts.values())):
                raise ValueError(
                    f"backward of version {version!r} of {self.name} takes {len(names[version])} tensors "
                    f"({', '.join(names[version])}); "
                    f"it must take the {len(self.inputs)} inputs, at least {self.outputs} results of "
                    f"forward, as many in every version, "
                    f"and {self.outputs} gradients"
                )
        results = next(iter(counts.values()))
        places = range(len(self.inputs) + results)
        return tuple(any(not one[i].startswith("_") for one in names.values()) for i in places), results

    def _check_scalars(self, version: str, pair: Pair) -> None:
        """Raise ValueError unless forward takes all scalars of the reference, and neither function has other
        parameters with a default."""
        for pass_, function in (("forward", pair.forward), ("backward", pair.backward)):
            known = inspect.signature(function).parameters.values() if function and self.scalars else ()
            absent = [x for x in self.scalars if pass_ == "forward" and x not in [p.name for p in known]]
            other = [p.name for p in known if p.default is not p.empty and p.name not in self.scalars]
            where = f"{pass_} of version {version!r} of {self.name}"
            if absent:
                names = ", ".join(self.scalars)
                raise ValueError(
                    f"{where} must take the scalars of reference by their names, {names}: "
                    f"{', '.join(absent)} is missing"
                )
            if other:
                raise ValueError(
                    f"{where} has a default for {', '.join(other)}, which reference does not have"
                )

    def forward(
        self, kernels: Any, function: Callable[..., Any], inputs: Sequence[Tensor], scalars: Sequence[Scalar]
    ) -> list[Tensor]:
        tensors = [x.resolve_neg().contiguous() for x in inputs]
        return self._run("forward", kernels, function, tensors, scalars, self.results)

    def backward(
        self,
        kernels: Any,
        function: Callable[..., Any],
        saved: Sequence[Tensor | None],
        douts: Sequence[Tensor],
        scalars: Sequence[Scalar],
    ) -> list[Tensor]:
        tensors = [None if x is None else x.resolve_neg().contiguous() for x in (*saved, *douts)]
        count = len(self.inputs) - len(self.constants)
        return self._run("backward", kernels, function, tensors, scalars, count)

    def _run(
        self, pass_: str, kernels: Any, function: Callable[..., Any], tensors: Sequence[Tensor | None],
        scalars: Sequence[Scalar], count: int,
    ) -> list[Tensor]:  # fmt: skip
        """The checked results of a function of a version. The last tensor is not None."""
        named, last = self._named(function, scalars), tensors[-1]
        if self.source is None and kernels is not self.kernels.none and last is not None and last.is_cpu:
            with backend.simulated_triton():
                found = function(kernels, *tensors, **named)
        else:
            found = function(kernels, *tensors, **named)
        results = self._checked(pass_, found, count, tensors)
        if function not in self._alone:  # torch.compile relies on it; looked at once, for the host's time
            self._check_memory(pass_, results, tensors)
            self._alone.add(function)
        return results

    def _check_memory(self, pass_: str, results: list[Tensor], given: Sequence[Tensor | None]) -> None:
        """Raise ValueError if results share memory with each other or with an argument."""
        storages = [t.untyped_storage()._cdata for t in results]
        arguments = {x.untyped_storage()._cdata for x in given if x is not None}
        if len({*storages} - arguments) < len(storages):
            raise ValueError(
                f"{pass_} of {self.name} must return tensors that share no memory with each other or with an "
                f"argument: allocate each"
            )

    def _named(self, function: Callable[..., Any], scalars: Sequence[Scalar]) -> dict[str, Scalar]:
        """The scalars that a function of a version takes, by name. They are the last arguments of the raw
        ops."""
        if not self.scalars:
            return {}
        taken = self._taken[function]
        return {x: value for x, value in zip(self.scalars, scalars, strict=True) if x in taken}

    def _no_backward(self, *_: Any) -> list[Tensor]:
        raise NotImplementedError(
            f"cukern.op {self.name!r} has no backward: call it under torch.no_grad(), name the inputs "
            f"without a gradient in constants=, or "
            "give its versions a backward"
        )

    def _checked(self, pass_: str, found: Any, count: int, given: Sequence[Tensor | None]) -> list[Tensor]:
        tensors = list(as_tuple(found))
        if len(tensors) != count:
            raise ValueError(f"{pass_} of {self.name} must return {count} tensors, got {len(tensors)}")
        for t in tensors:
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{pass_} of {self.name} must return tensors, got "
                    f"{', '.join(type(t).__name__ for t in tensors)}"
                )
            if any(t is x for x in given):
                raise ValueError(f"{pass_} of {self.name} must return new tensors, got one of its arguments")
        return tensors

    def instances(self, version: str, cases: Sequence[Tensors]) -> list[Kernel]:
        """The kernels that a version launches for these inputs, which may be on the meta device."""
        forward, backward, _ = self.versions[version]
        scalars = tuple(self.scalars.values())
        device = torch.cuda.current_device() if torch.cuda.is_available() else backend.SIMULATED
        with collecting() as found, torch.no_grad():
            for inputs in cases:
                kernels = self.kernels.on(device)
                results = self.forward(kernels, forward, inputs, scalars)
                if backward:
                    douts = [torch.empty_like(y) for y in results[: self.outputs]]
                    self.backward(kernels, backward, (*inputs, *results), douts, scalars)
        return list(found.values())

    def _raw(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        def forward_of(version: str, x: Tensor) -> Callable[..., Any]:
            return self.versions[choose(self.name, version, x.get_device()).forward].forward

        def backward_of(version: str, x: Tensor) -> Any:
            return self.versions[choose(self.name, version, x.get_device()).backward].backward

        again = _defined[self.name] = _defined.get(self.name, 0) + 1
        mark = f"_{again}" if again > 1 else ""
        count, last = len(self.inputs), "".join(f", Scalar? {x}" for x in self.scalars)
        on, shapes_only = self.kernels.on, self.kernels.none
        forward = raw_op(
            f"{self.name}{mark}({', '.join(f'Tensor {x}' for x in self.inputs)}, str version{last}) "
            f"-> Tensor[]", count,
            lambda *args: self.forward(
                on(args[0].get_device()), forward_of(args[count], args[0]), args[:count], args[count + 1 :]
            ),
            lambda *args: self.forward(shapes_only, self.newest.forward, args[:count], args[count + 1 :]),
            _library,
        )  # fmt: skip
        schema = f"{self.name}_backward{mark}(Tensor[] douts, Tensor?[] saved, str version{last}) -> Tensor[]"
        backward = raw_op(
            schema, 2,
            lambda douts, saved, version, *scalars: self.backward(
                on(douts[0].get_device()), backward_of(version, douts[0]), saved, douts, scalars
            ),
            lambda douts, saved, version, *scalars: self.backward(shapes_only, self.newest.backward, saved,
                                                                  douts, scalars), _library,
        ) if self.differentiable else raw_op(
            schema, 2,
            lambda douts, saved, version, *_: self._no_backward(),
            lambda douts, saved, version, *_: [
                torch.empty_like(saved[i]) for i, x in enumerate(self.inputs) if x not in self.constants
            ],
            _library,
        )  # fmt: skip
        return forward, backward

    def function(self) -> Callable[..., Any]:
        """Register the raw ops. Returns the public function."""
        raw, raw_backward = self._raw()
        apply = self._autograd(raw, raw_backward)
        name, outputs, reference, versions = self.name, self.outputs, self.reference, tuple(self.versions)
        backward, variables = (
            self.differentiable,
            [i for i, x in enumerate(self.inputs) if x not in self.constants],
        )

        def call(*inputs: Any, version: str | None = None, **named: Any) -> Any:
            tensors, scalars = self.arguments(inputs, named)
            checks.version(name, version, versions)
            recorded = watched(*(tensors if backward else [tensors[i] for i in variables]))
            if backend.uses_torch(name, version, tensors[0]):
                with autocast.off(tensors[0]):
                    if backward or not recorded or transformed():
                        return reference(*tensors, *scalars)
                    results = apply(None, *tensors, *scalars)
                    return results[0] if outputs == 1 else results
            if recorded:
                results = apply(version or in_force.now, *tensors, *scalars)
            else:  # a constant that requires a gradient has none
                results = raw(
                    *[x.detach() if x.requires_grad else x for x in tensors],
                    version or in_force.now,
                    *scalars,
                )
            return results[0] if outputs == 1 else tuple(results[:outputs])

        call.__name__ = call.__qualname__ = name
        call.__doc__ = reference.__doc__
        call.own = self  # type: ignore[attr-defined]
        return call

    def _autograd(self, raw: Callable[..., Any], raw_backward: Callable[..., Any]) -> Callable[..., Any]:
        op, outputs, kept, count, reference = (
            self.name,
            self.outputs,
            self.kept,
            len(self.inputs),
            self.reference,
        )
        gradients = [i for i, name in enumerate(self.inputs, 1) if name not in self.constants]
        tensors = outputs + len(kept)  # the arguments of the backward before the version and the scalars

        def plain_backward(*args):
            return tuple(raw_backward(list(args[:outputs]), list(args[outputs:tensors]), *args[tensors:]))

        def no_math(*_):
            raise NotImplementedError(
                f"{op} has no second derivatives: its backward is a kernel without a backward"
            )

        # Only so that torch.func transforms may contain the backward pass.
        apply_backward = differentiable(f"{op}_backward", plain_backward, no_math, tensors, len(gradients))

        class Forward(Differentiable):
            @staticmethod
            def forward(version, *args):
                return (
                    as_tuple(reference(*args))
                    if version is None
                    else tuple(raw(*args[:count], version, *args[count:]))
                )

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.last = inputs[0] or "", *inputs[count + 1 :]
                ctx.mark_non_differentiable(*output[outputs:])
                save(
                    ctx,
                    *[
                        x if keep else None
                        for x, keep in zip((*inputs[1 : count + 1], *output), kept, strict=True)
                    ],
                )

            @staticmethod
            def backward(ctx, *douts):
                # torch.compile does not trace a Function inside the backward of another
                given = (*douts[:outputs], *ctx.saved_tensors)
                backward = (
                    plain_backward
                    if torch.compiler.is_dynamo_compiling() or not watched(*given)
                    else apply_backward
                )
                grads, needed = [None] * (count + len(ctx.last)), ctx.needs_input_grad
                for i, grad in zip(gradients, backward(*given, *ctx.last), strict=True):
                    grads[i] = grad if needed[i] else None
                return tuple(grads)

            @staticmethod
            def batch(info, in_dims, *args):
                return each(apply, info.batch_size, in_dims, args)

        apply = apply_of(Forward)
        return apply

    def arguments(
        self, inputs: Sequence[Any], named: dict[str, Any]
    ) -> tuple[list[Tensor], tuple[Scalar, ...]]:
        """The inputs and the scalars of a call in their order, checked. Raises TypeError and ValueError."""
        count, scalars = len(self.inputs), tuple(self.scalars.values())
        if named or len(inputs) != count:
            try:
                bound = self.signature.bind(*inputs, **named)
            except TypeError as error:
                defaults = "".join(f", {x}={value}" for x, value in self.scalars.items())
                raise TypeError(
                    f"{self.name}({', '.join(self.inputs)}{defaults}, *, version=None): {error}"
                ) from None
            bound.apply_defaults()
            inputs, scalars = bound.args[:count], bound.args[count:]
            for name, value in zip(self.scalars, scalars, strict=True):
                if not isinstance(value, int | float | None | torch.SymInt | torch.SymFloat | torch.SymBool):
                    raise TypeError(
                        f"{self.name}: {name} must be an int, a float, a bool or None, got "
                        f"{checks.brief(value)}"
                    )
        tensors = [
            x if isinstance(x, Tensor) else interop.to_torch(n, x)
            for n, x in zip(self.inputs, inputs, strict=True)
        ]
        for name, x in zip(self.inputs, tensors, strict=True):
            if x.is_floating_point():
                checks.dtype(name, x, self.dtypes)
            elif name not in self.constants and self.differentiable:
                raise TypeError(
                    f"{self.name}: {name} is {x.dtype}, which has no gradient: name it in constants="
                )
        if len(tensors) > 1:
            checks.one_device(**dict(zip(self.inputs, tensors, strict=True)))
        return tensors, scalars


def _parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def as_tuple(found: Any) -> tuple[Any, ...]:
    return tuple(found) if isinstance(found, tuple | list) else (found,)
