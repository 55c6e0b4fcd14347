"""The cache of plans: what a call launches, by the layouts of its tensors, its options, and the settings in
force.

A call is a plan's worth of Python: checks, choice of kernels, sizes. The first call of a layout runs it. The
second and the third record it (recording.py). If both did the same, later calls replay the record: a lookup,
allocations, launches.

`planned` does this for a public function, `planned_launch` for the implementation of a raw op,
`planned_backward` for the backward of an autograd Function, whose forward is part of the record of the public
function. Plans belong to one current device, on which a replay allocates. A call takes the function itself in
torch.compile, under dispatch modes, in torch.func transforms, for tensor subclasses, and for CPU tensors
outside of the simulator.
"""

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from cukern.runtime import checks
from cukern.runtime.compile.forks import no_fork
from cukern.runtime.device import versions_in_force, when_plans_change
from cukern.runtime.launch import backend, driver
from cukern.runtime.recording import ALIGNMENT, Recorder, local
from cukern.runtime.replay import STALE, compiled

MOST = 4096  # plans of a function; the oldest are forgotten
_ENABLED = os.environ.get("CUKERN_REPLAY", "1") != "0" and not (driver.SYNC or driver.NVTX)
_Function = TypeVar("_Function", bound=Callable[..., Any])

_LAYOUT = (
    f"{{t}}.shape, {{t}}.stride(), {{t}}.dtype, {{t}}.device, {{t}}.data_ptr() % {ALIGNMENT}, {{t}}.is_neg()"
)
_SETTINGS = "versions(), deterministic(), autocast() and autocast_dtype()"
_DEVICE = "current() if {t}.get_device() >= 0 else "
_EAGER = "modes() or transforms() or forward_ad._current_level >= 0 or "


def _on_cpu() -> bool:
    """True for a call whose CPU tensors are simulated. Raises LookupError if a call for CPU tensors is not
    replayed."""
    if not backend.simulating() or torch.is_autocast_enabled("cpu"):
        raise LookupError
    return True


_NAMES: dict[str, Any] = {
    "Function": FunctionType,
    "STALE": STALE,
    "autocast": torch.is_autocast_enabled,
    "autocast_dtype": lambda: torch.get_autocast_dtype("cuda"),
    "cpu_autocast": lambda: torch.is_autocast_enabled("cpu"),
    "current": driver.current_device,
    "deterministic": torch.are_deterministic_algorithms_enabled,
    "forward_ad": forward_ad,
    "grad_enabled": torch.is_grad_enabled,
    # an iterator is not used up for a key
    "listed": lambda given: given if type(given) in (list, tuple) else None,
    "local": local,
    "modes": torch._C._len_torch_dispatch_stack,
    "on_cpu": _on_cpu,
    "tracing": torch.compiler.is_dynamo_compiling,
    "transforms": torch._C._are_functorch_transforms_active,
    "versions": versions_in_force.get,
}
_SOURCE = f"""
def planned({{signature}}):
    {{first}}
    if {{aside}}local.recorder is not None:
        return function({{call}})
    key = plan = None
    try:
        key = ({{key}}, {_SETTINGS}, {{layouts}}{{options}})
        plan = get(key)
    except Exception:  # such as an argument of another type: the function raises what is to be said
        return function({{call}})
    if type(plan) is Function:
        result = plan({{tensors}})
        return result if result is not STALE else function({{call}})
    return learn(key, ({{tensors}}), {{call}})
"""

_all: list["Plans"] = []


class Plans:
    """The plans of one function: by key None after one call, a Program after two, then the function that
    replays it, or False."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.found: dict[Any, Any] = {}
        self.why: dict[Any, str] = {}  # a call is not replayed
        self.lock = threading.Lock()
        _all.append(self)
        when_plans_change(self.found.clear)

    def learn(self, key: Any, inputs: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        """Makes the call, and records it if it is not the first of this layout."""
        state = self.found.get(key, self)
        if state is False or not _recordable(inputs):
            return self.function(*arguments, **options)
        if state is self:
            self._remember(key, None)
            return self.function(*arguments, **options)
        inputs, arguments, options = _distinct(inputs, arguments, options)
        recorder = Recorder(inputs)
        try:
            with recorder:
                result = self.function(*arguments, **options)
            program = recorder.program(result)
        finally:
            recorder.release()
        if recorder.failed or (state is not None and program != state):
            self.why = {**dict(list(self.why.items())[-63:]), key: recorder.failed or "two calls differ"}
            self._remember(key, False)
        else:
            self._remember(key, program if state is None else compiled(program, len(inputs)))
        return result

    def _remember(self, key: Any, state: Any) -> None:
        with no_fork(), self.lock:
            if key not in self.found and len(self.found) >= MOST:
                del self.found[next(iter(self.found))]
            self.found[key] = state


def _recordable(inputs: Sequence[Any]) -> bool:
    """True for plain tensors on the current GPU, or in the simulator."""
    devices = {t.get_device() for t in inputs if t is not None}
    plain = all(t is None or type(t) in checks.PLAIN for t in inputs)
    return plain and len(devices) == 1 and (devices == {-1} or devices == {driver.current_device()})


def _distinct(
    inputs: Sequence[Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any, Any]:
    """The same with another object for each further use of a tensor, so that the uses can be told apart."""
    replaced: list[Any] = []
    for t in inputs:
        replaced.append(t if t is None or not any(t is r for r in replaced) else t.view_as(t))
    fresh = iter([t for t in replaced if t is not None])
    wanted = {id(t) for t in inputs if t is not None}
    return (
        replaced,
        _changed(arguments, wanted, fresh),
        {n: _changed(value, wanted, fresh) for n, value in options.items()},
    )


def _changed(value: Any, wanted: set[int], fresh: Iterator[Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_changed(v, wanted, fresh) for v in value)
    return next(fresh) if id(value) in wanted else value


def planned(*tensors: str) -> Callable[[_Function], _Function]:
    """Plans a public function. `tensors`: the names of its tensors in the order of the signature, "name[]"
    for a list. They may be None, but for the first. All other arguments are options."""

    def decorate(function: _Function) -> _Function:
        if not _ENABLED:
            return function
        names = {t.removesuffix("[]") for t in tensors}
        space: dict[str, Any] = {}
        signature, call, options = [], [], []
        for name, p in inspect.signature(function).parameters.items():
            if p.kind is p.KEYWORD_ONLY and "*" not in signature:
                signature.append("*")
            space[f"default_{name}"] = p.default
            signature.append(name if p.default is p.empty else f"{name}=default_{name}")
            call.append(f"{name}={name}" if p.kind is p.KEYWORD_ONLY else name)
            options += [f"type({name}), {name}, "] * (name not in names)
        source = _SOURCE.format(
            signature=", ".join(signature), call=", ".join(call), tensors=_flat(tensors), first="",
            aside="tracing() or " + _EAGER, key=f"{_DEVICE.format(t=tensors[0])}on_cpu(), grad_enabled()",
            layouts=_layouts(tensors, "type({t}), {t}.requires_grad, "), options="".join(options),
        )  # fmt: skip
        return functools.wraps(function)(_made(source, Plans(function), space))  # type: ignore[return-value]

    return decorate


def planned_launch(function: Callable[..., Any], tensors: Sequence[str]) -> Callable[..., Any]:
    """Plans the implementation of a raw op. `tensors`: the names of its arguments that are tensors, as in
    `planned`. They come first."""
    if not _ENABLED:
        return function
    return _made(_raw_code(tuple(t.endswith("[]") for t in tensors)), Plans(function), {})


@functools.cache
def _raw_code(lists: tuple[bool, ...]) -> CodeType:
    tensors = [f"t{i}[]" if is_list else f"t{i}" for i, is_list in enumerate(lists)]
    call = "".join(f"t{i}, " for i in range(len(lists))) + "*rest"
    source = _SOURCE.format(
        signature=call, call=call, tensors=_flat(tensors), first="", aside="",
        key=_DEVICE.format(t="t0[0]" if lists[0] else "t0") + "cpu_autocast()", layouts=_layouts(tensors),
        options="rest",
    )  # fmt: skip
    return compile(source, "<cukern plans>", "exec")


def planned_backward(function: Callable[..., Any]) -> Callable[[int, int], Callable[..., Any]]:
    """Plans the backward of an autograd Function, `function(ctx, saved tensors, upstream gradients)`. The
    class of the context stands for what the forward decided. The result gives `apply(ctx, *upstream
    gradients)` for a number of saved tensors and of upstream gradients."""
    plans = Plans(function)

    @functools.cache
    def apply(saved: int, douts: int) -> Callable[..., Any]:
        head, tail = (
            "".join(f"{letter}{i}, " for i in range(n)) for letter, n in (("s", saved), ("d", douts))
        )
        source = _SOURCE.format(
            signature=f"ctx, {tail}", call=f"ctx, saved, ({tail})", tensors=head + tail,
            first=f"saved = ({head}) = ctx.saved_tensors", aside="grad_enabled() or " + _EAGER,
            key=f"type(ctx), {_DEVICE.format(t='s0' if saved else 'd0')}cpu_autocast()",
            layouts=_layouts((head + tail).split(", ")[:-1], "type({t}), "), options="",
        )  # fmt: skip
        return _made(source, plans, {})

    return apply


def _made(source: str | CodeType, plans: Plans, space: dict[str, Any]) -> Callable[..., Any]:
    space |= {**_NAMES, "function": plans.function, "get": plans.found.get, "learn": plans.learn}
    exec(source, space)
    space["planned"].plans = plans
    return space["planned"]


def _layouts(tensors: Sequence[str], more: str = "") -> str:
    """Expressions for the part of a key that describes the tensors."""
    found = []
    for t in tensors:
        name = t.removesuffix("[]")
        one = (more + _LAYOUT).format(t="one" if t.endswith("[]") else name)
        if t.endswith("[]"):
            found.append(f"tuple([({one}) for one in listed({name})]), ")
        else:
            found.append(f"None if {name} is None else ({one}), ")
    return "".join(found)


def _flat(tensors: Sequence[str]) -> str:
    return "".join(f"*{t[:-2]}, " if t.endswith("[]") else f"{t}, " for t in tensors)


def every() -> list["Plans"]:
    return _all
